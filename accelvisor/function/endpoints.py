"""What the holder makes once: shared memory and listening sockets. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import sys

from accelvisor.errors import SystemFailure

_BACKLOG = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memfd(name: str, size: int, *, grows: bool = False) -> int:
    """Shared memory of a fixed size, or one that only grows: nobody who maps it can be made to
    fault.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS & ~fcntl.F_SEAL_GROW if grows else _SEALS)
    return fd


def has_data(fd: int) -> bool:
    """Whether a memfd holds a page that anybody ever wrote, and nobody gave back."""
    try:
        os.lseek(fd, 0, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def listen(path: str, group: str = "") -> socket.socket:
    """A listening, non-blocking socket that nobody could connect to before its permissions were
    right: its owner and ``group``.

    Raises:
        SystemFailure: it cannot be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    old = os.umask(0o177)
    try:
        if os.path.exists(path):
            os.unlink(path)
        sock.bind(path)
        if group:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
        os.chmod(path, 0o660)
        sock.setblocking(False)
        sock.listen(_BACKLOG)
    except (OSError, KeyError) as error:
        sock.close()
        raise SystemFailure(
            f"cannot listen on {path}: {error}", code="function-socket", where="holder",
            hint="check the directory, its owner and the socket group",
        ) from error  # fmt: skip
    finally:
        os.umask(old)
    return sock


def open_descriptors() -> int:
    """How many descriptors this process has open. Nobody else can see: it is not dumpable."""
    return len(os.listdir("/proc/self/fd")) - 1


def notify_ready(status: str) -> None:
    """Tell the service manager, if there is one, that this runs as it should (sd_notify(3)).

    Args:
        status: what it does, for people.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        address = "\0" + path[1:] if path.startswith("@") else path
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.sendto(b"READY=1\nSTATUS=" + status.encode(), address)
            except OSError as error:
                print(f"cannot notify {path}: {error}", file=sys.stderr)
