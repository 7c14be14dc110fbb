"""The instruction set as a whole: what its declarations must keep to, and its documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelvisor.abi.attributes import from_description, pack, unpack
from accelvisor.abi.shapes import parse, parse_requirement
from accelvisor.kernels import registry
from accelvisor.kernels.declare import Access, Instruction
from accelvisor.kernels.document import render
from accelvisor.kernels.registry import BY_NAME, INSTRUCTIONS, describe
from accelvisor.limits import LIMITS

EVERY = pytest.mark.parametrize("instruction", INSTRUCTIONS.values(), ids=lambda i: i.name)
ROOT = Path(__file__).parents[2]

# Programs are kept and moved between hosts: a number never changes its meaning.
PINNED = {
    "copy": 0x0001, "fill": 0x0002, "cast": 0x0003, "gather_rows": 0x0007, "relu": 0x0102,
    "exp": 0x0103, "add": 0x0120, "sub": 0x0121, "mul": 0x0122, "div": 0x0123, "maximum": 0x0124,
    "minimum": 0x0125, "add_row": 0x0130, "mul_column": 0x0142, "mul_scalar": 0x0152,
    "sum_last": 0x0200, "argmax_last": 0x0203, "sum_rows": 0x0210, "sum_channels": 0x0220,
    "mean_all": 0x0231, "matmul": 0x0300, "matmul_nt": 0x0301, "matmul_tn": 0x0302,
    "matmul_bias": 0x0303, "conv2d": 0x0310, "maxpool2d": 0x0320, "softmax": 0x0400,
    "softmax_cross_entropy": 0x0401, "relu_backward": 0x0410, "axpy": 0x0420, "sgd": 0x0421,
    "sgd_momentum": 0x0422,
}  # fmt: skip


def test_opcodes_keep_their_meaning() -> None:
    assert {name: BY_NAME[name].opcode for name in PINNED} == PINNED
    assert all(0 < opcode < 0x10000 for opcode in INSTRUCTIONS)


def test_the_description_is_json_and_fits_a_query() -> None:
    text = json.dumps(describe(), allow_nan=False)
    assert len(text) < LIMITS.query_bytes
    assert json.loads(text) == describe()


def test_the_documentation_is_what_the_declarations_say() -> None:
    written = (ROOT / "docs" / "instructions.md").read_text()
    assert written == render(), "run: python -m accelvisor.kernels.document > docs/instructions.md"


@EVERY
def test_expressions_name_only_what_is_bound_before_them(instruction: Instruction) -> None:
    """Else an instruction would be refused whatever it is given."""
    known = {a.name for a in instruction.attributes if a.type == "int"}
    for operand in sorted(instruction.operands, key=lambda o: o.access is Access.WRITE):
        for dim in parse(operand.shape).dims:
            if dim.kind == "expr":
                assert names(dim.expr) <= known, operand.name
            elif dim.kind in ("name", "star"):
                known |= {dim.text, "#" + dim.text} if dim.kind == "star" else {dim.text}
        assert not operand.below or operand.below in known
    for requirement in instruction.requires:
        _, left, right = parse_requirement(requirement)
        assert names(left) | names(right) <= known


def names(expr: tuple[object, ...]) -> set[object]:
    if expr[0] == "name":
        return {expr[1]}
    return {n for part in expr[1:] if isinstance(part, tuple) for n in names(part)}


@EVERY
def test_defaults_are_in_range_and_survive_packing(instruction: Instruction) -> None:
    described = [from_description(a.describe()) for a in instruction.attributes]
    raw = pack(described, {})
    assert unpack(instruction.attributes, raw) == tuple(a.default for a in instruction.attributes)


@EVERY
def test_a_reader_comes_before_what_is_like_it(instruction: Instruction) -> None:
    seen: set[str] = set()
    for operand in instruction.operands:
        assert not operand.like or operand.like in seen
        assert operand.dtypes
        assert operand.name not in seen
        seen.add(operand.name)


def test_a_doubled_opcode_is_found_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TOPICS", (*registry._TOPICS, registry._TOPICS[0]))
    with pytest.raises(ValueError, match="declared twice"):
        registry._collect()
