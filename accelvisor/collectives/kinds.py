"""Element types and reduction operators: what a value is, when it is zero, how two make one.

Semantics, the same in every path (packed, dense, reference):

* Results of a reduction never hold -0.0, and every NaN of theirs is the quiet NaN with an empty
  payload. IEEE 754 leaves both open (sections 6.2.3 and 6.3: payloads, the sign of a zero minimum),
  and processors differ; and a packed -0.0 would be a value where there is none.
* ``min`` and ``max`` propagate NaN. ``absmax`` is the larger magnitude, not negative; a signed
  integer's lowest value counts as the highest.
* Integers wrap. bfloat16 (uint16 in memory) and float16 compute in float32 and round to nearest,
  ties to even: one rounding of an exact or correctly rounded sum is that sum, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from accelvisor.abi.dtypes import DType
from accelvisor.errors import UsageError

Array: TypeAlias = npt.NDArray[Any]

PIECE = 1 << 15
"""Elements that are worked on at a time: what several passes find in a core's own cache again."""


class Op(IntEnum):
    """How two values become one; the number is what headers and instructions carry."""

    SUM = 0
    MIN = 1
    MAX = 2
    ABSMAX = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """One element type.

    ``storage`` is numpy's type in memory, ``bits`` the unsigned type of that width. With
    ``m = bits & keep``: a value is zero if m is 0, and NaN if m > ``infinity`` (never an integer).
    """

    code: int
    name: str
    storage: np.dtype[Any]
    bits: np.dtype[Any]
    keep: int
    infinity: int
    nan: int

    @property
    def width(self) -> int:
        """Bytes of one value."""
        return int(self.storage.itemsize)

    @property
    def is_float(self) -> bool:
        return self.nan != 0


BFLOAT16_CODE = 4
"""Of this room alone: tensors of a device hold bfloat16 as uint16."""


def _integer(kind: DType) -> Kind:
    width = kind.itemsize
    ones = (1 << 8 * width) - 1
    bits = np.dtype(f"u{width}")
    return Kind(int(kind), kind.label, np.dtype(kind.label), bits, ones, ones, 0)


def _float(code: int, name: str, storage: str, exponent: int) -> Kind:
    dtype = np.dtype(storage)
    size = 8 * dtype.itemsize
    fraction = size - 1 - exponent
    infinity = ((1 << exponent) - 1) << fraction
    quiet = infinity | 1 << (fraction - 1)
    keep = (1 << (size - 1)) - 1
    return Kind(code, name, dtype, np.dtype(f"u{dtype.itemsize}"), keep, infinity, quiet)


_INTEGERS = (
    DType.INT8, DType.INT16, DType.INT32, DType.INT64,
    DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64,
)  # fmt: skip
KINDS: tuple[Kind, ...] = (
    _float(DType.FLOAT32, "float32", "f4", 8),
    _float(DType.FLOAT64, "float64", "f8", 11),
    _float(DType.FLOAT16, "float16", "f2", 5),
    _float(BFLOAT16_CODE, "bfloat16", "u2", 8),
    *(_integer(kind) for kind in _INTEGERS),
)
"""Every element type of a collective."""

BY_CODE = {kind.code: kind for kind in KINDS}
BY_NAME = {kind.name: kind for kind in KINDS}


def kind_of(array: Array, dtype: str | None = None) -> Kind:
    """The kind of an array; ``dtype`` "bfloat16" reads a uint16 array as that.

    Raises:
        UsageError: no collective moves this type, or ``dtype`` is not how the array is stored.
    """
    name = dtype or array.dtype.name
    kind = BY_NAME.get(name)
    if kind is None:
        raise UsageError(
            f"no collective moves {name}", where="collectives", hint=f"one of {', '.join(BY_NAME)}"
        )
    if array.dtype != kind.storage and array.dtype.name != name:
        raise UsageError(
            f"an array of {array.dtype} does not hold {name}",
            where="collectives",
            hint=f"{name} is stored as {kind.storage.name}",
        )
    return kind


def op_of(op: str | Op) -> Op:
    """An operator by name. Raises UsageError for one that is not."""
    try:
        return op if isinstance(op, Op) else Op[op.upper()]
    except KeyError:
        names = ", ".join(o.name.lower() for o in Op)
        raise UsageError(
            f"no operator {op!r}", where="collectives", hint=f"one of {names}"
        ) from None


def combine(kind: Kind, op: Op, a: Array, b: Array, out: Array) -> None:
    """out = a op b, elementwise; 1-D arrays of ``kind.storage``. ``out`` may be a or b.

    -0.0 and NaN payloads are left as the processor has them: :func:`finish` settles both, once.
    """
    with np.errstate(all="ignore"):
        if kind.code == BFLOAT16_CODE:
            for start in range(0, out.size, PIECE):
                part = slice(start, start + PIECE)
                wide = bfloat16_to_float32(a[part])
                _numbers(op, wide, bfloat16_to_float32(b[part]), wide)
                float32_to_bfloat16(wide, out[part])
        else:
            _numbers(op, a, b, out)


def _numbers(op: Op, a: Array, b: Array, out: Array) -> None:
    if op is Op.SUM:
        np.add(a, b, out=out)
    elif op is Op.MIN:
        np.minimum(a, b, out=out)
    elif op is Op.MAX:
        np.maximum(a, b, out=out)
    else:
        np.maximum(_magnitude(a), _magnitude(b), out=out)


def _magnitude(a: Array) -> Array:
    size: Array = np.abs(a)
    if a.dtype.kind == "i":
        np.copyto(size, np.iinfo(a.dtype).max, where=size < 0)
    return size


def finish(kind: Kind, op: Op, array: Array) -> None:
    """Make a result of it, in place: magnitudes for absmax, no -0.0, one NaN. 1-D, contiguous."""
    if op is Op.ABSMAX and not kind.is_float:
        np.copyto(array, _magnitude(array))
    if not kind.is_float:
        return
    words = array.view(kind.bits)
    for start in range(0, words.size, PIECE):
        part = words[start : start + PIECE]
        size = part & kind.bits.type(kind.keep)
        if op is Op.ABSMAX:
            np.copyto(part, size)
        # Both are rare, and a store under an irregular mask costs more than looking for it.
        minus = part == kind.bits.type(kind.keep + 1)
        if minus.any():
            np.copyto(part, 0, where=minus)
        strange = size > kind.bits.type(kind.infinity)
        if strange.any():
            np.copyto(part, kind.bits.type(kind.nan), where=strange)


def bfloat16_to_float32(a: Array) -> Array:
    """uint16 patterns to float32, exactly. A new array."""
    return np.left_shift(a, np.uint32(16), dtype=np.uint32).view(np.float32)


def float32_to_bfloat16(a: Array, out: Array) -> None:
    """Round to nearest, ties to even, into uint16 patterns; every NaN becomes the quiet one."""
    words = a.view(np.uint32)
    odd = (words >> np.uint32(16)) & np.uint32(1)
    rounded = (words + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
    np.copyto(out, rounded, casting="unsafe")
    strange = np.isnan(a)
    if strange.any():
        np.copyto(out, BY_CODE[BFLOAT16_CODE].nan, where=strange, casting="unsafe")
