"""Reductions over the last axis, the first axis, all but the channel axis, or everything.

Sums are pairwise or in blocks of rows in an order that depends on the shape alone; integers wrap.
NaN anywhere gives NaN, and for ``argmax`` the first NaN wins; a greatest element that is a zero is
+0.0. A sum of nothing is 0; a mean or maximum of nothing is refused when the program is uploaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import fsum, isfinite, prod
from typing import Any

import numpy as np

from accelvisor.abi.dtypes import DType
from accelvisor.kernels.declare import (
    FLOATS,
    INDEX,
    NUMBERS,
    SAME_BITS,
    Array,
    Arrays,
    Bound,
    Instruction,
    Scale,
    Shapes,
    Tiling,
    Values,
    read,
    rows,
    write,
)

# --- how the input is seen: (outputs, terms) rows -------------------------------------------------


def _last(x: Array) -> Array:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _first(x: Array) -> Array:
    return x.reshape(x.shape[0], prod(x.shape[1:]))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _tiling_last(shapes: Shapes, values: Values) -> Tiling:
    return Tiling(prod(shapes[0][:-1]), rows(shapes[0][-1]))


def _tiling_first(shapes: Shapes, values: Values) -> Tiling:
    # A cache line of every row at least, or each tile would fetch them all again.
    return Tiling(prod(shapes[0][1:]), max(16, rows(shapes[0][0])))


def _tiling_channels(shapes: Shapes, values: Values) -> Tiling:
    n, c, *rest = shapes[0]
    size = prod(rest)
    return Tiling(c, max(_ceil(16, max(1, size)), rows(n * size)))


def _tiling_all(shapes: Shapes, values: Values) -> Tiling:
    return Tiling(1, 1)


# --- fast kernels --------------------------------------------------------------------------------

_BLOCK = 256


def _add_rows(x: Array, dtype: np.dtype[Any]) -> Array:
    """Sum over axis 0, in blocks so that the error grows with the block and not with the rows."""
    while x.shape[0] > _BLOCK:
        blocks, rest = divmod(x.shape[0], _BLOCK)
        body = x[: blocks * _BLOCK].reshape(blocks, _BLOCK, x.shape[1])
        parts = np.add.reduce(body, axis=1, dtype=dtype)
        tail = np.add.reduce(x[blocks * _BLOCK :], axis=0, dtype=dtype, keepdims=True)
        x = np.concatenate([parts, tail]) if rest else parts
    return np.asarray(np.add.reduce(x, axis=0, dtype=dtype))


def _sum_last(x: Array, out: Array, start: int, stop: int) -> None:
    np.add.reduce(_last(x)[start:stop], axis=1, dtype=out.dtype, out=out.reshape(-1)[start:stop])


def _sum_first(x: Array, out: Array, start: int, stop: int) -> None:
    out.reshape(-1)[start:stop] = _add_rows(_first(x)[:, start:stop], out.dtype)


def _sum_channels(x: Array, out: Array, start: int, stop: int) -> None:
    size = prod(x.shape[2:])
    images = _add_rows(_first(x)[:, start * size : stop * size], out.dtype)
    out[start:stop] = np.add.reduce(images.reshape(stop - start, size), axis=1, dtype=out.dtype)


def _sum_all(x: Array, out: Array, start: int, stop: int) -> None:
    out[...] = np.add.reduce(x.reshape(-1), dtype=out.dtype)


def _max_last(x: Array, out: Array, start: int, stop: int) -> None:
    part = out.reshape(-1)[start:stop]
    np.maximum.reduce(_last(x)[start:stop], axis=1, out=part)
    np.add(part, out.dtype.type(0), out=part)


def _max_first(x: Array, out: Array, start: int, stop: int) -> None:
    part = out.reshape(-1)[start:stop]
    np.maximum.reduce(_first(x)[:, start:stop], axis=0, out=part)
    np.add(part, out.dtype.type(0), out=part)


def _max_all(x: Array, out: Array, start: int, stop: int) -> None:
    out[...] = np.maximum.reduce(x.reshape(-1)) + out.dtype.type(0)


def _argmax(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, out = arrays
    out.reshape(-1)[start:stop] = np.argmax(_last(x)[start:stop], axis=1)


# --- references: Python numbers, one output at a time --------------------------------------------


def _terms_last(x: Array) -> list[list[Any]]:
    return [row.tolist() for row in _last(x)]


def _terms_first(x: Array) -> list[list[Any]]:
    return [column.tolist() for column in _first(x).T]


def _terms_channels(x: Array) -> list[list[Any]]:
    return [x[:, c].ravel().tolist() for c in range(x.shape[1])]


def _terms_all(x: Array) -> list[list[Any]]:
    return [x.ravel().tolist()]


def _exact_sum(terms: list[Any]) -> Any:
    """Correctly rounded for finite floats (Shewchuk's fsum), exact for integers."""
    if terms and isinstance(terms[0], float):
        try:
            return fsum(terms) if all(map(isfinite, terms)) else sum(terms, 0.0)
        except OverflowError:
            return sum(terms, 0.0)
    return sum(terms)


def _greatest(terms: list[Any]) -> Any:
    for value in terms:
        if value != value:
            return value
    greatest = max(terms)
    return greatest if greatest else abs(greatest)


def _mean(terms: list[Any]) -> Any:
    return _exact_sum(terms) / len(terms)


def _store(results: Iterable[Any], out: Array) -> None:
    found = list(results)
    if out.dtype.kind == "i":
        bits = out.dtype.itemsize * 8
        found = [(r + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) for r in found]
    out[...] = np.array(found, np.float64 if out.dtype.kind == "f" else out.dtype).reshape(
        out.shape
    )


def _reference_argmax(arrays: Arrays, values: Values) -> None:
    x, out = arrays

    def position(terms: list[Any]) -> int:
        best = 0
        for i, value in enumerate(terms):
            if value != value:
                return i
            if value > terms[best]:
                best = i
        return best

    _store((position(terms) for terms in _terms_last(x)), out)


# --- declarations --------------------------------------------------------------------------------

_LIMIT = 1 << 22

# suffix -> (input, output, limits, refused when empty, tiling, terms, additions in a row)
_AXES: dict[str, tuple[str, str, tuple[str, ...], str, Any, Any, Any]] = {
    "_last": (
        "*r n", "*r", (f"n <= {_LIMIT}",), "n >= 1", _tiling_last, _terms_last,
        lambda s: s[0][-1],
    ),
    "_rows": (
        "m *s", "*s", ("m <= 262144",), "m >= 1", _tiling_first, _terms_first,
        lambda s: s[0][0],
    ),
    "_channels": (
        "n c *s", "c", ("n <= 262144", f"n*#s <= {_LIMIT}"), "n*#s >= 1", _tiling_channels,
        _terms_channels, lambda s: s[0][0] * prod(s[0][2:]),
    ),
    "_all": (
        "*s", "", (f"#s <= {4 * _LIMIT}",), "#s >= 1", _tiling_all, _terms_all,
        lambda s: prod(s[0]),
    ),
}  # fmt: skip

_WORDS = {
    "_last": "over the last axis",
    "_rows": "over the first axis",
    "_channels": "over all axes but the second",
    "_all": "of everything",
}


def _roundings(count: Callable[[Shapes], int]) -> Callable[[Shapes, Values], int]:
    """Additions that one term goes through: numpy's pairwise sum has runs of 16 and a tree above
    them, blocks of rows have _BLOCK a level.
    """

    def bound(shapes: Shapes, values: Values) -> int:
        terms = max(1, count(shapes))
        levels = 1 + terms.bit_length() // 8
        return min(terms, 2 * _BLOCK * levels) + 2

    return bound


def _declare(
    name: str,
    suffix: str,
    opcode: int,
    fast: Any,
    exact: Any,
    dtypes: tuple[DType, ...],
    mean: bool,
) -> Instruction:
    source, target, limits, not_empty, tiling, terms, count = _AXES[suffix]

    def run(arrays: Arrays, values: Values, start: int, stop: int) -> None:
        x, out = arrays
        fast(x, out, start, stop)
        if mean:
            part = out if out.ndim == 0 else out.reshape(-1)[start:stop]
            np.divide(part, out.dtype.type(count([x.shape])), out=part)

    def reference(arrays: Arrays, values: Values) -> None:
        x, out = arrays
        _store((exact(t) for t in terms(x)), out)

    def magnitude(arrays: Arrays, values: Values) -> list[Array]:
        x, out = arrays
        total = np.zeros(out.shape, np.float64)
        _store((_exact_sum([abs(v) for v in t]) / (len(t) if mean else 1) for t in terms(x)), total)
        return [total]

    summing = name in ("sum", "mean")
    return Instruction(
        name + suffix,
        opcode,
        f"out = {'greatest' if name == 'max' else name} {_WORDS[suffix]}",
        (read("x", source, dtypes), write("out", target, dtypes, like="x")),
        reference,
        run,
        tiling,
        requires=limits if name == "sum" else (*limits, not_empty),
        bound=Bound(1, Scale(magnitude, _roundings(count))) if summing else SAME_BITS,
    )


def _family(suffix: str, opcode: int, add: Any, greatest: Any) -> list[Instruction]:
    found = [
        _declare("sum", suffix, opcode, add, _exact_sum, NUMBERS, False),
        _declare("mean", suffix, opcode + 1, add, _mean, FLOATS, True),
    ]
    if greatest is not None:
        found.append(_declare("max", suffix, opcode + 2, greatest, _greatest, NUMBERS, False))
    return found


INSTRUCTIONS: tuple[Instruction, ...] = (
    *_family("_last", 0x0200, _sum_last, _max_last),
    *_family("_rows", 0x0210, _sum_first, _max_first),
    *_family("_channels", 0x0220, _sum_channels, None),
    *_family("_all", 0x0230, _sum_all, _max_all),
    Instruction(
        "argmax_last",
        0x0203,
        "out = position of the greatest element of the last axis, the first of equals",
        (read("x", "*r n", NUMBERS), write("out", "*r", INDEX)),
        _reference_argmax,
        _argmax,
        _tiling_last,
        requires=("n >= 1", f"n <= {_LIMIT}"),
    ),
)
