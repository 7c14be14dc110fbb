"""SQLite files: opening, steps of the schema, transactions, errors."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from accelvisor.daemon.database import Database, statements
from accelvisor.errors import StateError, SystemFailure

FIRST = statements("CREATE TABLE things (name TEXT PRIMARY KEY) STRICT; -- as they are called\n")
SECOND = ("ALTER TABLE things ADD COLUMN size INTEGER",)


def opened(path: Path | None, steps: Sequence[Sequence[str]] = (FIRST,)) -> Database:
    return Database(
        path,
        steps,
        failed=lambda error: SystemFailure(str(error), code="store-io"),
        newer=lambda version: StateError(str(version), code="store-newer"),
        damaged=lambda error: StateError(str(error), code="store-damaged"),
    )


def test_it_is_the_owners_alone_and_on_disk_at_each_commit(tmp_path: Path) -> None:
    made = opened(tmp_path / "a.db")
    assert (tmp_path / "a.db").stat().st_mode & 0o777 == 0o600
    assert made.execute("PRAGMA synchronous") == [(2,)]
    assert made.execute("PRAGMA journal_mode") == [("wal",)]
    made.close()


def test_an_older_file_gets_the_steps_that_it_lacks(tmp_path: Path) -> None:
    made = opened(tmp_path / "a.db")
    made.execute("INSERT INTO things VALUES ('x')")
    made.close()
    made = opened(tmp_path / "a.db", (FIRST, SECOND))
    assert made.execute("SELECT name, size FROM things") == [("x", None)]
    made.close()


def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    opened(tmp_path / "a.db").close()
    with pytest.raises(StateError) as caught:
        opened(tmp_path / "a.db", (FIRST, (*SECOND, "CREATE TABLE things (name)")))
    assert caught.value.code == "store-damaged"
    made = opened(tmp_path / "a.db", (FIRST, SECOND))
    assert made.execute("SELECT name, size FROM things") == []
    made.close()


@pytest.mark.parametrize("version", [-1, 2])
def test_a_file_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    made = opened(tmp_path / "a.db")
    made.execute(f"PRAGMA user_version = {version}")
    made.close()
    with pytest.raises(StateError) as caught:
        opened(tmp_path / "a.db")
    assert (caught.value.code, caught.value.message) == ("store-newer", str(version))


def test_a_file_that_is_none_is_damaged_and_one_that_cannot_be_made_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"no database" * 100)
    with pytest.raises(StateError) as caught:
        opened(tmp_path / "a.db")
    assert caught.value.code == "store-damaged"
    with pytest.raises(SystemFailure) as failed:
        opened(tmp_path / "nowhere" / "a.db")
    assert failed.value.code == "store-io"


def test_a_transaction_is_done_whole_or_not_at_all() -> None:
    made = opened(None)
    twice = ["INSERT INTO things VALUES ('x')"] * 2

    def insert(then: Exception | None, *each: str) -> None:
        with made.transaction() as connection:
            for sql in each:
                connection.execute(sql)
            if then is not None:
                raise then

    with pytest.raises(SystemFailure) as caught:
        insert(None, *twice)
    assert isinstance(caught.value.__cause__, sqlite3.IntegrityError)
    with pytest.raises(KeyError):
        insert(KeyError(), twice[0])
    assert made.execute("SELECT * FROM things") == []
    with made.transaction():
        made.execute("INSERT INTO things VALUES ('z')")
    assert made.execute("SELECT * FROM things") == [("z",)]


def test_a_commit_that_fails_leaves_no_transaction_open() -> None:
    steps = ("CREATE TABLE a (n INTEGER PRIMARY KEY)",
             "CREATE TABLE b (n REFERENCES a DEFERRABLE INITIALLY DEFERRED)")  # fmt: skip
    made = opened(None, (steps,))
    made.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(SystemFailure), made.transaction() as connection:
        connection.execute("INSERT INTO b VALUES (1)")
    with made.transaction():
        made.execute("INSERT INTO a VALUES (1)")
    assert made.execute("SELECT (SELECT count(*) FROM a), (SELECT count(*) FROM b)") == [(1, 0)]


def test_threads_take_turns() -> None:
    made = opened(None)

    def work(who: int) -> None:
        for n in range(20):
            with made.transaction():
                made.execute("INSERT INTO things VALUES (?)", (f"{who}-{n}",))

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.execute("SELECT count(*) FROM things") == [(80,)]
