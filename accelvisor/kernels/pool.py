"""Pooling over NCHW planes.

Where a window holds its maximum more than once, the gradient goes to the first; a window that holds
a NaN gives NaN and passes no gradient back.
"""

from __future__ import annotations

from math import prod

import numpy as np

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
    integer,
    read,
    rows,
    write,
)

_OH = "((h-size)//stride+1)"
_OW = "((w-size)//stride+1)"
_OUT = f"n c {_OH} {_OW}"


def _planes(array: Array) -> Array:
    """(planes, h, w)."""
    return array.reshape(prod(array.shape[:2]), *array.shape[2:])


def _tiling(shapes: Shapes, values: Values) -> Tiling:
    """Plane by plane: as many as there are elements in, times how often each is visited."""
    n, c, h, w = shapes[0]
    size, stride = int(values[0]), int(values[1])
    visits = max(1, _ceil(size, stride)) ** 2
    return Tiling(n * c if h * w else 0, rows(h * w * visits))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _element(planes: Array, a: int, b: int, height: int, width: int, stride: int) -> Array:
    """Element (a, b) of every window: (planes, height, width)."""
    return planes[
        :, a : a + (height - 1) * stride + 1 : stride, b : b + (width - 1) * stride + 1 : stride
    ]


def _greatest(x: Array, out: Array, size: int, stride: int) -> None:
    height, width = out.shape[1:]
    out[...] = _element(x, 0, 0, height, width, stride)
    for a in range(size):
        for b in range(size):
            np.maximum(out, _element(x, a, b, height, width, stride), out=out)
    np.add(out, out.dtype.type(0), out=out)  # a zero is +0.0


def _maxpool(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, out = arrays
    size, stride = values
    _greatest(_planes(x)[start:stop], _planes(out)[start:stop], size, stride)


def _maxpool_backward(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, dy, dx = arrays
    size, stride = values
    errors, planes, target = (_planes(a)[start:stop] for a in (dy, x, dx))
    height, width = errors.shape[1:]
    greatest = np.empty(errors.shape, x.dtype)
    _greatest(planes, greatest, size, stride)
    waiting = np.ones(errors.shape, np.bool_)
    target.fill(0)
    for a in range(size):
        for b in range(size):
            here = _element(planes, a, b, height, width, stride) == greatest
            here &= waiting
            waiting ^= here
            spot = _element(target, a, b, height, width, stride)
            np.add(spot, errors, out=spot, where=here)


def _reference(arrays: Arrays, values: Values) -> None:
    x, out = arrays
    size, stride = values
    for at in np.ndindex(out.shape):
        i, j = at[2] * stride, at[3] * stride
        window = x[at[0], at[1], i : i + size, j : j + size].ravel().tolist()
        unknown = [v for v in window if v != v]
        out[at] = unknown[0] if unknown else max(window) or 0.0


def _reference_backward(arrays: Arrays, values: Values) -> None:
    x, dy, dx = arrays
    dx[...] = _scatter(dy.astype(np.float64), x, dx.shape, values)


def _scatter(dy: Array, x: Array, shape: tuple[int, ...], values: Values) -> Array:
    size, stride = values
    total = np.zeros(shape)
    for at in np.ndindex(dy.shape):
        i, j = at[2] * stride, at[3] * stride
        window = x[at[0], at[1], i : i + size, j : j + size].ravel().tolist()
        if all(v == v for v in window):
            a, b = divmod(window.index(max(window)), size)
            total[at[0], at[1], i + a, j + b] += dy[at]
    return total


def _magnitude(arrays: Arrays, values: Values) -> list[Array]:
    x, dy, dx = arrays
    return [_scatter(np.abs(dy.astype(np.float64)), x, dx.shape, values)]


def _work(shapes: Shapes, values: Values) -> Work:
    return Work(vector=max(prod(s) for s in shapes) * max(1, _ceil(values[0], values[1])) ** 2)


_ATTRIBUTES = (integer("size", 2, 1, 16), integer("stride", 2, 1, 16))
# A tile is at least one plane.
_REQUIRES = ("size <= h", "size <= w", "h*w <= 1048576", f"{_OH}*{_OW}*size*size <= 4194304")

INSTRUCTIONS: tuple[Instruction, ...] = (
    Instruction(
        "maxpool2d",
        0x0320,
        "out = greatest element of each size x size window",
        (read("x", "n c h w"), write("out", _OUT)),
        _reference,
        _maxpool,
        _tiling,
        attributes=_ATTRIBUTES,
        work=_work,
        requires=_REQUIRES,
    ),
    Instruction(
        "maxpool2d_backward",
        0x0321,
        "dx = gradient of maxpool2d by its input x: dy goes to the first greatest of each window",
        (read("x", "n c h w"), read("dy", _OUT), write("dx", "n c h w")),
        _reference_backward,
        _maxpool_backward,
        _tiling,
        attributes=_ATTRIBUTES,
        work=_work,
        requires=_REQUIRES,
        bound=Bound(1, Scale(_magnitude, lambda shapes, values: values[0] * values[0])),
    ),
)
