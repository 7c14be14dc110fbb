"""Configuration space: identity, sizing, capabilities, write masks, reset."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.abi.registers import BAR0_BYTES, DEVICE_ID, VENDOR_ID
from accelvisor.function.pci import (
    BAR0,
    BAR2,
    CONFIG_BYTES,
    DEVICE_CONTROL,
    EXP_AT,
    MSI_AT,
    PM_AT,
    ConfigSpace,
)
from accelvisor.function.state import STATE_BYTES, State
from accelvisor.limits import GIB, MIB
from tests.function.harness import Local, memfd


class Space(ConfigSpace):
    """A configuration space with little-endian conveniences."""

    def __init__(self, window: int = 4 * MIB) -> None:
        super().__init__(State(memfd("state", STATE_BYTES)), window)

    def u16(self, at: int) -> int:
        return int.from_bytes(self.read(at, 2), "little")

    def u32(self, at: int) -> int:
        return int.from_bytes(self.read(at, 4), "little")

    def put32(self, at: int, value: int) -> bool:
        return self.write(at, struct.pack("<I", value))


@pytest.fixture
def space() -> Space:
    return Space()


def capabilities(space: Space) -> dict[int, int]:
    """Capability id -> offset, by walking the list as software does."""
    found = {}
    at = space.read(0x34, 1)[0]
    while at:
        assert at % 4 == 0
        assert at not in found.values()
        found[space.read(at, 1)[0]] = at
        at = space.read(at + 1, 1)[0]
    return found


def test_identity_and_class(space: Space) -> None:
    assert (space.u16(0), space.u16(2)) == (VENDOR_ID, DEVICE_ID)
    assert space.u32(8) >> 8 == 0x120000
    assert space.read(0x0E, 1) == b"\0"
    assert space.u16(6) & 0x10


def test_the_capability_list_has_pm_msi_and_express(space: Space) -> None:
    assert capabilities(space) == {0x01: PM_AT, 0x05: MSI_AT, 0x10: EXP_AT}
    assert space.u16(EXP_AT + 2) & 0xFF == 0x02  # version 2, endpoint
    assert space.u32(EXP_AT + 4) >> 28 & 1  # FLR capable
    assert space.u16(MSI_AT + 2) == 0x80  # 64-bit, one vector, off


def test_bars_answer_sizing(space: Space) -> None:
    for at in (BAR0, BAR2, BAR2 + 4):
        space.put32(at, 0xFFFF_FFFF)
    assert ~(space.u32(BAR0) & ~0xF) + 1 & 0xFFFF_FFFF == BAR0_BYTES
    low, high = space.u32(BAR2), space.u32(BAR2 + 4)
    assert low & 0xF == 0b1100
    assert ~((high << 32 | low) & ~0xF) + 1 & (1 << 64) - 1 == 4 * MIB


def test_a_large_window_sizes_across_both_words() -> None:
    space = Space(GIB)
    space.put32(BAR2, 0xFFFF_FFFF)
    space.put32(BAR2 + 4, 0xFFFF_FFFF)
    value = space.u32(BAR2 + 4) << 32 | space.u32(BAR2) & ~0xF
    assert ~value + 1 & (1 << 64) - 1 == GIB


def test_absent_bars_and_rom_read_zero(space: Space) -> None:
    for at in (0x14, 0x20, 0x24, 0x30):
        space.put32(at, 0xFFFF_FFFF)
        assert space.u32(at) == 0


def test_extended_space_is_empty(space: Space) -> None:
    space.write(0x100, b"\xff" * (CONFIG_BYTES - 0x100))
    assert not any(space.read(0x100, CONFIG_BYTES - 0x100))


def test_bus_master_follows_the_command_register(space: Space) -> None:
    assert not space.bus_master
    space.write(0x04, b"\x04")
    assert space.bus_master
    space.write(0x04, b"\x00")
    assert not space.bus_master


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (DEVICE_CONTROL, b"\x00\x80"),
        (DEVICE_CONTROL + 1, b"\x80"),
        (DEVICE_CONTROL, b"\x00\x80\x00\x00"),
        (DEVICE_CONTROL - 4, b"\x00\x00\x00\x00\x00\x80\x00\x00"),
    ],
)
def test_flr_is_seen_in_any_access_size(space: Space, at: int, data: bytes) -> None:
    assert space.write(at, data)
    assert not space.u16(DEVICE_CONTROL) & 0x8000  # reads as zero


def test_other_writes_are_no_flr(space: Space) -> None:
    assert not space.write(DEVICE_CONTROL, b"\xff\x7f")
    assert not space.write(DEVICE_CONTROL + 2, b"\xff\xff")


def test_reset_restores_every_byte_of_configuration_space(space: Space) -> None:
    """Case P16: a reset must not ruin configuration space."""
    before = space.read(0, CONFIG_BYTES)
    space.write(0, b"\xff" * CONFIG_BYTES)
    assert space.read(0, CONFIG_BYTES) != before
    space.reset()
    assert space.read(0, CONFIG_BYTES) == before


@given(at=st.integers(0, 255), data=st.binary(min_size=1, max_size=8))
def test_identity_survives_any_write(at: int, data: bytes) -> None:
    space = Space()
    space.write(at, data[: CONFIG_BYTES - at])
    assert space.u16(0) == VENDOR_ID
    assert capabilities(space) == {0x01: PM_AT, 0x05: MSI_AT, 0x10: EXP_AT}


def test_function_level_reset_clears_the_command_and_keeps_bars_and_identity(local: Local) -> None:
    before = local.device.region_read(7, 0, 256)
    local.device.region_write(7, BAR0, struct.pack("<I", 0xFEB0_0000))
    local.device.region_write(7, BAR2, struct.pack("<Q", 0x38_0000_0000))
    local.device.region_write(7, DEVICE_CONTROL, b"\x00\x80")
    after = local.device.region_read(7, 0, 256)
    assert after[:4] == before[:4]
    # QEMU keeps its own, and the guest, which reads those, does not write them again.
    assert after[BAR0 : BAR0 + 4] == struct.pack("<I", 0xFEB0_0000)
    assert after[BAR2 : BAR2 + 8] == struct.pack("<Q", 0x38_0000_000C)
    assert after[4:6] == bytes(2)
    assert local.read32(0x058) == 1  # RESET_COUNT


def test_a_reset_by_the_client_clears_the_bars(local: Local) -> None:
    local.device.region_write(7, BAR0, struct.pack("<I", 0xFEB0_0000))
    local.device.reset()
    assert local.device.region_read(7, BAR0, 4) == bytes(4)
