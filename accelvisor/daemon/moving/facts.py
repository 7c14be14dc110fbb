"""Looks at everything that a move depends on, here and at the other host, for the planner.

What cannot be found out is a fact, too: it becomes a reason of the plan, so that an operator sees
all of them at once and not one after the other.
"""

from __future__ import annotations

import asyncio
import uuid as uuids
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import accelvisor
from accelvisor.daemon.domains import DomainsLink
from accelvisor.daemon.moving import fit, sample
from accelvisor.daemon.moving.fit import AskFit
from accelvisor.daemon.moving.host import MovingHost
from accelvisor.daemon.moving.keys import Keys
from accelvisor.daemon.moving.planner import Facts, FunctionFacts
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, ConflictError, NotFoundError
from accelvisor.frames.trust import Host
from accelvisor.hypervisor import xml
from accelvisor.hypervisor.port import Domain
from accelvisor.migration.ledger import Standing


@dataclass(frozen=True, slots=True)
class Wish:
    """What an operator asks for.

    Attributes:
        uri: of the other libvirt; empty to follow the configuration.
        downtime_s: to aim at; 0 for the configured one.
        bandwidth: of QEMU's stream, bytes a second; 0 for no limit.
        stored: the stored definition moves along.
    """

    domain: str
    host: str
    uri: str = ""
    downtime_s: float = 0.0
    bandwidth: int = 0
    stored: bool = True


@dataclass(frozen=True, slots=True)
class Looked:
    """The facts, and what of them the executor needs."""

    facts: Facts
    domain: Domain | None
    host: Host | None
    uri: str


class Looking:
    """Of one daemon."""

    def __init__(self, moving: MovingHost, links: DomainsLink[Any], uri: str) -> None:
        self._moving = moving
        self._links = links
        self._uri = uri

    async def look(self, wish: Wish, *, busy: bool = False) -> Looked:
        """Everything, as far as it can be seen; ``busy``: an earlier wish is being fulfilled."""
        domain, missing = await self._domain(wish.domain)
        host, host_error = self._host(wish.host)
        uri = wish.uri
        if host is not None:
            try:
                uri = self.uri_of(host, wish.uri)
            except AccelvisorError as error:
                host_error = error
        mine = self._functions(domain)
        services = self._moving.services
        functions = [await self._function(item) for item in mine]
        going = domain is not None and self._moving.moves.going(domain.uuid) is not None
        settings = services.settings
        facts = Facts(
            domain=domain,
            host=host.name if host else wish.host,
            missing=missing,
            host_error=host_error,
            functions=functions,
            version=accelvisor.__version__,
            arbiter=services.owners.arbiter,
            limit=settings.rate or 0.0,
            target_s=wish.downtime_s or settings.downtime_s,
            busy=busy or going,
            **await self._peer(host if host_error is None else None, domain, mine),
            **await self._qemu(domain),
        )
        return Looked(facts, domain, host, uri)

    def uri_of(self, host: Host, template: str = "") -> str:
        """Where that host's libvirt is. NotFoundError ``trust-address``."""
        address, _ = Keys.address_of(host)
        shown = f"[{address}]" if ":" in address else address
        return (template or self._uri).replace("{address}", shown)

    async def _domain(self, name: str) -> tuple[Domain | None, AccelvisorError | None]:
        try:
            return await self._links.call(lambda port: port.get(name)), None
        except AccelvisorError as error:
            return None, error

    def _host(self, name: str) -> tuple[Host | None, AccelvisorError | None]:
        keys = self._moving.keys
        mine = keys.document.host(str(keys.host))
        if name == str(keys.host) or (mine is not None and name == mine.name):
            return None, ConflictError(
                "that is this host", code="migration-self", where="migration",
                hint="name the host that the VM is to go to: accelctl trust show",
            )  # fmt: skip
        try:
            return keys.find(name), None
        except NotFoundError as error:
            return None, error

    def _functions(self, domain: Domain | None) -> Sequence[Function]:
        if domain is None:
            return ()
        every = self._moving.services.functions.registry.all()
        return [item for item in every if item.domain_uuid == domain.uuid]

    async def _function(self, function: Function) -> FunctionFacts:
        services = self._moving.services
        known = FunctionFacts(
            fit.need(function, services.functions.cards),
            function.state,
            held=function.uuid in services.functions.held,
        )
        try:
            function.require_whole()
            await self._owned(function.uuid)
            seen = await sample.take(services, function)
        except AccelvisorError as error:
            return FunctionFacts(known.need, known.state, held=known.held, trouble=error)
        return FunctionFacts(
            known.need,
            known.state,
            seen.firmware,
            seen.state_bytes,
            seen.dirty_bytes,
            seen.seconds,
            known.held,
        )

    async def _owned(self, uuid: str) -> None:
        """Raises ConflictError ``ledger-not-owner``, ``ledger-undecided``."""
        found = await self._moving.services.owners.ledger.get(uuid)
        if found is None:
            return
        record = found.record
        if record.state is Standing.PREPARED:
            raise ConflictError(
                "an earlier move of it is not decided yet",
                code="ledger-undecided",
                where="ledger",
                hint="it is decided when the other host can be reached",
            )
        if record.owner != str(self._moving.keys.host):
            raise ConflictError(
                f"it belongs to host {record.owner}", code="ledger-not-owner", where="ledger"
            )

    async def _peer(
        self, host: Host | None, domain: Domain | None, functions: Sequence[Function]
    ) -> dict[str, Any]:
        if host is None:
            return {}
        uuid = domain.uuid if domain is not None else str(uuids.UUID(int=0))
        cards = self._moving.services.functions.cards
        question = AskFit(uuid, tuple(fit.need(item, cards) for item in functions))
        try:
            said, rate = await self._moving.moves.neighbours.fit(host, question)
        except AccelvisorError as error:
            return {"fit_error": error}
        return {"fit": said, "rate": rate}

    async def _qemu(self, domain: Domain | None) -> dict[str, Any]:
        if domain is None or not domain.state.active:
            return {}
        found: dict[str, Any] = {"monitor": False, "bus": False}
        pair = self._moving.doors.find(domain.uuid)
        if pair is not None:
            found = {"monitor": pair.monitor.connected, "bus": pair.bus.connected}
        if pair is not None and pair.monitor.connected:
            with suppress(AccelvisorError, asyncio.TimeoutError):
                status = await pair.monitor.execute("query-migrate")
                found["blocked"] = tuple(map(str, status.get("blocked-reasons") or ()))
        with suppress(AccelvisorError):
            text = await self._links.call(lambda port: port.xml(domain.uuid, live=True))
            found["private_memory"] = xml.memory_problem(text) or ""
        return found
