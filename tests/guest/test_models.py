"""Model and data files, and the digits that come with the project."""

from __future__ import annotations

import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelvisor.errors import AccelvisorError, DataError, NotFoundError
from accelvisor.guest import models

DIGITS = Path(__file__).parents[2] / "fixtures" / "digits"

GOOD: dict[str, Any] = {
    "w0": np.zeros((4, 3), np.float32),
    "b0": np.zeros(3, np.float32),
    "x_test": np.zeros((2, 4), np.uint8),
    "y_test": np.zeros(2, np.uint8),
}


def save(path: Path, **changes: Any) -> Path:
    arrays = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
    np.savez(path, **arrays)
    return path


def test_the_digits_are_what_their_readme_says() -> None:
    train, test = models.load_data(DIGITS / "digits.npz")
    assert (train.x.shape, test.x.shape) == ((1437, 64), (360, 64))
    assert train.x.max() == 1.0
    assert sorted(set(train.labels.tolist())) == list(range(10))
    model = models.load_model(DIGITS / "mlp.npz")
    assert model.network.sizes == (64, 64, 10)
    assert np.array_equal(model.test.x, test.x)


def test_the_trained_network_is_what_its_script_makes() -> None:
    done = subprocess.run(
        [sys.executable, str(DIGITS / "train.py"), "--check"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.9611" in done.stdout


def test_a_good_file_is_read(tmp_path: Path) -> None:
    model = models.load_model(save(tmp_path / "m.npz", scale=0.5, activation="tanh"))
    assert (model.network.sizes, model.network.activation) == ((4, 3), "tanh")


@pytest.mark.parametrize(
    "changes",
    [
        {"w0": None},
        {"b0": None},
        {"x_test": None},
        {"y_test": None},
        {"w0": np.zeros((4, 3), np.int32)},
        {"w0": np.zeros((4, 3, 1), np.float32)},
        {"b0": np.zeros(4, np.float32)},
        {"w1": np.zeros((4, 3), np.float32), "b1": np.zeros(3, np.float32)},
        {"x_test": np.zeros((2, 5), np.uint8)},
        {"x_test": np.zeros((0, 4), np.uint8)},
        {"x_test": np.array(["a", "b"])},
        {"y_test": np.zeros(3, np.uint8)},
        {"y_test": np.array([-1, 0])},
        {"y_test": np.zeros(2, np.float32)},
        {"activation": "step"},
    ],
)
def test_wrong_contents_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(AccelvisorError) as caught:
        models.load_model(save(tmp_path / "m.npz", **changes))
    assert caught.value.hint


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        models.read(tmp_path / "absent.npz")
    for name, content in (("a.npz", b"not a zip"), ("b.npz", b""), ("c.npz", b"PK\x03\x04junk")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError):
            models.read(tmp_path / name)
    with pytest.raises(DataError):
        models.read(tmp_path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (exec, ("raise SystemExit('unpickled')",))

    path = tmp_path / "m.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w0.npy", pickle.dumps(Bomb()))
    with pytest.raises(DataError):
        models.read(path)
    np.savez(path, w0=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError):
        models.read(path)


def test_a_zip_that_unpacks_to_too_much_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.npz"
    monkeypatch.setattr(models, "_FILE_BYTES", 1 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w0.npy", bytes((1 << 20) + 1))
    assert path.stat().st_size < 1 << 16
    with pytest.raises(DataError, match="unpacks to more than"):
        models.read(path)


def test_a_saved_network_is_read_back(tmp_path: Path) -> None:
    _, test = models.load_data(DIGITS / "digits.npz")
    parameters = [np.ones((64, 10), np.float32), np.zeros(10, np.float32)]
    models.save_model(tmp_path / "m.npz", parameters, test, 1 / 16)
    model = models.load_model(tmp_path / "m.npz")
    assert np.array_equal(model.parameters[0], parameters[0])
    assert np.array_equal(model.test.x, test.x)
