"""Watermarks in weights: bits that only the holder of a key can write, and read, in a tensor.

After Y. Uchida, Y. Nagai, S. Sakazawa, S. Satoh, "Embedding Watermarks into Deep Neural Networks"
(ICMR 2017): a secret matrix X of normal numbers is laid over the weights of one layer, averaged
over its filters, and bit i is the sign of row i's product with them. Nothing is trained here: the
smallest shift that gives every product its sign, with a margin, is added to all filters alike.

* *Filters* are the columns of a matrix (inputs, outputs), else the first axis (F, C, kh, kw). One
  average over all of them leaves too few numbers in a narrow layer, so filters are averaged in as
  many groups as it takes to have four numbers for each bit.
* X depends on the key and the two sizes alone, in every bit, on every machine: SHAKE-256 (FIPS 202)
  gives 16 bits for each entry, which pick one of 65,536 equally probable normal numbers.
* A sign does not change with the scale, so weights that were quantised with zero at zero are read
  like the ones that they were made from.

Each of the two operations has a plain twin (``reference_...``). They add in another order, so what
is compared is equal up to rounding, not in its bits; the margin is far above that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from accelvisor.errors import NumericError, UsageError
from accelvisor.kernels.declare import Array
from accelvisor.limits import LIMITS

F64 = npt.NDArray[np.float64]
Bits = npt.NDArray[np.bool_]

KEY_BYTES = 32
#: How far from zero a product is moved, in standard deviations of the averages.
MARGIN = 16.0
#: Numbers that there should be for each bit, and that there must be.
_WANTED, _LEAST = 4, 2
_DOMAIN = b"accelvisor watermark matrix 1\0"
#: Normal numbers are multiples of 1 / this, which no libm's last digit can reach.
_GRID = 1 << 20
_CODES = 1 << 16
#: Averages that differ by less than this part of their size give no scale for a margin.
_FLAT = 1e-9
#: Beyond 2**this sums of float64 could leave their range.
_FAR = 500


class Layout(NamedTuple):
    """How a tensor is averaged: ``filters`` of ``each`` numbers along ``axis``, in ``groups``."""

    axis: int
    filters: int
    each: int
    groups: int

    @property
    def starts(self) -> list[int]:
        """The first filter of each group."""
        return [g * self.filters // self.groups for g in range(self.groups)]

    @property
    def sizes(self) -> list[int]:
        """How many filters each group has."""
        return [b - a for a, b in pairwise([*self.starts, self.filters])]


def layout(shape: Sequence[int], count: int) -> Layout:
    """How a tensor of ``shape`` is averaged to carry ``count`` bits.

    Raises:
        NumericError: ``watermark-shape``: it has too few weights, or too many in one filter.
    """
    total = math.prod(shape)
    if not shape or not total or total < _LEAST * count:
        raise _shape(shape, f"it has {total} weights, {count} bits take {_LEAST * count}")
    axis = 1 if len(shape) == 2 else 0
    filters = shape[axis]
    each = total // filters
    groups = min(filters, -(-_WANTED * count // each))
    if groups * each > LIMITS.watermark_averages:
        raise _shape(
            shape, f"one filter has {each} weights, the limit is {LIMITS.watermark_averages}"
        )
    return Layout(axis, filters, each, groups)


def normals(key: bytes, rows: int, columns: int) -> F64:
    """The secret matrix X (rows, columns).

    Raises:
        UsageError: ``watermark-key``: the key has not 32 bytes.
    """
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"a watermark key has {KEY_BYTES} bytes, not {len(key)}",
            code="watermark-key",
            where="watermark",
        )
    seed = _DOMAIN + key + rows.to_bytes(8, "little") + columns.to_bytes(8, "little")
    codes = np.frombuffer(hashlib.shake_256(seed).digest(2 * rows * columns), "<u2")
    return np.asarray(_quantiles()[codes].reshape(rows, columns))


def extract(weights: Array, key: bytes, count: int) -> Bits:
    """The ``count`` bits that ``key`` reads in ``weights``; of unmarked weights they mean nothing.

    Raises:
        NumericError: ``watermark-shape``, ``watermark-dtype``, ``watermark-values``: a weight is
            NaN or infinite.
    """
    return project(weights, key, count) > 0


def project(weights: Array, key: bytes, count: int) -> F64:
    """X times the averages, the largest of which was brought to [0.5, 1) by a power of two."""
    values, _, _ = _averages(weights, count)
    return np.asarray(normals(key, count, len(values)) @ values)


def embed(weights: Array, key: bytes, bits: Bits, margin: float = MARGIN) -> Array:
    """``weights`` (float16, 32 or 64) with ``bits`` (count,) in them, of the same dtype and shape.

    Where the sign is right and the margin kept, a product is held as it is; the others are moved to
    the margin. Of all shifts of the averages that do this the one with the least norm is taken,
    d = X' (X X')^-1 r, and added to every filter of its group.

    Raises:
        NumericError: as :func:`extract`; ``watermark-values`` also when all averages are equal, or
            the dtype is too coarse to hold the shift.
    """
    if weights.dtype.kind != "f":
        raise _dtype(weights, "a mark is embedded before weights are quantised")
    values, exponent, how = _averages(weights, len(bits))
    moved = _least_norm(values, normals(key, len(bits), len(values)), bits, margin)
    with np.errstate(over="ignore", invalid="ignore"):
        # Each group's shift, laid under its filters: (filters, each).
        shift = np.ldexp(moved, exponent).reshape(how.groups, how.each)
        rows = np.repeat(shift, how.sizes, axis=0)
        lying = rows.T if how.axis else rows
        marked = (weights.astype(np.float64) + lying.reshape(weights.shape)).astype(weights.dtype)
    if errors(extract(marked, key, len(bits)), bits):
        raise _values(f"{weights.dtype} is too coarse here to hold the mark")
    return np.asarray(marked)


def errors(found: Bits, wanted: Bits) -> int:
    """How many bits differ. NumericError ``watermark-shape`` for different numbers of bits."""
    if found.shape != wanted.shape:
        raise _shape(found.shape, f"it is compared with {wanted.shape}")
    return int(np.count_nonzero(found != wanted))


def largest_shift(before: Array, after: Array) -> float:
    """The largest change of a weight, in standard deviations of the weights before."""
    old = before.astype(np.float64)
    return float(np.abs(after.astype(np.float64) - old).max() / old.std())


def unpack(message: bytes) -> Bits:
    """Bytes as bits, the highest of each byte first."""
    return np.unpackbits(np.frombuffer(message, np.uint8)).astype(np.bool_)


def _averages(weights: Array, count: int) -> tuple[F64, int, Layout]:
    """(averages, exponent, layout): the group averages are ``averages * 2**exponent``, group after
    group, each in the order of a filter's weights.
    """
    if weights.dtype.kind not in "fi" or weights.dtype.itemsize > 8:
        raise _dtype(weights, "weights are float16, 32, 64 or signed integers")
    how = layout(weights.shape, count)
    exponent = 0
    if weights.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            low, high = float(weights.min()), float(weights.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise _values("a weight is NaN or infinite")
        far = math.frexp(max(-low, high))[1]
        if abs(far) > _FAR:
            exponent = far
            weights = np.ldexp(weights.astype(np.float64), -far)
    rows = weights.reshape(how.filters, how.each) if how.axis == 0 else weights.T
    sums = np.empty((how.groups, how.each))
    for group, (start, stop) in enumerate(pairwise([*how.starts, how.filters])):
        # Group by group, since this makes no copy of all weights in float64.
        np.sum(rows[start:stop], axis=0, dtype=np.float64, out=sums[group])
    averages = (sums / np.array(how.sizes, np.float64)[:, None]).ravel()
    scale = math.frexp(float(np.abs(averages).max()))[1]
    return np.ldexp(averages, -scale), exponent + scale, how


def _least_norm(values: F64, x: F64, bits: Bits, margin: float) -> F64:
    spread = float(values.std())
    if spread < _FLAT:
        raise _values("the averaged weights are all equal")
    signs = np.where(bits, 1.0, -1.0)
    products = x @ values
    wanted = signs * margin * spread
    missing = np.where(signs * products < margin * spread, wanted - products, 0.0)
    return np.asarray(x.T @ np.linalg.solve(x @ x.T, missing))


@lru_cache(maxsize=1)
def _quantiles() -> F64:
    """The middle of each of 65,536 equally probable parts of the normal distribution."""
    upper = [quantile(code) for code in range(_CODES // 2, _CODES)]
    table = np.array([-q for q in reversed(upper)] + upper)
    table.flags.writeable = False
    return table


def quantile(code: int) -> float:
    """What 16 bits stand for in X. The lower half mirrors the upper one."""
    if code < _CODES // 2:
        return -quantile(_CODES - 1 - code)
    return round(NormalDist().inv_cdf((code + 0.5) / _CODES) * _GRID) / _GRID


# --- plain twins ----------------------------------------------------------------------------------


def reference_project(weights: Array, key: bytes, count: int) -> list[float]:
    """What :func:`project` computes, number by number."""
    values, _ = _plain_averages(weights, count)
    return [_dot(row, values) for row in _plain_normals(key, count, len(values))]


def reference_embed(weights: Array, key: bytes, bits: Bits, margin: float = MARGIN) -> Array:
    """What :func:`embed` computes, number by number; nothing is checked."""
    how = layout(weights.shape, len(bits))
    values, exponent = _plain_averages(weights, len(bits))
    x = _plain_normals(key, len(bits), len(values))
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    missing = []
    for row, bit in zip(x, bits.tolist(), strict=True):
        sign, product = (1.0 if bit else -1.0), _dot(row, values)
        short = sign * product < margin * spread
        missing.append(sign * margin * spread - product if short else 0.0)
    solved = _solve([[_dot(a, b) for b in x] for a in x], missing)
    shift = [_dot(column, solved) for column in zip(*x, strict=True)]
    marked = np.empty_like(weights)
    for where, filter_, at in _places(weights.shape, how):
        group = _group(how, filter_)
        moved = math.ldexp(shift[group * how.each + at], exponent)
        marked[where] = float(weights[where]) + moved
    return marked


def _places(shape: tuple[int, ...], how: Layout) -> list[tuple[tuple[int, ...], int, int]]:
    """For each weight its index, its filter, and its place in that."""
    found = []
    seen = [0] * how.filters
    for where in np.ndindex(shape):
        filter_ = where[how.axis]
        found.append((where, filter_, seen[filter_]))
        seen[filter_] += 1
    return found


def _group(how: Layout, filter_: int) -> int:
    return max(g for g in range(how.groups) if g * how.filters // how.groups <= filter_)


def _plain_averages(weights: Array, count: int) -> tuple[list[float], int]:
    how = layout(weights.shape, count)
    peak = max(abs(float(w)) for w in weights.ravel())
    far = math.frexp(peak)[1] if weights.dtype.kind == "f" else 0
    parts: dict[int, list[float]] = {i: [] for i in range(how.groups * how.each)}
    for where, filter_, at in _places(weights.shape, how):
        slot = _group(how, filter_) * how.each + at
        parts[slot].append(math.ldexp(float(weights[where]), -far))
    averages = [math.fsum(parts[i]) / len(parts[i]) for i in sorted(parts)]
    scale = math.frexp(max(abs(a) for a in averages))[1]
    return [math.ldexp(a, -scale) for a in averages], far + scale


def _plain_normals(key: bytes, rows: int, columns: int) -> list[list[float]]:
    sizes = rows.to_bytes(8, "little") + columns.to_bytes(8, "little")
    stream = hashlib.shake_256(_DOMAIN + key + sizes).digest(2 * rows * columns)
    codes = [stream[i] | stream[i + 1] << 8 for i in range(0, len(stream), 2)]
    return [[quantile(c) for c in codes[r * columns : (r + 1) * columns]] for r in range(rows)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination; the matrix is symmetric and positive definite, so nothing is swapped."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    n = len(rows)
    for i in range(n):
        for j in range(i + 1, n):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    found = [0.0] * n
    for i in reversed(range(n)):
        known = math.fsum(rows[i][j] * found[j] for j in range(i + 1, n))
        found[i] = (rows[i][n] - known) / rows[i][i]
    return found


# --- errors ---------------------------------------------------------------------------------------


def _shape(shape: Sequence[int], why: str) -> NumericError:
    return NumericError(
        f"a tensor of shape {tuple(shape)} cannot carry the mark: {why}",
        code="watermark-shape",
        where="watermark",
        hint="choose another layer; a dense one with 100,000 weights or more is a good one",
    )


def _dtype(weights: Array, why: str) -> NumericError:
    return NumericError(
        f"{weights.dtype} weights cannot carry the mark: {why}",
        code="watermark-dtype",
        where="watermark",
    )


def _values(why: str) -> NumericError:
    return NumericError(
        f"these weights cannot carry the mark: {why}",
        code="watermark-values",
        where="watermark",
        hint="choose another layer",
    )
