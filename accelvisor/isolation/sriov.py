"""The configuration space of the physical function (PF): an endpoint with SR-IOV and ARI.

It is what a host's kernel walks when it counts, sizes and enables the virtual functions (VFs) of a
card: bytes and masks only, no device is behind it. Section numbers are those of PCI Express 5.0;
the walk it has to stand is that of Linux, drivers/pci/iov.c.

Where the specification leaves something to the device, or calls it undefined, it is so here:

* An access of any width acts as its double words one after the other, lowest first, bytes that it
  does not cover keeping their value. Reads beyond the space give ones, writes there are ignored.
* A register that may only take some values keeps its own when it would get another: NumVFs above
  TotalVFs or while VF Enable is set, a System Page Size that is not exactly one supported size.
* While VF Enable is set, System Page Size and ARI Capable Hierarchy are frozen with NumVFs.
* Any NumVFs up to TotalVFs is taken: a kernel tries each one when it counts buses. Which of them
  the card can be cut into is for whoever acts on :attr:`Change.ENABLED`.
* First VF Offset follows ARI Capable Hierarchy (9.3.3.9). Without ARI a device has eight functions
  on its own bus, so the VFs of a PF that may have more than seven are all on the next one. It could
  follow NumVFs too, but Linux compares bus numbers by the offset that it read with NumVFs at 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag

from accelvisor.abi.registers import (
    BAR0_BYTES,
    CLASS_CODE,
    DEVICE_ID,
    PAGE,
    REVISION,
    SUBSYSTEM_ID,
    SUBSYSTEM_VENDOR_ID,
    VENDOR_ID,
)
from accelvisor.errors import UsageError
from accelvisor.limits import LIMITS

CONFIG_BYTES = 4096
#: The PF's own Device ID; its VFs have the function's.
PHYSICAL_DEVICE_ID = 0x0100

COMMAND = 0x04
BAR0 = 0x10
PM_AT = 0x40
EXP_AT = 0xA0
DEVICE_CONTROL = EXP_AT + 0x08
ARI_AT = 0x100
SRIOV_AT = 0x140

CAPABILITIES = SRIOV_AT + 0x04
CONTROL = SRIOV_AT + 0x08
INITIAL_VFS = SRIOV_AT + 0x0C
TOTAL_VFS = SRIOV_AT + 0x0E
NUM_VFS = SRIOV_AT + 0x10
DEPENDENCY_LINK = SRIOV_AT + 0x12
FIRST_VF_OFFSET = SRIOV_AT + 0x14
VF_STRIDE = SRIOV_AT + 0x16
VF_DEVICE_ID = SRIOV_AT + 0x1A
SUPPORTED_PAGE_SIZES = SRIOV_AT + 0x1C
SYSTEM_PAGE_SIZE = SRIOV_AT + 0x20
VF_BAR0 = SRIOV_AT + 0x24
VF_BAR2 = VF_BAR0 + 8

VF_ENABLE = 1 << 0
VF_MEMORY_SPACE = 1 << 3
ARI_HIERARCHY = 1 << 4

#: Bit n is 2**(n + 12) bytes: 4 KiB, 8 KiB, 64 KiB, 256 KiB, 1 MiB, 4 MiB, as 9.3.3.12 requires.
PAGE_SIZES = 0x553

_FLR = 1 << 15
_FUNCTIONS_WITHOUT_ARI = 8


class Change(IntFlag):
    """What a write did that whoever cuts the card wants to know."""

    NUMBER = 1 << 0  # NumVFs has another value
    ENABLED = 1 << 1  # VF Enable was set: ``number`` VFs exist from now on
    DISABLED = 1 << 2  # it was cleared: they do not
    MEMORY = 1 << 3  # VF Memory Space Enable changed
    RESET = 1 << 4  # a function-level reset was asked for, and is done


@dataclass(frozen=True, slots=True)
class Aperture:
    """Where one BAR of all VFs lies: ``count`` pieces of ``each`` bytes from ``base`` on."""

    bar: int
    base: int
    each: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.each * self.count

    def of(self, index: int) -> range:
        """Bus addresses of VF ``index``, from 1 on."""
        start = self.base + (index - 1) * self.each
        return range(start, start + self.each)


def _initial(total: int) -> bytearray:
    """Configuration space after reset."""
    c = bytearray(CONFIG_BYTES)
    put = struct.pack_into
    put("<HHHH", c, 0x00, VENDOR_ID, PHYSICAL_DEVICE_ID, 0, 0x0010)  # status: capability list
    put("<I", c, 0x08, CLASS_CODE << 8 | REVISION)
    put("<HH", c, 0x2C, SUBSYSTEM_VENDOR_ID, SUBSYSTEM_ID)
    c[0x34] = PM_AT
    # As the functions have it: power management 3 without PME, state kept from D3hot; PCI Express 2
    # endpoint with role-based errors and FLR at 2.5 GT/s x1.
    put("<BBHH", c, PM_AT, 0x01, EXP_AT, 0x0003, 0x0008)
    put("<BBH", c, EXP_AT, 0x10, 0x00, 0x0002)
    put("<IHH", c, EXP_AT + 0x04, 1 << 28 | 1 << 15, 0x2810, 0)
    put("<IHH", c, EXP_AT + 0x0C, 0x11, 0, 0x11)
    # ARI, version 1: Linux sets ARI Capable Hierarchy only where function 0 has this capability.
    # Its Next Function Number is 0: VFs are not in that chain.
    put("<I", c, ARI_AT, 0x000E | 1 << 16 | SRIOV_AT << 20)
    put("<I", c, SRIOV_AT, 0x0010 | 1 << 16)
    put("<HH", c, INITIAL_VFS, total, total)  # equal without VF migration (9.3.3.5)
    put("<H", c, VF_STRIDE, 1)
    put("<H", c, VF_DEVICE_ID, DEVICE_ID)
    put("<II", c, SUPPORTED_PAGE_SIZES, PAGE_SIZES, 1)
    put("<I", c, VF_BAR2, 0b1100)  # 64-bit, prefetchable
    return c


def _writable() -> bytearray:
    """The bits that a write changes, but for those of SR-IOV."""
    m = bytearray(CONFIG_BYTES)
    put = struct.pack_into
    # Memory space, bus master, parity, SERR, INTx disable. There is no I/O space.
    put("<H", m, COMMAND, 0x0546)
    m[0x0C] = 0xFF  # cache line size: kept, no meaning
    put("<I", m, BAR0, ~(BAR0_BYTES - 1) & 0xFFFF_FFFF)
    m[0x3C] = 0xFF  # interrupt line: kept
    put("<H", m, PM_AT + 4, 0x0003)
    put("<H", m, DEVICE_CONTROL, 0x7FFF)
    put("<H", m, EXP_AT + 0x10, 0x00C3)  # link control: ASPM, clock bits
    return m


class PhysicalFunction:
    """The PF of one card.

    Args:
        total: TotalVFs, the most VFs it can have.
        window_bytes: of BAR2 of each VF, a power of two of at least a page.
        routing_id: bus number << 8; the PF is function 0 of its device.

    Raises:
        UsageError: ``usage``, one of them cannot be.
    """

    def __init__(self, total: int, window_bytes: int, routing_id: int = 0x0100) -> None:
        if not 1 <= total <= LIMITS.functions:
            raise _usage(f"a card has 1 to {LIMITS.functions} functions, not {total}")
        if not PAGE <= window_bytes <= LIMITS.window_bytes or window_bytes & (window_bytes - 1):
            raise _usage(f"a window of {window_bytes} bytes is no BAR")
        # The last VF's routing ID, if they begin on the next bus, has 16 bits.
        if routing_id & 0xFF or not 0 <= routing_id <= 0xFFFF - 0x100 - total:
            raise _usage(f"{routing_id:#x} is no place for function 0 and {total} more")
        self.routing_id = routing_id
        self.total = total
        self._window_bytes = window_bytes
        self._initial = bytes(_initial(total))
        self._plain = bytes(_writable())
        self._cells = bytearray(CONFIG_BYTES)
        self.reset()

    @property
    def enabled(self) -> bool:
        """VF Enable."""
        return bool(self._u16(CONTROL) & VF_ENABLE)

    @property
    def number(self) -> int:
        """NumVFs. VFs exist while ``enabled``."""
        return self._u16(NUM_VFS)

    @property
    def page_bytes(self) -> int:
        """What System Page Size says: VF BARs are a multiple of it, and aligned to it."""
        return self._u32(SYSTEM_PAGE_SIZE) * PAGE

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes; ones beyond the space."""
        found = bytes(self._cells[max(offset, 0) : max(offset + count, 0)])
        before = min(max(-offset, 0), count)
        return b"\xff" * before + found + b"\xff" * (count - before - len(found))

    def write(self, offset: int, data: bytes) -> Change:
        """Take a write, double word by double word, and say what it changed."""
        change = Change(0)
        first, last = max(offset, 0), min(offset + len(data), CONFIG_BYTES)
        for at in range(first & ~3, last, 4):
            low, high = max(at, first), min(at + 4, last)
            word = bytearray(self._cells[at : at + 4])
            word[low - at : high - at] = data[low - offset : high - offset]
            change |= self._store(at, int.from_bytes(word, "little"))
        return change

    def reset(self) -> Change:
        """Back to the state after power-on, as a function-level reset does: the VFs are gone too
        (9.2.2.2).
        """
        change = Change.RESET
        if self.enabled:
            change |= Change.DISABLED
        if self.number:
            change |= Change.NUMBER
        if self._u16(CONTROL) & VF_MEMORY_SPACE:
            change |= Change.MEMORY
        self._cells[:] = self._initial
        self._place()
        return change

    def virtual_function_id(self, index: int) -> int:
        """The routing ID of VF ``index``, which is counted from 1 (9.2.1.2).

        Raises:
            UsageError: ``usage``, NumVFs says that there is no such VF.
        """
        if not 1 <= index <= self.number:
            raise _usage(f"there is no VF {index} among {self.number}")
        return self.routing_id + self._u16(FIRST_VF_OFFSET) + (index - 1) * self._u16(VF_STRIDE)

    def apertures(self) -> tuple[Aperture, Aperture]:
        """Where BAR0 and BAR2 of NumVFs VFs lie. They are decoded while VF Enable and VF Memory
        Space Enable are set (9.3.3.3.4, 9.3.3.14).
        """
        registers, window = self._bar_sizes()
        high = self._u32(VF_BAR2 + 4) << 32
        return (
            Aperture(0, self._u32(VF_BAR0) & ~0xF, registers, self.number),
            Aperture(2, high | self._u32(VF_BAR2) & ~0xF, window, self.number),
        )

    def hexdump(self) -> str:
        """The space as ``lspci -xxxx`` prints it, and as ``lspci -F`` reads it."""
        bus, function = self.routing_id >> 8, self.routing_id & 0xFF
        head = (
            f"{bus:02x}:{function >> 3:02x}.{function & 7} Class {CLASS_CODE >> 8:04x}:"
            f" {VENDOR_ID:04x}:{PHYSICAL_DEVICE_ID:04x} (rev {REVISION:02x})"
        )
        rows = (
            f"{at:02x}: {self._cells[at : at + 16].hex(' ')}" for at in range(0, CONFIG_BYTES, 16)
        )
        return "\n".join([head, *rows, ""])

    # --- registers -------------------------------------------------------------------------------

    def _store(self, at: int, value: int) -> Change:
        """One double word; ``value`` is whole, with the bytes that are not written as they are."""
        if at == CONTROL:
            return self._control(value & 0xFFFF)
        if at == NUM_VFS:
            return self._number(value & 0xFFFF)
        if at == SYSTEM_PAGE_SIZE:
            self._page_size(value)
            return Change(0)
        mask = self._bar_masks().get(at)
        if mask is None:
            mask = int.from_bytes(self._plain[at : at + 4], "little")
        self._put32(at, self._u32(at) & ~mask | value & mask)
        if at == DEVICE_CONTROL and value & _FLR:
            return self.reset()
        return Change(0)

    def _control(self, value: int) -> Change:
        """9.3.3.3. VF migration and 10-bit tags are not offered: their bits stay 0."""
        old = self._u16(CONTROL)
        new = value & (VF_ENABLE | VF_MEMORY_SPACE | ARI_HIERARCHY)
        if old & VF_ENABLE:
            new = new & ~ARI_HIERARCHY | old & ARI_HIERARCHY
        struct.pack_into("<H", self._cells, CONTROL, new)
        self._place()
        change = Change(0)
        if (old ^ new) & VF_ENABLE:
            change |= Change.ENABLED if new & VF_ENABLE else Change.DISABLED
        if (old ^ new) & VF_MEMORY_SPACE:
            change |= Change.MEMORY
        return change

    def _number(self, value: int) -> Change:
        """9.3.3.7."""
        if self.enabled or value > self.total or value == self.number:
            return Change(0)
        struct.pack_into("<H", self._cells, NUM_VFS, value)
        return Change.NUMBER

    def _page_size(self, value: int) -> None:
        """9.3.3.13. The VF BARs may grow with it: address bits below their size read as 0."""
        if self.enabled or value & (value - 1) or not value & PAGE_SIZES:
            return
        self._put32(SYSTEM_PAGE_SIZE, value)
        for at, mask in self._bar_masks().items():
            self._put32(at, self._u32(at) & (mask | 0xF))

    def _place(self) -> None:
        """First VF Offset, of what VF control now says."""
        near = self._u16(CONTROL) & ARI_HIERARCHY or self.total < _FUNCTIONS_WITHOUT_ARI
        struct.pack_into("<H", self._cells, FIRST_VF_OFFSET, 1 if near else 0x100)

    def _bar_sizes(self) -> tuple[int, int]:
        """Bytes of BAR0 and BAR2 of one VF: whole system pages."""
        return max(BAR0_BYTES, self.page_bytes), max(self._window_bytes, self.page_bytes)

    def _bar_masks(self) -> dict[int, int]:
        """Writable bits of the VF BARs that there are; all ones written read back as these."""
        registers, window = self._bar_sizes()
        wide = ~(window - 1) & 0xFFFF_FFFF_FFFF_FFFF
        return {
            VF_BAR0: ~(registers - 1) & 0xFFFF_FFFF,
            VF_BAR2: wide & 0xFFFF_FFFF,
            VF_BAR2 + 4: wide >> 32,
        }

    def _u16(self, at: int) -> int:
        return int.from_bytes(self._cells[at : at + 2], "little")

    def _u32(self, at: int) -> int:
        return int.from_bytes(self._cells[at : at + 4], "little")

    def _put32(self, at: int, value: int) -> None:
        struct.pack_into("<I", self._cells, at, value)


def _usage(text: str) -> UsageError:
    return UsageError(text, where="physical-function")
