"""The embedded ledger: one SQLite file of this host, with the peers' signed records.

The file is append-only: triggers refuse a change or a deletion, and an index refuses a second
decision of an epoch, whatever the program asks for. All calls run on one thread of its own; a call
that is cancelled may still take effect, and is repeated by whoever wants to know.

It knows what this host owned, moved away and took over: as the arbiter of the moves that begin
here it is complete, of other hosts' functions it knows nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from accelvisor.daemon.database import Database
from accelvisor.errors import ConflictError, StateError, UnavailableError
from accelvisor.migration.ledger import (
    Operation,
    Record,
    Signed,
    Signer,
    Transfer,
    Verdict,
    decide,
    decide_claim,
    decide_release,
    sign,
    transfer_of,
    verdict,
)

T = TypeVar("T")

#: Steps of the schema.
MIGRATIONS: Sequence[Sequence[str]] = (
    (
        """CREATE TABLE records (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            function TEXT NOT NULL,
            epoch INTEGER NOT NULL,
            state TEXT NOT NULL,
            envelope BLOB NOT NULL      -- holds all of the record, signed
        ) STRICT""",
        "CREATE INDEX records_of ON records (function, epoch, id)",
        """CREATE UNIQUE INDEX decided_once ON records (function, epoch)
            WHERE state <> 'prepared'""",
        """CREATE UNIQUE INDEX prepared_once ON records (function, epoch)
            WHERE state = 'prepared'""",
        """CREATE TRIGGER never_changed BEFORE UPDATE ON records
            BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END""",
        """CREATE TRIGGER never_deleted BEFORE DELETE ON records
            BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END""",
    ),
)


class LedgerFile:
    """The file; used by one thread at a time.

    Args:
        path: its directory must exist. Created with mode 0600.
        host: this host's UUID.
        signer: signs what this host writes.
        clock_ns: nanoseconds since 1970.

    Raises:
        StateError: ``ledger-damaged`` or ``ledger-newer``.
        UnavailableError: ``ledger-unreachable``, the file cannot be read or written.
    """

    def __init__(
        self, path: Path, host: str, signer: Signer, clock_ns: Callable[[], int]
    ) -> None:
        self._host, self._signer, self._clock_ns = host, signer, clock_ns
        self._where = f"ledger:{path}"
        self._db = Database(path, MIGRATIONS, failed=self._failed, newer=self._newer)

    def close(self) -> None:
        self._db.close()

    def get(self, function: str) -> Signed | None:
        return self._newest(function)

    def history(self, function: str) -> tuple[Signed, ...]:
        rows = self._db.execute(
            "SELECT envelope FROM records WHERE function = ? ORDER BY id", (function,)
        )
        return tuple(self._open(row[0]) for row in rows)

    def floor(self, function: str) -> int:
        rows = self._db.execute("SELECT max(epoch) FROM records WHERE function = ?", (function,))
        return int(rows[0][0] or 0)

    def claim(self, function: str) -> Signed:
        return self._alone(decide_claim, function)

    def release(self, function: str) -> Signed:
        return self._alone(decide_release, function)

    def change(
        self, operation: Operation, transfer: Transfer, given: Sequence[Signed] = ()
    ) -> tuple[Signed, ...]:
        """All items in one transaction. ``given``: a peer's records, kept instead of own ones."""
        with self._db.transaction():
            answers = []
            for number, item in enumerate(transfer.items):
                latest, at = self._newest(item.function), self._newest(item.function, item.epoch)
                record, new = decide(
                    operation,
                    transfer,
                    item,
                    latest.record if latest else None,
                    at.record if at else None,
                    self._clock_ns(),
                )
                known = at or latest
                if new or known is None:
                    signed = given[number] if given else sign(self._signer, record)
                    known = self._append(signed)
                answers.append(known)
            return tuple(answers)

    # --- inside ----------------------------------------------------------------------------------

    def _alone(self, rule: Callable[..., tuple[Record, bool]], function: str) -> Signed:
        with self._db.transaction():
            newest = self._newest(function)
            latest = newest.record if newest else None
            record, new = rule(function, self._host, latest, self._clock_ns())
            return self._append(sign(self._signer, record)) if new or not newest else newest

    def _newest(self, function: str, epoch: int | None = None) -> Signed | None:
        # Each is one step in the index, however many epochs were aborted.
        wanted = "" if epoch is None else " AND epoch = :epoch"
        rows = self._db.execute(
            f"SELECT envelope FROM records WHERE function = :function{wanted}"
            " ORDER BY epoch DESC, id DESC LIMIT 1",
            {"function": function, "epoch": epoch},
        )
        return self._open(rows[0][0]) if rows else None

    def _append(self, signed: Signed) -> Signed:
        record = signed.record
        self._db.execute(
            "INSERT INTO records (function, epoch, state, envelope) VALUES (?, ?, ?, ?)",
            (record.function, record.epoch, record.state.value, signed.envelope),
        )
        return signed

    def _open(self, raw: bytes) -> Signed:
        try:
            return Signed.open(raw)
        except Exception as error:
            raise self._damaged(error) from error

    def _failed(self, error: Exception) -> StateError | UnavailableError | ConflictError:
        if isinstance(error, sqlite3.IntegrityError):
            return ConflictError(
                f"the ledger's file refused it: {error}", code="ledger-conflict", where=self._where
            )
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(
            error, sqlite3.OperationalError
        ):
            return self._damaged(error)
        return UnavailableError(
            f"the ledger's file failed: {error}",
            code="ledger-unreachable",
            where=self._where,
            hint="look at the disk",
        )

    def _newer(self, version: int) -> StateError:
        return StateError(
            f"the ledger has schema {version}, this accelvisord knows {len(MIGRATIONS)}",
            code="ledger-newer",
            where=self._where,
            hint="install the newer accelvisord again",
        )

    def _damaged(self, error: Exception) -> StateError:
        return StateError(
            f"the ledger is damaged: {error}",
            code="ledger-damaged",
            where=self._where,
            hint="restore it from a backup no older than the last move to or from this host",
        )


class SqliteLedger:
    """:class:`accelvisor.migration.ledger.Ledger` on a :class:`LedgerFile`, with its own thread."""

    def __init__(
        self, path: Path, host: str, signer: Signer, clock_ns: Callable[[], int]
    ) -> None:
        self._file = LedgerFile(path, host, signer, clock_ns)
        self._host = host
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    async def get(self, function: str) -> Signed | None:
        return await self._run(lambda: self._file.get(function))

    async def claim(self, function: str) -> Signed:
        return await self._run(lambda: self._file.claim(function))

    async def release(self, function: str) -> Signed:
        return await self._run(lambda: self._file.release(function))

    async def prepare(self, transfer: Transfer) -> tuple[Signed, ...]:
        return await self._run(lambda: self._file.change(Operation.PREPARE, transfer))

    async def commit(self, transfer: Transfer) -> Verdict:
        change = self._file.change
        return verdict(transfer, await self._run(lambda: change(Operation.COMMIT, transfer)))

    async def abort(self, transfer: Transfer) -> Verdict:
        change = self._file.change
        return verdict(transfer, await self._run(lambda: change(Operation.ABORT, transfer)))

    async def adopt(self, records: Sequence[Signed]) -> None:
        transfer = transfer_of(records)
        if transfer.destination != self._host:
            raise ConflictError(
                f"the records name host {transfer.destination}, this is {self._host}",
                code="ledger-not-owner",
                where="ledger",
            )
        await self._run(lambda: self._file.change(Operation.ADOPT, transfer, records))

    async def history(self, function: str) -> tuple[Signed, ...]:
        return await self._run(lambda: self._file.history(function))

    async def floor(self, function: str) -> int:
        return await self._run(lambda: self._file.floor(function))

    async def close(self) -> None:
        await self._run(self._file.close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

