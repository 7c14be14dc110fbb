"""accelvisord as one object: what it is made of, and in which order that comes up and goes down.

Up: lock, listener, store, recovery of the functions, clients, READY, domains. Down: clients, verbs
in flight, watches, domains, store. Function processes are left running: the next daemon adopts
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import accelvisor
from accelvisor.control.admin import Policy
from accelvisor.control.dispatch import Dispatcher
from accelvisor.control.server import AdminServer
from accelvisor.daemon import domains, listen
from accelvisor.daemon.assigning import Assigning
from accelvisor.daemon.config import AdminConfig, Config
from accelvisor.daemon.cutting import Cutting
from accelvisor.daemon.domains import DomainsLink
from accelvisor.daemon.events import EventHub
from accelvisor.daemon.functions import Functions, World
from accelvisor.daemon.keeper import Keeper
from accelvisor.daemon.lifecycle import ALIVE
from accelvisor.daemon.moving import ledgers
from accelvisor.daemon.moving.host import Around, MovingHost
from accelvisor.daemon.notify import Notifier
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.port import Member, Port, Shares
from accelvisor.daemon.registry import Registry
from accelvisor.daemon.scrubs import Scrubs
from accelvisor.daemon.service import AdminService, Identity
from accelvisor.daemon.shaping import Shaping
from accelvisor.daemon.sharing import Sharing
from accelvisor.daemon.store import Function, Store
from accelvisor.daemon.supervisor import Supervisor, choose
from accelvisor.errors import SystemFailure
from accelvisor.hypervisor import capabilities
from accelvisor.hypervisor.capabilities import Finding
from accelvisor.hypervisor.port import DomainEvent, DomainEventKind, DomainsPort
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
#: Seconds that verbs in flight get before the daemon ends; the journal has the rest.
SETTLE_S = 15.0
#: Told to the service manager while recovering, so that many functions do not look like a hang.
EXTEND_S = 60.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a daemon is started with.

    Attributes:
        listener: an inherited listening socket; None to bind one.
        supervisor: None to choose by the configuration.
        load_domains: makes the hypervisor's port for an URI.
        examine: looks at the host's hypervisor for Doctor; blocks.
        poll_s, fault: passed on to :class:`World`.
    """

    config: Config
    paths: Paths
    notifier: Notifier
    listener: socket.socket | None = None
    supervisor: Supervisor | None = None
    load_domains: Callable[[str], DomainsPort] = domains.load
    examine: Callable[[str], Sequence[Finding]] = capabilities.examine
    clock: Callable[[], float] = time.time
    poll_s: float = LIMITS.function_poll_s
    fault: Callable[[str], None] = lambda step: None


class Daemon:
    """One running accelvisord; use :meth:`start`, then :meth:`stop`, in one loop."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._undo = contextlib.AsyncExitStack()
        self._watchdog: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Come up; says READY at the end.

        Raises:
            ConflictError: ``already-running``, ``socket-live``, ``socket-not-a-socket``.
            SystemFailure, StateError, ConfigError: what stands in the way, undone before.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Go down in the reverse order; idempotent. Functions go on."""
        self._setup.notifier.stopping("stopping; functions go on")
        await self._undo.aclose()

    async def reload(self, config: Config) -> None:
        """Take over cards, profiles, groups and the host's name. What else changed is reported: it
        needs a restart."""
        old = self._setup.config
        for name in ("supervisor",):
            if getattr(old.daemon, name) != getattr(config.daemon, name):
                LOG.warning("[daemon] %s changed: restart accelvisord to use it", name)
        if old.libvirt != config.libvirt:
            LOG.warning("[libvirt] changed: restart accelvisord to use it")
        if old.migration != config.migration:
            LOG.warning("[migration] changed: restart accelvisord to use it")
        self._functions.configure(config)
        self._cutting.check()
        await self._sharing.settle()
        self._server.dispatcher.policy = policy(config)

    async def _start(self) -> None:
        setup, undo = self._setup, self._undo
        _directory(setup.paths.run, 0o755)
        _directory(setup.paths.functions, 0o755)
        _directory(setup.paths.specs, 0o750)
        _directory(setup.paths.state, 0o700)
        lock = listen.acquire(setup.paths.lock)
        undo.callback(lock.release)
        listener = self._listener(lock)
        undo.callback(listener.close)
        hub = EventHub()
        registry = self._open(hub)
        await registry.load()
        supervisor = setup.supervisor or choose(setup.config.daemon.supervisor, setup.paths)
        world = World(setup.paths, supervisor, setup.clock, poll_s=setup.poll_s, fault=setup.fault)
        self._functions = Functions(registry, world, setup.config)
        self._host = await registry.host_uuid(lambda: str(uuid.uuid4()))
        self._scrubs = Scrubs(self._functions, self._host, _boot_id(), time.time_ns)
        self._shaping = Shaping(self._functions, self._scrubs)
        self._sharing = Sharing(self._functions)
        self._cutting = Cutting(self._functions, self._host)
        await self._cutting.load()
        await self._functions.place_all()
        self._keeper = Keeper(self._functions, _boot_id())
        undo.push_async_callback(self._keeper.stop)
        repairs = await self._keeper.recover(self._progress)
        await self._sharing.settle()
        LOG.info("%d functions, supervised by %s", len(repairs), supervisor.name)
        links = DomainsLink(
            setup.config.libvirt.uri,
            registry.all,
            self._keeper.follow,
            self._record,
            setup.load_domains,
        )
        self._keeper.look = links.look
        undo.push_async_callback(links.stop)
        undo.push_async_callback(self._functions.settle, SETTLE_S)
        self._moving = MovingHost(self._around(registry, links))
        await self._moving.start()
        undo.push_async_callback(self._moving.stop)
        self._assigning = Assigning(self._functions, self._cutting, links)
        undo.callback(self._assigning.stop)
        await self._assigning.begin()
        await self._scrubs.use(self._moving.keys)
        self._cutting.use(self._moving.keys, self._assigning)
        # Clients first: libvirt may be waiting in its hook, for us, with a domain's lock held.
        await self._serve(links, hub, listener)
        links.start()
        self._functions.spares.start()
        undo.push_async_callback(self._functions.spares.stop)
        self._port = Port(setup.paths, self._shares)
        self._sharing.on_settled = self._port.changed
        balancing = asyncio.get_running_loop().create_task(self._port.run())
        undo.push_async_callback(self._end_port, balancing)
        self._watchdog = asyncio.get_running_loop().create_task(self._keep_alive())
        undo.push_async_callback(self._end_watchdog)
        setup.notifier.ready(f"{len(registry.all())} functions")

    async def _serve(
        self, links: DomainsLink[list[Function]], hub: EventHub, listener: socket.socket
    ) -> None:
        setup = self._setup
        identity = Identity(
            name=setup.config.host.name or socket.gethostname(),
            uuid=self._host,
            boot_id=_boot_id(),
            started=setup.clock(),
            libvirt_uri=setup.config.libvirt.uri,
        )
        service = AdminService(
            identity,
            self._functions,
            links,
            hub,
            lambda: setup.examine(setup.config.libvirt.uri),
            lambda: self._keeper.view,
            self._shaping,
            self._cutting,
            self._assigning,
        )
        service.use(self._moving)
        dispatcher = Dispatcher(service, policy(setup.config), accelvisor.__version__)
        self._server = AdminServer(dispatcher)
        self._undo.push_async_callback(self._server.stop)
        await self._server.start(listener)

    def _around(self, registry: Registry, links: DomainsLink[list[Function]]) -> Around:
        setup = self._setup
        return Around(
            paths=setup.paths,
            config=setup.config,
            host=uuid.UUID(self._host),
            name=setup.config.host.name or socket.gethostname(),
            functions=self._functions,
            record=registry.record,
            look=links.look,
            domain_state=links.state,
            leaves=links.leaves,
            make_ledger=lambda keys: ledgers.make(setup.config.ledger, setup.paths, keys),
            group=_group(setup.config.daemon.socket_group),
            fault=setup.fault,
        )

    def _progress(self, done: int, count: int) -> None:
        """Each repair may take its time; a hundred of them must not look like a hang."""
        self._setup.notifier.extend_timeout(EXTEND_S)
        self._setup.notifier.status(f"recovering functions: {done} of {count}")

    def _listener(self, lock: listen.Lock) -> socket.socket:
        setup = self._setup
        if setup.listener is not None:
            return setup.listener
        # Everybody may connect and is refused by level: groups of different levels need not share
        # one more group. A configured group narrows that.
        group = setup.config.admin.socket_group
        path = setup.paths.admin_socket
        sock = listen.bind(path, lock, group=group, mode=0o660 if group else 0o666)
        self._undo.callback(listen.remove, path)
        return sock

    def _open(self, hub: EventHub) -> Registry:
        database = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._undo.callback(database.shutdown)
        store = Store(self._setup.paths.database, self._setup.clock)
        self._undo.callback(lambda: database.submit(store.close).result())
        return Registry(store, database, hub)

    async def _record(self, event: DomainEvent) -> None:
        """A domain's event into the log of events."""
        if event.kind in (DomainEventKind.CONNECTED, DomainEventKind.DISCONNECTED):
            message = f"libvirt is {event.kind}"
        else:
            message = f"domain {event.domain} {event.kind} {event.detail}".rstrip()
        await self._functions.registry.record(f"domain-{event.kind}", event.uuid, message)
        if event.kind is DomainEventKind.STOPPED and event.uuid:
            self._moving.moves.gone(event.uuid)

    async def _keep_alive(self) -> None:
        """The watchdog's sign of life comes from the loop that answers, so a stuck loop is seen."""
        interval = self._setup.notifier.interval_s
        while interval is not None:
            self._setup.notifier.alive()
            await asyncio.sleep(interval)

    def _shares(self) -> Shares:
        """Who shares the cards' host ports now."""
        members = {
            item.uuid: Member(item.card, item.weight)
            for item in self._functions.registry.all()
            if item.state in ALIVE and not item.revoked
        }
        return Shares(members, {card.name: card.host_port for card in self._functions.cards})

    async def _end_port(self, balancing: asyncio.Task[None]) -> None:
        self._port.stop()
        await balancing

    async def _end_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)


def policy(config: Config) -> Policy:
    """Group names to ids. A name that this host does not have grants nothing, and is reported."""

    defaults = AdminConfig()
    builtin = (*defaults.read, *defaults.operate, *defaults.admin)

    def ids(names: Sequence[str]) -> frozenset[int]:
        found = set()
        for name in names:
            try:
                found.add(grp.getgrnam(name).gr_gid)
            except KeyError:
                level = logging.DEBUG if name in builtin else logging.WARNING
                LOG.log(level, '[admin] names the group "%s", which this host lacks', name)
        return frozenset(found)

    return Policy(
        read=ids(config.admin.read),
        operate=ids(config.admin.operate),
        admin=ids(config.admin.admin),
        uids=frozenset((0, os.geteuid())),
    )


def _group(name: str) -> int | None:
    """The group's id; None for none, or one that this host lacks (Doctor says so)."""
    try:
        return grp.getgrnam(name).gr_gid if name else None
    except KeyError:
        return None


def _directory(path: Path, mode: int) -> None:
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise SystemFailure(
            f"cannot make the directory: {error.strerror}",
            code="directory",
            where=str(path),
            hint="run as root, or set ACCELVISOR_RUN_DIR and ACCELVISOR_STATE_DIR",
        ) from error


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
