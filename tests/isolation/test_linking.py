"""Chips that links join: the searches against every choice tried, and shapes of moved functions."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.fabric import former
from accelvisor.isolation import linking
from accelvisor.isolation.linking import Room
from accelvisor.isolation.resources import Card, Placement
from accelvisor.limits import MIB


def card(boards: int, rows: int, columns: int) -> Card:
    return Card("c", boards * rows * columns, 4, MIB, boards=boards, rows=rows)


def room(item: Card, *, each: int = 4, gone: frozenset[int] = frozenset()) -> Room:
    links = frozenset(range(len(item.links))) - gone
    return Room(item, dict.fromkeys(range(item.chips), each), each == 4, links)


def joined(item: Card, links: frozenset[int] | set[int]) -> set[frozenset[int]]:
    return {frozenset(item.links[number]) for number in links}


@st.composite
def rooms(draw: st.DrawFn) -> Room:
    """Small enough to try everything: up to nine chips, some without room, some links taken."""
    grid = draw(st.sampled_from([(1, 1, 3), (1, 1, 6), (1, 2, 3), (2, 1, 4), (3, 1, 3), (1, 3, 2)]))
    item = card(*grid)
    chips = draw(st.sets(st.integers(0, item.chips - 1)))
    links = draw(st.sets(st.integers(0, len(item.links) - 1)))
    free = {chip: draw(st.integers(1, 4)) for chip in sorted(chips)}
    return Room(item, free, draw(st.booleans()), frozenset(links))


@settings(deadline=None)
@given(rooms(), st.integers(2, 6))
def test_a_ring_is_found_exactly_where_some_order_of_some_chips_is_one(place, count) -> None:
    ends = joined(place.card, place.links)

    def closed(order: tuple[int, ...]) -> bool:
        pairs = list(zip(order, order[1:] + order[:1], strict=True))[: 1 if count == 2 else count]
        return all(frozenset(pair) in ends for pair in pairs)

    there = any(
        closed((chips[0], *rest))
        for chips in combinations(sorted(place.able), count)
        if count < 6 or len(place.links) >= 6  # else tried for nothing
        for rest in permutations(chips[1:])
    )
    found = linking.ring(place, count)
    assert (found is not None) == there
    if found is not None:
        assert len(set(found.chips)) == count
        assert set(found.chips) <= set(place.able)
        assert set(found.links) <= place.links
        mine = joined(place.card, set(found.links))
        assert all(pair <= set(found.chips) for pair in mine)
        degree = [sum(chip in pair for pair in mine) for chip in found.chips]
        assert min(degree) >= (1 if count == 2 else 2)
        if not place.whole:
            assert len(found.links) == (1 if count == 2 else count), "no more than the ring"


@given(rooms(), st.integers(2, 6))
def test_chips_hang_together_exactly_where_some_can(place, count) -> None:
    ends = joined(place.card, place.links)

    def together(chips: tuple[int, ...]) -> bool:
        seen = {chips[0]}
        while more := {c for c in chips if c not in seen and any({c, s} in ends for s in seen)}:
            seen |= more
        return len(seen) == count

    there = any(map(together, combinations(sorted(place.able), count)))
    found = linking.connected(place, count)
    assert (found is not None) == there
    if found is not None:
        assert together(tuple(found.chips))


def test_a_block_is_preferred_to_a_snake_and_has_all_its_links_when_it_is_its_own() -> None:
    grid = card(1, 4, 4)
    found = linking.ring(room(grid), 8)
    assert found is not None
    assert found.chips == (0, 1, 2, 3, 7, 6, 5, 4), "in the order of the ring"
    assert len(found.links) == 12, "two rings of four, and four links between them"
    shared = linking.ring(Room(grid, dict.fromkeys(range(16), 2), False, room(grid).links), 8)
    assert shared is not None
    assert len(shared.links) == 8, "others may want the rest"


def test_the_fullest_chips_are_taken() -> None:
    grid = card(1, 2, 4)
    free = dict.fromkeys(range(8), 4) | {2: 1, 3: 1, 6: 1, 7: 1}
    found = linking.ring(Room(grid, free, False, room(grid).links), 4)
    assert found is not None
    assert found.chips == (2, 3, 7, 6)


def test_a_ring_spans_boards() -> None:
    found = linking.ring(room(card(3, 1, 1)), 3)
    assert found is not None
    assert found.chips == (0, 1, 2)
    assert linking.ring(room(card(2, 2, 4)), 16) is not None


@pytest.mark.parametrize(("boards", "rows", "columns"), [(1, 4, 4), (4, 8, 8), (1, 1, 256)])
@pytest.mark.parametrize("count", [3, 5, 16])
def test_a_search_has_an_end_on_the_largest_cards(boards, rows, columns, count) -> None:
    """Where it finds a ring and where there cannot be one: what it may spend is bounded."""
    found = linking.ring(room(card(boards, rows, columns)), count)
    assert (found is not None) == (count == 16 and rows > 1)


def test_links_over_chips_that_let_pass_are_one_way() -> None:
    row = replace(card(1, 1, 5), passing=frozenset({1, 2}))
    place = Room(row, {0: 4, 3: 4, 4: 4}, True, frozenset(range(5)))
    assert place.ways[0] == {4: ((4,), ()), 3: ((0, 1, 2), (1, 2))}
    found = linking.ring(place, 3)
    assert found is not None
    assert (found.chips, found.links) == ((0, 3, 4), (0, 1, 2, 3, 4))


def test_a_function_is_told_of_its_links_in_its_own_numbers() -> None:
    row = replace(card(1, 1, 5), passing=frozenset({1, 2}))
    place = Placement("c", {4: (0,), 3: (0,), 0: (0,)}, links=(0, 1, 2, 3, 4))
    told = linking.laid(row, place)
    assert sorted(told) == [(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 0, 1), (4, 0, 2)]
    assert [number for number, one, other in told if (one, other) == (1, 2)] == [2, 1, 0]
    assert linking.laid(row, replace(place, links=(0, 2, 99))) == [], "they lead nowhere"
    assert linking.laid(row, replace(place, links=())) == []


@settings(deadline=None)
@given(rooms(), st.integers(2, 6))
def test_what_is_told_has_the_ring_that_was_chosen(place, count) -> None:
    some = frozenset(set(range(place.card.chips)) - set(place.able))
    place = Room(replace(place.card, passing=some), place.free, place.whole, place.links)
    found = linking.ring(place, count)
    if found is None:
        return
    told = linking.laid(place.card, Placement("c", dict.fromkeys(found.chips, (0,)), (),
                                              links=found.links))  # fmt: skip
    assert sorted(number for number, _, _ in told) == sorted(found.links)
    pairs = {frozenset((one, other)) for _, one, other in told}
    assert any(
        all(frozenset(pair) in pairs for pair in zip((0, *rest), (*rest, 0), strict=True))
        for rest in permutations(range(1, count))
    )


def test_two_ways_over_the_same_link_make_no_ring() -> None:
    """0 and 2 hang on 1, which lets pass, by one link each: there is no way around."""
    row = replace(card(1, 1, 4), passing=frozenset({1}))
    place = Room(row, {0: 4, 2: 4, 3: 4}, True, frozenset({0, 1}))
    assert linking.ring(place, 3) is None


# --- functions that were elsewhere ----------------------------------------------------------------


@settings(deadline=None)
@given(
    st.sampled_from([((1, 2, 2), 4), ((1, 1, 4), 4), ((2, 1, 3), 6), ((1, 2, 3), 6)]),
    st.sampled_from([(1, 1, 4), (1, 2, 2), (2, 2, 2), (1, 2, 4), (2, 1, 4)]),
)
def test_a_function_that_comes_finds_the_links_that_its_programs_name(source, target) -> None:
    grid, count = source
    here, there = card(*grid), room(card(*target))
    old = linking.ring(room(here), count)
    assert old is not None
    at = {chip: place for place, chip in enumerate(old.chips)}
    shape = [(at[one], at[other]) for one, other in (here.links[n] for n in old.links)]
    ends = joined(there.card, there.links)
    possible = any(
        all(frozenset((order[a], order[b])) in ends for a, b in shape)
        for order in permutations(range(there.card.chips), count)
    ) if there.card.chips >= count else False
    found = linking.shaped(there, count, shape) if there.card.chips >= count else None
    assert (found is not None) == possible
    if found is not None:
        assert all(frozenset((found.chips[a], found.chips[b])) in ends for a, b in shape)


def test_a_shape_that_names_no_chip_of_the_function_is_nowhere() -> None:
    for shape in ([(0, 4)], [(-1, 0)], [(1, 1)]):
        assert linking.shaped(room(card(1, 2, 2)), 4, shape) is None


def test_each_pair_of_a_placement_is_linked_as_the_shape_says() -> None:
    """A square whose chips 0 and 1, 2 and 3, 0 and 2, 1 and 3 are linked, laid into a row."""
    square = [(0, 1), (2, 3), (0, 2), (1, 3)]
    found = linking.shaped(room(card(1, 1, 4)), 4, square)
    assert found is not None
    near = {frozenset(pair) for pair in ((0, 1), (1, 2), (2, 3), (3, 0))}
    assert {frozenset((found.chips[a], found.chips[b])) for a, b in square} == near


@settings(deadline=None)
@given(rooms(), st.integers(3, 6))
def test_the_fabrics_group_former_makes_a_ring_of_what_was_chosen(place, count) -> None:
    """Two searches for two questions: which chips to take, and what given chips make."""
    found = linking.ring(place, count)
    if found is not None:
        made = former.form_ring(place.card.grid, found.chips, found.links, place.card.passing)
        assert isinstance(made, former.Ring), made
        assert set(made.chips) == set(found.chips)
        assert set(made.links) <= set(found.links)
