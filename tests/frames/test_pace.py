"""How slowly a peer may send, with time as an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import FrameRefused
from accelvisor.frames.pace import Pace

from .building import SECOND


def pace(least: int = 100, deadline: int = 1000) -> Pace:
    return Pace(0, deadline_ns=deadline * SECOND, window_ns=10 * SECOND, least_bytes=least)


def slow(action: object) -> bool:
    assert callable(action)
    try:
        action()
    except FrameRefused as error:
        return (error.step, error.code) == (6, "frame-slow")
    return False


def test_enough_in_each_window_goes_on() -> None:
    watched = pace()
    for second in range(0, 900, 5):
        watched.came(second * SECOND, 60)


def test_too_little_in_a_window_is_refused_when_it_ends() -> None:
    watched = pace()
    watched.came(9 * SECOND, 99)
    watched.check(10 * SECOND - 1)
    assert slow(lambda: watched.check(10 * SECOND))


def test_burst_after_the_window_does_not_mend_it() -> None:
    watched = pace()
    assert slow(lambda: watched.came(10 * SECOND, 1 << 30))


def test_burst_at_first_does_not_buy_slowness_later() -> None:
    watched = pace()
    watched.came(SECOND, 1 << 30)
    watched.check(10 * SECOND)
    assert slow(lambda: watched.check(20 * SECOND))


def test_rest_is_not_slowness_but_the_deadline_goes_on() -> None:
    watched = pace()
    watched.rest()
    watched.check(900 * SECOND)
    watched.came(901 * SECOND, 1)
    assert slow(lambda: watched.check(911 * SECOND))
    watched = pace()
    watched.rest()
    watched.check(1000 * SECOND)
    assert slow(lambda: watched.check(1000 * SECOND + 1))


def test_deadline_holds_however_fast_it_comes() -> None:
    watched = pace()
    assert slow(lambda: [watched.came(second * SECOND, 1 << 20) for second in range(1002)])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 300)), max_size=30))
def test_asked_when_it_says_it_never_misses_a_slow_window(steps: list[tuple[int, int]]) -> None:
    """Against a plain replay: with checks at every wake-up, windows lie end to end."""
    watched, now = pace(deadline=10_000), 0
    window, count, refused = 0, 0, False
    for gap, size in steps:
        then = now + gap * SECOND
        while not refused and watched.wake_ns(now) <= then:
            now = watched.wake_ns(now)
            refused = slow(lambda at=now: watched.check(at))
            assert now - window == 10 * SECOND
            assert refused == (count < 100)
            window, count = now, 0
        if refused:
            return
        now = then
        watched.came(now, size)
        count += size


@pytest.mark.parametrize("resting", [False, True])
def test_wakes_at_the_window_or_the_deadline(resting: bool) -> None:
    watched = pace(deadline=15)
    if resting:
        watched.rest()
    assert watched.wake_ns(0) == (15 if resting else 10) * SECOND
