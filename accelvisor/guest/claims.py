"""Which process of this VM owns which queue: advisory locks in /run/lock.

A lock goes with its process, however it dies, and the next owner finds the queue as the last one
left it and starts it afresh.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from accelvisor.errors import ConflictError, PermissionDenied, SystemFailure

_NAP_S = 0.02
LOCKS = Path("/run/lock")


class Claim:
    """A queue held by this process."""

    def __init__(self, queue: int, fd: int) -> None:
        self.queue = queue
        self.fd = fd

    def release(self) -> None:
        """Let another process have it. Safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def claim(
    name: str,
    queues: int,
    wanted: int | None = None,
    *,
    directory: Path = LOCKS,
    patience_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Claim:
    """Hold queue ``wanted``, or the first of ``queues`` that nobody holds.

    Args:
        name: of the function: its PCI address.
        patience_s: how long to try: the queue of a process that died is held until it is disabled.

    Raises:
        ConflictError: they are all held.
        PermissionDenied, SystemFailure: the lock files cannot be used.
    """
    candidates = range(queues) if wanted is None else (wanted,)
    end = clock() + patience_s
    while True:
        for queue in candidates:
            fd = _open(directory / f"accelguest-{name}-{queue}")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            return Claim(queue, fd)
        if clock() >= end:
            break
        sleep(_NAP_S)
    busy = f"all {queues} queues" if wanted is None else f"queue {wanted}"
    raise ConflictError(
        f"{busy} of {name} are used by other processes of this VM",
        code="queue-busy",
        where=f"{directory}/accelguest-{name}-*",
        hint="end one of them (fuser shows the lock's holder), or use a function with more queues",
    )


def _open(path: Path) -> int:
    # The directory is writable for everyone: never follow a link that somebody left there, and open
    # before creating, since the kernel forbids O_CREAT on others' files there.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            return os.open(path, flags | os.O_CREAT, 0o600)
    except PermissionError as error:
        raise PermissionDenied(
            f"{path} may not be opened: {error.strerror}",
            code="lock-permission",
            where=str(path),
            hint="run as the user who used the function first, or as root",
        ) from error
    except OSError as error:
        raise SystemFailure(
            f"{path}: {error.strerror}", code="lock", where=str(path), hint="is /run/lock there?"
        ) from error
