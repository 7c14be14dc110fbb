"""Queue locks between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelvisor.errors import ConflictError, SystemFailure
from accelvisor.guest.claims import claim

HOLD = """
import sys
from pathlib import Path
from accelvisor.guest.claims import claim
c = claim("dev", 2, directory=Path(sys.argv[1]))
print(c.queue, flush=True)
sys.stdin.read()
"""


def test_the_first_free_queue_is_taken(tmp_path: Path) -> None:
    first, second = claim("dev", 2, directory=tmp_path), claim("dev", 2, directory=tmp_path)
    assert (first.queue, second.queue) == (0, 1)
    first.release()
    first.release()
    again = claim("dev", 2, directory=tmp_path)
    assert again.queue == 0
    again.release()
    second.release()


def test_a_named_queue_that_is_held_is_refused(tmp_path: Path) -> None:
    held = claim("dev", 2, 1, directory=tmp_path)
    with pytest.raises(ConflictError) as caught:
        claim("dev", 2, 1, directory=tmp_path)
    assert caught.value.code == "queue-busy"
    held.release()


def test_devices_do_not_share_locks(tmp_path: Path) -> None:
    a, b = claim("one", 1, directory=tmp_path), claim("two", 1, directory=tmp_path)
    assert a.queue == b.queue == 0
    a.release()
    b.release()


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"0\n"
    other = claim("dev", 2, directory=tmp_path)
    assert other.queue == 1
    child.kill()
    child.wait(10)
    child.stdout.close()
    child.stdin.close()
    mine = claim("dev", 2, 0, directory=tmp_path)
    mine.release()
    other.release()


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "accelguest-dev-0").symlink_to(victim)
    with pytest.raises(SystemFailure):
        claim("dev", 1, directory=tmp_path)
    assert not victim.exists()


def test_a_missing_lock_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemFailure) as caught:
        claim("dev", 1, directory=tmp_path / "absent")
    assert "absent" in caught.value.where


def test_locks_do_not_leak_into_children(tmp_path: Path) -> None:
    held = claim("dev", 1, directory=tmp_path)
    assert not os.get_inheritable(held.fd)
    held.release()


def test_a_queue_whose_owner_has_just_died_is_waited_for(tmp_path: Path) -> None:
    held = claim("dev", 1, directory=tmp_path)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            held.release()

    mine = claim(
        "dev", 1, directory=tmp_path, patience_s=1.0, clock=lambda: sum(slept), sleep=sleep
    )
    assert len(slept) == 3
    with pytest.raises(ConflictError):
        claim("dev", 1, directory=tmp_path, patience_s=1.0, clock=lambda: sum(slept), sleep=sleep)
    assert 1.0 <= sum(slept) < 1.2
    mine.release()
