"""Both machines in a hostile world, every reachable state of it; and the checker against bugs.

The promises: one computes, and none after the other; the source comes back by itself as long as
nothing was committed; what was committed runs at the destination once the network is there; nobody
waits for ever; nothing is told before it is on disk. tests/migration/model.py says what can happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from accelvisor.migration import actions as do
from accelvisor.migration import destination, source
from accelvisor.migration.actions import Move
from tests.migration.model import (
    D_INDEX,
    DE,
    S_INDEX,
    SE,
    D,
    Node,
    S,
    World,
)
from tests.migration.search import Graph, Violation, explore

ENDS_S = {S_INDEX[state] for state in (S.START, S.DONE, S.RETURNED, S.REFUSED)}
ENDS_D = {D_INDEX[state] for state in (D.START, D.RUNNING, D.CLOSED, D.FENCED)}


def s_computes(node: Node) -> bool:
    return node.s_device in ("run", "back")


def d_computes(node: Node) -> bool:
    return node.d_device == "run"


def live(graph: Graph) -> None:
    """What must stay possible, from every state."""

    def always(can: bytearray, wanted: Any, promise: str) -> None:
        for number, node in enumerate(graph.nodes):
            if wanted(node) and not can[number]:
                raise Violation(f"{promise}\n{graph.shown(number)}")

    # "any" is a QEMU that can change nothing any more: the device must not wait for it either.
    alone = graph.can_reach(s_computes, ("s",))
    always(
        alone,
        lambda node: node.qs in ("back", "any") and node.ledger != "committed",
        "the source's VM runs again, and its function cannot without destination and network",
    )
    together = ("s", "d", "net", "any")
    moved = graph.can_reach(d_computes, together)
    always(
        moved,
        lambda node: node.ledger == "committed" and node.qd != "gone",
        "committed, and it cannot run at the destination",
    )
    ended = graph.can_reach(
        lambda node: node.s in ENDS_S and node.d in ENDS_D, (*together, "qemu")
    )
    always(ended, lambda node: True, "a migration that cannot end")


def check(world: World) -> Graph:
    graph = explore(world)
    live(graph)
    return graph


@pytest.mark.parametrize("etcd", [False, True], ids=["source's ledger", "etcd"])
def test_every_reachable_state_keeps_the_promises(etcd: bool) -> None:
    graph = check(World(etcd))
    # The world is large enough to be worth the name, and both ends happen in it.
    assert len(graph.nodes) > 10_000
    assert any(map(d_computes, graph.nodes))
    assert any(node.s_device == "back" for node in graph.nodes)
    for states, index, column in ((S, S_INDEX, 0), (D, D_INDEX, 5)):
        reached = {node[column] for node in graph.nodes}
        assert {state for state in states if index[state] not in reached} == set()


# --- deliberate bugs -----------------------------------------------------------------------------


def patched(table: Mapping[Any, Any], changes: Mapping[tuple[Any, Any], Any]) -> dict[Any, Any]:
    made = {state: dict(row) for state, row in table.items()}
    for (state, event), entry in changes.items():
        assert made[state][event] != entry, "no change"
        made[state][event] = entry
    return made


def without(entry: Move[Any], *kinds: type) -> Move[Any]:
    return Move(entry.next, tuple(a for a in entry.actions if not isinstance(a, kinds)))


def last(entry: Move[Any], kind: type) -> Move[Any]:
    """The same actions, those of one kind moved to the end."""
    late = tuple(a for a in entry.actions if isinstance(a, kind))
    return Move(entry.next, without(entry, kind).actions + late)


def s_entry(state: S, event: SE) -> Move[Any]:
    entry = source.TABLE[state][event]
    assert isinstance(entry, Move)
    return entry


def d_entry(state: D, event: DE) -> Move[Any]:
    entry = destination.TABLE[state][event]
    assert isinstance(entry, Move)
    return entry


S_BUGS: dict[str, tuple[dict[tuple[S, SE], Any], World | None, str]] = {
    "thaws before the journal": (
        {(S.ABORTING, SE.ARBITER_ABORTED): last(
            s_entry(S.ABORTING, SE.ARBITER_ABORTED), do.Journal)},
        None,
        "source thaws before it is on its disk",
    ),
    "thaws without asking": (
        {(S.HANDED, SE.QEMU_RESUMED): Move(S.ABORTED, (do.Journal(S.ABORTED), do.Thaw()))},
        None,
        "thaws a sealed state undecided",
    ),
    "sends the seal before the journal": (
        {(S.SEALING, SE.SEALED): last(s_entry(S.SEALING, SE.SEALED), do.Journal)},
        None,
        "a seal before the journal",
    ),
    "lets QEMU go on before the other side verified": (
        {(S.SEALED, SE.QUIESCE): Move(S.CONFIRMED, (do.AnswerOwners(True),)),
         (S.SEALED, SE.LINK_LOST): Move(S.CONFIRMED, (do.AnswerOwners(True),))},
        None,
        "before it was verified",
    ),
    "answers Committed after an abort": (
        {(S.ABORTED, SE.COMMIT): s_entry(S.COMMITTED, SE.COMMIT)},
        None,
        "Committed before the journal",
    ),
    "thaws when its daemon starts again": (
        {(S.SEALED, SE.RESTARTED_PAUSED): s_entry(S.OFFERED, SE.RESTARTED_PAUSED)},
        World(etcd=False, mortal="s"),
        "thaws a sealed state undecided",
    ),
    "asks the arbiter only once": (
        {(S.ABORTING, SE.DEADLINE): Move(S.ABORTING)},
        World(etcd=True, mortal=""),
        "its function cannot",
    ),
    "forgets a thaw when it dies": (
        {(S.ABORTED, SE.RESTARTED_RUNNING): Move(S.ABORTED),
         (S.ABORTED, SE.DEADLINE): Move(S.ABORTED)},
        World(etcd=False, mortal="s"),
        "its function cannot",
    ),
    "does not listen to a destination that runs": (
        {(S.HANDED, SE.RUNNING): source.TABLE[S.HANDED][SE.RESERVE]},
        World(etcd=True, mortal=""),
        "cannot end",
    ),
}  # fmt: skip
D_BUGS: dict[str, tuple[dict[tuple[D, DE], Any], World | None, str]] = {
    "runs without a commit": (
        {(D.LOADED, DE.QEMU_RESUMED): d_entry(D.COMMITTING, DE.ARBITER_COMMITTED)},
        None,
        "thaws what is not committed",
    ),
    "runs when told that it came too late": (
        {(D.COMMITTING, DE.ARBITER_ABORTED): d_entry(D.COMMITTING, DE.ARBITER_COMMITTED)},
        None,
        "thaws what is not committed",
    ),
    "takes the source's word where etcd decides": (
        {(D.COMMITTING, DE.NUDGE): d_entry(D.COMMITTING, DE.ARBITER_COMMITTED),
         (D.COMMITTING, DE.LINK_BACK): d_entry(D.COMMITTING, DE.ARBITER_COMMITTED)},
        World(etcd=True, mortal=""),
        "thaws what is not committed",
    ),
    "thaws before the journal": (
        {(D.COMMITTING, DE.ARBITER_COMMITTED): last(
            d_entry(D.COMMITTING, DE.ARBITER_COMMITTED), do.Journal)},
        None,
        "destination thaws before its disk",
    ),
    "answers Load before the journal": (
        {(D.LOADING, DE.LOADED): last(d_entry(D.LOADING, DE.LOADED), do.Journal)},
        None,
        "Load OK before the journal",
    ),
    "believes in staging after a restart": (
        {(D.VERIFIED, DE.RESTARTED_PAUSED): Move(D.VERIFIED)},
        World(etcd=False, mortal="d"),
        "nothing verified to load",
    ),
    "drops a loaded state when the link breaks": (
        {(D.COMMITTING, DE.LINK_BACK): d_entry(D.LOADED, DE.QEMU_GONE)},
        World(etcd=False, mortal=""),
        "it cannot run at the destination",
    ),
    "never asks again": (
        {(D.COMMITTING, event): Move(D.COMMITTING)
         for event in (DE.DEADLINE, DE.LINK_BACK, DE.ABORT, DE.REFUSE, DE.NUDGE)
         if destination.TABLE[D.COMMITTING][event] != Move(D.COMMITTING)},
        World(etcd=False, mortal=""),
        "cannot",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", S_BUGS)
def test_the_checker_finds_a_source_that(bug: str) -> None:
    changes, world, promise = S_BUGS[bug]
    base = world or World(etcd=False, mortal="")
    with pytest.raises(Violation, match=promise):
        check(World(base.etcd, patched(source.TABLE, changes), mortal=base.mortal))


@pytest.mark.parametrize("bug", D_BUGS)
def test_the_checker_finds_a_destination_that(bug: str) -> None:
    changes, world, promise = D_BUGS[bug]
    base = world or World(etcd=False, mortal="")
    table = patched(destination.TABLE, changes)
    with pytest.raises(Violation, match=promise):
        check(World(base.etcd, d_table=table, mortal=base.mortal))
