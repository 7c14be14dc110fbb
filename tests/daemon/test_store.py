from __future__ import annotations

import itertools
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from accelvisor.daemon import store as store_module
from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.store import Function, Store
from accelvisor.errors import ConflictError, StateError, SystemFailure
from accelvisor.isolation.resources import Placement, Range


def function(number: int = 1, **changes: object) -> Function:
    made = Function(
        uuid=f"u{number}",
        name=f"n{number}",
        profile="small",
        placement=Placement(
            "card0", {0: (1, 2), 3: (0,)}, (Range(0, 0, 4096),), (3, 4), 1, (7,), (2, 5)
        ),
        cores=3,
        chips=2,
        memory_bytes=4096,
        window_bytes=8192,
        queues=2,
        ring_entries=16,
        state=State.CREATING,
        created=float(number),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path):
    ticks = itertools.count(1.0)
    opened = Store(tmp_path / "db", lambda: next(ticks))
    yield opened
    opened.close()


def reopened(path: Path) -> list[Function]:
    again = Store(path / "db", lambda: 0.0)
    try:
        return again.functions()
    finally:
        again.close()


def test_a_placement_of_before_links_were_held_has_none(store: Store) -> None:
    store.insert(function(), "one")
    old = '{"ranges": [[0, 0, 4096]], "queues": [3, 4], "vector": 1, "cpus": [7]}'
    store._db.execute("UPDATE functions SET resources = ?", (old,))
    assert store.functions() == [
        function(placement=replace(function().placement, links=()))
    ]


def test_modes_of_chips_are_kept(store: Store) -> None:
    store.set_chip("card0", 3, "disabled", "off")
    store.set_chip("card0", 3, "pass-through", "on")
    assert store.chips() == [("card0", 3, "pass-through")]
    assert [item.kind for item in store.events()] == ["card-changed"] * 2


def test_what_is_written_comes_back(store: Store, tmp_path: Path) -> None:
    one, two = (
        function(1),
        function(2, state=State.RUNNING, reason="", domain="vm", domain_uuid="d"),
    )
    store.insert(two, "two")
    store.insert(one, "one")
    assert store.functions() == [one, two]  # oldest first
    assert reopened(tmp_path) == [one, two]


def test_update_and_delete_with_their_events(store: Store) -> None:
    store.insert(function(), "begin")
    changed = function(state=State.FAILED, reason="because")
    record = store.update(changed, "function-failed", "it failed")
    assert (record.id, record.kind, record.subject) == (2, "function-failed", "u1")
    assert store.functions() == [changed]
    store.delete("u1", "gone")
    assert store.functions() == []
    assert [event.message for event in store.events()] == ["begin", "it failed", "gone"]
    assert [event.id for event in store.events(after=1)] == [2, 3]
    assert [event.id for event in store.events(limit=1)] == [3]


@pytest.mark.parametrize("clash", [{"uuid": "u1", "name": "x"}, {"uuid": "x", "name": "n1"}])
def test_a_taken_name_or_uuid_changes_nothing(store: Store, clash: dict[str, str]) -> None:
    """P7: two partitions with one UUID."""
    store.insert(function(), "begin")
    with pytest.raises(ConflictError) as caught:
        store.insert(function(2, **clash), "again")
    assert caught.value.code == "function-exists"
    assert store.functions() == [function()]
    assert len(store.events()) == 1


def test_a_failing_step_leaves_no_half_transaction(store: Store) -> None:
    """The row and its event come together or not at all."""
    store.insert(function(), "begin")
    with pytest.raises(SystemFailure) as caught:
        store.update(function(state=State.READY), "kind", None)  # type: ignore[arg-type]
    assert caught.value.code == "store-io"
    assert store.functions() == [function()]
    assert len(store.events()) == 1


def test_old_events_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "EVENTS_KEPT", 3)
    for number in range(7):
        store.record("kind", "", str(number))
    assert [event.message for event in store.events()] == ["4", "5", "6"]
    assert store.events()[-1].id == 7  # numbers are never used again


def test_durability_is_full_and_the_file_is_private(store: Store, tmp_path: Path) -> None:
    assert store._db.execute("PRAGMA synchronous") == [(2,)]
    assert store._db.execute("PRAGMA journal_mode") == [("wal",)]
    assert (tmp_path / "db").stat().st_mode & 0o777 == 0o600


def test_boot_and_host_identity(store: Store) -> None:
    assert store.boot_id() is None
    store.set_boot_id("a")
    store.set_boot_id("b")
    assert store.boot_id() == "b"
    assert store.host_uuid(lambda: "one") == "one"
    assert store.host_uuid(lambda: "two") == "one"


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StateError) as caught:
        Store(tmp_path / "db", lambda: 0.0)
    assert caught.value.code == "store-newer"


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"not a database" * 100)
    with pytest.raises(StateError) as caught:
        Store(tmp_path / "db", lambda: 0.0)
    assert caught.value.code == "store-damaged"
    assert (tmp_path / "db").read_bytes().startswith(b"not a database")


def test_a_damaged_row_is_named(store: Store) -> None:
    store.insert(function(), "begin")
    store._db.execute("UPDATE functions SET state = 'sleepy'")
    with pytest.raises(StateError, match="u1"):
        store.functions()
    store._db.execute("UPDATE functions SET state = 'ready', placement = '[1'")
    with pytest.raises(StateError, match="u1"):
        store.functions()


def test_an_unreachable_directory(tmp_path: Path) -> None:
    with pytest.raises(SystemFailure) as caught:
        Store(tmp_path / "missing" / "db", lambda: 0.0)
    assert caught.value.code == "store-io"


def test_a_migration_that_fails_is_not_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path / "db", lambda: 0.0).close()
    good = store_module.MIGRATIONS
    broken = (*good, "CREATE TABLE extra (x INTEGER); CREATE TABLE meta (x INTEGER)")
    monkeypatch.setattr(store_module, "MIGRATIONS", broken)
    with pytest.raises(SystemFailure):
        Store(tmp_path / "db", lambda: 0.0)
    fixed = (*good, "CREATE TABLE extra (x INTEGER)")
    monkeypatch.setattr(store_module, "MIGRATIONS", fixed)
    opened = Store(tmp_path / "db", lambda: 0.0)
    assert opened._db.execute("PRAGMA user_version") == [(len(fixed),)]
    opened.close()
