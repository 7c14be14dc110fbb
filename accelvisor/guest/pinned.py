"""Memory of this process whose physical pages are known and stay where they are.

Without an IOMMU a device is told guest-physical addresses, so a page that the kernel moves after we
looked it up would let the device write into somebody else's memory. Locking (mlock) keeps a page
from being swapped, not from being moved: compaction moves locked pages by default. What holds
a page in place is a long-term pin, and the one door to it that needs no kernel module is io_uring's
registered buffers. Where io_uring is not to be had there is no DMA: switching compaction of locked
pages off (vm.compact_unevictable_allowed) leaves huge page collapse, NUMA balancing, contiguous
allocations and memory hot-unplug, each of which moves pages.

A pin belongs to the io_uring instance, not to the process: pages stay as long as anybody has its
descriptor open, also when their process is gone. See :mod:`accelvisor.guest.undertaker`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading

from accelvisor.abi.registers import PAGE
from accelvisor.errors import CapacityError, PermissionDenied, SystemFailure

# io_uring's system calls have the same numbers on every architecture (the unified range).
_SYS_IO_URING_SETUP = 425
_SYS_IO_URING_REGISTER = 427
_IORING_REGISTER_BUFFERS = 0
_IORING_REGISTER_BUFFERS_UPDATE = 16  # Linux 5.13
_SLOTS = 4096  # of one instance; the kernel allows 16384
_MADV_WIPEONFORK = 18
_URING_BUFFER_BYTES = 1 << 30  # the kernel's limit for one registered buffer
_PRESENT = 1 << 63  # Documentation/admin-guide/mm/pagemap.rst
_PFN = (1 << 55) - 1
_HUGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.syscall.restype = ctypes.c_long


class Pins:
    """Pages held in place by one descriptor, each range in slots of its own. Safe for threads.

    Raises:
        SystemFailure: this kernel, or somebody's policy, does not let us.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = list(range(_SLOTS))
        params = ctypes.create_string_buffer(120)
        self.fd = int(_libc.syscall(_SYS_IO_URING_SETUP, 1, params))
        if self.fd < 0:
            raise _unpinnable(ctypes.get_errno())
        os.set_inheritable(self.fd, False)
        empty = bytes(16 * _SLOTS)
        if _libc.syscall(
            _SYS_IO_URING_REGISTER, self.fd, _IORING_REGISTER_BUFFERS, empty, _SLOTS
        ):
            number = ctypes.get_errno()
            self.close()
            raise _unpinnable(number)

    def pin(self, start: int, nbytes: int) -> list[int]:
        """Hold this process's pages from address ``start`` on; returns their slots.

        Raises:
            CapacityError: no slot is left, or no more memory may be locked. SystemFailure.
        """
        slots: list[int] = []
        with self._lock:
            for at in range(0, nbytes, _URING_BUFFER_BYTES):
                number = errno.ENFILE
                if self._free:
                    slots.append(self._free.pop())
                    size = min(_URING_BUFFER_BYTES, nbytes - at)
                    number = self._set(slots[-1], start + at, size)
                if number:
                    self._unpin(slots)
                    if number in (errno.ENFILE, errno.ENOMEM):
                        raise _no_memory(nbytes, os.strerror(number))
                    raise _unpinnable(number)
        return slots

    def unpin(self, slots: list[int]) -> None:
        """Let go of what :meth:`pin` took; after :meth:`close` that is no longer ours to do."""
        with self._lock:
            self._unpin(slots)

    def close(self) -> None:
        """Close our descriptor; the pages stay pinned while another process has it. Safe twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def forked(self) -> None:
        """In a forked child: as :meth:`close`, whoever held the lock in the parent."""
        self._lock = threading.Lock()
        self.close()

    def _unpin(self, slots: list[int]) -> None:
        for slot in slots:
            if self.fd >= 0 and not self._set(slot, 0, 0):
                self._free.append(slot)

    def _set(self, slot: int, start: int, nbytes: int) -> int:
        """Returns an errno, or 0."""
        vector = ctypes.create_string_buffer(struct.pack("@PN", start, nbytes), 16)
        # struct io_uring_rsrc_update2: offset, resv, data, tags, nr, resv2
        update = struct.pack("=IIQQII", slot, 0, ctypes.addressof(vector), 0, 1, 0)
        done = _libc.syscall(
            _SYS_IO_URING_REGISTER, self.fd, _IORING_REGISTER_BUFFERS_UPDATE, update, len(update)
        )
        return 0 if done == 1 else ctypes.get_errno() or errno.EINVAL


class PinnedMemory:
    """Zeroed, locked, pinned memory and where it lies: a DMA buffer for a device without IOMMU.

    Args:
        nbytes: rounded up to whole pages.
        pins: what holds it in place.

    Raises:
        CapacityError: it cannot be had or locked.
        PermissionDenied: physical addresses are hidden from this process (needs root).
        SystemFailure: the pages cannot be kept in place.
    """

    def __init__(self, nbytes: int, pins: Pins) -> None:
        size = (max(nbytes, 1) + PAGE - 1) // PAGE * PAGE
        try:
            self._map = mmap.mmap(
                -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, ValueError) as error:
            raise _no_memory(size, str(error)) from error
        self._pins = pins
        self._slots: list[int] = []
        try:
            if size >= _HUGE:
                _advise(self._map, mmap.MADV_HUGEPAGE)  # fewer segments, if the kernel can
            # A fork would share the pages copy-on-write and leave the device with the wrong copy.
            # The child gets empty pages in their place, so that it may look at its arrays.
            _advise(self._map, _MADV_WIPEONFORK)
            start = _address(self._map)
            if _libc.mlock(start, size) != 0:
                raise _no_memory(size, os.strerror(ctypes.get_errno()))
            self._slots = pins.pin(start, size)
            self.segments = physical_segments(start, size)
        except BaseException:
            self._drop()
            raise
        self.address = self.segments[0][0]
        self.view = memoryview(self._map)

    def release(self) -> None:
        """Unpin and unmap. Safe to call twice. A view that is still in use keeps the mapping."""
        self.view.release()
        self._drop()

    def _drop(self) -> None:
        slots, self._slots = self._slots, []
        self._pins.unpin(slots)
        try:
            self._map.close()
        except BufferError:
            pass  # somebody's numpy array looks at it; it goes with that array


def physical_segments(
    start: int, nbytes: int, pagemap: str = "/proc/self/pagemap"
) -> list[tuple[int, int]]:
    """(guest-physical address, bytes) of this process's memory at ``start``, neighbours joined.

    Raises:
        PermissionDenied: the kernel hides frame numbers from this process.
        SystemFailure: a page is not in memory.
    """
    pages = (nbytes + PAGE - 1) // PAGE
    try:
        fd = os.open(pagemap, os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw = os.pread(fd, pages * 8, start // PAGE * 8)
        finally:
            os.close(fd)
    except PermissionError as error:
        raise _hidden() from error
    if len(raw) != pages * 8:
        raise SystemFailure("the page map is cut short", code="pagemap", where="pagemap")
    segments: list[tuple[int, int]] = []
    for (entry,) in struct.iter_unpack("<Q", raw):
        if not entry & _PRESENT:
            raise SystemFailure("a locked page is not in memory", code="pagemap", where="pagemap")
        if not entry & _PFN:
            raise _hidden()
        address = (entry & _PFN) * PAGE
        if segments and sum(segments[-1]) == address:
            segments[-1] = (segments[-1][0], segments[-1][1] + PAGE)
        else:
            segments.append((address, PAGE))
    return segments


def _unpinnable(number: int) -> SystemFailure:
    return SystemFailure(
        f"memory for the device cannot be kept in place: {os.strerror(number)}",
        code="dma-unpinnable",
        where="sysfs",
        hint="allow io_uring (sysctl kernel.io_uring_disabled=0), or give the VM an IOMMU (vfio)",
    )


def _address(area: mmap.mmap) -> int:
    probe = ctypes.c_char.from_buffer(area)
    return ctypes.addressof(probe)


def _advise(area: mmap.mmap, advice: int) -> None:
    try:
        area.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel built without that feature
            raise


def _no_memory(nbytes: int, why: str) -> CapacityError:
    return CapacityError(
        f"{nbytes} bytes of locked memory could not be had: {why}",
        code="dma-memory",
        where="dma",
        hint="raise the locked-memory limit (ulimit -l), or copy in smaller parts",
    )


def _hidden() -> PermissionDenied:
    return PermissionDenied(
        "the kernel hides physical addresses from this process",
        code="dma-permission",
        where="pagemap",
        hint="run as root, or give the VM an IOMMU and use the vfio driver",
    )
