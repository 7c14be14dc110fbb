"""The embedded ledger: against a plain model, killed at every step, damaged, asked by many."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from accelvisor.daemon import ledger_sqlite
from accelvisor.daemon.ledger_sqlite import LedgerFile, SqliteLedger
from accelvisor.errors import ConflictError, StateError, UnavailableError
from accelvisor.migration.ledger import Operation, Signed, Standing, Transfer
from tests.migration.ledgers import A, B, C, F, G, TestSigner, transfer


def opened(path: Path, host: str = A) -> LedgerFile:
    return LedgerFile(path, host, TestSigner(), lambda: 5)


def states(ledger: LedgerFile, function: str = F) -> list[tuple[int, str, str]]:
    return [
        (s.record.epoch, s.record.state.value, s.record.owner) for s in ledger.history(function)
    ]


# --- against a plain model -----------------------------------------------------------------------


class Model:
    """Who has the function, by a dict and ifs."""

    def __init__(self) -> None:
        self.sealed: dict[int, int] = {}  # epoch -> which state
        self.epoch, self.owner = 0, ""
        self.open: tuple[int, int] | None = None  # (move, sealed) that is undecided
        self.fate: dict[int, bool] = {}  # move -> it happened
        self.at: dict[int, int] = {}  # epoch -> the move that took it

    def prepare(self, move: int, epoch: int, sealed: int) -> bool:
        if self.open == (move, sealed) and self.at.get(epoch) == move:
            return True
        if self.open or self.owner != A or epoch != self.epoch + 1:
            return False
        self.open, self.epoch, self.at[epoch] = (move, sealed), epoch, move
        return True

    def decide(self, move: int, epoch: int, sealed: int, commit: bool) -> bool | None:
        """What happened; None: refused."""
        if not self.epoch:
            return None
        if epoch in self.at and self.at[epoch] == move:
            if self.sealed[epoch] and sealed != self.sealed[epoch]:
                return None
            if self.open and self.open[0] == move and epoch == self.epoch:
                self.open = None
                self.fate[move * 100 + epoch] = commit
                self.owner = B if commit else A
            return self.fate[move * 100 + epoch]
        if epoch <= self.epoch:
            return False
        if commit or self.open or epoch != self.epoch + 1 or self.owner != A:
            return None
        self.epoch, self.at[epoch], self.sealed[epoch] = epoch, move, sealed
        self.fate[move * 100 + epoch] = False
        return False


class LedgerMachine(RuleBasedStateMachine):
    """Random requests of several moves, with restarts; the file and the model say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "ledger"
        self.ledger = opened(self.path)
        self.model = Model()

    def teardown(self) -> None:
        self.ledger.close()
        self.directory.cleanup()

    @precondition(lambda self: not self.model.epoch)
    @rule()
    def claim(self) -> None:
        self.ledger.claim(F)
        self.model.epoch, self.model.owner, self.model.at[1] = 1, A, 0

    @rule(move=st.integers(1, 3), back=st.integers(-1, 1), sealed=st.integers(1, 2))
    def prepare(self, move: int, back: int, sealed: int) -> None:
        epoch = max(1, self.model.epoch + 1 - back)
        expected = self.model.prepare(move, epoch, sealed)
        if expected:
            self.model.sealed[epoch] = sealed
        answer = self.asked(Operation.PREPARE, move, epoch, sealed)
        assert answer is (False if expected else None)

    @rule(
        move=st.integers(1, 3), back=st.integers(-1, 2), sealed=st.integers(1, 2), to=st.booleans()
    )
    def decide(self, move: int, back: int, sealed: int, to: bool) -> None:
        epoch = max(1, self.model.epoch + 1 - back)
        operation = Operation.COMMIT if to else Operation.ABORT
        expected = self.model.decide(move, epoch, sealed, to)
        assert self.asked(operation, move, epoch, sealed) is expected

    def asked(self, operation: Operation, move: int, epoch: int, sealed: int) -> bool | None:
        wanted = transfer(move, A, B, epoch, sealed=sealed)
        try:
            [answer] = self.ledger.change(operation, wanted)
        except ConflictError:
            return None
        same = answer.record.migration == wanted.migration
        return same and answer.record.state is Standing.COMMITTED

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = opened(self.path)

    @invariant()
    def says_the_same(self) -> None:
        newest = self.ledger.get(F)
        assert self.ledger.floor(F) == self.model.epoch
        if newest is not None:
            record = newest.record
            assert record.epoch == self.model.epoch
            assert (record.state is Standing.PREPARED) == (self.model.open is not None)
            assert record.owner == self.model.owner
            assert newest == self.ledger.history(F)[-1]


TestAgainstAModel = LedgerMachine.TestCase
TestAgainstAModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


# --- killed ---------------------------------------------------------------------------------------


class KilledError(BaseException):
    """Nothing may catch it, as nothing catches kill -9."""


class Dying(sqlite3.Connection):
    """Ends with the ``left``-th statement, before or after it took effect."""

    left = 10**9
    after = False

    def execute(self, *given: Any) -> sqlite3.Cursor:  # type: ignore[override]
        cls = type(self)
        cls.left -= 1
        if cls.left == 0 and not cls.after:
            raise KilledError
        if cls.left < 0:
            raise KilledError
        found = super().execute(*given)
        if cls.left == 0:
            raise KilledError
        return found


LIFE: list[tuple[Operation, Transfer]] = [
    (Operation.PREPARE, transfer(1, A, B, 2, F, G)),
    (Operation.ABORT, transfer(1, A, B, 2, F, G)),
    (Operation.PREPARE, transfer(2, A, C, 3, F, G)),
    (Operation.COMMIT, transfer(2, A, C, 3, F, G)),
]


def lived(path: Path, steps: int) -> LedgerFile:
    ledger = opened(path)
    ledger.claim(F)
    ledger.claim(G)
    for operation, move in LIFE[:steps]:
        ledger.change(operation, move)
    return ledger


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", range(4))
def test_killed_at_any_statement_all_functions_moved_or_none(
    step: int, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, move = LIFE[step]
    outcomes = set()
    real = sqlite3.connect
    for number in range(1, 20):
        path = tmp_path / f"{number}"
        lived(path, step).close()
        plain = opened(path)
        before = plain.history(F), plain.history(G)
        plain.close()
        monkeypatch.setattr(
            ledger_sqlite.sqlite3,
            "connect",
            lambda *given, **named: real(*given, factory=Dying, **named),
        )
        Dying.left, Dying.after = 10**9, after
        dying = opened(path)
        Dying.left = number
        killed = False
        try:
            dying.change(operation, move)
        except KilledError:
            killed = True
        Dying.left = 10**9
        dying.close()
        monkeypatch.undo()
        again = opened(path)
        found = again.history(F), again.history(G)
        grown = [len(now) - len(then) for now, then in zip(found, before, strict=True)]
        assert grown in ([0, 0], [1, 1])
        outcomes.add(grown[0])
        # Whoever was killed asks again.
        answers = again.change(operation, move)
        assert len({answer.record.state for answer in answers}) == 1
        assert len(again.history(F)) == len(before[0]) + 1
        again.close()
        if not killed:
            break
    else:
        pytest.fail("it never got through")
    assert outcomes == {0, 1}


# --- what does not fit ----------------------------------------------------------------------------


def test_a_peers_signed_records_are_kept_as_they_came(tmp_path: Path) -> None:
    source, destination = opened(tmp_path / "a"), opened(tmp_path / "b", B)
    source.claim(F)
    move = transfer(1, A, B, 2)
    source.change(Operation.PREPARE, move)
    signed = source.change(Operation.COMMIT, move)
    destination.change(Operation.ADOPT, move, signed)
    destination.change(Operation.ADOPT, move, signed)
    assert destination.history(F) == signed
    newest = destination.get(F)
    assert newest is not None
    assert newest.record.runs_at(B)
    # And back again: what the source knew is older.
    home = transfer(2, B, A, 3)
    destination.change(Operation.PREPARE, home)
    source.change(Operation.ADOPT, home, destination.change(Operation.COMMIT, home))
    assert states(source)[-1] == (3, "committed", A)
    # An old record that comes again changes nothing.
    before = states(destination)
    destination.change(Operation.ADOPT, move, signed)
    assert states(destination) == before
    source.close()
    destination.close()


def test_one_function_that_cannot_move_keeps_the_others(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger")
    ledger.claim(F)
    with pytest.raises(ConflictError) as caught:
        ledger.change(Operation.PREPARE, transfer(1, A, B, 2, F, G))
    assert caught.value.code == "ledger-unknown"
    assert states(ledger) == [(1, "owned", A)]
    ledger.close()


def test_the_file_itself_refuses_change_deletion_and_a_second_decision(tmp_path: Path) -> None:
    """A bug, or a person with a database shell."""
    lived(tmp_path / "ledger", 2).close()
    db = sqlite3.connect(tmp_path / "ledger", isolation_level=None)
    for statement in (
        "UPDATE records SET state = 'committed'",
        "DELETE FROM records",
        "INSERT INTO records (function, epoch, state, envelope)"
        f" VALUES ('{F}', 2, 'committed', x'00')",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            db.execute(statement)
    db.close()


def test_a_damaged_file_or_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_bytes(b"no database at all" * 100)
    with pytest.raises(StateError) as caught:
        opened(tmp_path / "ledger")
    assert caught.value.code == "ledger-damaged"
    lived(tmp_path / "other", 0).close()
    db = sqlite3.connect(tmp_path / "other", isolation_level=None)
    insert = "INSERT INTO records (function, epoch, state, envelope) VALUES (?, 9, 'x', ?)"
    db.execute(insert, (F, b"x"))
    db.close()
    ledger = opened(tmp_path / "other")
    with pytest.raises(StateError) as caught:
        ledger.get(F)
    assert caught.value.code == "ledger-damaged"
    ledger.close()


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    opened(tmp_path / "ledger").close()
    db = sqlite3.connect(tmp_path / "ledger")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StateError) as caught:
        opened(tmp_path / "ledger")
    assert caught.value.code == "ledger-newer"


def test_a_file_that_cannot_be_opened_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        opened(tmp_path / "nowhere" / "ledger")
    assert caught.value.code == "ledger-unreachable"


def test_the_file_is_its_owners_alone_and_durable(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger")
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o600
    assert ledger._db.execute("PRAGMA synchronous") == [(2,)]
    assert ledger._db.execute("PRAGMA journal_mode") == [("wal",)]
    ledger.close()


# --- the interface --------------------------------------------------------------------------------


def test_both_sides_at_once_get_one_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        ledger = SqliteLedger(tmp_path / "ledger", A, TestSigner(), lambda: 5)
        await ledger.claim(F)
        move = transfer(1, A, B, 2)
        await ledger.prepare(move)
        answers = await asyncio.gather(
            *(ledger.commit(move) if number % 2 else ledger.abort(move) for number in range(10))
        )
        assert len({answer.committed for answer in answers}) == 1
        assert len({answer.records for answer in answers}) == 1
        assert len(await ledger.history(F)) == 3
        await ledger.close()

    asyncio.run(scenario())


def test_records_for_another_host_are_not_adopted(tmp_path: Path) -> None:
    async def scenario() -> None:
        source = SqliteLedger(tmp_path / "a", A, TestSigner(), lambda: 5)
        other = SqliteLedger(tmp_path / "c", C, TestSigner(), lambda: 5)
        await source.claim(F)
        move = transfer(1, A, B, 2)
        await source.prepare(move)
        records: tuple[Signed, ...] = (await source.commit(move)).records
        with pytest.raises(ConflictError) as caught:
            await other.adopt(records)
        assert caught.value.code == "ledger-not-owner"
        assert await other.floor(F) == 0
        await source.close()
        await other.close()

    asyncio.run(scenario())
