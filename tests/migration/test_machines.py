"""The tables by themselves: total, well-formed, and what single rows must be in any case.

How the rows work together is test_checker.py's business.
"""

from __future__ import annotations

import re
from itertools import product
from types import ModuleType
from typing import Any

import pytest

from accelvisor.migration import actions as do
from accelvisor.migration import destination, source
from accelvisor.migration.actions import Move, Refused
from accelvisor.vfio_user.migration import path
from accelvisor.vfio_user.protocol import MigState

BOTH = [pytest.param(source, id="source"), pytest.param(destination, id="destination")]
#: What waits for the disk: it tells somebody, or cannot be undone.
TELLING = (do.Send, do.Thaw, do.Scrub, do.Discard, do.AnswerHook, do.AnswerLoad)


def moves(machine: ModuleType) -> list[tuple[Any, Any, Move[Any]]]:
    return [
        (state, event, entry)
        for state, event in product(machine.State, machine.Event)
        if isinstance(entry := machine.answer(state, event), Move)
    ]


@pytest.mark.parametrize("machine", BOTH)
def test_every_state_answers_every_event(machine: ModuleType) -> None:
    assert set(machine.TABLE) == set(machine.State)
    for state in machine.State:
        assert set(machine.TABLE[state]) == set(machine.Event)
        for entry in machine.TABLE[state].values():
            assert isinstance(entry, Move | Refused)
            if isinstance(entry, Refused):
                assert re.fullmatch(r"migration(-[a-z]+)+", entry.code)
                assert entry.message


@pytest.mark.parametrize("machine", BOTH)
def test_what_is_told_is_journalled_before_in_the_same_move(machine: ModuleType) -> None:
    for state, event, entry in moves(machine):
        kinds = [type(action) for action in entry.actions]
        if do.Journal in kinds:
            first = min((kinds.index(kind) for kind in TELLING if kind in kinds), default=99)
            assert kinds.index(do.Journal) < first, (state, event)


@pytest.mark.parametrize("machine", BOTH)
def test_only_the_next_state_is_journalled_and_only_what_a_restart_knows(
    machine: ModuleType,
) -> None:
    written = set()
    for state, event, entry in moves(machine):
        journalled = [action.state for action in entry.actions if isinstance(action, do.Journal)]
        assert journalled in ([], [entry.next]), (state, event)
        written.update(journalled)
    assert written == machine.JOURNALLED
    for state in machine.State:
        for event in machine.Event:
            if event.name.startswith("RESTARTED"):
                known = isinstance(machine.answer(state, event), Move)
                assert known == (state in machine.JOURNALLED), (state, event)


@pytest.mark.parametrize("machine", BOTH)
def test_a_cancel_is_refused_from_the_point_of_no_return_on(machine: ModuleType) -> None:
    states = list(machine.State)
    handed = states.index(machine.POINT_OF_NO_RETURN)
    seen = machine.answer(machine.POINT_OF_NO_RETURN, machine.Event.CANCEL)
    assert isinstance(seen, Refused)
    assert seen.code == "migration-no-return"
    for state in states[1:handed]:
        assert isinstance(machine.answer(state, machine.Event.CANCEL), Move), state


@pytest.mark.parametrize(
    ("state", "yes"),
    [(s, s in (source.State.CONFIRMED, source.State.HANDED)) for s in source.State],
)
def test_qemu_gets_a_token_only_for_what_the_destination_verified(
    state: source.State, yes: bool
) -> None:
    entry = source.answer(state, source.Event.SAVE)
    assert isinstance(entry, Move)
    assert [a for a in entry.actions if isinstance(a, do.AnswerSave)] == [do.AnswerSave(yes)]


@pytest.mark.parametrize("machine", BOTH)
def test_qemu_is_always_answered(machine: ModuleType) -> None:
    """A call that waits in QEMU ends now, or the state it waits in answers when it is left."""
    waiting = {source.State.FREEZING, source.State.SHIPPING, source.State.SEALING,
               source.State.SEALED}  # fmt: skip
    answers = (do.AnswerOwners, do.AnswerLoad)
    events = {"QUIESCE", "LOAD", "BAD_LOAD"}
    for state, event, entry in moves(machine):
        answered = any(isinstance(action, answers) for action in entry.actions)
        if event.name in events and not answered:
            assert entry.next in waiting | {destination.State.LOADING}, (state, event)
        if state in waiting and entry.next not in waiting and not event.name.startswith("RESTART"):
            assert answered, (state, event)
        if state is destination.State.LOADING and entry.next is not state:
            assert answered or event is destination.Event.QEMU_RESUMED, (state, event)


@pytest.mark.parametrize("machine", BOTH)
def test_device_states_are_vfio_states_with_a_legal_way_between_them(machine: ModuleType) -> None:
    assert set(machine.DEVICE) == set(machine.State)
    for state, event, entry in moves(machine):
        here, there = machine.DEVICE[state], machine.DEVICE[entry.next]
        if here and there:
            path(MigState[here], MigState[there])  # raises when there is none
            if here == "RUNNING" and there != "RUNNING":
                assert there == "PRE_COPY" or event.name == "ARBITER_COMMITTED", (state, event)


def test_functions_of_one_vm_stop_and_start_through_the_peer_to_peer_states() -> None:
    for walk, start in ((do.FREEZE_WALK, "PRE_COPY"), (do.THAW_WALK, "STOP_COPY")):
        assert "P2P" in walk[0]
        at = MigState[start]
        steps = []
        for name in walk:
            steps += [step.name for step in path(at, MigState[name])]
            at = MigState[name]
        assert [name for name in steps if name not in ("STOP",)] == list(walk)


def test_a_slip_in_a_row_is_found() -> None:
    moves_of = {source.Event.RESERVE: Move(source.State.START)}
    with pytest.raises(ValueError, match="RESERVE"):
        do.row(moves_of, (do.ORDER, "RESERVE"))


def test_no_timer_of_an_attempt_outlives_it() -> None:
    """It would close the epoch that the next attempt uses."""
    asked = (source.State.ABORTING, source.State.COMMITTING)  # their only timer asks again
    for state, event, entry in moves(source):
        if entry.next is source.State.ABORTED and state not in (*asked, source.State.ABORTED):
            assert do.ClearDeadline() in entry.actions, (state, event)
            assert not any(isinstance(action, do.SetDeadline) for action in entry.actions)
