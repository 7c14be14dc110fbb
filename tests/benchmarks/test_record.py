"""A figure holds when its goal does, and never because somebody said so."""

from __future__ import annotations

import pytest

from benchmarks.record import Goal, Sample, compare, table


def record(values: list[float], peer: list[float] | None, goal: Goal):
    against = ("peer", Sample(tuple(peer))) if peer else None
    return compare("g", "n", Sample(tuple(values)), "s", threads=1, against=against, goal=goal)


@pytest.mark.parametrize(
    ("ratio", "goal", "holds"),
    [
        (3.0, Goal(at_least=3), True),
        (2.9, Goal(at_least=3), False),
        (0.3, Goal(at_most=0.3), True),
        (0.31, Goal(at_most=0.3), False),
        (2.0, Goal(at_least=1, at_most=3), True),
        (4.0, Goal(at_least=1, at_most=3), False),
    ],
)
def test_goal_is_compared_with_the_ratio_when_there_is_a_peer(ratio, goal, holds):
    assert record([ratio * 10], [10.0], goal).holds is holds


def test_goal_is_compared_with_the_value_without_a_peer():
    assert record([1.0, 5.0, 2.0], None, Goal(at_most=2)).holds is True


def test_no_goal_claims_nothing():
    assert compare("g", "n", Sample((1.0,)), "s", threads=1).holds is None


def test_json_carries_the_computed_verdict():
    plain = record([1.0], [10.0], Goal(at_least=1)).to_dict()
    assert plain["holds"] is False
    assert plain["ratio"] == pytest.approx(0.1)


def test_table_shows_a_missed_goal_loudly():
    assert "NO" in table([record([1.0], [10.0], Goal(at_least=1))])


def test_spread_of_equal_values_is_zero():
    assert Sample((2.0,) * 8).spread == 0
