"""Packing where it pays: what is learned from times, and that no bit depends on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.collectives.local import LocalGroup
from accelvisor.collectives.tuning import AGAIN, TRIALS, Tuner, bucket


@given(st.floats(0.001, 1.0), st.floats(0.001, 1.0))
def test_the_faster_way_is_kept_and_the_other_is_looked_at_again(
    dense: float, packed: float
) -> None:
    tuner = Tuner()
    chosen = []
    for _ in range(4 * AGAIN):
        way = tuner.packs("key")
        chosen.append(way)
        tuner.took("key", way, packed if way else dense)
    assert {*chosen[: 2 * TRIALS]} == {False, True}
    later = chosen[2 * TRIALS :]
    assert later.count(packed > dense) <= 4
    assert later.count(packed <= dense) >= len(later) - 4


def test_what_changes_is_noticed() -> None:
    tuner = Tuner()
    fast = {False: 1.0, True: 2.0}
    for turn in range(40 * AGAIN):
        if turn == 4 * AGAIN:
            fast = {False: 3.0, True: 0.5}
        way = tuner.packs("key")
        tuner.took("key", way, fast[way])
    assert tuner.packs("key")


def test_a_first_slow_call_does_not_count() -> None:
    tuner = Tuner()
    tuner.took("key", True, 100.0)
    for _ in range(TRIALS):
        tuner.took("key", True, 1.0)
        tuner.took("key", False, 2.0)
    assert tuner.packs("key")


def test_sizes_and_densities_within_a_factor_of_two_are_alike() -> None:
    assert bucket(1000, 0.1) == bucket(900, 0.11)
    assert bucket(1000, 0.1) != bucket(5000, 0.1)
    assert bucket(1000, 0.05) != bucket(1000, 0.3)


@pytest.mark.parametrize("size", [2, 3])
def test_bits_are_the_same_whatever_was_learned(size: int) -> None:
    random = np.random.default_rng(1)
    data = [random.standard_normal(40_000).astype(np.float32) for _ in range(size)]
    for array in data:
        array[random.random(array.size) < 0.9] = 0

    def work(c):  # type: ignore[no-untyped-def]
        ways = []
        found = set()
        for _ in range(2 * TRIALS + 2):
            found.add(c.all_reduce(data[c.rank]).tobytes())
            ways.append(c.stats.sent_bytes)
        return found, len(set(ways))

    results = LocalGroup(size).run(work)
    assert len(set.union(*(found for found, _ in results))) == 1
    assert all(ways >= 2 for _, ways in results), "both ways were tried"
