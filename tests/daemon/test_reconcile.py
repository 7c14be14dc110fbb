"""The plans, checked by what they must achieve rather than by their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.daemon.lifecycle import Event, State, move
from accelvisor.daemon.reconcile import Action, Change, Claim, at_start, follow
from accelvisor.daemon.store import Function
from accelvisor.hypervisor.port import Domain, DomainState
from accelvisor.isolation.resources import Placement


def function(uuid: str, state: State, domain: str | None = None) -> Function:
    return Function(
        uuid,
        uuid,
        "small",
        Placement("card0", {}),
        1,
        1,
        1,
        1,
        1,
        2,
        state,
        0.0,
        "",
        domain,
        domain,
    )


UUIDS = ["a", "b", "c"]


@given(
    st.dictionaries(st.sampled_from(UUIDS), st.sampled_from(list(State))),
    st.sets(st.sampled_from(UUIDS)),
    st.sets(st.sampled_from(UUIDS)),
    st.booleans(),
)
def test_every_trace_of_a_function_is_dealt_with_once(
    rows, running, directories, same_boot
) -> None:
    """P8: each orphan listed and resolved. Nothing known is forgotten, nothing is done twice."""
    functions = [function(uuid, state) for uuid, state in rows.items()]
    repairs = at_start(functions, running, directories, same_boot=same_boot)
    assert sorted(item.uuid for item in repairs) == sorted({*rows, *running, *directories})
    assert all(item.why for item in repairs)
    for repair in repairs:
        runs = repair.uuid in running
        match repair.action:
            case Action.ADOPT:
                assert runs
                assert rows[repair.uuid] not in (State.CREATING, State.DELETING)
            case Action.STOP_ORPHAN:
                assert runs
                assert repair.uuid not in rows
            case Action.SWEEP:
                assert not runs
                assert repair.uuid not in rows
            case Action.REMOVE:
                assert rows[repair.uuid] in (State.CREATING, State.DELETING)
            case Action.FAIL:
                assert not runs
                assert same_boot  # a domain of an earlier boot holds nothing
                assert rows[repair.uuid] is State.RUNNING
            case Action.RESTART:
                assert not runs


def apply(functions: Sequence[Function], domains: Sequence[Domain]) -> list[Function]:
    """Carry out what follow() asks for, as the keeper does, in two looks: what one domain gives up
    is free in the first and another's in the second."""
    done = list(functions)
    for _ in range(2):
        changes = {change.uuid: change for change in follow(done, domains).changes}
        done = [_changed(item, changes.get(item.uuid)) for item in done]
    return done


def _changed(item: Function, change: Change | None) -> Function:
    if change is None:
        return item
    event = change.event
    if event is Event.PROCESS_READY:
        item = item.with_state(move(item.state, event, ""))
        event = Event.RELEASED if change.domain is None else Event.TAKEN
    item = item.with_state(move(item.state, event, ""))
    return replace(item, domain=change.domain, domain_uuid=change.domain_uuid)


SUBSETS = st.lists(st.sampled_from(UUIDS), unique=True)
DOMAINS = st.lists(
    st.builds(
        lambda name, state, live, stored: Domain(name, name, state, True, 1, 1, live, stored),
        st.sampled_from(["x", "y"]),
        st.sampled_from(list(DomainState)),
        SUBSETS,
        SUBSETS,
    ),
    max_size=2,
    unique_by=lambda domain: domain.name,
)


@given(
    st.dictionaries(
        st.sampled_from(UUIDS),
        st.tuples(st.sampled_from(list(State)), st.sampled_from([None, "x", "gone"])),
    ),
    DOMAINS,
)
def test_after_a_look_functions_and_domains_agree(rows, domains) -> None:
    functions = [function(uuid, state, domain) for uuid, (state, domain) in rows.items()]
    after = apply(functions, domains)
    live = {uuid for item in domains if item.state.active for uuid in item.live_functions}
    # A domain that is just starting has them, and runs in a moment.
    starting = {
        uuid for item in domains if not item.state.active for uuid in item.live_functions
    }
    stored = {uuid for item in domains for uuid in item.persistent_functions} | starting
    for before, item in zip(functions, after, strict=True):
        if item.state is State.RUNNING:
            assert item.uuid in live
        if item.state is State.ATTACHED:
            assert item.uuid in stored
        if item.state in (State.ATTACHED, State.RUNNING):
            # Whoever has it keeps it as long as it names it.
            naming = {
                domain.uuid
                for domain in domains
                if item.uuid in (*domain.persistent_functions, *domain.live_functions)
            }
            assert item.domain_uuid in naming
            if before.domain_uuid in naming:
                assert item.domain_uuid == before.domain_uuid
        if item.state is State.READY:
            assert item.uuid not in live | stored
            assert item.domain is None
        if item.state in (State.CREATING, State.DELETING):
            assert item == before
        if item.state is State.FAILED:
            assert before.state is State.FAILED
            assert item.uuid in live or before.domain is None
    assert follow(after, domains).changes == []  # one more look finds nothing to do


def vm(name: str, *stored: str, live: Sequence[str] = (), known: bool = True) -> Domain:
    state = DomainState.RUNNING if live else DomainState.SHUTOFF
    return Domain(name, name, state, True, 1, 1, live, stored, functions_known=known)


@pytest.mark.parametrize("clone", ["a-clone", "z-clone"])
@pytest.mark.parametrize("live", [(), ("f",)])
def test_a_clone_does_not_take_the_function_of_its_original(
    clone: str, live: Sequence[str]
) -> None:
    """virt-clone copies the metadata. Whatever its name, and even if it came to run."""
    mine = function("f", State.ATTACHED, "m")
    view = follow([mine], [vm(clone, "f", live=live), vm("m", "f")])
    assert view.changes == []
    assert view.claims == [Claim("f", clone, clone)]


def test_a_newcomer_gets_only_what_is_ready() -> None:
    domains = [vm("x", "f")]
    for state in State:
        view = follow([function("f", state)], domains)
        adopted = [change.domain for change in view.changes if change.domain]
        assert adopted == (["x"] if state is State.READY else []), state


def test_of_two_newcomers_the_one_that_runs_gets_it() -> None:
    view = follow([function("f", State.READY)], [vm("a", "f"), vm("b", live=["f"])])
    assert [(item.domain, item.event) for item in view.changes] == [("b", Event.STARTED)]
    assert view.claims == [Claim("f", "a", "a")]


@pytest.mark.parametrize("state", [State.ATTACHED, State.RUNNING, State.FAILED])
def test_what_cannot_be_read_releases_nothing(state: State) -> None:
    view = follow([function("f", state, "odd")], [vm("odd", known=False), vm("x", "f")])
    assert view.changes == []
    assert view.unreadable == ["odd"]
    assert view.claims == [Claim("f", "x", "x")]
