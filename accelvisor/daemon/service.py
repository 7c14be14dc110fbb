"""The methods of io.accelvisor.Admin: find the objects, ask for the deed, tell the result."""

from __future__ import annotations

import asyncio
import os
import platform
import uuid as uuids
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import accelvisor
from accelvisor.abi import ABI_MAJOR, ABI_MINOR
from accelvisor.daemon import admission, attach, doctor, function_link, wire
from accelvisor.daemon.assigning import Assigning
from accelvisor.daemon.cutting import Cutting
from accelvisor.daemon.domains import DomainsLink
from accelvisor.daemon.events import EventHub
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.isolating import IsolationMethods
from accelvisor.daemon.moving.elsewhere import Elsewhere
from accelvisor.daemon.moving.host import MovingHost
from accelvisor.daemon.moving.operator import Operator
from accelvisor.daemon.moving.places import Giving
from accelvisor.daemon.moving.service import MovingMethods
from accelvisor.daemon.reconcile import View
from accelvisor.daemon.shaping import Shaping
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, NotFoundError, UsageError
from accelvisor.hypervisor.capabilities import Finding
from accelvisor.hypervisor.port import Domain, DomainsPort
from accelvisor.isolation.placing import Cpus

#: Seconds: of the event stream's signs of life, and how long verbs wait for guests.
ALIVE_S = 15.0
STOP_S = 60.0
DETACH_S = 15.0
LONGEST_S = 600.0
#: Doctor asks each function's worker; one that is busy for longer does not say.
ASKED_S = 2.0
#: When to see whether a domain that was about to start with a function that was free has done so
#: (seconds): libvirt tells of one that did, and nothing of a transient one that could not.
STARTED_S = (3.0, 30.0, 300.0)
#: Events that are read from the store at once.
PAGE = 1000


@dataclass(frozen=True, slots=True)
class Identity:
    """What GetHost says of the host and the daemon."""

    name: str
    uuid: str
    boot_id: str
    started: float
    libvirt_uri: str


class AdminService(MovingMethods, IsolationMethods):
    """One coroutine per method of the interface, parameters and replies as in the definition."""

    def __init__(
        self,
        identity: Identity,
        functions: Functions,
        links: DomainsLink[Any],
        hub: EventHub,
        examine: Callable[[], Sequence[Finding]],
        view: Callable[[], View],
        shaping: Shaping,
        cutting: Cutting,
        assigning: Assigning,
    ) -> None:
        self.identity = identity
        self._functions = functions
        self._registry = functions.registry
        self._links = links
        self._hub = hub
        self._examine = examine
        self._view = view
        self._shaping = shaping
        self._cutting = cutting
        self._assigning = assigning

    def use(self, moving: MovingHost) -> None:
        """What moves functions; it comes up after this is made."""
        self._moving = moving
        uri = moving.config.libvirt_uri
        self._operator = Operator(moving, self._links, uri)
        neighbours, keys = moving.moves.neighbours, moving.keys
        self._assigning.abroad = Elsewhere(self._operator, neighbours, keys.peers)
        moving.moves.giving = Giving(self._assigning, self._links)

    # --- the host --------------------------------------------------------------------------------

    async def get_host(self) -> dict[str, Any]:
        hypervisor = await self._links.version()
        return {
            "host": {
                "name": self.identity.name,
                "uuid": self.identity.uuid,
                "version": accelvisor.__version__,
                "abi_version": f"{ABI_MAJOR}.{ABI_MINOR}",
                "kernel": platform.release(),
                "cpus": os.cpu_count() or 1,
                "function_cpus": list(self._functions.cpus),
                "shared_cpus": list(Cpus(self._functions.cpus, self._registry.held()).shared),
                **await asyncio.to_thread(doctor.memory),
                "boot_id": self.identity.boot_id,
                "supervisor": self._functions.world.supervisor.name,
                "hypervisor": hypervisor,
                "libvirt_uri": self.identity.libvirt_uri,
                "cards": len(self._functions.cards),
                "functions": len(self._registry.all()),
                "spares": self._functions.spares.ready,
                "started": self.identity.started,
            }
        }

    async def list_profiles(self) -> dict[str, Any]:
        cards, held = self._functions.cards, self._registry.held()
        profiles, cpus = self._functions.profiles, self._functions.cpus
        static = self._functions.static()
        # Placing one after the other until none fits takes a second on the largest cards.
        made = await asyncio.to_thread(
            lambda: [wire.profile(item, cards, held, cpus, static) for item in profiles]
        )
        return {"profiles": made}

    async def doctor(self) -> dict[str, Any]:
        world = self._functions.world
        findings = await asyncio.to_thread(self._examine)
        facts = await asyncio.to_thread(
            doctor.gather,
            admin_socket=world.paths.admin_socket,
            supervisor=world.supervisor.name,
            socket_group=self._functions.socket_group,
        )
        view = self._view()
        checks = [
            doctor.Check(item.name, item.severity.value, item.found, item.hint) for item in findings
        ]
        checks += doctor.judge(facts, self._registry.all())
        checks.append(doctor.judge_confinement(facts, await self._confinement()))
        checks += doctor.judge_view(view, self._registry.all())
        enabled = self._cutting.enabled()
        checks += doctor.judge_tables({card: self._cutting.wrong(card) for card in enabled})
        return {"checks": [item.to_dict() for item in checks]}

    async def _confinement(self) -> dict[str, Mapping[str, object]]:
        """By name: which measures each function's worker says are active."""
        paths = self._functions.world.paths

        async def ask(item: Function) -> tuple[str, object]:
            try:
                status = await function_link.call(
                    paths.function(item.uuid).control_socket, "status", deadline_s=ASKED_S
                )
            except AccelvisorError:
                return item.name, None  # its state, or the next check, says so
            return item.name, status.get("sandbox")

        told = await asyncio.gather(*map(ask, self._registry.all()))
        return {name: measures for name, measures in told if isinstance(measures, dict)}

    # --- functions -------------------------------------------------------------------------------

    async def create_function(
        self, profile: str, name: str | None = None, card: str | None = None
    ) -> dict[str, Any]:
        return self._function(await self._functions.create(profile, name, card))

    async def list_functions(self) -> dict[str, Any]:
        paths = self._functions.world.paths
        return {"functions": [wire.function(item, paths) for item in self._registry.all()]}

    async def get_function(self, function: str) -> dict[str, Any]:
        return self._function(self._registry.find(function))

    async def delete_function(self, function: str, force: bool | None = None) -> dict[str, Any]:
        if force:
            uuid = self._registry.find(function).uuid
            await attach.release(self._functions, self._links, uuid, DETACH_S)
            if self._registry.get(uuid) is not None:  # one that is static, or revoked, has ended
                await self._functions.delete(uuid)
        else:
            await self._functions.delete(
                function, lambda item: attach.require_unused(self._functions, self._links, item)
            )
        return {}

    async def function_statistics(self, function: str) -> dict[str, Any]:
        return {"statistics": await self._functions.statistics(function)}

    async def reset_function(self, function: str) -> dict[str, Any]:
        return self._function(await self._functions.reset(function))

    # --- functions and domains -------------------------------------------------------------------

    async def attach_function(
        self,
        domain: str,
        function: str,
        live: bool | None = None,
        persistent: bool | None = None,
    ) -> dict[str, Any]:
        done = await attach.attach(self._functions, self._links, domain, function, live, persistent)
        return {"attachment": wire.attachment(done)}

    async def detach_function(
        self,
        domain: str,
        function: str,
        live: bool | None = None,
        persistent: bool | None = None,
        deadline: float | None = None,
    ) -> dict[str, Any]:
        done = await attach.detach(
            self._functions,
            self._links,
            domain,
            function,
            live,
            persistent,
            _deadline(deadline, DETACH_S),
        )
        return {"attachment": wire.attachment(done)}

    async def admit_domain(self, function: str, domain: str, domain_uuid: str) -> dict[str, Any]:
        try:
            item, was_free = await admission.prepare(self._functions, function, domain, domain_uuid)
        except NotFoundError as error:
            raise await self._moving.services.owners.gone(function) or error from None
        await self._moving.admitted(str(uuids.UUID(domain_uuid)))
        if was_free:
            self._links.look_later(*STARTED_S)
        return self._function(item)

    async def print_attachment(self, function: str, domain: str | None = None) -> dict[str, Any]:
        found = self._registry.find(function)
        owner = found.domain_uuid if domain is None else await self._domain_uuid(domain)
        if owner is None:
            raise UsageError(
                f'no domain has function "{function}", and the XML is of one domain',
                where="admin",
                hint="name the domain, by its UUID if libvirt does not know it yet",
            )
        socket = str(self._functions.world.paths.function(found.uuid).domain_socket(owner))
        return {"xml": await self._links.call(lambda p: p.attachment_xml(found.uuid, socket))}

    # --- domains ---------------------------------------------------------------------------------

    async def list_domains(self) -> dict[str, Any]:
        domains = await self._links.call(lambda port: port.list())
        return {"domains": [wire.domain(item) for item in domains]}

    async def get_domain(self, domain: str) -> dict[str, Any]:
        return await self._domain(lambda port: port.get(domain), look=False)

    async def domain_xml(self, domain: str, live: bool | None = None) -> dict[str, Any]:
        return {"xml": await self._links.call(lambda port: port.xml(domain, live=bool(live)))}

    async def define_domain(
        self,
        options: dict[str, Any] | None = None,
        xml: str | None = None,
        dry_run: bool | None = None,
    ) -> dict[str, Any]:
        if (options is None) == (xml is None):
            raise UsageError("give options or an XML, exactly one", where="admin")
        if options is not None:
            built = wire.domain_options(options)
            xml = await self._links.call(lambda port: port.domain_xml(built))
        text = xml or ""
        if dry_run:
            return {"domain": None, "xml": text}
        reply = await self._domain(lambda port: port.define(text))
        return {**reply, "xml": text}

    async def prepare_domain(
        self, domain: str, hotplug_ports: int | None = None, dry_run: bool | None = None
    ) -> dict[str, Any]:
        ports = 4 if hotplug_ports is None else hotplug_ports
        if not 0 <= ports <= wire.MOST_PORTS:
            raise UsageError(f"hotplug_ports is 0 to {wire.MOST_PORTS}", where="admin")
        found, xml = await self._links.call(
            lambda port: port.prepare(domain, hotplug_ports=ports, dry_run=bool(dry_run))
        )
        return {"domain": None if dry_run else wire.domain(found), "xml": xml}

    async def undefine_domain(self, domain: str) -> dict[str, Any]:
        await self._links.call(lambda port: port.undefine(domain))
        await self._links.look()
        return {}

    async def start_domain(self, domain: str) -> dict[str, Any]:
        return await self._domain(lambda port: port.start(domain), patient=True)

    async def stop_domain(self, domain: str, deadline: float | None = None) -> dict[str, Any]:
        seconds = _deadline(deadline, STOP_S)
        return await self._domain(
            lambda port: port.shutdown(domain, deadline_s=seconds), patient=True
        )

    async def destroy_domain(self, domain: str) -> dict[str, Any]:
        return await self._domain(lambda port: port.destroy(domain))

    async def suspend_domain(self, domain: str) -> dict[str, Any]:
        return await self._domain(lambda port: port.suspend(domain))

    async def resume_domain(self, domain: str) -> dict[str, Any]:
        return await self._domain(lambda port: port.resume(domain))

    async def reboot_domain(self, domain: str) -> dict[str, Any]:
        return await self._domain(lambda port: port.reboot(domain))

    async def reset_domain(self, domain: str) -> dict[str, Any]:
        return await self._domain(lambda port: port.reset(domain))

    # --- events ----------------------------------------------------------------------------------

    async def list_events(
        self, after: int | None = None, limit: int | None = None
    ) -> dict[str, Any]:
        count = 1000 if limit is None else limit
        if not 1 <= count <= PAGE or (after or 0) < 0:
            raise UsageError("limit is 1 to 1000, after is not negative", where="admin")
        records = await self._registry.events(after, count)
        return {"events": [wire.event(item) for item in records]}

    async def watch_events(self, after: int | None = None) -> AsyncGenerator[dict[str, Any], None]:
        with self._hub.watch() as watcher:
            yield {"event": None}
            last = -1
            if after is not None:
                # The watcher was there first, so what happens meanwhile comes twice: skip by id.
                last = max(after, 0)
                while records := await self._registry.events(last, PAGE):
                    for record in records:
                        last = record.id
                        yield {"event": wire.event(record)}
            while True:
                news = await watcher.next(ALIVE_S)
                if news is None:
                    yield {"event": None}
                elif news.id > last:
                    yield {"event": wire.event(news)}

    # --- inside ----------------------------------------------------------------------------------

    def _function(self, item: Any) -> dict[str, Any]:
        return {"function": wire.function(item, self._functions.world.paths)}

    async def _domain_uuid(self, domain: str) -> str:
        """Of a domain that need not be there yet if this is its UUID."""
        try:
            return (await self._links.call(lambda port: port.get(domain))).uuid
        except NotFoundError:
            try:
                return str(uuids.UUID(domain))
            except ValueError:
                pass
            raise

    async def _domain(
        self, verb: Callable[[DomainsPort], Domain], *, look: bool = True, patient: bool = False
    ) -> dict[str, Any]:
        """One verb on one domain; then the functions follow before the caller hears of it."""
        found = await self._links.call(verb, patient=patient)
        if look:
            await self._links.look()
        return {"domain": wire.domain(found)}


def _deadline(given: float | None, default: float) -> float:
    if given is None:
        return default
    if not 0 < given <= LONGEST_S:
        raise UsageError(f"a deadline is up to {LONGEST_S:g} seconds", where="admin")
    return given
