"""Sockets of accelvisord at which a domain's QEMU comes in: its bus and its private monitor.

Both are listened on by the daemon, so that it is QEMU which comes again after the daemon was
restarted. They lie in one directory, whose group (set-group-id) is QEMU's: a socket that is made in
there belongs to that group, and the daemon need not be a member. The names are those of the
domains' AppArmor profiles, as with the functions' sockets (docs/hypervisor.md, 9).
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accelvisor.errors import SystemFailure

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


def remove(path: str | Path) -> None:
    """Take the socket's name away. Idempotent."""
    with suppress(OSError):
        Path(path).unlink(missing_ok=True)
