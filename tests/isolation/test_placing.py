from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import CapacityError, ConflictError, NotFoundError
from accelvisor.isolation.placing import Answer, Cpus, Free, choose, fits, plan
from accelvisor.isolation.resources import (
    Card,
    Links,
    Placement,
    Policy,
    Profile,
    Range,
    violations,
)
from accelvisor.limits import LIMITS, MIB

CARD = Card("card0", 4, 4, 256 * MIB)


def profile(cores: int = 1, chips: int = 1, memory: int = 64) -> Profile:
    return Profile("p", cores, chips, memory * MIB, MIB, 1, 16)


def test_the_fullest_chip_that_suffices_is_taken() -> None:
    held = [Placement("card0", {1: (0, 1)}), Placement("card0", {2: (0, 1, 2)})]
    assert plan([CARD], held, profile()).placement.cores == {2: (3,)}
    assert plan([CARD], held, profile(2)).placement.cores == {1: (2, 3)}
    assert plan([CARD], held, profile(4)).placement.cores == {0: (0, 1, 2, 3)}


def test_chips_of_a_wide_function_are_different() -> None:
    placement = plan([CARD], [], profile(8, 4)).placement
    assert placement.cores == {0: (0, 1), 1: (0, 1), 2: (0, 1), 3: (0, 1)}


def test_all_reasons_of_all_cards_are_given() -> None:
    cards = [CARD, Card("card1", 1, 1, MIB)]
    taken = (Range(0, 0, 200 * MIB),)
    held = [Placement("card0", dict.fromkeys(range(4), (0, 1, 2, 3)), taken)]
    answer = plan(cards, held, profile(2))
    assert answer.placement is None
    assert list(map(str, answer.reasons)) == [
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
    held = [Placement("elsewhere", {})] * LIMITS.functions
    with pytest.raises(CapacityError, match="the maximum"):
        choose([CARD], held, profile(), None)


def test_fits_counts_and_names_the_limit() -> None:
    fit = fits([CARD], [], profile())
    assert fit.count == 4
    assert fit.limit == "card0: 0 MiB of memory free, 64 MiB wanted"
    assert fit.resources == ("memory",)
    assert fits([CARD], [], profile(4, 1, 1)).count == 4
    assert "chips have 4 cores free" in fits([CARD], [], profile(4, 1, 1)).limit


def test_a_card_that_shrank_has_no_negative_memory() -> None:
    held = Placement("card0", {7: (9,)}, (Range(0, 0, 1 << 40), Range(5, 0, 4096)), (99999,), 999)
    assert Free(CARD, [held]).memory_bytes == 0


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
    assert violations([CARD], {str(n): item for n, item in enumerate(held)}) == []


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


BANKED = Card("card0", 4, 4, 256 * MIB, banks=4, queues=6, functions=3)


def holding(*pieces: Range) -> list[Placement]:
    return [Placement("card0", {}, (piece,)) for piece in pieces]


def test_memory_comes_in_one_piece_if_it_can() -> None:
    held = holding(Range(0, 0, 60 * MIB), Range(1, 8 * MIB, 56 * MIB))
    assert Free(BANKED, held).ranges(8 * MIB) == [Range(1, 0, 8 * MIB)], "the smallest"
    assert Free(BANKED, held).ranges(3 * MIB) == [Range(0, 60 * MIB, 3 * MIB)]


def test_memory_comes_in_pieces_if_it_must() -> None:
    held = holding(Range(0, 0, 60 * MIB), Range(3, 0, 64 * MIB))
    pieces = Free(BANKED, held).ranges(130 * MIB)
    assert pieces == [Range(0, 60 * MIB, 2 * MIB), Range(1, 0, 64 * MIB), Range(2, 0, 64 * MIB)]


def test_memory_in_too_small_pieces_is_a_reason_of_its_own() -> None:
    card = Card("card0", 4, 4, 2 * MIB)
    pieces = tuple(Range(0, at * 8192, 4096) for at in range(2 * MIB // 8192))
    held = [Placement("card0", {}, pieces)]
    answer = plan([card], held, Profile("p", 1, 1, MIB, MIB, 1, 16))
    assert str(answer.reasons[0]) == (
        "card0: 1 MiB of memory free, but in too small pieces, 1 MiB wanted"
    )


def test_queues_and_vectors_run_out_too() -> None:
    small = Profile("p", 1, 1, MIB, MIB, 2, 16)
    assert fits([BANKED], [], small).count == 3
    held: list[Placement] = []
    for _ in range(3):
        held.append(choose([BANKED], held, small, None))
    assert [item.queues for item in held] == [(0, 1), (2, 3), (4, 5)]
    assert [item.vector for item in held] == [0, 1, 2]
    assert fits([BANKED], held, small).resources == ("queues", "vectors")
    del held[1]
    assert choose([BANKED], held, small, None).queues == (2, 3)


def guaranteed(cores: int) -> Profile:
    return Profile("g", cores, 1, MIB, MIB, 1, 16, Policy.GUARANTEED)


def test_a_guaranteed_function_gets_cpus_of_its_own() -> None:
    first = choose([CARD], [], guaranteed(2), None, cpus=(0, 1, 2, 3))
    assert first.cpus == (2, 3)
    assert Cpus((0, 1, 2, 3), [first]).shared == (0, 1)
    assert choose([CARD], [first], guaranteed(1), None, cpus=(0, 1, 2, 3)).cpus == (1,)


def test_the_last_cpu_is_everybodys() -> None:
    with pytest.raises(CapacityError, match="can give 3 of its CPUs away, 4 wanted"):
        choose([CARD], [], guaranteed(4), None, cpus=(0, 1, 2, 3))
    assert fits([CARD], [], guaranteed(1), cpus=(0, 1)).count == 1
    assert fits([CARD], [], guaranteed(1), cpus=(0, 1)).resources == ("cpus",)
    assert plan([CARD], [], guaranteed(1)) == Answer(None, plan([CARD], [], guaranteed(1)).reasons)


def test_a_row_of_chips_is_a_ring() -> None:
    assert CARD.links == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert Card("c", 2, 1, MIB).links == ((0, 1),)
    assert Card("c", 1, 1, MIB).links == ()


def test_a_function_of_several_chips_gets_the_links_that_make_them_a_ring() -> None:
    assert plan([CARD], [], profile(4, 4)).placement.links == (0, 1, 2, 3)
    assert plan([CARD], [], profile(2, 2)).placement.links == (0,)
    assert plan([CARD], [], profile(1)).placement.links == ()


def test_a_link_is_never_shared_though_its_chips_are() -> None:
    """Two functions on the same chips: the second takes others, or has none."""
    held = [plan([CARD], [], profile(2, 2, 8)).placement]
    for _ in range(3):
        held.append(plan([CARD], held, profile(2, 2, 8)).placement)
    assert len({link for item in held for link in item.links}) == 4
    held.append(plan([CARD], held, profile(2, 2, 8)).placement)
    assert held[-1].links == ()
    assert violations([CARD], {str(n): item for n, item in enumerate(held)}) == []


def test_a_profile_may_insist_on_a_ring() -> None:
    ring = replace(profile(3, 3), links=Links.RING)
    answer = plan([CARD], [], ring)
    assert [item.resource for item in answer.reasons] == ["links"]
    assert "no 3 chips with 1 core free are in a ring of free links" in str(answer.reasons[0])
    assert fits([CARD], [], ring).resources == ("links",)
    joined = plan([CARD], [], replace(ring, links=Links.ANY)).placement
    assert (joined.cores.keys(), joined.links) == ({0, 1, 2}, (0, 1))
    assert plan([replace(CARD, rows=2)], [], replace(profile(4, 4), links=Links.RING)).placement


def test_nothing_is_placed_on_a_chip_that_is_switched_off() -> None:
    off = replace(CARD, disabled=frozenset({1}))
    answer = plan([off], [], profile(4, 4))
    assert "3 of 4 chips have 1 core free, 4 wanted" in str(answer.reasons[0])
    three = plan([off], [], profile(3, 3)).placement
    assert (set(three.cores), three.links) == ({0, 2, 3}, (2, 3)), "links of chip 1 are down"
    assert Free(off).core_count == 12


def test_links_lead_over_a_chip_that_lets_pass() -> None:
    passing = replace(CARD, passing=frozenset({1}))
    three = plan([passing], [], replace(profile(3, 3), links=Links.RING)).placement
    assert (set(three.cores), three.links) == ({0, 2, 3}, (0, 1, 2, 3))
    assert violations([passing], {"f": three}) == []
    assert violations([CARD], {"f": three}) != []


def test_what_is_wrong_with_links_is_told() -> None:
    place = Placement("card0", {0: (0,), 1: (0,)}, vector=0, links=(0,))
    other = Placement("card0", {0: (1,), 1: (1,)}, vector=1, links=(0,))
    assert violations([CARD], {"a": place}) == []
    assert violations([CARD], {"a": place, "b": other}) == ["card0 link 0: held by a and b"]
    assert violations([CARD], {"a": replace(place, links=(9,))}) == ["a: no link 9"]
    assert "joins chips (1, 2)" in violations([CARD], {"a": replace(place, links=(1,))})[0]
    off = replace(CARD, disabled=frozenset({1}))
    assert "a: chip 1 is disabled" in violations([off], {"a": place})


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement("card9", {0: (0,)}), "no card card9"),
        (Placement("card0", {4: (0,)}, (), (), 0), "no core 4.0"),
        (Placement("card0", {0: (4,)}, (), (), 0), "no core 0.4"),
        (Placement("card0", {}, (), (6,), 0), "no queue 6"),
        (Placement("card0", {}, (), (), 3), "no vector 3"),
        (Placement("card0", {}, (Range(4, 0, 4096),), (), 0), "no memory"),
        (Placement("card0", {}, (Range(0, 64 * MIB, 4096),), (), 0), "no memory"),
        (Placement("card0", {}, (Range(0, 1, 4096),), (), 0), "no memory"),
        (Placement("card0", {0: (1,)}, (), (), 0), "card0 core 0 1: held by a and b"),
        (Placement("card0", {}, (), (1,), 0), "card0 queue 1: held by a and b"),
        (Placement("card0", {}, (), (), 1), "card0 vector 1: held by a and b"),
        (Placement("card0", {}, (Range(1, 4096, 8192),), (), 0), "bank 1: 0x2000 is held by"),
        (Placement("card0", {}, (), (), 0, (3,)), "cpu 3: held by a and b"),
        (Placement("card0", {}, (), (), 0, (9,)), "the host has no CPU 9"),
    ],
)
def test_violations_are_seen(placement: Placement, text: str) -> None:
    a = Placement("card0", {0: (1,)}, (Range(1, 8192, 4096),), (1,), 1, (3,))
    assert violations([BANKED], {"a": a}, [3]) == []
    found = violations([BANKED], {"a": a, "b": placement}, [3])
    assert any(text in item for item in found), found


def test_cards_that_are_cut_once_are_skipped_with_a_reason() -> None:
    cards = [Card("one", 1, 4, 1 << 30), Card("two", 1, 4, 1 << 30)]
    size = Profile("p", 2, 1, 1 << 20, 1 << 24, 4, 64)
    answer = plan(cards, [], size, static={"one"})
    assert answer.placement is not None
    assert answer.placement.card == "two"
    fit = fits(cards, [], size, static={"one"})
    assert fit.count == 2
    assert fit.limit.startswith("one: it is cut into static functions; two: ")
    assert fits(cards, [], size, static={"one", "two"}).count == 0
    with pytest.raises(ConflictError) as caught:
        choose(cards, [], size, "one", static={"one"})
    assert caught.value.code == "card-enabled"
    assert caught.value.hint == "accelctl attach VM --card one"
