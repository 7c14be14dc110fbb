"""The admin socket: many clients, one loop, bounded in every direction.

* a client's calls are answered in order, one at a time (Varlink has no ids, so order is the id);
* while one is answered, further calls wait in a bounded queue, then reading pauses;
* a client that does not read what it asked for is dropped once ``admin_backlog_bytes`` wait for it;
* users without any level share few connections and short messages: the socket is open to all;
* one client more than ``admin_clients`` gets an error at once instead of silence;
* who it is comes from the kernel (SO_PEERCRED, SO_PEERGROUPS), never from the payload.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import pwd
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing

from accelvisor.control import admin
from accelvisor.control.codec import Call, Decoder, Reply, encode, parse_call, reply_message
from accelvisor.control.dispatch import Dispatcher
from accelvisor.errors import AccelvisorError, ProtocolError, UnavailableError
from accelvisor.limits import LIMITS, Limits

LOG = logging.getLogger(__name__)
_SO_PEERGROUPS = 59  # asm-generic/socket.h; not in Python's socket module
_CALLS_QUEUED = 64
_UCRED = struct.Struct("3i")


def peer_of(sock: socket.socket) -> admin.Peer:
    """Credentials of the process that connected, taken at connect time by the kernel."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return admin.Peer(uid, frozenset((gid, *_groups_of(sock, uid, gid))), pid)


def _groups_of(sock: socket.socket, uid: int, gid: int) -> Sequence[int]:
    try:
        # Python allows 1024 bytes here, which is 256 groups.
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        # More groups than that: ask the user database, by the uid that the kernel vouches for.
        try:
            return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
        except KeyError:
            return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


class AdminServer:
    """Serves a listening UNIX socket.

    Args:
        dispatcher: answers the calls.
        limits: bounds; the defaults are the product's.
        identify: from an accepted socket to the peer.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        limits: Limits = LIMITS,
        identify: Callable[[socket.socket], admin.Peer] = peer_of,
    ) -> None:
        self.dispatcher = dispatcher
        self.limits = limits
        self.identify = identify
        self.clients: set[_Client] = set()
        self._server: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Begin to accept on ``sock``, which the server owns from now on."""
        # Not create_unix_server: from Python 3.13 on that one removes the path when it is closed,
        # and a socket that systemd made is not ours to remove.
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Client(self), sock=sock)

    def too_many(self, peer: admin.Peer) -> UnavailableError | None:
        """Why there is no room for one more client of this peer; None when there is."""
        limits = self.limits
        same = sum(client.peer.uid == peer.uid for client in self.clients)
        policy = self.dispatcher.policy
        strangers = sum(policy.level(client.peer) is admin.Level.NONE for client in self.clients)
        if len(self.clients) >= limits.admin_clients:
            which = f"all {limits.admin_clients} connections"
        elif (
            policy.level(peer) is admin.Level.NONE
            and strangers >= limits.admin_clients_without_level
        ):
            which = f"all {strangers} connections that users without a level may have"
        elif same >= limits.admin_clients_per_uid and peer.uid not in policy.uids:
            which = f"all {same} connections that uid {peer.uid} may have"
        else:
            return None
        return UnavailableError(
            f"{which} are in use",
            code="too-many-clients",
            where="admin",
            hint="close some, or try again in a moment",
        )

    async def stop(self) -> None:
        """Stop accepting and drop all clients; idempotent."""
        if self._server is not None:
            self._server.close()
        tasks = [client.task for client in self.clients if client.task is not None]
        for client in list(self.clients):
            client.drop("the daemon stops")
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None


class _Client(asyncio.Protocol):
    """One connection: bytes to calls, calls to replies."""

    def __init__(self, server: AdminServer) -> None:
        self._server = server
        limits = server.limits
        self._decoder = Decoder(max_bytes=limits.admin_message_bytes, max_depth=limits.admin_depth)
        self._calls: deque[Call] = deque()
        self._wake = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = False
        self._answering: Call | None = None
        self.peer = admin.Peer(-1, ())
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a stream transport is needed")
        self._transport = transport
        limits = self._server.limits
        transport.set_write_buffer_limits(high=limits.admin_backlog_bytes)
        try:
            self.peer = self._server.identify(transport.get_extra_info("socket"))
        except OSError as error:
            LOG.warning("no credentials for a client: %s", error)
            transport.abort()
            return
        if self._server.dispatcher.policy.level(self.peer) is admin.Level.NONE:
            self._decoder = Decoder(
                max_bytes=limits.admin_message_without_level_bytes, max_depth=limits.admin_depth
            )
        busy = self._server.too_many(self.peer)
        if busy is not None:
            self._send(Reply(dict(busy.to_dict()), admin.error_name(busy)))
            transport.close()
            return
        self._server.clients.add(self)
        self.task = asyncio.get_running_loop().create_task(self._serve(self.peer))

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._server.clients.discard(self)
        self._writable.set()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self.task is None or self._ended:
            return
        try:
            self._calls.extend(parse_call(message) for message in self._decoder.feed(data))
        except ProtocolError as error:
            # The stream has no frame to trust any more: say why, once, and hang up.
            LOG.info("dropping a client: %s", error.message)
            self._ended = True
            self._send(Reply(dict(error.to_dict()), admin.error_name(error)))
            self._transport.close()
            return
        if len(self._calls) >= _CALLS_QUEUED:
            self._transport.pause_reading()
        self._wake.set()

    def eof_received(self) -> bool:
        # A client that only closed its writing side still gets its answers, but no endless stream.
        self._ended = True
        self._wake.set()
        waiting = [*self._calls, *([] if self._answering is None else [self._answering])]
        if self._left() and not any(call.oneway for call in waiting):
            return False  # nobody hears an answer: what was begun for it is broken off
        if self._answering is not None:
            return not self._answering.more
        return bool(self._calls)

    def _left(self) -> bool:
        """Whether the client closed both directions: the end of what it sends does not tell."""
        sock = self._transport.get_extra_info("socket")
        poll = select.poll()
        poll.register(sock.fileno(), 0)  # a hang-up is told in any case
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def drop(self, why: str) -> None:
        """Cut the connection; what was not sent yet is lost."""
        LOG.info("dropping a client: %s", why)
        self._ended = True
        self._transport.abort()

    async def _serve(self, peer: admin.Peer) -> None:
        while True:
            while not self._calls:
                if self._ended:
                    self._transport.close()
                    return
                self._wake.clear()
                await self._wake.wait()
            call = self._calls.popleft()
            if len(self._calls) < _CALLS_QUEUED and not self._ended:
                self._transport.resume_reading()
            self._answering = call
            await self._answer(call, peer)
            self._answering = None

    async def _answer(self, call: Call, peer: admin.Peer) -> None:
        async with aclosing(self._server.dispatcher.answer(call, peer)) as replies:
            async for reply in replies:
                if self._transport.is_closing():
                    return
                if call.oneway:
                    continue
                self._send(reply)
                await self._drain()

    async def _drain(self) -> None:
        """Wait until the backlog is small again: what a client asked for and does not read costs at
        most the backlog and one reply."""
        if self._writable.is_set():
            return
        try:
            async with asyncio.timeout(self._server.limits.admin_drain_s):
                await self._writable.wait()
        except TimeoutError:
            self.drop("it does not read its replies")

    def _send(self, reply: Reply) -> None:
        try:
            raw = encode(reply_message(reply), max_bytes=self._server.limits.admin_message_bytes)
        except AccelvisorError as error:
            raw = encode(reply_message(Reply(dict(error.to_dict()), admin.error_name(error))))
        if not self._transport.is_closing():
            self._transport.write(raw)
