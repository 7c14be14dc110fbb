"""The sending side of a bulk transfer: one thread for each connection.

What is sent may be memory that others write meanwhile (pre-copy), so a piece is copied first, and
zeros, hash and cipher are made of the copy. A piece that is sent again after a broken connection
may therefore differ; its leaf is replaced, and its place and indices stay.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from accelvisor.errors import AccelvisorError, CapacityError, UnavailableError
from accelvisor.frames import chunks
from accelvisor.frames.chunks import Coding, Header
from accelvisor.limits import LIMITS, Limits
from accelvisor.migration.bulk import KEEP, MESSAGE, PIECE_BYTES, Round, State, Type, bad, runs
from accelvisor.migration.channel import Channel
from accelvisor.migration.rates import TokenBucket

_WHERE = "peer"


@dataclass(slots=True)
class _Piece:
    kind: int
    offset: int
    view: memoryview
    frozen: bool
    #: (index, start, length) once it was cut; start counts from the piece's own beginning.
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    #: Those that the receiver has not.
    left: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """Totals over all rounds, repeats included; read without a lock.

    Args:
        covered: bytes of state that the chunks stand for.
        sent: bytes of their payloads.
        chunks: how many.
    """

    covered: int = 0
    sent: int = 0
    chunks: int = 0


class Sender:
    """Sends pieces of memory in rounds.

    Args:
        rate: bytes a second on the wire at most; None without a limit.
        piece_bytes: the longest chunk with a payload, at most ``LIMITS.chunk_bytes``.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        rate: float | None = None,
        piece_bytes: int = PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        limits: Limits = LIMITS,
    ) -> None:
        self.progress = Progress()
        #: Bytes of the payloads of all chunks in the rounds that have ended, each counted once.
        self.payload_bytes = 0
        self._piece_bytes = piece_bytes
        self._clock = clock
        self._limits = limits
        self._bucket = TokenBucket(rate, max(rate / 10, piece_bytes), clock()) if rate else None
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._error: AccelvisorError | None = _detached()
        self._round = 0
        self._first = self._next = 0
        self._begin_round()

    def _begin_round(self) -> None:
        self._first = self._next
        self._pieces: list[_Piece] = []
        self._pending: deque[_Piece] = deque()
        self._leaves: dict[int, bytes] = {}
        self._sizes: dict[int, int] = {}
        self._busy = 0
        self._sealed = False
        self._acks = 0

    # --- what others use -------------------------------------------------------------------------

    def attach(self, channels: Sequence[Channel]) -> None:
        """Go on over these connections, in the place of earlier ones. Blocks for a round trip.

        Raises:
            ProtocolError: ``bulk-message``, the receiver is somewhere else.
            UnavailableError, DeadlineError: as :meth:`Channel.read`.
        """
        self._detach()
        states = [State.read(channel) for channel in channels]
        with self._changed:
            if not states or any(state != states[0] for state in states):
                raise bad("the connections of a transfer tell different states")
            self._resume(states[0])
            self._channels = list(channels)
            self._error = None
            self._stopped.clear()
            self._threads = [
                threading.Thread(target=self._run, args=(channel,), name="bulk-send", daemon=True)
                for channel in channels
            ]
        for thread in self._threads:
            thread.start()

    def send(self, kind: int, offset: int, view: memoryview, *, frozen: bool = False) -> None:
        """Send ``view``, which lies at ``offset`` of section ``kind``, within this round.

        Returns at once; ``view`` must stay until :meth:`end_round` has returned. Pieces of one
        round may not overlap. While no connection is there, pieces wait for :meth:`attach`.

        Args:
            frozen: nobody writes to ``view`` until the round has ended, so no copy is needed.
        """
        size = self._piece_bytes
        with self._changed:
            if self._sealed:
                raise ValueError("the round is ending")
            for at in range(0, len(view), size):
                piece = _Piece(kind, offset + at, view[at : at + size], frozen)
                self._pieces.append(piece)
                self._pending.append(piece)
            self._changed.notify_all()

    def end_round(self) -> list[bytes]:
        """Wait until the receiver has all of this round; the leaves of its chunks, in order.

        Raises:
            UnavailableError, DeadlineError: ``peer-lost``, ``peer-stalled``: :meth:`attach` new
                connections and call this again.
            AccelvisorError: what it was cancelled with.
        """
        with self._changed:
            number = self._round
            self._sealed = True
            self._changed.notify_all()
            while self._acks < max(1, len(self._channels)) or not self._channels:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            leaves = [self._leaves[index] for index in range(self._first, self._next)]
            self.payload_bytes += sum(self._sizes.values())
            self._round = number + 1
            self._begin_round()
            self._changed.notify_all()
            return leaves

    @property
    def error(self) -> AccelvisorError | None:
        """Why nothing is sent just now."""
        return self._error

    def cancel(self, error: AccelvisorError) -> None:
        """Stop now, from any thread; whoever waits gets ``error``."""
        self._break(error)

    def close(self) -> None:
        """End the threads and connections; idempotent."""
        self._detach()

    # --- inside ----------------------------------------------------------------------------------

    def _detach(self) -> None:
        self._break(_detached())
        for thread in self._threads:
            thread.join()
        for channel in self._channels:
            channel.close()
        self._threads, self._channels = [], []

    def _break(self, error: AccelvisorError) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._stopped.set()
            self._changed.notify_all()
        for channel in self._channels:
            channel.cut(error)

    def _resume(self, state: State) -> None:
        if state.round == self._round + 1 and self._sealed and state.first == self._next:
            self._acks = self._limits.bulk_streams  # only the acknowledgement was lost
            return
        if state.round != self._round or state.first != self._first:
            raise bad(f"the receiver is in round {state.round}, this host in {self._round}")
        # They are in order. Nobody counts them through before they are within this round, which is
        # bounded: one of 2**63 would take all memory of this host.
        edges = [edge for each in state.ranges for edge in each]
        if edges and not self._first <= edges[0] <= edges[-1] <= self._next:
            raise bad("the receiver's ranges lie outside of the round")
        have = {index for first, end in state.ranges for index in range(first, end)}
        if not have <= self._leaves.keys():
            raise bad("the receiver has chunks that were not sent")
        self._busy = self._acks = 0
        for piece in self._pieces:
            piece.left = [part for part in piece.parts if part[0] not in have]
        self._pending = deque(p for p in self._pieces if p.left or not p.parts)

    def _run(self, channel: Channel) -> None:
        buffer = np.empty(self._piece_bytes, np.uint8)
        ended = -1
        try:
            while True:
                work = self._take(channel, ended)
                if isinstance(work, _Piece):
                    self._ship(channel, work, buffer)
                    with self._changed:
                        self._busy -= 1
                        idle = not self._pending
                        if idle and not self._busy:
                            # Others wait for this only, and waking them costs as much as a piece.
                            self._changed.notify_all()
                    if idle:
                        channel.flush()
                elif work is None:
                    channel.write(KEEP)
                    channel.flush()
                else:
                    ended = work.number
                    self._end(channel, work)
        except AccelvisorError as error:
            self._break(error)
        except Exception as error:
            self._break(UnavailableError(f"a bug: {error!r}", code="internal", where=_WHERE))
            raise

    def _take(self, channel: Channel, ended: int) -> _Piece | Round | None:
        """A piece, or the round's end when all pieces are sent, or None when there is nothing."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._pending:
                    self._busy += 1
                    return self._pending.popleft()
                if self._sealed and not self._busy and ended < self._round and not self._complete():
                    return Round(self._round, self._first, self._next)
                something = self._changed.wait(self._limits.bulk_stall_s / 3)
                channel.watch.idle(self._clock())
                if not something:
                    return None

    def _complete(self) -> bool:
        return self._acks >= len(self._channels) > 0

    def _end(self, channel: Channel, this: Round) -> None:
        channel.write(this.pack(Type.ROUND))
        channel.flush()
        channel.watch.idle(self._clock())
        kind, body = MESSAGE.unpack(channel.read(MESSAGE.size))
        if kind != Type.ACK or Round.unpack(body) != this:
            raise bad(f"round {this.number} was not acknowledged")
        channel.watch.idle(self._clock())
        with self._changed:
            self._acks += 1
            self._changed.notify_all()

    def _ship(self, channel: Channel, piece: _Piece, buffer: npt.NDArray[np.uint8]) -> None:
        copy = np.frombuffer(piece.view, np.uint8)
        if not piece.frozen:
            buffer = buffer[: len(copy)]
            np.copyto(buffer, copy)
            copy = buffer
        if not piece.parts:
            found = runs(copy)
            with self._changed:
                first = self._next
                self._next += len(found)
            if self._next - self._first > self._limits.bulk_chunks:
                raise CapacityError(
                    "too many chunks in one round", code="bulk-excess", where=_WHERE
                )
            piece.parts = [(first + i, s, n) for i, (s, n, _) in enumerate(found)]
            todo = [(*part, zero) for part, (_, _, zero) in zip(piece.parts, found, strict=True)]
        else:
            todo = [(i, s, n, not copy[s : s + n].any()) for i, s, n in piece.left]
        for index, start, length, zero in todo:
            data = memoryview(copy[start : start + length])  # type: ignore[arg-type]
            self._chunk(channel, index, piece.kind, piece.offset + start, data, zero)

    def _chunk(
        self, channel: Channel, index: int, kind: int, offset: int, data: memoryview, zero: bool
    ) -> None:
        coding, payload = (Coding.ZEROS, b"") if zero else (Coding.RAW, data)
        header = Header(index, kind, coding, offset, len(data)).pack()
        self._leaves[index] = chunks.leaf_hash(header, payload)
        self._sizes[index] = len(payload)
        size = len(payload)
        if self._bucket is not None:
            with self._changed:
                wait = self._bucket.take(size + MESSAGE.size, self._clock())
            if wait:
                channel.flush()
                self._stopped.wait(wait)
                channel.watch.idle(self._clock())
        channel.write(MESSAGE.pack(Type.CHUNK, header + size.to_bytes(4, "little")))
        if size:
            channel.write(payload)
        progress = self.progress
        with self._changed:
            progress.covered += len(data)
            progress.sent += size
            progress.chunks += 1


def _detached() -> UnavailableError:
    return UnavailableError("the transfer has no connection", code="peer-lost", where=_WHERE)
