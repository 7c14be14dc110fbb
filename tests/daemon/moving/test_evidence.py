"""The audit file, used nonces, the journal of moves: what a kill leaves, what damage does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from accelvisor.daemon.moving.evidence import AuditFile, Nonces
from accelvisor.daemon.moving.journal import Journal
from accelvisor.errors import DataError, StateError, SystemFailure
from accelvisor.frames import audit
from accelvisor.frames.audit import Event


def event(number: int, code: str = "frame-root") -> Event:
    return Event(number, 6, code, "ab" * 32, "a detail")


def test_the_chain_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    first = AuditFile(path)
    first.record(event(1, "passed"))
    first.record(event(2))
    head = first.known()
    first.close()
    second = AuditFile(path)
    second.record(event(3))
    second.close()
    records, _ = audit.verify(audit.unpack(path.read_bytes()), head)
    assert [record.time_ns for record in records] == [1, 2, 3]


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_record_that_was_cut_short_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "audit"
    file = AuditFile(path)
    for number in range(3):
        file.record(event(number))
    file.close()
    path.write_bytes(path.read_bytes()[:-cut])
    file = AuditFile(path)
    assert file.known().count == 2
    file.record(event(9))
    file.close()
    records, _ = audit.verify(audit.unpack(path.read_bytes()))
    assert [record.time_ns for record in records] == [0, 1, 9]


def test_a_changed_record_is_not_gone_on_from(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    file = AuditFile(path)
    for number in range(3):
        file.record(event(number))
    file.close()
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"a detail")] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError):
        AuditFile(path)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def short_writes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Each write takes so many bytes, and says so."""
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:size]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:size], at))


def test_a_record_that_is_written_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_writes(monkeypatch, 7)
    file = AuditFile(tmp_path / "audit")
    for number in range(3):
        file.record(event(number))
    file.close()
    assert AuditFile(tmp_path / "audit").known() == file.known()


@pytest.mark.parametrize("step", ["pwrite", "fdatasync"])
def test_a_record_that_failed_does_not_stop_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path, write = tmp_path / "audit", os.pwrite
    file = AuditFile(path)
    file.record(event(1))

    def torn(fd: int, data: bytes, at: int) -> int:
        # A part is taken; there is no room for the rest.
        return write(fd, data[:9], at) if at == size else full_disk() or 0

    size = path.stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(os, step, torn if step == "pwrite" else full_disk)
        with pytest.raises(SystemFailure) as caught:
            file.record(event(2))
    assert caught.value.code == "audit-io"
    file.record(event(3))
    file.close()
    records, _ = audit.verify(audit.unpack(path.read_bytes()))
    assert [record.time_ns for record in records] == [1, 3]
    AuditFile(path).close()


def test_what_cannot_be_taken_back_ends_the_audit_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AuditFile(tmp_path / "audit")
    file.record(event(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full_disk)
        patched.setattr(os, "ftruncate", full_disk)
        with pytest.raises(SystemFailure):
            file.record(event(2))
    with pytest.raises(SystemFailure) as caught:
        file.record(event(3))
    assert caught.value.code == "audit-lost"
    file.close()
    again = AuditFile(tmp_path / "audit")
    again.record(event(4))
    again.close()


def test_a_question_about_a_nonce_that_fails_says_so(tmp_path: Path) -> None:
    nonces = Nonces(tmp_path / "nonces.db", lambda: 0)
    nonces.close()
    with pytest.raises(SystemFailure) as caught:
        nonces.seen(b"n" * 16)
    assert caught.value.code == "audit-io"


def test_a_nonce_is_used_once_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    nonces = Nonces(path, lambda: 0)
    assert not nonces.seen(b"n" * 16)
    assert nonces.use(b"n" * 16, 100)
    assert not nonces.use(b"n" * 16, 100)
    nonces.close()
    again = Nonces(path, lambda: 0)
    assert again.seen(b"n" * 16)
    again.close()


def test_nonces_are_forgotten_when_what_they_were_for_has_expired(tmp_path: Path) -> None:
    now = 0
    nonces = Nonces(tmp_path / "nonces.db", lambda: now)
    nonces.use(b"a" * 16, 100)
    now = 200
    nonces.use(b"b" * 16, 300)
    assert not nonces.seen(b"a" * 16)
    nonces.close()


def test_a_moves_row_keeps_its_beginning(tmp_path: Path) -> None:
    now = 1.0
    journal = Journal(tmp_path / "moves.db", lambda: now)
    journal.write(b"i" * 16, "source", "d", "offered", b"1")
    now = 2.0
    journal.write(b"i" * 16, "source", "d", "sealed", b"2")
    journal.write(b"i" * 16, "destination", "d", "receiving", b"3")
    journal.close()
    again = Journal(tmp_path / "moves.db", lambda: now)
    rows = again.rows()
    assert [(row.role, row.state, row.record) for row in rows] == [
        ("source", "sealed", b"2"),
        ("destination", "receiving", b"3"),
    ]
    assert (rows[0].begun, rows[0].changed) == (1.0, 2.0)
    again.close()


def test_open_moves_are_never_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelvisor.daemon.moving.journal.KEPT", 2)
    now = 0.0
    journal = Journal(tmp_path / "moves.db", lambda: now)
    for number in range(6):
        now += 1
        state = "sealed" if number == 0 else "done"
        journal.write(bytes([number]) * 16, "source", "d", state, b"")
    journal.prune(frozenset(("done",)))
    assert [row.id[0] for row in journal.rows()] == [0, 4, 5]
    journal.close()


def test_starts_are_counted(tmp_path: Path) -> None:
    for wanted in (1, 2, 3):
        journal = Journal(tmp_path / "moves.db", lambda: 0.0)
        assert journal.start() == wanted
        journal.close()


def test_a_file_that_is_no_database_is_said_to_be_damaged(tmp_path: Path) -> None:
    (tmp_path / "moves.db").write_bytes(b"nonsense" * 1000)
    with pytest.raises(StateError) as caught:
        Journal(tmp_path / "moves.db", lambda: 0.0)
    assert caught.value.code == "store-damaged"


def test_a_directory_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    for make in (
        lambda: Journal(tmp_path / "no" / "moves.db", lambda: 0.0),
        lambda: Nonces(tmp_path / "no" / "nonces.db", lambda: 0),
        lambda: AuditFile(tmp_path / "no" / "audit"),
    ):
        with pytest.raises(SystemFailure):
            make()
