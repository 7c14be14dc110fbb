"""What is left to do for a process that dies while the device may still write into its memory.

Without an IOMMU nothing stops a device from writing to pages whose owner was killed and which the
kernel has given to somebody else. So before a process of the sysfs driver hands out its first DMA
memory, it starts this small process, which holds copies of the two descriptors that matter: the one
that keeps the pages pinned, and the queue's lock. When the owner is gone, or closes the device, it
disables the queue, waits until the device says that it is, and only then lets go of both.

It is run as a script by a bare interpreter (a fork of a program with threads could not be
trusted), so this module imports nothing of the package where it does so. What it cannot survive is
being killed itself: it ignores the polite signals, has a session of its own, and asks the
kernel's out-of-memory killer to look elsewhere.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, MutableSequence
from pathlib import Path

_FIRST_NAP_S = 0.0005
_LONGEST_NAP_S = 0.25
_LINE, _PINS, _LOCK, _BAR = 3, 4, 5, 6  # its descriptors
_READY_S = 30.0  # an emulated CPU starts an interpreter in a second or so


class Undertaker:
    """The owner's end: starts it, looks after it, and waits for it when the device is closed.

    Args:
        pins: descriptor that holds the pinned pages.
        lock: descriptor that holds the queue's lock.
        bar: the file of BAR0.
        magic: the value of the register at 0 while the device is present.
        control, disable: byte offset and value that disable the queue.
        status, disabled: byte offset and value that say that it is.

    Raises:
        OSError: it could not be started.
    """

    def __init__(
        self,
        pins: int,
        lock: int,
        bar: Path,
        *,
        magic: int,
        control: int,
        disable: int,
        status: int,
        disabled: int,
    ) -> None:
        words = (os.getpid(), magic, control, disable, status, disabled)
        python = sys.executable or "/usr/bin/python3"
        self._line, theirs = socket.socketpair()
        try:
            self._pid = self._spawn([python, str(bar), *map(str, words)], theirs, pins, lock)
            theirs.close()
            self._line.settimeout(_READY_S)
            if self._line.recv(1) != b"r":
                self._reap()
                raise OSError(0, f"{python} ended at once")
            self._line.setblocking(False)
        except OSError:
            self._line.close()
            raise
        finally:
            theirs.close()

    @staticmethod
    def _spawn(command: list[str], line: socket.socket, pins: int, lock: int) -> int:
        python, bar, *words = command
        opened = [os.open(bar, os.O_RDWR | os.O_CLOEXEC | os.O_SYNC)]
        try:
            # Above all the numbers that they get there, so that no copy overwrites another.
            for fd in (line.fileno(), pins, lock, opened[0]):
                opened.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64))
            return os.posix_spawn(
                python,
                [python, "-I", "-S", __file__, bar, *words],
                os.environ,
                file_actions=[
                    *((os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in range(3)),
                    *((os.POSIX_SPAWN_DUP2, fd, _LINE + i) for i, fd in enumerate(opened[1:])),
                ],
                setsid=True,
            )
        finally:
            for fd in opened:
                os.close(fd)

    @property
    def alive(self) -> bool:
        """Whether it is at its post."""
        try:
            return self._line.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def dismiss(self, timeout_s: float) -> bool:
        """Let it disable the queue and go; False when the device has not obeyed in time.

        It goes on trying then, with the pages and the lock in its hands.
        """
        gone = False
        try:
            self._line.shutdown(socket.SHUT_WR)
            self._line.settimeout(timeout_s)
            gone = self._line.recv(1) == b""
        except OSError:
            pass
        self._line.close()
        if gone:
            self._reap()
        return gone

    def _reap(self) -> None:
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:
            pass  # the program reaps all its children, or none

    def forked(self) -> None:
        """In a forked child: the line is the parent's, and must end with it."""
        self._line.close()


def stop(
    words: MutableSequence[int] | memoryview,
    exists: Callable[[], bool],
    sleep: Callable[[float], None],
    magic: int,
    control: int,
    disable: int,
    status: int,
    disabled: int,
) -> None:
    """Disable the queue, however long the device is away meanwhile; until it is unplugged.

    Args:
        words: BAR0 in 32-bit words.
        exists: whether the device is still plugged in. Others as :class:`Undertaker`.
    """
    nap = _FIRST_NAP_S
    while exists():
        words[control >> 2] = disable
        # Present before and after: what was read between is from a device that was there.
        if words[0] == magic and words[status >> 2] == disabled and words[0] == magic:
            return
        sleep(nap)
        nap = min(nap * 2, _LONGEST_NAP_S)


def main(argv: list[str]) -> int:
    """The process: ``BAR OWNER MAGIC CONTROL DISABLE STATUS DISABLED`` and four descriptors."""
    bar, (owner, *registers) = argv[0], [int(a) for a in argv[1:]]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    _close_others()
    try:
        Path("/proc/self/oom_score_adj").write_text("-1000")
    except OSError:
        pass
    words = memoryview(mmap.mmap(_BAR, os.fstat(_BAR).st_size)).cast("I")
    plugged = os.fstat(_BAR).st_ino
    poller = select.poll()
    poller.register(_LINE, select.POLLIN)
    try:
        # The line may have been inherited by children that outlive the owner; this says the truth.
        poller.register(os.pidfd_open(owner), select.POLLIN)
    except OSError:
        pass  # gone already, and the line says so, or a kernel without
    if os.getppid() == owner:
        try:
            os.write(_LINE, b"r")
            poller.poll()
        except OSError:
            pass  # it has gone meanwhile

    def exists() -> bool:
        try:
            return os.stat(bar).st_ino == plugged
        except OSError:
            return False

    stop(words, exists, time.sleep, *registers)
    os.close(_PINS)
    os.close(_LOCK)
    return 0


def _close_others() -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _BAR:
            try:
                os.close(int(name))
            except OSError:
                pass  # the listing's own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
