"""The configuration space of the function: a PCI Express endpoint with MSI, PM and FLR.

Bytes and masks only. QEMU keeps BAR values and MSI state of its own and forwards most writes; the
in-tree client and a restored function see the behaviour of the PCI Local Bus (3.0, chapter 6) and
PCI Express (chapter 7) specifications from here. MSI rather than MSI-X, because its state lies in
configuration space and can be restored from outside.
"""

from __future__ import annotations

import struct

from accelvisor.abi.registers import (
    BAR0_BYTES,
    CLASS_CODE,
    DEVICE_ID,
    REVISION,
    SUBSYSTEM_ID,
    SUBSYSTEM_VENDOR_ID,
    VENDOR_ID,
)
from accelvisor.function import state as s
from accelvisor.function.state import State

CONFIG_BYTES = 4096
COMMAND = 0x04
BAR0 = 0x10
BAR2 = 0x18
PM_AT = 0x40
MSI_AT = 0x80
EXP_AT = 0xA0
DEVICE_CONTROL = EXP_AT + 0x08

COMMAND_MEMORY = 1 << 1
COMMAND_MASTER = 1 << 2
_FLR = 1 << 15


def _initial() -> bytearray:
    """Configuration space after reset."""
    c = bytearray(CONFIG_BYTES)
    put = struct.pack_into
    put("<HHHH", c, 0x00, VENDOR_ID, DEVICE_ID, 0, 0x0010)  # status: capability list
    put("<I", c, 0x08, CLASS_CODE << 8 | REVISION)
    put("<I", c, BAR2, 0b1100)  # 64-bit, prefetchable
    put("<HH", c, 0x2C, SUBSYSTEM_VENDOR_ID, SUBSYSTEM_ID)
    c[0x34] = PM_AT
    # Power management: version 3, no PME, state kept from D3hot to D0 (NoSoftReset).
    put("<BBHH", c, PM_AT, 0x01, MSI_AT, 0x0003, 0x0008)
    # MSI: one vector, 64-bit address, no per-vector mask.
    put("<BBH", c, MSI_AT, 0x05, EXP_AT, 0x0080)
    # PCI Express: version 2 endpoint; role-based errors and FLR; 2.5 GT/s x1.
    put("<BBH", c, EXP_AT, 0x10, 0x00, 0x0002)
    put("<IHH", c, EXP_AT + 0x04, 1 << 28 | 1 << 15, 0x2810, 0)
    put("<IHH", c, EXP_AT + 0x0C, 0x11, 0, 0x11)
    return c


def _writable(window_bytes: int) -> bytearray:
    """The bits that a write changes."""
    m = bytearray(CONFIG_BYTES)
    put = struct.pack_into
    # Memory space, bus master, parity, SERR, INTx disable. There is no I/O space.
    put("<H", m, COMMAND, 0x0546)
    m[0x0C] = 0xFF  # cache line size: kept for the guest, no meaning
    put("<I", m, BAR0, ~(BAR0_BYTES - 1) & 0xFFFF_FFFF)
    put("<Q", m, BAR2, ~(window_bytes - 1) & 0xFFFF_FFFF_FFFF_FFFF)
    m[0x3C] = 0xFF  # interrupt line: kept for the guest
    put("<H", m, PM_AT + 4, 0x0003)
    put("<H", m, MSI_AT + 2, 0x0001)
    put("<II", m, MSI_AT + 4, 0xFFFF_FFFC, 0xFFFF_FFFF)
    put("<H", m, MSI_AT + 12, 0xFFFF)
    put("<H", m, DEVICE_CONTROL, 0x7FFF)
    put("<H", m, EXP_AT + 0x10, 0x00C3)  # link control: ASPM, clock bits
    return m


class ConfigSpace:
    """Reads, writes and reset of the configuration space kept in ``state``."""

    def __init__(self, state: State, window_bytes: int) -> None:
        self._bytes = state.u8[s.PCI_AT : s.PCI_AT + CONFIG_BYTES]
        self._initial = bytes(_initial())
        self._writable = bytes(_writable(window_bytes))
        if not any(self._bytes[0:4]):
            self.reset()

    @property
    def bus_master(self) -> bool:
        """Whether the guest allows the function to reach its RAM. QEMU does not check it."""
        return bool(self._bytes[COMMAND] & COMMAND_MASTER)

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes; the caller has checked that they lie within the space."""
        return bytes(self._bytes[offset : offset + count])

    def write(self, offset: int, data: bytes) -> bool:
        """Store the writable bits of ``data``. True when it asks for a function-level reset."""
        cells, mask = self._bytes, self._writable
        for at, value in enumerate(data, offset):
            bits = mask[at]
            if bits:
                cells[at] = cells[at] & ~bits | value & bits
        high = DEVICE_CONTROL + 1 - offset
        return 0 <= high < len(data) and bool(data[high] & _FLR >> 8)

    def reset(self, *, bars: bool = True) -> None:
        """Back to the state after power-on.

        Args:
            bars: the base addresses too. At a function-level reset they stay: QEMU keeps its own,
                the guest reads those and does not write them again, and what is here is what a
                destination restores.
        """
        kept = bytes(self._bytes[BAR0 : BAR2 + 8])
        self._bytes[:] = self._initial
        if not bars:
            self._bytes[BAR0 : BAR2 + 8] = kept
