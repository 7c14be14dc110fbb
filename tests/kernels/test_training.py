"""Networks of several instructions: gradients against differences, and training that learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accelvisor.abi.programs import Program
from accelvisor.kernels.interpreter import execute

from .build import Builder

Arrays = list[np.ndarray[Any, Any]]


def cnn(batch: int, rate: float) -> Program:
    """One training step of conv, pool, dense on 8 x 8 images of 3 classes.

    Arguments: x, labels, kernel, bias, weights, offset, loss, then the four gradients.
    """
    b = Builder()
    x, labels = b.input(batch, 1, 8, 8), b.input(batch, dtype="int64")
    kernel, bias = b.output(4, 1, 3, 3), b.output(4)
    weights, offset = b.output(64, 3), b.output(3)
    loss = b.output(batch)
    grads = [b.output(4, 1, 3, 3), b.output(4), b.output(64, 3), b.output(3)]
    hidden = b.one("conv2d_bias", x, kernel, bias, pad=1)
    active = b.one("relu", hidden)
    pooled = b.one("maxpool2d", active)
    features = b.one("flatten", pooled)
    logits = b.one("matmul_bias", features, weights, offset)
    d_logits = b.output(batch, 3)
    b.run("softmax_cross_entropy", logits, labels, out=(loss, d_logits), scale=1 / batch)
    b.run("matmul_tn", features, d_logits, out=(grads[2],))
    b.run("sum_rows", d_logits, out=(grads[3],))
    d_features = b.one("matmul_nt", d_logits, weights)
    d_pooled = b.output(batch, 4, 4, 4)
    b.run("reshape", d_features, out=(d_pooled,))
    d_active = b.one("maxpool2d_backward", active, d_pooled)
    d_hidden = b.one("relu_backward", d_active, active)
    b.run("conv2d_backward_kernel", x, d_hidden, out=(grads[0],), pad=1, kh=3, kw=3)
    b.run("sum_channels", d_hidden, out=(grads[1],))
    for parameter, gradient in zip((kernel, bias, weights, offset), grads, strict=True):
        b.run("sgd", parameter, gradient, out=(parameter,), rate=rate)
    return b.program()


def arguments(program: Program, rng: np.random.Generator) -> Arrays:
    arrays = []
    for slot in (program.slots[i] for i in program.arguments()):
        if slot.dtype.label == "int64":
            arrays.append(rng.integers(0, 3, slot.shape))
        else:
            arrays.append((rng.standard_normal(slot.shape) * 0.3).astype(np.float32))
    return arrays


def images(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Bars across, bars down, or a diagonal, in noise."""
    labels = rng.integers(0, 3, count)
    x = rng.standard_normal((count, 1, 8, 8)) * 0.3
    for image, label in zip(x[:, 0], labels, strict=True):
        at = rng.integers(1, 7)
        if label == 0:
            image[at] += 2
        elif label == 1:
            image[:, at] += 2
        else:
            image[np.arange(8), np.arange(8)] += 2
    return x.astype(np.float32), labels


@pytest.mark.parametrize("parameter", [2, 3, 4, 5])
def test_gradients_agree_with_differences(parameter: int) -> None:
    program = cnn(batch=5, rate=0.0)
    arrays = arguments(program, np.random.default_rng(0))

    def loss(shift: np.ndarray) -> float:
        trial = [a.copy() for a in arrays]
        trial[parameter] += shift
        execute(program, trial, twin="reference")
        return float(trial[6].astype(np.float64).mean())

    execute(program, arrays)
    gradient = arrays[6 + parameter - 1].astype(np.float64)
    rng = np.random.default_rng(1)
    # along single elements the change drowns in float32; along the gradient it is at its largest
    for direction in (gradient, gradient * rng.uniform(0.5, 1.5, gradient.shape)):
        unit = direction / np.linalg.norm(direction)
        step = np.float32(2e-3) * unit.astype(np.float32)
        slope = (loss(step) - loss(-step)) / 4e-3
        assert slope == pytest.approx(float((gradient * unit).sum()), rel=0.02)


def test_the_input_gradient_agrees_with_differences() -> None:
    b = Builder()
    w, dy = b.input(3, 2, 3, 2), b.input(2, 3, 4, 3)
    b.run("conv2d_backward_input", dy, w, out=(b.output(2, 2, 7, 5),), stride=2, pad=1, h=7, w=5)
    f = Builder()
    x, kernel = f.input(2, 2, 7, 5), f.input(3, 2, 3, 2)
    f.run("conv2d", x, kernel, out=(f.output(2, 3, 4, 3),), stride=2, pad=1)
    rng = np.random.default_rng(2)
    kernel_values, errors, direction = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((3, 2, 3, 2), (2, 3, 4, 3), (2, 2, 7, 5))
    )
    gradient, out = np.empty((2, 2, 7, 5), np.float32), np.empty((2, 3, 4, 3), np.float32)
    execute(b.program(), [kernel_values, errors, gradient])
    # the convolution is linear: its change along a direction is its value at the direction
    execute(f.program(), [direction, kernel_values, out])
    change, predicted = float((out * errors).sum()), float((gradient * direction).sum())
    assert change == pytest.approx(predicted, rel=1e-4)


def test_a_convolutional_network_learns() -> None:
    rng = np.random.default_rng(3)
    x, labels = images(256, rng)
    program = cnn(batch=64, rate=0.5)
    arrays = arguments(program, rng)
    for epoch in range(12):
        for at in range(0, 256, 64):
            arrays[0][...], arrays[1][...] = x[at : at + 64], labels[at : at + 64]
            execute(program, arrays)
        if epoch == 0:
            first = arrays[6].mean()
    assert arrays[6].mean() < 0.1 < first


def test_fast_and_reference_train_to_nearby_weights() -> None:
    rng = np.random.default_rng(4)
    program = cnn(batch=16, rate=0.1)
    start = arguments(program, rng)
    start[0][...], start[1][...] = images(16, rng)
    fast, reference = [a.copy() for a in start], [a.copy() for a in start]
    execute(program, fast, repeat=5)
    execute(program, reference, repeat=5, twin="reference")
    for a, b in zip(fast, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_training_twice_gives_the_same_bits() -> None:
    rng = np.random.default_rng(5)
    program = cnn(batch=16, rate=0.1)
    start = arguments(program, rng)
    results = set()
    for parts in ((6,), (1, 2, 3)):
        arrays = [a.copy() for a in start]
        for repeat in parts:
            execute(program, arrays, repeat=repeat)
        results.add(b"".join(a.tobytes() for a in arrays))
    assert len(results) == 1


def test_a_dense_network_with_momentum_learns_a_circle() -> None:
    b = Builder()
    x, labels = b.input(128, 2), b.input(128, dtype="int32")
    shapes = [(2, 16), (16,), (16, 2), (2,)]
    parameters = [b.output(*shape) for shape in shapes]
    momenta = [b.output(*shape) for shape in shapes]
    loss, d_logits = b.output(128), b.output(128, 2)
    hidden = b.one("tanh", b.one("matmul_bias", x, parameters[0], parameters[1]))
    logits = b.one("matmul_bias", hidden, parameters[2], parameters[3])
    b.run("softmax_cross_entropy", logits, labels, out=(loss, d_logits), scale=1 / 128)
    d_hidden = b.one("tanh_backward", b.one("matmul_nt", d_logits, parameters[2]), hidden)
    grads = [
        b.one("matmul_tn", x, d_hidden),
        b.one("sum_rows", d_hidden),
        b.one("matmul_tn", hidden, d_logits),
        b.one("sum_rows", d_logits),
    ]
    for w, g, v in zip(parameters, grads, momenta, strict=True):
        b.run("sgd_momentum", w, g, v, out=(w, v), rate=0.2, momentum=0.9)
    found = b.output(128, dtype="int64")
    b.run("argmax_last", logits, out=(found,))
    rng = np.random.default_rng(6)
    points = rng.uniform(-1, 1, (128, 2)).astype(np.float32)
    inside = ((points**2).sum(axis=1) < 0.5).astype(np.int32)
    start = [(rng.standard_normal(shape) * 0.5).astype(np.float32) for shape in shapes]
    moments = [np.zeros(shape, np.float32) for shape in shapes]
    outputs = [np.empty(128, np.float32), np.empty((128, 2), np.float32), np.empty(128, np.int64)]
    execute(b.program(), [points, inside, *start, *moments, *outputs], repeat=300)
    assert (outputs[2] == inside).mean() > 0.95
