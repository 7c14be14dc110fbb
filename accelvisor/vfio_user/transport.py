"""The guest's transport over the in-tree client: a "VM" whose RAM is a memfd, without QEMU.

Implements ``accelvisor.guest.transport.Transport`` (docs/contracts.md section 4) by shape; this
room may not import the guest. It does what firmware and a driver do before they use a function:
checks the PCI identity, sets memory space and bus-master in the command register, and points the
MSI at an eventfd.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import struct
import time
from dataclasses import dataclass

from accelvisor.errors import (
    CapacityError,
    DataError,
    DeadlineError,
    SystemFailure,
    UnavailableError,
    UsageError,
)
from accelvisor.limits import MIB
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import PAGE_BYTES, PciIrq, PciRegion

#: Where the guest's RAM lies in the device's address space. Not 0, so that a null address faults.
RAM_ADDRESS = 0x1_0000_0000

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

#: What the bus turns into all-ones and lost writes.
_ABSENT = (UnavailableError, DeadlineError, Refusal)

_COMMAND = 0x04
_COMMAND_MEMORY = 1 << 1
_COMMAND_MASTER = 1 << 2
_CAPABILITIES = 0x34
_CAP_MSI = 0x05
_MSI_ENABLE = 1 << 0
_U16 = struct.Struct("<H")


@dataclass
class DmaBuffer:
    """Guest memory that the device may reach: its DMA address and the bytes themselves."""

    address: int
    view: memoryview
    _owner: ClientTransport

    def release(self) -> None:
        """Give the memory back; may be called twice. The view is gone after."""
        if self.view.nbytes:
            size = self.view.nbytes
            self.view.release()
            self.view = memoryview(b"")
            self._owner._free(self.address, size)


class ClientTransport:
    """A function as its guest sees it, over :class:`Client`.

    Args:
        client: connected; the transport closes it.
        ram_bytes: size of the guest's RAM, whole pages.
        registers, window: region indices of BAR0 and of the mapped window.
        enable: switch the device on, as a guest's driver does; False for a VM that is about to come
            from elsewhere, whose registers others restore.

    Raises:
        DataError: code ``pci-identity``, the device answers with no PCI identity.
    """

    def __init__(
        self,
        client: Client,
        *,
        ram_bytes: int = 64 * MIB,
        registers: int = PciRegion.BAR0,
        window: int = PciRegion.BAR2,
        enable: bool = True,
    ) -> None:
        if ram_bytes <= 0 or ram_bytes % PAGE_BYTES:
            raise UsageError(f"{ram_bytes} bytes of RAM are not whole pages", where="transport")
        self.client = client
        self._registers = registers
        self._window_index = window
        self._irq = -1
        self._ram_fd = -1
        self._ram: mmap.mmap | None = None
        self._window: mmap.mmap | None = None
        self._free_spans: list[tuple[int, int]] = [(0, ram_bytes)]
        try:
            self._ram_fd = os.memfd_create("guest-ram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._ram_fd, ram_bytes)
            # As QEMU's memory backend does: a function maps only what cannot shrink under it.
            fcntl.fcntl(self._ram_fd, fcntl.F_ADD_SEALS, _SEALS)
            self._ram = mmap.mmap(self._ram_fd, ram_bytes)
            self._ram_view = memoryview(self._ram)
            client.dma_map(RAM_ADDRESS, ram_bytes, fd=self._ram_fd, memory=self._ram_view)
            self._window = client.map_region(window)
            self.window = memoryview(self._window)
            if enable:
                self._enable()
            else:
                self._irq = client.irq_eventfd(PciIrq.MSI)
        except BaseException:
            self.close()
            raise

    # --- registers -----------------------------------------------------------------------------

    def read32(self, offset: int) -> int:
        """A BAR0 register; all-ones when the function is gone or refuses, as on a real bus."""
        try:
            return self.client.read32(self._registers, offset)
        except _ABSENT:
            return 0xFFFF_FFFF

    def write32(self, offset: int, value: int) -> None:
        """Write a BAR0 register; lost when the function is gone or refuses."""
        try:
            self.client.write32(self._registers, offset, value)
        except _ABSENT:
            pass

    def read64(self, offset: int) -> int:
        """A 64-bit BAR0 register; all-ones like :meth:`read32`."""
        try:
            return self.client.read64(self._registers, offset)
        except _ABSENT:
            return 0xFFFF_FFFF_FFFF_FFFF

    @property
    def ram(self) -> memoryview:
        """All of the guest's RAM, as whoever moves the VM copies it."""
        return self._ram_view

    # --- memory --------------------------------------------------------------------------------

    def allocate_dma(self, nbytes: int) -> DmaBuffer:
        """Guest RAM in whole pages, zeroed; the view has exactly the pages' size rounded up.

        Raises:
            CapacityError: code ``guest-ram``, no run of free pages is long enough.
        """
        size = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
        for i, (start, length) in enumerate(self._free_spans):
            if length >= size:
                self._free_spans[i] = (start + size, length - size)
                if length == size:
                    del self._free_spans[i]
                view = self._ram_view[start : start + size]
                view[:] = bytes(size)
                return DmaBuffer(RAM_ADDRESS + start, view, self)
        raise CapacityError(
            f"no {size} contiguous bytes of guest RAM are free",
            code="guest-ram", where="transport", hint="release buffers, or give the guest more RAM",
        )  # fmt: skip

    def _free(self, address: int, size: int) -> None:
        """Put a span back and join it with its neighbours."""
        if self._ram is None:
            return
        spans = sorted([*self._free_spans, (address - RAM_ADDRESS, size)])
        joined = [spans[0]]
        for start, length in spans[1:]:
            last_start, last_length = joined[-1]
            if last_start + last_length == start:
                joined[-1] = (last_start, last_length + length)
            else:
                joined.append((start, length))
        self._free_spans = joined

    # --- interrupt -----------------------------------------------------------------------------

    def wait_interrupt(self, timeout_s: float) -> bool:
        """Wait for the MSI; answers the device's DMA requests meanwhile. False when time is up."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._irq, select.POLLIN)
        poll.register(self.client.fileno(), select.POLLIN)
        while self.client.buffered:
            self.client.pump()
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready = dict(poll.poll(left * 1000))
            if self._irq in ready:
                os.eventfd_read(self._irq)
                return True
            if ready:
                self.client.pump()
            elif not left:
                return False

    # --- a move --------------------------------------------------------------------------------

    def adopt(self, other: ClientTransport) -> None:
        """The guest goes on with ``other``'s device, RAM and window: what was mapped here stays
        where it is and shows those, as a guest's memory does when its VM was moved. Nobody may use
        either meanwhile. ``other`` is this transport's old self afterwards, to be closed.
        """
        if self._ram is None or self._window is None or other._ram is None:
            raise UsageError("a closed transport cannot move", where="transport")
        _exchange(self._ram, self._ram_fd, other._ram, other._ram_fd)
        mine, theirs = (t.client.region_info(t._window_index).fd for t in (self, other))
        if mine is None or theirs is None:
            raise UsageError("a window cannot be mapped", where="transport")
        try:
            if other._window is not None:
                _exchange(self._window, mine, other._window, theirs)
        finally:
            os.close(mine)
            os.close(theirs)
        self.client, other.client = other.client, self.client
        self._ram_fd, other._ram_fd = other._ram_fd, self._ram_fd
        self._irq, other._irq = other._irq, self._irq

    # --- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect and free the RAM; may be called twice."""
        self.client.close()
        if self._irq >= 0:
            os.close(self._irq)
            self._irq = -1
        if self._window is not None:
            self.window.release()
            self._unmap(self._window)
            self._window = None
        if self._ram is not None:
            self._ram_view.release()
            self._unmap(self._ram)
            self._ram = None
        if self._ram_fd >= 0:
            os.close(self._ram_fd)
            self._ram_fd = -1

    @staticmethod
    def _unmap(mapped: mmap.mmap) -> None:
        try:
            mapped.close()
        except BufferError:
            # A caller still holds a view of it: the memory goes with the last of those.
            pass

    def _enable(self) -> None:
        config = self.client.region_read(PciRegion.CONFIG, 0, 256)
        if len(config) < 64 or config[:2] in (b"\xff\xff", b"\0\0"):
            raise DataError(
                f"the device has no PCI identity ({config[:4].hex()})",
                code="pci-identity", where="transport", hint="the function may have given up",
            )  # fmt: skip
        self._irq = self.client.irq_eventfd(PciIrq.MSI)
        at = _find_capability(config, _CAP_MSI)
        if at:
            (control,) = _U16.unpack_from(config, at + 2)
            enabled = _U16.pack(control | _MSI_ENABLE)
            self.client.region_write(PciRegion.CONFIG, at + 2, enabled)
        (command,) = _U16.unpack_from(config, _COMMAND)
        wanted = _U16.pack(command | _COMMAND_MEMORY | _COMMAND_MASTER)
        self.client.region_write(PciRegion.CONFIG, _COMMAND, wanted)

    def reenable(self) -> None:
        """After a reset: what a guest does again (command register, MSI)."""
        if self._irq >= 0:
            os.close(self._irq)
            self._irq = -1
        self._enable()


def _exchange(a: mmap.mmap, a_fd: int, b: mmap.mmap, b_fd: int) -> None:
    """Each mapping shows the other's file from here on, at the addresses that it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    for mapped, fd in ((a, b_fd), (b, a_fd)):
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(first)
        del first
        flags = mmap.MAP_SHARED | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(address, len(mapped), protection, flags, fd, 0) != address:
            raise SystemFailure(
                f"cannot map again: {os.strerror(ctypes.get_errno())}", where="transport"
            )


_MAP_FIXED = 0x10


def _find_capability(config: bytes, wanted: int) -> int:
    """Offset of a PCI capability in 256 bytes of config space, 0 if it is not there."""
    at = config[_CAPABILITIES]
    for _ in range(48):  # no longer chain fits
        if at < 0x40 or at > 0xFC:
            return 0
        if config[at] == wanted:
            return at
        at = config[at + 1]
    return 0


