from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.daemon.inventory import Card, Placement, Profile, choose, fits, free, plan
from accelvisor.errors import CapacityError, NotFoundError
from accelvisor.limits import LIMITS, MIB

CARD = Card("card0", 4, 4, 256 * MIB)


def profile(cores: int = 1, chips: int = 1, memory: int = 64) -> Profile:
    return Profile("p", cores, chips, memory * MIB, MIB, 1, 16)


def test_the_fullest_chip_that_suffices_is_taken() -> None:
    held = [Placement("card0", {1: (0, 1)}, 0), Placement("card0", {2: (0, 1, 2)}, 0)]
    assert plan([CARD], held, profile()).placement.cores == {2: (3,)}
    assert plan([CARD], held, profile(2)).placement.cores == {1: (2, 3)}
    assert plan([CARD], held, profile(4)).placement.cores == {0: (0, 1, 2, 3)}


def test_chips_of_a_wide_function_are_different() -> None:
    placement = plan([CARD], [], profile(8, 4)).placement
    assert placement.cores == {0: (0, 1), 1: (0, 1), 2: (0, 1), 3: (0, 1)}


def test_all_reasons_of_all_cards_are_given() -> None:
    cards = [CARD, Card("card1", 1, 1, MIB)]
    held = [Placement("card0", dict.fromkeys(range(4), (0, 1, 2, 3)), 200 * MIB)]
    answer = plan(cards, held, profile(2))
    assert answer.placement is None
    assert answer.reasons == [
        "card0: 56 MiB of memory free, 64 MiB wanted",
        "card0: 0 of 4 chips have 2 cores free, 1 wanted",
        "card1: 1 MiB of memory free, 64 MiB wanted",
        "card1: 0 of 1 chips have 2 cores free, 1 wanted",
    ]


def test_a_named_card_is_the_only_one_looked_at() -> None:
    cards = [CARD, Card("card1", 1, 1, 64 * MIB)]
    assert plan(cards, [], profile(), "card1").placement.card == "card1"
    assert plan(cards, [], profile(2), "card1").placement is None
    with pytest.raises(NotFoundError) as caught:
        choose(cards, [], profile(), "card2")
    assert "card0, card1" in caught.value.hint


def test_no_card_at_all() -> None:
    with pytest.raises(CapacityError, match="no card is configured"):
        choose([], [], profile(), None)


def test_the_number_of_functions_is_bounded() -> None:
    held = [Placement("elsewhere", {}, 0)] * LIMITS.functions
    with pytest.raises(CapacityError, match="the maximum"):
        choose([CARD], held, profile(), None)


def test_fits_counts_and_names_the_limit() -> None:
    fit = fits([CARD], [], profile())
    assert fit.count == 4
    assert fit.limit == "card0: 0 MiB of memory free, 64 MiB wanted"
    assert fits([CARD], [], profile(4, 1, 1)).count == 4
    assert "chips have 4 cores free" in fits([CARD], [], profile(4, 1, 1)).limit


def test_a_card_that_shrank_has_no_negative_memory() -> None:
    assert free(CARD, [Placement("card0", {7: (9,)}, 1 << 40)]).memory_bytes == 0


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 128)).map(
    lambda t: profile(t[0] * t[1], t[1], t[2])
)


@given(st.lists(SIZES, max_size=25), st.lists(st.integers(0, 24), max_size=10))
def test_placements_are_disjoint_and_within_the_card(wanted, gone) -> None:
    """Whatever comes and goes: no core twice, no memory more than there is, sizes as asked."""
    held: list[Placement] = []
    for item in wanted:
        answer = plan([CARD], held, item)
        if answer.placement is None:
            assert answer.reasons
            continue
        placement = answer.placement
        assert len(placement.cores) == item.chips
        assert all(len(cores) == item.cores // item.chips for cores in placement.cores.values())
        held.append(placement)
        if gone and gone[-1] < len(held):
            del held[gone.pop()]
    for one, two in combinations(held, 2):
        for chip in one.cores.keys() & two.cores.keys():
            assert set(one.cores[chip]).isdisjoint(two.cores[chip])
    assert all(0 <= core < 4 for item in held for cores in item.cores.values() for core in cores)
    assert sum(item.memory_bytes for item in held) <= CARD.memory_bytes


@given(st.lists(SIZES, max_size=12), SIZES)
def test_a_refusal_is_true(wanted, last) -> None:
    """Where the planner says no, counting free chips and memory by hand says no too."""
    held: list[Placement] = []
    for item in wanted:
        answer = plan([CARD], held, item)
        held += [answer.placement] if answer.placement else []
    used = {(chip, core) for item in held for chip, cores in item.cores.items() for core in cores}
    room = sum(
        sum((chip, core) not in used for core in range(4)) >= last.cores_per_chip
        for chip in range(4)
    )
    memory = CARD.memory_bytes - sum(item.memory_bytes for item in held)
    possible = room >= last.chips and memory >= last.memory_bytes
    assert (plan([CARD], held, last).placement is not None) == possible
