"""The memory operands of commands: what the guest names, checked and moved.

A list of segments is copied out of the guest's memory once, and what is checked is what is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import Space, Transfer
from accelvisor.abi.status import CommandStatus
from accelvisor.function.dma import Dma, copy
from accelvisor.function.objects import Refused
from accelvisor.function.pauses import Pauses, attentively
from accelvisor.function.port import Port
from accelvisor.function.running import Fault
from accelvisor.limits import KIB, LIMITS, MIB

#: Bytes that a copy moves between two looks at whether something else wants the engine; a segment
#: of a scatter list counts as so many more, however short it is.
COPY_STEP = 4 * MIB
SEGMENT_BYTES = 64 * KIB
#: Segments that are summed up, or checked against the window, between two pauses.
_PORTION = 4096
#: Segments that are moved between two pauses.
SEGMENTS = COPY_STEP // SEGMENT_BYTES
# Plain numbers: an operation on a member of an enum takes as long as a small copy.
_SCATTER = int(Transfer.SCATTER)
GUEST = int(Space.GUEST)
_WINDOW = int(Space.WINDOW)


class Spans:
    """A memory operand's (address, bytes) spans, as the guest listed them: 16 bytes a span."""

    def __init__(self, raw: bytearray | bytes) -> None:
        self._words = memoryview(raw).cast("Q")

    def __len__(self) -> int:
        return len(self._words) // 2

    def __iter__(self) -> Iterator[tuple[int, int]]:
        words = self._words
        for n in range(0, len(words), 2):
            yield words[n], words[n + 1]


class Operands:
    """Reads and writes what memory operands name. Runs on the front end's thread alone.

    Args:
        window: the guest's window; operands may name what lies from ``staging`` on.
    """

    def __init__(
        self,
        window: memoryview,
        staging: int,
        dma: Dma,
        port: Port,
        attention: Callable[[], bool],
    ) -> None:
        self._window = window
        self._staging = staging
        self._dma = dma
        self._port = port
        self._attention = attention

    def spans(self, m: abi.Memory, write: bool) -> Pauses[Spans]:
        """Resolve a memory operand to checked (address, bytes) spans.

        The list is copied out of the guest's memory once; what is checked is what is used.
        """
        if m.space not in (GUEST, _WINDOW) or m.transfer & ~_SCATTER:
            raise Refused(
                CommandStatus.BAD_DESCRIPTOR, f"space {m.space}, transfer {m.transfer:#x}"
            )
        if m.transfer & _SCATTER:
            spans = yield from self._list(m)
        elif m.count:
            raise Refused(CommandStatus.BAD_DESCRIPTOR, "a segment count without SCATTER")
        else:
            spans = Spans(abi.SEGMENT.pack(m.address, m.length))
        if m.space == GUEST:
            # One span that moves in one step is checked by that step.
            if len(spans) > 1 or m.length > COPY_STEP:
                yield from attentively(self._dma.check(spans, write), self._attention)
            return spans
        for n, (address, count) in enumerate(spans):
            self._check_window(address, count)
            if n % _PORTION == _PORTION - 1 and self._attention():
                yield None
        return spans

    def _list(self, m: abi.Memory) -> Pauses[Spans]:
        """A scatter list. Its segments together are as long as the operand says."""
        if not 1 <= m.count <= LIMITS.scatter_segments:
            raise Refused(
                CommandStatus.LIMIT, f"{m.count} segments, the limit is {LIMITS.scatter_segments}"
            )
        raw = bytearray(m.count * abi.SEGMENT.size)
        yield from self._port.passing(len(raw))
        yield from self.move(m.space, m.address, memoryview(raw), write=False)
        spans = Spans(raw)
        total = 0
        for n, (_, count) in enumerate(spans):
            total += count
            if n % _PORTION == _PORTION - 1 and self._attention():
                yield None
        if total != m.length:
            raise Refused(
                CommandStatus.BAD_DESCRIPTOR,
                f"the segments hold {total} bytes, the operand {m.length}",
            )
        return spans

    def _check_window(self, address: int, count: int) -> None:
        if not self._staging <= address <= len(self._window) - count:
            raise Fault(
                CommandStatus.BAD_ADDRESS, f"{count} bytes at {address:#x} leave the staging area"
            )

    def move(self, space: int, address: int, view: memoryview, *, write: bool) -> Pauses[None]:
        """One span between the guest's memory and ``view`` (written to the guest, or filled)."""
        if space == GUEST:
            yield from (self._dma.write if write else self._dma.read)(address, view)
            return
        self._check_window(address, len(view))
        window = self._window[address : address + len(view)]
        if write:
            copy(window, view)
        else:
            copy(view, window)

    def fetch(self, source: abi.Memory) -> Pauses[bytes]:
        """A small memory operand, whole."""
        raw = bytearray(source.length)
        at = 0
        spans = yield from self.spans(source, write=False)
        for n, (address, count) in enumerate(spans):
            part = memoryview(raw)[at : at + count]
            yield from self._port.passing(count)
            yield from self.move(source.space, address, part, write=False)
            at += count
            if n % SEGMENTS == SEGMENTS - 1 and self._attention():
                yield None
        return bytes(raw)
