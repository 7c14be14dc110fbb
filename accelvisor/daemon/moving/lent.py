"""A function's memory, borrowed: read while the function computes, in rounds of what changed.

Three ways in which memory changes, and three ways to see it: device memory by the function's marks
(exact: function/track.py), the window by comparing it with what was taken last (the guest writes it
unseen), the state section only when the function stands still. Nothing here is parsed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from accelvisor.errors import ProtocolError
from accelvisor.frames.chunks import Kind
from accelvisor.function import digest
from accelvisor.function import state as s
from accelvisor.function.moving import SECTION_BYTES, normal
from accelvisor.function.track import data_ranges, runs_of
from accelvisor.limits import LIMITS

PAGE = 4096
_ZEROS = memoryview(bytes(LIMITS.chunk_bytes))


class Piece(NamedTuple):
    """Bytes to be sent. Those of device memory are live: the function may change them, so whoever
    hashes and sends them copies first. The view is valid until the memory is given back.
    """

    kind: Kind
    offset: int
    view: memoryview


def _words(fd: int, nbytes: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), np.uint64)


class Lent:
    """One function's memory. Takes ownership of the descriptors of state, window, memory, track.

    Args:
        fds: as ``lend`` gives them.
        memory_bytes, window_bytes: the sizes that they must have.
        piece_bytes: what is taken in one piece at most.

    Raises:
        ProtocolError: a file has another size.
    """

    def __init__(
        self,
        fds: Sequence[int],
        memory_bytes: int,
        window_bytes: int,
        piece_bytes: int = LIMITS.chunk_bytes,
    ) -> None:
        self._fds = list(fds)
        self._piece = piece_bytes
        sizes = (s.STATE_BYTES, window_bytes, memory_bytes, s.TRACK_BYTES)
        if tuple(os.fstat(fd).st_size for fd in fds) != sizes:
            self.close()
            raise ProtocolError(
                "the function's memory has another size", code="function-reply", where="lent"
            )
        state, window, memory, track = self._fds
        self._state = mmap.mmap(state, s.STATE_BYTES, prot=mmap.PROT_READ)
        self._window = _words(window, window_bytes)
        self._memory = _words(memory, memory_bytes)
        marks = mmap.mmap(track, s.TRACK_MEMORY_BYTES)
        self._marks = np.frombuffer(marks, np.uint8, memory_bytes // PAGE)
        #: what of the window was taken last
        self._taken = np.zeros_like(self._window)
        self._memory_sums = np.zeros(memory_bytes // PAGE, np.uint64)

    def close(self) -> None:
        """Give the memory back."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    # --- rounds -----------------------------------------------------------------------------------

    def everything(self) -> Iterator[Piece]:
        """The first round: all that has data. What is not mentioned is zero."""
        self._marks[:] = 0
        view = self._memory.view(np.uint8).data
        for low, high in data_ranges(self._fds[2], 0, len(view)):
            yield from self._memory_pieces(low, high)
        yield from self.window_changes()

    def changes(self) -> Iterator[Piece]:
        """What changed since the last round began."""
        for first, count in self.take_marks():
            low, high = first * PAGE, (first + count) * PAGE
            at = low
            # A hole is not read: that would fill it.
            for start, end in [*data_ranges(self._fds[2], low, high), (high, high)]:
                yield from self._hole(at, start)
                yield from self._memory_pieces(start, end)
                at = end
        yield from self.window_changes()

    def dirty_bytes(self) -> int:
        """How much device memory is marked now."""
        return int(np.count_nonzero(self._marks)) * PAGE

    def held_bytes(self) -> int:
        """How much there is to be sent at first: memory and pages of the window that have data."""
        ranges = data_ranges(self._fds[2], 0, self._memory.nbytes)
        window = np.count_nonzero(self._window.reshape(-1, PAGE // 8).any(axis=1)) * PAGE
        return sum(high - low for low, high in ranges) + int(window)

    def take_marks(self) -> list[tuple[int, int]]:
        """Runs of marked pages, cleared before anybody reads the pages."""
        runs = runs_of(self._marks)
        for first, count in runs:
            self._marks[first : first + count] = 0
        return runs

    def window_changes(self) -> Iterator[Piece]:
        """Pages of the window that differ from what was taken last."""
        words = PAGE // 8
        pages = len(self._window) // words
        step = max(1, 16 * self._piece // PAGE)
        for base in range(0, pages, step):
            part = slice(base * words, min(base + step, pages) * words)
            differ = (self._window[part] != self._taken[part]).reshape(-1, words).any(axis=1)
            for first, count in runs_of(differ.view(np.uint8)):
                low, high = (base + first) * words, (base + first + count) * words
                self._taken[low:high] = self._window[low:high]
                view = self._taken.view(np.uint8).data
                for at in range(low * 8, high * 8, self._piece):
                    yield Piece(Kind.WINDOW, at, view[at : min(at + self._piece, high * 8)])

    def _memory_pieces(self, low: int, high: int) -> Iterator[Piece]:
        view = self._memory.view(np.uint8).data
        for at in range(low, high, self._piece):
            end = min(at + self._piece, high)
            yield Piece(Kind.MEMORY, at, view[at:end])
            digest.page_sums(view, self._memory_sums, at // PAGE, (end - at) // PAGE)

    def _hole(self, low: int, high: int) -> Iterator[Piece]:
        self._memory_sums[low // PAGE : high // PAGE] = 0
        for at in range(low, high, self._piece):
            yield Piece(Kind.MEMORY, at, _ZEROS[: min(self._piece, high - at)])

    # --- standing still ---------------------------------------------------------------------------

    def section(self) -> bytes:
        """The state section; whole only while the function stands still."""
        return self._state[s.PCI_AT : s.PCI_AT + SECTION_BYTES]

    def digests(self) -> dict[str, str]:
        """Of the sections as they were taken in the rounds; the function stands still, and nothing
        is marked.
        """
        window = self._taken.view(np.uint8).data
        return {
            "state": hashlib.sha256(normal(self.section())).hexdigest(),
            "window": digest.memory_digest(digest.all_sums(window, [(0, len(window))])),
            "memory": digest.memory_digest(self._memory_sums),
        }
