"""Who touched which bytes last: the dependencies that a recorded graph needs to be free of races.

Read after write, write after read, write after write, on byte ranges of one tensor's memory. Views
of a tensor share its memory, so overlap counts, not identity. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Range(NamedTuple):
    """Bytes [start, end) of the memory that ``handle`` names."""

    handle: int
    start: int
    end: int


@dataclass(slots=True)
class _Piece:
    start: int
    end: int
    writer: int | None = None
    readers: set[int] = field(default_factory=set)


class Accesses:
    """What has been recorded so far, in the order in which it was recorded."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[_Piece]] = {}

    def touch(self, node: int, reads: Iterable[Range], writes: Iterable[Range]) -> set[int]:
        """Record ``node``; returns the nodes that must be done before it begins.

        Dependencies that others imply may be among them.
        """
        found: set[int] = set()
        written = list(writes)
        for r in reads:
            for piece in self._cover(r):
                if piece.writer is not None:
                    found.add(piece.writer)
                piece.readers.add(node)
        for r in written:
            for piece in self._cover(r):
                if piece.writer is not None:
                    found.add(piece.writer)
                found |= piece.readers
            self._replace(r, node)
        found.discard(node)
        return found

    def _cover(self, r: Range) -> Sequence[_Piece]:
        """The pieces of exactly ``r``, which is cut out of what is there and filled up."""
        if r.start >= r.end:
            return ()
        after: list[_Piece] = []
        inside: list[_Piece] = []
        at = r.start
        for piece in self._pieces.get(r.handle, ()):
            if piece.end <= r.start or piece.start >= r.end:
                after.append(piece)
                continue
            start, end = max(piece.start, r.start), min(piece.end, r.end)
            if at < start:
                inside.append(_Piece(at, start))
            inside.append(_Piece(start, end, piece.writer, set(piece.readers)))
            if piece.start < start:
                after.append(_Piece(piece.start, start, piece.writer, set(piece.readers)))
            if end < piece.end:
                after.append(_Piece(end, piece.end, piece.writer, set(piece.readers)))
            at = end
        if at < r.end:
            inside.append(_Piece(at, r.end))
        self._pieces[r.handle] = sorted([*after, *inside], key=lambda p: p.start)
        return inside

    def _replace(self, r: Range, node: int) -> None:
        """Make ``r`` one piece that ``node`` wrote and nobody has read."""
        pieces = self._pieces.get(r.handle)
        if pieces is None or r.start >= r.end:
            return
        left = [p for p in pieces if p.end <= r.start or p.start >= r.end]
        left.append(_Piece(r.start, r.end, node))
        self._pieces[r.handle] = sorted(left, key=lambda p: p.start)
