"""How a waiter passes its time: spinning, sleeping, and looking after the device now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from accelvisor.abi.registers import Status
from accelvisor.guest.errors import CommandTimeout

#: The least that is spun, in seconds.
BRIEF_S = 2e-5


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """How a waiter spends its time. Seconds."""

    #: Spin at most this long, and where it does not pay only for a moment (see Spinning). Not for a
    #: time between: to give up spinning a little too early costs a sleep, during which the device
    #: falls asleep as well, and then each waits for the other's waking.
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


class Spinning:
    """Whether to spin for long or for a moment: whichever lately ended waits sooner.

    A guess by the commands' length alone is wrong where guest and device share busy cores: there a
    long spin takes the time that the device needs, so the very wait that it should shorten lasts
    as long as the spin, and each yield in it gives other programs a turn that they need not
    return. So both ways are timed, and now and then the other one is tried again.
    """

    #: One wait in so many goes the way that looks worse.
    TRY_EVERY = 32

    def __init__(self, policy: WaitPolicy) -> None:
        self.policy = policy
        self._long_s = self._brief_s = 0.0  # averages over about eight waits
        self._waits = 0
        self._trying = False

    def pick(self) -> bool:
        """Whether this wait spins for long."""
        self._waits += 1
        self._trying = self._waits % self.TRY_EVERY == 0
        long = self._long_s <= self._brief_s * 1.1 and self._long_s <= self.policy.spin_s
        return long != self._trying

    def seconds(self, long: bool) -> float:
        """How long to spin."""
        return self.policy.spin_s if long else min(BRIEF_S, self.policy.spin_s)

    def learn(self, long: bool, took_s: float) -> None:
        """A wait took so many seconds."""
        took_s = min(took_s, 2 * self.policy.spin_s)  # one long program is no lesson for no-ops
        weight = 0.25 if self._trying else 0.125  # trials are rare, so each says more
        over = took_s < BRIEF_S  # before the two ways part: it says the same of both
        if long or over:
            self._long_s += (took_s - self._long_s) * weight
        if over or not long:
            self._brief_s += (took_s - self._brief_s) * weight


class Waited(Protocol):
    """What is waited for: a queue."""

    index: int
    policy: WaitPolicy

    def now(self) -> float: ...

    def nap(self, seconds: float) -> None: ...

    def wait_interrupt(self, timeout_s: float) -> None: ...

    def look(self, *, locked: bool) -> Status: ...


class Pauses:
    """One wait's sleeps: growing naps, a health check now and then, and the deadline.

    Where it is known about how long the wait takes, half of that is slept through first: a wait for
    an interrupt begins with a register access, and naps with processor time, which the device needs
    at the very beginning.
    """

    def __init__(
        self,
        queue: Waited,
        start: float,
        timeout_s: float | None,
        interrupt: bool = False,
        expected_s: float = 0.0,
    ) -> None:
        self._queue = queue
        self._start = start
        self._end = None if timeout_s is None else start + timeout_s
        self._timeout_s = timeout_s
        self._frozen_end = start + (timeout_s or 0.0) + queue.policy.frozen_s
        self._interrupt = interrupt
        self._asleep_until = start + expected_s / 2
        self._last_health = start
        self._next_health = start + queue.policy.health_s

    def once(self, *, locked: bool) -> None:
        """Sleep once; raises when the function is dead or the deadline has passed."""
        policy = self._queue.policy
        now = self._queue.now()
        if now >= self._next_health or (self._end is not None and now >= self._end):
            self._look(now, locked)
        left = policy.interrupt_s if self._end is None else max(self._end - now, policy.nap_s)
        if now < self._asleep_until:
            until_look = max(self._next_health - now, policy.nap_s)
            self._queue.nap(min(self._asleep_until - now, until_look, left))
            return
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
