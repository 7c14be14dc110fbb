"""Cases for any instruction, made from its declaration alone: shapes, attributes and data.

Dims are drawn from a few awkward sizes; what a requirement or an operand's ``below`` ties together
is tied. A draw that the declaration refuses is drawn again.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from accelvisor.abi.shapes import Bindings, bind_shapes, build, evaluate, parse, parse_requirement
from accelvisor.errors import ProgramError
from accelvisor.kernels.declare import Access, Array, Instruction
from accelvisor.kernels.registry import BY_NAME

SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 7, 8, 9, 13)
STARS = ((), (1,), (3,), (0,), (17,), (2, 3), (5, 1), (2, 0, 3), (2, 2, 2, 2), (29,), (5, 7))
ATTRIBUTE_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 0.1, -2.75, 3.0e-5, 1.0e3)

# normal: what networks see; special: what IEEE 754 has beside numbers; huge: sums that overflow
KINDS = ("normal", "special", "huge")


@dataclass(frozen=True)
class Case:
    """Arrays in operand order (outputs hold a poison), attributes as values."""

    instruction: Instruction
    arrays: tuple[Array, ...]
    values: tuple[Any, ...]
    named: dict[str, Any]
    kind: str

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [a.shape for a in self.arrays]

    def outputs(self, arrays: list[Array]) -> list[Array]:
        return [arrays[i] for i in self.instruction.writes]

    def fresh(self, poison: int = 0xA5, shift: int = 0, writable: bool = False) -> list[Array]:
        """Copies to run on: outputs full of ``poison`` bytes, memory ``shift`` elements past a
        64-byte line, inputs read-only unless ``writable``.
        """
        copies = []
        for i, array in enumerate(self.arrays):
            copy = place(array, shift)
            if i in self.instruction.writes:
                copy.reshape(-1).view(np.uint8)[...] = poison
            else:
                copy.flags.writeable = writable
            copies.append(copy)
        return copies


def place(array: Array, shift: int) -> Array:
    """A contiguous copy whose address is ``shift`` elements past a 64-byte line."""
    room = np.empty(array.nbytes + 128 + shift * array.itemsize, np.uint8)
    start = -room.ctypes.data % 64 + shift * array.itemsize
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def cases(instruction: Instruction, count: int, seed: int = 0, **fixed: Any) -> list[Case]:
    """``count`` cases; ``fixed`` sets dims or attributes by name."""
    rng = random.Random(f"{instruction.name}/{seed}")
    found: list[Case] = []
    for _ in range(count * 400):
        if len(found) == count:
            return found
        try:
            found.append(_case(instruction, rng, KINDS[len(found) % len(KINDS)], fixed))
        except ProgramError:
            continue
    if found:
        return found
    raise AssertionError(f"no case of {instruction.name} fits its declaration")


def _case(instruction: Instruction, rng: random.Random, kind: str, fixed: dict[str, Any]) -> Case:
    named = {a.name: fixed.get(a.name, _attribute(a, rng)) for a in instruction.attributes}
    bindings = Bindings({k: v for k, v in named.items() if isinstance(v, int)})
    for operand in instruction.operands:
        for dim in parse(operand.shape).dims:
            if dim.kind == "star" and dim.text not in bindings.stars:
                _star(bindings, dim.text, rng.choice(STARS))
            elif dim.kind == "name":
                size = fixed.get(dim.text, rng.choice(SIZES))
                bindings.numbers.setdefault(dim.text, size)
    for requirement in instruction.requires:
        _tie(requirement, bindings)
    shapes = [
        build(parse(operand.shape), bindings, operand.name) for operand in instruction.operands
    ]
    bind_shapes(instruction.declaration, shapes, named)
    arrays: list[Array] = []
    kinds: dict[str, Any] = {}
    for operand, shape in zip(instruction.operands, shapes, strict=True):
        label = kinds[operand.like] if operand.like else rng.choice(operand.dtypes).label
        kinds[operand.name] = label
        if operand.access is Access.WRITE:
            arrays.append(np.zeros(shape, label))
            continue
        below = bindings.numbers[operand.below] if operand.below else None
        if below == 0 and 0 not in shape:
            raise ProgramError("no index fits an empty axis")
        arrays.append(data(rng, shape, np.dtype(label), kind, below))
    _fill_packed(instruction, arrays, named)
    values = tuple(named[a.name] for a in instruction.attributes)
    return Case(instruction, tuple(arrays), values, named, kind)


def _fill_packed(instruction: Instruction, arrays: list[Array], named: dict[str, Any]) -> None:
    """What an instruction reads packed, is packed: any other bytes are a fault."""
    if instruction.name in ("zvc_hop", "zvc_unpack"):
        n, block = arrays[1].size, named["block"]
        x = arrays[0][:n].copy()
        x[::3] = 0
        arrays[0] = np.zeros_like(arrays[0])
        pack = BY_NAME["zvc_pack"]
        pack.run_reference([x, arrays[0]], (-1, -1, named["bfloat16"], block))


def _attribute(attribute: Any, rng: random.Random) -> Any:
    if attribute.type == "float":
        return rng.choice(ATTRIBUTE_FLOATS)
    return rng.randint(attribute.minimum, min(attribute.maximum, attribute.minimum + 12))


def _star(bindings: Bindings, name: str, dims: tuple[int, ...]) -> None:
    bindings.stars[name] = dims
    bindings.numbers["#" + name] = int(np.prod(dims))


def _tie(requirement: str, bindings: Bindings) -> None:
    """Make ``name == expr`` and ``#a == #b`` hold; other requirements are left to chance."""
    operator, left, right = parse_requirement(requirement)
    if operator != "==" or left[0] != "name":
        return
    if left[1][0] == "#" and right[0] == "name":
        _star(bindings, right[1][1:], bindings.stars[left[1][1:]][::-1])
    elif re.match(r"[a-z]", left[1]):
        bindings.numbers[left[1]] = evaluate(right, bindings)


def data(
    rng: random.Random, shape: tuple[int, ...], dtype: np.dtype[Any], kind: str, below: int | None
) -> Array:
    """Numbers of ``dtype``: indices below ``below``, else by ``kind``."""
    source = np.random.default_rng(rng.getrandbits(64))
    if below is not None:
        return source.integers(0, max(1, below), shape).astype(dtype)
    if dtype.kind == "b":
        return source.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if kind == "huge":
            return source.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        return source.integers(max(-9, limits.min), 10, shape).astype(dtype)
    limits = np.finfo(dtype)
    values = source.standard_normal(shape) * 3
    if kind == "special":
        pool = [np.nan, np.inf, -np.inf, 0.0, -0.0, limits.tiny / 4, -limits.tiny / 2, 1.0, -1.0]
        values = np.where(source.random(shape) < 0.3, source.choice(pool, shape), values)
    elif kind == "huge":
        pool = [limits.max, -limits.max, limits.max / 3, limits.tiny, 1e4, -1e4, 88.0, -88.0, 1.0]
        values = np.where(source.random(shape) < 0.5, source.choice(pool, shape), values)
    return values.astype(dtype)
