"""Binding: leftovers, live servers, other things at the path, permissions from the first moment."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from accelvisor.errors import ConflictError, SystemFailure, UsageError
from accelvisor.vfio_user.listen import MAX_PATH_BYTES, listen
from tests.descriptors import open_fds


def leftover(path: Path) -> None:
    """What a server leaves behind that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(str(path)) == 0


def test_listens_and_cleans_up(tmp_path: Path) -> None:
    before = open_fds()
    path = tmp_path / "s"
    listener = listen(path)
    assert can_connect(path)
    listener.close()
    listener.close()
    assert not path.exists()
    assert open_fds() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.lock"]


def test_leftover_of_a_killed_server_does_not_block_the_start(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leftover(path)
    listener = listen(path)
    assert can_connect(path)
    listener.close()


def test_leftover_is_not_removed_while_another_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = listen(path)
    path.unlink()
    leftover(path)
    with pytest.raises(ConflictError, match="lock") as error:
        listen(path)
    assert error.value.code == "socket-in-use"
    assert path.exists()
    listener.close()
    assert path.exists(), "it is another's by now"


def test_live_server_is_not_robbed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen(1)
        with pytest.raises(ConflictError, match="live server"):
            listen(path)
        assert can_connect(path)


def test_server_with_a_full_queue_counts_as_live(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen(0)
        waiting = []
        while True:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.setblocking(False)
            waiting.append(one)
            if one.connect_ex(str(path)):
                break
        with pytest.raises(ConflictError, match="may be alive"):
            listen(path)
        assert path.exists()
        for one in waiting:
            one.close()


@pytest.mark.parametrize("kind", ["file", "directory", "link", "fifo"])
def test_what_is_no_socket_is_never_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        leftover(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConflictError, match="no socket"):
        listen(path)
    assert os.path.lexists(path)


def test_mode_is_right_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        one = listen(tmp_path / "one", mode=0o600)
        os.umask(0o777)
        two = listen(tmp_path / "two", mode=0o660, group=os.getgid())
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "two").stat().st_mode) == 0o660
    one.close()
    two.close()


def test_socket_appears_with_its_mode_and_listening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The window between bind and chmod, or bind and listen, is where others got in.
    path = tmp_path / "s"
    seen: list[bool] = []
    chmod = Path.chmod

    def watch(self: Path, mode: int) -> None:
        seen.append(path.exists())
        assert stat.S_IMODE(self.parent.stat().st_mode) == 0o700
        chmod(self, mode)

    monkeypatch.setattr(Path, "chmod", watch)
    listener = listen(path)
    assert seen == [False]
    assert can_connect(path)
    listener.close()


def test_two_at_once_leave_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leftover(path)
    results: list[object] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        try:
            results.append(listen(path))
        except ConflictError as error:
            results.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [r for r in results if not isinstance(r, ConflictError)]
    assert len(winners) == 1
    assert can_connect(path)
    winners[0].close()  # type: ignore[attr-defined]


def test_long_path_is_refused_and_the_longest_works(tmp_path: Path) -> None:
    room = MAX_PATH_BYTES - len(os.fsencode(tmp_path)) - 1
    listen(tmp_path / ("s" * room)).close()
    with pytest.raises(UsageError) as error:
        listen(tmp_path / ("s" * (room + 1)))
    assert error.value.code == "socket-path"


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemFailure, match="No such file") as error:
        listen(tmp_path / "missing" / "s")
    assert error.value.code == "socket-bind"
