"""What taking a checkpoint leaves of a function: beside a move, and when something goes wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from accelvisor.daemon.moving import capture
from accelvisor.daemon.moving.saving import DomainSaves
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, ConflictError, DeadlineError
from tests.daemon.moving.resting import DOMAIN, Host, computes, create, describe
from tests.function.harness import Process, call


def a_move_begins(here: Host, process: Process) -> None:
    """As its first round does."""
    here.functions.held.add(process.spec.uuid)
    call(process.spec.control_socket, "track", {"on": True})


def refuse_at(step: str, which: str) -> None:
    if step == which:
        raise ConflictError("full", code="checkpoint-space")


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


# --- a function that answers late -----------------------------------------------------------------

RUNNING, UNFENCED = ("migrate", {"to": "RUNNING"}), ("fence", {"on": False})
Order = tuple[str, dict[str, object]]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Order]:
    """Orders that are not answered in time, each once."""
    orders: list[Order] = []
    control = capture.Link.control

    def asked(link: capture.Link, method: str, **parameters: object) -> Any:
        if (method, parameters) in orders:
            orders.remove((method, parameters))
            raise DeadlineError("an overloaded host", code="function-deadline", where="function:x")
        return control(link, method, **parameters)

    monkeypatch.setattr(capture.Link, "control", asked)
    monkeypatch.setattr(capture, "PAUSES_S", (0.0, 0.0))
    return orders


@pytest.mark.parametrize("order", [RUNNING, UNFENCED])
def test_a_function_that_answers_late_goes_on(
    here: Host, one: tuple[Process, Function], late: list[Order], order: Order
) -> None:
    late += [order, order]
    create(here, one[1])
    assert not late
    assert computes(one[0])


@pytest.mark.parametrize("order", [RUNNING, UNFENCED])
@pytest.mark.parametrize("way", ["restart", "resume"])
def test_a_function_that_is_left_standing_is_told_of_and_goes_on_later(
    here: Host, one: tuple[Process, Function], late: list[Order], order: Order, way: str
) -> None:
    late += [order] * 3
    codes = []
    for _ in range(2):  # the second finds it standing, and forgets nothing
        with pytest.raises(AccelvisorError) as caught:
            create(here, one[1])
        codes.append(caught.value.code)
    assert codes == ["function-standing", "checkpoint-state"]
    assert here.kinds() == ["function-standing"]
    if way == "restart":
        here.restart()
        asyncio.run(here.points.recover())
    else:
        asyncio.run(DomainSaves(here.points, here.domain_state).resumed(DOMAIN))
    assert computes(one[0])
    assert here.numbers.begun() == []
