"""The rules of one connection between hosts, sans-IO: greeting, requests and answers, flow control,
keep-alive.

Bytes go in by :meth:`Peering.receive`, events come out; what is to be sent collects and is taken
by :meth:`Peering.outgoing`. Both sides are equal: each may ask the other. Answers need no credit,
since their number is bounded by the questions; requests and notices wait until their channel has
some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from accelvisor import errors
from accelvisor.errors import AccelvisorError, CapacityError, DeadlineError, ProtocolError
from accelvisor.limits import LIMITS, Limits
from accelvisor.migration import framing
from accelvisor.migration.framing import COUNTED, Agreed, Decoder, Frame, Hello, Type
from accelvisor.migration.rates import TokenBucket

_WHERE = "peer"
_REASON_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Greeted:
    hello: Hello
    agreed: Agreed


@dataclass(frozen=True, slots=True)
class Request:
    exchange: int
    channel: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a request of ours: a payload, or the error that the peer raised."""

    exchange: int
    result: bytes | AccelvisorError


@dataclass(frozen=True, slots=True)
class Notice:
    channel: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """The peer said goodbye, and why."""

    error: AccelvisorError


Event: TypeAlias = Greeted | Request | Answer | Notice | Closed


class Peering:
    """One side of one connection.

    Args:
        mine: our greeting; it is queued at once.
        now: seconds on a monotonic clock.
    """

    def __init__(self, mine: Hello, now: float, *, limits: Limits = LIMITS) -> None:
        self.mine = mine
        self.agreed: Agreed | None = None
        self._limits = limits
        self._decoder = Decoder(limits)
        self._out = bytearray(Frame(Type.HELLO, mine.pack()).pack())
        self._waiting: dict[int, deque[Frame]] = {}
        self._credit = dict.fromkeys(range(limits.peer_channels), limits.peer_window_bytes)
        self._granted = dict(self._credit)
        self._taken = dict.fromkeys(self._credit, 0)
        self._exchange = 0
        self._asked: set[int] = set()
        self._answering: set[int] = set()
        self._allowed = TokenBucket(
            limits.peer_requests_per_s, 2 * limits.peer_requests_per_s, now
        )
        self._heard = now
        self._pinged = now
        self._closed = False

    # --- what comes ------------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> Iterator[Event]:
        """What ``data`` means, one by one.

        Raises:
            ProtocolError, ConflictError: the peer broke a rule, or speaks no version of ours; send
                :meth:`close` with it and hang up.
        """
        self._heard = self._pinged = now
        for frame in self._decoder.feed(data):
            if self._closed:
                return
            event = self._on(frame, now)
            if event is not None:
                yield event

    def _on(self, frame: Frame, now: float) -> Event | None:
        if frame.type in COUNTED:
            self._count(frame)
        match frame.type:
            case Type.HELLO:
                theirs = Hello.unpack(frame.payload)
                self.agreed = framing.agree(self.mine, theirs)
                return Greeted(theirs, self.agreed)
            case Type.REQUEST:
                return self._on_request(frame, now)
            case Type.RESPONSE | Type.ERROR:
                return self._on_answer(frame)
            case Type.NOTICE:
                return Notice(frame.channel, frame.payload)
            case Type.PING:
                self._send(Frame(Type.PONG, frame.payload))
            case Type.PONG:
                pass
            case Type.WINDOW:
                self._on_window(frame)
            case Type.CLOSE:
                self._closed = True
                return Closed(unpack_error(frame.payload))
        return None

    def _count(self, frame: Frame) -> None:
        cost = framing.HEADER.size + len(frame.payload)
        self._granted[frame.channel] -= cost
        if self._granted[frame.channel] < 0:
            raise ProtocolError(
                f"the peer sent more on channel {frame.channel} than it was allowed",
                code="peer-window",
                where=_WHERE,
            )

    def _on_request(self, frame: Frame, now: float) -> Event | None:
        if frame.exchange in self._answering:
            raise ProtocolError(
                f"request {frame.exchange} came twice", code="peer-exchange", where=_WHERE
            )
        full = len(self._answering) >= self._limits.peer_requests
        if full or not self._allowed.allow(1, now):
            why = "wait for an answer" if full else "came within a second"
            busy = CapacityError(
                f"too many requests {why}", code="peer-busy", where=_WHERE, hint="try again soon"
            )
            self.consumed(frame.channel, len(frame.payload))
            self._send(Frame(Type.ERROR, pack_error(busy), frame.exchange))
            return None
        self._answering.add(frame.exchange)
        return Request(frame.exchange, frame.channel, frame.payload)

    def _on_answer(self, frame: Frame) -> Event | None:
        if frame.exchange > self._exchange:
            raise ProtocolError(
                f"an answer to {frame.exchange}, which was not asked",
                code="peer-exchange",
                where=_WHERE,
            )
        if frame.exchange not in self._asked:
            return None  # it was given up
        self._asked.discard(frame.exchange)
        if frame.type is Type.ERROR:
            return Answer(frame.exchange, unpack_error(frame.payload))
        return Answer(frame.exchange, frame.payload)

    def _on_window(self, frame: Frame) -> None:
        credit = self._credit[frame.channel] + framing.unpack_credit(frame.payload)
        if credit > self._limits.peer_window_bytes:
            raise ProtocolError(
                f"the window of channel {frame.channel} grew to {credit} bytes",
                code="peer-window",
                where=_WHERE,
            )
        self._credit[frame.channel] = credit
        waiting = self._waiting.get(frame.channel)
        while waiting and self._try(waiting[0]):
            waiting.popleft()

    # --- what goes -------------------------------------------------------------------------------

    def request(self, payload: bytes, channel: int = 0) -> int:
        """Ask; answers with the exchange that the :class:`Answer` will have.

        Raises:
            CapacityError: ``peer-backlog``, the peer does not take what waits already.
        """
        if len(self._asked) >= self._limits.peer_requests:
            raise _backlog(f"{len(self._asked)} requests wait for an answer")
        self._exchange += 1
        self._message(Frame(Type.REQUEST, payload, self._exchange, channel))
        self._asked.add(self._exchange)
        return self._exchange

    def forget(self, exchange: int) -> None:
        """The answer is not waited for any more."""
        self._asked.discard(exchange)

    def notify(self, payload: bytes, channel: int = 0) -> None:
        """Tell; raises CapacityError ``peer-backlog``."""
        self._message(Frame(Type.NOTICE, payload, 0, channel))

    def respond(self, exchange: int, result: bytes | AccelvisorError) -> None:
        """Answer a :class:`Request`, once."""
        self._answering.discard(exchange)
        if isinstance(result, AccelvisorError):
            self._send(Frame(Type.ERROR, pack_error(result), exchange))
        else:
            self._send(Frame(Type.RESPONSE, result, exchange))

    def consumed(self, channel: int, payload: int) -> None:
        """A request or notice of so many bytes was taken: others may come in its place."""
        self._taken[channel] += framing.HEADER.size + payload
        if self._taken[channel] * 4 >= self._limits.peer_window_bytes:
            credit, self._taken[channel] = self._taken[channel], 0
            self._granted[channel] += credit
            self._send(Frame(Type.WINDOW, framing.pack_credit(credit), 0, channel))

    def close(self, error: AccelvisorError) -> None:
        """Say why, as the last frame."""
        if not self._closed:
            self._send(Frame(Type.CLOSE, pack_error(error)))
            self._closed = True

    def refuse(self, error: AccelvisorError) -> None:
        """Say only why: no greeting, if it was not taken by :meth:`outgoing` yet."""
        self._out.clear()
        self.close(error)

    def outgoing(self) -> bytes:
        """What is to be sent, once."""
        out, self._out = bytes(self._out), bytearray()
        return out

    def _message(self, frame: Frame) -> None:
        if len(frame.payload) > self._limits.peer_frame_bytes:
            raise CapacityError(
                f"a message of {len(frame.payload)} bytes is too long for a peer",
                code="peer-frame-long",
                where=_WHERE,
            )
        waiting = self._waiting.setdefault(frame.channel, deque())
        if len(waiting) >= self._limits.peer_requests:
            raise _backlog(f"{len(waiting)} messages wait for the peer to read")
        if waiting or not self._try(frame):
            waiting.append(frame)

    def _try(self, frame: Frame) -> bool:
        cost = framing.HEADER.size + len(frame.payload)
        if self._credit[frame.channel] < cost:
            return False
        self._credit[frame.channel] -= cost
        self._send(frame)
        return True

    def _send(self, frame: Frame) -> None:
        if not self._closed:
            self._out += frame.pack()

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Ping, or give up; answers with when to call again.

        Raises:
            DeadlineError: ``peer-silent``.
        """
        if now - self._heard >= self._limits.peer_dead_s:
            raise DeadlineError(
                f"the peer said nothing for {now - self._heard:.0f} s",
                code="peer-silent",
                where=_WHERE,
                hint="look at that host's accelvisord and the network",
            )
        if self.agreed is not None and now - self._pinged >= self._limits.peer_ping_s:
            self._pinged = now
            self._send(Frame(Type.PING, bytes(8)))
        return min(
            self._heard + self._limits.peer_dead_s, self._pinged + self._limits.peer_ping_s
        )


def _backlog(why: str) -> CapacityError:
    return CapacityError(why, code="peer-backlog", where=_WHERE, hint="the peer is too slow")


class _Reason(msgspec.Struct, frozen=True):
    kind: str
    code: str
    message: str
    where: str = ""
    hint: str = ""


def pack_error(error: AccelvisorError) -> bytes:
    """An error as it goes to a peer: its class's name and the four fields, none too long."""
    kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return msgspec.msgpack.encode(
        _Reason(kind, *(text[:900] for text in error.to_dict().values()))
    )


def unpack_error(payload: bytes) -> AccelvisorError:
    """The error that a peer named, of the same class; never raises."""
    try:
        if len(payload) > _REASON_BYTES * 4:
            raise msgspec.ValidationError("too long")
        reason = msgspec.msgpack.decode(payload, type=_Reason)
    except (msgspec.MsgspecError, RecursionError):
        return ProtocolError(
            "the peer named an error that cannot be read", code="peer-frame", where=_WHERE
        )
    kind = getattr(errors, reason.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, AccelvisorError)):
        kind = errors.HostError
    where = f"peer:{reason.where}" if reason.where else _WHERE
    return kind(reason.message, code=reason.code, where=where, hint=reason.hint)
