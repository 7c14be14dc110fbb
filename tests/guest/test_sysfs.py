"""The sysfs driver against a tree of plain files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from accelvisor.abi.registers import BAR0_BYTES
from accelvisor.errors import ConflictError, NotFoundError, ProtocolError, SystemFailure
from accelvisor.guest.errors import DeviceInTransition
from accelvisor.guest.sysfs import COMMAND, SysfsTransport, await_config

from .pci_tree import add_device

BDF = "0000:00:05.0"


def command(directory: Path) -> int:
    return int(struct.unpack_from("<H", (directory / "config").read_bytes(), COMMAND)[0])


def test_the_device_is_enabled_with_memory_and_bus_master(tmp_path: Path) -> None:
    directory = add_device(tmp_path / "devices", command=0x0401)
    transport = SysfsTransport(BDF, root=tmp_path / "devices")
    assert (directory / "enable").read_text() == "1"
    assert command(directory) == 0x0407  # other bits stay
    transport.close()


def test_an_enabled_device_is_not_enabled_again(tmp_path: Path) -> None:
    directory = add_device(tmp_path / "devices")
    (directory / "enable").write_text("3\n")
    SysfsTransport(BDF, root=tmp_path / "devices").close()
    assert (directory / "enable").read_text() == "3\n"


def test_registers_are_little_endian_words(tmp_path: Path) -> None:
    directory = add_device(tmp_path / "devices")
    with (directory / "resource0").open("r+b") as file:
        file.write(bytes(range(16)))
    transport = SysfsTransport(BDF, root=tmp_path / "devices")
    assert transport.read32(4) == 0x07060504
    assert transport.read64(8) == 0x0F0E0D0C0B0A0908
    transport.write32(0x78, 0xDEADBEEF)
    transport.window[5] = 9
    transport.close()
    assert (directory / "resource0").read_bytes()[0x78:0x7C] == bytes.fromhex("efbeadde")
    assert (directory / "resource2").read_bytes()[5] == 9


def test_waiting_for_an_interrupt_sleeps_a_little(tmp_path: Path) -> None:
    add_device(tmp_path / "devices")
    slept: list[float] = []
    transport = SysfsTransport(BDF, root=tmp_path / "devices", sleep=slept.append)
    assert transport.wait_interrupt(10) is False
    assert transport.wait_interrupt(0.0001) is False
    assert slept == [0.001, 0.0001]
    assert transport.interrupts is False
    transport.close()


def test_closing_twice_and_with_a_view_in_use(tmp_path: Path) -> None:
    add_device(tmp_path / "devices")
    transport = SysfsTransport(BDF, root=tmp_path / "devices")
    part = transport.window[10:20]
    transport.close()
    transport.close()
    part[0] = 1  # the mapping lives as long as somebody looks at it
    part.release()


@pytest.mark.parametrize("absent", [b"\xff" * 4, bytes(4)])
def test_a_device_that_is_away_is_waited_for_then_named(tmp_path: Path, absent: bytes) -> None:
    directory = add_device(tmp_path / "devices")
    config = (directory / "config").read_bytes()
    (directory / "config").write_bytes(absent + config[4:])
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    with pytest.raises(DeviceInTransition):
        await_config(directory, clock=lambda: now, sleep=sleep)
    assert 10 <= now < 11

    def come_back(seconds: float) -> None:
        (directory / "config").write_bytes(config)

    SysfsTransport(BDF, root=tmp_path / "devices", sleep=come_back).close()


def test_a_missing_device_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        SysfsTransport(BDF, root=tmp_path)
    assert caught.value.code == "device-not-found"


def test_a_bound_kernel_driver_is_named(tmp_path: Path) -> None:
    add_device(tmp_path / "devices", driver="vfio-pci")
    with pytest.raises(ConflictError, match="vfio-pci"):
        SysfsTransport(BDF, root=tmp_path / "devices")


def test_a_device_without_the_window_is_refused(tmp_path: Path) -> None:
    directory = add_device(tmp_path / "devices")
    (directory / "resource2").unlink()
    with pytest.raises(SystemFailure) as caught:
        SysfsTransport(BDF, root=tmp_path / "devices")
    assert "resource2" in str(caught.value)


def test_a_bar_of_another_size_is_no_function(tmp_path: Path) -> None:
    directory = add_device(tmp_path / "devices")
    (directory / "resource0").write_bytes(bytes(BAR0_BYTES // 2))
    with pytest.raises(ProtocolError):
        SysfsTransport(BDF, root=tmp_path / "devices")
