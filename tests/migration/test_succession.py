"""Records of a shared ledger follow from one another, whoever signed them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accelvisor.errors import StateError
from accelvisor.migration.ledger import Record, Signed, Standing, sign
from accelvisor.migration.succession import Hand, follow, writers
from tests.migration.ledgers import A, B, C, F, TestSigner, digest, migration

OWNED = Record(F, 1, A, Standing.OWNED)
PREPARED = Record(F, 2, A, Standing.PREPARED, migration(1), B, digest(7))
COMMITTED = Record(F, 2, B, Standing.COMMITTED, migration(1), A, digest(7))
ABORTED = replace(PREPARED, state=Standing.ABORTED)
RELEASED = Record(F, 3, B, Standing.RELEASED)
MOVED = (OWNED, PREPARED, COMMITTED)


def signed(records: tuple[Record, ...]) -> list[Signed]:
    return [sign(TestSigner(), record) for record in records]


def right(_: Signed) -> Hand:
    return Hand.RIGHT


def hands(**of_state: Hand):
    return lambda signed: of_state.get(signed.record.state.value, Hand.RIGHT)


def code(known: tuple[Record, ...], records: tuple[Record, ...], judge=right) -> str | None:
    """What is answered to records of which those in ``known`` were seen; None: they are taken."""
    newest = signed(known)[-1] if known else None
    since = [s for s in signed(records) if not newest or s.record.epoch >= newest.record.epoch]
    try:
        assert follow(newest, since, judge) == signed(records)[-1]
    except StateError as error:
        return error.code
    return None


@pytest.mark.parametrize("seen", range(4))
def test_what_follows_is_taken_from_wherever_it_was_seen(seen: int) -> None:
    again = Record(F, 4, C, Standing.OWNED)
    for history in (MOVED, (OWNED, ABORTED), (OWNED, PREPARED, ABORTED), (*MOVED, RELEASED, again)):
        assert code(history[:seen], history) is None


FORGED = {
    "made mine": (*MOVED, Record(F, 3, C, Standing.OWNED)),
    "made mine later": (*MOVED, Record(F, 9, C, Standing.OWNED)),
    "made mine first": (Record(F, 9, C, Standing.OWNED),),
    "committed to me": (OWNED, replace(COMMITTED, owner=C)),
    "committed to me instead": (OWNED, PREPARED, replace(COMMITTED, owner=C)),
    "committed by another": (OWNED, PREPARED, replace(COMMITTED, peer=C)),
    "another move": (OWNED, PREPARED, replace(COMMITTED, migration=migration(2))),
    "another state": (OWNED, PREPARED, replace(COMMITTED, digest=digest(8))),
    "given away by another": (OWNED, replace(PREPARED, owner=C)),
    "aborted by another": (OWNED, replace(ABORTED, owner=C, peer=A)),
    "released by another": (OWNED, Record(F, 2, C, Standing.RELEASED)),
    "decided twice": (OWNED, PREPARED, ABORTED, COMMITTED),
    "begun while undecided": (OWNED, PREPARED, replace(PREPARED, epoch=3)),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_record_that_its_writer_signed_but_that_cannot_be(what: str) -> None:
    """A trusted host writes it, under its own name."""
    history = FORGED[what]
    if what != "made mine first":  # to who sees it first it is all that there is
        assert code((), history) == "ledger-damaged"
    assert code((OWNED,), (OWNED, *(r for r in history if r != OWNED))) == "ledger-damaged"


def test_what_was_seen_and_is_gone_was_put_back() -> None:
    for less in ((OWNED,), (OWNED, PREPARED), (OWNED, PREPARED, ABORTED)):
        assert code(MOVED, less) == "ledger-rollback"
    assert follow(None, [], right) is None
    with pytest.raises(StateError):
        follow(signed(MOVED)[-1], [], right)


def test_only_who_may_write_a_record_may_sign_it() -> None:
    """The destination may not abort, nor prepare, in the source's name."""
    assert writers(PREPARED) == writers(ABORTED) == writers(OWNED) == {A}
    assert writers(COMMITTED) == {A, B}
    assert code((), MOVED, hands(prepared=Hand.WRONG)) == "ledger-damaged"
    assert code((OWNED,), MOVED, hands(committed=Hand.WRONG)) == "ledger-damaged"


def test_a_host_that_left_keeps_no_function_from_moving_on() -> None:
    """What it signed nobody can verify; what it says must follow all the same."""
    for seen in ((), (OWNED,), MOVED[:2]):
        assert code(seen, MOVED, hands(prepared=Hand.LEFT, committed=Hand.LEFT)) is None
    stolen = (*MOVED, Record(F, 3, A, Standing.PREPARED, migration(2), C))
    assert code((), stolen, hands(prepared=Hand.LEFT)) == "ledger-damaged"


def test_a_revoked_key_signs_nothing_new() -> None:
    revoked = hands(prepared=Hand.REVOKED, committed=Hand.REVOKED)
    assert code((OWNED,), MOVED, revoked) == "ledger-damaged"
    # What was believed in its time is, and who comes later cannot tell.
    assert code(MOVED, MOVED, revoked) is None
    assert code((), MOVED, revoked) is None
