"""How a waiter passes its time: spinning, sleeping, and looking after the device now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from accelvisor.abi.registers import Status
from accelvisor.guest.errors import CommandTimeout


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """How a waiter spends its time. Seconds."""

    #: Spin at most this long; where recent commands took longer, do not spin at all: it would take
    #: time from the very core that the device may need, and end in a sleep all the same.
    spin_s: float = 0.0005
    #: The first sleep; later ones are a tenth of the time waited so far, so that at most about a
    #: tenth is lost to oversleeping.
    nap_s: float = 0.00005
    longest_nap_s: float = 0.005
    #: With an interrupt on its way, how long to trust in it: a lost one costs no more than this.
    interrupt_s: float = 0.02
    #: How often a waiter looks at the registers for a reset, a move or a dead function.
    health_s: float = 0.1
    #: How much longer to wait past a deadline while the function says that it is frozen.
    frozen_s: float = 60.0

    def spin_for(self, expected_s: float) -> float:
        """How long to spin for a command that will probably take ``expected_s`` seconds."""
        # All of it or next to nothing: to give up spinning a little too early costs a sleep, during
        # which the device falls asleep as well, and then each waits for the other's waking.
        return self.spin_s if expected_s <= self.spin_s else min(2e-5, self.spin_s)


class Waited(Protocol):
    """What is waited for: a queue."""

    index: int
    policy: WaitPolicy

    def now(self) -> float: ...

    def nap(self, seconds: float) -> None: ...

    def wait_interrupt(self, timeout_s: float) -> None: ...

    def look(self, *, locked: bool) -> Status: ...


class Pauses:
    """One wait's sleeps: growing naps, a health check now and then, and the deadline."""

    def __init__(
        self, queue: Waited, start: float, timeout_s: float | None, interrupt: bool = False
    ) -> None:
        self._queue = queue
        self._start = start
        self._end = None if timeout_s is None else start + timeout_s
        self._timeout_s = timeout_s
        self._frozen_end = start + (timeout_s or 0.0) + queue.policy.frozen_s
        self._interrupt = interrupt
        self._last_health = start
        self._next_health = start + queue.policy.health_s

    def once(self, *, locked: bool) -> None:
        """Sleep once; raises when the function is dead or the deadline has passed."""
        policy = self._queue.policy
        now = self._queue.now()
        if now >= self._next_health or (self._end is not None and now >= self._end):
            self._look(now, locked)
        left = policy.interrupt_s if self._end is None else max(self._end - now, policy.nap_s)
        if self._interrupt:
            self._queue.wait_interrupt(min(policy.interrupt_s, left))
            return
        nap = max(policy.nap_s, (now - self._start) / 10)
        self._queue.nap(min(nap, policy.longest_nap_s, left))

    def _look(self, now: float, locked: bool) -> None:
        status = self._queue.look(locked=locked)
        if self._end is not None:
            if status & Status.FROZEN and self._end < self._frozen_end:
                self._end += now - self._last_health  # time in which it cannot work is not its
            if now >= self._end:
                raise CommandTimeout(
                    f"no completion within {self._timeout_s:g} s",
                    where=f"queue:{self._queue.index}",
                    hint="is the function busy with a long program? give a longer timeout",
                )
        self._last_health = now
        self._next_health = now + self._queue.policy.health_s
