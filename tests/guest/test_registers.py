"""Reads that survive a transition, and identities that are not believed."""

from __future__ import annotations

import pytest

from accelvisor.errors import ProtocolError, UnavailableError
from accelvisor.guest.errors import DeviceInTransition
from accelvisor.guest.registers import Registers

from .fake_device import FAKE_UUID, FakeDevice


def make(device: FakeDevice) -> Registers:
    return Registers(device, clock=device.clock, sleep=device.clock.sleep, transition_s=2.0)


def test_identity_is_what_the_device_says(device: FakeDevice) -> None:
    identity = make(device).identity()
    assert identity.uuid == str(FAKE_UUID)
    assert (identity.abi, identity.queues, identity.ring_entries) == ((1, 0), 2, 16)


@pytest.mark.parametrize("value", [0, 0xFFFFFFFF])
def test_a_transition_is_waited_out_with_growing_pauses(device: FakeDevice, value: int) -> None:
    device.absent_value = value
    device.vanish(reads=12)
    registers = make(device)
    assert registers.identity().queues == 2
    assert registers.transitions == 12
    assert 0 < device.clock.slept < 2


def test_a_device_that_vanishes_in_the_middle_of_a_read_is_read_again(device: FakeDevice) -> None:
    registers = make(device)
    calls = 0

    def read(transport: FakeDevice) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            device.vanish(reads=3)
        return transport.read32(0x40)

    assert registers.steady(read) == 2  # type: ignore[arg-type]
    assert calls == 2


def test_an_absent_device_is_an_error_after_the_deadline(device: FakeDevice) -> None:
    device.vanish(reads=1 << 30)
    with pytest.raises(DeviceInTransition) as caught:
        make(device).state()
    assert caught.value.code == "device-in-transition"


def test_another_device_is_recognised(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "read32", lambda offset: 0x12345678)
    with pytest.raises(ProtocolError) as caught:
        make(device).present()
    assert caught.value.code == "not-a-function"


def test_an_unknown_major_version_is_refused(device: FakeDevice) -> None:
    device.abi = 2 << 16
    with pytest.raises(UnavailableError) as caught:
        make(device).identity()
    assert caught.value.code == "abi-unknown"


def test_a_newer_minor_version_is_accepted(device: FakeDevice) -> None:
    device.abi = 1 << 16 | 7
    assert make(device).identity().abi == (1, 7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queues", 0),
        ("queues", 65),
        ("entries", 0),
        ("entries", 24),
        ("window_bytes", 1 << 40),
        ("window_bytes", 4096),
    ],
)
def test_numbers_that_index_memory_are_checked(
    device: FakeDevice, field: str, value: int
) -> None:
    registers = make(device)
    setattr(device, field, value)
    with pytest.raises(ProtocolError) as caught:
        registers.identity()
    assert caught.value.code == "device-implausible"
