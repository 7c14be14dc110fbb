"""Migration states: the table against a search, walks, failing arcs, reset from everywhere."""

from __future__ import annotations

import errno
from collections import deque
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.vfio_user.migration import ARCS, NEXT_HOP, MigrationMachine, path
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import MigState

STATES = tuple(MigState)
PAIRS = tuple(product(STATES, STATES))

# Written down a second time, from the text of <linux/vfio.h> and not from the module.
LEGAL = {
    "RUNNING": "RUNNING_P2P PRE_COPY",
    "RUNNING_P2P": "RUNNING STOP PRE_COPY_P2P",
    "STOP": "RUNNING_P2P STOP_COPY RESUMING",
    "STOP_COPY": "STOP",
    "RESUMING": "STOP",
    "PRE_COPY": "RUNNING PRE_COPY_P2P",
    "PRE_COPY_P2P": "RUNNING_P2P PRE_COPY STOP_COPY",
    "ERROR": "",
}
SAVING = {"STOP_COPY", "PRE_COPY", "PRE_COPY_P2P"}


def search(start: MigState, target: MigState) -> list[list[str]]:
    """Every shortest path by breadth-first search, under the rules of the specification."""
    if MigState.ERROR in (start, target) or start is target:
        return []
    if start is MigState.STOP_COPY and target.name.startswith("PRE_COPY"):
        return []  # "explicitly not allowed"
    inside = start.name in SAVING and target.name in SAVING
    found: list[list[str]] = []
    queue = deque([[start.name]])
    while queue:
        steps = queue.popleft()
        if found and len(steps) >= len(found[0]):
            break
        for step in LEGAL[steps[-1]].split():
            if step == target.name:
                found.append([*steps, step])
            elif step not in steps and (inside or step not in SAVING):
                queue.append([*steps, step])
    return found


def test_arcs_are_those_of_the_kernel_header() -> None:
    assert {(a.name, b.name) for a, b in ARCS} == {
        (a, b) for a, bs in LEGAL.items() for b in bs.split()
    }


@pytest.mark.parametrize(("start", "target"), PAIRS)
def test_table_walks_the_shortest_legal_path(start: MigState, target: MigState) -> None:
    expected = search(start, target)
    assert len(expected) <= 1, "the rules leave no ties"
    if start is target and start is not MigState.ERROR:
        assert path(start, target) == ()
    elif expected:
        assert [s.name for s in path(start, target)] == expected[0][1:]
    else:
        with pytest.raises(Refusal) as refusal:
            path(start, target)
        assert refusal.value.errno == errno.EINVAL


def test_table_has_an_entry_for_every_pair() -> None:
    assert set(NEXT_HOP) == set(STATES)
    assert {len(row) for row in NEXT_HOP.values()} == {len(STATES)}


class Recorder:
    """Takes arcs; fails those it is told to."""

    def __init__(self, fail: set[tuple[MigState, MigState]], undo_fails: bool = False) -> None:
        self.fail = fail
        self.undo_fails = undo_fails
        self.arcs: list[tuple[MigState, MigState]] = []
        self.undone: list[tuple[MigState, MigState]] = []

    def arc(self, before: MigState, after: MigState) -> None:
        self.arcs.append((before, after))
        if (before, after) in self.fail:
            raise Refusal(errno.EBUSY, "this arc fails")

    def undo(self, before: MigState, after: MigState) -> None:
        self.undone.append((before, after))
        if self.undo_fails:
            raise RuntimeError("and cannot be undone")


def test_initial_state_is_running() -> None:
    assert MigrationMachine(lambda a, b: None).state is MigState.RUNNING


@pytest.mark.parametrize(("start", "target"), [p for p in PAIRS if search(*p)])
def test_request_performs_each_arc_of_the_path_once(start: MigState, target: MigState) -> None:
    recorder = Recorder(set())
    machine = MigrationMachine(recorder.arc, state=start)
    machine.request(target)
    assert machine.state is target
    walked = [start, *path(start, target)]
    assert recorder.arcs == list(pairwise(walked))
    assert all(arc in ARCS for arc in recorder.arcs)


@pytest.mark.parametrize(("start", "target"), [p for p in PAIRS if not search(*p) and p[0] != p[1]])
def test_illegal_request_leaves_the_state_untouched(start: MigState, target: MigState) -> None:
    recorder = Recorder(set())
    machine = MigrationMachine(recorder.arc, recorder.undo, state=start)
    with pytest.raises(Refusal):
        machine.request(target)
    assert machine.state is start
    assert not recorder.arcs


@pytest.mark.parametrize(("start", "target"), [p for p in PAIRS if search(*p)])
def test_failing_arc_leaves_the_state_before_it(start: MigState, target: MigState) -> None:
    walked = [start, *path(start, target)]
    for before, after in pairwise(walked):
        recorder = Recorder({(before, after)})
        machine = MigrationMachine(recorder.arc, recorder.undo, state=start)
        with pytest.raises(Refusal) as refusal:
            machine.request(target)
        assert refusal.value.errno == errno.EBUSY
        assert machine.state is before
        assert recorder.undone == [(after, before)]


@pytest.mark.parametrize("arc", sorted(ARCS))
def test_failing_rollback_is_an_error_that_only_reset_leaves(
    arc: tuple[MigState, MigState],
) -> None:
    recorder = Recorder({arc}, undo_fails=True)
    machine = MigrationMachine(recorder.arc, recorder.undo, state=arc[0])
    with pytest.raises(Refusal):
        machine.request(arc[1])
    assert machine.state == MigState.ERROR
    for target in STATES:
        with pytest.raises(Refusal):
            machine.request(target)
    machine.reset()
    assert machine.state.name == "RUNNING"


def test_arc_that_raises_a_bug_is_answered_with_eio() -> None:
    def arc(before: MigState, after: MigState) -> None:
        raise KeyError("a bug")

    machine = MigrationMachine(arc)
    with pytest.raises(Refusal) as refusal:
        machine.request(MigState.STOP)
    assert refusal.value.errno == errno.EIO
    assert machine.state is MigState.RUNNING


@pytest.mark.parametrize("state", STATES)
def test_reset_is_an_event_in_every_state(state: MigState) -> None:
    # nutanix/libvfio-user #853: a reset in pre-copy left client and server disagreeing.
    machine = MigrationMachine(lambda a, b: None, state=state)
    machine.reset()
    assert machine.state is MigState.RUNNING


def test_device_that_fails_by_itself_is_in_error() -> None:
    machine = MigrationMachine(lambda a, b: None)
    machine.fail()
    assert machine.state is MigState.ERROR


@given(st.lists(st.sampled_from(STATES), max_size=30))
def test_any_sequence_of_requests_stays_on_legal_arcs(targets: list[MigState]) -> None:
    recorder = Recorder(set())
    machine = MigrationMachine(recorder.arc)
    for target in targets:
        before = machine.state
        try:
            machine.request(target)
        except Refusal:
            assert machine.state is before
    assert all(arc in ARCS for arc in recorder.arcs)
    ends = [MigState.RUNNING, *(after for _, after in recorder.arcs)]
    assert [before for before, _ in recorder.arcs] == ends[:-1]
