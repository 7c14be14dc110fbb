"""What must be remembered of checkpoints beside the files: how far each function has come, and what
was begun and not ended.

A checkpoint's number is (epoch, sequence). The highest that was taken or restored is a function's
*mark*: an older checkpoint is a step back, which somebody must want. Its own SQLite file, as
:mod:`accelvisor.daemon.moving.journal`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from accelvisor.daemon.database import Database, statements
from accelvisor.errors import StateError, SystemFailure

_SCHEMA = """
CREATE TABLE marks (
    function TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    sequence INTEGER NOT NULL
) STRICT;
CREATE TABLE begun (
    function TEXT PRIMARY KEY,
    what TEXT NOT NULL,           -- create or restore
    epoch INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    digest BLOB NOT NULL          -- of the manifest that is restored
) STRICT;
"""


class Mark(NamedTuple):
    """The number of a checkpoint; they are ordered."""

    epoch: int
    sequence: int


#: Of a function that no checkpoint was ever taken of.
NOTHING = Mark(0, -1)


@dataclass(frozen=True, slots=True)
class Begun:
    """Something that a kill may have interrupted."""

    function: str
    what: str
    mark: Mark
    digest: bytes


class Numbers:
    """The file. Thread-safe; each call is a transaction that is on disk when it returns.

    Raises:
        StateError: ``store-damaged``, ``store-newer``.
        SystemFailure: ``store-io``.
    """

    def __init__(self, path: Path) -> None:
        self._where = f"checkpoints:{path}"
        self._db = Database(
            path, (statements(_SCHEMA),), failed=self._failed, newer=self._newer,
            damaged=self._damaged,
        )  # fmt: skip

    def close(self) -> None:
        self._db.close()

    def mark(self, function: str) -> Mark:
        """How far it has come."""
        rows = self._db.execute("SELECT epoch, sequence FROM marks WHERE function = ?", (function,))
        return Mark(*rows[0]) if rows else NOTHING

    def reached(self, function: str, mark: Mark) -> None:
        """It has come as far as that; a lower mark than the known one changes nothing."""
        self._db.execute(
            "INSERT INTO marks VALUES (?, ?, ?) ON CONFLICT (function) DO UPDATE"
            " SET epoch = excluded.epoch, sequence = excluded.sequence"
            " WHERE (excluded.epoch, excluded.sequence) > (epoch, sequence)",
            (function, *mark),
        )

    def begin(self, function: str, what: str, mark: Mark, digest: bytes = b"") -> None:
        """From here on a kill leaves something to be looked after."""
        self._db.execute(
            "INSERT OR REPLACE INTO begun VALUES (?, ?, ?, ?, ?)", (function, what, *mark, digest)
        )

    def end(self, function: str) -> None:
        """Nothing is left to be looked after."""
        self._db.execute("DELETE FROM begun WHERE function = ?", (function,))

    def begun(self) -> list[Begun]:
        """What was begun and not ended."""
        rows = self._db.execute("SELECT function, what, epoch, sequence, digest FROM begun")
        return [Begun(row[0], row[1], Mark(row[2], row[3]), row[4]) for row in rows]

    def forget(self, function: str) -> None:
        """The function is no more."""
        self._db.execute("DELETE FROM marks WHERE function = ?", (function,))
        self.end(function)

    def _failed(self, error: Exception) -> SystemFailure:
        return SystemFailure(
            f"the numbers of checkpoints cannot be kept: {error}",
            code="store-io",
            where=self._where,
        )

    def _newer(self, version: int) -> StateError:
        return StateError(f"it is of version {version}", code="store-newer", where=self._where)

    def _damaged(self, error: Exception) -> StateError:
        return StateError(
            f"the numbers of checkpoints are damaged: {error}",
            code="store-damaged",
            where=self._where,
        )
