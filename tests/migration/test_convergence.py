"""When a pre-copy ends: the rules one by one, and that it always does end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.migration.convergence import (
    Convergence,
    Prediction,
    Round,
    Rules,
    Verdict,
    predict,
    time_left,
)

MB = 1_000_000


def measured(dirty_bytes: int, seconds: float = 1.0, sent: int = 100 * MB) -> Round:
    return Round(sent, seconds, dirty_bytes, 0.010)


def test_ready_when_the_rest_fits_the_target_and_not_a_byte_before() -> None:
    # 100 MB/s, 10 ms fixed: 40 ms are 4 MB.
    assert Convergence().after(measured(4 * MB))[1] is Verdict.READY
    assert Convergence().after(measured(4 * MB + 100))[1] is Verdict.GO_ON


def test_the_fixed_cost_counts() -> None:
    slow = Round(100 * MB, 1.0, 0, 0.051)
    assert Convergence().after(slow)[1] is Verdict.GO_ON
    assert Convergence(Rules(target_s=0.06)).after(slow)[1] is Verdict.READY


def test_two_hot_rounds_throttle_to_half_then_to_a_quarter_and_no_further() -> None:
    now, seen = Convergence(), []
    for _ in range(7):
        now, said = now.after(measured(91 * MB))
        seen.append((said, now.throttle))
    go, slow = Verdict.GO_ON, Verdict.THROTTLE
    assert seen == [
        (go, 100), (slow, 50), (go, 50), (slow, 25), (go, 25), (go, 25), (go, 25)
    ]  # fmt: skip


def test_a_cool_round_between_two_hot_ones_does_not_throttle() -> None:
    now = Convergence()
    for dirty in (91, 89, 91, 89):
        now, said = now.after(measured(dirty * MB))
        assert said is Verdict.GO_ON


def test_the_eighth_round_is_the_last() -> None:
    now = Convergence()
    for _ in range(7):
        now, said = now.after(measured(50 * MB))
        assert said is Verdict.GO_ON
    assert now.after(measured(50 * MB))[1] is Verdict.ENOUGH


def test_given_up_when_stopping_would_take_too_long_for_qemu() -> None:
    last = Convergence(rounds=7)
    # 7.5 s are the limit: 749 MB at 100 MB/s and 10 ms.
    assert last.after(measured(749 * MB))[1] is Verdict.ENOUGH
    assert last.after(measured(750 * MB))[1] is Verdict.GIVE_UP


def test_a_round_that_sent_nothing_is_never_ready_with_dirty_memory() -> None:
    """A link that stands still has no bandwidth; nothing may be concluded from it."""
    stalled = Round(0, 5.0, MB, 0.0)
    assert stalled.downtime_s == float("inf")
    assert Convergence().after(stalled)[1] is Verdict.GO_ON
    assert Convergence(rounds=7).after(stalled)[1] is Verdict.GIVE_UP
    assert Convergence().after(Round(0, 5.0, 0, 0.0))[1] is Verdict.READY


amounts = st.integers(0, 10**13)
rates = st.floats(1.0, 1e12)


@given(amounts, rates, st.floats(0.0, 1e12), amounts, st.floats(0.0, 10.0))
def test_every_prediction_ends_and_adds_up(
    state: int, bandwidth: float, dirty: float, working_set: int, fixed: float
) -> None:
    rules = Rules()
    found = predict(state, bandwidth, dirty, working_set, fixed, rules)
    assert 1 <= found.rounds <= rules.rounds
    assert found.stop_bytes <= working_set
    assert found.total_bytes >= state + found.stop_bytes
    assert found.downtime_s == pytest.approx(found.stop_bytes / bandwidth + fixed)
    assert found.total_s == pytest.approx(found.total_bytes / bandwidth + fixed)
    assert found.throttle in (100, *rules.throttles)
    if found.ends is Verdict.READY:
        assert found.downtime_s <= rules.target_s * (1 + 1e-9)
    else:
        assert found.rounds == rules.rounds
        assert (found.ends is Verdict.GIVE_UP) == (found.downtime_s > rules.longest_s)


@given(amounts, rates, st.floats(0.0, 1e12), st.floats(0.0, 10.0))
def test_more_bandwidth_is_never_worse_for_what_ends_ready(
    state: int, bandwidth: float, dirty: float, fixed: float
) -> None:
    def played(factor: float) -> Prediction:
        return predict(state, bandwidth * factor, dirty, state, fixed)

    if played(1.0).ends is Verdict.READY:
        assert played(2.0).ends is Verdict.READY
        assert played(2.0).rounds <= played(1.0).rounds


def test_five_percent_dirty_a_round_makes_stop_and_copy_small() -> None:
    found = predict(256 * MB, 1000 * MB, 50 * MB, 256 * MB, 0.02)
    assert found.ends is Verdict.READY
    assert found.stop_bytes <= 0.1 * 256 * MB
    assert (found.state_bytes, found.bandwidth, found.dirty_rate) == (256 * MB, 1e9, 50e6)


def test_a_prediction_needs_a_bandwidth() -> None:
    for bandwidth in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="bandwidth"):
            predict(1, bandwidth, 0.0, 1, 0.0)


def test_time_left_shrinks_with_the_round_and_is_unknown_without_a_rate() -> None:
    assert time_left(Convergence(), Round(0, 0.0, 0, 0.0), 100) is None
    now = Round(100 * MB, 1.0, 10 * MB, 0.010)
    left = [time_left(Convergence(), now, remaining) for remaining in (100 * MB, 50 * MB, 0)]
    assert left == sorted(left, key=lambda seconds: -(seconds or 0))
    assert left[-1] == pytest.approx(0.010)
    # 100 MB, then 10 MB, then 1 MB stopped, at 100 MB/s.
    assert left[0] == pytest.approx(1.0 + 0.1 + 0.01 + 0.010)
