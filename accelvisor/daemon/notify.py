"""Talking to systemd: sd_notify(3) and sd_listen_fds(3), by their documented protocols.

Both take the environment as an argument and remove their variables from it, so that no child of the
daemon believes that it was activated (systemd issue 36899) or notifies in its name.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from accelvisor.errors import SystemFailure

_FIRST_FD = 3


@dataclass(frozen=True, slots=True)
class Notifier:
    """Sends state to the service manager; without one every call does nothing.

    Attributes:
        address: of the manager's datagram socket (``@`` begins an abstract name); None without one.
        watchdog_s: seconds within which the manager wants a sign of life; None for no watchdog.
    """

    address: str | None = None
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str], pid: int) -> Notifier:
        """Take NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID out of ``environ``."""
        address = environ.pop("NOTIFY_SOCKET", "")
        usec = environ.pop("WATCHDOG_USEC", "")
        owner = environ.pop("WATCHDOG_PID", "")
        watchdog = None
        if usec.isdecimal() and int(usec) > 0 and owner in ("", str(pid)):
            watchdog = int(usec) / 1e6
        return cls(address if address[:1] in ("/", "@") else None, watchdog)

    @property
    def interval_s(self) -> float | None:
        """How often to call :meth:`alive`: half of what the manager allows, without any floor."""
        return None if self.watchdog_s is None else self.watchdog_s / 2

    def ready(self, status: str) -> None:
        """Everything is up: listeners, recovery, stores."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, text: str) -> None:
        """One line for people, shown by ``systemctl status``."""
        self._send(f"STATUS={text}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def reloading(self, monotonic_us: int) -> None:
        """A reload begins; :meth:`ready` ends it. The time is CLOCK_MONOTONIC in microseconds."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={monotonic_us}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={status}")

    def extend_timeout(self, seconds: float) -> None:
        """Start or stop will take longer: this much from now on (long recoveries)."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, text: str) -> None:
        if self.address is None:
            return
        address = "\0" + self.address[1:] if self.address[0] == "@" else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            try:
                sock.sendto(text.encode(), address)
            except OSError:
                # A manager that cannot be told is no reason to stop serving; it will act itself.
                pass


def take_listeners(
    environ: MutableMapping[str, str],
    pid: int,
    set_cloexec: Callable[[int], None] = lambda fd: os.set_inheritable(fd, False),
) -> dict[str, int]:
    """File descriptors passed by socket activation, by name (LISTEN_FDNAMES).

    The variables are removed whatever they say. An empty dictionary when they are absent or meant
    for another process.

    Raises:
        SystemFailure: ``activation`` when they are malformed or name two alike.
    """
    owner = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "")
    if owner != str(pid) or not count:
        return {}
    if not count.isdecimal() or int(count) > 64:
        raise _activation(f"LISTEN_FDS is {count!r}")
    labels = names.split(":") if names else ["unknown"] * int(count)
    if len(labels) != int(count) or len(set(labels)) != len(labels):
        raise _activation(f"LISTEN_FDNAMES {names!r} does not name {count} different sockets")
    for offset in range(int(count)):
        set_cloexec(_FIRST_FD + offset)
    return {label: _FIRST_FD + offset for offset, label in enumerate(labels)}


def adopt_listener(fd: int) -> socket.socket:
    """A listening UNIX stream socket from an inherited descriptor; non-blocking.

    Raises:
        SystemFailure: ``activation`` when it is something else.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise _activation(f"descriptor {fd} is not a socket")
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise _activation(f"descriptor {fd}: {error.strerror}") from error
    listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or not listening:
        sock.detach()
        raise _activation(f"descriptor {fd} is not a listening UNIX stream socket")
    sock.setblocking(False)
    return sock


def _activation(message: str) -> SystemFailure:
    return SystemFailure(
        message,
        code="activation",
        where="socket-activation",
        hint="the .socket unit needs ListenStream= and one FileDescriptorName=",
    )
