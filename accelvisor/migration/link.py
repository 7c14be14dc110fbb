"""The control link between two daemons: asyncio around :mod:`peering` and :mod:`tls`.

:func:`connect` opens one, :class:`accelvisor.migration.listener.Listener` accepts them; both give a
:class:`PeerLink`, on which either side may ask the other. :class:`PersistentLink` keeps asking over
one connection after another.

The first eight bytes of a connection say what it is for, before TLS: they only choose who handles
it, and whoever that is believes what TLS shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import UUID

from accelvisor import __version__
from accelvisor.errors import (
    AccelvisorError,
    DeadlineError,
    PermissionDenied,
    ProtocolError,
    SystemFailure,
    UnavailableError,
)
from accelvisor.limits import LIMITS, Limits
from accelvisor.migration import framing
from accelvisor.migration.framing import Agreed, Hello
from accelvisor.migration.peering import Answer, Closed, Event, Greeted, Notice, Peering, Request
from accelvisor.migration.tls import Credentials, refusal

LOG = logging.getLogger(__name__)
_WHERE = "peer"

#: What a connection is for.
CONTROL = b"AVPEER\x00C"
BULK = b"AVPEER\x00B"
JOIN = b"AVPEER\x00J"
PREAMBLE_BYTES = 8

Address: TypeAlias = tuple[str, int]


async def _no_requests(_link: PeerLink, _payload: bytes) -> bytes:
    raise ProtocolError("this host takes no requests here", code="peer-request", where=_WHERE)


@dataclass(frozen=True, slots=True)
class Handler:
    """What this host answers.

    Args:
        request: a request's payload to the answer's; what it raises goes to the peer.
        notice: is told of messages that want no answer.
        features: for the greeting.
    """

    request: Callable[[PeerLink, bytes], Awaitable[bytes]] = _no_requests
    notice: Callable[[PeerLink, bytes], None] = lambda _link, _payload: None
    features: tuple[str, ...] = ()

    def hello(self, host: UUID) -> Hello:
        lowest, highest = framing.VERSIONS
        return Hello(
            lowest=lowest,
            highest=highest,
            host=host,
            features=self.features,
            software=f"accelvisor {__version__}",
        )


class PeerLink(asyncio.Protocol):
    """One connection to one host whose key was looked at. Belongs to one event loop.

    Args:
        credentials: who we are and whom we let in.
        handler: answers what the peer asks.
        expected: the host that must answer; None lets in every trusted one.
    """

    def __init__(
        self,
        credentials: Credentials,
        handler: Handler,
        *,
        expected: UUID | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._credentials = credentials
        self._handler = handler
        self._expected = expected
        self._limits = limits
        self._peering = Peering(handler.hello(credentials.host), self._loop.time(), limits=limits)
        self._transport: asyncio.Transport | None = None
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._key: bytes | None = None
        self._host: UUID | None = None
        self._error: AccelvisorError | None = None
        #: Done when the connection has ended; the result is why.
        self.closed: asyncio.Future[AccelvisorError] = self._loop.create_future()
        self._ready: asyncio.Future[None] = self._loop.create_future()

    # --- what others use -------------------------------------------------------------------------

    @property
    def host(self) -> UUID:
        """Whom this leads to."""
        if self._host is None:
            raise UnavailableError("the peer is not known yet", code="peer-lost", where=_WHERE)
        return self._host

    @property
    def key(self) -> bytes | None:
        """The public key that the connection stands on."""
        return self._key

    @property
    def agreed(self) -> Agreed:
        """Version and features; raises UnavailableError before the greeting."""
        if self._peering.agreed is None:
            raise UnavailableError("the peer has not greeted yet", code="peer-lost", where=_WHERE)
        return self._peering.agreed

    async def request(self, payload: bytes, *, deadline_s: float, channel: int = 0) -> bytes:
        """Ask and wait for the answer.

        Raises:
            AccelvisorError: what the peer raised, its ``where`` beginning with ``peer``.
            DeadlineError: ``peer-deadline``; the request may have had its effect.
            UnavailableError: ``peer-lost``, likewise.
            CapacityError: ``peer-backlog``, ``peer-frame-long``: it was not sent.
        """
        self._alive()
        exchange = self._peering.request(payload, channel)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._answers[exchange] = answer
        self._flush()
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            raise DeadlineError(
                f"host {self._host} did not answer within {deadline_s:g} s",
                code="peer-deadline",
                where=_WHERE,
            ) from None
        finally:
            self._answers.pop(exchange, None)
            self._peering.forget(exchange)

    def notify(self, payload: bytes, channel: int = 0) -> None:
        """Tell; raises UnavailableError ``peer-lost``, CapacityError ``peer-backlog``."""
        self._alive()
        self._peering.notify(payload, channel)
        self._flush()

    async def close(self) -> None:
        """Say goodbye; idempotent."""
        self._end(UnavailableError("this host closed the link", code="peer-lost", where=_WHERE))
        await self.closed
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, error: AccelvisorError) -> None:
        """End it, telling the peer why; may be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: so has the connection
            self._loop.call_soon_threadsafe(self._end, error)

    async def greeted(self) -> None:
        """Wait until both sides know and understand each other; raises what hindered it."""
        try:
            async with asyncio.timeout(self._limits.peer_handshake_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            error = DeadlineError(
                "the peer did not greet in time", code="peer-deadline", where=_WHERE
            )
            self._end(error)
            raise error from None

    # --- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a stream transport is needed")
        self._transport = transport
        try:
            tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
            self._key = self._credentials.peer_key(tls.getpeercert(binary_form=True))
            self._host = self._credentials.pins.host_of(self._key, self._expected)
        except AccelvisorError as error:
            self._peering.refuse(error)
            self._flush()
            self._end(error, tell=False)
            return
        self._credentials.hold(self)
        self._flush()
        self._tick()

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        try:
            for event in self._peering.receive(data, self._loop.time()):
                self._on(event)
        except AccelvisorError as error:
            self._end(error)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._error is None:
            self._error = _lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._error)
        if not self._ready.done():
            self._ready.set_exception(self._error)
            self._ready.exception()  # greeted() may not be waiting
        for task in self._tasks:
            task.cancel()
        if not self.closed.done():
            self.closed.set_result(self._error)

    # --- inside ----------------------------------------------------------------------------------

    def _on(self, event: Event) -> None:
        match event:
            case Greeted(hello):
                if hello.host != self._host:
                    raise PermissionDenied(
                        f"the key of host {self._host} greets as {hello.host}",
                        code="peer-wrong-host",
                        where=_WHERE,
                    )
                if not self._ready.done():
                    self._ready.set_result(None)
            case Request():
                task = self._loop.create_task(self._answer(event))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Answer(exchange, result):
                answer = self._answers.get(exchange)
                if answer is None or answer.done():
                    return
                if isinstance(result, AccelvisorError):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)
            case Notice(channel, payload):
                self._handler.notice(self, payload)
                self._peering.consumed(channel, len(payload))
            case Closed(error):
                self._end(error, tell=False)

    async def _answer(self, request: Request) -> None:
        result: bytes | AccelvisorError
        try:
            result = await self._handler.request(self, request.payload)
        except AccelvisorError as error:
            result = error
        except Exception:
            LOG.exception("a request of host %s failed", self._host)
            result = SystemFailure("a bug; the daemon's log has more", code="internal")
        self._peering.consumed(request.channel, len(request.payload))
        self._peering.respond(request.exchange, result)
        self._flush()

    def _tick(self) -> None:
        if self._error is not None:
            return
        now = self._loop.time()
        try:
            then = self._peering.tick(now)
        except AccelvisorError as error:
            self._end(error)
            return
        self._flush()
        self._timer = self._loop.call_later(max(0.01, then - now), self._tick)

    def _flush(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        out = self._peering.outgoing()
        if out:
            transport.write(out)
        # Answers need no credit: a peer that asks and does not read must not fill our memory.
        if transport.get_write_buffer_size() > 4 * self._limits.peer_window_bytes:
            self._error = self._error or UnavailableError(
                "the peer does not read", code="peer-backlog", where=_WHERE
            )
            transport.abort()

    def _alive(self) -> None:
        if self._error is not None or self.closed.done():
            raise self._error or _lost(None)

    def _end(self, error: AccelvisorError, *, tell: bool = True) -> None:
        if self._error is not None:
            return
        if tell:
            self._peering.close(error)
            self._flush()
        self._error = error
        if self._transport is None:
            self.connection_lost(None)
            return
        self._transport.close()
        # A peer that does not read its goodbye may not keep the connection.
        transport = self._transport
        self._loop.call_later(self._limits.peer_handshake_s, transport.abort)


def _lost(cause: Exception | None) -> AccelvisorError:
    if isinstance(cause, ssl.SSLError):
        return refusal(cause, "the other end")
    return UnavailableError(
        f"the connection to the peer broke{f': {cause}' if cause else ''}",
        code="peer-lost",
        where=_WHERE,
        hint="requests can be repeated",
    )


async def dial(address: Address, purpose: bytes, deadline_s: float) -> socket.socket:
    """A connected socket that has said what it is for.

    Raises:
        UnavailableError: ``peer-unreachable``.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(deadline_s):
            found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
            family, kind, number, _, where = found[0]
            sock = socket.socket(family, kind, number)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, where)
                await loop.sock_sendall(sock, purpose)
            except BaseException:
                sock.close()
                raise
    except (OSError, TimeoutError) as error:
        raise unreachable(address, error) from error
    return sock


def unreachable(address: Address, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"no accelvisord at {address[0]} port {address[1]}: {error or 'it did not answer in time'}",
        code="peer-unreachable",
        where=_WHERE,
        hint="is it running there, and is the port open?",
    )


async def connect(
    address: Address,
    host: UUID,
    credentials: Credentials,
    handler: Handler | None = None,
    *,
    limits: Limits = LIMITS,
) -> PeerLink:
    """A greeted link to ``host``.

    Raises:
        UnavailableError: ``peer-unreachable``, ``peer-lost``.
        PermissionDenied: ``peer-unknown``, ``peer-revoked``, ``peer-wrong-host``, ``peer-refused``.
        ConflictError: ``peer-version``.
        ProtocolError: ``peer-tls``, ``peer-greeting``.
        DeadlineError: ``peer-deadline``.
    """
    sock = await dial(address, CONTROL, limits.peer_handshake_s)
    loop = asyncio.get_running_loop()
    link = PeerLink(credentials, handler or Handler(), expected=host, limits=limits)
    try:
        await loop.create_connection(
            lambda: link,
            sock=sock,
            ssl=credentials.context(server=False),
            server_hostname="",
            ssl_handshake_timeout=limits.peer_handshake_s,
        )
    except (OSError, ssl.SSLError) as error:
        sock.close()
        raise refusal(error, f"{address[0]} port {address[1]}") from error
    await link.greeted()
    return link


@dataclass
class PersistentLink:
    """Asks one host over one connection after another.

    A request that meets a broken connection is sent again over the next one, until its deadline:
    only for requests that may be repeated, as all of a migration's are.

    Args:
        open: makes a greeted link.
        first_s: pause after a failure; it doubles up to ``most_s``, and each is cut by a random
            part so that two hosts do not meet in step for ever.
    """

    open: Callable[[], Awaitable[PeerLink]]
    first_s: float = 0.05
    most_s: float = 2.0
    jitter: Callable[[], float] = random.random
    _link: PeerLink | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def link(self) -> PeerLink:
        """The connection, opened when there is none; raises what :func:`connect` does."""
        async with self._lock:
            if self._link is None or self._link.closed.done():
                self._link = await self.open()
            return self._link

    async def request(self, payload: bytes, *, deadline_s: float) -> bytes:
        """As :meth:`PeerLink.request`; errors that another try cannot mend come at once."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        pause = self.first_s
        while True:
            try:
                link = await self.link()
                return await link.request(payload, deadline_s=max(0.0, until - loop.time()))
            except UnavailableError as error:
                if error.code not in _MENDS:
                    raise
                pause = min(self.most_s, pause * 2)
                wait = pause * (1 - self.jitter() / 2)
                if loop.time() + wait >= until:
                    raise
                LOG.info("the link broke (%s); again in %.2f s", error.message, wait)
                await asyncio.sleep(wait)

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()


_MENDS = frozenset(("peer-lost", "peer-unreachable"))
