"""When does a pre-copy end? Pure: measurements in, decisions out; no clock.

After each round: if what became dirty meanwhile, sent at the measured bandwidth, plus the fixed
cost of a switch-over fits the downtime target, the copy is *ready*: QEMU may stop the VM. A guest
that dirties its memory nearly as fast as it can be sent, two rounds in a row, is throttled (the
function fetches commands only half, then a quarter of the time). After the last round the rest is
sent with the VM stopped, unless that would take longer than anyone may wait: then it is given up.
These are the rules of pre-copy as Clark et al. describe it for VMs (NSDI 2005), with throttling as
QEMU's auto-converge has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum, auto

from accelvisor.limits import LIMITS


@dataclass(frozen=True, slots=True)
class Rules:
    """Seconds and shares. ``longest_s``: a stop-and-copy that would take longer is not begun."""

    target_s: float = 0.050
    longest_s: float = LIMITS.migration_quiesce_s / 2  # what is predicted may take twice as long
    rounds: int = LIMITS.migration_rounds
    hot_share: float = 0.9  # of the bandwidth: a dirty rate above it gets nowhere
    hot_rounds: int = 2
    throttles: tuple[int, ...] = (50, 25)  # percent of the time that commands are fetched


@dataclass(frozen=True, slots=True)
class Round:
    """What one round measured. ``fixed_s``: freeze, queues, registers, seal, verify, load."""

    sent_bytes: int
    seconds: float
    dirty_bytes: int  # what became dirty meanwhile, and is still to be sent
    fixed_s: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second; infinite when there was nothing to measure."""
        return self.sent_bytes / self.seconds if self.seconds > 0 else float("inf")

    @property
    def dirty_rate(self) -> float:
        return self.dirty_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def downtime_s(self) -> float:
        """Of a stop-and-copy now. Nothing sent and something dirty: nobody knows."""
        if not self.dirty_bytes:
            return self.fixed_s
        if not self.bandwidth:
            return float("inf")
        return self.dirty_bytes / self.bandwidth + self.fixed_s


class Verdict(StrEnum):
    GO_ON = auto()  # another round
    THROTTLE = auto()  # another round, with the function fetching less
    READY = auto()  # stop-and-copy is as short as wanted: now
    ENOUGH = auto()  # it will not become shorter: stop-and-copy now
    GIVE_UP = auto()  # not even that


@dataclass(frozen=True, slots=True)
class Convergence:
    """Where a pre-copy stands. Make one, then replace it by what :meth:`after` returns."""

    rules: Rules = Rules()
    rounds: int = 0
    hot: int = 0  # rounds in a row
    throttle: int = 100  # percent

    def after(self, measured: Round) -> tuple[Convergence, Verdict]:
        rules = self.rules
        is_hot = measured.dirty_rate > rules.hot_share * measured.bandwidth
        now = replace(self, rounds=self.rounds + 1, hot=self.hot + 1 if is_hot else 0)
        if measured.downtime_s <= rules.target_s:
            return now, Verdict.READY
        if now.rounds >= rules.rounds:
            fits = measured.downtime_s <= rules.longest_s
            return now, Verdict.ENOUGH if fits else Verdict.GIVE_UP
        slower = [level for level in rules.throttles if level < now.throttle]
        if now.hot >= rules.hot_rounds and slower:
            # Two rounds more before the next step: the first one still has the old rate in it.
            return replace(now, throttle=slower[0], hot=0), Verdict.THROTTLE
        return now, Verdict.GO_ON


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a move would take, and from what that follows (a dry run shows all of it)."""

    downtime_s: float
    total_s: float  # from the first byte to the end of the stop-and-copy
    total_bytes: int
    stop_bytes: int  # sent while the VM is stopped
    rounds: int
    throttle: int
    ends: Verdict
    # The inputs.
    state_bytes: int
    bandwidth: float
    dirty_rate: float
    working_set_bytes: int
    fixed_s: float


def predict(
    state_bytes: int,
    bandwidth: float,
    dirty_rate: float,
    working_set_bytes: int,
    fixed_s: float,
    rules: Rules = Rules(),
    standing: Convergence | None = None,
) -> Prediction:
    """Play the rounds with constant rates.

    Args:
        state_bytes: to be sent in the first round.
        bandwidth: bytes per second, above 0.
        dirty_rate: bytes per second while it runs unthrottled.
        working_set_bytes: the most that is dirty at a time.
        fixed_s: cost of a switch-over without any byte.
        standing: go on from there instead of from the beginning.

    Raises:
        ValueError: a bandwidth that is not above 0.
    """
    if not bandwidth > 0:
        raise ValueError("nothing can be predicted without a bandwidth")
    now = standing or Convergence(rules)
    before = now.rounds
    sending, total_bytes, total_s = state_bytes, 0, 0.0
    while True:
        seconds = sending / bandwidth
        dirty = min(int(dirty_rate * now.throttle / 100 * seconds), working_set_bytes)
        total_bytes += sending
        total_s += seconds
        measured = Round(sending, seconds, dirty, fixed_s)
        now, ends = now.after(measured)
        sending = dirty
        if ends not in (Verdict.GO_ON, Verdict.THROTTLE):
            break
    downtime_s = dirty / bandwidth + fixed_s
    return Prediction(
        downtime_s=downtime_s,
        total_s=total_s + downtime_s,
        total_bytes=total_bytes + dirty,
        stop_bytes=dirty,
        rounds=now.rounds - before,
        throttle=now.throttle,
        ends=ends,
        state_bytes=state_bytes,
        bandwidth=bandwidth,
        dirty_rate=dirty_rate,
        working_set_bytes=working_set_bytes,
        fixed_s=fixed_s,
    )


def time_left(standing: Convergence, measured: Round, remaining_bytes: int) -> float | None:
    """Seconds to the end of the stop-and-copy, for a progress bar.

    Args:
        measured: the newest round (or the part of it so far).
        remaining_bytes: of the round in progress; after a round, its dirty bytes.

    Returns:
        None while no rate is known.
    """
    if measured.seconds <= 0 or measured.sent_bytes <= 0:
        return None
    # The measured rate already has the throttle in it.
    rate = measured.dirty_rate * 100 / standing.throttle
    found = predict(
        remaining_bytes,
        measured.bandwidth,
        rate,
        max(remaining_bytes, measured.dirty_bytes),
        measured.fixed_s,
        standing.rules,
        standing,
    )
    return found.total_s
