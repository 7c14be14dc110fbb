"""A laboratory leaves nothing behind: no mount, no namespace, no process, no directory.

However it ends: at the end of its block, by an exception, or by SIGKILL at any moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelvisor.errors import ConflictError
from accelvisor.lab import Laboratory, container, laboratory, network, state
from accelvisor.lab.process import wait_until
from accelvisor.lab.progress import Progress

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
    directories = (state.instance_directory(name), state.run_directory(name))
    return found + [str(path) for path in directories if path.exists()]


def _place(name: str, index: int = 1) -> container.Place:
    return container.Place(name, index)


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
    with Laboratory(1, name="c-block", install=False, progress=quiet) as lab:
        assert lab.hosts[0].run(["true"]).returncode == 0
        assert traces("c-block")
    assert traces("c-block") == []


def test_after_an_exception_in_its_block(quiet: Progress) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Laboratory(1, name="c-error", install=False, progress=quiet),
    ):
        _ = 1 // 0
    assert traces("c-error") == []


def test_after_sigkill_while_up(quiet: Progress) -> None:
    with _start("c-killed") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert len(_inside("c-killed")) > 5
        child.send_signal(signal.SIGKILL)
    # The hosts die with their owner at once; what is left is taken away by whoever comes next.
    wait_until(lambda: not _inside("c-killed"), deadline_s=10, what="the hosts' end")
    laboratory.reap(quiet)
    assert traces("c-killed") == []


@pytest.mark.parametrize("moment", ["state", "namespace", "mount", "nspawn"])
def test_after_sigkill_while_it_comes_up(moment: str, quiet: Progress) -> None:
    name = f"c-{moment}"
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
    laboratory.reap(quiet)
    assert traces(name) == []


def test_a_second_one_of_the_same_name_is_refused(quiet: Progress) -> None:
    with _start("c-twice") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        with pytest.raises(ConflictError) as caught:
            Laboratory(1, name="c-twice", install=False, progress=quiet).up()
        assert caught.value.code == "lab-busy"
        # The refused one has taken nothing from the first.
        assert len(_inside("c-twice")) > 5
        child.communicate("")
    assert traces("c-twice") == []


def test_a_host_that_died_is_replaced(quiet: Progress) -> None:
    with Laboratory(1, name="c-dead", install=False, progress=quiet) as lab:
        first = state.load("c-dead")
        assert first is not None
        assert first.hosts[0].leader is not None
        first.hosts[0].leader.end(deadline_s=10)
        assert not lab.hosts[0].alive
        lab.up()
        assert lab.hosts[0].run(["hostname"]).stdout == "host1\n"
    assert traces("c-dead") == []
