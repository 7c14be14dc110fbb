"""Bind a UNIX socket so that no one is robbed of theirs and no one gets in too early.

* A lock file beside the socket decides who owns the path; only its holder removes a leftover.
* A leftover is a socket that refuses connections. Anything else (a live server, a file, a
  directory, a socket that we may not reach) is left alone and named in the error.
* The socket is bound in a private directory, gets its mode and group, listens, and only then moves
  to its path in one rename: there is no moment at which a wrong user could connect.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path

from accelvisor.errors import AccelvisorError, ConflictError, SystemFailure, UsageError

#: sun_path holds 108 bytes with its end.
MAX_PATH_BYTES = 107


class Listener:
    """A listening socket and the lock on its path; ``close`` removes the path if still ours."""

    def __init__(self, sock: socket.socket, path: Path, lock: int) -> None:
        self.socket = sock
        self.path = path
        self._lock = lock
        self._identity = _identity(path)

    def close(self) -> None:
        """Stop listening and give the path back; may be called twice."""
        if self._lock < 0:
            return
        if self._identity is not None and _identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self.socket.close()
        os.close(self._lock)
        self._lock = -1


def listen(
    path: str | os.PathLike[str], *, mode: int = 0o600, group: int | None = None, backlog: int = 8
) -> Listener:
    """A listening stream socket at ``path``.

    Args:
        mode: permission bits of the socket, in force before anyone can connect.
        group: gid that the socket is given; None for the process's own.

    Raises:
        UsageError: code ``socket-path``, the path is too long for a socket.
        ConflictError: code ``socket-in-use``, a live server or something else is at the path.
        SystemFailure: code ``socket-bind``, the operating system refused.
    """
    target = Path(path)
    if len(os.fsencode(target)) > MAX_PATH_BYTES:
        raise UsageError(
            f"{target} is longer than the {MAX_PATH_BYTES} bytes of a socket's path",
            code="socket-path", where="vfio-user", hint="choose a shorter directory",
        )  # fmt: skip
    lock = -1
    try:
        lock = _take_lock(target)
        _clear(target)
        return Listener(_bind(target, mode, group, backlog), target, lock)
    except BaseException as error:
        if lock >= 0:
            os.close(lock)
        if isinstance(error, OSError):
            raise SystemFailure(
                f"cannot listen at {target}: {error.strerror}",
                code="socket-bind", where="vfio-user",
                hint="check that the directory exists and may be written",
            ) from error  # fmt: skip
        raise


def _take_lock(target: Path) -> int:
    lock = os.open(f"{target}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise _in_use(target, "another server holds its lock") from error
    return lock


def _clear(target: Path) -> None:
    """Remove a leftover of a server that died, with the lock held."""
    try:
        kind = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise _in_use(target, "something that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(target))
        except OSError as error:
            if error.errno != errno.ECONNREFUSED:
                # EAGAIN is a live server with a full queue, EACCES says nothing about life.
                raise _in_use(target, f"its owner may be alive ({error.strerror})") from error
        else:
            raise _in_use(target, "a live server answers there")
    target.unlink()


def _bind(target: Path, mode: int, group: int | None, backlog: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with tempfile.TemporaryDirectory(prefix=".bind-", dir=target.parent) as private:
            directory = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # By descriptor, since the private directory's name may not fit into sun_path.
                sock.bind(f"/proc/self/fd/{directory}/s")
            finally:
                os.close(directory)
            bound = Path(private, "s")
            bound.chmod(mode)
            if group is not None:
                os.chown(bound, -1, group)
            sock.listen(backlog)
            bound.rename(target)
    except BaseException:
        sock.close()
        raise
    return sock


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _in_use(target: Path, why: str) -> AccelvisorError:
    return ConflictError(
        f"{target} is in use: {why}",
        code="socket-in-use",
        where="vfio-user",
        hint="stop the other server, or choose another path",
    )
