"""Who may switch what: one short test for each rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from accelvisor.errors import AccelvisorError, ConflictError, NotFoundError, PermissionDenied
from accelvisor.fabric.fabric import NOBODY, Fabric, Power
from accelvisor.fabric.former import NoRing, Ring, Torus
from accelvisor.fabric.grid import Grid
from accelvisor.fabric.links import TRAINING_CYCLES, ChipState, Link, LinkState


def code(call: Callable[[], object], kind: type[AccelvisorError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return caught.value.code


def row() -> Fabric:
    """Four chips in a row: 0 and 1 are Anna's, 2 is Ben's, 3 is free. Link n joins n and n + 1."""
    return Fabric(Grid(1, 1, 4), ["anna", "anna", "ben", NOBODY])


def up(fabric: Fabric, *numbers: int) -> None:
    for number in numbers:
        fabric.activate(number, fabric.link_owner(number) or NOBODY, 0)
    fabric.advance(TRAINING_CYCLES)


def test_a_link_is_activated_by_whoever_has_both_ends() -> None:
    fabric = row()
    for number, by in ((0, "ben"), (0, NOBODY), (1, "anna"), (1, "ben"), (2, "ben"), (2, NOBODY)):
        refused = code(lambda n=number, b=by: fabric.activate(n, b, 0), PermissionDenied)
        assert refused == "link-not-yours"
    up(fabric, 0)
    assert fabric.link(0).state is LinkState.UP
    assert code(lambda: fabric.deactivate(0, "ben", 0), PermissionDenied) == "link-not-yours"


def test_the_host_may_join_what_is_free() -> None:
    fabric = Fabric(Grid(1, 1, 2))
    fabric.activate(0, NOBODY, 0)
    assert fabric.link(0).state is LinkState.TRAINING


def test_a_disabled_chip_has_no_links() -> None:
    fabric = row()
    fabric.disable(1)
    assert code(lambda: fabric.activate(0, "anna", 0), ConflictError) == "chip-disabled"
    fabric.enable(1)
    up(fabric, 0)
    assert code(lambda: fabric.disable(1), ConflictError) == "link-busy"
    fabric.deactivate(0, "anna", 5000)
    fabric.disable(1)
    assert fabric.chip(1) is ChipState.DISABLED


def test_a_chip_does_not_change_hands_with_a_link() -> None:
    fabric = row()
    up(fabric, 0)
    fabric.link(0).send(1)
    fabric.deactivate(0, "anna", 5000)
    assert code(lambda: fabric.own(0, NOBODY), ConflictError) == "link-busy"  # it drains
    fabric.own(0, "anna")  # changes nothing
    fabric.link(0).deliver(1)
    fabric.link(0).release(5001)
    fabric.own(0, NOBODY)
    assert (fabric.owner(0), fabric.link_owner(0)) == (NOBODY, None)


def test_a_failed_link_is_cleared_by_its_owner() -> None:
    fabric = row()
    up(fabric, 0)
    fabric.link(0).send(1)
    assert fabric.fail(0) == (0, 1)
    assert code(lambda: fabric.activate(0, "anna", 0), ConflictError) == "link-failed"
    assert code(lambda: fabric.clear(0, "ben"), PermissionDenied) == "link-not-yours"
    assert code(lambda: fabric.own(0, NOBODY), ConflictError) == "link-busy"
    fabric.clear(0, "anna")
    assert code(lambda: fabric.clear(0, "anna"), ConflictError) == "link-out-of-turn"
    up(fabric, 0)


def test_chips_without_links_draw_little() -> None:
    fabric = row()
    up(fabric, 0)
    fabric.disable(2)
    assert [fabric.power(chip) for chip in range(4)] == [
        Power.FULL, Power.FULL, Power.OFF, Power.LOW,
    ]  # fmt: skip


def test_a_card_is_enabled_as_long_as_a_chip_is() -> None:
    fabric = Fabric(Grid(2, 1, 2))
    fabric.disable(0)
    assert fabric.card_enabled(0)
    fabric.pass_through(1)
    assert [fabric.card_enabled(board) for board in range(2)] == [False, True]


def test_groups_make_what_their_links_that_are_up_allow() -> None:
    fabric = Fabric(Grid(1, 2, 3), ["anna"] * 6)
    assert isinstance(fabric.formed("anna"), NoRing)
    up(fabric, *range(len(fabric.grid.links)))
    assert isinstance(fabric.formed("anna"), Torus)
    fabric.pass_through(4)
    ring = fabric.formed("anna")
    assert isinstance(ring, Ring)
    assert sorted(ring.chips) == [0, 1, 2, 3, 5]
    assert isinstance(fabric.formed("ben"), NoRing)


def test_what_is_not_there() -> None:
    fabric = row()
    for chip in (-1, 4):
        for call in (fabric.enable, fabric.disable, fabric.pass_through, fabric.power):
            assert code(lambda c=call, n=chip: c(n), NotFoundError) == "chip-not-found"
        assert code(lambda n=chip: fabric.own(n, "anna"), NotFoundError) == "chip-not-found"
    for number in (-1, 4):
        assert code(lambda n=number: fabric.activate(n, "anna", 0), NotFoundError) == (
            "link-not-found"
        )
    with pytest.raises(ValueError, match="4 links"):
        Fabric(Grid(1, 1, 4), links=[Link()])
