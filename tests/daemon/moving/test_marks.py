"""Keys and registrations on disk."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from accelvisor.daemon.moving.marks import Marks, require_key
from accelvisor.errors import AccelvisorError, NotFoundError, StateError
from accelvisor.frames.watermark import Key, Place, Registration, register
from accelvisor.limits import LIMITS

KEY = Key(bytes(range(32)))
FUNCTION, SECOND = str(UUID(int=1)), str(UUID(int=2))
PLACE = Place(handle=1 << 32, address=4096, dtype="float32", shape=(64, 64))


def registration(model: str = "m", function: str = FUNCTION) -> Registration:
    return register(function, model, KEY.key_id, PLACE)


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    return Marks(tmp_path / "watermarks")


def code(action: object) -> str:
    with pytest.raises(AccelvisorError) as caught:
        action()  # type: ignore[operator]
    return caught.value.code


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    first = Marks(tmp_path / "w")
    first.add_key(KEY)
    first.put(registration("b"), registration("a"), registration("c", SECOND))
    second = Marks(tmp_path / "w")
    assert second.keys() == [KEY.key_id]
    assert second.key(KEY.key_id) == KEY
    assert [r.model for r in second.models()] == ["a", "b", "c"]
    assert second.models(SECOND) == [registration("c", SECOND)]


def test_a_secret_is_readable_by_nobody_else(marks: Marks, tmp_path: Path) -> None:
    marks.add_key(KEY)
    folder = tmp_path / "watermarks"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert files[f"{KEY.key_id}.key"] == files["models.db"] == 0o600
    assert not [name for name in files if name.endswith(".new")]


def test_a_key_is_found_by_its_id_and_by_nothing_else(marks: Marks, tmp_path: Path) -> None:
    marks.add_key(KEY)
    marks.add_key(KEY)
    (tmp_path / "x.key").write_text(KEY.to_text())
    for name in ("../x", "", KEY.key_id[:-1], KEY.key_id.upper(), f"{KEY.key_id}/"):
        assert marks.key(name) is None
    with pytest.raises(NotFoundError) as caught:
        require_key(marks.key("0" * 32), "0" * 32)
    assert caught.value.code == "watermark-key-unknown"


def test_a_key_file_that_holds_another_key_is_damage(marks: Marks, tmp_path: Path) -> None:
    path = tmp_path / "watermarks" / f"{KEY.key_id}.key"
    for text in (Key(bytes(32)).to_text(), "", KEY.to_text() * 100):
        path.write_text(text)
        assert code(lambda: marks.key(KEY.key_id)) == "watermark-damaged"


def test_a_key_that_a_model_needs_stays(marks: Marks) -> None:
    marks.add_key(KEY)
    marks.put(registration())
    assert code(lambda: marks.remove_key(KEY.key_id)) == "watermark-key-used"
    marks.drop(FUNCTION)
    marks.remove_key(KEY.key_id)
    assert marks.keys() == []
    assert code(lambda: marks.remove_key(KEY.key_id)) == "watermark-key-unknown"


def test_only_what_is_named_is_dropped(marks: Marks) -> None:
    marks.put(registration("a"), registration("b"), registration("a", SECOND))
    assert marks.drop(FUNCTION, "a") == 1
    assert marks.drop(FUNCTION, "a") == 0
    assert [r.model for r in marks.models(FUNCTION)] == ["b"]
    assert len(marks.models(SECOND)) == 1


def test_a_model_that_is_registered_again_is_replaced(marks: Marks) -> None:
    marks.put(registration())
    moved = msgspec.structs.replace(
        registration(), place=msgspec.structs.replace(PLACE, address=8192)
    )
    marks.put(moved)
    assert marks.models() == [moved]


def test_no_more_models_than_a_manifest_names_and_none_of_too_many(marks: Marks) -> None:
    marks.put(*(registration(f"m{i}") for i in range(LIMITS.manifest_models - 1)))
    assert code(lambda: marks.put(registration("x"), registration("y"))) == "watermark-models"
    assert len(marks.models()) == LIMITS.manifest_models - 1
    marks.put(registration("x"))


def test_a_table_that_is_none_is_damage(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "models.db").write_bytes(b"no table at all" * 100)
    with pytest.raises(StateError):
        Marks(folder)


def test_a_registration_that_cannot_be_read_is_damage(marks: Marks, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "watermarks/models.db") as db:
        db.execute("INSERT INTO models VALUES (?, 'm', 'k', x'00')", (FUNCTION,))
    db.close()
    assert code(lambda: marks.models()) == "watermark-damaged"
