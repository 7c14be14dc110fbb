"""Sockets of accelvisord at which a domain's QEMU comes in: its bus and its private monitor.

Both are listened on by the daemon, so that it is QEMU which comes again after the daemon was
restarted. They lie in one directory, whose group (set-group-id) is QEMU's: a socket that is made in
there belongs to that group, and the daemon need not be a member. The names are those of the
domains' AppArmor profiles, as with the functions' sockets (docs/hypervisor.md, 9).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accelvisor.errors import AccelvisorError, SystemFailure

LOG = logging.getLogger(__name__)
_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected, as the kernel says."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The process that connected this socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(raw))


def listen(path: str | Path, group: int | None = None) -> socket.socket:
    """A listening socket that its group may connect to, in place of whatever was at ``path``.

    Args:
        group: gid to give it; None leaves the one that the directory hands on.

    SystemFailure (``domain-socket``) when it cannot be made.
    """
    path = Path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        # Nobody comes in before listen(), when the group is right.
        sock.bind(str(path))
        if group is not None and path.lstat().st_gid != group:
            os.chown(path, -1, group)
        path.chmod(0o660)
        sock.listen(4)
    except OSError as error:
        sock.close()
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise SystemFailure(
            f"cannot listen for the domain's QEMU: {error.strerror or error}",
            code="domain-socket",
            where=str(path),
            hint="its directory belongs to accelvisor and QEMU's group (systemd-tmpfiles --create)",
        ) from error
    return sock


class Door:
    """A listening socket with one client at a time, QEMU; who comes meanwhile is hung up on.

    Args:
        path: of the socket.
        serve: the client's whole time; it is cancelled at :meth:`close`. What it raises of our
            errors, and OSError, ends the connection.
        trusted: whether this peer may be the domain's QEMU; the socket's permissions come first.
    """

    def __init__(
        self,
        path: str | Path,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter, Peer], Awaitable[None]],
        trusted: Callable[[Peer], bool],
    ) -> None:
        self.path = Path(path)
        self._serve = serve
        self._trusted = trusted
        self._server: asyncio.Server | None = None
        self._client: asyncio.Task[None] | None = None
        self._inode = 0

    async def open(self, group: int | None) -> None:
        """Listen. SystemFailure ``domain-socket``."""
        sock = listen(self.path, group)
        self._inode = self.path.lstat().st_ino
        # Not start_unix_server: from Python 3.13 on that one removes the path when it is closed,
        # which may be a later server's by then.
        self._server = await asyncio.start_server(self._came, sock=sock)

    async def close(self) -> None:
        """Hang up and leave no socket behind. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            with suppress(OSError):
                if self.path.lstat().st_ino == self._inode:  # and not a later server's
                    self.path.unlink()
            server.close()
        if self._client is not None:
            self._client.cancel()
            with suppress(asyncio.CancelledError):
                await self._client
        if server is not None:
            await server.wait_closed()

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = peer_of(writer.get_extra_info("socket"))
        if self._server is None:
            writer.close()  # closed since
            return
        if self._client is not None or not self._trusted(peer):
            why = "not the domain's QEMU" if self._client is None else "one more client"
            LOG.warning("%s: %s (pid %d, uid %d)", self.path, why, peer.pid, peer.uid)
            writer.close()
            return

        def went(_: object) -> None:
            self._client = None
            writer.close()

        self._client = asyncio.get_running_loop().create_task(self._guest(reader, writer, peer))
        # Not in the task: one that is cancelled before it began runs nothing of its own.
        self._client.add_done_callback(went)

    async def _guest(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer
    ) -> None:
        try:
            await self._serve(reader, writer, peer)
        except AccelvisorError as error:
            LOG.warning("%s: %s", self.path, error.message)
        except OSError as error:
            LOG.info("%s: %s", self.path, error)
