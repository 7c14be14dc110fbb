"""The translation between a function's device addresses and the card's memory, and the check that
stands before every access. Standard library only: the function's holder reads it too.

A function sees its memory from address 0 on, without holes; the table says in which bank each part
lies. The table belongs to one **epoch**: whoever computed an address under another epoch has to
look it up again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from accelvisor.abi.registers import PAGE
from accelvisor.errors import ConfigError
from accelvisor.isolation.ranges import Range
from accelvisor.limits import LIMITS


@dataclass(frozen=True, slots=True)
class Segment:
    """``nbytes`` from device address ``base`` lie at ``start`` of memory bank ``bank``."""

    base: int
    nbytes: int
    bank: int
    start: int

    @property
    def end(self) -> int:
        return self.base + self.nbytes


class Unmapped(Exception):  # noqa: N818 - a status on its way to the guest
    """An access outside the table, or under an epoch that is over. Nothing was read or written."""


def lay(ranges: Iterable[Range]) -> tuple[Segment, ...]:
    """The ranges of a placement one after the other, from address 0 on."""
    made: list[Segment] = []
    at = 0
    for piece in ranges:
        made.append(Segment(at, piece.nbytes, piece.bank, piece.start))
        at += piece.nbytes
    return tuple(made)


def checked(segments: Sequence[Segment], where: str) -> tuple[Segment, ...]:
    """Segments that came from outside.

    Raises:
        ConfigError: ``segments-invalid``: too many, not whole pages, not in order without holes, or
            two of them over the same memory.
    """
    wrong = ""
    at = 0
    if len(segments) > LIMITS.segments:
        wrong = f"{len(segments)} segments, at most {LIMITS.segments}"
    for item in segments:
        if item.base != at or item.nbytes <= 0 or item.bank < 0 or item.start < 0:
            wrong = wrong or f"segment {item} does not follow the one before it"
        if item.base % PAGE or item.nbytes % PAGE or item.start % PAGE:
            wrong = wrong or f"segment {item} is not of whole pages"
        at = item.end
    by_memory = sorted(segments, key=lambda item: (item.bank, item.start))
    for one, two in itertools.pairwise(by_memory):
        if one.bank == two.bank and one.start + one.nbytes > two.start:
            wrong = wrong or f"segments {one} and {two} overlap"
    if at > LIMITS.memory_bytes:
        wrong = wrong or f"{at} bytes of memory, at most {LIMITS.memory_bytes}"
    if wrong:
        raise ConfigError(wrong, code="segments-invalid", where=where)
    return tuple(segments)


class SegmentTable:
    """Checks and translates. Never changed: another shape is another table.

    Args:
        segments: as :func:`checked` returns them.
        epoch: under which they hold.
    """

    __slots__ = ("_bases", "epoch", "nbytes", "segments")

    def __init__(self, segments: Sequence[Segment], epoch: int) -> None:
        self.segments = tuple(segments)
        self.epoch = epoch
        self._bases = [item.base for item in segments]
        #: Addresses below this one are the function's.
        self.nbytes = segments[-1].end if segments else 0

    def check(self, address: int, nbytes: int, epoch: int) -> None:
        """Whether ``nbytes`` from ``address`` may be touched by what was resolved under ``epoch``.
        No bytes may be touched anywhere within the table, its end included.

        Raises:
            Unmapped: they may not.
        """
        # Segments follow each other without holes, so the two ends say it all; Python's integers
        # do not wrap.
        if epoch != self.epoch:
            raise Unmapped(f"an address of epoch {epoch}, the function is at {self.epoch}")
        if address < 0 or nbytes < 0 or address + nbytes > self.nbytes:
            raise Unmapped(
                f"{nbytes} bytes at device address {address:#x}: the function has {self.nbytes}"
            )

    def translate(self, address: int, nbytes: int) -> list[Range]:
        """Where ``nbytes`` from ``address`` lie on the card, in address order.

        Raises:
            Unmapped: not all of them are the function's.
        """
        self.check(address, nbytes, self.epoch)
        found: list[Range] = []
        end = address + nbytes
        while address < end:
            item = self.segments[bisect_right(self._bases, address) - 1]
            size = min(end, item.end) - address
            found.append(Range(item.bank, item.start + address - item.base, size))
            address += size
        return found
