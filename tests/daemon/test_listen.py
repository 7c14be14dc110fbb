from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from accelvisor.daemon import listen
from accelvisor.errors import ConfigError, ConflictError, SystemFailure


@pytest.fixture
def lock(short_path: Path):
    held = listen.acquire(short_path / "lock")
    yield held
    held.release()


def test_bound_socket_answers_and_is_not_wide(short_path: Path, lock: listen.Lock) -> None:
    path = short_path / "admin"
    with listen.bind(path, lock) as server, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert not server.getblocking()
        assert sorted(os.listdir(short_path)) == ["admin", "lock"]


def test_the_mode_is_right_from_the_first_moment(
    short_path: Path, lock: listen.Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A6: window between listen and chmod. Until it has its mode, only our directory holds it."""
    seen: list[tuple[str, int]] = []
    chmod = os.chmod

    def spy(path: Path, mode: int) -> None:
        parent = os.stat(Path(path).parent)
        seen.append((str(Path(path).parent), stat.S_IMODE(parent.st_mode)))
        chmod(path, mode)

    monkeypatch.setattr(os, "chmod", spy)
    listen.bind(short_path / "admin", lock).close()
    [(directory, mode)] = [item for item in seen if ".bind-" in item[0]][-1:]
    assert mode == 0o700
    assert Path(directory).parent == short_path


def test_a_leftover_is_replaced_by_the_locks_holder(short_path: Path, lock: listen.Lock) -> None:
    """A1: leftover socket blocks the start."""
    path = short_path / "admin"
    listen.bind(path, lock).close()
    assert path.exists()
    with listen.bind(path, lock), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_live_socket_is_never_removed(short_path: Path, lock: listen.Lock) -> None:
    """A2: a live daemon's socket removed."""
    path = short_path / "admin"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        inode = path.stat().st_ino
        with pytest.raises(ConflictError) as caught:
            listen.bind(path, lock)
        assert caught.value.code == "socket-live"
        assert path.stat().st_ino == inode


def test_a_full_backlog_is_not_taken_for_a_leftover(short_path: Path, lock: listen.Lock) -> None:
    """A2: any connect error was taken as stale."""
    path = short_path / "admin"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        clients = []
        try:
            for _ in range(4):
                client = socket.socket(socket.AF_UNIX)
                clients.append(client)
                client.setblocking(False)
                try:
                    client.connect(str(path))
                except BlockingIOError:
                    break
            with pytest.raises(ConflictError) as caught:
                listen.bind(path, lock)
        finally:
            for client in clients:
                client.close()
        assert caught.value.code == "socket-live"
        assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_never_removed(short_path: Path, lock: listen.Lock, kind: str) -> None:
    path = short_path / "admin"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(ConflictError) as caught:
        listen.bind(path, lock)
    assert caught.value.code == "socket-not-a-socket"
    assert os.path.lexists(path)


def test_a_failed_bind_names_the_first_cause(tmp_path: Path, lock: listen.Lock) -> None:
    """A4: unlink failure hidden behind "address in use"."""
    with pytest.raises(ConfigError) as caught:
        listen.bind(tmp_path / "admin", lock, group="no-such-group-here")
    assert caught.value.code == "group-unknown"
    assert os.listdir(tmp_path) == []


def test_the_lock_decides(short_path: Path, lock: listen.Lock) -> None:
    with pytest.raises(ConflictError) as caught:
        listen.acquire(short_path / "lock")
    assert caught.value.code == "already-running"
    assert str(os.getpid()) in caught.value.message
    lock.release()
    listen.acquire(short_path / "lock").release()


def test_without_the_lock_nothing_is_bound(short_path: Path, lock: listen.Lock) -> None:
    lock.release()
    with pytest.raises(SystemFailure):
        listen.bind(short_path / "admin", lock)


def test_a_lock_file_that_cannot_be_opened(short_path: Path) -> None:
    (short_path / "link").symlink_to("elsewhere")
    with pytest.raises(SystemFailure) as caught:
        listen.acquire(short_path / "link")
    assert caught.value.code == "lock"


def test_a_long_path_is_bound_all_the_same(tmp_path: Path, lock: listen.Lock) -> None:
    """The way through the directory's descriptor needs few of the 108 bytes."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    listen.bind(deep / "admin", lock).close()
    assert stat.S_ISSOCK((deep / "admin").stat().st_mode)


def test_remove_takes_sockets_only(short_path: Path, lock: listen.Lock) -> None:
    path = short_path / "admin"
    listen.remove(path)
    path.write_text("precious")
    listen.remove(path)
    assert path.read_text() == "precious"
