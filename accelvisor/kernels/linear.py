"""Matrix products, float32, through BLAS on tiles of our own choosing.

A tile is a block of rows and columns of the output with the full inner dimension, so its bits
depend on the shapes alone. Each tile is one BLAS call with one thread. The block is large enough (a
quarter of a giga multiply-accumulate) that packing the operands again for each tile costs little,
and small enough to stay below the 20 ms of a tile; the last ones are smaller, so that cores which
share a product end at about the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from accelvisor.kernels import blas
from accelvisor.kernels.declare import (
    Array,
    Arrays,
    Bound,
    Instruction,
    Scale,
    Shapes,
    Tiling,
    Values,
    Work,
    read,
    write,
)

TILE_MACS = 1 << 28  # the most
NARROW_MACS = 1 << 25  # half a millisecond, but no tile narrower than half a panel for it
TILE_ELEMENTS = 1 << 23  # of each operand: thin products are bound by memory
PANEL = 256
# One output element is the smallest tile: this bounds its inner dimension to a few milliseconds.
_INNER = "k <= 2097152"


class _Cut(NamedTuple):
    """Panels of ``height`` rows each; the first ``coarse`` of them in tiles of ``wide`` columns,
    the others in tiles of ``narrow`` ones.
    """

    height: int
    coarse: int
    wide: int
    narrow: int

    def tiles(self, m: int, n: int) -> int:
        """How many of an m x n product."""
        fine = -(-m // self.height) - self.coarse
        return self.coarse * -(-n // self.wide) + fine * -(-n // self.narrow)


def _cut(m: int, n: int, k: int) -> _Cut:
    """The cut of an m x n product with inner dimension k, not empty. Panels are taller where rows
    are short; tiles as wide as the budgets of arithmetic and of memory allow, and a quarter of the
    panels, the last, narrower.
    """
    k = max(1, k)
    height = max(PANEL, NARROW_MACS // (k * n))
    height = max(1, min(m, height, TILE_ELEMENTS // k))
    most = max(1, min(n, TILE_MACS // (k * height), TILE_ELEMENTS // max(k, height)))
    narrow = min(most, max(PANEL // 2, NARROW_MACS // (k * height)))
    panels = -(-m // height)
    return _Cut(height, panels - -(-panels // 4), most, narrow)


def _tiling(shapes: Shapes, inner: int) -> Tiling:
    m, n = shapes[-1]
    if m == 0 or n == 0:
        return Tiling(0, 1)
    return Tiling(_cut(m, n, inner).tiles(m, n), 1)


def _block(out: Array, inner: int, tile: int) -> tuple[slice, slice]:
    m, n = out.shape
    cut = _cut(m, n, inner)
    first, width = 0, cut.wide
    coarse = cut.coarse * -(-n // width)
    if tile >= coarse:
        tile, first, width = tile - coarse, cut.coarse, cut.narrow
    panel, column = divmod(tile, -(-n // width))
    row = (first + panel) * cut.height
    return (
        slice(row, min(m, row + cut.height)),
        slice(column * width, min(n, (column + 1) * width)),
    )


def _product(a: Array, b: Array, out: Array) -> None:
    """out = a @ b by one single-threaded BLAS call, the same one whatever memory a and b lie in."""
    blas.single_thread()
    if a.shape[1] == 0:
        out[...] = 0
        return
    if a.shape[0] == b.shape[1] and a.strides == b.strides[::-1] and _address(a) == _address(b):
        # numpy would call syrk for x @ x.T, whose bits differ from gemm's: then the result would
        # depend on whether the operands share memory or are equal copies.
        b = b.copy()
    np.matmul(a, b, out=out)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _matmul(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    a, b, out = arrays[0], arrays[1], arrays[-1]
    rows, columns = _block(out, b.shape[0], start)
    _product(a[rows], b[:, columns], out[rows, columns])


def _matmul_nt(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    a, b, out = arrays[0], arrays[1], arrays[-1]
    rows, columns = _block(out, b.shape[1], start)
    _product(a[rows], b[columns].T, out[rows, columns])


def _matmul_tn(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    a, b, out = arrays[0], arrays[1], arrays[-1]
    rows, columns = _block(out, b.shape[0], start)
    _product(a[:, rows].T, b[:, columns], out[rows, columns])


def _matmul_bias(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    a, b, bias, out = arrays
    rows, columns = _block(out, b.shape[0], start)
    _product(a[rows], b[:, columns], out[rows, columns])
    out[rows, columns] += bias[columns]


# --- references: one dot product at a time, in float64 -------------------------------------------


def _dots(a: Array, b: Array, out: Array) -> None:
    """out[i, j] = sum of a[i, :] * b[:, j], rows one by one in float64."""
    right = b.astype(np.float64)
    for i in range(out.shape[0]):
        out[i] = np.einsum("k,kj->j", a[i].astype(np.float64), right)


def _reference(arrays: Arrays, values: Values) -> None:
    _dots(arrays[0], arrays[1], arrays[-1])


def _reference_nt(arrays: Arrays, values: Values) -> None:
    _dots(arrays[0], arrays[1].T, arrays[-1])


def _reference_tn(arrays: Arrays, values: Values) -> None:
    _dots(arrays[0].T, arrays[1], arrays[-1])


def _reference_bias(arrays: Arrays, values: Values) -> None:
    a, b, bias, out = arrays
    right = b.astype(np.float64)
    for i in range(out.shape[0]):
        out[i] = np.einsum("k,kj->j", a[i].astype(np.float64), right) + bias


def _magnitude(arrays: Arrays, values: Values) -> list[Array]:
    total = np.abs(arrays[0].astype(np.float64)) @ np.abs(arrays[1].astype(np.float64))
    return [total + (np.abs(arrays[2]) if len(arrays) == 4 else 0)]


def _magnitude_nt(arrays: Arrays, values: Values) -> list[Array]:
    return _magnitude([arrays[0], arrays[1].T, arrays[2]], values)


def _magnitude_tn(arrays: Arrays, values: Values) -> list[Array]:
    return _magnitude([arrays[0].T, arrays[1], arrays[2]], values)


def _terms(axis: int) -> Callable[[Shapes, Values], int]:
    """Roundings of one output element: one for each term, and two more."""
    return lambda shapes, values: shapes[0][axis] + 2


def _declare(
    name: str,
    opcode: int,
    doc: str,
    shapes: tuple[str, str],
    axis: int,
    fast: Callable[[Arrays, Values, int, int], None],
    reference: Callable[[Arrays, Values], None],
    magnitude: Callable[[Arrays, Values], list[Array]],
    bias: bool = False,
) -> Instruction:
    """A product whose inner dimension is ``axis`` of the first operand."""
    return Instruction(
        name,
        opcode,
        doc,
        (
            read("a", shapes[0]),
            read("b", shapes[1]),
            *((read("bias", "n"),) if bias else ()),
            write("out", "m n"),
        ),
        reference,
        fast,
        lambda s, values: _tiling(s, s[0][axis]),
        work=lambda s, values: Work(
            macs=s[-1][0] * s[-1][1] * s[0][axis], vector=s[-1][0] * s[-1][1] if bias else 0
        ),
        requires=(_INNER,),
        bound=Bound(1, Scale(magnitude, _terms(axis))),
    )


INSTRUCTIONS: tuple[Instruction, ...] = (
    _declare(
        "matmul", 0x0300, "out = a @ b", ("m k", "k n"), 1, _matmul, _reference, _magnitude
    ),
    _declare(
        "matmul_nt", 0x0301, "out = a @ b.T", ("m k", "n k"), 1,
        _matmul_nt, _reference_nt, _magnitude_nt,
    ),
    _declare(
        "matmul_tn", 0x0302, "out = a.T @ b", ("k m", "k n"), 0,
        _matmul_tn, _reference_tn, _magnitude_tn,
    ),
    _declare(
        "matmul_bias", 0x0303, "out = a @ b + bias, the bias added to every row", ("m k", "k n"), 1,
        _matmul_bias, _reference_bias, _magnitude, bias=True,
    ),
)  # fmt: skip
