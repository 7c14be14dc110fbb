"""Memory of this process whose physical pages are known and stay where they are.

Without an IOMMU a device is told guest-physical addresses, so a page that the kernel moves after we
looked it up would let the device write into somebody else's memory. Locking (mlock) keeps a page
from being swapped, not from being moved: compaction moves locked pages by default. What holds
a page in place is a long-term pin, and the one door to it that needs no kernel module is io_uring's
registered buffers. Where io_uring is not to be had, compaction of locked pages is switched off
(vm.compact_unevictable_allowed=0); where that is refused as well, so is the allocation.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from pathlib import Path

from accelvisor.abi.registers import PAGE
from accelvisor.errors import CapacityError, PermissionDenied, SystemFailure

# io_uring's system calls have the same numbers on every architecture (the unified range).
_SYS_IO_URING_SETUP = 425
_SYS_IO_URING_REGISTER = 427
_IORING_REGISTER_BUFFERS = 0
_URING_BUFFER_BYTES = 1 << 30  # the kernel's limit for one registered buffer
_PRESENT = 1 << 63  # Documentation/admin-guide/mm/pagemap.rst
_PFN = (1 << 55) - 1
_HUGE = 2 << 20
_COMPACT = Path("/proc/sys/vm/compact_unevictable_allowed")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.syscall.restype = ctypes.c_long


class PinnedMemory:
    """Zeroed, locked, pinned memory and where it lies: a DMA buffer for a device without IOMMU.

    Raises:
        CapacityError: it cannot be had or locked.
        PermissionDenied: physical addresses are hidden from this process (needs root).
        SystemFailure: the pages cannot be kept in place.
    """

    def __init__(self, nbytes: int) -> None:
        size = (max(nbytes, 1) + PAGE - 1) // PAGE * PAGE
        try:
            self._map = mmap.mmap(
                -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, ValueError) as error:
            raise _no_memory(size, str(error)) from error
        self._pin = -1
        try:
            if size >= _HUGE:
                _advise(self._map, mmap.MADV_HUGEPAGE)  # fewer segments, if the kernel can
            # A fork would share the pages copy-on-write and leave the device with the wrong copy.
            _advise(self._map, mmap.MADV_DONTFORK)
            start = _address(self._map)
            if _libc.mlock(start, size) != 0:
                raise _no_memory(size, os.strerror(ctypes.get_errno()))
            self._pin = _pin(start, size)
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
        if self._pin >= 0:
            os.close(self._pin)
            self._pin = -1
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


def _pin(start: int, nbytes: int) -> int:
    """Hold the pages in place; returns the descriptor that holds them, or -1 by the sysctl."""
    params = ctypes.create_string_buffer(120)
    fd = _libc.syscall(_SYS_IO_URING_SETUP, 1, params)
    if fd >= 0:
        vectors = [
            (start + at, min(_URING_BUFFER_BYTES, nbytes - at))
            for at in range(0, nbytes, _URING_BUFFER_BYTES)
        ]
        packed = b"".join(struct.pack("@PN", *v) for v in vectors)
        done = _libc.syscall(
            _SYS_IO_URING_REGISTER, fd, _IORING_REGISTER_BUFFERS, packed, len(vectors)
        )
        if done == 0:
            os.set_inheritable(fd, False)
            return int(fd)
        os.close(fd)
    _forbid_compaction()
    return -1


def _forbid_compaction(knob: Path = _COMPACT) -> None:
    try:
        if knob.read_text().strip() != "0":
            knob.write_text("0")
    except FileNotFoundError:
        return  # a kernel without compaction does not move pages
    except OSError as error:
        raise SystemFailure(
            f"memory for the device cannot be kept in place: {error.strerror}",
            code="dma-unpinnable",
            where="sysfs",
            hint="allow io_uring, set vm.compact_unevictable_allowed=0, or use an IOMMU (vfio)",
        ) from error


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
