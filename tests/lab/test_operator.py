"""``accelctl migrate`` and ``accelctl host drain`` on two real hosts: dry run, progress, cancel,
and a host that is emptied. The tests share one VM that trains on its function; after each it
computes on with the right bits.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from accelvisor.lab import LabHost, Laboratory
from tests.lab.moving import MovingVm, Training, trust_each_other, wait_for
from tests.lab.user import accelctl

Hosts = tuple[LabHost, LabHost]
NAME = "operated"
#: As libvirt is reached between hosts of a laboratory.
URI = ("--uri", "qemu+tcp://{address}/system")


@pytest.fixture(scope="module")
def hosts(lab: Laboratory) -> Hosts:
    """Two that trust each other."""
    lab.add_hosts(2)
    one, other = lab.hosts[:2]
    trust_each_other(one, other)
    return one, other


@pytest.fixture(scope="module")
def shared(hosts: Hosts) -> Iterator[tuple[MovingVm, Training]]:
    vm = MovingVm(NAME, hosts)
    try:
        vm.give("small", "--persistent")
        vm.boot()
        yield vm, Training(vm, "one")
    finally:
        vm.clear()


@pytest.fixture
def vm(shared: tuple[MovingVm, Training]) -> Iterator[MovingVm]:
    """The shared one; after the test it computes on, and what it computed is right."""
    vm, training = shared
    if training.idle:
        training.begin()
    yield vm
    training.goes_on()
    training.lap()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def stored(host: LabHost) -> list[str]:
    """Names of the domains that are defined on a host."""
    return [d["name"] for d in accelctl(host, "vm", "list")["domains"] if d["persistent"]]


class Command:
    """accelctl in the background; what it printed so far can be looked at."""

    def __init__(self, host: LabHost, *words: str) -> None:
        self._host = host
        argv = ["sh", "-c", 'echo $$; exec accelctl "$@" --json', "sh", *words]
        self._process = subprocess.Popen(host.enter(argv), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._out = self._process.stdout
        self._pid = self._out.readline().strip()  # as that host numbers it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first line that it holds of."""
        for line in self._out:
            found: dict[str, Any] = json.loads(line)
            if condition(found):
                return found
        raise AssertionError("accelctl ended before that")

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self._host.run(["kill", "-INT", self._pid])

    def end(self) -> int:
        return self._process.wait(60)


def test_a_dry_run_shows_all_reasons(vm: MovingVm) -> None:
    here, there = vm.here, vm.there
    said = accelctl(here, "migrate", "no-vm", "no-host", "--dry-run", check=False)
    codes = [item["code"] for item in said["plan"]["reasons"]]
    assert codes == ["domain-not-found", "trust-host-unknown"]
    said = accelctl(here, "migrate", vm.name, there.name, "--dry-run", *URI)
    plan = said["plan"]
    assert plan["possible"], plan
    assert plan["uri"] == vm.uri(there)
    assert plan["functions"] == vm.uuids
    prediction = plan["prediction"]
    assert prediction["rate_measured"]
    assert prediction["dirty_rate"] > 0, "the function computes while it is looked at"
    assert 0 < prediction["stop_bytes"] < prediction["total_bytes"]
    text = here.run(["accelctl", "migrate", vm.name, there.name, "--dry-run"]).stdout
    assert "predicted downtime" in text
    assert vm.here is here, "nothing moved"


def test_a_host_that_cannot_take_it_is_refused_before_anything_is_begun(vm: MovingVm) -> None:
    here, there = vm.here, vm.there
    there.push(
        b'[cards.card0]\nchips = 1\ncores_per_chip = 1\nmemory = "16MiB"\n',
        "/etc/accelvisor/conf.d/50-test.toml",
    )
    there.run(["systemctl", "reload", "accelvisor"])
    try:
        done = here.run(["accelctl", "migrate", vm.name, there.name, *URI], check=False)
        assert done.returncode == 1
        assert "[no-room]" in done.stderr
    finally:
        there.run(["rm", "/etc/accelvisor/conf.d/50-test.toml"])
        there.run(["systemctl", "reload", "accelvisor"])
    assert vm.here is here


def test_a_vm_moves_and_the_operator_sees_how(vm: MovingVm) -> None:
    here, there = vm.here, vm.there
    done = here.run(["accelctl", "migrate", vm.name, there.name, *URI, "--json"], timeout=120)
    plan, *steps, last = lines(done.stdout)
    assert plan["plan"]["possible"]
    assert "copying" in {step["progress"]["phase"] for step in steps}
    assert any(step["progress"]["memory_total"] for step in steps)
    report = last["report"]
    assert report["outcome"] == "moved"
    numbers = report["numbers"]
    assert 0 < numbers["downtime"] < 5
    assert numbers["blackout"] >= numbers["downtime"]
    assert numbers["sent_bytes"] >= numbers["last_round_bytes"] > 0
    vm.only_at(there)
    assert vm.name in stored(there)
    assert vm.name not in stored(here)
    for host, role in ((here, "source"), (there, "destination")):
        newest = accelctl(host, "migration", "list")["migrations"][0]
        assert (newest["id"], newest["role"]) == (report["id"], role)
        assert newest["over"]
        assert newest["outcome"] == "moved"
    shown = accelctl(here, "migration", "show", report["id"][:10])["migration"]
    assert shown["numbers"]["downtime"] == pytest.approx(numbers["downtime"])


@pytest.mark.parametrize("way", ["cancel", "interrupt"])
def test_a_migration_is_cancelled_and_the_vm_computes_on(vm: MovingVm, way: str) -> None:
    here, there = vm.here, vm.there
    slow = ("--bandwidth", "2MiB")
    with Command(here, "migrate", vm.name, there.name, *URI, *slow) as running:
        running.until(lambda it: bool(it["progress"] and it["progress"]["phase"] == "copying"))
        if way == "cancel":
            accelctl(here, "migration", "cancel", vm.name)
        else:
            running.interrupt()
        report = running.until(lambda it: it["report"] is not None)["report"]
        assert report["outcome"] == "cancelled"
        assert running.end() == 1
    vm.only_at(here)
    wait_for(there, lambda: vm.name not in there.virsh("list", "--all").stdout, "it to be gone")
    said = accelctl(here, "migration", "cancel", vm.name, check=False)
    assert said["parameters"]["code"] == "migration-unknown"


def test_a_host_is_drained(vm: MovingVm) -> None:
    here, there = vm.here, vm.there
    accelctl(here, "function", "create", "small", "--name", "idle")
    try:
        planned = here.run(
            ["accelctl", "host", "drain", "--to", there.name, *URI, "--dry-run"], check=False
        )
        assert planned.returncode == 1
        assert f"VM {vm.name} to host {there.name}: possible" in planned.stdout
        assert "function idle stays" in planned.stdout
        done = here.run(
            ["accelctl", "host", "drain", "--to", there.name, *URI, "--json"],
            check=False, timeout=120,
        )  # fmt: skip
        replies = lines(done.stdout)
        reports = [reply["report"] for reply in replies if reply["report"]]
        assert [(r["domain"], r["outcome"]) for r in reports] == [(vm.name, "moved")]
        assert [r["stay"]["name"] for r in replies if r["stay"]] == ["idle"]
        assert done.returncode == 1, "something stays"
    finally:
        accelctl(here, "function", "delete", "idle")
    vm.only_at(there)
    done = here.run(["accelctl", "host", "drain", *URI])
    assert done.stdout == "no function is on this host\n"
