"""Who dies in the middle of a move, and when: exactly one owner, and the same bits."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from accelvisor.daemon import function_link
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.errors import AccelvisorError

from . import ledgers
from .moving import RAM, Guest, config, free_port, join, unmoved, wait_for
from .pausing import PausingHost

SOURCE = ("offered", "sealed", "committed", "done")
DESTINATION = (
    "reserving", "preparing", "receiving", "verified", "device-loaded", "loaded", "committed",
    "running",
)  # fmt: skip
STEPS = [*(f"source:{step}" for step in SOURCE), *(f"destination:{s}" for s in DESTINATION)]


class Case:
    """One VM on two hosts, and its moves with a death each."""

    def __init__(self, hosts: list[PausingHost]) -> None:
        self.hosts = hosts
        self.function = hosts[0].create("tiny")["uuid"]
        self.vm = EmbeddedVm(hosts[0], [self.function], ram_bytes=RAM)
        self.guest = Guest(self.vm)
        self.guest.go.set()
        self.guest.wait_rounds()

    @property
    def source(self) -> PausingHost:
        return self.hosts[self.vm.host is not self.hosts[0]]

    @property
    def destination(self) -> PausingHost:
        return self.hosts[self.vm.host is self.hosts[0]]

    def move(self, step: str, die: Callable[[PausingHost, PausingHost], None]) -> str:
        """Move; at ``step`` somebody dies. What the move ended with."""
        source, destination = self.source, self.destination
        side = source if step.startswith("source:") else destination
        side.pause_at(step)
        outcome = ["moved"]

        def run() -> None:
            try:
                self.vm.migrate(destination)
            except AccelvisorError as error:
                outcome[0] = error.code

        moving = threading.Thread(target=run, daemon=True)
        moving.start()
        side.wait_pause(step)
        die(source, destination)
        side.go_on(step)
        moving.join(60)
        assert not moving.is_alive()
        for host in self.hosts:
            if not host.alive:
                host.start()
        self.settled()
        return outcome[0]

    def settled(self) -> None:
        """The guest computes where the VM is, that host owns the function, the other has none."""
        here, there = self.source, self.destination
        self.guest.wait_rounds(2)
        wait_for(lambda: self.listed(there) == [], "the other host keeps something")
        assert self.listed(here) == [self.function]
        wait_for(lambda: self.vm.machine.attached, "the VM's QEMU is not asked to come back")
        if ledgers.history(here, self.function):
            assert ledgers.owner(self.hosts, self.function) == uuid_of(here)

    @staticmethod
    def listed(host: PausingHost) -> list[str]:
        with host.admin() as admin:
            return [function["uuid"] for function in admin.call("ListFunctions")["functions"]]

    def end(self) -> None:
        digests = self.guest.finish()
        with self.vm.cpu:
            assert self.guest.work.counts() == (len(digests), 0)
        self.vm.close()
        assert digests == unmoved(self.hosts[0], len(digests))


def uuid_of(host: PausingHost) -> str:
    with host.admin() as admin:
        return str(admin.call("GetHost")["host"]["uuid"])


@pytest.fixture
def case() -> Iterator[Case]:
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(
                PausingHost(config(name), listen=f"127.0.0.1:{free_port()}")
            )
            for name in "ab"
        ]
        join(*hosts)
        made = Case(hosts)
        try:
            yield made
        except BaseException:
            for host in hosts:
                print(host.log())
            raise


def order_holder(host: PausingHost, function: str, method: str) -> None:
    holder = Path(host.run) / "function" / function / "holder.sock"
    with suppress(AccelvisorError):  # it may not be there (yet, or any more)
        asyncio.run(function_link.call(holder, method))


def restart(host: PausingHost) -> None:
    host.stop(signal.SIGKILL)
    host.start()


def test_source_daemon_dies_at_any_step(case: Case) -> None:
    for step in STEPS:
        case.move(step, lambda source, _: restart(source))
    case.end()


def test_destination_daemon_dies_at_any_step(case: Case) -> None:
    for step in STEPS:
        case.move(step, lambda _, there: restart(there))
    case.end()


def test_daemon_that_stays_away_leaves_the_decision_to_the_other(case: Case) -> None:
    dead = {
        "source:sealed": lambda source, _: source.stop(signal.SIGKILL),
        "source:committed": lambda source, _: source.stop(signal.SIGKILL),
        "destination:receiving": lambda _, there: there.stop(signal.SIGKILL),
        "destination:loaded": lambda _, there: there.stop(signal.SIGKILL),
    }
    ended = {step: case.move(step, die) for step, die in dead.items()}
    assert ended["source:committed"] == "moved"
    assert "moved" not in (ended["source:sealed"], ended["destination:receiving"])
    case.end()


def test_workers_die_at_any_step(case: Case) -> None:
    def kill(*hosts: PausingHost) -> None:
        for host in hosts:
            order_holder(host, case.function, "kill-worker")

    assert {case.move(step, kill) for step in STEPS} == {"moved"}
    case.end()


@pytest.mark.parametrize("step", ["source:offered", "destination:receiving"])
def test_holder_of_the_destination_dies_and_the_vm_stays(case: Case, step: str) -> None:
    source = case.source

    def kill(_: PausingHost, there: PausingHost) -> None:
        order_holder(there, case.function, "give-up")
        order_holder(there, case.function, "shutdown")

    if case.move(step, kill) != "moved":
        assert case.source is source
    case.end()
