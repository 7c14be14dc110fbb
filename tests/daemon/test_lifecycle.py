"""The life table, derived another way: as reachability and as rules about groups of states."""

from __future__ import annotations

from itertools import product

import pytest

from accelvisor.daemon.lifecycle import TABLE, Event, Refused, State, move
from accelvisor.errors import ConflictError


def reachable(start: State, without: frozenset[State] = frozenset()) -> set[State]:
    """Breadth-first search over the moves."""
    seen, edge = {start}, [start]
    while edge:
        state = edge.pop()
        for event in Event:
            target = TABLE[state, event]
            if isinstance(target, State) and target not in seen | without:
                seen.add(target)
                edge.append(target)
    return seen


def test_every_pair_is_a_move_or_a_named_refusal() -> None:
    assert set(TABLE) == set(product(State, Event))
    for answer in TABLE.values():
        assert isinstance(answer, State) or (answer.code and answer.message)


def test_everything_can_be_reached_and_everything_can_end() -> None:
    assert reachable(State.CREATING) == set(State)
    for state in State:
        assert State.DELETING in reachable(state)


def test_deleting_is_final_and_creating_never_comes_back() -> None:
    assert reachable(State.DELETING) == {State.DELETING}
    for state in set(State) - {State.CREATING}:
        assert State.CREATING not in reachable(state)


def test_no_domain_gets_what_has_no_process() -> None:
    """From failed, a domain's states are reached only through ready: a new process comes first."""
    assert reachable(State.FAILED, frozenset({State.READY})) == {State.FAILED, State.DELETING}
    for state in (State.CREATING, State.FAILED, State.DELETING):
        for event in (Event.TAKEN, Event.STARTED):
            assert isinstance(TABLE[state, event], Refused)


def test_what_a_domain_has_is_not_deleted() -> None:
    for state in (State.ATTACHED, State.RUNNING):
        assert isinstance(TABLE[state, Event.DELETE], Refused)
        assert TABLE[TABLE[state, Event.RELEASED], Event.DELETE] is State.DELETING


def test_looking_twice_changes_nothing() -> None:
    """Events say what is, so the second one of a kind must not move: follow() may repeat itself."""
    for state, event in product(State, Event):
        target = TABLE[state, event]
        if isinstance(target, State) and event is not Event.RESET:
            again = TABLE[target, event]
            assert again is target or isinstance(again, Refused), (state, event)


def test_a_refusal_is_an_error_with_its_code() -> None:
    with pytest.raises(ConflictError) as caught:
        move(State.RUNNING, Event.DELETE, "mine")
    assert caught.value.code == "function-in-use"
    assert "mine" in caught.value.message
    assert caught.value.hint
