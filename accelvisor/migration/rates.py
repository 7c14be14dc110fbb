"""How fast: a token bucket that keeps something below a rate, and a watch that a rate is kept up.

Both are pure; the clock is an argument (seconds, monotonic).
"""

from __future__ import annotations

from accelvisor.errors import DeadlineError
from accelvisor.limits import LIMITS


class TokenBucket:
    """At most ``rate`` units a second on average, ``burst`` at once.

    Args:
        rate: units a second, positive.
        burst: what may go at once; also what is there at the beginning.
        now: the clock at the beginning.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._then = now

    def allow(self, units: float, now: float) -> bool:
        """Take ``units`` if they are there."""
        self._fill(now)
        if self._level < units:
            return False
        self._level -= units
        return True

    def take(self, units: float, now: float) -> float:
        """Take ``units`` in any case; answers with the seconds to wait before they are used.

        ``units`` may exceed the burst: a debt is paid by whoever comes next.
        """
        self._fill(now)
        self._level -= units
        return max(0.0, -self._level / self.rate)

    def full(self, now: float) -> bool:
        """Nothing was taken lately: it may be forgotten."""
        self._fill(now)
        return self._level >= self.burst

    def _fill(self, now: float) -> None:
        # A clock that goes back gives nothing.
        self._level = min(self.burst, self._level + max(0.0, now - self._then) * self.rate)
        self._then = now


class Watch:
    """Notices a peer that stands still or trickles.

    In each ``stall_s`` at least ``floor`` bytes a second must move. That also catches a peer that
    sends one byte now and then, which a timeout of each read does not.
    """

    def __init__(
        self,
        now: float,
        *,
        stall_s: float = LIMITS.bulk_stall_s,
        floor: float = LIMITS.bulk_floor_bytes,
    ) -> None:
        self.stall_s = stall_s
        self.floor = floor
        self._since = now
        self._moved = 0

    def moved(self, count: int, now: float) -> None:
        """``count`` bytes came or went."""
        self._moved += count
        if now - self._since >= self.stall_s:
            self.check(now)

    def idle(self, now: float) -> None:
        """Nothing is owed just now: begin anew."""
        self._since = now
        self._moved = 0

    def check(self, now: float) -> None:
        """Raises DeadlineError ``peer-stalled``."""
        passed = now - self._since
        if passed < self.stall_s:
            return
        if self._moved < self.floor * passed:
            raise DeadlineError(
                f"{self._moved} bytes moved in {passed:.1f} s",
                code="peer-stalled",
                where="peer",
                hint="look at the network between the hosts; the transfer can be resumed",
            )
        self.idle(now)
