"""The newest record of each function that this host has seen in a shared ledger, on its own disk.

Whoever can write to etcd, or puts an old backup of it back, can show an old record; it is signed as
rightly as the newest. Not to a host that has seen a newer one.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from accelvisor.daemon.database import Database, statements
from accelvisor.errors import DataError, StateError, UnavailableError
from accelvisor.migration.ledger import SETTLED, Signed

_SCHEMA = """
CREATE TABLE IF NOT EXISTS seen (
    function TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    settled INTEGER NOT NULL,
    envelope BLOB NOT NULL
) STRICT
"""


class Seen:
    """Thread-safe; what was seen is on disk when :meth:`saw` returns.

    Args:
        path: its directory must exist. None: in memory, for who only looks.

    Raises:
        StateError: ``ledger-damaged``. UnavailableError: ``ledger-unreachable``.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._where = f"ledger:{path}"
        self._db = Database(
            path, (statements(_SCHEMA),), failed=self._failed,
            newer=lambda version: self._damaged(f"it is of version {version}"),
        )  # fmt: skip

    def get(self, function: str) -> Signed | None:
        """The newest that was seen of a function."""
        rows = self._db.execute("SELECT envelope FROM seen WHERE function = ?", (function,))
        try:
            return Signed.open(rows[0][0]) if rows else None
        except DataError as error:
            raise self._damaged(error) from error

    def saw(self, signed: Signed) -> None:
        """It is what is known now, unless a newer one was seen meanwhile."""
        record = signed.record
        self._db.execute(
            "INSERT INTO seen VALUES (?, ?, ?, ?) ON CONFLICT (function) DO UPDATE"
            " SET epoch = excluded.epoch, settled = excluded.settled, envelope = excluded.envelope"
            " WHERE (excluded.epoch, excluded.settled) > (epoch, settled)",
            (
                record.function,
                record.epoch,
                record.state in SETTLED,
                signed.envelope,
            ),
        )

    def close(self) -> None:
        self._db.close()

    def _failed(self, error: Exception) -> StateError | UnavailableError:
        broken = isinstance(error, sqlite3.DatabaseError)
        if broken and not isinstance(error, sqlite3.OperationalError):
            return self._damaged(error)
        return UnavailableError(
            f"what this host has seen of the ledger cannot be kept: {error}",
            code="ledger-unreachable",
            where=self._where,
            hint="look at the disk",
        )

    def _damaged(self, error: object) -> StateError:
        return StateError(
            f"what this host has seen of the ledger is damaged: {error}",
            code="ledger-damaged",
            where=self._where,
            hint="accelvisor-migration(7), WHO DECIDES, says what its loss means",
        )
