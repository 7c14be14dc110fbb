"""One behaviour, both supervisors. systemctl is a script that keeps units as files."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest

from accelvisor.daemon import supervisor as supervisor_module
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.supervisor import (
    ProcessState,
    SubprocessSupervisor,
    SystemdSupervisor,
    choose,
)
from accelvisor.errors import SystemFailure

from .harness import Harness, wait_until

# Behaves as systemctl(1) does for the verbs that are used; units live in a directory.
SYSTEMCTL = """#!{python} -SE
import os, signal, subprocess, sys, pathlib
root = pathlib.Path({root!r})
verb, *rest = [word for word in sys.argv[1:] if word != "--no-ask-password"]
with open(root / "calls", "a") as log:
    print(verb, *rest, file=log)
unit = rest[-1] if rest else ""
file = root / unit
def pid():
    return int(file.read_text()) if file.exists() else 0
if verb == "start":
    if not pid():
        child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        file.write_text(str(child.pid))
elif verb == "stop":
    if pid():
        os.kill(pid(), signal.SIGKILL)
        file.unlink()
elif verb == "set-property":
    pass
elif verb == "reset-failed":
    sys.exit(1)
elif verb == "show":
    state = "active" if pid() else "inactive"
    if pid() and not os.path.exists(f"/proc/{{pid()}}"):
        state = "failed"
    print(f"ActiveState={{state}}")
    print(f"MainPID={{pid()}}")
elif verb == "list-units":
    for found in sorted(root.glob("accelvisor-function@*.service")):
        print(f"{{found.name}} loaded active running Function")
    print("  accelvisor-function@dead.service loaded failed failed Function")
    print("  accelvisor-function@old.service loaded inactive dead Function")
else:
    print("unknown verb", verb, file=sys.stderr)
    sys.exit(4)
"""


@pytest.fixture
def systemctl(tmp_path: Path) -> Path:
    path = tmp_path / "systemctl"
    path.write_text(SYSTEMCTL.format(python=sys.executable, root=str(tmp_path)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_units_are_started_seen_and_stopped(systemctl: Path) -> None:
    async def scenario() -> None:
        units = SystemdSupervisor([str(systemctl)])
        assert await units.state("u1") is ProcessState.STOPPED
        assert await units.pid("u1") is None
        await units.start("u1")
        try:
            await units.start("u1")
            assert await units.state("u1") is ProcessState.RUNNING
            pid = await units.pid("u1")
            assert pid is not None
            assert os.path.exists(f"/proc/{pid}")
            assert list(await units.list()) == ["u1"]
        finally:
            await units.stop("u1")
        await units.stop("u1")
        assert await units.state("u1") is ProcessState.STOPPED

    asyncio.run(scenario())
    calls = (systemctl.parent / "calls").read_text().splitlines()
    assert "start --no-block accelvisor-function@u1.service" in calls


def test_a_large_function_is_not_killed_by_the_units_ceiling(systemctl: Path) -> None:
    """A profile may have 64 GiB, the unit file's MemoryMax= is 2 GiB."""

    async def scenario() -> None:
        units = SystemdSupervisor([str(systemctl)])
        for uuid, memory in (("small", 1 << 30), ("large", 20 << 30)):
            await units.start(uuid, memory)
            await units.stop(uuid)

    asyncio.run(scenario())
    calls = (systemctl.parent / "calls").read_text().splitlines()
    set_one = "set-property --runtime accelvisor-function@large.service MemoryMax=22548578304"
    assert [call for call in calls if call.startswith("set-property")] == [set_one]
    assert calls.index(set_one) < calls.index("start --no-block accelvisor-function@large.service")
    unit = Path(__file__).parents[2] / "systemd" / "accelvisor-function@.service"
    assert f"MemoryMax={supervisor_module.UNIT_MEMORY_BYTES >> 30}G\n" in unit.read_text()


def test_a_failed_systemctl_tells_what_it_said(systemctl: Path) -> None:
    with pytest.raises(SystemFailure) as caught:
        asyncio.run(SystemdSupervisor([str(systemctl)])._run("frob"))
    assert caught.value.code == "supervisor"
    assert "unknown verb frob" in caught.value.message


def test_detached_processes_are_started_seen_and_stopped(harness: Harness) -> None:
    async def scenario() -> None:
        processes = harness.supervisor
        assert await processes.state("u1") is ProcessState.STOPPED
        assert list(await processes.list()) == []
        async with harness.daemon():
            made = await harness.create("mine")
        uuid = made["uuid"]
        before = await processes.pid(uuid)
        await processes.start(uuid)  # it runs already
        assert await processes.pid(uuid) == before
        assert await processes.state(uuid) is ProcessState.RUNNING
        assert list(await processes.list()) == [uuid]
        harness.kill(uuid)
        wait_until(lambda: not harness.processes() and harness.gone(uuid))
        assert await processes.state(uuid) is ProcessState.FAILED
        assert await processes.pid(uuid) is None
        await processes.stop(uuid)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("run", "booted", "root", "kind", "expected"),
    [
        ("/run/accelvisor", True, True, "auto", SystemdSupervisor),
        # The packaged daemon is not root; without a configuration its functions must be units too.
        ("/run/accelvisor", True, False, "auto", SystemdSupervisor),
        ("/run/accelvisor", False, True, "auto", SubprocessSupervisor),
        ("/tmp/other", True, True, "auto", SubprocessSupervisor),
        ("/tmp/other", False, False, "systemd", SystemdSupervisor),
        ("/run/accelvisor", True, True, "subprocess", SubprocessSupervisor),
    ],
)
def test_which_supervisor_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    run: str,
    booted: bool,
    root: bool,
    kind: str,
    expected: type,
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda self: booted)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    paths = Paths(Path(run), Path("/var/lib/accelvisor"), Path("/etc/x"))
    assert type(choose(kind, paths)) is expected


def test_children_do_not_speak_to_systemd_in_our_name() -> None:
    """D5 again: whatever was not taken out of the environment does not reach a function."""
    environ = {"NOTIFY_SOCKET": "/x", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a", "HOME": "/root"}
    assert supervisor_module._clean(environ) == {"HOME": "/root"}
