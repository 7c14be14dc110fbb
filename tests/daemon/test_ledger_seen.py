"""What a host has seen of a shared ledger outlives its daemon, and never becomes older."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelvisor.daemon.ledger_seen import Seen
from accelvisor.errors import StateError
from tests.migration.ledgers import F, G
from tests.migration.test_succession import MOVED, RELEASED, signed


def test_the_newest_is_known_after_a_restart(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "seen.db")
    assert seen.get(F) is None
    records = signed((*MOVED, RELEASED))
    for record in (records[0], records[2], records[1], records[3], records[2]):
        seen.saw(record)
    seen.close()
    again = Seen(tmp_path / "seen.db")
    assert again.get(F) == records[3]
    assert again.get(G) is None
    again.close()


def test_a_decision_is_newer_than_what_was_prepared() -> None:
    seen = Seen()
    prepared, committed = signed(MOVED[1:])
    seen.saw(prepared)
    seen.saw(committed)
    seen.saw(prepared)
    assert seen.get(F) == committed


def test_a_file_that_is_none_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "seen.db").write_bytes(b"rubbish" * 1000)
    with pytest.raises(StateError) as caught:
        Seen(tmp_path / "seen.db")
    assert caught.value.code == "ledger-damaged"
