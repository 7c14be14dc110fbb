"""A laboratory leaves nothing behind: no mount, no namespace, no process, no directory.

However it ends: at the end of its block, by an exception, or by SIGKILL at any moment; and without
anybody's help, since the next lab command may come never.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelvisor.errors import ConflictError
from accelvisor.lab import Laboratory, container, network, state, takedown
from accelvisor.lab.process import wait_until
from accelvisor.lab.progress import Progress
from tests.lab.conftest import own_name

pytestmark = pytest.mark.usefixtures("lab")

_CHILD = """
import sys
from accelvisor.lab import Laboratory
with Laboratory(1, name=sys.argv[1], install=False):
    print("up", flush=True)
    sys.stdin.read()
"""


def traces(name: str) -> list[str]:
    """Whatever this machine has of the laboratory of that name."""
    found = [str(path) for path in network.namespaces(name)]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    found += [line for line in mounts if f"/instances/{name}/" in line]
    for index in range(1, state.MAX_HOSTS + 1):
        found += [f"process {stray.pid}" for stray in container.strays(_place(name, index))]
    lock = state.RUN / f"{name}.lock"
    paths = (state.LabState(name, None).directory, state.run_directory(name), lock)
    return found + [str(path) for path in paths if path.exists()]


def _place(name: str, index: int = 1) -> container.Place:
    return container.Place.of(state.LabState(name, None), index)


def _reapers(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"accelvisor.lab.reaper" in words and name.encode() in words:
            found.append(int(entry.name))
    return found


def _goes_by_itself(name: str) -> None:
    """No lab command, no later laboratory: only what the killed one has left behind, waiting."""
    wait_until(lambda: not traces(name), deadline_s=60, what=f"the end of {name}: {traces(name)}")
    wait_until(lambda: not _reapers(name), deadline_s=20, what="the reaper's own end")


def _start(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _inside(name: str) -> list[int]:
    """Processes of the laboratory's hosts, seen from outside by their network namespace."""
    path = network.namespace_path(name, 1)
    if not path.exists():
        return []
    inode = path.stat().st_ino
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "ns/net").stat().st_ino == inode:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_at_the_end_of_its_block(quiet: Progress) -> None:
    name = own_name("block")
    with Laboratory(1, name=name, install=False, progress=quiet) as lab:
        assert lab.hosts[0].run(["true"]).returncode == 0
        assert traces(name)
        assert len(_reapers(name)) == 1
    assert traces(name) == []
    assert _reapers(name) == []


def test_after_an_exception_in_its_block(quiet: Progress) -> None:
    name = own_name("error")
    with (
        pytest.raises(ZeroDivisionError),
        Laboratory(1, name=name, install=False, progress=quiet),
    ):
        _ = 1 // 0
    assert traces(name) == []


def test_after_sigkill_while_up() -> None:
    name = own_name("killed")
    with _start(name) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert len(_inside(name)) > 5
        child.send_signal(signal.SIGKILL)
    _goes_by_itself(name)
    assert _inside(name) == []


def test_after_sigkill_of_owner_and_reaper_the_next_one_cleans_up(quiet: Progress) -> None:
    name = own_name("both")
    with _start(name) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        (reaper,) = _reapers(name)
        os.kill(reaper, signal.SIGKILL)
        child.send_signal(signal.SIGKILL)
    # The hosts die with their owner all the same.
    wait_until(lambda: not _inside(name), deadline_s=60, what="the hosts' end")
    assert traces(name)
    takedown.reap(quiet)
    assert traces(name) == []


def test_somebody_elses_is_neither_taken_down_nor_taken_over(quiet: Progress) -> None:
    name = own_name("other")
    with Laboratory(1, name=name, install=False, progress=quiet) as lab:
        found = state.load(name)
        assert found is not None
        own_tree, found.tree = found.tree, "/home/other/accelvisor"
        found.save()
        try:
            for refused in (
                lambda: takedown.remove(name),
                Laboratory(1, name=name, persistent=True, progress=quiet).up,
                lambda: takedown.clean(quiet),
            ):
                with pytest.raises(ConflictError) as caught:
                    refused()
                assert caught.value.code in ("lab-foreign", "lab-cache-in-use")
            assert lab.hosts[0].run(["true"]).returncode == 0
        finally:
            found.tree = own_tree
            found.save()


@pytest.mark.parametrize("moment", ["state", "namespace", "mount", "nspawn"])
def test_after_sigkill_while_it_comes_up(moment: str) -> None:
    name = own_name(moment)
    place = _place(name)
    reached = {
        "state": lambda: state.load(name) is not None,
        "namespace": lambda: network.namespace_path(name, 1).exists(),
        "mount": lambda: os.path.ismount(place.root),
        "nspawn": lambda: bool(container.strays(place)),
    }[moment]
    with _start(name) as child:
        wait_until(reached, deadline_s=60, what=moment, interval_s=0.002, longest_s=0.002)
        child.send_signal(signal.SIGKILL)
    _goes_by_itself(name)


def test_a_second_one_of_the_same_name_is_refused(quiet: Progress) -> None:
    name = own_name("twice")
    with _start(name) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        with pytest.raises(ConflictError) as caught:
            Laboratory(1, name=name, install=False, progress=quiet).up()
        assert caught.value.code == "lab-busy"
        # The refused one has taken nothing from the first.
        assert len(_inside(name)) > 5
        child.communicate("")
    assert traces(name) == []


def test_a_host_that_died_is_replaced(quiet: Progress) -> None:
    name = own_name("dead")
    with Laboratory(1, name=name, install=False, progress=quiet) as lab:
        first = state.load(name)
        assert first is not None
        assert first.hosts[0].leader is not None
        first.hosts[0].leader.end(deadline_s=10)
        assert not lab.hosts[0].alive
        lab.up()
        assert lab.hosts[0].run(["hostname"]).stdout == "host1\n"
    assert traces(name) == []


def test_clean_unmounts_what_no_laboratory_knows_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Progress
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    own = tmp_path / "the cache"
    places = [own / "instances/gone/host1/root", own / "instances/gone/host1/root/inner"]
    monkeypatch.setenv("ACCELVISOR_LAB_CACHE", str(own))
    (precious / "inner").mkdir()
    places[0].mkdir(parents=True)
    for place in places:
        subprocess.run(["mount", "--bind", precious, place], check=True, timeout=30)
    takedown.clean(quiet)
    assert not own.exists()
    assert (precious / "file").exists()
