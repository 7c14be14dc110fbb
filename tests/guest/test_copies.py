"""Copies by each way, for sizes around every boundary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from accelvisor.guest.errors import CommandRefused, CommandTimeout
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
