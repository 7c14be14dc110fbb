"""Fixtures of the guest room: a fake function, opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelvisor.guest.function import Function

from .fake_device import FakeDevice


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def open_function() -> Iterator[Callable[..., Function]]:
    """Opens functions on fake devices, and closes what the test left open."""
    opened: list[Function] = []

    def make(device: FakeDevice, **options: Any) -> Function:
        function = Function(device, clock=device.clock, sleep=device.clock.sleep, **options)
        opened.append(function)
        return function

    yield make
    for function in opened:
        function.close()


@pytest.fixture
def fn(device: FakeDevice, open_function: Callable[..., Function]) -> Function:
    return open_function(device)
