"""A blocking client of one QEMU monitor socket: the IO around :mod:`accelvisor.hypervisor.qmp`.

For a monitor of accelvisor's own (``-object monitor-qmp`` or ``-mon``), which also answers while
libvirt is away and while QEMU waits for an incoming migration. QEMU serves one client at a time.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from accelvisor.errors import DeadlineError, ProtocolError, SystemFailure, UnavailableError
from accelvisor.hypervisor.qmp import Codec, Event, Greeting, Reply

#: Events that nobody collects are dropped from the oldest on.
MAX_EVENTS = 1024


class MonitorError(SystemFailure):
    """QEMU refused a command; ``error_class`` is QMP's, e.g. ``GenericError``."""

    code = "monitor-failed"

    def __init__(self, command: str, reply: Reply) -> None:
        super().__init__(f"{command}: {reply.error_text}", where="qmp")
        self.error_class = reply.error_class


class Monitor:
    """Connected and out of negotiation mode from construction on. Not thread-safe."""

    def __init__(
        self,
        path: str,
        *,
        deadline_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect and negotiate. UnavailableError (``monitor-unavailable``) when nobody listens,
        DeadlineError (``monitor-deadline``) when QEMU is busy with another client.
        """
        self._codec = Codec()
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._replies: dict[int, Reply] = {}
        self._greeting: Greeting | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            until = clock() + deadline_s
            self._connect(path, deadline_s)
            while self._greeting is None:
                self._receive(until, "the greeting")
            self._execute("qmp_capabilities", None, until)
        except BaseException:
            self._socket.close()
            raise

    @property
    def version(self) -> tuple[int, int, int]:
        """QEMU's version."""
        return self._greeting.version if self._greeting else (0, 0, 0)

    def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        deadline_s: float = 5.0,
    ) -> Any:
        """The command's return value.

        MonitorError when QEMU refuses it; DeadlineError (``monitor-deadline``), after which the
        monitor can go on being used; UnavailableError (``monitor-closed``) when QEMU is gone.
        """
        return self._execute(command, arguments, self._clock() + deadline_s)

    def wait_event(self, wanted: Callable[[Event], bool], *, deadline_s: float) -> Event:
        """The first event so far or to come that is ``wanted``, and forget the ones before it.

        DeadlineError (``monitor-deadline``); the events seen meanwhile stay.
        """
        until = self._clock() + deadline_s
        seen = 0
        while True:
            for position, event in enumerate(self._events):
                if position >= seen and wanted(event):
                    for _ in range(position + 1):
                        self._events.popleft()
                    return event
            seen = len(self._events) if len(self._events) < MAX_EVENTS else 0
            self._receive(until, "an event")

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connect(self, path: str, deadline_s: float) -> None:
        self._socket.settimeout(deadline_s)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise UnavailableError(
                f"no monitor at {path}: {error.strerror or error}",
                code="monitor-unavailable",
                where="qmp",
            ) from error

    def _execute(self, command: str, arguments: Mapping[str, Any] | None, until: float) -> Any:
        identifier, data = self._codec.command(command, arguments)
        try:
            self._send(data, until)
            while identifier not in self._replies:
                self._receive(until, f"the reply to {command}")
        except BaseException:
            self._codec.abandon(identifier)
            raise
        reply = self._replies.pop(identifier)
        if reply.failed:
            raise MonitorError(command, reply)
        return reply.value

    def _send(self, data: bytes, until: float) -> None:
        self._socket.settimeout(max(until - self._clock(), 0.001))
        try:
            self._socket.sendall(data)
        except TimeoutError:
            # Part of a command may be in the pipe: the stream is of no more use.
            self._socket.close()
            raise _late("QEMU to read") from None
        except OSError as error:
            raise _gone(error.strerror or str(error)) from error

    def _receive(self, until: float, what: str) -> None:
        left = until - self._clock()
        if left <= 0:
            raise _late(what)
        self._socket.settimeout(left)
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            raise _late(what) from None
        except OSError as error:
            raise _gone(error.strerror or str(error)) from error
        if not data:
            raise _gone("it closed the connection")
        for message in self._codec.feed(data):
            if isinstance(message, Event):
                self._events.append(message)
            elif isinstance(message, Reply):
                self._replies[message.id] = message
            elif self._greeting is None:
                self._greeting = message
            else:
                raise ProtocolError("QEMU's monitor: a second greeting", code="qmp", where="qmp")


def _late(what: str) -> DeadlineError:
    return DeadlineError(
        f"QEMU's monitor: waited too long for {what}",
        code="monitor-deadline",
        where="qmp",
        hint="another client may hold the monitor",
    )


def _gone(reason: str) -> UnavailableError:
    return UnavailableError(f"QEMU's monitor is gone: {reason}", code="monitor-closed", where="qmp")
