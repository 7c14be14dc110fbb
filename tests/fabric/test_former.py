"""Rings and grids of rings, held against their plain definition and against trying everything."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.fabric.former import (
    NoRing,
    Reason,
    Ring,
    Torus,
    find_cycle,
    form,
    form_ring,
    joints_of,
)
from accelvisor.fabric.grid import Grid


def every(grid: Grid) -> range:
    return range(len(grid.links))


def check(grid: Grid, ring: Ring, chips: set[int], links: set[int], passing: set[int]) -> None:
    """What a ring is: each chip once, ways that lead on, no direction of a link twice."""
    assert sorted(ring.chips) == sorted(chips)
    if len(chips) == 1:
        assert ring.ways == ()
        return
    assert len(ring.ways) == len(ring.chips) == len(ring.hops)
    used: Counter[tuple[int, int]] = Counter()
    for i, way in enumerate(ring.ways):
        at = ring.chips[i]
        assert way
        for hop, number in enumerate(way):
            assert number in links
            assert at in grid.links[number].ends
            if hop:
                assert at in passing | chips
            used[number, at] += 1
            at = grid.links[number].other(at)
        assert at == ring.chips[(i + 1) % len(ring.chips)]
    assert max(used.values()) == 1


@pytest.mark.parametrize("size", [(1, 4, 4), (2, 2, 4), (1, 2, 2), (1, 3, 3), (2, 1, 5), (1, 2, 8)])
def test_whole_rows_and_columns_are_a_torus(size: tuple[int, int, int]) -> None:
    grid = Grid(*size)
    torus = form(grid, range(grid.chips), every(grid))
    assert isinstance(torus, Torus)
    links = set(every(grid))
    for ring in (*torus.rows, *torus.columns):
        check(grid, ring, set(ring.chips), links, set())
        assert set(ring.hops) == {1}
    assert [[ring.chips[r] for ring in torus.columns] for r in range(grid.lines)] == [
        list(ring.chips) for ring in torus.rows
    ]
    assert sorted(torus.chips) == list(range(grid.chips))


def test_a_row_alone_is_a_ring() -> None:
    grid = Grid(1, 3, 4)
    ring = form(grid, [4, 5, 6, 7], every(grid))
    assert isinstance(ring, Ring)
    check(grid, ring, {4, 5, 6, 7}, set(every(grid)), set())
    assert form(grid, [4, 5, 6], every(grid)) == NoRing(
        Reason.LEAF, "chip 4 has 1 of 2 links that it needs"
    )


@pytest.mark.parametrize("high", range(2, 7))
@pytest.mark.parametrize("wide", range(2, 7))
def test_every_rectangle_has_a_ring(high: int, wide: int) -> None:
    """Inside a larger grid, so that no row closes; odd ones have one hop that is doubled."""
    grid = Grid(1, 8, 8)
    chips = {(1 + r) * 8 + 1 + c for r in range(high) for c in range(wide)}
    ring = form_ring(grid, chips, every(grid))
    assert isinstance(ring, Ring)
    check(grid, ring, chips, set(every(grid)), set())
    doubled = [hops for hops in ring.hops if hops != 1]
    assert doubled == ([2] if high * wide % 2 else [])


def test_a_rectangle_over_the_edge() -> None:
    grid = Grid(1, 4, 4)
    ring = form_ring(grid, [3, 0, 7, 4, 11, 8], every(grid))  # columns 3 and 0
    assert isinstance(ring, Ring)
    check(grid, ring, {3, 0, 7, 4, 11, 8}, set(every(grid)), set())


def test_an_odd_grid_that_closes_needs_no_doubled_hop() -> None:
    grid = Grid(1, 3, 3)
    ring = form_ring(grid, range(9), every(grid))
    assert isinstance(ring, Ring)
    assert set(ring.hops) == {1}


def test_one_and_two_chips() -> None:
    grid = Grid(1, 1, 4)
    assert form(grid, [2], []) == Ring((2,), ())
    pair = form(grid, [2, 1], every(grid))
    assert pair == Ring((1, 2), ((1,), (1,)))
    missing = form(grid, [0, 2], every(grid))
    assert isinstance(missing, NoRing)
    assert missing.reason is Reason.SPLIT
    assert form(grid, [0, 2], every(grid), passing=[1]) == Ring((0, 2), ((0, 1), (1, 0)))


@pytest.mark.parametrize(
    ("chips", "reason"),
    [
        ([], Reason.EMPTY),
        ([0, 1, 2, 3, 16, 18], Reason.LEAF),
        ([0, 1, 8, 9, 18, 19, 26, 27], Reason.SPLIT),
        ([0, 1, 2, 8, 10, 16, 17, 18, 9], None),  # 3 x 3: a leaf with a doubled hop
        ([1, 2, 8, 9, 10, 16, 17, 18], None),  # without a corner of the majority
        ([0, 1, 2, 8, 9, 10, 16, 17, 18, 24, 25, 26, 11, 12, 3, 4, 5, 13, 20], Reason.LEAF),
        ([0, 1, 8, 9, 10, 11, 17, 18, 19, 2, 3], Reason.PARITY),
    ],
)
def test_why_there_is_no_ring(chips: list[int], reason: Reason | None) -> None:
    grid = Grid(1, 8, 8)
    found = form(grid, chips, every(grid))
    assert (found.reason if isinstance(found, NoRing) else None) is reason


def test_a_search_has_an_end() -> None:
    """Two blocks that hang together by one chip have no cycle, and many paths."""
    grid = Grid(1, 16, 16)
    block = [r * 16 + c for r in range(7) for c in range(7)]
    more = [(6 + r) * 16 + 6 + c for r in range(7) for c in range(7)]
    chips = sorted({*block, *more})
    found = find_cycle(joints_of(grid, every(grid)), chips, most=2000)
    assert isinstance(found, NoRing)
    assert found.reason in (Reason.LIMIT, Reason.PARITY)
    assert found.text


def cycles(grid: Grid, chips: set[int], links: set[int]) -> bool:
    """Whether there is a simple cycle, by trying every order."""
    joined = {frozenset(grid.links[n].ends) for n in links}
    first, *others = sorted(chips)
    return any(
        all(frozenset(pair) in joined for pair in pairwise((first, *order, first)))
        for order in permutations(others)
    )


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_ring_is_found_where_there_is_one(data: st.DataObject) -> None:
    grid = data.draw(st.sampled_from([Grid(1, 3, 3), Grid(2, 1, 4), Grid(1, 2, 4), Grid(1, 1, 7)]))
    chips = set(data.draw(st.sets(st.integers(0, grid.chips - 1), min_size=3, max_size=7)))
    missing = data.draw(st.sets(st.sampled_from(every(grid)), max_size=4))
    links = set(every(grid)) - missing
    found = form(grid, chips, links)
    if isinstance(found, Torus):
        for ring in (*found.rows, *found.columns):
            check(grid, ring, set(ring.chips), links, set())
        found = form_ring(grid, chips, links)
    if isinstance(found, NoRing):
        assert found.reason is not Reason.LIMIT
        assert not cycles(grid, chips, links)
    else:
        check(grid, found, chips, links, set())
        assert cycles(grid, chips, links)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rings_over_chips_that_pass(data: st.DataObject) -> None:
    grid = Grid(1, 3, 4)
    chips = set(data.draw(st.sets(st.integers(0, 11), min_size=2, max_size=6)))
    passing = set(data.draw(st.sets(st.integers(0, 11), max_size=5))) - chips
    found = form_ring(grid, chips, every(grid), passing)
    if isinstance(found, Ring):
        check(grid, found, chips, set(every(grid)), passing)
        between = [
            grid.links[n].ends for way in found.ways if len(way) > 1 for n in way
        ]
        assert {c for ends in between for c in ends} <= chips | passing
    elif len(chips) > 2:  # then there is none that leads over any of them either
        for extra in permutations(sorted(passing)):
            for count in range(len(extra) + 1):
                if len(chips) + count <= 6:
                    assert not cycles(grid, chips | set(extra[:count]), set(every(grid)))


@pytest.mark.parametrize(("chips", "links"), [([9], []), ([-1], []), ([0], [12]), ([0], [-1])])
def test_chips_and_links_that_are_not_there(chips: list[int], links: list[int]) -> None:
    with pytest.raises(IndexError):
        form(Grid(1, 2, 3), chips, links)
    with pytest.raises(IndexError):
        form_ring(Grid(1, 2, 3), chips, links)
