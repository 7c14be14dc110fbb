"""What Linux does with a device that has SR-IOV: its steps in Python, to walk our registers with.

After drivers/pci/iov.c (sriov_init, compute_max_vf_buses, sriov_enable, pci_iov_add_virtfn,
sriov_disable, sriov_restore_state) and drivers/pci/probe.c (__pci_read_base) of Linux 5.x, and the
stricter order of 4.3, which wants an offset before NumVFs was ever set. Only ``read`` and ``write``
of a configuration space are used; sleeps, locks and sysfs are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

EXT_ARI, EXT_SRIOV = 0x000E, 0x0010
VFE, MSE, ARI = 0x01, 0x08, 0x10


class ConfigSpace(Protocol):
    def read(self, offset: int, count: int) -> bytes: ...

    def write(self, offset: int, data: bytes) -> object: ...


class KernelError(Exception):
    """What the kernel gives up with, e.g. ``-EIO``."""


@dataclass
class Resource:
    """One BAR of all VFs: ``each`` bytes of each; ``start`` is set when it was assigned."""

    index: int
    each: int
    total: int
    wide: bool
    prefetchable: bool
    start: int = -1


@dataclass(frozen=True)
class VirtualFunction:
    routing_id: int
    vendor: int
    device: int
    bars: Sequence[range]


class Linux:
    """One kernel and one device.

    Args:
        bus: the device's; it is function 0 there.
        last_bus: up to which bus number its port forwards.
        ari_port: whether the port forwards ARI.
        page_shift: log2 of the kernel's page.
    """

    def __init__(
        self,
        device: ConfigSpace,
        *,
        bus: int = 1,
        last_bus: int = 2,
        ari_port: bool = True,
        page_shift: int = 12,
    ) -> None:
        self._device = device
        self._routing_id, self._last_bus = bus << 8, last_bus
        self._ari_port, self._page_shift = ari_port, page_shift
        self.resources: list[Resource] = []
        self.max_bus = 0
        self.num_vfs = 0

    def u(self, at: int, nbytes: int) -> int:
        return int.from_bytes(self._device.read(at, nbytes), "little")

    def put(self, at: int, value: int, nbytes: int) -> None:
        self._device.write(at, value.to_bytes(nbytes, "little"))

    # --- finding it ------------------------------------------------------------------------------

    def capability(self, wanted: int) -> int:
        at, left = self.u(0x34, 1), 48
        while at >= 0x40 and left and self.u(at, 1) != wanted:
            at, left = self.u(at + 1, 1) & ~3, left - 1
        return at if at >= 0x40 and left else 0

    def extended(self, wanted: int) -> int:
        at, left = 0x100, 480
        while left:
            header = self.u(at, 4)
            if header == 0:
                return 0
            if header & 0xFFFF == wanted:
                return at
            at, left = header >> 20, left - 1
            if at < 0x100:
                return 0
        return 0

    # --- sriov_init ------------------------------------------------------------------------------

    def init(self) -> None:
        express = self.capability(0x10)
        if not express or self.u(express + 2, 2) >> 4 & 0xF not in (0, 9):
            raise KernelError("-ENODEV")
        self.pos = pos = self.extended(EXT_SRIOV)
        if not pos:
            raise KernelError("-ENODEV")
        if self.u(pos + 0x08, 2) & VFE:
            self.put(pos + 0x08, 0, 2)
        ari = self._ari_port and self.extended(EXT_ARI)  # pci_configure_ari
        self.ctrl = ARI if ari else 0
        self.put(pos + 0x08, self.ctrl, 2)
        self.total = self.u(pos + 0x0E, 2)
        if not self.total:
            raise KernelError("no VFs")
        self._set_numvfs(0)
        if not self.offset or (self.total > 1 and not self.stride):
            raise KernelError("-EIO")
        self._page_size()
        self._read_bars()
        self.vf_device = self.u(pos + 0x1A, 2)
        self.cap = self.u(pos + 0x04, 4)
        self.link = self.u(pos + 0x12, 1)
        self._count_buses()

    def _page_size(self) -> None:
        sizes = self.u(self.pos + 0x1C, 4) & ~((1 << max(self._page_shift - 12, 0)) - 1)
        if not sizes:
            raise KernelError("-EIO")
        self.page_size = sizes & -sizes
        self.put(self.pos + 0x20, self.page_size, 4)

    def _read_bars(self) -> None:
        self.resources, index = [], 0
        while index < 6:
            found = self._read_base(index)
            if found is None:
                index += 1
                continue
            if found.each & ((1 << self._page_shift) - 1):
                raise KernelError("-EIO")
            self.resources.append(found)
            index += 2 if found.wide else 1

    def _read_base(self, index: int) -> Resource | None:
        """__pci_read_base: ones are written, what stays 0 is the size."""
        at = self.pos + 0x24 + 4 * index
        old, size = self._probe(at)
        if size == 0xFFFF_FFFF:
            size = 0
        if old & 1:
            raise KernelError("a VF BAR cannot be I/O")
        wide = old & 0x6 == 0x4
        mask = 0xFFFF_FFF0
        size &= mask
        if wide:
            size |= self._probe(at + 4)[1] << 32
            mask |= 0xFFFF_FFFF << 32
        if not size & mask:
            return None
        each = size & -size
        if (size | each - 1) & mask != mask:
            raise KernelError("invalid BAR (can't size)")
        return Resource(index, each, each * self.total, wide, bool(old & 0x8))

    def _probe(self, at: int) -> tuple[int, int]:
        old = self.u(at, 4)
        self.put(at, 0xFFFF_FFFF, 4)
        size = self.u(at, 4)
        self.put(at, old, 4)
        if self.u(at, 4) != old:
            raise KernelError("sizing changed a BAR")
        return old, size

    def _set_numvfs(self, number: int) -> None:
        self.put(self.pos + 0x10, number, 2)
        self.offset = self.u(self.pos + 0x14, 2)
        self.stride = self.u(self.pos + 0x16, 2)

    def _count_buses(self) -> None:
        """compute_max_vf_buses: every number once, from the greatest down, then none."""
        for number in range(self.total, 0, -1):
            self._set_numvfs(number)
            if not self.offset or (number > 1 and not self.stride):
                raise KernelError("-EIO")
            self.max_bus = max(self.max_bus, self.id(number - 1) >> 8)
        self._set_numvfs(0)

    def id(self, index: int) -> int:
        """pci_iov_virtfn_bus and _devfn: VFs are counted from 0 here."""
        return self._routing_id + self.offset + self.stride * index

    # --- between: resources are assigned ---------------------------------------------------------

    def assign(self, low: int, high: int) -> None:
        """pci_iov_update_resource: 32-bit BARs from ``low`` on, 64-bit ones from ``high`` on, each
        aligned to one VF's.
        """
        for item in self.resources:
            start = high if item.wide else low
            item.start = -(-start // item.each) * item.each
            if item.wide:
                high = item.start + item.total
            else:
                low = item.start + item.total
            self._update(item)

    def _update(self, item: Resource) -> None:
        at = self.pos + 0x24 + 4 * item.index
        flags = 0x4 * item.wide | 0x8 * item.prefetchable
        self.put(at, item.start & 0xFFFF_FFFF | flags, 4)
        if item.wide:
            self.put(at + 4, item.start >> 32, 4)

    # --- sriov_enable, sriov_disable, sriov_restore_state ----------------------------------------

    def enable(self, number: int) -> list[VirtualFunction]:
        if self.num_vfs:
            raise KernelError("-EINVAL")
        initial, migration = self.u(self.pos + 0x0C, 2), self.cap & 1
        if initial > self.total or (not migration and initial != self.total):
            raise KernelError("-EIO")
        if number > self.total:
            raise KernelError("-EINVAL")
        # As 5.x does: the offset that was read last, with NumVFs 0.
        if self.id(number - 1) >> 8 > self._last_bus:
            raise KernelError("-ENOMEM")
        if any(item.start < 0 for item in self.resources):
            raise KernelError("-ENOMEM")
        if self.link != self._routing_id & 0xFF:
            raise KernelError("-ENODEV")
        self._set_numvfs(number)
        self.ctrl |= VFE | MSE
        self.put(self.pos + 0x08, self.ctrl, 2)
        self.num_vfs = number
        return [self._virtual_function(index) for index in range(number)]

    def _virtual_function(self, index: int) -> VirtualFunction:
        bars = [
            range(item.start + item.each * index, item.start + item.each * (index + 1))
            for item in self.resources
        ]
        return VirtualFunction(self.id(index), self.u(0, 2), self.vf_device, bars)

    def disable(self) -> None:
        self.ctrl &= ~(VFE | MSE)
        self.put(self.pos + 0x08, self.ctrl, 2)
        self.num_vfs = 0
        self._set_numvfs(0)

    def restore(self) -> None:
        """After a reset of the device."""
        ctrl = self.u(self.pos + 0x08, 2)
        if ctrl & VFE:
            return
        self.put(self.pos + 0x08, ctrl & ~ARI | self.ctrl & ARI, 2)
        for item in self.resources:
            self._update(item)
        self.put(self.pos + 0x20, self.page_size, 4)
        self._set_numvfs(self.num_vfs)
        self.put(self.pos + 0x08, self.ctrl, 2)
