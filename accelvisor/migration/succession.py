"""Whether a function's records follow from one another: no signature says that by itself. Pure.

A shared ledger is written by many hosts, and lies where somebody else may write as well. Records
are signed, so nobody writes in another's name; but a host that is trusted can sign that a function
is its own, and an old record is signed as rightly as the newest. So whoever reads holds what is
there against the last that it has seen itself, and each record against the one before:

========= ================================ =====================================================
state     signed by                        follows
========= ================================ =====================================================
owned     its owner                        nothing, or *released*
prepared  its owner, the source            what lets the function run at the source
committed its owner or peer, of the move   *prepared* of the same move, which names both
aborted   its owner, the source            *prepared* of the same move, or what *prepared* follows
released  its owner                        nothing, or what lets the function run at its owner
========= ================================ =====================================================

Who has never seen a function believes the last records that it finds, as far as they go: whoever
can write an untrue history for it can delete the true one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum, auto
from itertools import groupby

from accelvisor.errors import StateError
from accelvisor.migration.ledger import SETTLED, Record, Signed, Standing


class Hand(StrEnum):
    """Whose signature a record has."""

    RIGHT = auto()  # of a host that may have written it
    LEFT = auto()  # such a host is not trusted (any more): what it has signed nobody can check
    REVOKED = auto()  # with a key that was revoked, so perhaps by whoever has it
    WRONG = auto()  # of nobody who may have


Judge = Callable[[Signed], Hand]


def writers(record: Record) -> frozenset[str]:
    """The hosts that may write it. A commit is asked for by either side."""
    if record.state is Standing.COMMITTED:
        return frozenset((record.owner, record.peer))
    return frozenset((record.owner,))


def follow(known: Signed | None, records: Sequence[Signed], judge: Judge) -> Signed | None:
    """The newest record of a function; each one follows from the one before.

    Args:
        known: the newest that this host has seen before; None: it never saw one.
        records: those of its epoch and all later ones; without it the last ones that there are.
            Whole epochs, in their order.

    Raises:
        StateError: ``ledger-rollback``: what this host has seen is not there; ``ledger-damaged``:
            a record does not follow, or is not rightly signed.
    """
    if known is not None and known.envelope not in {signed.envelope for signed in records}:
        record = known.record
        raise rolled_back(record.function, f"this host has seen epoch {record.epoch}")
    before: Signed | None = None
    for epoch, group in groupby(records, key=lambda signed: signed.record.epoch):
        of_epoch = _of_one_epoch(tuple(group))
        first, newest = of_epoch[0], of_epoch[-1]
        if newest != known:
            for signed in of_epoch:
                _require_hand(signed, judge, known)
            if before is not None or (epoch == 1 and known is None):
                _require_begin(before.record if before else None, first.record)
            if first is not newest:
                _require_end(first.record, newest.record)
        before = newest
    return before


def settled(records: Sequence[Signed]) -> Signed | None:
    """Of one epoch's records the one that counts: the decision, else the preparation.

    Raises:
        StateError: ``ledger-damaged``: it was decided twice.
    """
    return _of_one_epoch(records)[-1] if records else None


def _of_one_epoch(records: Sequence[Signed]) -> list[Signed]:
    """What was prepared and what became of it: one of them, or both in this order."""
    prepared = [signed for signed in records if signed.record.state not in SETTLED]
    decided = [signed for signed in records if signed.record.state in SETTLED]
    if len(prepared) > 1 or len(decided) > 1:
        raise _damaged(records[0].record, "it was decided twice")
    return prepared + decided


def _require_hand(signed: Signed, judge: Judge, known: Signed | None) -> None:
    """A key that was revoked signs nothing new for who has seen what it signed in its time."""
    hand = Hand.RIGHT if signed == known else judge(signed)
    if hand is Hand.WRONG or (hand is Hand.REVOKED and known is not None):
        raise _damaged(signed.record, "it is not signed by a host that is trusted and may write it")


def _require_begin(before: Record | None, first: Record) -> None:
    """The first record of an epoch follows from the last one of the epoch before."""
    if first.epoch != (before.epoch if before else 0) + 1:
        raise _damaged(first, "an epoch is missing")
    free = before is None or before.state is Standing.RELEASED
    owns = before is not None and before.runs_at(first.owner)
    follows = {
        Standing.OWNED: free,
        Standing.RELEASED: before is None or owns,
        Standing.PREPARED: owns,
        Standing.ABORTED: owns,
        Standing.COMMITTED: False,  # nothing was prepared
    }
    if not follows[first.state]:
        had = f"{before.state} and host {before.owner}'s" if before else "nobody's"
        raise _damaged(first, f"the function was {had}")


def _require_end(prepared: Record, end: Record) -> None:
    hosts = {
        Standing.COMMITTED: (prepared.peer, prepared.owner),
        Standing.ABORTED: (prepared.owner, prepared.peer),
    }
    # Who aborts may have forgotten what was sealed.
    same = not (prepared.digest and end.digest) or prepared.digest == end.digest
    if (
        hosts.get(end.state) != (end.owner, end.peer)
        or end.migration != prepared.migration
        or not same
    ):
        raise _damaged(end, "another move was prepared")


def rolled_back(function: str, why: str) -> StateError:
    """The ledger says less than it has said."""
    return StateError(
        f"the ledger's records of function {function} were put back: {why}",
        code="ledger-rollback",
        where="ledger",
        hint="look at who may write to etcd, and bring back its newest data:"
        " accelvisor-migration(7), WHO DECIDES",
    )


def _damaged(record: Record, why: str) -> StateError:
    return StateError(
        f"the ledger's record of function {record.function} ({record.state}, epoch {record.epoch},"
        f" host {record.owner}) cannot be: {why}",
        code="ledger-damaged",
        where="ledger",
        hint="look at who may write to etcd below /accelvisor",
    )
