"""Rates of a host port: decided, and what comes of them over time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.isolation.rates import LEAST, Observation, decide, orders

CARD = "card0"
CAPACITY = 100_000_000
SEEN = st.builds(
    Observation,
    st.sampled_from([CARD, "card1", "free"]),
    st.integers(1, 1000),
    st.integers(0, CAPACITY),
    st.integers(0, 2 * CAPACITY) | st.just(0),
    st.booleans(),
)
CROWD = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), SEEN, max_size=12)
CAPACITIES = {CARD: CAPACITY, "card1": 5_000_000}


class Card:
    """Functions that want so much, on a port that is balanced once a period."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self.weights = weights
        self.rates = dict.fromkeys(weights, 0)
        self.recent: dict[str, list[int]] = {name: [] for name in weights}
        self.sent = 0
        self.period({})  # each is told its first rate

    def period(self, wants: Mapping[str, int]) -> dict[str, int]:
        """One of a second; what each took."""
        took = {name: min(wants.get(name, 0), self.rates[name]) for name in self.weights}
        seen = {}
        for name, weight in self.weights.items():
            self.recent[name] = [*self.recent[name], took[name]][-3:]
            hungry = wants.get(name, 0) > self.rates[name]
            seen[name] = Observation(
                CARD, weight, self.rates[name], max(self.recent[name]), hungry
            )
        for name, rate in orders(seen, decide(seen, {CARD: CAPACITY})):
            self.rates[name] = rate
            self.sent += 1
        return took


@given(CROWD)
def test_rates_add_up_to_the_capacity(crowd: dict[str, Observation]) -> None:
    rates = decide(crowd, CAPACITIES)
    assert rates.keys() == crowd.keys()
    for card, capacity in CAPACITIES.items():
        members = {name: seen for name, seen in crowd.items() if seen.card == card}
        total = sum(rates[name] for name in members)
        assert total <= capacity + LEAST * len(members)
        assert all(rates[name] >= LEAST for name in members)
        if any(seen.active for seen in members.values()):
            assert total >= capacity
    assert not any(rates[name] for name, seen in crowd.items() if seen.card == "free")


@given(CROWD)
def test_who_wants_all_has_its_weighted_share(crowd: dict[str, Observation]) -> None:
    rates = decide(crowd, CAPACITIES)
    for name, seen in crowd.items():
        if seen.card in CAPACITIES and seen.hungry:
            weights = sum(other.weight for other in crowd.values() if other.card == seen.card)
            assert rates[name] >= CAPACITIES[seen.card] * seen.weight // weights


@given(CROWD)
def test_old_and_new_rates_never_add_up_to_more_than_the_card_has(
    crowd: dict[str, Observation],
) -> None:
    """Those that lose are told first; all that differ are told, or none."""
    rates = decide(crowd, CAPACITIES)
    sent = orders(crowd, rates)
    cards = {crowd[name].card for name, _ in sent}
    for name, seen in crowd.items():
        assert ((name, rates[name]) in sent) == (seen.card in cards and rates[name] != seen.rate)
    rising = [(rate or 1 << 60) > (crowd[name].rate or 1 << 60) for name, rate in sent]
    assert rising == sorted(rising)


def test_one_alone_gets_all() -> None:
    card = Card({"a": 100})
    assert [card.period({"a": 1 << 60})["a"] for _ in range(3)][-1] == CAPACITY


def test_weights_divide_what_all_want() -> None:
    card = Card({"a": 100, "b": 300})
    for _ in range(3):
        took = card.period({"a": 1 << 60, "b": 1 << 60})
    assert took == {"a": CAPACITY // 4, "b": CAPACITY * 3 // 4}


def test_a_function_that_begins_has_its_share_within_two_periods() -> None:
    card = Card({"a": 100, "b": 100})
    for _ in range(10):
        card.period({"a": 1 << 60})
    assert card.period({"a": 1 << 60})["a"] > 0.97 * CAPACITY
    card.period({"a": 1 << 60, "b": 1 << 60})
    assert card.period({"a": 1 << 60, "b": 1 << 60})["b"] >= CAPACITY // 2


def test_what_one_does_not_want_the_others_get() -> None:
    card = Card({"a": 100, "b": 100, "c": 200})
    wants = {"a": 10_000_000, "b": 1 << 60, "c": 1 << 60}
    for _ in range(6):
        took = card.period(wants)
    assert took["a"] == wants["a"]
    assert took["c"] == pytest.approx(2 * took["b"], rel=1e-6)
    assert sum(took.values()) > 0.94 * CAPACITY


def test_functions_that_rest_are_not_told_anything() -> None:
    """Each order wakes a function."""
    card = Card({"a": 100, "b": 100, "c": 100})
    for _ in range(5):
        card.period({"a": 1 << 60})
    before = card.sent
    for n in range(50):
        card.period({"a": 1 << 60 if n % 2 else CAPACITY // 2})
    assert card.sent - before <= 2
    for _ in range(10):
        card.period({})
    before = card.sent
    for _ in range(10):
        card.period({})
    assert card.sent == before


def test_small_changes_wake_nobody() -> None:
    seen = {"a": Observation(CARD, 1, CAPACITY - 100, 100, True)}
    assert orders(seen, decide(seen, {CARD: CAPACITY})) == []


def test_a_card_that_lost_its_limit_lets_go() -> None:
    seen = {"a": Observation(CARD, 1, 1000, 0, False)}
    assert orders(seen, decide(seen, {})) == [("a", 0)]
