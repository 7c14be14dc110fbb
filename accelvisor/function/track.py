"""What the device wrote while somebody copies it: pages of its own memory and of the VM's RAM.

One byte a page in a memfd that the daemon reads too. For device memory the daemon clears a byte
*before* it copies the page and the device sets it *after* it wrote, so a page that is written while
it is copied is copied again. For the VM's RAM bytes are only ever set (before the write): QEMU does
not see what is written through the memfd, so all of it is written again at the destination.

A worker that starts while tracking is on does not know what its predecessor was about to mark: it
marks all device memory. Of the VM's RAM nothing is lost, since marks come before writes.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from accelvisor.function import state as s
from accelvisor.function.state import State
from accelvisor.vfio_user.protocol import PAGE_BYTES

_SHIFT = PAGE_BYTES.bit_length() - 1
_FILES_AT = s.TRACK_MEMORY_BYTES
_FILE_MARKS = s.TRACK_FILE_BYTES

Run = tuple[int, int]  # first page, pages


class Track:
    """The marks of one function. ``fd`` stays the caller's.

    Args:
        memory_bytes: of the function's device memory.
    """

    def __init__(self, state: State, fd: int, memory_bytes: int) -> None:
        self._u32 = state.u32
        self._fd = fd
        self.resize(memory_bytes)
        self._map = mmap.mmap(fd, s.TRACK_BYTES)
        self._marks = memoryview(self._map)
        if self.on:
            self.doubt()

    def resize(self, memory_bytes: int) -> None:
        """The device has this much memory now. Who copies it begins anew."""
        self._pages = memory_bytes >> _SHIFT

    @property
    def on(self) -> bool:
        """Whether writes are tracked."""
        return bool(self._u32[s.N_TRACKING])

    def start(self) -> None:
        """Begin with nothing marked; when it is on already, nothing changes."""
        if not self.on:
            self._clear()
            self._u32[s.N_TRACKING] = 1

    def stop(self) -> None:
        """No longer track, and forget."""
        if self.on:
            self._u32[s.N_TRACKING] = 0
            self._clear()

    def doubt(self) -> None:
        """Take all device memory for written."""
        self._marks[: self._pages] = b"\1" * self._pages

    def memory(self, address: int, nbytes: int) -> None:
        """The device wrote its own memory. Cheap when nobody asks."""
        if self._u32[s.N_TRACKING] and nbytes:
            first, last = address >> _SHIFT, address + nbytes - 1 >> _SHIFT
            self._marks[first : last + 1] = b"\1" * (last + 1 - first)

    def file(self, slot: int, offset: int, nbytes: int) -> bool:
        """The device is about to write the client's file in ``slot``. False when so large a file
        cannot be tracked.
        """
        if not self._u32[s.N_TRACKING] or not nbytes:
            return True
        first, last = offset >> _SHIFT, offset + nbytes - 1 >> _SHIFT
        if last >= _FILE_MARKS:
            return False
        at = _FILES_AT + slot * _FILE_MARKS
        self._marks[at + first : at + last + 1] = b"\1" * (last + 1 - first)
        return True

    def runs(self, slot: int) -> list[Run]:
        """Marked pages of a client's file, in order, neighbours together."""
        base = _FILES_AT + slot * _FILE_MARKS
        found: list[Run] = []
        for start, end in data_ranges(self._fd, base, base + _FILE_MARKS):
            marks = np.frombuffer(self._marks, np.uint8, end - start, start)
            for first, count in runs_of(marks):
                first += start - base
                if found and sum(found[-1]) == first:
                    found[-1] = (found[-1][0], found[-1][1] + count)
                else:
                    found.append((first, count))
        return found

    def slots(self) -> list[int]:
        """Slots of the files that have marks."""
        used = data_ranges(self._fd, _FILES_AT, s.TRACK_BYTES)
        slots: set[int] = set()
        for start, end in used:
            slots.update(
                range((start - _FILES_AT) // _FILE_MARKS, (end - 1 - _FILES_AT) // _FILE_MARKS + 1)
            )
        return sorted(slots)

    def _clear(self) -> None:
        self._map.madvise(mmap.MADV_REMOVE, 0, s.TRACK_BYTES)


def runs_of(marks: npt.NDArray[np.uint8]) -> list[Run]:
    """Runs of non-zero bytes as (first, count)."""
    edges = np.flatnonzero(np.diff(marks != 0, prepend=False, append=False))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def data_ranges(fd: int, start: int, end: int) -> list[tuple[int, int]]:
    """Where a file has data between two offsets: (from, to), holes left out."""
    found = []
    at = start
    while at < end:
        try:
            low = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            break
        if low >= end:
            break
        at = min(os.lseek(fd, low, os.SEEK_HOLE), end)
        found.append((low, at))
    return found
