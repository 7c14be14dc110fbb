from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelvisor.daemon import processes
from accelvisor.errors import DeadlineError, SystemFailure

from .harness import wait_until

SLEEP = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(60)"]


def spawn(directory: Path, command: list[str] = SLEEP) -> processes.Process:
    record = directory / "process"
    asyncio.run(processes.spawn_detached(command, record, directory / "log", os.environ))
    found = processes.from_record(record)
    assert found is not None
    return found


def test_a_detached_process_is_nobodys_child_and_leads_a_session(tmp_path: Path) -> None:
    found = spawn(tmp_path)
    try:
        wait_until(lambda: os.getsid(found.pid) == found.pid)
        status = Path(f"/proc/{found.pid}/status").read_text()
        parent = int(status.split("PPid:")[1].split()[0])
        assert parent != os.getpid()
        wait_until(lambda: (tmp_path / "log").read_text() == "up\n")
    finally:
        found.signal(signal.SIGKILL)
        assert asyncio.run(found.wait(5))
    assert processes.from_record(tmp_path / "process") is None
    assert not found.alive()


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    found = spawn(tmp_path)
    try:
        assert not asyncio.run(found.wait(0.01))
    finally:
        found.signal(signal.SIGKILL)
    assert asyncio.run(found.wait(5))
    assert asyncio.run(found.wait(5))  # of what is gone already


def test_a_used_again_pid_is_another_process(tmp_path: Path) -> None:
    """A7: pid re-use race. Same pid, other start time: not signalled, not waited for."""
    found = spawn(tmp_path)
    try:
        stranger = processes.Process(found.pid, found.started + 1, found.group)
        assert not stranger.alive()
        stranger.signal(signal.SIGKILL)
        assert asyncio.run(stranger.wait(0.01))
        assert found.alive()
        line = Path(f"/proc/{found.pid}/stat").read_text().split()
        line[21] = str(found.started + 1)
        (tmp_path / "process").write_text(" ".join(line))
        assert processes.from_record(tmp_path / "process") is None
    finally:
        found.signal(signal.SIGKILL)
        asyncio.run(found.wait(5))


def test_the_family_is_the_rest_of_the_group(tmp_path: Path) -> None:
    script = "import os, time\nos.fork()\ntime.sleep(60)"
    found = spawn(tmp_path, [sys.executable, "-S", "-c", script])
    try:
        wait_until(lambda: os.getsid(found.pid) == found.pid and len(found.family()) == 1)
        [child] = found.family()
        child.signal(signal.SIGKILL)
        wait_until(lambda: not child.alive())
    finally:
        found.signal(signal.SIGKILL)
        asyncio.run(found.wait(5))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "garbage",
        "12 (x) S 1",
        "x (name) " + "S 1 2 " + "0 " * 16 + "5",
        "12 (name) Z 1 2 " + "0 " * 16 + "5 0",
        "-3 (name) S 1 2 " + "0 " * 16 + "5 0",
    ],
)
def test_what_is_no_stat_line(line: str) -> None:
    assert processes.parse_stat(line) is None


def test_a_name_with_brackets_and_blanks() -> None:
    line = "12 (a) b (c)) S 1 34 " + "0 " * 16 + "567 0"
    assert processes.parse_stat(line) == processes.Process(12, 567, 34)


def test_our_own_line_agrees_with_the_kernel() -> None:
    found = processes.of_pid(os.getpid())
    assert found is not None
    assert found.group == os.getpgid(0)
    ticks = os.sysconf("SC_CLK_TCK")
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < found.started / ticks <= uptime


def test_a_zombie_counts_as_ended() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    wait_until(lambda: processes.of_pid(child.pid) is None)
    child.wait()


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SystemFailure) as caught:
        asyncio.run(processes.run(["/nowhere/command"], {}, 5))
    assert caught.value.code == "supervisor"


def test_a_short_command(tmp_path: Path) -> None:
    done = asyncio.run(processes.run(["sh", "-c", "echo out; echo err >&2; exit 3"], os.environ, 5))
    assert done == (3, "out\n", "err\n")


def test_a_command_that_hangs_is_killed() -> None:
    with pytest.raises(DeadlineError) as caught:
        asyncio.run(processes.run(["sleep", "60"], os.environ, 0.05))
    assert caught.value.code == "supervisor-deadline"


def test_a_log_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START_S", 0.2)
    with pytest.raises(SystemFailure) as caught:
        asyncio.run(
            processes.spawn_detached(SLEEP, tmp_path / "process", tmp_path / "no/log", os.environ)
        )
    assert caught.value.code == "supervisor"
