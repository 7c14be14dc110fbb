"""QEMU dies in the middle of a switch-over, on either side."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from accelvisor.embedded.machine import Machine
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.vfio_user.transport import ClientTransport

from .case import Case, a_case
from .moving import RAM, Guest, unmoved, wait_for
from .pausing import PausingHost


class MortalVm(EmbeddedVm):
    """Of which each QEMU can be killed, whatever its other threads wait for."""

    started: tuple[dict[str, ClientTransport], Machine]

    def _start(self, *args: Any, **named: Any) -> tuple[dict[str, ClientTransport], Machine]:
        self.started = super()._start(*args, **named)
        return self.started

    def kill_newest(self) -> None:
        """The QEMU that waits for the VM."""
        self._kill(*self.started)

    def kill_running(self) -> None:
        self._kill(self.transports, self.machine)

    @staticmethod
    def _kill(transports: dict[str, ClientTransport], machine: Machine) -> None:
        """What its peers see of that. Whoever has the objects closes them, perhaps at this very
        moment: nobody else may.
        """
        sockets = [transport.client._sock for transport in transports.values()]
        if machine._bus is not None:
            sockets.append(machine._bus.sock)
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class MortalCase(Case):
    vm: MortalVm

    def start(self, host: PausingHost) -> MortalVm:
        return MortalVm(host, [self.function], ram_bytes=RAM)


@pytest.fixture
def case() -> Iterator[Case]:
    with a_case(MortalCase) as made:
        yield made


BEFORE_IT_RUNS = ("source:sealed", "destination:verified", "destination:loaded")


def test_destination_s_qemu_dies_before_it_runs_and_the_vm_stays(case: MortalCase) -> None:
    source = case.source
    for step in BEFORE_IT_RUNS:
        assert case.move(step, lambda *_: case.vm.kill_newest()) != "moved"
        assert case.source is source
    case.end()


def test_source_s_qemu_dies_and_its_vm_can_be_started_again_there(case: MortalCase) -> None:
    """What it computed is lost, as without a move; the function stays where it was."""
    source, there = case.source, case.destination
    case.attempt("source:sealed", lambda *_: case.vm.kill_running())
    case.vm.close()
    with source.admin() as admin:
        admin.call("DomainGone", {"domain_uuid": case.vm.uuid, "reason": "crashed"})
    wait_for(lambda: case.listed(there) == [], "the other host keeps something")
    assert case.listed(source) == [case.function]
    vm = EmbeddedVm(source, [case.function], uuid=case.vm.uuid, ram_bytes=RAM)
    guest = Guest(vm)
    guest.go.set()
    guest.wait_rounds()
    digests = guest.finish()
    vm.close()
    assert digests == unmoved(source, len(digests))
