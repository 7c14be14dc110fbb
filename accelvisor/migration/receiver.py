"""The receiving side of a bulk transfer: one thread for each connection.

Bytes go into the staging memory that the caller gives, each to the place that its chunk's header
names, after that header was held against the offer. They are hashed there and not looked into.

What is signed in the end are the chunks of complete rounds, but bytes are written as they come. So
a chunk that was begun over a broken connection must come again, to the same place, before its round
can end, and :meth:`Receiver.seal` takes no transfer with bytes that no complete round covers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from accelvisor.errors import AccelvisorError, DataError, DeadlineError, UnavailableError
from accelvisor.frames import chunks
from accelvisor.frames.chunks import RECORD, Coding, Header
from accelvisor.limits import LIMITS, Limits
from accelvisor.migration.bulk import MESSAGE, PAGE_BYTES, Round, State, Type, bad, ranges_of
from accelvisor.migration.channel import Channel

_WHERE = "peer"


@dataclass(frozen=True, slots=True)
class Received:
    """A round that is complete: its chunks' headers, bytes of their payloads, and leaves, in order;
    the first is of index ``first``.
    """

    number: int
    first: int
    headers: list[Header]
    stored: list[int]
    leaves: list[bytes]


class _Section:
    """Staging memory of one kind. It begins as zeros, and zeros that come to pages which nobody
    wrote are not written: pages of a fresh memfd then stay unused.
    """

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.bytes = np.frombuffer(view, np.uint8) if view else np.zeros(0, np.uint8)
        self._written = np.zeros(-(-len(view) // PAGE_BYTES), np.bool_)

    def _pages(self, header: Header) -> npt.NDArray[np.bool_]:
        last = header.offset + header.length - 1
        return self._written[header.offset // PAGE_BYTES : last // PAGE_BYTES + 1]

    def place(self, header: Header) -> memoryview:
        """Where the bytes go."""
        self._pages(header)[:] = True
        return self.view[header.offset : header.offset + header.length]

    def clear(self, header: Header) -> None:
        if self._pages(header).any():
            self.bytes[header.offset : header.offset + header.length] = 0


class Receiver:
    """Receives rounds of chunks.

    Args:
        sections: kind -> writable memory as long as the offer says, all zeros.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        sections: Mapping[int, memoryview],
        *,
        clock: Callable[[], float] = time.monotonic,
        limits: Limits = LIMITS,
    ) -> None:
        self._sections = {kind: _Section(view) for kind, view in sections.items()}
        self._clock = clock
        self._limits = limits
        self._changed = threading.Condition()
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._error: AccelvisorError | None = _detached()
        #: Held by whoever exchanges the connections.
        self._exchange = threading.Lock()
        self._over = False
        self._done: deque[Received] = deque()
        self._round = 0
        self._begin_round(0)
        #: Bytes of state that have come, over all rounds.
        self.covered = 0

    def _begin_round(self, first: int) -> None:
        self._first = first
        self._leaves: dict[int, bytes] = {}
        self._stored: dict[int, int] = {}
        self._claimed: dict[int, Header] = {}
        #: Begun over connections that broke: bytes of these are there, and nobody counts them.
        self._torn: dict[int, Header] = {}
        self._room = {kind: len(section.view) for kind, section in self._sections.items()}
        self._ends: list[Round] = []

    # --- what others use -------------------------------------------------------------------------

    def attach(self, channels: Sequence[Channel]) -> None:
        """Go on over these connections, in the place of earlier ones.

        Raises:
            UnavailableError: ``peer-lost``: it was sealed or released; the connections are closed.
        """
        with self._exchange:
            if self._over:
                for channel in channels:
                    channel.close()
                raise _detached()
            self._detach()
            with self._changed:
                state = self._resume()
                self._channels = list(channels)
                self._error = None
                self._threads = [
                    threading.Thread(
                        target=self._run, args=(channel, state), name="bulk-receive", daemon=True
                    )
                    for channel in channels
                ]
            for thread in self._threads:
                thread.start()

    def offer(self, kind: int, view: memoryview) -> None:
        """One more section, once its size is agreed: zeros, as in the constructor.

        Raises:
            ValueError: there is one of that kind.
        """
        with self._changed:
            if kind in self._sections:
                raise ValueError(f"kind {kind} was offered before")
            self._room[kind] = len(view)
            self._sections[kind] = _Section(view)

    def wait_round(self, timeout_s: float) -> Received:
        """The next round that is complete.

        Raises:
            UnavailableError, DeadlineError: ``peer-lost``, ``peer-stalled``: :meth:`attach` new
                connections and call this again; ``peer-deadline``: not within ``timeout_s``.
            DataError: ``bulk-chunk``, ``bulk-overlap``, ``bulk-round``, ``bulk-excess``,
                ``bulk-message``: the sender broke a rule, the transfer is over.
        """
        with self._changed:
            ready = self._changed.wait_for(lambda: self._done or self._error, timeout_s)
            if self._done:
                return self._done.popleft()
            if not ready or self._error is None:
                raise DeadlineError(
                    f"no round was complete within {timeout_s:g} s",
                    code="peer-deadline",
                    where=_WHERE,
                )
            raise self._error

    @property
    def error(self) -> AccelvisorError | None:
        """Why nothing is received just now."""
        return self._error

    def cancel(self, error: AccelvisorError) -> None:
        """Stop now, from any thread; whoever waits gets ``error``."""
        self._break(error)

    def seal(self, chunks: int) -> None:
        """End for good: from now on no byte comes, and what is there are the first ``chunks``
        chunks and nothing else. To be called before anything of them is verified.

        The VM may stand still meanwhile: connections are cut, not waited for.

        Raises:
            DataError: ``bulk-uncovered``: bytes came that none of those chunks covers; or that with
                which the sender broke a rule.
        """
        self._end()
        if isinstance(self._error, DataError):
            raise self._error
        stray = len(self._claimed.keys() | self._torn.keys())
        if stray or self._first != chunks:
            raise DataError(
                f"{chunks} chunks are signed, {self._first} came in complete rounds and {stray}"
                " were begun beside them",
                code="bulk-uncovered",
                where=_WHERE,
            )

    def close(self) -> None:
        """End the threads and connections; idempotent. The staging memory is not used any more."""
        with self._exchange:
            self._detach()

    def release(self) -> None:
        """Close for good, and let go of the staging memory: as long as anybody looks at it, it
        cannot be unmapped.
        """
        self._end()
        self._sections.clear()

    # --- inside ----------------------------------------------------------------------------------

    def _end(self) -> None:
        """The connections that there are, and that no others come in their place."""
        with self._exchange:
            self._over = True
            self._detach()

    def _detach(self) -> None:
        self._break(_detached())
        for thread in self._threads:
            thread.join()
        for channel in self._channels:
            channel.close()
        self._threads, self._channels = [], []

    def _break(self, error: AccelvisorError) -> None:
        with self._changed:
            # What breaks the rules is told, even if the connection broke a moment before.
            if self._error is None or (
                isinstance(error, DataError) and not isinstance(self._error, DataError)
            ):
                self._error = error
            self._changed.notify_all()
        for channel in self._channels:
            channel.cut(error)

    def _resume(self) -> State:
        """Forget what is half there, and all that is not told: it must come again."""
        told = ranges_of(self._leaves)[: self._limits.bulk_ranges]
        keep = {index for first, end in told for index in range(first, end)}
        self._leaves = {i: leaf for i, leaf in self._leaves.items() if i in keep}
        self._torn |= {i: header for i, header in self._claimed.items() if i not in keep}
        self._claimed = {i: header for i, header in self._claimed.items() if i in keep}
        self._room = {kind: len(section.view) for kind, section in self._sections.items()}
        for header in self._claimed.values():
            self._room[header.kind] -= header.length
        self._ends = []
        return State(self._round, self._first, tuple(told))

    def _run(self, channel: Channel, state: State) -> None:
        head = memoryview(bytearray(MESSAGE.size))
        try:
            channel.write(state.pack())
            channel.flush()
            channel.watch.idle(self._clock())
            while True:
                channel.read_into(head)
                kind, body = MESSAGE.unpack(head)
                if kind == Type.CHUNK:
                    self._chunk(channel, body)
                elif kind == Type.ROUND:
                    this = Round.unpack(body)
                    self._barrier(this)
                    channel.write(this.pack(Type.ACK))
                    channel.flush()
                    channel.watch.idle(self._clock())
                elif kind == Type.KEEP:
                    channel.watch.idle(self._clock())
                else:
                    raise bad(f"message {kind} is none of a sender's")
        except AccelvisorError as error:
            self._break(error)
        except Exception as error:
            self._break(UnavailableError(f"a bug: {error!r}", code="internal", where=_WHERE))
            raise

    def _chunk(self, channel: Channel, body: bytes) -> None:
        *fields, stored = RECORD.unpack(body)
        header = Header(*fields)
        self._claim(header, stored)
        section = self._sections[header.kind]
        payload: memoryview | bytes = b""
        if header.coding == Coding.RAW:
            payload = section.place(header)
            channel.read_into(payload)
        else:
            section.clear(header)
        leaf = chunks.leaf_hash(body[: chunks.HEADER.size], payload)
        with self._changed:
            self._leaves[header.index] = leaf
            self._stored[header.index] = stored
            self.covered += header.length

    def _claim(self, header: Header, stored: int) -> None:
        """Judge a header before a byte of its payload is read."""
        fault = header.fault(stored)
        if fault is None and header.kind not in self._sections:
            fault = f"kind {header.kind} was not offered"
        if fault is None and header.coding not in (Coding.RAW, Coding.ZEROS):
            # What is compressed would have to be expanded before anybody has verified it.
            fault = f"coding {header.coding} has no place in a transfer"
        if fault is None:
            size = len(self._sections[header.kind].view)
            if header.offset + header.length > size:
                fault = f"it ends at {header.offset + header.length}, {size} bytes were offered"
        if fault is not None:
            raise _chunk_error(header, fault, "bulk-chunk")
        with self._changed:
            if not self._first <= header.index < self._first + self._limits.bulk_chunks:
                raise _chunk_error(
                    header, f"this round begins with {self._first}", "bulk-excess"
                )
            if header.index in self._claimed:
                raise _chunk_error(header, "it came before", "bulk-overlap")
            torn = self._torn.get(header.index, header)
            if _place(torn) != _place(header):
                # Otherwise bytes of it would stay where no chunk that is counted lies.
                raise _chunk_error(header, "it was begun at another place", "bulk-overlap")
            self._room[header.kind] -= header.length
            if self._room[header.kind] < 0:
                # More bytes than the section has: some of them lie upon others.
                raise _chunk_error(header, "it lies upon others of its round", "bulk-overlap")
            self._torn.pop(header.index, None)
            self._claimed[header.index] = header

    def _barrier(self, this: Round) -> None:
        """Wait for this round's end on all connections; the last one closes the round."""
        with self._changed:
            if this.number != self._round or this.first != self._first:
                raise _round_error(f"round {this.number} ends in round {self._round}")
            if this.number >= self._limits.bulk_rounds:
                raise DataError(
                    f"more than {this.number} rounds", code="bulk-excess", where=_WHERE
                )
            self._ends.append(this)
            if len(self._ends) == len(self._channels):
                self._close_round()
                return
            self._changed.wait_for(lambda: self._round > this.number or self._error is not None)
            if self._round == this.number and self._error is not None:
                raise self._error

    def _close_round(self) -> None:
        this = self._ends[0]
        if any(end != this for end in self._ends):
            raise _round_error("the connections tell different ends of a round")
        if len(self._leaves) != this.end - this.first or any(i >= this.end for i in self._leaves):
            count = this.end - this.first
            raise _round_error(f"round {this.number} has {len(self._leaves)} of {count} chunks")
        if self._torn:
            raise _round_error(f"round {this.number} ends, and a chunk that was begun has not come")
        _check_overlap(list(self._claimed.values()))
        indices = range(this.first, this.end)
        self._done.append(
            Received(
                this.number,
                this.first,
                [self._claimed[index] for index in indices],
                [self._stored[index] for index in indices],
                [self._leaves[index] for index in indices],
            )
        )
        self._round += 1
        self._begin_round(this.end)
        self._changed.notify_all()


def _place(header: Header) -> tuple[int, int, int]:
    return header.kind, header.offset, header.length


def _check_overlap(headers: list[Header]) -> None:
    headers.sort(key=lambda h: (h.kind, h.offset))
    for left, right in pairwise(headers):
        if left.kind == right.kind and left.offset + left.length > right.offset:
            raise _chunk_error(right, f"it lies upon chunk {left.index}", "bulk-overlap")


def _chunk_error(header: Header, why: str, code: str) -> DataError:
    return DataError(
        f"chunk {header.index} of kind {header.kind} is refused: {why}", code=code, where=_WHERE
    )


def _round_error(why: str) -> DataError:
    return DataError(why, code="bulk-round", where=_WHERE)


def _detached() -> UnavailableError:
    return UnavailableError("the transfer has no connection", code="peer-lost", where=_WHERE)
