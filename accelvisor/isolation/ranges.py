"""A piece of a card's memory. Apart from everything else, since each function's holder reads it and
every function of a host pays for what holders import.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """``nbytes`` from ``start`` of a memory bank; both are multiples of 4 KiB."""

    bank: int
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes
