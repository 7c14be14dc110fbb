"""What the daemon must remember: functions and events, in one SQLite file.

Used by one thread at a time, but not always the one that opened it (the daemon runs all calls on a
single-thread executor). :data:`MIGRATIONS` brings an older file up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelvisor.daemon import rows as rows_json
from accelvisor.daemon.database import Database, statements
from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.rows import Change
from accelvisor.errors import ConflictError, StateError, SystemFailure
from accelvisor.isolation.resources import Placement, Policy

_DAMAGED = (ValueError, TypeError, AttributeError, KeyError)
#: Scrub records kept; the oldest go first.
SCRUBS_KEPT = 10_000
#: Events kept; the oldest go first.
EVENTS_KEPT = 10_000

MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE functions (
        uuid TEXT PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        profile TEXT NOT NULL,
        card TEXT NOT NULL,
        placement TEXT NOT NULL,      -- JSON: {chip: [core, ...]}
        cores INTEGER NOT NULL,
        chips INTEGER NOT NULL,
        memory_bytes INTEGER NOT NULL,
        window_bytes INTEGER NOT NULL,
        queues INTEGER NOT NULL,
        ring_entries INTEGER NOT NULL,
        state TEXT NOT NULL,
        reason TEXT NOT NULL,
        domain TEXT,
        domain_uuid TEXT,
        created REAL NOT NULL         -- seconds since 1970
    ) STRICT;
    CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        subject TEXT NOT NULL,        -- UUID of a function or domain, or empty
        message TEXT NOT NULL
    ) STRICT;
    """,
    """
    ALTER TABLE functions ADD COLUMN resources TEXT NOT NULL DEFAULT '';   -- JSON: rows.py
    ALTER TABLE functions ADD COLUMN epoch INTEGER NOT NULL DEFAULT 1;
    ALTER TABLE functions ADD COLUMN policy TEXT NOT NULL DEFAULT 'burstable';
    ALTER TABLE functions ADD COLUMN weight INTEGER NOT NULL DEFAULT 100;
    ALTER TABLE functions ADD COLUMN tenant TEXT;      -- domain since the last scrub
    ALTER TABLE functions ADD COLUMN quarantine TEXT NOT NULL DEFAULT '';
    ALTER TABLE functions ADD COLUMN partition INTEGER;
    UPDATE functions SET tenant = domain_uuid;
    CREATE TABLE changes (
        function TEXT PRIMARY KEY,
        change TEXT NOT NULL,         -- JSON: rows.py
        time REAL NOT NULL
    ) STRICT;
    CREATE TABLE scrubs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        function TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        time REAL NOT NULL,
        envelope BLOB NOT NULL
    ) STRICT;
    CREATE INDEX scrubs_by_function ON scrubs (function, epoch);
    CREATE TABLE cards (
        name TEXT PRIMARY KEY,
        state TEXT NOT NULL,
        number INTEGER NOT NULL,
        envelope BLOB                 -- of the partition table, while it is frozen
    ) STRICT;
    """,
    """
    CREATE TABLE chips (              -- those of which the operator said something
        card TEXT NOT NULL,
        chip INTEGER NOT NULL,
        mode TEXT NOT NULL,
        PRIMARY KEY (card, chip)
    ) STRICT;
    """,
)


@dataclass(frozen=True, slots=True)
class Function:
    """One row of ``functions``. ``domain``/``domain_uuid`` name the domain that has it.

    Attributes:
        epoch: of its shape, when it was last read; it only grows.
        tenant: UUID of the domain that had it since it was last scrubbed.
        quarantine: why it stands still; empty when it does not.
        partition: number of the static partition that it fills.
    """

    uuid: str
    name: str
    profile: str
    placement: Placement
    cores: int
    chips: int
    memory_bytes: int
    window_bytes: int
    queues: int
    ring_entries: int
    state: State
    created: float
    reason: str = ""
    domain: str | None = None
    domain_uuid: str | None = None
    epoch: int = 1
    policy: Policy = Policy.BURSTABLE
    weight: int = 100
    tenant: str | None = None
    quarantine: str = ""
    partition: int | None = None

    @property
    def revoked(self) -> bool:
        """It has no part of a card any more; what is left is a device that does nothing."""
        return self.cores == 0

    @property
    def card(self) -> str:
        return self.placement.card

    def require_whole(self) -> None:
        """It has something to save or to move, and would go on with it.

        Raises:
            ConflictError: ``function-revoked``, ``function-quarantined``.
        """
        where = f"function:{self.name}"
        if self.revoked:
            raise ConflictError(
                f'function "{self.name}" was revoked',
                code="function-revoked",
                where=where,
                hint="detach it first",
            )
        if self.quarantine:
            raise ConflictError(
                f'function "{self.name}" is quarantined: {self.quarantine}',
                code="function-quarantined",
                where=where,
                hint="accelctl function reset, then try again",
            )

    def with_state(self, state: State, reason: str = "") -> Function:
        return replace(self, state=state, reason=reason)


@dataclass(frozen=True, slots=True)
class EventRecord:
    id: int
    time: float
    kind: str
    subject: str
    message: str


class Store:
    """The file. Every method that changes something is one transaction.

    Args:
        path: the database; its directory must exist. Created with mode 0600.
        clock: seconds since 1970, for events.

    Raises:
        StateError: ``store-damaged`` or ``store-newer`` (written by a newer accelvisord).
        SystemFailure: ``store-io``.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._where = f"store:{path}"
        steps = [statements(script) for script in MIGRATIONS]
        self._db = Database(path, steps, failed=self._failed, newer=self._newer)

    def close(self) -> None:
        self._db.close()

    # --- boot ------------------------------------------------------------------------------------

    def boot_id(self) -> str | None:
        """The boot in which the store was last used."""
        return self._meta("boot_id")

    def set_boot_id(self, boot_id: str) -> None:
        self._set_meta("boot_id", boot_id)

    def host_uuid(self, fresh: Callable[[], str]) -> str:
        """This host's own identity, made on first use."""
        known = self._meta("host_uuid")
        if known is None:
            known = fresh()
            self._set_meta("host_uuid", known)
        return known

    # --- functions -------------------------------------------------------------------------------

    def functions(self) -> list[Function]:
        with self._db.guard() as connection:
            cursor = connection.execute("SELECT * FROM functions ORDER BY created, uuid")
            names = [column[0] for column in cursor.description]
            return [self._function(dict(zip(names, row, strict=True))) for row in cursor]

    def insert(self, function: Function, message: str) -> EventRecord:
        """Journal the beginning of a creation.

        Raises:
            ConflictError: ``function-exists`` (name or UUID taken).
        """
        row = _row(function)
        columns = ", ".join(row)
        marks = ", ".join(f":{name}" for name in row)
        try:
            with self._db.transaction():
                self._db.execute(f"INSERT INTO functions ({columns}) VALUES ({marks})", row)
                return self._event("function-creating", function.uuid, message)
        except SystemFailure as error:
            if not isinstance(error.__cause__, sqlite3.IntegrityError):
                raise
            raise ConflictError(
                f'a function named "{function.name}" exists',
                code="function-exists",
                where="store",
                hint="choose another name, or delete that one",
            ) from error

    def update(self, function: Function, kind: str, message: str) -> EventRecord:
        """Write the row anew, with an event in the same transaction."""
        with self._db.transaction():
            return self._update(function, kind, message)

    def _update(self, function: Function, kind: str, message: str) -> EventRecord:
        row = _row(function)
        sets = ", ".join(f"{name} = :{name}" for name in row if name != "uuid")
        self._db.execute(f"UPDATE functions SET {sets} WHERE uuid = :uuid", row)
        return self._event(kind, function.uuid, message)

    def delete(self, uuid: str, message: str) -> EventRecord:
        with self._db.transaction():
            self._db.execute("DELETE FROM functions WHERE uuid = ?", (uuid,))
            self._db.execute("DELETE FROM changes WHERE function = ?", (uuid,))
            return self._event("function-deleted", uuid, message)

    # --- changes of shape, and scrub records -----------------------------------------------------

    def begin_change(self, change: Change) -> None:
        """Journal it: from here on both placements are held.

        Raises:
            ConflictError: ``change-unfinished``: one has begun already.
        """
        rows = self._db.execute("SELECT 1 FROM changes WHERE function = ?", (change.function,))
        if rows:
            raise ConflictError(
                "a change of this function has begun and is not finished",
                code="change-unfinished",
                where="store",
                hint="it is finished when accelvisord next finds the function's process",
            )
        text = rows_json.change_to_json(change)
        row = (change.function, text, self._clock())
        self._db.execute("INSERT INTO changes VALUES (?, ?, ?)", row)

    def end_change(self, function: Function, kind: str, message: str) -> EventRecord:
        """It was made, or was not: ``function`` is what is true now."""
        with self._db.transaction():
            self._db.execute("DELETE FROM changes WHERE function = ?", (function.uuid,))
            return self._update(function, kind, message)

    def changes(self) -> list[Change]:
        """Those that have begun."""
        rows = self._db.execute("SELECT function, change FROM changes ORDER BY time")
        try:
            return [rows_json.change(str(uuid), str(text)) for uuid, text in rows]
        except _DAMAGED as error:
            raise self._damaged(f"the journal of changes: {error}") from error

    def add_scrub(self, function: str, epoch: int, envelope: bytes) -> None:
        self._db.execute(
            "INSERT INTO scrubs (function, epoch, time, envelope) VALUES (?, ?, ?, ?)",
            (function, epoch, self._clock(), envelope),
        )
        self._db.execute(
            "DELETE FROM scrubs WHERE id <= (SELECT max(id) FROM scrubs) - ?", (SCRUBS_KEPT,)
        )

    def scrubs(self, function: str) -> list[tuple[int, bytes]]:
        """(epoch, envelope), newest first."""
        rows = self._db.execute(
            "SELECT epoch, envelope FROM scrubs WHERE function = ? ORDER BY id DESC", (function,)
        )
        return [(int(epoch), bytes(envelope)) for epoch, envelope in rows]

    # --- cards that are cut once -----------------------------------------------------------------

    def cards(self) -> list[tuple[str, str, int, bytes | None]]:
        """(name, state, number, envelope)."""
        return [
            (str(name), str(state), int(number), None if table is None else bytes(table))
            for name, state, number, table in self._db.execute(
                "SELECT name, state, number, envelope FROM cards ORDER BY name"
            )
        ]

    def set_card(
        self, name: str, state: str, number: int, envelope: bytes | None, message: str
    ) -> EventRecord:
        with self._db.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO cards VALUES (?, ?, ?, ?)", (name, state, number, envelope)
            )
            return self._event("card-changed", "", message)

    def chips(self) -> list[tuple[str, int, str]]:
        """(card, chip, mode) of those of which the operator said something."""
        rows = self._db.execute("SELECT card, chip, mode FROM chips ORDER BY card, chip")
        return [(str(card), int(chip), str(mode)) for card, chip, mode in rows]

    def set_chip(self, card: str, chip: int, mode: str, message: str) -> EventRecord:
        with self._db.transaction():
            self._db.execute("INSERT OR REPLACE INTO chips VALUES (?, ?, ?)", (card, chip, mode))
            return self._event("card-changed", "", message)

    # --- events ----------------------------------------------------------------------------------

    def record(self, kind: str, subject: str, message: str) -> EventRecord:
        with self._db.transaction():
            return self._event(kind, subject, message)

    def events(self, after: int | None = None, limit: int = 1000) -> list[EventRecord]:
        """Oldest first: the next ``limit`` with an id above ``after``; without it the newest."""
        newest = (
            "SELECT * FROM (SELECT id, time, kind, subject, message FROM events"
            " ORDER BY id DESC LIMIT ?) ORDER BY id"
        )
        following = (
            "SELECT id, time, kind, subject, message FROM events WHERE id > ? ORDER BY id LIMIT ?"
        )
        if after is None:
            rows = self._db.execute(newest, (limit,))
        else:
            rows = self._db.execute(following, (after, limit))
        return [EventRecord(*row) for row in rows]

    # --- inside ----------------------------------------------------------------------------------

    def _meta(self, key: str) -> str | None:
        rows = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def _set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _event(self, kind: str, subject: str, message: str) -> EventRecord:
        now = self._clock()
        rows = self._db.execute(
            "INSERT INTO events (time, kind, subject, message) VALUES (?, ?, ?, ?) RETURNING id",
            (now, kind, subject, message),
        )
        number = int(rows[0][0])
        self._db.execute("DELETE FROM events WHERE id <= ?", (number - EVENTS_KEPT,))
        return EventRecord(number, now, kind, subject, message)

    def _function(self, row: Mapping[str, Any]) -> Function:
        values = dict(row)
        card, cores, rest = (values.pop(name) for name in ("card", "placement", "resources"))
        try:
            placement = rows_json.placement(card, cores, rest)
            state, policy = State(values.pop("state")), Policy(values.pop("policy"))
        except _DAMAGED as error:
            raise self._damaged(f"the row of function {row['uuid']}: {error}") from error
        return Function(placement=placement, state=state, policy=policy, **values)

    def _damaged(self, what: str) -> StateError:
        return StateError(f"damaged: {what}", code="store-damaged", where=self._where)

    def _newer(self, version: int) -> StateError:
        return StateError(
            f"the database has schema {version}, this accelvisord knows {len(MIGRATIONS)}",
            code="store-newer",
            where=self._where,
            hint="install the newer accelvisord again",
        )

    def _failed(self, error: Exception) -> StateError | SystemFailure:
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(
            error, sqlite3.OperationalError | sqlite3.IntegrityError
        ):
            return StateError(
                f"the database is damaged: {error}",
                code="store-damaged",
                where=self._where,
                hint="restore it from a backup, or move it away to begin with no functions",
            )
        return SystemFailure(f"the database failed: {error}", code="store-io", where=self._where)


def _row(function: Function) -> dict[str, object]:
    return {
        "uuid": function.uuid,
        "name": function.name,
        "profile": function.profile,
        "card": function.card,
        "placement": rows_json.cores_to_json(function.placement),
        "resources": rows_json.rest_to_json(function.placement),
        "epoch": function.epoch,
        "policy": function.policy.value,
        "weight": function.weight,
        "tenant": function.tenant,
        "quarantine": function.quarantine,
        "partition": function.partition,
        "cores": function.cores,
        "chips": function.chips,
        "memory_bytes": function.memory_bytes,
        "window_bytes": function.window_bytes,
        "queues": function.queues,
        "ring_entries": function.ring_entries,
        "state": function.state.value,
        "reason": function.reason,
        "domain": function.domain,
        "domain_uuid": function.domain_uuid,
        "created": function.created,
    }
