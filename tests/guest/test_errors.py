"""Completion statuses as errors."""

from __future__ import annotations

import pytest

from accelvisor.abi.commands import Completion, Opcode
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import (
    CallerError,
    CapacityError,
    DataError,
    HostError,
    ProtocolError,
)
from accelvisor.guest.errors import DeviceFault, error_from


def completion(status: int) -> Completion:
    return Completion(1, status, Opcode.LAUNCH, 0, 0)


@pytest.mark.parametrize("status", [s for s in CommandStatus if s])
def test_every_status_is_one_of_four_kinds_with_its_own_code(status: CommandStatus) -> None:
    error = error_from(completion(status))
    assert error.code == "device-" + status.name.lower().replace("_", "-")
    assert isinstance(error, DeviceFault) == status.is_fault
    assert isinstance(error, CallerError | DataError | CapacityError | HostError)
    assert error.where == "device:launch"
    assert error.status == status  # type: ignore[attr-defined]


def test_the_devices_text_is_the_message() -> None:
    assert str(error_from(completion(9), "instruction 2: too large")) == "instruction 2: too large"
    assert str(error_from(completion(9))) == "the device answered program invalid"


def test_an_unknown_status_is_not_guessed_at() -> None:
    error = error_from(Completion(1, 0x7777, 0x999, 0, 0))
    assert isinstance(error, ProtocolError)
    assert error.where == "device:0x999"
