"""A VM without a hypervisor: RAM and functions that a program drives with the guest library, and a
move to another host, step by step as libvirt and QEMU make it.
"""

from __future__ import annotations

import threading
import time
import uuid as uuids
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from accelvisor.embedded.host import EmbeddedHost
from accelvisor.embedded.machine import Machine
from accelvisor.errors import AccelvisorError
from accelvisor.hypervisor.xml import NAMESPACE
from accelvisor.limits import MIB
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.transport import ClientTransport


@dataclass(frozen=True, slots=True)
class Moved:
    """How long a move's parts took, in seconds.

    Attributes:
        downtime_s: the guest stood still.
        total_s: from the first word to the last.
    """

    downtime_s: float
    total_s: float


class EmbeddedVm:
    """A domain on an embedded host.

    Args:
        functions: UUIDs, which it is given.
        uuid: its own; a new one by default.
        ram_bytes: of the guest.
    """

    def __init__(
        self,
        host: EmbeddedHost,
        functions: Sequence[str],
        *,
        name: str = "vm",
        uuid: str = "",
        ram_bytes: int = 64 * MIB,
    ) -> None:
        self.host = host
        self.name = name
        self.uuid = uuid or str(uuids.uuid4())
        self.functions = list(functions)
        self._ram_bytes = ram_bytes
        self.cpu = threading.RLock()
        self.transports, self.machine = self._start(host, running=True)

    def transport(self, function: str | None = None) -> ClientTransport:
        """What the guest's library drives; of the first function without an argument."""
        return self.transports[function or self.functions[0]]

    def close(self) -> None:
        """The VM ends."""
        self._end(self.transports, self.machine)

    def migrate(
        self,
        target: EmbeddedHost,
        *,
        before_stop: Callable[[], None] = lambda: None,
        at_stop: Callable[[], None] = lambda: None,
    ) -> Moved:
        """Move to another host while the guest computes. When it is refused, the VM goes on here.

        Whoever drives the guest holds ``cpu`` while it does so; the guest stands still while this
        has it. Its transports stay the same objects, and show the other host's device.

        Args:
            before_stop: called when the guest is about to stop.
            at_stop: called when it has stopped.

        Raises:
            AccelvisorError: why it stays where it is.
        """
        began = time.monotonic()
        with target.admin() as admin:
            admin.call("ReserveMigration", {"xml": self.xml()})
            try:
                transports, machine = self._start(target, running=False)
                try:
                    admin.call("RestoreContext", {"domain": self.name, "domain_uuid": self.uuid})
                    before_stop()
                    for uuid, transport in self.transports.items():
                        transports[uuid].ram[:] = transport.ram
                    with self.cpu:
                        at_stop()
                        stopped = time.monotonic()
                        self._switch(transports, machine)
                        ended = time.monotonic()
                except BaseException:
                    self._end(transports, machine)
                    raise
            except AccelvisorError:
                self._tell_gone(target, "failed")
                raise
        gone, source = self.machine, self.host
        self.machine, self.host = machine, target
        self._end(transports, gone)  # the transports have changed roles
        self._tell_gone(source, "migrated")
        return Moved(ended - stopped, time.monotonic() - began)

    def _tell_gone(self, host: EmbeddedHost, reason: str) -> None:
        """As libvirt's hook: best effort, the daemon may be the one that is gone."""
        with suppress(AccelvisorError), host.admin() as admin:
            admin.call("DomainGone", {"domain_uuid": self.uuid, "reason": reason})

    def _switch(self, transports: dict[str, ClientTransport], machine: Machine) -> None:
        self.machine.stop()
        try:
            # In QEMU's order: RAM comes to its end before accelvisord is asked, so what a function
            # writes to it in between reaches the destination by accelvisord alone.
            for uuid, transport in self.transports.items():
                transports[uuid].ram[:] = transport.ram
            machine.load(self.machine.save())
        except BaseException:
            self.machine.resume()
            raise
        for uuid, transport in self.transports.items():
            transport.adopt(transports[uuid])
        machine.resume()

    def xml(self) -> str:
        """What libvirt would say of the domain, as far as accelvisord reads it."""
        entries = "".join(
            f'<accelvisor:function uuid="{uuid}" socket="{self._socket(self.host, uuid)}"'
            f' bus="accel-port-{uuid}"/>'
            for uuid in self.functions
        )
        return (
            f"<domain type='qemu'><name>{self.name}</name><uuid>{self.uuid}</uuid><metadata>"
            f"<accelvisor:functions xmlns:accelvisor='{NAMESPACE}'>{entries}</accelvisor:functions>"
            "</metadata></domain>"
        )

    def _socket(self, host: EmbeddedHost, uuid: str) -> str:
        return f"{host.run}/function/{uuid}/libvirt-{self.uuid}"

    def _start(
        self, host: EmbeddedHost, *, running: bool
    ) -> tuple[dict[str, ClientTransport], Machine]:
        transports: dict[str, ClientTransport] = {}
        with host.admin() as admin:
            for uuid in self.functions:
                given: dict[str, Any] = {
                    "function": uuid, "domain": self.name, "domain_uuid": self.uuid,
                }  # fmt: skip
                admin.call("AdmitDomain", given)
                client = Client(self._socket(host, uuid))
                transports[uuid] = ClientTransport(
                    client, ram_bytes=self._ram_bytes, enable=running
                )
        clients = {uuid: transport.client for uuid, transport in transports.items()}
        return transports, Machine(str(host.run), self.uuid, clients, running)

    @staticmethod
    def _end(transports: dict[str, ClientTransport], machine: Machine) -> None:
        machine.close()
        for transport in transports.values():
            transport.close()
