"""Binding a UNIX socket of our own without taking another's.

asyncio's ``create_unix_server(path)`` unlinks whatever stands at the path. Here:

* a lock file decides who the daemon is; only the lock's holder may remove a leftover;
* only a refused connection proves a leftover; anything else at the path is an error that names the
  first cause;
* the socket is bound inside a private directory (0700), given its group and mode there, and only
  then renamed to its place: it is never reachable with a wider mode.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from accelvisor.errors import ConfigError, ConflictError, SystemFailure

_BACKLOG = 64


@dataclass(slots=True)
class Lock:
    """An exclusive lock on a file, held as long as the descriptor is open."""

    fd: int

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def acquire(path: Path) -> Lock:
    """Become the one daemon of a run directory.

    The file is never removed: unlinking a lock file lets two processes hold "the" lock.

    Raises:
        ConflictError: ``already-running``, with the other's pid for the reader.
        SystemFailure: ``lock`` when the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SystemFailure(
            f"cannot open the lock file: {error.strerror}", code="lock", where=str(path)
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ConflictError(
            f"another accelvisord runs here (pid {other or 'unknown'})",
            code="already-running",
            where=str(path),
            hint="stop that one, or give this one its own ACCELVISOR_RUN_DIR",
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return Lock(fd)


def bind(path: Path, lock: Lock, *, group: str = "", mode: int = 0o660) -> socket.socket:
    """A listening, non-blocking stream socket at ``path``. ``lock`` proves the right to clean up.

    Raises:
        ConflictError: ``socket-live`` (somebody listens) or ``socket-not-a-socket``.
        ConfigError: ``group-unknown``.
        SystemFailure: ``bind`` with the first cause.
    """
    if lock.fd < 0:
        raise SystemFailure("the lock is not held", code="bind", where=str(path))
    _remove_leftover(path)
    gid = _group(group, path)
    with tempfile.TemporaryDirectory(prefix=".bind-", dir=path.parent) as private:
        staged = Path(private) / "s"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            _bind_short(sock, staged)
            if gid is not None:
                os.chown(staged, -1, gid)
            os.chmod(staged, mode)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            os.rename(staged, path)
        except OSError as error:
            sock.close()
            raise SystemFailure(
                f"cannot bind: {error.strerror or error}", code="bind", where=str(path)
            ) from error
    return sock


def remove(path: Path) -> None:
    """Remove our own socket at the end; its absence is fine."""
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass


def _bind_short(sock: socket.socket, path: Path) -> None:
    """A socket path has 108 bytes; go through the directory's descriptor to spend few of them."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def _remove_leftover(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConflictError(
            "something that is not a socket stands in the way",
            code="socket-not-a-socket",
            where=str(path),
            hint="look at it and move it away; accelvisord removes only sockets of its own",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            # Only a refusal proves that nobody listens: a full backlog or a missing permission
            # means that somebody does.
            if error.errno != errno.ECONNREFUSED:
                raise ConflictError(
                    f"cannot tell whether somebody listens there: {error.strerror or error}",
                    code="socket-live",
                    where=str(path),
                ) from error
        else:
            raise ConflictError(
                "somebody else listens there",
                code="socket-live",
                where=str(path),
                hint="stop that process, or use another ACCELVISOR_RUN_DIR",
            )
    os.unlink(path)


def _group(name: str, path: Path) -> int | None:
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            f'there is no group "{name}" on this host',
            code="group-unknown",
            where=str(path),
            hint="groupadd --system it, or set [admin] socket_group",
        ) from None
