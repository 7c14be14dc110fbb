"""Elementwise instructions: unary functions, binary operations in four forms, comparisons, select.

Special values: NaN in gives NaN out. Signed zeros and denormals follow IEEE 754, with one addition:
``relu``, ``maximum`` and ``minimum`` return +0.0 wherever the result is a zero, since IEEE 754 and
processors leave its sign open. Integer arithmetic wraps. Nothing raises or warns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from accelvisor.abi.dtypes import DType
from accelvisor.kernels.declare import (
    F32,
    FLOATS,
    NUMBERS,
    SAME_BITS,
    Array,
    Arrays,
    Bound,
    Instruction,
    Operand,
    Shapes,
    Tiling,
    Values,
    elementwise_work,
    flat,
    read,
    real,
    rows,
    spans,
    write,
)

# --- unary ---------------------------------------------------------------------------------------


def _relu(x: Array, out: Array) -> None:
    np.maximum(x, x.dtype.type(0), out=out)
    np.add(out, x.dtype.type(0), out=out)  # -0.0 becomes +0.0, whatever maximum chose


def _sigmoid(x: Array, out: Array) -> None:
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, np.float32(1), out=out)
    np.divide(np.float32(1), out, out=out)


# gelu in its tanh form (Hendrycks and Gimpel 2016), x / (1 + exp(-2u)), u = c * (x + 0.044715 x^3)
_GELU_C = (2 / np.pi) ** 0.5
_GELU_D = 0.044715


def _gelu(x: Array, out: Array) -> None:
    u = np.multiply(x, x)
    np.multiply(u, np.float32(-2 * _GELU_C * _GELU_D), out=u)
    np.add(u, np.float32(-2 * _GELU_C), out=u)
    np.multiply(u, x, out=u)
    np.exp(u, out=u)
    np.add(u, np.float32(1), out=u)
    # exp overflows for x < -10: then u is inf and x / u is -0.0; only x = -inf needs care.
    np.divide(x, u, out=out)
    np.copyto(out, np.float32(-0.0), where=np.isneginf(x))


def _reference_sign_flip(x: Array) -> Array:
    return np.copysign(x, np.where(np.signbit(x), 1.0, -1.0)).astype(x.dtype)


def _reference_relu(x: Array) -> Array:
    return np.where(x > 0, x, np.where(x == x, x.dtype.type(0), x))


def _reference_sigmoid(x: Array) -> Array:
    tail = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + tail), tail / (1 + tail))


def _reference_gelu(x: Array) -> Array:
    u = _GELU_C * (x + _GELU_D * x**3)
    return np.where(np.isneginf(x), -0.0, x * _reference_sigmoid(2 * u))


def _unary(
    name: str,
    opcode: int,
    doc: str,
    fast: Callable[..., Any],
    reference: Callable[[Array], Array],
    *,
    ulps: int = 0,
    dtypes: tuple[DType, ...] = F32,
    weight: int = 1,
) -> Instruction:
    """A function of one operand. References of inexact functions compute in float64."""

    def run_fast(arrays: Arrays, values: Values, start: int, stop: int) -> None:
        x, out = spans(arrays, start, stop)
        fast(x, out)

    def run_reference(arrays: Arrays, values: Values) -> None:
        x, out = arrays
        out[...] = reference(x.astype(np.float64) if ulps else x)

    return Instruction(
        name,
        opcode,
        doc,
        (read("x", "*s", dtypes), write("out", "*s", dtypes, like="x")),
        run_reference,
        run_fast,
        flat,
        work=elementwise_work(weight),
        bound=Bound(ulps),
    )


_UNARY = (
    _unary(
        "neg", 0x0100, "out = -x", np.negative, _reference_sign_flip, dtypes=FLOATS
    ),
    _unary(
        "abs", 0x0101, "out = |x|", np.absolute,
        lambda x: np.copysign(x, x.dtype.type(1)), dtypes=FLOATS,
    ),
    _unary(
        "relu", 0x0102, "out = max(x, 0)", _relu, _reference_relu, dtypes=FLOATS
    ),
    _unary("exp", 0x0103, "out = e ** x", np.exp, np.exp, ulps=4, weight=8),
    _unary(
        "log", 0x0104, "out = natural logarithm of x; -inf at 0, NaN below", np.log, np.log,
        ulps=4, weight=8,
    ),
    _unary(
        "sqrt", 0x0105, "out = square root of x; NaN below 0", np.sqrt,
        # float64 carries more than twice the bits, so rounding twice is rounding once
        lambda x: np.sqrt(x.astype(np.float64)).astype(np.float32), weight=4,
    ),
    _unary("tanh", 0x0106, "out = tanh(x)", np.tanh, np.tanh, ulps=4, weight=8),
    _unary(
        "sigmoid", 0x0107, "out = 1 / (1 + e ** -x)", _sigmoid, _reference_sigmoid,
        ulps=8, weight=12,
    ),
    _unary(
        "gelu", 0x0108, "out = x * Phi(x) in the tanh form of Hendrycks and Gimpel", _gelu,
        # the exponent's own rounding is amplified by its size, at most 88 before exp overflows
        _reference_gelu, ulps=256, weight=16,
    ),
)  # fmt: skip

# --- binary --------------------------------------------------------------------------------------


def _settled(choose: Any) -> Callable[[Array, Any, Array], None]:
    """maximum or minimum with a zero result always +0.0 (for integers that changes nothing)."""

    def fast(a: Array, b: Any, out: Array) -> None:
        choose(a, b, out=out)
        np.add(out, out.dtype.type(0), out=out)

    return fast


def _plain(function: Any) -> Callable[[Array, Any, Array], None]:
    def fast(a: Array, b: Any, out: Array) -> None:
        function(a, b, out=out)

    return fast


def _divide(a: float, b: float) -> float:
    """IEEE 754 division of Python floats, which raise by zero on their own."""
    if b != 0:
        return a / b
    if a == 0 or a != a:
        return float("nan")
    return float(np.copysign(np.inf, a)) * float(np.copysign(1.0, b))


def _choose(keep: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """maximum or minimum of two Python numbers, NaN first, zeros positive."""

    def pick(a: Any, b: Any) -> Any:
        if a != a or b != b:
            return float("nan")
        chosen = a if keep(a, b) else b
        return chosen if chosen else abs(chosen)

    return pick


def _by_element(function: Callable[[Any, Any], Any], a: Array, b: Array, out: Array) -> None:
    """out = function of Python numbers, one element at a time: exact, then one rounding (float32:
    the float64 result rounds to the same float32, Figueroa 1995) or wrapped to the integer's width.
    """
    flat_a, flat_b = np.broadcast_arrays(a, b)
    results = [
        function(p, q)
        for p, q in zip(flat_a.ravel().tolist(), flat_b.ravel().tolist(), strict=True)
    ]
    if out.dtype.kind == "i":
        bits = out.dtype.itemsize * 8
        results = [(r + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) for r in results]
    out[...] = np.array(results, np.float64 if out.dtype.kind == "f" else out.dtype).reshape(
        out.shape
    )


_BINARY: tuple[tuple[str, str, Any, Any, tuple[DType, ...]], ...] = (
    ("add", "a + b", _plain(np.add), operator.add, NUMBERS),
    ("sub", "a - b", _plain(np.subtract), operator.sub, NUMBERS),
    ("mul", "a * b", _plain(np.multiply), operator.mul, NUMBERS),
    ("div", "a / b", _plain(np.divide), _divide, FLOATS),
    ("maximum", "the greater of a and b", _settled(np.maximum), _choose(operator.gt), NUMBERS),
    ("minimum", "the lesser of a and b", _settled(np.minimum), _choose(operator.lt), NUMBERS),
)

# A row (or column) is the unit of a tile here, so its length is bounded.
_ROW_LIMIT = "n <= 4194304"


def _by_rows(shapes: Shapes, values: Values) -> Tiling:
    """Cut an output ``*b n`` row by row."""
    *outer, n = shapes[-1]
    return Tiling(prod(outer) if n else 0, rows(n))


def _matrix(array: Array) -> Array:
    """``*b n`` as two dims."""
    return array.reshape(prod(array.shape[:-1]), array.shape[-1])


def _same(fast: Any) -> Callable[[Arrays, Values, int, int], None]:
    def run(arrays: Arrays, values: Values, start: int, stop: int) -> None:
        a, b, out = spans(arrays, start, stop)
        fast(a, b, out)

    return run


def _row(fast: Any) -> Callable[[Arrays, Values, int, int], None]:
    def run(arrays: Arrays, values: Values, start: int, stop: int) -> None:
        a, b, out = arrays
        fast(_matrix(a)[start:stop], b, _matrix(out)[start:stop])

    return run


def _column(fast: Any) -> Callable[[Arrays, Values, int, int], None]:
    def run(arrays: Arrays, values: Values, start: int, stop: int) -> None:
        a, b, out = arrays
        column = b.reshape(b.size, 1)
        fast(_matrix(a)[start:stop], column[start:stop], _matrix(out)[start:stop])

    return run


def _scalar(fast: Any) -> Callable[[Arrays, Values, int, int], None]:
    def run(arrays: Arrays, values: Values, start: int, stop: int) -> None:
        a, out = spans(arrays, start, stop)
        fast(a, a.dtype.type(values[0]), out)

    return run


def _binary_forms(index: int) -> list[Instruction]:
    """Same shape, a row against the last axis, a column against the leading axes, a scalar."""
    name, formula, fast, exact, dtypes = _BINARY[index]

    def declare(
        suffix: str, opcode: int, note: str, b: Operand | None, shape: str, run: Any, tiling: Any
    ) -> Instruction:
        def reference(arrays: Arrays, values: Values) -> None:
            a, out = arrays[0], arrays[-1]
            second = arrays[1] if b is not None else a.dtype.type(values[0])
            if suffix == "_column":
                second = second[..., None]
            _by_element(exact, a, np.asarray(second), out)

        kinds = dtypes if b is not None else FLOATS
        operands = (read("a", shape, kinds), write("out", shape, kinds, like="a"))
        return Instruction(
            name + suffix,
            opcode + index,
            f"out = {formula}{note}",
            operands if b is None else (operands[0], b, operands[1]),
            reference,
            run(fast),
            tiling,
            attributes=() if b is not None else (real("b", 0.0),),
            requires=(_ROW_LIMIT,) if tiling is _by_rows else (),
            bound=SAME_BITS,
        )

    return [
        declare("", 0x0120, "", read("b", "*s", dtypes, like="a"), "*s", _same, flat),
        declare(
            "_row", 0x0130, ", b a row against the last axis",
            read("b", "n", dtypes, like="a"), "*r n", _row, _by_rows,
        ),
        declare(
            "_column", 0x0140, ", b one number for each row",
            read("b", "*r", dtypes, like="a"), "*r n", _column, _by_rows,
        ),
        declare("_scalar", 0x0150, ", b a number in a's dtype", None, "*s", _scalar, flat),
    ]  # fmt: skip


# --- comparisons, select -------------------------------------------------------------------------


def _comparison(name: str, opcode: int, symbol: str, fast: Any, exact: Any) -> Instruction:
    def reference(arrays: Arrays, values: Values) -> None:
        a, b, out = arrays
        pairs = zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)
        out[...] = np.array([exact(p, q) for p, q in pairs], np.bool_).reshape(out.shape)

    return Instruction(
        name,
        opcode,
        f"out = a {symbol} b; false against NaN",
        (
            read("a", "*s", NUMBERS),
            read("b", "*s", NUMBERS, like="a"),
            write("out", "*s", (DType.BOOL,)),
        ),
        reference,
        _same(_plain(fast)),
        flat,
    )


def _select(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    condition, a, b, out = spans(arrays, start, stop)
    np.copyto(out, b)
    np.copyto(out, a, where=condition)


def _reference_select(arrays: Arrays, values: Values) -> None:
    condition, a, b, out = arrays
    out[...] = np.where(condition, a, b)


INSTRUCTIONS: tuple[Instruction, ...] = (
    *_UNARY,
    *(form for index in range(len(_BINARY)) for form in _binary_forms(index)),
    _comparison("equal", 0x0160, "==", np.equal, operator.eq),
    _comparison("less", 0x0161, "<", np.less, operator.lt),
    _comparison("less_equal", 0x0162, "<=", np.less_equal, operator.le),
    Instruction(
        "select",
        0x0163,
        "out = a where the condition holds, else b",
        (
            read("condition", "*s", (DType.BOOL,)),
            read("a", "*s", NUMBERS),
            read("b", "*s", NUMBERS, like="a"),
            write("out", "*s", NUMBERS, like="a"),
        ),
        _reference_select,
        _select,
        flat,
    ),
)
