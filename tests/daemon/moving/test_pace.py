"""What a move measures: rounds judged, and how long its steps took."""

from __future__ import annotations

from accelvisor.daemon.moving.pace import Pace
from accelvisor.limits import LIMITS, MIB
from accelvisor.migration.convergence import Verdict


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rounds(pace: Pace, clock: Clock, *each: tuple[int, float, int]) -> list[Verdict]:
    """(bytes sent, seconds, bytes dirty then) of each round."""
    verdicts = []
    total = pace.sent_bytes
    for sent, seconds, dirty in each:
        pace.begin(total)
        clock.now += seconds
        total += sent
        verdicts.append(pace.end(total, dirty))
    return verdicts


def test_rounds_that_shrink_converge() -> None:
    clock = Clock()
    pace = Pace(0.05, clock)
    verdicts = rounds(pace, clock, (100 * MIB, 0.1, 30 * MIB), (30 * MIB, 0.03, MIB))
    assert verdicts == [Verdict.GO_ON, Verdict.READY]
    assert (pace.rounds, pace.sent_bytes, pace.last_round_bytes) == (2, 130 * MIB, 30 * MIB)
    assert pace.throttle == 100


def test_who_changes_memory_as_fast_as_it_is_sent_is_throttled_in_steps() -> None:
    clock = Clock()
    pace = Pace(0.05, clock)
    hot = (100 * MIB, 0.1, 100 * MIB)
    verdicts = rounds(pace, clock, hot, hot, hot, hot)
    assert verdicts == [Verdict.GO_ON, Verdict.THROTTLE, Verdict.GO_ON, Verdict.THROTTLE]
    assert pace.throttle == 25


def test_a_round_that_had_little_to_do_says_nothing_of_the_link() -> None:
    """An idle function that begins to compute: a few bytes were sent in a second, much is dirty."""
    clock = Clock()
    pace = Pace(0.05, clock)
    quiet = (LIMITS.chunk_bytes - 1, 1.0, 1000 * MIB)
    assert set(rounds(pace, clock, *[quiet] * 20)) == {Verdict.GO_ON}
    assert pace.measured is None
    assert pace.time_left() is None


def test_it_is_given_up_when_several_rounds_in_a_row_say_so() -> None:
    clock = Clock()
    pace = Pace(0.05, clock)
    vain = (10 * MIB, 1.0, 1000 * MIB)
    verdicts = rounds(pace, clock, *[vain] * (LIMITS.migration_rounds + 2))
    assert verdicts[-1] is Verdict.GIVE_UP
    assert Verdict.GIVE_UP not in verdicts[:-1]


def test_one_bad_round_gives_nothing_up() -> None:
    clock = Clock()
    pace = Pace(0.05, clock)
    vain, good = (10 * MIB, 1.0, 1000 * MIB), (100 * MIB, 0.1, 20 * MIB)
    rounds(pace, clock, *[good] * LIMITS.migration_rounds)
    verdicts = rounds(pace, clock, vain, vain, good, vain, vain)
    assert Verdict.GIVE_UP not in verdicts


def test_times_are_those_between_steps_and_missing_where_one_was_not_reached() -> None:
    clock = Clock()
    pace = Pace(0.05, clock)
    for step, after in (
        ("inspecting", 0.0), ("stop", 2.0), ("freezing", 0.01), ("shipping", 0.02),
        ("sealed", 0.03), ("confirmed", 0.04), ("handed", 0.0), ("committing", 0.05),
    ):  # fmt: skip
        clock.now += after
        pace.mark(step)
    clock.now += 5
    pace.mark("sealed")  # a state that is entered again
    numbers = {name: round(value, 3) for name, value in pace.numbers().items()}
    assert numbers["downtime_s"] == 0.15
    assert (numbers["freeze_s"], numbers["ship_s"]) == (0.02, 0.03)
    assert (numbers["verify_s"], numbers["load_s"]) == (0.04, 0.05)
    assert "blackout_s" not in numbers
    pace.mark("running")
    assert round(pace.numbers()["blackout_s"], 3) == 5.15
