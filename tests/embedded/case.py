"""One VM on two hosts, and moves in which somebody dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from accelvisor.embedded.host import free_port, join
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.errors import AccelvisorError

from . import ledgers
from .moving import RAM, Guest, config, unmoved, wait_for
from .pausing import PausingHost


class Case:
    """One VM on two hosts, and its moves with a death each."""

    def __init__(self, hosts: list[PausingHost]) -> None:
        self.hosts = hosts
        self.function = hosts[0].create("tiny")["uuid"]
        self.vm = self.start(hosts[0])
        self.guest = Guest(self.vm)
        self.guest.go.set()
        self.guest.wait_rounds()

    def start(self, host: PausingHost) -> EmbeddedVm:
        return EmbeddedVm(host, [self.function], ram_bytes=RAM)

    @property
    def source(self) -> PausingHost:
        return self.hosts[self.vm.host is not self.hosts[0]]

    @property
    def destination(self) -> PausingHost:
        return self.hosts[self.vm.host is self.hosts[0]]

    def move(
        self,
        step: str,
        die: Callable[[PausingHost, PausingHost], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> str:
        """Move; at ``step`` somebody dies. What the move ended with.

        Args:
            meanwhile: done while who died is still dead.
        """
        outcome = self.attempt(step, die, meanwhile)
        for host in self.hosts:
            if not host.alive:
                host.start()
        self.settled()
        return outcome

    def attempt(
        self,
        step: str,
        die: Callable[[PausingHost, PausingHost], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> str:
        """As :meth:`move`; what comes of it is not looked at."""
        source, destination = self.source, self.destination
        side = source if step.startswith("source:") else destination
        side.pause_at(step)
        outcome: list[str] = []

        def run() -> None:
            try:
                self.vm.migrate(destination)
                outcome.append("moved")
            except AccelvisorError as error:
                outcome.append(error.code)

        moving = threading.Thread(target=run, daemon=True)
        moving.start()
        side.wait_pause(step)
        die(source, destination)
        side.go_on(step)
        meanwhile()
        moving.join(60)
        assert not moving.is_alive()
        assert outcome, "it ended in an error that is none of ours"
        return outcome[0]

    def settled(self) -> None:
        """The guest computes where the VM is, that host owns the function, the other has none."""
        here, there = self.source, self.destination
        self.guest.wait_rounds(2)
        wait_for(lambda: self.listed(there) == [], "the other host keeps something")
        assert self.listed(here) == [self.function]
        wait_for(lambda: self.vm.machine.attached, "the VM's QEMU is not asked to come back")
        owner = self.owner()
        assert owner in (None, uuid_of(here))

    def owner(self) -> str | None:
        """By the ledger; None when no move has been decided yet."""
        if not any(ledgers.history(host, self.function) for host in self.hosts):
            return None
        return ledgers.owner(self.hosts, self.function)

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


@contextmanager
def a_case(kind: type[Case] = Case, more: str = "") -> Iterator[Case]:
    """Args:
    more: of the hosts' configuration.
    """
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(
                PausingHost(config(name, more), listen=f"127.0.0.1:{free_port()}")
            )
            for name in "ab"
        ]
        join(*hosts)
        made = kind(hosts)
        try:
            yield made
        except BaseException:
            for host in hosts:
                print(host.log())
            raise
