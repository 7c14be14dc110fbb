"""What a move away measures of itself: how its rounds converge, and when each step was reached.

Every move has one, whoever began it: ``accelctl migrate`` shows it while it lasts, the journal
keeps its numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from accelvisor.limits import LIMITS
from accelvisor.migration.convergence import Convergence, Round, Rules, Verdict, time_left

#: Of a switch-over without any byte (seconds): freeze, seal, verify, load, as measured on two
#: hosts of a laboratory.
FIXED_S = 0.030
#: Once is noise: a round beside a busy CPU measures anything.
_HOPELESS = 3


class Pace:
    """Of one move.

    Args:
        target_s: the downtime to aim at.
        clock: seconds, monotonic.
    """

    def __init__(self, target_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.standing = Convergence(replace(Rules(), target_s=target_s))
        #: What the newest round that had something to do measured.
        self.measured: Round | None = None
        self.rounds = 0
        self.sent_bytes = 0
        self.last_round_bytes = 0
        self.times: dict[str, float] = {}
        self._hopeless = 0
        self._began = (0, 0.0)

    @property
    def throttle(self) -> int:
        """Percent of the time that the functions are served."""
        return self.standing.throttle

    def mark(self, step: str) -> None:
        """A step is reached, for the first time."""
        self.times.setdefault(step, self._clock())

    def begin(self, sent_bytes: int) -> None:
        """A round begins, when so much was sent in all."""
        self._began = (sent_bytes, self._clock())

    def end(self, sent_bytes: int, dirty_bytes: int) -> Verdict:
        """It has ended: what comes next. A round that had little to do says nothing of the link,
        and a verdict that all is in vain counts when several rounds in a row come to it.
        """
        before, began = self._began
        self.rounds += 1
        self.sent_bytes = sent_bytes
        self.last_round_bytes = sent_bytes - before
        if self.last_round_bytes < LIMITS.chunk_bytes:
            return Verdict.GO_ON
        seconds = max(self._clock() - began, 1e-6)
        measured = self.measured = Round(self.last_round_bytes, seconds, dirty_bytes, FIXED_S)
        self.standing, verdict = self.standing.after(measured)
        self._hopeless = self._hopeless + 1 if verdict is Verdict.GIVE_UP else 0
        if verdict is Verdict.GIVE_UP and self._hopeless < _HOPELESS:
            return Verdict.GO_ON
        return verdict

    def time_left(self) -> float | None:
        """Seconds until the functions' part is done, as far as its rounds say; None: unknown."""
        if self.measured is None:
            return None
        return time_left(self.standing, self.measured, self.measured.dirty_bytes)

    def between(self, first: str, last: str) -> float | None:
        """Seconds from one step to another; None while one was not reached."""
        if first not in self.times or last not in self.times:
            return None
        return self.times[last] - self.times[first]

    def numbers(self) -> dict[str, float]:
        """What the journal keeps; of the times those that are known.

        ``downtime_s``: the guest stood still (from its QEMU's STOP to the other one's RESUME).
        ``blackout_s``: from the STOP until its functions compute there.
        ``freeze_s``, ``load_s``: the functions' freeze; from then on until they could run there.
        """
        stop = "stop" if "stop" in self.times else "freezing"
        found = {
            "downtime_s": self.between(stop, "committing"),
            "blackout_s": self.between(stop, "running"),
            "freeze_s": self.between("freezing", "shipping"),
            "ship_s": self.between("shipping", "sealed"),
            "verify_s": self.between("sealed", "confirmed"),
            "load_s": self.between("handed", "committing"),
            "total_s": self.between("inspecting", "running"),
        }
        counted = {
            "rounds": float(self.rounds),
            "sent_bytes": float(self.sent_bytes),
            "last_round_bytes": float(self.last_round_bytes),
            "throttle": float(self.throttle),
        }
        return {**{k: v for k, v in found.items() if v is not None}, **counted}
