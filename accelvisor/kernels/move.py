"""Moving and making data: copy, fill, cast, reshape, transpose, row selection, one-hot.

Conversions into an integer truncate toward zero and saturate at the type's own range; NaN is 0.
Conversions into a float round to nearest, ties to even, overflowing to infinity; into bool: not 0.
An index that lies in data and names no row is a NumericError, never a read out of range.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import numpy as np

from accelvisor.errors import NumericError
from accelvisor.kernels.declare import (
    ALL,
    F32,
    INDEX,
    Array,
    Arrays,
    Instruction,
    Queue,
    Shapes,
    Tiling,
    Values,
    flat,
    integer,
    read,
    real,
    rows,
    spans,
    write,
)

# --- copy, reshape, fill -------------------------------------------------------------------------


def _copy(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, out = arrays
    np.copyto(out.reshape(-1)[start:stop], x.reshape(-1)[start:stop])


def _reference_copy(arrays: Arrays, values: Values) -> None:
    x, out = arrays
    out[...] = np.frombuffer(x.tobytes(), x.dtype).reshape(out.shape)


def _fill(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    (out,) = spans(arrays, start, stop)
    out.fill(convert(np.array([values[0]]), out.dtype)[0])


def _reference_fill(arrays: Arrays, values: Values) -> None:
    (out,) = arrays
    out[...] = _convert_one(float(values[0]), out.dtype)


# --- cast ----------------------------------------------------------------------------------------


def convert(x: Array, dtype: np.dtype[Any]) -> Array:
    """``x`` in another dtype by the rules of this module. C leaves an out-of-range float to integer
    conversion undefined, and processors differ, so the range is settled before it.
    """
    if dtype.kind not in "iu" or x.dtype.kind == "b":
        return x.astype(dtype)
    limits = np.iinfo(dtype)
    if x.dtype.kind == "f":
        wide = x.astype(np.float64)
        # The limits as floats round outwards for 64 bits: compare first, convert what is inside.
        inside = (wide > limits.min - 1.0) & (wide < limits.max + 1.0)
        if limits.bits == 64:
            inside = (wide >= float(limits.min)) & (wide < float(limits.max))
        result = np.where(inside, wide, 0.0).astype(dtype)
        result[~inside & (wide > 0)] = limits.max
        result[~inside & (wide < 0)] = limits.min
        return result
    source = np.iinfo(x.dtype)
    low, high = max(source.min, limits.min), min(source.max, limits.max)
    return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(dtype)


def _cast(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, out = arrays
    part = convert(x.reshape(-1)[start:stop], out.dtype)
    np.copyto(out.reshape(-1)[start:stop], part)


_FLOAT_FORMS = {2: ("<e", 11), 4: ("<f", 24), 8: ("<d", 53)}


def _convert_one(value: Any, dtype: np.dtype[Any]) -> Any:
    """The same rules on one Python number, by integer arithmetic and struct's own rounding."""
    if dtype.kind == "b":
        return value != 0
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if value != value:
            return 0
        if value in (float("inf"), float("-inf")):
            return int(limits.max if value > 0 else limits.min)
        return max(int(limits.min), min(int(limits.max), int(value)))
    form, precision = _FLOAT_FORMS[dtype.itemsize]
    if isinstance(value, int):  # bool too
        value = float(_round_integer(int(value), precision))
    try:
        return struct.unpack(form, struct.pack(form, value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _round_integer(value: int, precision: int) -> int:
    """To ``precision`` significant bits, nearest, ties to even."""
    shift = max(0, abs(value).bit_length() - precision)
    quotient, rest = divmod(abs(value), 1 << shift)
    half = (1 << shift) >> 1
    if shift and (rest > half or (rest == half and quotient & 1)):
        quotient += 1
    return (quotient << shift) * (1 if value >= 0 else -1)


def _reference_cast(arrays: Arrays, values: Values) -> None:
    x, out = arrays
    results = [_convert_one(v, out.dtype) for v in x.ravel().tolist()]
    out[...] = np.array(results, out.dtype).reshape(out.shape)


# --- transpose -----------------------------------------------------------------------------------


def _by_output_rows(shapes: Shapes, values: Values) -> Tiling:
    size = prod(shapes[-1][1:])
    return Tiling(shapes[-1][0] if size else 0, rows(size))


def _transpose(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, out = arrays
    out[start:stop] = x[:, start:stop].T


def _reference_transpose(arrays: Arrays, values: Values) -> None:
    x, out = arrays
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[j, i] = x[i, j]


# --- rows by index -------------------------------------------------------------------------------


def checked_indices(indices: Array, count: int, name: str) -> Array:
    """``indices`` when all of them are in [0, count), for indexing ``count`` things.

    Raises:
        NumericError: one is not.
    """
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= count):
        bad = indices[(indices < 0) | (indices >= count)][0]
        raise NumericError(
            f"{name} holds {bad}, must be from 0 to {count - 1}",
            where=name,
            hint="check the labels or row numbers that the program was given",
        )
    return indices


def _gather(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, indices, out = arrays
    part = checked_indices(indices[start:stop], x.shape[0], "indices")
    # mode="clip" lets take write to ``out`` without a buffer; the indices are in range already
    np.take(x, part, axis=0, out=out[start:stop], mode="clip")


def _reference_gather(arrays: Arrays, values: Values) -> None:
    x, indices, out = arrays
    checked_indices(indices, x.shape[0], "indices")
    for i, index in enumerate(indices.tolist()):
        out[i] = x[index]


def _one_hot(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    indices, out = arrays
    part = checked_indices(indices[start:stop], out.shape[1], "indices")
    out[start:stop] = 0
    out[np.arange(start, stop), part] = 1


def _reference_one_hot(arrays: Arrays, values: Values) -> None:
    indices, out = arrays
    checked_indices(indices, out.shape[1], "indices")
    out[...] = np.eye(out.shape[1], dtype=out.dtype)[indices]


def _big_flat(shapes: Shapes, values: Values) -> Tiling:
    return Tiling(prod(shapes[-1]), 4 * flat(shapes, values).step)


INSTRUCTIONS: tuple[Instruction, ...] = (
    Instruction(
        "copy",
        0x0001,
        "out = x",
        (read("x", "*s", ALL), write("out", "*s", ALL, like="x")),
        _reference_copy,
        _copy,
        _big_flat,
        queue=Queue.TRANSFER,
    ),
    Instruction(
        "fill",
        0x0002,
        "out = value everywhere, converted as cast does",
        (write("out", "*s", ALL),),
        _reference_fill,
        _fill,
        _big_flat,
        attributes=(real("value", 0.0),),
        queue=Queue.TRANSFER,
    ),
    Instruction(
        "cast",
        0x0003,
        "out = x in out's dtype: into integers truncated and saturated (NaN is 0), "
        "into floats rounded to nearest even",
        (read("x", "*s", ALL), write("out", "*s", ALL)),
        _reference_cast,
        _cast,
        flat,
    ),
    Instruction(
        "reshape",
        0x0004,
        "out = x's elements in another shape of as many",
        (read("x", "*a", ALL), write("out", "*b", ALL, like="x")),
        _reference_copy,
        _copy,
        _big_flat,
        queue=Queue.TRANSFER,
        requires=("#a == #b",),
    ),
    Instruction(
        "flatten",
        0x0005,
        "out = x with all dims but the first made one",
        (read("x", "n *s", ALL), write("out", "n (#s)", ALL, like="x")),
        _reference_copy,
        _copy,
        _big_flat,
        queue=Queue.TRANSFER,
    ),
    Instruction(
        "transpose",
        0x0006,
        "out = x.T",
        (read("x", "m n", ALL), write("out", "n m", ALL, like="x")),
        _reference_transpose,
        _transpose,
        _by_output_rows,
        queue=Queue.TRANSFER,
        requires=("m <= 1048576",),
    ),
    Instruction(
        "gather_rows",
        0x0007,
        "out[i] = x[indices[i]]; an index out of range is a fault",
        (
            read("x", "n *s", ALL),
            read("indices", "m", INDEX, below="n"),
            write("out", "m *s", ALL, like="x"),
        ),
        _reference_gather,
        _gather,
        _by_output_rows,
        queue=Queue.TRANSFER,
        requires=("#s <= 4194304",),
    ),
    Instruction(
        "one_hot",
        0x0008,
        "out[i, indices[i]] = 1, 0 elsewhere; an index out of range is a fault",
        (read("indices", "m", INDEX, below="classes"), write("out", "m classes", F32)),
        _reference_one_hot,
        _one_hot,
        _by_output_rows,
        attributes=(integer("classes", 10, 1, 1 << 20),),
        queue=Queue.TRANSFER,
    ),
)
