"""The holder's loop: what to call when a descriptor is ready, and what to call later.

Standard library only; one thread. Waits without a timeout while nothing is due.
"""

from __future__ import annotations

import select
from collections.abc import Callable

Call = Callable[[], None]


class Loop:
    """Descriptors and timers. A call may watch and forget whatever it likes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._poll = select.poll()
        self._calls: dict[int, Call] = {}
        self._due: dict[Call, float] = {}
        self._running = True

    def watch(self, fd: int, call: Call, events: int = select.POLLIN) -> None:
        """Call whenever ``fd`` is ready; replaces what was said of it before."""
        self._calls[fd] = call
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        """Watch it no more; one that is not watched is left alone."""
        if self._calls.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def later(self, call: Call, seconds: float) -> None:
        """Call once, after that time; a second wish for the same call replaces the first."""
        self._due[call] = self._clock() + seconds

    def never(self, call: Call) -> None:
        """Take back :meth:`later`."""
        self._due.pop(call, None)

    def stop(self) -> None:
        """End :meth:`run` after the call in progress."""
        self._running = False

    def run(self) -> None:
        """Call and wait until stopped."""
        while self._running:
            for fd, _ in self._poll.poll(self._wait_ms()):
                call = self._calls.get(fd)
                if call is not None:
                    call()
            now = self._clock()
            for call in [call for call, at in self._due.items() if at <= now]:
                del self._due[call]
                call()

    def _wait_ms(self) -> float | None:
        if not self._due:
            return None
        return max(0.0, min(self._due.values()) - self._clock()) * 1000 + 1
