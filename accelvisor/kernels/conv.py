"""Two-dimensional convolution (cross-correlation, NCHW) and its gradients, through im2col and BLAS.

A tile takes some whole images, or a block of rows (and of columns, when one row is long) of one
image; its columns matrix stays within 4 MiB, so that it is read back from the cache. Tiles depend
on shapes and attributes alone, and each BLAS call has one thread.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from accelvisor.kernels import blas
from accelvisor.kernels.declare import (
    Array,
    Arrays,
    Bound,
    Instruction,
    Operand,
    Scale,
    Shapes,
    Tiling,
    Values,
    Work,
    integer,
    read,
    write,
)

COLUMN_ELEMENTS = 1 << 20
TILE_MACS = 1 << 27


class Geometry(NamedTuple):
    """Sizes of one convolution."""

    n: int
    c: int
    h: int
    w: int
    f: int
    kh: int
    kw: int
    oh: int
    ow: int
    stride: int
    pad: int

    @property
    def window(self) -> int:
        """Elements of the kernel in one channel."""
        return self.kh * self.kw

    @property
    def positions(self) -> int:
        """Output elements of one image in one channel."""
        return self.oh * self.ow

    @property
    def macs(self) -> int:
        """Multiply-accumulates; the gradients have as many."""
        return self.n * self.f * self.positions * self.c * self.window


class Cut(NamedTuple):
    """A tile: ``images`` x ``first`` x ``second``; what the last two are is the kernel's affair."""

    images: int
    first: int
    second: int


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


# --- forward -------------------------------------------------------------------------------------


def _forward(shapes: Shapes, values: Values) -> Geometry:
    (n, c, h, w), (f, _, kh, kw), (_, _, oh, ow) = shapes[0], shapes[1], shapes[-1]
    return Geometry(n, c, h, w, f, kh, kw, oh, ow, int(values[0]), int(values[1]))


def _cut_forward(g: Geometry) -> Cut:
    """Images, rows and columns of a tile."""
    # with padding the region under a tile is copied too, gaps between windows included
    reach = g.window if g.pad == 0 else max(g.kh, g.stride) * max(g.kw, g.stride)
    depth = max(1, g.c * reach)
    fits = max(1, min(COLUMN_ELEMENTS // depth, TILE_MACS // (depth * max(1, g.f))))
    if g.positions <= fits:
        return Cut(min(max(1, g.n), fits // max(1, g.positions)), g.oh, g.ow)
    if g.ow <= fits:
        return Cut(1, fits // g.ow, g.ow)
    return Cut(1, 1, fits)


def _tiling_forward(shapes: Shapes, values: Values) -> Tiling:
    g = _forward(shapes, values)
    if g.n * g.f * g.positions == 0:
        return Tiling(0, 1)
    cut = _cut_forward(g)
    return Tiling(_ceil(g.n, cut.images) * _ceil(g.oh, cut.first) * _ceil(g.ow, cut.second), 1)


def _region(x: Array, g: Geometry, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
    """The input under output rows and columns of images ``x``, zeros where it lies in the
    padding."""
    top, left = rows[0] * g.stride - g.pad, columns[0] * g.stride - g.pad
    bottom = (rows[1] - 1) * g.stride - g.pad + g.kh
    right = (columns[1] - 1) * g.stride - g.pad + g.kw
    if top >= 0 and left >= 0 and bottom <= g.h and right <= g.w:
        return x[:, :, top:bottom, left:right]
    region = np.zeros((*x.shape[:2], bottom - top, right - left), x.dtype)
    t, b = max(0, top), max(0, min(g.h, bottom))
    lft, r = max(0, left), max(0, min(g.w, right))
    if t < b and lft < r:
        region[:, :, t - top : b - top, lft - left : r - left] = x[:, :, t:b, lft:r]
    return region


def _windows(region: Array, g: Geometry, height: int, width: int) -> Array:
    """A read-only view (images, c, kh, kw, height, width) of the windows in ``region``."""
    a, b, y, x = region.strides
    return as_strided(
        region,
        (*region.shape[:2], g.kh, g.kw, height, width),
        (a, b, y, x, y * g.stride, x * g.stride),
        writeable=False,
    )


def _conv2d(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, w, out = arrays[0], arrays[1], arrays[-1]
    g = _forward([a.shape for a in arrays], values)
    cut = _cut_forward(g)
    rest, column = divmod(start, _ceil(g.ow, cut.second))
    group, row = divmod(rest, _ceil(g.oh, cut.first))
    images = slice(group * cut.images, min(g.n, (group + 1) * cut.images))
    i = (row * cut.first, min(g.oh, (row + 1) * cut.first))
    j = (column * cut.second, min(g.ow, (column + 1) * cut.second))
    height, width = i[1] - i[0], j[1] - j[0]
    part = x[images]
    windows = _windows(_region(part, g, i, j), g, height, width)
    columns = windows.reshape(part.shape[0], g.c * g.window, height * width)
    product = _matmul(w.reshape(g.f, g.c * g.window), columns)
    target = out[images, :, i[0] : i[1], j[0] : j[1]]
    target[...] = product.reshape(target.shape)
    if len(arrays) == 4:
        target += arrays[2][:, None, None]


def _matmul(a: Array, b: Array) -> Array:
    blas.single_thread()
    return np.asarray(np.matmul(a, b))


# --- gradient by the kernel ----------------------------------------------------------------------


def _by_kernel(shapes: Shapes, values: Values) -> Geometry:
    (n, c, h, w), (_, f, oh, ow), (_, _, kh, kw) = shapes
    return Geometry(n, c, h, w, f, kh, kw, oh, ow, int(values[0]), int(values[1]))


def _cut_by_kernel(g: Geometry) -> Cut:
    """Images that are unfolded at once, filters and channels of a tile."""
    per_channel = max(1, g.n * g.positions * g.window)
    channels = max(1, min(g.c, 2 * COLUMN_ELEMENTS // per_channel))
    filters = max(1, min(g.f, TILE_MACS // (per_channel * channels)))
    unfolded = max(1, g.positions * g.window * channels)
    return Cut(max(1, min(g.n, COLUMN_ELEMENTS // unfolded)), filters, channels)


def _tiling_by_kernel(shapes: Shapes, values: Values) -> Tiling:
    g = _by_kernel(shapes, values)
    if g.f * g.c * g.window == 0:
        return Tiling(0, 1)
    cut = _cut_by_kernel(g)
    return Tiling(_ceil(g.f, cut.first) * _ceil(g.c, cut.second), 1)


def _conv2d_by_kernel(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, dy, out = arrays
    g = _by_kernel([a.shape for a in arrays], values)
    cut = _cut_by_kernel(g)
    block, channel = divmod(start, _ceil(g.c, cut.second))
    filters = slice(block * cut.first, min(g.f, (block + 1) * cut.first))
    channels = slice(channel * cut.second, min(g.c, (channel + 1) * cut.second))
    target = out[filters, channels]
    total = np.zeros((target.shape[0], target.shape[1] * g.window), out.dtype)
    for first in range(0, g.n, cut.images):
        images = slice(first, first + cut.images)
        part = x[images, channels]
        region = _region(part, g, (0, g.oh), (0, g.ow))
        windows = _windows(region, g, g.oh, g.ow).transpose(1, 2, 3, 0, 4, 5)
        columns = windows.reshape(total.shape[1], part.shape[0] * g.positions)
        errors = dy[images, filters].transpose(1, 0, 2, 3).reshape(total.shape[0], -1)
        total += _matmul(errors, columns.T)
    target[...] = total.reshape(target.shape)


# --- gradient by the input -----------------------------------------------------------------------


def _by_input(shapes: Shapes, values: Values) -> Geometry:
    (_, _, oh, ow), (f, _, kh, kw), (n, c, h, w) = shapes
    return Geometry(n, c, h, w, f, kh, kw, oh, ow, int(values[0]), int(values[1]))


def _cut_by_input(g: Geometry) -> Cut:
    """Images, channels and input rows of a tile."""
    fits = min(COLUMN_ELEMENTS, TILE_MACS // max(1, g.f))
    image = g.window * g.positions
    if g.c * image <= fits:
        return Cut(min(max(1, g.n), fits // max(1, g.c * image)), g.c, g.h)
    if image <= fits:
        return Cut(1, fits // image, g.h)
    rows = (fits // (g.window * g.ow) - (g.kh - 1) // g.stride - 1) * g.stride
    return Cut(1, 1, max(1, min(g.h, rows)))


def _tiling_by_input(shapes: Shapes, values: Values) -> Tiling:
    g = _by_input(shapes, values)
    if g.n * g.c * g.h * g.w == 0:
        return Tiling(0, 1)
    cut = _cut_by_input(g)
    return Tiling(_ceil(g.n, cut.images) * _ceil(g.c, cut.first) * _ceil(g.h, cut.second), 1)


def _conv2d_by_input(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    dy, w, out = arrays
    g = _by_input([a.shape for a in arrays], values)
    cut = _cut_by_input(g)
    rest, block = divmod(start, _ceil(g.h, cut.second))
    group, channel = divmod(rest, _ceil(g.c, cut.first))
    images = slice(group * cut.images, min(g.n, (group + 1) * cut.images))
    channels = slice(channel * cut.first, min(g.c, (channel + 1) * cut.first))
    rows = (block * cut.second, min(g.h, (block + 1) * cut.second))
    target = out[images, channels, rows[0] : rows[1]]
    # output rows whose windows reach the tile's input rows
    low = max(0, _ceil(rows[0] + g.pad - g.kh + 1, g.stride))
    high = min(g.oh, (rows[1] - 1 + g.pad) // g.stride + 1)
    if low >= high or g.f == 0:
        target[...] = 0
        return
    height = high - low
    count, depth = target.shape[:2]
    errors = dy[images, :, low:high].reshape(count, g.f, height * g.ow)
    kernel = w[:, channels].reshape(g.f, depth * g.window)
    spread = _matmul(kernel.T, errors).reshape(count, depth, g.kh, g.kw, height, g.ow)
    base = min(low * g.stride, rows[0] + g.pad)
    top = max((high - 1) * g.stride + g.kh, rows[1] + g.pad)
    padded = np.zeros((count, depth, top - base, g.w + 2 * g.pad), out.dtype)
    offset = low * g.stride - base
    s = g.stride
    for a in range(g.kh):
        for b in range(g.kw):
            first = offset + a
            padded[
                :, :, first : first + (height - 1) * s + 1 : s, b : b + (g.ow - 1) * s + 1 : s
            ] += spread[:, :, a, b]
    first = rows[0] + g.pad - base
    target[...] = padded[:, :, first : first + target.shape[2], g.pad : g.pad + g.w]


# --- references: the definition, one kernel element at a time, in float64 ------------------------


def _padded(x: Array, g: Geometry) -> Array:
    p = g.pad
    return np.pad(x.astype(np.float64), ((0, 0), (0, 0), (p, p), (p, p)))


def _under(padded: Array, g: Geometry, a: int, b: int) -> Array:
    """The input elements that kernel element (a, b) meets: (n, c, oh, ow)."""
    s = g.stride
    return padded[:, :, a : a + (g.oh - 1) * s + 1 : s, b : b + (g.ow - 1) * s + 1 : s]


def _sum_forward(x: Array, w: Array, g: Geometry) -> Array:
    total = np.zeros((g.n, g.f, g.oh, g.ow))
    padded = _padded(x, g)
    for a in range(g.kh):
        for b in range(g.kw):
            total += np.einsum("ncij,fc->nfij", _under(padded, g, a, b), w[:, :, a, b])
    return total


def _sum_by_kernel(x: Array, dy: Array, g: Geometry) -> Array:
    total = np.zeros((g.f, g.c, g.kh, g.kw))
    padded = _padded(x, g)
    for a in range(g.kh):
        for b in range(g.kw):
            total[:, :, a, b] = np.einsum("ncij,nfij->fc", _under(padded, g, a, b), dy)
    return total


def _sum_by_input(dy: Array, w: Array, g: Geometry) -> Array:
    padded = np.zeros((g.n, g.c, g.h + 2 * g.pad, g.w + 2 * g.pad))
    for a in range(g.kh):
        for b in range(g.kw):
            _under(padded, g, a, b)[...] += np.einsum("nfij,fc->ncij", dy, w[:, :, a, b])
    return padded[:, :, g.pad : g.pad + g.h, g.pad : g.pad + g.w]


def _wide(array: Array) -> Array:
    return array.astype(np.float64)


def _reference(arrays: Arrays, values: Values) -> None:
    g = _forward([a.shape for a in arrays], values)
    total = _sum_forward(arrays[0], _wide(arrays[1]), g)
    arrays[-1][...] = total + arrays[2][:, None, None] if len(arrays) == 4 else total


def _reference_by_kernel(arrays: Arrays, values: Values) -> None:
    x, dy, out = arrays
    out[...] = _sum_by_kernel(x, _wide(dy), _by_kernel([a.shape for a in arrays], values))


def _reference_by_input(arrays: Arrays, values: Values) -> None:
    dy, w, out = arrays
    out[...] = _sum_by_input(_wide(dy), _wide(w), _by_input([a.shape for a in arrays], values))


# --- bounds: the same sums of magnitudes ---------------------------------------------------------


def _magnitude(arrays: Arrays, values: Values) -> list[Array]:
    g = _forward([a.shape for a in arrays], values)
    total = _sum_forward(np.abs(arrays[0]), np.abs(_wide(arrays[1])), g)
    return [total + np.abs(arrays[2])[:, None, None] if len(arrays) == 4 else total]


def _magnitude_by_kernel(arrays: Arrays, values: Values) -> list[Array]:
    g = _by_kernel([a.shape for a in arrays], values)
    return [_sum_by_kernel(np.abs(arrays[0]), np.abs(_wide(arrays[1])), g)]


def _magnitude_by_input(arrays: Arrays, values: Values) -> list[Array]:
    g = _by_input([a.shape for a in arrays], values)
    return [_sum_by_input(np.abs(_wide(arrays[0])), np.abs(_wide(arrays[1])), g)]


# --- declarations --------------------------------------------------------------------------------

_OH = "((h+2*pad-kh)//stride+1)"
_OW = "((w+2*pad-kw)//stride+1)"
_ATTRIBUTES = (integer("stride", 1, 1, 8), integer("pad", 0, 0, 32))
# The kernel lies in the padded image; one output element costs no more than a few milliseconds.
_KERNEL = (
    "kh >= 1", "kw >= 1", "kh <= 64", "kw <= 64",
    "kh <= h+2*pad", "kw <= w+2*pad", "c*kh*kw <= 1048576", "f*c*kh*kw <= 33554432",
)  # fmt: skip


def _conv(name: str, opcode: int, doc: str, bias: tuple[Operand, ...]) -> Instruction:
    return Instruction(
        name,
        opcode,
        doc,
        (read("x", "n c h w"), read("w", "f c kh kw"), *bias, write("out", f"n f {_OH} {_OW}")),
        _reference,
        _conv2d,
        _tiling_forward,
        attributes=_ATTRIBUTES,
        work=lambda shapes, values: Work(macs=_forward(shapes, values).macs),
        requires=_KERNEL,
        bound=Bound(
            1,
            Scale(
                _magnitude,
                lambda shapes, values: shapes[1][1] * shapes[1][2] * shapes[1][3] + 2,
            ),
        ),
    )


INSTRUCTIONS: tuple[Instruction, ...] = (
    _conv("conv2d", 0x0310, "out = x convolved with w (no flip), zero padding", ()),
    _conv("conv2d_bias", 0x0311, "conv2d, then bias added to each channel", (read("bias", "f"),)),
    Instruction(
        "conv2d_backward_kernel",
        0x0312,
        "dw = gradient of conv2d by its kernel, for a kernel of kh x kw",
        (read("x", "n c h w"), read("dy", f"n f {_OH} {_OW}"), write("dw", "f c kh kw")),
        _reference_by_kernel,
        _conv2d_by_kernel,
        _tiling_by_kernel,
        attributes=(*_ATTRIBUTES, integer("kh", 3, 1, 64), integer("kw", 3, 1, 64)),
        work=lambda shapes, values: Work(macs=_by_kernel(shapes, values).macs),
        # a tile unfolds one channel of the whole batch
        requires=("kh <= h+2*pad", "kw <= w+2*pad", f"n*{_OH}*{_OW}*kh*kw <= 8388608"),
        bound=Bound(
            1,
            Scale(
                _magnitude_by_kernel,
                lambda shapes, values: shapes[1][0] * shapes[1][2] * shapes[1][3] + 2,
            ),
        ),
    ),
    Instruction(
        "conv2d_backward_input",
        0x0313,
        "dx = gradient of conv2d by its input, for an input of h x w",
        (read("dy", "n f oh ow"), read("w", "f c kh kw"), write("dx", "n c h w")),
        _reference_by_input,
        _conv2d_by_input,
        _tiling_by_input,
        attributes=(*_ATTRIBUTES, integer("h", 28, 1, 1 << 20), integer("w", 28, 1, 1 << 20)),
        work=lambda shapes, values: Work(macs=_by_input(shapes, values).macs),
        requires=(
            *_KERNEL,
            f"oh == {_OH}",
            f"ow == {_OW}",
            # a tile is at least one input row of one channel
            "kh*kw*(kh+1)*ow <= 4194304",
            "f*kh*kw*(kh+1)*ow <= 268435456",
        ),
        bound=Bound(
            1,
            Scale(
                _magnitude_by_input,
                lambda shapes, values: shapes[1][0] * shapes[1][2] * shapes[1][3] + 2,
            ),
        ),
    ),
)
