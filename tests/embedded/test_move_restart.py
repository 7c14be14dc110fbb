"""Daemons that are restarted while nothing is moved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelvisor.embedded.host import EmbeddedHost
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.errors import AccelvisorError

from .moving import RAM, Guest, two_hosts, unmoved, wait_for

Hosts = tuple[EmbeddedHost, EmbeddedHost]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as pair:
        yield pair


def test_daemons_restarted_between_two_moves_know_everything(hosts: Hosts) -> None:
    here, there = hosts
    vm = EmbeddedVm(here, [here.create("tiny")["uuid"]], ram_bytes=RAM)
    guest = Guest(vm)
    guest.go.set()
    for target in (there, here):
        vm.migrate(target)
        guest.wait_rounds()
        for host in hosts:
            host.stop()
            host.start()
        wait_for(lambda: vm.machine.attached, "the daemon does not ask for the bus")
    digests = guest.finish()
    vm.close()
    assert digests == unmoved(here, len(digests))


def test_move_right_after_a_restart_works_at_once_or_a_moment_later(hosts: Hosts) -> None:
    here, there = hosts
    vm = EmbeddedVm(here, [here.create("tiny")["uuid"]], name="hasty", ram_bytes=RAM)
    guest = Guest(vm)
    guest.go.set()
    guest.wait_rounds()
    refusals = []

    def moved() -> bool:
        try:
            vm.migrate(there)
        except AccelvisorError as error:
            refusals.append(error.code)
            assert vm.host is here
            guest.wait_rounds()
        return vm.host is there

    here.stop()
    here.start()
    wait_for(moved, f"it never works again: {refusals}")
    guest.wait_rounds()
    digests = guest.finish()
    vm.close()
    assert digests == unmoved(here, len(digests))
