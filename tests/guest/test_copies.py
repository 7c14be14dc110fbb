"""Copies by each way, for sizes around every boundary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from accelvisor.abi import commands
from accelvisor.guest.errors import (
    CommandRefused,
    CommandTimeout,
    DeviceInTransition,
    DeviceReset,
)
from accelvisor.guest.function import Function

from .fake_device import FakeDevice

SIZES = [0, 1, 63, 64, 65, 4095, 4096, 4097, 40_000, 70_000, 300_000]


def data(size: int) -> np.ndarray:
    return np.random.RandomState(size).randint(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["window", "bounce", "scattered"])
def test_bytes_arrive_and_come_back(
    open_function: Callable[..., Function], way: str, size: int
) -> None:
    fn = open_function(FakeDevice(scattered=way == "scattered"))
    fn.copies.bounce_from = 1 << 60 if way == "window" else 0
    with fn.tensor(data(size)) as tensor:
        assert np.array_equal(tensor.numpy(), data(size))


@pytest.mark.parametrize("scattered", [False, True])
def test_pinned_memory_is_fetched_where_it_is(
    open_function: Callable[..., Function], scattered: bool
) -> None:
    device = FakeDevice(scattered=scattered)
    fn = open_function(device)
    size = 3 * (1 << 20) + 17  # more segments than one list holds, when scattered
    with fn.pinned((size,), "uint8") as array:
        array[:] = data(size)
        with fn.empty((size,), "uint8") as tensor:
            tensor.copy_(array)
            assert np.array_equal(np.frombuffer(device.tensors[tensor.handle][2], "u1"), array)
            array[:] = 0
            tensor.numpy(out=array)
            assert np.array_equal(array, data(size))
            part = array[100:200]
            part[:] = 7
            tensor[100:200].copy_(part)
            assert tensor[100:200].numpy().tolist() == [7] * 100


def test_without_dma_large_copies_take_the_window(open_function: Callable[..., Function]) -> None:
    fn = open_function(FakeDevice(dma_refused=True))
    with fn.tensor(data(500_000)) as tensor:
        assert np.array_equal(tensor.numpy(), data(500_000))


def test_staging_is_given_back_after_each_copy(fn: Function) -> None:
    free = fn.staging.spans.largest
    with fn.tensor(data(100_000)) as tensor:
        tensor.numpy()
    assert fn.staging.spans.largest == free


def test_a_refused_copy_gives_its_staging_back(device: FakeDevice, fn: Function) -> None:
    free = fn.staging.spans.largest
    tensor = fn.empty((100_000,), "uint8")
    device.statuses[0x20] = 0x007
    with pytest.raises(CommandRefused):
        tensor.copy_(data(100_000))
    del device.statuses[0x20]
    tensor.copy_(data(100_000))
    assert fn.staging.spans.largest == free


def test_a_timed_out_copy_keeps_its_staging_until_the_device_is_done(
    device: FakeDevice, open_function: Callable[..., Function]
) -> None:
    fn = open_function(device, timeout_s=0.5)
    tensor = fn.empty((5000,), "uint8")
    free = fn.staging.spans.largest
    device.late_ticks = 1 << 30
    with pytest.raises(CommandTimeout):
        tensor.copy_(data(5000))
    assert fn.staging.spans.largest < free
    device._late = [(0, *late[1:]) for late in device._late]
    device.late_ticks = 0
    device.tick()
    tensor.copy_(data(5000))
    assert fn.staging.spans.largest == free


def test_copies_survive_an_absent_window(device: FakeDevice, fn: Function) -> None:
    tensor = fn.empty((3000,), "uint8")
    device.late_ticks = 4
    wanted = data(3000)
    original, calls = fn.queue.submit, 0

    def submit(entry: bytes, timeout_s: float | None = None) -> int:
        nonlocal calls
        calls += 1
        cookie = original(entry, timeout_s)
        if calls == 1:
            device.vanish(reads=10)
        return cookie

    fn.queue.submit = submit  # type: ignore[method-assign]
    tensor.copy_(wanted)
    assert np.array_equal(tensor.numpy(), wanted)


def finish(device: FakeDevice) -> None:
    """What was late is on time."""
    device._late = [(0, *late[1:]) for late in device._late]
    device.late_ticks = 0
    device.tick()


@pytest.mark.parametrize("inward", [True, False])
def test_pinned_memory_stays_pinned_under_a_copy_that_timed_out(
    device: FakeDevice, open_function: Callable[..., Function], inward: bool
) -> None:
    fn = open_function(device, timeout_s=0.5)
    tensor = fn.empty((5000,), "uint8")
    pinned = fn.pinned((5000,), "uint8")
    buffer = pinned.buffer._buffer
    device.late_ticks = 1 << 30
    copy = tensor.copy_ if inward else tensor.numpy
    with pytest.raises(CommandTimeout):
        copy(pinned.array)
    pinned.release()
    pinned.release()
    assert buffer.released == 0  # type: ignore[attr-defined]
    finish(device)
    fn.call(commands.nop(0))
    assert buffer.released == 1  # type: ignore[attr-defined]


def test_a_program_that_is_loaded_too_late_keeps_its_staging(
    device: FakeDevice, open_function: Callable[..., Function]
) -> None:
    fn = open_function(device, timeout_s=0.5)
    free = fn.staging.spans.largest
    device.late_ticks = 1 << 30
    with pytest.raises(CommandTimeout):
        fn.load(bytes(5000))
    assert fn.staging.spans.largest < free
    finish(device)
    fn.call(commands.nop(0))
    assert fn.staging.spans.largest == free


def vanish_at(fn: Function, device: FakeDevice, look: int, then: Callable[[], None]) -> None:
    """Do ``then`` right before the window is looked at for the ``look``-th time from now on."""
    original, looks = fn.staging.steady, 0

    def steady() -> bool:
        nonlocal looks
        looks += 1
        if looks == look:
            then()
        return original()

    fn.staging.steady = steady  # type: ignore[method-assign]


@pytest.mark.parametrize("look", [1, 2, 3, 4])
@pytest.mark.parametrize("value", [0, 0xFFFFFFFF])
def test_bytes_that_pass_an_absent_window_arrive_all_the_same(
    device: FakeDevice, fn: Function, value: int, look: int
) -> None:
    device.absent_value = value
    tensor = fn.empty((3000,), "uint8")
    vanish_at(fn, device, look, lambda: device.vanish(reads=3))
    tensor.copy_(data(3000))  # two looks
    assert np.array_equal(tensor.numpy(), data(3000))  # and two more


def test_bytes_left_in_a_window_that_was_reset_are_not_a_tensors_values(
    device: FakeDevice, fn: Function
) -> None:
    tensor = fn.tensor(data(3000))

    def reset() -> None:
        device.reset()
        device.window[:] = bytes(len(device.window))

    vanish_at(fn, device, 1, reset)
    with pytest.raises(DeviceReset):
        tensor.numpy()


def test_bindings_and_programs_survive_an_absent_window(
    device: FakeDevice, fn: Function
) -> None:
    a = fn.tensor([1.0, 2.0])
    assert "add" in fn.instructions
    vanish_at(fn, device, 2, lambda: device.vanish(reads=3))  # the program's upload
    assert (a + a).numpy().tolist() == [2.0, 4.0]
    vanish_at(fn, device, 2, lambda: device.vanish(reads=3))  # the bindings
    assert (a - a).numpy().tolist() == [0.0, 0.0]


def test_a_window_that_forgets_everything_is_an_error_not_an_endless_loop(
    device: FakeDevice, fn: Function
) -> None:
    tensor = fn.empty((3000,), "uint8")
    fn.staging.plant = lambda: None  # type: ignore[method-assign]
    fn.staging._beacon += 1
    with pytest.raises(DeviceInTransition):
        tensor.copy_(data(3000))
    assert fn.staging.taken == set()
