"""What training a network needs beside products: softmax, its loss, gradients, updates.

Updates read the old tensors and write the new ones; a program may bind one slot to both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from accelvisor.kernels.declare import (
    INDEX,
    SAME_BITS,
    Array,
    Arrays,
    Bound,
    Instruction,
    Scale,
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
from accelvisor.kernels.move import checked_indices

# --- softmax and its loss ------------------------------------------------------------------------


def _by_rows(shapes: Shapes, values: Values) -> Tiling:
    *outer, n = shapes[0]
    count = 1
    for dim in outer:
        count *= dim
    return Tiling(count if n else 0, rows(n))


def _matrix(array: Array) -> Array:
    return array.reshape(array.size // array.shape[-1], array.shape[-1])


def _softmax(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, out = arrays
    part = _matrix(out)[start:stop]
    _exponentials(_matrix(x)[start:stop], part)
    np.divide(part, np.add.reduce(part, axis=1, keepdims=True), out=part)


def _exponentials(x: Array, out: Array) -> Array:
    """out = exp(x - row maximum), which cannot overflow; returns the maxima as a column."""
    greatest = np.maximum.reduce(x, axis=1, keepdims=True)
    np.subtract(x, greatest, out=out)
    np.exp(out, out=out)
    return np.asarray(greatest)


def _reference_softmax(arrays: Arrays, values: Values) -> None:
    x, out = arrays
    if x.size:
        for source, target in zip(_matrix(x), _matrix(out), strict=True):
            target[...] = _probabilities(source)


def _probabilities(row: Array) -> Array:
    wide = row.astype(np.float64)
    powers = np.exp(wide - wide.max())
    return np.asarray(powers / powers.sum())


def _cross_entropy(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    logits, labels, loss, grad = arrays
    part, scale = grad[start:stop], np.float32(values[0])
    chosen = checked_indices(labels[start:stop], logits.shape[1], "labels")
    x = logits[start:stop]
    here = np.arange(stop - start)
    greatest = _exponentials(x, part)
    total = np.add.reduce(part, axis=1, keepdims=True)
    np.subtract(np.log(total[:, 0]), x[here, chosen] - greatest[:, 0], out=loss[start:stop])
    np.divide(part, total, out=part)
    part[here, chosen] -= np.float32(1)
    np.multiply(part, scale, out=part)


def _reference_cross_entropy(arrays: Arrays, values: Values) -> None:
    logits, labels, loss, grad = arrays
    checked_indices(labels, logits.shape[1], "labels")
    for i, label in enumerate(labels.tolist()):
        wide = logits[i].astype(np.float64)
        gradient = _probabilities(logits[i])
        # log-sum-exp relative to the label's own logit
        shift = wide.max()
        loss[i] = shift + np.log(np.exp(wide - shift).sum()) - wide[label]
        gradient[label] -= 1
        grad[i] = gradient * float(np.float32(values[0]))


def _magnitude_cross_entropy(arrays: Arrays, values: Values) -> list[Array]:
    logits, labels, loss, grad = arrays
    losses, gradients = np.zeros(loss.shape), np.zeros(grad.shape)
    for i, label in enumerate(labels.tolist()):
        wide = logits[i].astype(np.float64)
        losses[i] = 1 + np.log(len(wide)) + 2 * np.abs(wide).max()
        gradients[i] = _probabilities(logits[i])
        gradients[i, label] += 1
    return [losses, gradients * abs(float(np.float32(values[0])))]


# --- gradients of activations --------------------------------------------------------------------


def _relu_backward(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    dy, y, out = spans(arrays, start, stop)
    out.fill(0)
    np.copyto(out, dy, where=y > 0)


def _tanh_backward(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    dy, y, out = spans(arrays, start, stop)
    np.subtract(np.float32(1), y, out=out)
    np.multiply(out, np.add(y, np.float32(1)), out=out)  # (1 - y)(1 + y) does not cancel
    np.multiply(out, dy, out=out)


def _sigmoid_backward(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    dy, y, out = spans(arrays, start, stop)
    np.subtract(np.float32(1), y, out=out)
    np.multiply(out, y, out=out)
    np.multiply(out, dy, out=out)


def _in_float64(
    formula: Callable[..., Any],
) -> Callable[[Arrays, Values], None]:
    """A reference of one output: ``formula`` of the inputs in float64 and of the attributes as the
    device sees them (float32).
    """

    def reference(arrays: Arrays, values: Values) -> None:
        inputs = [a.astype(np.float64) for a in arrays[:-1]]
        arrays[-1][...] = formula(*inputs, *(float(np.float32(v)) for v in values))

    return reference


# --- updates -------------------------------------------------------------------------------------


def _axpy(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, y, out = spans(arrays, start, stop)
    np.multiply(x, np.float32(values[0]), out=out)
    np.add(out, y, out=out)


def _sgd(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    w, g, out = spans(arrays, start, stop)
    rate, decay = np.float32(values[0]), np.float32(values[1])
    np.multiply(w, decay, out=out)
    np.add(out, g, out=out)
    np.multiply(out, rate, out=out)
    np.subtract(w, out, out=out)


def _momentum(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    w, g, v, new_w, new_v = spans(arrays, start, stop)
    rate, momentum, decay = (np.float32(x) for x in values)
    np.multiply(w, decay, out=new_w)
    np.add(new_w, g, out=new_w)
    np.multiply(v, momentum, out=new_v)
    np.add(new_v, new_w, out=new_v)
    np.multiply(new_v, rate, out=new_w)
    np.subtract(w, new_w, out=new_w)


def _momentum_float64(arrays: Arrays, values: Values) -> tuple[Array, Array]:
    w, g, v = (a.astype(np.float64) for a in arrays[:3])
    rate, momentum, decay = (float(np.float32(x)) for x in values)
    new_v = momentum * v + (g + decay * w)
    return w - rate * new_v, new_v


def _reference_momentum(arrays: Arrays, values: Values) -> None:
    arrays[3][...], arrays[4][...] = _momentum_float64(arrays, values)


def _magnitude_momentum(arrays: Arrays, values: Values) -> list[Array]:
    rate, momentum, decay = values
    w, g, v = (np.abs(a) for a in arrays[:3])
    # with -rate the two terms of the new weight add up in magnitude
    return list(_momentum_float64([w, g, v], (-abs(rate), abs(momentum), abs(decay))))


def _sized(magnitude: Callable[..., Any], roundings: int) -> Bound:
    """A bound of ``roundings`` eps against the sum of the magnitudes of a formula's terms."""

    def scale(arrays: Arrays, values: Values) -> list[Array]:
        inputs = [np.abs(a.astype(np.float64)) for a in arrays[:-1]]
        return [magnitude(*inputs, *(abs(v) for v in values))]

    return Bound(1, Scale(scale, lambda shapes, values: roundings))


def _gradient(
    name: str, opcode: int, doc: str, fast: Any, formula: Callable[..., Any], bound: Bound
) -> Instruction:
    return Instruction(
        name,
        opcode,
        doc,
        (read("dy", "*s"), read("y", "*s"), write("dx", "*s")),
        _in_float64(formula),
        fast,
        flat,
        bound=bound,
    )


_ROW_LIMIT = "n <= 4194304"

INSTRUCTIONS: tuple[Instruction, ...] = (
    Instruction(
        "softmax",
        0x0400,
        "out = softmax of x over the last axis; NaN for a row with NaN or +inf or of -inf alone",
        (read("x", "*r n"), write("out", "*r n")),
        _reference_softmax,
        _softmax,
        _by_rows,
        work=elementwise_work(12),
        requires=(_ROW_LIMIT,),
        # x - max is rounded once; exp amplifies that by its size, at most 104 before it is 0
        bound=Bound(256),
    ),
    Instruction(
        "softmax_cross_entropy",
        0x0401,
        "loss[i] = -log softmax(logits[i])[labels[i]]; grad = scale * d loss / d logits; "
        "a label out of range is a fault",
        (
            read("logits", "m n"),
            read("labels", "m", INDEX, below="n"),
            write("loss", "m"),
            write("grad", "m n"),
        ),
        _reference_cross_entropy,
        _cross_entropy,
        _by_rows,
        attributes=(real("scale", 1.0),),
        work=elementwise_work(16),
        requires=("n >= 1", _ROW_LIMIT),
        bound=Bound(1, Scale(_magnitude_cross_entropy, lambda shapes, values: 256)),
    ),
    _gradient(
        "relu_backward", 0x0410, "dx = dy where y > 0, else 0", _relu_backward,
        lambda dy, y: np.where(y > 0, dy, 0.0), SAME_BITS,
    ),
    _gradient(
        "tanh_backward", 0x0411, "dx = dy * (1 - y * y), y = tanh(x)", _tanh_backward,
        lambda dy, y: dy * ((1 - y) * (1 + y)), Bound(4),
    ),
    _gradient(
        "sigmoid_backward", 0x0412, "dx = dy * y * (1 - y), y = sigmoid(x)", _sigmoid_backward,
        lambda dy, y: dy * (y * (1 - y)), Bound(4),
    ),
    Instruction(
        "axpy",
        0x0420,
        "out = alpha * x + y",
        (read("x", "*s"), read("y", "*s"), write("out", "*s")),
        _in_float64(lambda x, y, alpha: alpha * x + y),
        _axpy,
        flat,
        attributes=(real("alpha", 1.0),),
        bound=_sized(lambda x, y, alpha: alpha * x + y, 2),
    ),
    Instruction(
        "sgd",
        0x0421,
        "out = w - rate * (g + decay * w): a step of stochastic gradient descent",
        (read("w", "*s"), read("g", "*s"), write("out", "*s")),
        _in_float64(lambda w, g, rate, decay: w - rate * (g + decay * w)),
        _sgd,
        flat,
        attributes=(real("rate", 0.01), real("decay", 0.0)),
        work=elementwise_work(4),
        bound=_sized(lambda w, g, rate, decay: w + rate * (g + decay * w), 4),
    ),
    Instruction(
        "sgd_momentum",
        0x0422,
        "new_v = momentum * v + g + decay * w; new_w = w - rate * new_v",
        (
            read("w", "*s"),
            read("g", "*s"),
            read("v", "*s"),
            write("new_w", "*s"),
            write("new_v", "*s"),
        ),
        _reference_momentum,
        _momentum,
        flat,
        attributes=(real("rate", 0.01), real("momentum", 0.9), real("decay", 0.0)),
        work=elementwise_work(6),
        bound=Bound(1, Scale(_magnitude_momentum, lambda shapes, values: 6)),
    ),
)  # fmt: skip
