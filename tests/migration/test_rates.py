"""Token bucket and watch, by a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import DeadlineError
from accelvisor.migration.rates import TokenBucket, Watch


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 30)), max_size=40))
def test_never_more_than_the_burst_and_the_rate(steps: list[tuple[float, float]]) -> None:
    bucket = TokenBucket(10, 20, 0)
    now = passed = 0.0
    for pause, units in steps:
        now += pause
        if bucket.allow(units, now):
            passed += units
        assert passed <= 20 + 10 * now + 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(10, 20, 100)
    assert bucket.allow(20, 100)
    assert not bucket.allow(1, 50)
    assert not bucket.allow(1, 50.05)
    assert bucket.allow(1, 50.2)


def test_what_was_taken_beyond_is_waited_for() -> None:
    bucket = TokenBucket(100, 50, 0)
    assert bucket.take(50, 0) == 0
    assert bucket.take(100, 0) == pytest.approx(1)
    assert bucket.take(100, 0.5) == pytest.approx(1.5)
    assert not bucket.full(1)
    assert bucket.full(10)


def test_standing_still_is_noticed() -> None:
    watch = Watch(0, stall_s=10, floor=100)
    watch.check(9.9)
    with pytest.raises(DeadlineError) as caught:
        watch.check(10)
    assert caught.value.code == "peer-stalled"


def test_a_byte_now_and_then_is_standing_still() -> None:
    watch = Watch(0, stall_s=10, floor=100)
    for second in range(1, 10):
        watch.moved(1, second)
    with pytest.raises(DeadlineError):
        watch.moved(1, 10)


def test_enough_in_each_span_is_enough() -> None:
    watch = Watch(0, stall_s=10, floor=100)
    for second in range(1, 100):
        watch.moved(150, second)


def test_what_moved_long_ago_does_not_count() -> None:
    watch = Watch(0, stall_s=10, floor=100)
    watch.moved(10**9, 10)
    with pytest.raises(DeadlineError):
        watch.moved(1, 21)


def test_nothing_owed_is_no_stall() -> None:
    watch = Watch(0, stall_s=10, floor=100)
    watch.idle(50)
    watch.check(59)
