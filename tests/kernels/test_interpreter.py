"""The interpreter: binding, aliasing, repetition, both twins."""

from __future__ import annotations

import numpy as np
import pytest

from accelvisor.errors import NumericError, UsageError
from accelvisor.kernels.interpreter import execute

from .build import Builder


def doubler() -> Builder:
    builder = Builder()
    x = builder.input(3)
    builder.run("add", x, x, out=(builder.output(3),))
    return builder


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize("twin", ["fast", "reference"])
def test_outputs_are_written_in_place(twin: str) -> None:
    x, out = array(1, 2, 3), array(0, 0, 0)
    execute(doubler().program(), [x, out], twin=twin)
    assert out.tolist() == [2, 4, 6]


@pytest.mark.parametrize("twin", ["fast", "reference"])
def test_an_update_in_place_reads_the_old_value(twin: str) -> None:
    builder = Builder()
    w = builder.output(3)
    builder.run("add", w, w, out=(w,))
    values = array(1, 2, 3)
    execute(builder.program(), [values], repeat=3, twin=twin)
    assert values.tolist() == [8, 16, 24]


def test_an_output_that_lies_on_an_input_reads_the_old_value() -> None:
    builder = Builder()
    x, out = builder.input(2, 2), builder.output(2, 2)
    builder.run("transpose", x, out=(out,))
    memory = np.array([[1, 2], [3, 4]], np.float32)
    execute(builder.program(), [memory, memory])
    assert memory.tolist() == [[1, 3], [2, 4]]


def test_two_outputs_on_one_memory_are_refused() -> None:
    builder = Builder()
    w, g, v = builder.input(3), builder.input(3), builder.input(3)
    builder.run("sgd_momentum", w, g, v, out=(builder.output(3), builder.output(3)))
    x, same = array(1, 2, 3), array(0, 0, 0)
    with pytest.raises(UsageError, match="same memory twice"):
        execute(builder.program(), [x, x, x, same, same])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [array(1, 2, 3)],
        [array(1, 2, 3), array(1, 2)],
        [array(1, 2, 3), np.zeros(3)],
        [array(1, 2, 3, 4, 5, 6)[::2], array(0, 0, 0)],
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: list[np.ndarray]) -> None:
    with pytest.raises(UsageError):
        execute(doubler().program(), arguments)


def test_a_read_only_output_is_refused() -> None:
    out = array(0, 0, 0)
    out.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        execute(doubler().program(), [array(1, 2, 3), out])


@pytest.mark.parametrize("twin", ["fast", "reference"])
def test_a_label_out_of_range_is_a_fault(twin: str) -> None:
    builder = Builder()
    x, labels = builder.input(2, 3), builder.input(2, dtype="int64")
    builder.run("softmax_cross_entropy", x, labels, out=(builder.output(2), builder.output(2, 3)))
    arrays = [np.zeros((2, 3), np.float32), np.array([0, 3]), array(0, 0), np.zeros((2, 3), "f4")]
    with pytest.raises(NumericError, match="labels holds 3, must be from 0 to 2"):
        execute(builder.program(), arrays, twin=twin)
