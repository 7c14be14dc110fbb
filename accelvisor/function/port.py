"""The function's part of its card's host port: how fast bytes may pass between VM and device.

The daemon sets the rate (control method ``port``); a command whose bytes have to wait does so as a
:class:`~accelvisor.function.pauses.Waiting`, so that other queues, freezes and resets go on, and
the engine sleeps until the moment at which they may go. When bytes move is all that the rate
decides: results and model clock do not depend on it.

Copies from and to the window pass the port as well: the guest moved those bytes over the bus
itself, unseen, and could otherwise use it beside its share.

Rate and the end of the debt lie in the state memfd: a worker's successor begins with the same rate,
and the daemon reads both there without waking anybody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from accelvisor.errors import UsageError
from accelvisor.function import state as s
from accelvisor.function.pauses import Pauses
from accelvisor.function.state import State
from accelvisor.isolation.fair import TokenBucket
from accelvisor.limits import KIB, LIMITS, MIB

#: What may go at once after a rest, and what one step of a copy moves: long enough that a sleep
#: which ends late loses nothing, short beside the period in which rates are balanced.
_BURST_S = 0.020
_STEP_MIN = 4 * KIB
_STEP_MAX = 4 * MIB
#: A shorter wait is not worth a sleep; what went too early is waited for with what follows.
_NAP_S = 0.001
_BYTES, _WAITS, _WAIT_US = s.K["port_bytes"], s.K["port_waits"], s.K["port_wait_us"]


class Turn:
    """Bytes that wait for their turn."""

    writes = False

    def __init__(self, port: Port, ticket: int, since: float) -> None:
        self._port = port
        self._ticket = ticket
        self._since: float | None = since

    def left_s(self) -> float:
        """Seconds until they may go, at the rate that counts now."""
        return self._port.left(self._ticket)

    def ready(self) -> bool:
        """Whether they may go."""
        with self._port.lock:
            now = self._port.clock()
            if self._port.bucket.left(self._ticket, now) > 0:
                return False
            if self._since is not None:
                self._port.waited(now - self._since)
                self._since = None
        return True


class Port:
    """One function's bucket. The engine's threads take from it, the control thread sets its rate.

    Args:
        wake: tells the engine to look at what its commands wait for.
        clock: seconds; the one that the daemon reads as well (CLOCK_MONOTONIC).
    """

    def __init__(
        self,
        state: State,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._u64 = state.u64
        self._wake = wake
        self.clock = clock
        self.lock = threading.Lock()
        rate = min(self._u64[s.W_PORT_RATE], LIMITS.port_rate_bytes)
        self.bucket = TokenBucket(rate, _burst(rate), clock())
        self.limited = rate > 0
        #: bytes that a copy moves in one step at most
        self.step = _step(rate)

    def set_rate(self, rate: int) -> None:
        """Bytes a second from now on; 0: unlimited. What waits is told anew.

        Raises:
            UsageError: beyond what there is.
        """
        if not 0 <= rate <= LIMITS.port_rate_bytes:
            raise UsageError(
                f"a rate of {rate}", where="control",
                hint=f"0 (unlimited) to {LIMITS.port_rate_bytes} bytes a second",
            )  # fmt: skip
        with self.lock:
            self._u64[s.W_PORT_RATE] = rate
            self.bucket.set_rate(rate, _burst(rate), self.clock())
            self.step = _step(rate)
            self.limited = rate > 0
        self._wake()

    def holds(self, nbytes: int) -> bool:
        """Whether so many bytes may go at once."""
        if not self.limited:
            return True
        with self.lock:
            return self.bucket.holds(nbytes, self.clock())

    def take(self, nbytes: int) -> Turn | None:
        """Bytes pass; what they have to wait for before, if they must."""
        self._u64[_BYTES] += nbytes
        if not self.limited:
            return None
        with self.lock:
            now = self.clock()
            wait = self.bucket.take(nbytes, now)
            if not wait:
                return None
            self._u64[s.W_PORT_UNTIL] = int((now + wait) * 1e9)
            if wait < _NAP_S:
                return None
            return Turn(self, self.bucket.taken, now)

    def passing(self, nbytes: int) -> Pauses[None]:
        """The pauses until so many bytes that move together may go. In steps, so that the debt of
        a command that is aborted meanwhile is short.
        """
        while nbytes > 0:
            part = min(nbytes, self.step)
            turn = self.take(part)
            if turn is not None:
                yield turn
            nbytes -= part

    def left(self, ticket: int) -> float:
        """Seconds until the bytes with that ticket may go."""
        with self.lock:
            return self.bucket.left(ticket, self.clock())

    def waited(self, seconds: float) -> None:
        """Bytes have waited for so long."""
        self._u64[_WAITS] += 1
        self._u64[_WAIT_US] += max(0, round(seconds * 1e6))


def _burst(rate: int) -> int:
    return max(_STEP_MIN, int(rate * _BURST_S))


def _step(rate: int) -> int:
    return min(_STEP_MAX, _burst(rate)) if rate else _STEP_MAX
