"""Files by name: whole or not there, and never believed about what they are."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from uuid import uuid4

import pytest

from accelvisor.daemon.moving.numbers import NOTHING, Begun, Mark, Numbers
from accelvisor.daemon.moving.shelf import Shelf
from accelvisor.errors import (
    AccelvisorError,
    CapacityError,
    ConflictError,
    NotFoundError,
    StateError,
    UsageError,
)

F = "7d813c1d-8768-4eaf-a562-9e9e69b5bbbd"


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "checkpoints")


def put(shelf: Shelf, name: str, data: bytes) -> None:
    with shelf.put(name) as file:
        file.write(data)


def files(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in tmp_path.rglob("*") if p.is_file())


def test_what_was_put_is_there_and_nothing_else(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, f"{F}/a", b"whole")
    with shelf.open(f"{F}/a") as file:
        assert file.read() == b"whole"
    assert files(tmp_path) == ["a.xckp"]
    assert shelf.names() == [f"{F}/a"]
    shelf.delete(f"{F}/a")
    assert files(tmp_path) == []


def test_a_put_that_fails_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        put(shelf, f"{F}/a", "no bytes")  # type: ignore[arg-type]
    assert files(tmp_path) == []


def test_a_full_disk_is_said_so_and_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(CapacityError) as caught, shelf.put(f"{F}/a"):
        raise OSError(errno.ENOSPC, "no space")
    assert caught.value.code == "checkpoint-space"
    assert files(tmp_path) == []
    with pytest.raises(CapacityError):
        shelf.require_room(1 << 60)


def test_nobodys_place_is_taken(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, f"{F}/a", b"first")
    with pytest.raises(ConflictError):
        put(shelf, f"{F}/a", b"second")
    # Also by one that came while we wrote.
    early = tmp_path / "checkpoints" / F / "b.xckp"
    with pytest.raises(ConflictError), shelf.put(f"{F}/b"):
        early.write_bytes(b"early")
    with shelf.open(f"{F}/b") as file:
        assert file.read() == b"early"
    assert files(tmp_path) == ["a.xckp", "b.xckp"]


@pytest.mark.parametrize(
    "name",
    ["", "a", f"{F}", f"{F}/", f"{F}/..", f"{F}/.a", f"{F}/a/b", "../x/a", f"{F}/a\n", f"{F}/a\0",
     f"{F.upper()}x/a", f"x{F}/a", f"{F}/{'a' * 65}"],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(shelf: Shelf, name: str) -> None:
    for verb in (shelf.open, shelf.put):
        with pytest.raises(UsageError), verb(name):
            pass
    with pytest.raises(UsageError):
        shelf.delete(name)


def test_a_link_is_not_followed(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, f"{F}/a", b"x")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    os.symlink(secret, tmp_path / "checkpoints" / F / "b.xckp")
    with pytest.raises(AccelvisorError), shelf.open(f"{F}/b"):
        pass


def test_files_that_make_no_sense_are_left_out_of_the_list(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, f"{F}/a", b"nonsense")
    put(shelf, f"{F}/b", b"")
    (tmp_path / "checkpoints" / "notes.txt").write_text("a person's")
    (tmp_path / "checkpoints" / F / "notes.txt").write_text("a person's")
    assert shelf.list() == []
    assert shelf.names() == [f"{F}/a", f"{F}/b"]


def test_half_written_ones_are_swept_and_nothing_else(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, f"{F}/a", b"x")
    (tmp_path / "checkpoints" / F / ".b.xckp.new").write_bytes(b"half")
    (tmp_path / "checkpoints" / F / "notes.new").write_text("a person's")
    shelf.sweep()
    assert files(tmp_path) == ["a.xckp", "notes.new"]


def test_a_name_without_its_function_is_found_where_it_is_the_only_one(shelf: Shelf) -> None:
    other = str(uuid4())
    put(shelf, f"{F}/a", b"x")
    put(shelf, f"{F}/b", b"x")
    put(shelf, f"{other}/b", b"x")
    assert shelf.find("a") == f"{F}/a"
    assert shelf.find(f"{other}/b") == f"{other}/b"
    with pytest.raises(ConflictError):
        shelf.find("b")
    with pytest.raises(NotFoundError):
        shelf.find("../a")


# --- numbers --------------------------------------------------------------------------------------


def test_a_mark_only_rises_and_survives(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path / "n.db")
    assert numbers.mark(F) == NOTHING
    for mark in (Mark(1, 5), Mark(1, 2), Mark(2, 0), Mark(1, 9)):
        numbers.reached(F, mark)
    numbers.close()
    numbers = Numbers(tmp_path / "n.db")
    assert numbers.mark(F) == Mark(2, 0)
    numbers.forget(F)
    assert numbers.mark(F) == NOTHING
    numbers.close()


def test_what_was_begun_is_known_until_it_ended(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path / "n.db")
    numbers.begin(F, "create", Mark(1, 1))
    numbers.begin(F, "restore", Mark(1, 1), b"d")
    numbers.close()
    numbers = Numbers(tmp_path / "n.db")
    assert numbers.begun() == [Begun(F, "restore", Mark(1, 1), b"d")]
    numbers.end(F)
    assert numbers.begun() == []
    numbers.close()


def test_a_damaged_or_newer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "n.db").write_bytes(b"x" * 5000)
    with pytest.raises(StateError) as caught:
        Numbers(tmp_path / "n.db")
    assert caught.value.code == "store-damaged"
    numbers = Numbers(tmp_path / "m.db")
    numbers._db.execute("PRAGMA user_version = 99")
    numbers.close()
    with pytest.raises(StateError) as caught:
        Numbers(tmp_path / "m.db")
    assert caught.value.code == "store-newer"
