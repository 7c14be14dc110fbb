"""Accepts connections of other hosts on one port: control links, bulk connections, joining.

Whoever connects is a stranger until TLS has shown a key: strangers are few, come at a bounded rate
and have a deadline. All three ways begin with a preamble in the clear that only chooses who looks.
The handshake of a bulk connection keeps a thread: these have threads of their own, so that silent
strangers keep nothing else waiting, and nobody gets one unless a ticket is out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from accelvisor.errors import AccelvisorError, CapacityError
from accelvisor.limits import LIMITS, Limits
from accelvisor.migration.channel import Channel
from accelvisor.migration.link import (
    BULK,
    CONTROL,
    JOIN,
    PREAMBLE_BYTES,
    Address,
    Handler,
    PeerLink,
    dial,
)
from accelvisor.migration.rates import TokenBucket
from accelvisor.migration.tickets import TICKET_BYTES, Tickets, refused
from accelvisor.migration.tls import Credentials, refusal

LOG = logging.getLogger(__name__)
#: Gets a channel of its transfer; called in a thread.
Deposit = Callable[[Channel], None]
#: Speaks with a host that wants to join, over TLS that let in anybody.
Join = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_ACCEPTED = b"\x01"
_ADDRESSES = 1024
#: Whoever has a ticket shows it sooner, over any network (seconds).
_BRISK_S = 1.0


class Admission:
    """Who may come in before anybody knows who it is. Pure."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._strangers: dict[str, int] = {}
        self._rates: dict[str, TokenBucket] = {}
        self.connections = 0

    def enter(self, address: str, now: float) -> None:
        """One more connection, of a stranger; raises CapacityError ``peer-busy``."""
        limits = self._limits
        rate = self._rates.get(address)
        if rate is None:
            self._forget(now)
            rate = TokenBucket(limits.peer_connects_per_s, 2 * limits.peer_connects_per_s, now)
            self._rates[address] = rate
        if self.connections >= limits.peer_connections:
            raise _busy(f"all {self.connections} connections are in use")
        if self._strangers.get(address, 0) >= limits.peer_strangers:
            raise _busy("too many connections of this address have not said who they are")
        if len(self._rates) > _ADDRESSES or not rate.allow(1, now):
            raise _busy("too many connections within a second")
        self.connections += 1
        self._strangers[address] = self._strangers.get(address, 0) + 1

    def known(self, address: str) -> None:
        """A stranger has shown its key, or is gone."""
        self._strangers[address] -= 1
        if not self._strangers[address]:
            del self._strangers[address]

    def leave(self) -> None:
        """A connection has ended."""
        self.connections -= 1

    def _forget(self, now: float) -> None:
        if len(self._rates) >= _ADDRESSES:
            self._rates = {a: r for a, r in self._rates.items() if not r.full(now)}


def _busy(why: str) -> CapacityError:
    return CapacityError(why, code="peer-busy", where="peer", hint="try again soon")


class Listener:
    """Serves one listening socket, which it owns from :meth:`start` on.

    Args:
        sock: listening.
        credentials: who we are and whom we let in.
        handler: answers control links.
        tickets: for bulk connections.
    """

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        handler: Handler,
        *,
        tickets: Tickets[Deposit],
        clock: Callable[[], float] = time.monotonic,
        limits: Limits = LIMITS,
    ) -> None:
        self._sock = sock
        self._credentials = credentials
        self._handler = handler
        self._tickets = tickets
        self._clock = clock
        self._limits = limits
        self._admission = Admission(limits)
        self._handshakes = ThreadPoolExecutor(limits.bulk_strangers, "bulk-handshake")
        #: Bulk connections that have not shown a ticket, the oldest first, and since when.
        self._shaking: dict[socket.socket, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.links: set[PeerLink] = set()
        #: Set while a join code is open.
        self.join: Join | None = None

    @property
    def connections(self) -> int:
        return self._admission.connections

    async def start(self) -> None:
        self._sock.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def stop(self) -> None:
        """Stop accepting, close all links; idempotent."""
        tasks = [t for t in (self._accepting, *self._tasks) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in list(self.links)))
        await asyncio.to_thread(self._handshakes.shutdown)  # all of them were cut above
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                conn, address = await loop.sock_accept(self._sock)
            except OSError as error:
                # No descriptors: others will be freed; without a pause this would spin.
                LOG.warning("a peer could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            host = str(address[0])
            try:
                self._admission.enter(host, loop.time())
            except CapacityError as error:
                LOG.warning("a connection of %s is refused: %s", host, error.message)
                conn.close()
                continue
            task = loop.create_task(self._meet(conn, host))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _meet(self, conn: socket.socket, address: str) -> None:
        """From the first byte to the end of a connection; never raises but to be cancelled."""
        stranger = True

        def known() -> None:
            nonlocal stranger
            if stranger:
                stranger = False
                self._admission.known(address)

        try:
            async with asyncio.timeout(self._limits.peer_handshake_s):
                purpose = await _exactly(conn, PREAMBLE_BYTES)
            if purpose == CONTROL:
                await self._control(conn, known)
            elif purpose == BULK:
                await self._shake(conn)
            elif purpose == JOIN and self.join is not None:
                await self._joining(conn, self.join)
            else:
                LOG.info("%s connected for nothing that is known", address)
                conn.close()
        except (OSError, TimeoutError, AccelvisorError) as error:
            LOG.info("a connection of %s failed: %s", address, refusal(error, address).message)
            conn.close()
        except asyncio.CancelledError:
            conn.close()
            raise
        finally:
            known()
            self._admission.leave()

    async def _control(self, conn: socket.socket, known: Callable[[], None]) -> None:
        link = PeerLink(self._credentials, self._handler, limits=self._limits)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: link,
            conn,
            ssl=self._credentials.context(server=True),
            ssl_handshake_timeout=self._limits.peer_handshake_s,
        )
        self.links.add(link)
        try:
            await link.greeted()
            known()
            await asyncio.shield(link.closed)
        finally:
            self.links.discard(link)
            if not link.closed.done():
                await link.close()

    async def _shake(self, conn: socket.socket) -> None:
        """A bulk connection until its transfer has it, whose threads end by themselves."""
        self._admit_bulk()
        self._shaking[conn] = self._clock()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._handshakes, self._bulk, conn)
        except asyncio.CancelledError:
            _wake(conn)  # its thread may be waiting for bytes
            raise
        finally:
            self._shaking.pop(conn, None)

    def _admit_bulk(self) -> None:
        """Raises PermissionDenied ``peer-ticket``, CapacityError ``peer-busy``."""
        now = self._clock()
        if not self._tickets.waiting(now):
            raise refused()
        if len(self._shaking) < self._limits.bulk_strangers:
            return
        # Strangers that say nothing would keep out those who have tickets: the oldest makes room.
        oldest, since = next(iter(self._shaking.items()))
        if now - since < _BRISK_S:
            raise _busy("too many bulk connections have not said who they are")
        _wake(oldest)
        del self._shaking[oldest]

    def _bulk(self, conn: socket.socket) -> None:
        conn.setblocking(True)
        channel = Channel(conn, self._credentials, server=True, clock=self._clock)
        try:
            ticket = channel.read(TICKET_BYTES)
            deposit = self._tickets.redeem(ticket, channel.host, self._clock())
            channel.write(_ACCEPTED)
            channel.flush()
        except BaseException:
            channel.close()
            raise
        deposit(channel)

    async def _joining(self, conn: socket.socket, join: Join) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=self._limits.peer_hello_bytes, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        async with asyncio.timeout(self._limits.peer_handshake_s * 2):
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                conn,
                ssl=self._credentials.context(server=True, anybody=True),
                ssl_handshake_timeout=self._limits.peer_handshake_s,
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                await join(reader, writer)
            finally:
                writer.close()
                with contextlib.suppress(OSError, ssl.SSLError):
                    await writer.wait_closed()


def _wake(conn: socket.socket) -> None:
    """Whoever waits for its bytes hears that none come."""
    with contextlib.suppress(OSError):
        conn.shutdown(socket.SHUT_RDWR)


async def _exactly(conn: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(conn, size - len(data))
        if not part:
            raise ConnectionResetError("the peer hung up")
        data += part
    return data


async def open_channel(
    address: Address,
    ticket: bytes,
    host: UUID,
    credentials: Credentials,
    *,
    clock: Callable[[], float] = time.monotonic,
    limits: Limits = LIMITS,
) -> Channel:
    """A bulk connection to ``host`` that its ticket was good for.

    Raises:
        PermissionDenied: ``peer-ticket``, and as :func:`accelvisor.migration.link.connect`.
        UnavailableError: ``peer-unreachable``, ``peer-lost``.
    """
    sock = await dial(address, BULK, limits.peer_handshake_s)
    return await asyncio.to_thread(_show, sock, ticket, host, credentials, clock)


def _show(
    sock: socket.socket,
    ticket: bytes,
    host: UUID,
    credentials: Credentials,
    clock: Callable[[], float],
) -> Channel:
    channel = Channel(sock, credentials, server=False, clock=clock, expected=host)
    try:
        channel.write(ticket)
        channel.flush()
        try:
            answer = channel.read(1)
        except AccelvisorError as error:
            if error.code == "peer-lost":
                raise refused() from error
            raise
        if answer != _ACCEPTED:
            raise refused()
    except BaseException:
        channel.close()
        raise
    return channel
