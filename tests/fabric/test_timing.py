"""Cycles of collectives, against the formula, against bounds, and against flits one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.errors import UsageError
from accelvisor.fabric.fabric import Fabric
from accelvisor.fabric.former import Ring, Torus, form, form_ring
from accelvisor.fabric.grid import CCIX, INTER_CARD, INTER_CHIP, WIRES, Grid, LinkKind, Wire
from accelvisor.fabric.links import TRAINING_CYCLES
from accelvisor.fabric.timing import message_cycles, ring_all_reduce, torus_all_reduce
from accelvisor.fabric.traffic import Traffic

KIB = 1024


def ring_of(grid: Grid) -> Ring:
    ring = form_ring(grid, range(grid.chips), range(len(grid.links)))
    assert isinstance(ring, Ring)
    return ring


def torus_of(grid: Grid) -> Torus:
    torus = form(grid, range(grid.chips), range(len(grid.links)))
    assert isinstance(torus, Torus)
    return torus


GRIDS = st.builds(Grid, st.integers(1, 2), st.integers(1, 3), st.integers(2, 5)).filter(
    lambda grid: grid.lines > 1
)


def test_rows_and_columns_beat_one_ring_where_latency_counts() -> None:
    grid = Grid(1, 4, 4)
    one = ring_all_reduce(grid, ring_of(grid), KIB)
    two = torus_all_reduce(grid, torus_of(grid), KIB)
    assert (one.steps, two.steps) == (30, 12)
    assert one.bytes_per_chip == two.bytes_per_chip == 2 * KIB * 15 // 16
    assert one.cycles >= 2.2 * two.cycles


@given(GRIDS, st.integers(1, 40))
def test_both_send_the_same_bytes_from_each_chip(grid: Grid, each: int) -> None:
    nbytes = each * grid.chips
    one = ring_all_reduce(grid, ring_of(grid), nbytes)
    two = torus_all_reduce(grid, torus_of(grid), nbytes)
    wanted = 2 * nbytes * (grid.chips - 1) // grid.chips
    assert one.sent == two.sent == dict.fromkeys(range(grid.chips), wanted)
    assert one.steps == 2 * (grid.chips - 1)
    assert two.steps == 2 * (grid.columns - 1) + 2 * (grid.lines - 1)


@settings(deadline=None)
@given(GRIDS, st.integers(0, 30_000))
def test_nothing_is_faster_than_its_links(grid: Grid, nbytes: int) -> None:
    for timing in (
        ring_all_reduce(grid, ring_of(grid), nbytes),
        torus_all_reduce(grid, torus_of(grid), nbytes),
    ):
        assert timing.cycles >= timing.floor
        assert timing.cycles >= timing.steps * INTER_CHIP.latency
        assert timing.cycles * INTER_CHIP.bytes_per_cycle >= timing.bytes_per_chip
        assert 0 <= timing.bytes_per_chip - 2 * nbytes * (grid.chips - 1) / grid.chips < grid.chips


@settings(deadline=None)
@given(
    st.sampled_from([INTER_CHIP, INTER_CARD, CCIX, Wire(1, 1), Wire(500, 300), Wire(0, 7)]),
    st.integers(3, 8), st.integers(0, 6000),
)  # fmt: skip
def test_a_ring_of_equal_links_takes_what_the_formula_says(
    wire: Wire, count: int, block: int
) -> None:
    """Where the credits are back when the next message leaves; else it takes longer."""
    grid = Grid(1, 1, count)
    wires = dict.fromkeys(LinkKind, wire)
    took = ring_all_reduce(grid, ring_of(grid), block * count, wires).cycles
    wanted = 2 * (count - 1) * message_cycles(wire, block)
    full = -(-256 // wire.bytes_per_cycle)
    if block <= 4 * 256 or 8 * full >= full + 2 * wire.latency:
        assert took == wanted
    assert wanted <= took <= wanted + 2 * count * 2 * wire.latency


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20_000), st.sampled_from([0, 1]))
def test_a_message_takes_as_long_as_its_flits_one_by_one(nbytes: int, kind: int) -> None:
    """``traffic`` moves real flits in a loop over cycles; it begins in the cycle after this one."""
    grid = Grid(1, 1, 2) if kind == 0 else Grid(2, 1, 1)
    traffic = Traffic(Fabric(grid))
    traffic.fabric.activate(0, "", 0)
    traffic.run(TRAINING_CYCLES)
    transfer = traffic.begin(0, 0, "", bytes(nbytes))
    start = traffic.now + 1
    while not transfer.complete:
        traffic.run(1)
    assert traffic.now - start == message_cycles(WIRES[grid.links[0].kind], nbytes)


@given(st.integers(0, 5000))
def test_two_chips_use_both_directions_at_once(nbytes: int) -> None:
    grid = Grid(1, 1, 2)
    took = ring_all_reduce(grid, ring_of(grid), 2 * nbytes)
    assert took.cycles == 2 * message_cycles(INTER_CHIP, nbytes)


def test_one_chip_has_nothing_to_do() -> None:
    took = ring_all_reduce(Grid(1, 1, 1), Ring((0,), ()), KIB)
    assert (took.cycles, took.steps, took.bytes_per_chip) == (0, 0, 0)


def test_a_leaf_makes_a_ring_longer_but_by_one_hop_each_step() -> None:
    grid = Grid(1, 5, 5)
    chips = [r * 5 + c for r in range(3) for c in range(3)]
    ring = form_ring(grid, chips, range(len(grid.links)))
    assert isinstance(ring, Ring)
    assert max(ring.hops) == 2
    took = ring_all_reduce(grid, ring, 9 * 256)
    step = message_cycles(INTER_CHIP, 256)
    assert 16 * step < took.cycles <= 16 * 2 * step


def test_cables_are_what_slows_a_ring() -> None:
    one, two = Grid(1, 4, 2), Grid(2, 2, 2)
    assert (
        ring_all_reduce(one, ring_of(one), KIB).cycles
        < ring_all_reduce(two, ring_of(two), KIB).cycles
    )


def test_fewer_than_no_bytes() -> None:
    with pytest.raises(UsageError):
        ring_all_reduce(Grid(1, 1, 2), Ring((0, 1), ((0,), (0,))), -1)
