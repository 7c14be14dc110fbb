"""A small PCI device for the tests: config space, registers, a mapped window, MSI, migration.

It behaves as QEMU wants a vfio-user device to behave, so that the same model answers the in-tree
client, recorded transcripts and a real QEMU. Registers of BAR0 are plain memory but for these,
which act when they are written (32 bits, and 64 for the address):

    0x100 raise the MSI          0x110 write PATTERN at ADDRESS through the map
    0x108 ADDRESS (64 bits)      0x114 the same by DMA messages, after the reply
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Sequence

from accelvisor.vfio_user.dirty import DirtyLog
from accelvisor.vfio_user.dma import DmaTable
from accelvisor.vfio_user.features import Features
from accelvisor.vfio_user.migration import MigrationMachine
from accelvisor.vfio_user.model import DeviceInfo, IrqInfo, Refusal, RegionInfo
from accelvisor.vfio_user.protocol import (
    PCI_IRQS,
    PCI_REGIONS,
    DeviceFlag,
    DmaFlag,
    IrqInfoFlag,
    IrqSet,
    MigState,
    PciIrq,
    PciRegion,
    RegionFlag,
    UnmapFlag,
)
from accelvisor.vfio_user.server import Connection, Task
from accelvisor.vfio_user.wire import close_fds

BAR0_BYTES = 0x10000
WINDOW_BYTES = 0x10000
MSI_CAP = 0x80
EXPRESS_CAP = 0xA0
RAISE, ADDRESS, WRITE, EXCHANGE = 0x100, 0x108, 0x110, 0x114
PATTERN = b"accelvisor sample device"
_CONFIG_BYTES = 4096


def config_space() -> bytearray:
    """Type 0 header; PCI Express and MSI capabilities; 32-bit BAR0, 64-bit prefetchable BAR2."""
    config = bytearray(_CONFIG_BYTES)
    struct.pack_into("<HHHHBBBB", config, 0, 0xACCE, 0x0001, 0, 0x10, 1, 0, 0, 0x12)
    struct.pack_into("<I", config, 0x10, 0)
    struct.pack_into("<I", config, 0x18, 0xC)
    struct.pack_into("<HH", config, 0x2C, 0xACCE, 0x0001)
    config[0x34] = MSI_CAP
    # MSI, 64-bit address, one vector.
    struct.pack_into("<BBH", config, MSI_CAP, 0x05, EXPRESS_CAP, 0x80)
    # PCI Express endpoint, version 2; function-level reset capable.
    struct.pack_into("<BBHI", config, EXPRESS_CAP, 0x10, 0x00, 0x0002, 1 << 28 | 1 << 15)
    struct.pack_into("<I", config, EXPRESS_CAP + 0x0C, 0x11)
    struct.pack_into("<H", config, EXPRESS_CAP + 0x12, 0x11)
    return config


def _writable() -> bytes:
    """Which config bits a guest may change."""
    mask = bytearray(_CONFIG_BYTES)
    struct.pack_into("<H", mask, 0x04, 0x0547)
    struct.pack_into("<I", mask, 0x0C, 0x000000FF)
    struct.pack_into("<I", mask, 0x10, ~(BAR0_BYTES - 1) & 0xFFFFFFFF)
    struct.pack_into("<II", mask, 0x18, ~(WINDOW_BYTES - 1) & 0xFFFFFFFF, 0xFFFFFFFF)
    mask[0x3C] = 0xFF
    struct.pack_into("<HIIH", mask, MSI_CAP + 2, 0x0071, 0xFFFFFFFC, 0xFFFFFFFF, 0xFFFF)
    struct.pack_into("<H", mask, EXPRESS_CAP + 8, 0x7FFF)
    return bytes(mask)


class SampleDevice:
    """See the module. Counters (``resets``, ``unmaps``) are for tests."""

    def __init__(self) -> None:
        self.window_fd = os.memfd_create("window", os.MFD_CLOEXEC)
        os.ftruncate(self.window_fd, WINDOW_BYTES)
        self.window = mmap.mmap(self.window_fd, WINDOW_BYTES)
        self.bar0 = bytearray(BAR0_BYTES)
        self.config = config_space()
        self.mask = _writable()
        self.maps: DmaTable[mmap.mmap | None] = DmaTable()
        self.eventfds: dict[tuple[int, int], int] = {}
        self.resets = self.function_resets = self.unmaps = 0
        self.dirty = DirtyLog()
        self.machine = MigrationMachine(self._arc)
        self.features = Features(self.machine, self.dirty)
        # The server's ``defer``, where the model runs in one.
        self.defer: Callable[[Task], None] | None = None
        self._saved = b""
        self._loaded = bytearray()

    def close(self) -> None:
        self.dma_unmap(0, 0, UnmapFlag.ALL)
        close_fds(self.eventfds.values())
        self.eventfds.clear()
        self.window.close()
        os.close(self.window_fd)

    # --- description -----------------------------------------------------------------------------

    def device_info(self) -> DeviceInfo:
        return DeviceInfo(DeviceFlag.PCI | DeviceFlag.RESET, PCI_REGIONS, PCI_IRQS)

    def region_info(self, index: int) -> RegionInfo:
        both = RegionFlag.READ | RegionFlag.WRITE
        if index == PciRegion.BAR0:
            return RegionInfo(index, both, BAR0_BYTES)
        if index == PciRegion.BAR2:
            return RegionInfo(index, both | RegionFlag.MMAP, WINDOW_BYTES, self.window_fd)
        if index == PciRegion.CONFIG:
            return RegionInfo(index, both, _CONFIG_BYTES)
        return RegionInfo(index, 0, 0)

    def irq_info(self, index: int) -> IrqInfo:
        if index == PciIrq.MSI:
            return IrqInfo(index, IrqInfoFlag.EVENTFD | IrqInfoFlag.NORESIZE, 1)
        return IrqInfo(index, 0, 0)

    # --- regions ---------------------------------------------------------------------------------

    def region_read(self, index: int, offset: int, count: int) -> bytes:
        return bytes(self._region(index)[offset : offset + count])

    def region_write(self, index: int, offset: int, data: bytes) -> None:
        region = self._region(index)
        if index != PciRegion.CONFIG:
            region[offset : offset + len(data)] = data
            if index == PciRegion.BAR0:
                self._act(offset)
            return
        for at, byte in enumerate(data, offset):
            mask = self.mask[at]
            self.config[at] = self.config[at] & ~mask | byte & mask
        control = EXPRESS_CAP + 8
        if offset <= control + 1 < offset + len(data) and data[control + 1 - offset] & 0x80:
            self.function_resets += 1
            self._reset_registers()

    def _act(self, offset: int) -> None:
        (address,) = struct.unpack_from("<Q", self.bar0, ADDRESS)
        if offset == RAISE:
            self.interrupt()
        elif offset == WRITE:
            self.dma_write(address, PATTERN)
        elif offset == EXCHANGE and self.defer is not None:
            self.defer(lambda c: self._exchange(c, address))

    def _exchange(self, connection: Connection, address: int) -> None:
        """DMA by message: what is there moves behind, PATTERN takes its place."""
        before = connection.dma_read(address, len(PATTERN))
        connection.dma_write(address + len(PATTERN), before)
        connection.dma_write(address, PATTERN)
        self.interrupt()

    def _region(self, index: int) -> bytearray | mmap.mmap:
        if index == PciRegion.BAR0:
            return self.bar0
        if index == PciRegion.BAR2:
            return self.window
        return self.config

    # --- DMA, interrupts -------------------------------------------------------------------------

    def dma_map(self, address: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        memory: mmap.mmap | None = None
        try:
            if fd is not None:
                protection = mmap.PROT_READ | (mmap.PROT_WRITE if flags & DmaFlag.WRITE else 0)
                try:
                    memory = mmap.mmap(fd, size, mmap.MAP_SHARED, protection, offset=offset)
                except (OSError, ValueError) as error:
                    raise Refusal(22, f"cannot map {size} bytes: {error}") from error
            self.maps.add(address, size, flags, memory)
        except Refusal:
            if memory is not None:
                memory.close()
            raise
        finally:
            if fd is not None:
                os.close(fd)

    def dma_unmap(self, address: int, size: int, flags: int) -> None:
        self.unmaps += 1
        gone = self.maps.clear() if flags & UnmapFlag.ALL else self.maps.remove(address, size)
        for entry in gone:
            if entry.item is not None:
                entry.item.close()

    def dma_write(self, address: int, data: bytes) -> None:
        """What the device's engine does: write client memory through its maps."""
        at = 0
        for piece in self.maps.pieces(address, len(data), DmaFlag.WRITE):
            if piece.range.item is None:
                raise Refusal(14, "mapped without memory")
            piece.range.item[piece.offset : piece.offset + piece.size] = data[at : at + piece.size]
            at += piece.size
        self.dirty.mark(address, len(data))

    def set_irqs(
        self, index: int, flags: int, start: int, count: int, data: bytes, fds: Sequence[int]
    ) -> None:
        if not flags & IrqSet.ACTION_TRIGGER:
            close_fds(fds)
            raise Refusal(22, "MSI has no mask of its own")
        if flags & IrqSet.DATA_EVENTFD or not count:
            vectors = [key for key in self.eventfds if key[0] == index]
            if count:
                vectors = [key for key in vectors if start <= key[1] < start + count]
            close_fds(self.eventfds.pop(key) for key in vectors)
            self.eventfds.update({(index, start + i): fd for i, fd in enumerate(fds)})
            return
        for i in range(count):
            if not flags & IrqSet.DATA_BOOL or data[i]:
                self.interrupt(index, start + i)

    def interrupt(self, index: int = PciIrq.MSI, vector: int = 0) -> None:
        fd = self.eventfds.get((index, vector))
        if fd is not None:
            os.eventfd_write(fd, 1)

    # --- reset, migration ------------------------------------------------------------------------

    def reset(self) -> None:
        self.resets += 1
        self.machine.reset()
        self._reset_registers()

    def _reset_registers(self) -> None:
        self.config = config_space()
        self.bar0[:] = bytes(BAR0_BYTES)

    def device_feature(self, flags: int, feature: int, data: bytes) -> bytes:
        return self.features.handle(flags, feature, data)

    def migration_read(self, count: int) -> bytes:
        if self.machine.state not in (MigState.STOP_COPY, MigState.PRE_COPY):
            raise Refusal(22, f"nothing to read in {self.machine.state.name}")
        part, self._saved = self._saved[:count], self._saved[count:]
        return part

    def migration_write(self, data: bytes) -> None:
        if self.machine.state is not MigState.RESUMING:
            raise Refusal(22, f"nothing to load in {self.machine.state.name}")
        self._loaded += data

    def dirty_pages(self, address: int, size: int, page_size: int) -> bytes:
        return self.dirty.report(address, size, page_size)

    def _arc(self, before: MigState, after: MigState) -> None:
        if after is MigState.STOP_COPY:
            self._saved = bytes(self.bar0)
        if after is MigState.RESUMING:
            self._loaded.clear()
        if before is MigState.RESUMING:
            if len(self._loaded) != BAR0_BYTES:
                raise Refusal(22, f"{len(self._loaded)} bytes of state, {BAR0_BYTES} expected")
            self.bar0[:] = self._loaded
