"""Marking a layer in a file."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest

from accelvisor.errors import AccelvisorError, SystemFailure
from accelvisor.frames.watermark import Key
from accelvisor.kernels import modelfile

KEY = Key(bytes(range(32)))
OTHER = Key(bytes(range(1, 33)))
NETWORK = Path(__file__).parents[2] / "fixtures/digits/mlp.npz"


def refused(action: object) -> str:
    with pytest.raises(AccelvisorError) as caught:
        action()  # type: ignore[operator]
    return caught.value.code


def test_the_largest_layer_is_marked_and_nothing_else_changes(tmp_path: Path) -> None:
    target = tmp_path / "marked.npz"
    made = modelfile.mark(NETWORK, target, None, "digits", KEY)
    assert (made.array, made.averages) == ("w0", 512)
    assert 0 < made.largest_shift < 1.5
    assert modelfile.look(target, "w0", "digits", KEY) == ("w0", 0, True)
    before, after = modelfile.read(NETWORK), modelfile.read(target)
    assert set(before) == set(after)
    for name in set(before) - {"w0"}:
        np.testing.assert_array_equal(before[name], after[name])
    assert after["w0"].dtype == np.float32
    assert [path.name for path in tmp_path.iterdir()] == ["marked.npz"]


@pytest.mark.parametrize(("model", "key"), [("digits", OTHER), ("digit", KEY)])
def test_another_key_or_name_finds_nothing(tmp_path: Path, model: str, key: Key) -> None:
    target = tmp_path / "marked.npz"
    modelfile.mark(NETWORK, target, "w0", "digits", KEY)
    found = modelfile.look(target, "w0", model, key)
    assert found.errors > 32
    assert not found.accepted


def test_a_single_array_can_be_marked(tmp_path: Path) -> None:
    source, target = tmp_path / "a.npy", tmp_path / "b.npz"
    np.save(source, np.random.RandomState(1).standard_normal((64, 64)).astype(np.float16))
    assert modelfile.mark(source, target, None, "m", KEY).array == modelfile.ONLY
    assert modelfile.look(target, None, "m", KEY).accepted


def test_a_file_may_be_marked_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    path.write_bytes(NETWORK.read_bytes())
    modelfile.mark(path, path, None, "digits", KEY)
    assert modelfile.look(path, None, "digits", KEY).accepted


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    bad, objects, taken = tmp_path / "bad.npz", tmp_path / "o.npy", tmp_path / "taken.npz"
    bad.write_bytes(b"PK\3\4 no archive")
    np.save(objects, np.array([{}]), allow_pickle=True)
    with zipfile.ZipFile(taken, "w") as archive, archive.open("file.npy", "w") as member:
        np.lib.format.write_array(member, np.ones((64, 64)))
    for path in (bad, objects, taken):
        assert refused(lambda path=path: modelfile.look(path, None, "m", KEY)) == "model-invalid"
    missing = tmp_path / "none.npz"
    assert refused(lambda: modelfile.look(missing, None, "m", KEY)) == "file-not-found"
    assert refused(lambda: modelfile.look(NETWORK, "w9", "m", KEY)) == "watermark-array"


def test_what_cannot_be_marked_or_written_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "marked.npz"
    code = refused(lambda: modelfile.mark(NETWORK, target, "b0", "digits", KEY))
    assert code == "watermark-shape"
    with pytest.raises(SystemFailure):
        modelfile.mark(NETWORK, tmp_path / "no/where.npz", "w0", "digits", KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_marked_file_is_readable_like_any_other(tmp_path: Path) -> None:
    target = tmp_path / "marked.npz"
    modelfile.mark(NETWORK, target, None, "digits", KEY)
    assert stat.S_IMODE(target.stat().st_mode) & stat.S_IRUSR
