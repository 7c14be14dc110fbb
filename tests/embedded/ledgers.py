"""What the ledgers of hosts say of a function, held against each other."""

from __future__ import annotations

import sqlite3
from typing import Any

from accelvisor.migration.ledger import SETTLED, Record, Signed, Standing


def history(host: Any, function: str) -> list[Record]:
    """A host's records of a function, the oldest first."""
    path = host.directory / "state" / "ledger.db"
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        rows = db.execute(
            "SELECT envelope FROM records WHERE function = ? ORDER BY id", (function,)
        ).fetchall()
    finally:
        db.close()
    return [Signed.open(row[0]).record for row in rows]


def owner(hosts: list[Any], function: str) -> str:
    """The one owner by all histories, which must not contradict each other."""
    settled: dict[int, Record] = {}
    for host in hosts:
        epochs = []
        for record in history(host, function):
            if record.state not in SETTLED:
                continue
            epochs.append(record.epoch)
            other = settled.setdefault(record.epoch, record)
            if record.state is Standing.COMMITTED or other.state is Standing.COMMITTED:
                assert (other.owner, other.state) == (record.owner, record.state)
        assert epochs == sorted(set(epochs)), f"{host.directory}: epochs {epochs}"
    return settled[max(settled)].owner
