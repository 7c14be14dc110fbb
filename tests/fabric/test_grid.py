"""Numbers of chips and links, against a plain derivation from places and against isolation's."""

from __future__ import annotations

from itertools import product

import pytest

from accelvisor.fabric.grid import INTER_CARD, INTER_CHIP, Axis, Grid, LinkKind, Port
from accelvisor.isolation.resources import Card

SIZES = [*product((1, 2, 3), (1, 2, 3), (1, 2, 3, 4)), (1, 1, 16), (2, 4, 8)]


@pytest.mark.parametrize("size", SIZES)
def test_a_chip_is_where_its_number_says(size: tuple[int, int, int]) -> None:
    grid = Grid(*size)
    places = list(product(*map(range, size)))
    assert [grid.place(chip) for chip in range(grid.chips)] == places
    assert [grid.chip(*place) for place in places] == list(range(grid.chips))


@pytest.mark.parametrize("size", SIZES)
def test_links_are_where_places_are_next_to_each_other(size: tuple[int, int, int]) -> None:
    grid = Grid(*size)
    high, wide = grid.lines, grid.columns
    wanted = set()
    for a, b in product(range(grid.chips), repeat=2):
        (line_a, at_a), (line_b, at_b) = divmod(a, wide), divmod(b, wide)
        beside = line_a == line_b and (at_b - at_a) % wide == 1
        below = at_a == at_b and (line_b - line_a) % high == 1
        if beside or below:
            wanted.add(frozenset((a, b)))
    found = [frozenset(link.ends) for link in grid.links]
    assert len(found) == len(set(found))  # a pair of chips has one link
    assert set(found) == wanted


@pytest.mark.parametrize("size", SIZES)
def test_links_have_the_numbers_that_the_isolation_room_gives_them(
    size: tuple[int, int, int],
) -> None:
    grid = Grid(*size)
    card = Card("c", grid.chips, 1, 0, boards=grid.boards, rows=grid.rows)
    assert [link.ends for link in grid.links] == list(card.links)
    assert [link.number for link in grid.links] == list(range(len(card.links)))
    assert [link.kind.value for link in grid.links] == [
        card.kind(number) for number in range(len(card.links))
    ]


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_of_each_row_and_column(size: tuple[int, int, int]) -> None:
    grid = Grid(*size)
    for axis, rings, length in (
        (Axis.ROW, grid.lines, grid.columns),
        (Axis.COLUMN, grid.columns, grid.lines),
    ):
        for ring in range(rings):
            links = [k for k in grid.links if (k.axis, k.ring) == (axis, ring)]
            assert len(links) == {1: 0, 2: 1}.get(length, length)


@pytest.mark.parametrize("size", SIZES)
def test_ports_of_neighbours_face_each_other(size: tuple[int, int, int]) -> None:
    grid = Grid(*size)
    facing = {Port.EAST: Port.WEST, Port.SOUTH: Port.NORTH}
    facing |= {there: here for here, there in facing.items()}
    for chip in range(grid.chips):
        assert len(grid.ports(chip)) <= 4
        for port, link in grid.ports(chip).items():
            assert grid.ports(link.other(chip))[facing[port]] is link
            assert grid.neighbours(chip)[link.other(chip)] == link.number


def test_cables_join_boards() -> None:
    grid = Grid(2, 2, 3)
    cables = [link for link in grid.links if link.kind is LinkKind.INTER_CARD]
    assert all(link.axis is Axis.COLUMN for link in cables)
    assert len(cables) == 2 * 3  # each column: down to the second board, and back to the first


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="0 x 1 x 1"):
        Grid(0, 1, 1)
    grid = Grid(1, 2, 2)
    for chip in (-1, 4):
        with pytest.raises(IndexError):
            grid.ports(chip)
        with pytest.raises(IndexError):
            grid.place(chip)
    with pytest.raises(IndexError):
        grid.chip(0, 2, 0)


def test_a_window_fills_the_wires() -> None:
    """Until the first credit is back: the flit, its way, the credit's way."""
    for wire in (INTER_CHIP, INTER_CARD):
        flit = 256 // wire.bytes_per_cycle
        assert 8 * flit == flit + 2 * wire.latency
