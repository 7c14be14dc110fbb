"""accelctl checkpoint and accelctl watermark against a daemon with real functions."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from accelvisor.cli import main as main_module
from accelvisor.embedded.host import EmbeddedHost
from accelvisor.frames.steps import STEPS
from accelvisor.guest.function import Function

Ctl = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedHost]:
    with EmbeddedHost() as host:
        host.create("small", "f")
        yield host


@pytest.fixture
def ctl(embedded: EmbeddedHost, capsys: pytest.CaptureFixture[str]) -> Ctl:
    def run(*words: object) -> tuple[int, str, str]:
        socket = str(embedded.run / "admin")
        code = main_module.main([*map(str, words), "--socket", socket])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def nobody(capsys: pytest.CaptureFixture[str]) -> Ctl:
    """Without a daemon."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main_module.main([*map(str, words), "--socket", "/nonexistent"])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def point(ctl: Ctl) -> Iterator[str]:
    """A checkpoint's name."""
    assert ctl("checkpoint", "create", "f", "--label", "one")[0] == 0
    yield "one"
    ctl("checkpoint", "delete", "one")


@pytest.fixture
def file(ctl: Ctl, point: str, tmp_path: Path) -> Path:
    """The same, carried out; with the trust document beside it."""
    path = tmp_path / "one.xckp"
    assert ctl("checkpoint", "export", point, path)[0] == 0
    assert ctl("trust", "export", tmp_path / "trust")[0] == 0
    return path


def test_a_checkpoint_from_create_to_delete(ctl: Ctl) -> None:
    code, out, err = ctl("checkpoint", "create", "f", "--label", "a", "--follow")
    assert (code, err) == (0, "")
    assert "nothing: it is whole" in out
    code, out, _ = ctl("checkpoint", "create", "f", "--parent", "a", "--label", "b", "--json")
    second = json.loads(out)["checkpoint"]
    first = json.loads(ctl("checkpoint", "list", "f", "--json")[1])["checkpoints"][0]
    assert second["parent"] == first["digest"]
    _, out, _ = ctl("checkpoint", "list")
    assert [row.split()[1] for row in out.splitlines()] == ["NAME", "a", "b"]
    code, _, err = ctl("checkpoint", "delete", "a")
    assert (code, "[checkpoint-needed]" in err) == (1, True)
    assert ctl("checkpoint", "restore", "b")[0] == 0
    code, _, err = ctl("checkpoint", "restore", "a")
    assert (code, "[frame-epoch-old]" in err) == (6, True)
    assert ctl("checkpoint", "restore", "a", "--rollback")[0] == 0
    assert ctl("checkpoint", "delete", "b")[0] == ctl("checkpoint", "delete", "a")[0] == 0
    assert ctl("checkpoint", "list")[1].startswith("no checkpoints")


def test_show_tells_what_it_is_once_it_is_verified(ctl: Ctl, point: str) -> None:
    code, out, _ = ctl("checkpoint", "show", point)
    assert code == 0
    assert "7 binding    passed" in out
    assert "small, 64 MiB" in out
    found = json.loads(ctl("checkpoint", "show", point, "--json")[1])
    assert found["frame"]["profile"] == found["report"]["manifest"]["profile"]["name"] == "small"


def test_a_file_is_verified_without_a_daemon(nobody: Ctl, file: Path) -> None:
    code, out, err = nobody("checkpoint", "verify", file, "--trust", file.with_name("trust"))
    assert (code, err) == (0, "")
    assert [line.split()[:3:2] for line in out.splitlines()[:7]] == [
        [str(number), "passed"] for number in range(1, 8)
    ]


def test_a_changed_byte_is_refused_by_its_step_with_exit_code_6(nobody: Ctl, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    code, out, err = nobody("checkpoint", "verify", file, "--trust", file.with_name("trust"))
    assert code == 6
    _, _, result = out.splitlines()[5].split()[:3]
    assert result in STEPS[5].codes
    assert out.splitlines()[6].split()[2:4] == ["not", "reached"]
    assert f"[{result}]" in err


def test_a_file_of_a_host_that_is_not_trusted_is_refused(
    ctl: Ctl, nobody: Ctl, file: Path, tmp_path: Path
) -> None:
    with EmbeddedHost() as other, other.admin() as admin:
        document = admin.call("ExportTrust")["document"]
    (tmp_path / "theirs").write_bytes(base64.b64decode(document))
    code, _, err = nobody("checkpoint", "verify", file, "--trust", tmp_path / "theirs")
    assert (code, "[frame-key-unknown]" in err) == (6, True)


def test_a_file_comes_back_and_is_restored(ctl: Ctl, file: Path) -> None:
    assert ctl("checkpoint", "verify", file)[0] == 0, "by what the daemon trusts"
    code, _, err = ctl("checkpoint", "import", file)
    assert (code, "[checkpoint-known]" in err) == (1, True)
    ctl("checkpoint", "delete", "one")
    assert ctl("checkpoint", "import", file, "--label", "one")[0] == 0
    assert ctl("checkpoint", "restore", "one")[0] == 0


def test_a_damaged_file_is_not_kept(ctl: Ctl, file: Path) -> None:
    ctl("checkpoint", "delete", "one")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    code, _, err = ctl("checkpoint", "import", file, "--label", "bad")
    assert (code, "[frame-" in err) == (6, True)
    assert "bad" not in ctl("checkpoint", "list")[1]
    ctl("checkpoint", "create", "f", "--label", "one")


def test_an_export_that_fails_leaves_no_file(ctl: Ctl, tmp_path: Path) -> None:
    code, _, err = ctl("checkpoint", "export", "none", tmp_path / "x")
    assert (code, "[checkpoint-not-found]" in err) == (1, True)
    assert list(tmp_path.iterdir()) == []


# --- watermarks ----------------------------------------------------------------------------------


@pytest.fixture
def key(nobody: Ctl, tmp_path: Path) -> tuple[str, Path]:
    """An owner's key: its id and its file, made without a daemon."""
    path = tmp_path / "key"
    code, out, _ = nobody("watermark", "key", "create", "--file", path, "--json")
    assert code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    return str(json.loads(out)["key"]), path


def test_a_key_from_import_to_removal(ctl: Ctl, key: tuple[str, Path], tmp_path: Path) -> None:
    name, path = key
    assert ctl("watermark", "key", "import", path)[0] == 0
    assert ctl("watermark", "key", "list")[1] == f"{name}\n"
    assert ctl("watermark", "key", "export", name, tmp_path / "again")[0] == 0
    assert (tmp_path / "again").read_text() == path.read_text()
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o600
    assert ctl("watermark", "key", "remove", name)[0] == 0
    assert ctl("watermark", "key", "list")[1].startswith("no watermark keys")


def test_a_marked_model_is_found_in_its_file_and_in_its_function(
    ctl: Ctl, nobody: Ctl, embedded: EmbeddedHost, key: tuple[str, Path], tmp_path: Path
) -> None:
    name, path = key
    plain, marked = tmp_path / "plain.npz", tmp_path / "marked.npz"
    weights = np.random.default_rng(1).standard_normal((576, 256)).astype(np.float32)
    np.savez(plain, w=weights)
    words = ("--model", "net", "--key", path)
    assert nobody("watermark", "embed", plain, marked, *words)[0] == 0
    assert nobody("watermark", "look", marked, *words)[0] == 0
    code, out, _ = nobody("watermark", "look", plain, *words)
    assert (code, "does not carry" in out) == (6, True)

    ctl("watermark", "key", "import", path)
    with embedded.admin() as admin:
        function = admin.call("GetFunction", {"function": "f"})["function"]
    guest: Function = embedded.open(function)
    try:
        tensor = guest.tensor(np.load(marked)["w"])
        (found,) = json.loads(ctl("watermark", "tensors", "f", "--json")[1])["tensors"]
        assert ctl("watermark", "register", "f", "net", found["handle"], name)[0] == 0
        assert ctl("watermark", "list", "f")[1].splitlines()[1].split()[1:3] == ["net", name]
        assert ctl("watermark", "check", "f")[0] == 0
        code, _, err = ctl("watermark", "key", "remove", name)
        assert (code, "[watermark-key-used]" in err) == (1, True)
        tensor.copy_(weights)
        code, out, _ = ctl("watermark", "check", "f")
        assert (code, "missing" in out) == (6, True)
        assert ctl("watermark", "unregister", "f", "net")[0] == 0
    finally:
        guest.close()
    ctl("watermark", "key", "remove", name)
