"""What instructions should compute, in plain numpy: the self-test's own knowledge.

Names that a device has and this table has not are still executed by the self-test. Each case is
written by what the instruction's documentation says, not by looking at the host's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from accelvisor.abi.dtypes import DType
from accelvisor.collectives import reference
from accelvisor.collectives.kinds import BY_CODE, kind_of

Array = npt.NDArray[Any]

#: Unit roundoff of float32, times this much and the length of a sum, is the error we accept.
_ULPS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One instruction on small arrays.

    Attributes:
        compute: the formula; takes the inputs and the attributes by name; an array or a tuple.
        inputs: tokens of kind and shape, e.g. ``f3,5``: ``f`` float32, ``p`` positive float32,
            ``i`` int64 below 5, ``b`` bool, ``s`` float32 of which most are zero, ``z`` the same,
            packed.
        attributes: what the call is given.
        terms: the length of the longest sum, for the accepted error; 0 asks for equality.
        shape, dtype: of the result, where they do not follow from the inputs.
    """

    compute: Callable[..., Any]
    inputs: str = "f3,5"
    attributes: Mapping[str, int | float] = field(default_factory=dict)
    terms: int = 1
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def arrays(self, seed: int) -> list[Array]:
        """The inputs, the same for the same seed."""
        random = np.random.RandomState(seed)
        return [_make(token, random) for token in self.inputs.split()]

    def agrees(self, found: Array, wanted: Array) -> bool:
        """Whether a result is the wanted one, within the rounding of its sums."""
        if found.shape != wanted.shape:
            return False
        if self.terms == 0 or wanted.dtype.kind != "f":
            return bool(np.array_equal(found, wanted, equal_nan=wanted.dtype.kind == "f"))
        error = np.abs(found.astype(np.float64) - wanted)
        scale = np.abs(wanted) + math.sqrt(self.terms)
        return bool(np.all(error <= _ULPS * self.terms * 2.0**-24 * scale))


def _make(token: str, random: np.random.RandomState) -> Array:
    kind, text = token[0], token[1:]
    shape = tuple(int(d) for d in text.split(",") if d)
    if kind == "i":
        return random.randint(0, 5, shape).astype(np.int64)
    if kind == "b":
        return random.randint(0, 2, shape).astype(np.bool_)
    values = random.standard_normal(shape)
    if kind in "sz":
        values[random.uniform(size=shape) < 0.7] = 0
        sparse = values.astype(np.float32)
        return sparse if kind == "s" else _packed(sparse)
    if kind == "p":
        values = np.abs(values) + 0.25
    return values.astype(np.float32)


def _packed(x: Array) -> Array:
    """A packed tensor of one block: its room is 16 elements more than the block has."""
    data = reference.pack(x, kind_of(x))
    return np.frombuffer(data.ljust(4 * (x.size + 16), b"\0"), np.float32)


def _dense(packed: Array) -> Array:
    return reference.unpack(packed.tobytes(), BY_CODE[DType.FLOAT32])


def _f64(function: Callable[..., Any]) -> Callable[..., Any]:
    """The formula in float64, so that its own rounding does not count."""

    def wide(*arrays: Array, **attributes: Any) -> Any:
        return function(
            *[a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays], **attributes
        )

    return wide


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _cross_entropy(x: Array, y: Array, scale: float) -> tuple[Array, Array]:
    p = _softmax(x)
    rows = np.arange(len(y))
    loss = -np.log(p[rows, y])
    p[rows, y] -= 1
    return loss, p * scale


def _patches(x: Array, size: tuple[int, int], stride: int, pad: int = 0) -> Array:
    """(n, c, oh, ow, kh, kw) windows of x (n, c, h, w)."""
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(x, size, axis=(2, 3))
    return windows[:, :, ::stride, ::stride]


def _conv(x: Array, w: Array, stride: int = 1, pad: int = 0) -> Array:
    windows = _patches(x, (w.shape[2], w.shape[3]), stride, pad)
    return np.asarray(np.einsum("nchwij,fcij->nfhw", windows, w))


def _conv_kernel(x: Array, dy: Array, stride: int, pad: int, kh: int, kw: int) -> Array:
    windows = _patches(x, (kh, kw), stride, pad)
    return np.asarray(np.einsum("nchwij,nfhw->fcij", windows, dy))


def _conv_input(dy: Array, w: Array, stride: int, pad: int, h: int, w_: int) -> Array:
    dx = np.zeros((dy.shape[0], w.shape[1], h + 2 * pad, w_ + 2 * pad))
    for i in range(dy.shape[2]):
        for j in range(dy.shape[3]):
            part = np.einsum("nf,fcij->ncij", dy[:, :, i, j], w)
            at = (slice(None), slice(None))
            dx[(*at, slice(i * stride, i * stride + w.shape[2]),
                slice(j * stride, j * stride + w.shape[3]))] += part  # fmt: skip
    return dx[:, :, pad : pad + h, pad : pad + w_]


def _pool(x: Array, size: int, stride: int) -> Array:
    return np.asarray(_patches(x, (size, size), stride).max(axis=(4, 5)))


def _pool_back(x: Array, dy: Array, size: int, stride: int) -> Array:
    dx = np.zeros_like(x)
    for n, c, i, j in np.ndindex(*dy.shape):
        part = x[n, c, i * stride : i * stride + size, j * stride : j * stride + size]
        a, b = np.unravel_index(part.argmax(), part.shape)
        dx[n, c, i * stride + a, j * stride + b] += dy[n, c, i, j]
    return dx


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def _momentum(
    w: Array, g: Array, v: Array, rate: float, momentum: float, decay: float
) -> tuple[Array, Array]:
    new = momentum * v + g + decay * w
    return w - rate * new, new


_PAIRS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.mean, "max": np.max}
_AXES: dict[str, Any] = {"last": -1, "rows": 0, "channels": (0, 2, 3), "all": None}


def _derived() -> dict[str, Case]:
    """The families: pairs against rows, columns, scalars; reductions over axes."""
    cases: dict[str, Case] = {}
    for name, f in _PAIRS.items():
        cases[name] = Case(_f64(f), "f3,5 p3,5")
        cases[f"{name}_row"] = Case(_f64(f), "f3,5 p5")
        cases[f"{name}_column"] = Case(
            _f64(lambda a, b, f=f: f(a, b[..., None])), "f2,3,5 p2,3"
        )
        cases[f"{name}_scalar"] = Case(
            _f64(lambda a, b, f=f: f(a, b)), "f3,5", {"b": 1.5}
        )
    for name, f in _REDUCTIONS.items():
        for suffix, axis in _AXES.items():
            shape = "f2,3,4,5" if suffix == "channels" else "f4,5"
            terms = 0 if name == "max" else 40
            cases[f"{name}_{suffix}"] = Case(
                _f64(lambda x, f=f, axis=axis: np.asarray(f(x, axis=axis))), shape, terms=terms
            )
    return cases


EXPECTED: dict[str, Case] = {
    **_derived(),
    "copy": Case(lambda x: x, terms=0),
    "fill": Case(
        lambda value: np.full((3, 5), value, np.float32), "", {"value": 2.5}, 0, (3, 5), "float32"
    ),
    "cast": Case(lambda x: x.astype(np.int32), dtype="int32", terms=0),
    "reshape": Case(lambda x: x.reshape(5, 3), shape=(5, 3), terms=0),
    "flatten": Case(lambda x: x.reshape(2, 15), "f2,3,5", terms=0),
    "transpose": Case(lambda x: x.T, terms=0),
    "gather_rows": Case(lambda x, i: x[i], "f5,3 i7", terms=0),
    "one_hot": Case(
        lambda i, classes: np.eye(classes, dtype=np.float32)[i], "i7", {"classes": 6}, 0
    ),
    "neg": Case(lambda x: -x, terms=0),
    "abs": Case(np.abs, terms=0),
    "relu": Case(lambda x: np.maximum(x, np.float32(0)), terms=0),
    "exp": Case(_f64(np.exp)),
    "log": Case(_f64(np.log), "p3,5"),
    "sqrt": Case(_f64(np.sqrt), "p3,5"),
    "tanh": Case(_f64(np.tanh)),
    "sigmoid": Case(_f64(lambda x: 1 / (1 + np.exp(-x)))),
    "gelu": Case(_f64(_gelu), terms=4),
    "equal": Case(lambda a, b: a == b, "f3,5 f3,5", terms=0),
    "less": Case(lambda a, b: a < b, "f3,5 f3,5", terms=0),
    "less_equal": Case(lambda a, b: a <= b, "f3,5 f3,5", terms=0),
    "select": Case(np.where, "b3,5 f3,5 f3,5", terms=0),
    "argmax_last": Case(lambda x: x.argmax(axis=-1), terms=0),
    "matmul": Case(_f64(np.matmul), "f4,7 f7,3", terms=7),
    "matmul_nt": Case(_f64(lambda a, b: a @ b.T), "f4,7 f3,7", terms=7),
    "matmul_tn": Case(_f64(lambda a, b: a.T @ b), "f7,4 f7,3", terms=7),
    "matmul_bias": Case(_f64(lambda a, b, c: a @ b + c), "f4,7 f7,3 f3", terms=8),
    "conv2d": Case(_f64(_conv), "f2,3,6,5 f4,3,3,2", {"stride": 2, "pad": 1}, 18),
    "conv2d_bias": Case(
        _f64(lambda x, w, b, **a: _conv(x, w, **a) + b[:, None, None]),
        "f2,3,6,5 f4,3,3,2 f4",
        {"stride": 1, "pad": 0},
        19,
    ),
    "conv2d_backward_kernel": Case(
        _f64(_conv_kernel), "f2,3,6,5 f2,4,4,3", {"stride": 1, "pad": 0, "kh": 3, "kw": 3}, 24
    ),
    "conv2d_backward_input": Case(
        _f64(lambda dy, k, stride, pad, h, w: _conv_input(dy, k, stride, pad, h, w)),
        "f2,4,4,3 f4,3,3,3",
        {"stride": 1, "pad": 0, "h": 6, "w": 5},
        36,
    ),
    "maxpool2d": Case(_pool, "f2,3,6,5", {"size": 2, "stride": 2}, 0),
    "maxpool2d_backward": Case(_pool_back, "f2,3,6,5 f2,3,3,2", {"size": 2, "stride": 2}, 1),
    "softmax": Case(_f64(_softmax), terms=5),
    "softmax_cross_entropy": Case(_f64(_cross_entropy), "f4,5 i4", {"scale": 0.25}, 5),
    "relu_backward": Case(lambda d, y: np.where(y > 0, d, 0), "f3,5 f3,5", terms=0),
    "tanh_backward": Case(_f64(lambda d, y: d * (1 - y * y)), "f3,5 f3,5", terms=4),
    "sigmoid_backward": Case(_f64(lambda d, y: d * y * (1 - y)), "f3,5 f3,5", terms=4),
    "axpy": Case(_f64(lambda x, y, alpha: alpha * x + y), "f3,5 f3,5", {"alpha": 0.5}, 2),
    "sgd": Case(
        _f64(lambda w, g, rate, decay: w - rate * (g + decay * w)),
        "f3,5 f3,5",
        {"rate": 0.125, "decay": 0.25},
        3,
    ),
    "link_copy": Case(lambda x: x, terms=0),
    "ring_hop": Case(lambda a, b: a + b, "f3,5 f3,5", terms=0),
    "zvc_pack": Case(_packed, "s40", terms=0),
    "zvc_hop": Case(lambda a, b: _packed(_dense(a) + b), "z40 s40", terms=0),
    "zvc_unpack": Case(_dense, "z40", terms=0, shape=(40,)),
    "sgd_momentum": Case(
        _f64(_momentum),
        "f3,5 f3,5 f3,5",
        {"rate": 0.125, "momentum": 0.5, "decay": 0.25},
        4,
    ),
}
