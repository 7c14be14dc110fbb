"""Which pages of client memory the device wrote: one bit a page, read-and-clear.

The log keeps a byte array for each logged range, so its memory is bounded by the ranges and not by
the number of writes. With no ranges given everything is logged: then pages are kept in a set,
bounded by the memory that the client has mapped (a device only writes there).

A page that is dirtied between two reports appears in exactly one of them. A report reads and
clears under one lock, so a writer in another thread lands wholly before or after it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

from accelvisor.limits import GIB
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import PAGE_BYTES

#: Bytes of bitmap for one log: 16 MiB are 512 GiB of guest RAM in 4 KiB pages.
_MAX_BITMAP_BYTES = 16 * 1024 * 1024
_MAX_PAGE = GIB
_BITS = tuple(tuple(i for i in range(8) if byte >> i & 1) for byte in range(256))


class DirtyLog:
    """Tracks writes at one page size.

    Args:
        page_size: smallest granularity in bytes, a power of two. A client's hint below it or that
            is no power of two is answered with this size; a larger hint is taken up to 1 GiB.
    """

    def __init__(self, page_size: int = PAGE_BYTES) -> None:
        self._finest = page_size
        self._shift = page_size.bit_length() - 1
        self._lock = threading.Lock()
        self._active = False
        self._everything = False
        self._pages: set[int] = set()
        self._ranges: list[_Range] = []

    @property
    def active(self) -> bool:
        return self._active

    @property
    def page_size(self) -> int:
        """Bytes that one bit of the log stands for."""
        return 1 << self._shift

    def start(self, page_size: int, ranges: Sequence[tuple[int, int]] = ()) -> int:
        """Begin logging ``ranges`` of (address, bytes), or everything. Returns the page size taken.

        Raises:
            Refusal: EBUSY when logging already, EINVAL for overlapping ranges, ENOMEM when the
                bitmap would be larger than this host grants.
        """
        chosen = page_size
        if page_size < self._finest or page_size & (page_size - 1) or page_size > _MAX_PAGE:
            chosen = self._finest
        shift = chosen.bit_length() - 1
        spans = sorted((start, start + size) for start, size in ranges)
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            raise Refusal(errno.EINVAL, "DMA logging ranges overlap")
        pages = [(low >> shift, (high - 1 >> shift) + 1) for low, high in spans]
        if sum(last - first for first, last in pages) > _MAX_BITMAP_BYTES * 8:
            raise Refusal(errno.ENOMEM, "DMA logging ranges need too large a bitmap")
        with self._lock:
            if self._active:
                raise Refusal(errno.EBUSY, "DMA logging is on already")
            self._shift = shift
            self._ranges = [_Range(first, last) for first, last in pages]
            self._everything = not pages
            self._active = True
        return chosen

    def stop(self) -> None:
        """End logging and forget what was logged; stopping twice is no error."""
        with self._lock:
            self._active = False
            self._everything = False
            self._ranges = []
            self._pages = set()

    def mark(self, address: int, size: int) -> None:
        """The device wrote ``size`` bytes at ``address``. Cheap when logging is off."""
        if not self._active or size <= 0:
            return
        with self._lock:
            first = address >> self._shift
            last = (address + size - 1 >> self._shift) + 1
            if self._everything:
                self._pages.update(range(first, last))
                return
            for r in self._ranges:
                low, high = max(first, r.first), min(last, r.last)
                if low < high:
                    r.mark(low - r.first, high - r.first)

    def report(self, address: int, size: int, page_size: int) -> bytes:
        """Bitmap of the pages written since the last report of them, and clear those.

        Bit i (LSB first) stands for ``address + i * page_size``; a page size other than the log's
        is answered by merging or replicating bits, as the specification says. Padded to 64-bit
        words.
        Where the window starts or ends inside a page of the log, that whole page is cleared, since
        the caller has been told of it.

        Raises:
            Refusal: EINVAL when logging is off or the page size is no power of two.
        """
        if page_size <= 0 or page_size & (page_size - 1) or size <= 0:
            raise Refusal(errno.EINVAL, f"dirty report of {size} bytes in pages of {page_size}")
        pages = -(-size // page_size)
        if pages > _MAX_BITMAP_BYTES * 8:
            raise Refusal(errno.EINVAL, f"dirty report of {pages} pages")
        bits = bytearray((pages + 63) // 64 * 8)
        with self._lock:
            if not self._active:
                raise Refusal(errno.EINVAL, "DMA logging is off")
            shift = self._shift
            for page in self._take(address >> shift, (address + size - 1 >> shift) + 1):
                low = max(page << shift, address) - address
                high = min(page + 1 << shift, address + size) - address
                _set_bits(bits, low // page_size, -(-high // page_size))
        return bytes(bits)

    def _take(self, first: int, last: int) -> Iterator[int]:
        """Dirty pages of [first, last), each cleared as it is handed out."""
        if self._everything:
            dirty = [page for page in self._pages if first <= page < last]
            self._pages.difference_update(dirty)
            yield from dirty
        for r in self._ranges:
            low, high = max(first, r.first), min(last, r.last)
            if low < high:
                yield from (r.first + page for page in r.take(low - r.first, high - r.first))


def _set_bits(bits: bytearray, first: int, last: int) -> None:
    """Set bits [first, last), LSB first; whole bytes at once."""
    head, tail = first >> 3, last >> 3
    if head == tail:
        bits[head] |= (1 << last - first) - 1 << (first & 7)
        return
    bits[head] |= 0xFF << (first & 7) & 0xFF
    bits[head + 1 : tail] = b"\xff" * (tail - head - 1)
    if last & 7:
        bits[tail] |= (1 << (last & 7)) - 1


class _Range:
    """Pages [first, last) of one logged range and their bits."""

    __slots__ = ("_bits", "first", "last")

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self._bits = bytearray((last - first + 7) // 8)

    def mark(self, low: int, high: int) -> None:
        """Set pages [low, high), counted from the range's first."""
        _set_bits(self._bits, low, high)

    def take(self, low: int, high: int) -> list[int]:
        """The set pages of [low, high), which are clear afterwards."""
        bits = self._bits
        dirty: list[int] = []
        for at in range(low >> 3, high + 7 >> 3):
            byte = bits[at]
            if byte:
                taken = [8 * at + i for i in _BITS[byte] if low <= 8 * at + i < high]
                for page in taken:
                    byte &= ~(1 << (page & 7))
                bits[at] = byte
                dirty.extend(taken)
        return dirty
