"""The DMA map as a table of disjoint ranges: what a device may reach of its client's memory.

Pure: an item may be anything that the caller keeps with a range (a mapping, a descriptor). Lookups
are by binary search, and an access may run across ranges that touch. Addresses and sizes in bytes.
"""

from __future__ import annotations

import errno
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from accelvisor.limits import LIMITS
from accelvisor.vfio_user.model import Refusal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DmaRange(Generic[T]):
    address: int
    size: int
    flags: int  # DmaFlag.READ | DmaFlag.WRITE
    item: T

    @property
    def end(self) -> int:
        return self.address + self.size


class Piece(NamedTuple, Generic[T]):
    """The part of an access that lies in one range."""

    range: DmaRange[T]
    offset: int  # in the range
    size: int


class DmaTable(Generic[T]):
    """Disjoint ranges, at most ``limit`` of them."""

    def __init__(self, limit: int = LIMITS.dma_maps) -> None:
        self._limit = limit
        self._starts: list[int] = []
        self._ranges: dict[int, DmaRange[T]] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[DmaRange[T]]:
        return (self._ranges[start] for start in self._starts)

    def add(self, address: int, size: int, flags: int, item: T) -> DmaRange[T]:
        """Raises Refusal: EINVAL for an empty range, EEXIST over a present one (the
        specification's errno), ENOSPC at the limit.
        """
        if size <= 0 or address < 0 or address + size > 1 << 64:
            raise Refusal(errno.EINVAL, f"DMA map of {size} bytes at {address:#x}")
        at = bisect_right(self._starts, address)
        before = self._ranges[self._starts[at - 1]] if at else None
        after = self._starts[at] if at < len(self._starts) else None
        if (before is not None and before.end > address) or (
            after is not None and address + size > after
        ):
            raise Refusal(errno.EEXIST, f"DMA map of {size} bytes at {address:#x} overlaps another")
        if len(self._starts) >= self._limit:
            raise Refusal(errno.ENOSPC, f"{self._limit} DMA maps are the limit")
        entry = DmaRange(address, size, flags, item)
        insort(self._starts, address)
        self._ranges[address] = entry
        return entry

    def remove(self, address: int, size: int) -> list[DmaRange[T]]:
        """Take out every range inside [address, address + size); none is no error.

        Raises:
            Refusal: EINVAL when a range lies only partly inside: nothing is removed.
        """
        first = bisect_right(self._starts, address - 1)
        last = bisect_right(self._starts, address + size - 1) if size > 0 else first
        inside = self._starts[first:last]
        before = self._ranges[self._starts[first - 1]] if first else None
        cuts = before is not None and before.end > address and size > 0
        if cuts or (inside and self._ranges[inside[-1]].end > address + size):
            raise Refusal(errno.EINVAL, f"unmapping {size} bytes at {address:#x} cuts a map in two")
        del self._starts[first:last]
        return [self._ranges.pop(start) for start in inside]

    def clear(self) -> list[DmaRange[T]]:
        """Take out every range."""
        gone = list(self)
        self._starts.clear()
        self._ranges.clear()
        return gone

    def pieces(self, address: int, size: int, need: int) -> list[Piece[T]]:
        """The ranges that an access of ``size`` bytes runs through, in order.

        Raises:
            Refusal: EFAULT when any byte is not mapped, EACCES when a range forbids ``need``.
        """
        pieces: list[Piece[T]] = []
        at, end = address, address + size
        while at < end:
            i = bisect_right(self._starts, at) - 1
            entry = self._ranges[self._starts[i]] if i >= 0 else None
            if entry is None or at >= entry.end:
                raise Refusal(errno.EFAULT, f"{size} bytes at {address:#x} are not mapped")
            if need & ~entry.flags:
                raise Refusal(errno.EACCES, f"{size} bytes at {address:#x} forbid that access")
            count = min(end, entry.end) - at
            pieces.append(Piece(entry, at - entry.address, count))
            at += count
        return pieces
