"""The daemon's SQLite files: how one is opened, brought up to date and used.

WAL with ``synchronous=FULL``: a commit that returned survives a power cut. ``user_version`` counts
the steps of the schema that a file has; each further one is one transaction.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelvisor.errors import AccelvisorError


class Database:
    """One connection to one file. Thread-safe; a statement outside of :meth:`transaction` is one.

    Args:
        path: its directory must exist. Made with mode 0600. None: in memory.
        steps: of the schema, each a list of statements.
        failed: the error for what SQLite or the system says.
        newer: the error for a file that has more steps, so many.
        damaged: the error for what SQLite says of a file that it opens; ``failed`` by default.

    Raises:
        what these make.
    """

    def __init__(
        self,
        path: Path | None,
        steps: Sequence[Sequence[str]],
        *,
        failed: Callable[[Exception], AccelvisorError],
        newer: Callable[[int], AccelvisorError],
        damaged: Callable[[Exception], AccelvisorError] | None = None,
    ) -> None:
        self._failed = failed
        self._lock = threading.RLock()
        try:
            if path is not None:
                path.touch(mode=0o600)
            self._db = sqlite3.connect(
                path or ":memory:", isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(steps, newer)
            except BaseException:
                self._db.close()
                raise
        except sqlite3.Error as error:
            raise (damaged or failed)(error) from error
        except OSError as error:
            raise failed(error) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def execute(
        self, sql: str, values: Sequence[object] | Mapping[str, object] = ()
    ) -> list[tuple[Any, ...]]:
        """One statement and all rows of its answer."""
        with self.guard() as connection:
            return connection.execute(sql, values).fetchall()

    @contextmanager
    def guard(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone; what it raises becomes an error of ours."""
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:
                raise self._failed(error) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """As :meth:`guard`: all that is done within, or nothing of it."""
        with self.guard() as connection, _transaction(connection):
            yield connection

    def _prepare(
        self, steps: Sequence[Sequence[str]], newer: Callable[[int], AccelvisorError]
    ) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= len(steps):
            raise newer(version)
        for number in range(version, len(steps)):
            # executescript would commit first: the version must move in the same transaction.
            with _transaction(self._db):
                for statement in steps[number]:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {number + 1}")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def statements(script: str) -> list[str]:
    """Split a step; comments end at their line, so none may hold a semicolon."""
    return [part for part in (text.strip() for text in script.split(";")) if part]
