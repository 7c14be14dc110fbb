"""The journal of moves: one row a move, written before anything depends on it.

Its own file. What a row's ``record`` holds is its side's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelvisor.daemon.database import Database, statements
from accelvisor.errors import StateError, SystemFailure

_SCHEMA = """
CREATE TABLE moves (
    id BLOB NOT NULL,
    role TEXT NOT NULL,           -- source or destination
    domain TEXT NOT NULL,         -- UUID
    state TEXT NOT NULL,
    record BLOB NOT NULL,         -- msgpack
    begun REAL NOT NULL,          -- seconds since 1970
    changed REAL NOT NULL,
    PRIMARY KEY (id, role)
) STRICT;
CREATE TABLE starts (count INTEGER NOT NULL) STRICT;
INSERT INTO starts VALUES (0);
"""
#: Moves that ended and are kept for `accelctl migration list`.
KEPT = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One move of one side."""

    id: bytes
    role: str
    domain: str
    state: str
    record: bytes
    begun: float
    changed: float


class Journal:
    """The file. Thread-safe; each call is a transaction that is on disk when it returns.

    Raises:
        StateError: ``store-damaged``, ``store-newer``.
        SystemFailure: ``store-io``.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._where = f"journal:{path}"
        self._db = Database(
            path, (statements(_SCHEMA),), failed=self._failed, newer=self._newer,
            damaged=self._damaged,
        )  # fmt: skip

    def close(self) -> None:
        self._db.close()

    def start(self) -> int:
        """How often this has been called on this file, this time included."""
        self._db.execute("UPDATE starts SET count = count + 1")
        return int(self._db.execute("SELECT count FROM starts")[0][0])

    def write(self, id: bytes, role: str, domain: str, state: str, record: bytes) -> None:
        """The move is in this state from here on."""
        now = self._clock()
        self._db.execute(
            "INSERT INTO moves VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id, role) DO UPDATE"
            " SET state = excluded.state, record = excluded.record, changed = excluded.changed",
            (id, role, domain, state, record, now, now),
        )

    def rows(self) -> list[Row]:
        """All moves, the oldest first."""
        found = self._db.execute("SELECT * FROM moves ORDER BY begun, id")
        return [Row(*row) for row in found]

    def prune(self, ended: frozenset[str]) -> None:
        """Forget the oldest of those whose state is one of ``ended``."""
        marks = ", ".join("?" * len(ended))
        self._db.execute(
            f"DELETE FROM moves WHERE state IN ({marks}) AND rowid NOT IN (SELECT rowid FROM moves"
            " ORDER BY changed DESC LIMIT ?)",
            (*sorted(ended), KEPT),
        )

    def _failed(self, error: Exception) -> SystemFailure:
        return SystemFailure(
            f"the journal of moves cannot be used: {error}", code="store-io", where=self._where
        )

    def _newer(self, version: int) -> StateError:
        return StateError(f"it is of version {version}", code="store-newer", where=self._where)

    def _damaged(self, error: Exception) -> StateError:
        return StateError(
            f"the journal of moves is damaged: {error}", code="store-damaged", where=self._where
        )
