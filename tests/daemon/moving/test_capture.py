"""What taking a checkpoint leaves of a function: beside a move, and when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelvisor.daemon.store import Function
from accelvisor.errors import ConflictError
from accelvisor.frames.store import Entry
from tests.daemon.moving.resting import Host, describe, function, host
from tests.function.harness import Process, call


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path / "here") as made:
        yield made


@pytest.fixture
def one(here: Host) -> Iterator[tuple[Process, Function]]:
    with function(here) as made:
        yield made


def create(here: Host, found: Function, **options: Any) -> Entry:
    return asyncio.run(here.points.create(found.uuid, **options))


def a_move_begins(here: Host, process: Process) -> None:
    """As its first round does."""
    here.functions.held.add(process.spec.uuid)
    call(process.spec.control_socket, "track", {"on": True})


@pytest.mark.parametrize("chain", [False, True])
def test_one_that_a_move_refuses_does_not_end_what_the_move_follows(
    here: Host, one: tuple[Process, Function], chain: bool
) -> None:
    process, found = one
    parent = create(here, found, follow=True).digest if chain else None
    a_move_begins(here, process)
    with pytest.raises(ConflictError) as caught:
        create(here, found, parent=parent)
    assert caught.value.code == "function-moving"
    assert describe(process).tracking
    assert not here.points.followed, "the move takes the marks"


@pytest.mark.parametrize("fails", [False, True])
def test_a_move_that_begins_while_one_is_written_goes_on_being_followed(
    here: Host, one: tuple[Process, Function], fails: bool
) -> None:
    process, found = one

    def step(name: str) -> None:
        if name == "checkpoint:written":
            a_move_begins(here, process)
            if fails:
                refuse_at(name, name)

    here.on_step = step
    if fails:
        with pytest.raises(ConflictError):
            create(here, found, follow=True)
    else:
        create(here, found)
    assert describe(process).tracking


def test_one_that_cannot_be_written_is_not_followed(
    here: Host, one: tuple[Process, Function]
) -> None:
    here.on_step = lambda step: refuse_at(step, "checkpoint:written")
    with pytest.raises(ConflictError):
        create(here, one[1], follow=True)
    assert not describe(one[0]).tracking
    assert not here.points.followed


def refuse_at(step: str, which: str) -> None:
    if step == which:
        raise ConflictError("full", code="checkpoint-space")
