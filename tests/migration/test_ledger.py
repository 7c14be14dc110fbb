"""Ledger records and rules: what is signed reads back; no sequence of requests makes two owners."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import ConflictError, DataError, StateError
from accelvisor.frames import canonical, envelope
from accelvisor.migration import succession
from accelvisor.migration.ledger import (
    PAYLOAD_TYPE,
    RULES,
    Found,
    Item,
    Operation,
    Record,
    Signed,
    Standing,
    Transfer,
    decide,
    decide_claim,
    decide_release,
    sign,
    transfer_of,
    verdict,
)
from tests.migration.ledgers import A, B, C, F, G, TestSigner, digest, migration, transfer

RECORD = Record(F, 3, B, Standing.COMMITTED, migration(1), A, digest(7), 123)


def test_a_signed_record_reads_back() -> None:
    signed = sign(TestSigner(), RECORD)
    assert Signed.open(signed.envelope) == Signed(RECORD, signed.envelope)
    assert envelope.decode(
        signed.envelope, kind="application/vnd.accelvisor.ledger", max_bytes=4096
    ).payload == RECORD.encode()


def test_a_record_under_another_type_is_refused() -> None:
    """A signed manifest or offer must not pass as a ledger record."""
    other = TestSigner().sign("application/vnd.accelvisor.manifest", RECORD.encode())
    with pytest.raises(DataError):
        Signed.open(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "mine"}, {"epoch": 0}, {"epoch": -1}, {"epoch": True}, {"epoch": "3"},
        {"migration": b"short"}, {"digest": b"short"}, {"owner": ""}, {"owner": 5},
        {"function": "f" * 65}, {"time_ns": -1}, {"more": 1}, {"peer": None},
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused(changes: dict[str, object]) -> None:
    fields = canonical.decode(RECORD.encode())
    with pytest.raises(DataError) as caught:
        Record.decode(canonical.encode({**fields, **changes}))
    assert caught.value.code == "ledger-record"


@pytest.mark.parametrize("left_out", ["state", "epoch", "owner", "function"])
def test_a_record_without_a_field_is_refused(left_out: str) -> None:
    fields = canonical.decode(RECORD.encode())
    del fields[left_out]
    with pytest.raises(DataError):
        Record.decode(canonical.encode(fields))


@given(st.binary(max_size=300))
def test_rubbish_is_no_record(raw: bytes) -> None:
    for reader in (Record.decode, Signed.open):
        with pytest.raises(DataError):
            reader(raw)


def test_every_operation_has_an_answer_to_whatever_is_found() -> None:
    for operation in set(Operation) - {Operation.CLAIM}:
        assert set(RULES[operation]) == set(Found)


# --- the rules in sequence -----------------------------------------------------------------------


class History:
    """A ledger of one function: a list, and the rules."""

    def __init__(self, records: tuple[Record, ...] = ()) -> None:
        self.records = records

    def at(self, epoch: int) -> Record | None:
        return next((r for r in reversed(self.records) if r.epoch == epoch), None)

    def latest(self) -> Record | None:
        return self.records[-1] if self.records else None

    def apply(self, operation: Operation, move: Transfer) -> tuple[Record, History]:
        [item] = move.items
        record, new = decide(operation, move, item, self.latest(), self.at(item.epoch), 0)
        return record, History((*self.records, record)) if new else self


def sound(records: tuple[Record, ...]) -> None:
    """The promise, said without the rules."""
    epochs = [record.epoch for record in records]
    assert epochs == sorted(epochs)
    for epoch in set(epochs):
        of_epoch = [record for record in records if record.epoch == epoch]
        settled = [record for record in of_epoch if record.state is not Standing.PREPARED]
        assert len(settled) <= 1
        assert len({record.migration for record in of_epoch}) == 1
        assert len(of_epoch) <= 2
    for before, after in pairwise(records):
        if after.epoch > before.epoch:
            # Nothing begins before the last one ended, and only its owner begins.
            assert before.state is not Standing.PREPARED
            source = after.peer if after.state is Standing.COMMITTED else after.owner
            assert before.owner == source


def followed(records: tuple[Record, ...]) -> None:
    """Who reads them takes them, whatever of them it has seen before."""
    signed = [sign(TestSigner(), record) for record in records]
    for known in (None, *signed):
        since = [s for s in signed if known is None or s.record.epoch >= known.record.epoch]
        assert succession.follow(known, since, lambda _: succession.Hand.RIGHT) == signed[-1]


def test_no_sequence_of_requests_breaks_the_promise() -> None:
    """Everything that three hosts may ask in seven moves, until nothing is new."""
    moves = [
        transfer(1, A, B, 2), transfer(2, A, C, 2), transfer(3, A, B, 3), transfer(4, B, A, 3),
        transfer(1, A, B, 2, sealed=8), transfer(5, C, A, 3), transfer(6, A, B, 4),
    ]  # fmt: skip
    operations = (Operation.PREPARE, Operation.COMMIT, Operation.ABORT)
    start = decide_claim(F, A, None, 0)[0]
    todo, seen = [(start,)], {(start,)}
    answers: dict[tuple[tuple[Record, ...], bytes], bool] = {}
    while todo:
        records = todo.pop()
        sound(records)
        followed(records)
        for operation, move in product(operations, moves):
            try:
                answer, after = History(records).apply(operation, move)
            except ConflictError:
                continue
            # Asked again, the answer is the same and nothing is written.
            assert after.apply(operation, move) == (answer, after)
            if operation is not Operation.PREPARE:
                happened = (
                    answer.migration == move.migration and answer.state is Standing.COMMITTED
                )
                answers[after.records, move.migration] = happened
            if after.records not in seen:
                seen.add(after.records)
                todo.append(after.records)
    assert len(seen) > 50
    # A decision once given is never another one later.
    for (records, number), happened in answers.items():
        for (longer, other), later in answers.items():
            if number == other and longer[: len(records)] == records:
                assert happened == later


def test_nobody_may_compute_while_a_move_is_undecided() -> None:
    prepared = decide(
        Operation.PREPARE, transfer(1, A, B, 2), Item(F, 2), decide_claim(F, A, None, 0)[0], None, 0
    )[0]
    assert not any(prepared.runs_at(host) for host in (A, B, C))
    for state, host in ((Standing.COMMITTED, B), (Standing.ABORTED, A)):
        record = replace(prepared, state=state, owner=host)
        assert [record.runs_at(other) for other in (A, B)] == [host == A, host == B]


def test_an_abort_spends_the_epoch_even_when_nothing_was_prepared() -> None:
    """A prepare that is still on its way must not arrive after the abort."""
    ledger = History((decide_claim(F, A, None, 0)[0],))
    move = transfer(1, A, B, 2)
    record, ledger = ledger.apply(Operation.ABORT, move)
    assert (record.state, record.epoch, record.owner) == (Standing.ABORTED, 2, A)
    for operation in (Operation.PREPARE, Operation.COMMIT):
        if operation is Operation.PREPARE:
            with pytest.raises(ConflictError, match="decided"):
                ledger.apply(operation, move)
        else:
            assert ledger.apply(operation, move)[0].state is Standing.ABORTED


def test_a_destination_cannot_commit_what_was_not_sealed_for_it() -> None:
    ledger = History((decide_claim(F, A, None, 0)[0],))
    with pytest.raises(ConflictError) as caught:
        ledger.apply(Operation.COMMIT, transfer(1, A, B, 2))
    assert caught.value.code == "ledger-not-prepared"
    _, ledger = ledger.apply(Operation.PREPARE, transfer(1, A, B, 2))
    for thief in (transfer(1, A, C, 2), transfer(1, A, B, 2, sealed=8), transfer(1, C, B, 2)):
        with pytest.raises(ConflictError) as caught:
            ledger.apply(Operation.COMMIT, thief)
        assert caught.value.code == "ledger-changed"
    # Another move at that epoch learns that it lost.
    assert ledger.apply(Operation.COMMIT, transfer(9, A, C, 2))[0].migration == migration(1)


def test_a_released_function_is_nobodys_and_its_next_owner_has_a_higher_epoch() -> None:
    owned = decide_claim(F, A, None, 0)[0]
    with pytest.raises(ConflictError) as caught:
        decide_release(F, B, owned, 0)
    assert caught.value.code == "ledger-conflict"
    released, new = decide_release(F, A, owned, 0)
    assert new
    assert not released.runs_at(A)
    assert decide_release(F, A, released, 0) == (released, False)
    again, _ = decide_claim(F, B, released, 0)
    assert (again.owner, again.epoch) == (B, 3)
    with pytest.raises(ConflictError):
        History((owned, released)).apply(Operation.PREPARE, transfer(1, A, B, 3))


def test_functions_of_one_move_that_were_decided_differently_are_a_damage() -> None:
    move = transfer(1, A, B, 2, F, G)
    one = sign(TestSigner(), replace(RECORD, epoch=2))
    stayed = replace(RECORD, function=G, epoch=2, state=Standing.ABORTED, owner=A)
    other = sign(TestSigner(), stayed)
    assert verdict(move, [one]).committed
    assert not verdict(move, [other]).committed
    with pytest.raises(StateError) as caught:
        verdict(move, [one, other])
    assert caught.value.code == "ledger-damaged"


def test_only_committed_records_of_one_move_can_be_adopted() -> None:
    good = sign(TestSigner(), RECORD)
    assert transfer_of([good]) == Transfer(migration(1), A, B, (Item(F, 3, digest(7)),))
    others = (
        [],
        [sign(TestSigner(), replace(RECORD, state=Standing.ABORTED))],
        [sign(TestSigner(), replace(RECORD, migration=b""))],
        [good, sign(TestSigner(), replace(RECORD, function=G, migration=migration(2)))],
    )
    for records in others:
        with pytest.raises(DataError):
            transfer_of(records)


def test_the_payload_type_is_the_documented_one() -> None:
    assert PAYLOAD_TYPE == "application/vnd.accelvisor.ledger"
