"""Everything about moves, as one part of the daemon: made, started and stopped with it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from accelvisor.daemon.config import Config, MigrationConfig
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.moving import checkpoints
from accelvisor.daemon.moving.anticipation import Policy, Watchman
from accelvisor.daemon.moving.arriving import MONITOR_S, Arriving
from accelvisor.daemon.moving.checkpoints import Checkpoints
from accelvisor.daemon.moving.doors import Doors
from accelvisor.daemon.moving.evidence import AuditFile, Nonces
from accelvisor.daemon.moving.journal import Journal
from accelvisor.daemon.moving.keys import Keys
from accelvisor.daemon.moving.marks import Marks
from accelvisor.daemon.moving.moves import Moves
from accelvisor.daemon.moving.numbers import Numbers
from accelvisor.daemon.moving.owners import Arbiter, Owners
from accelvisor.daemon.moving.saving import DomainSaves
from accelvisor.daemon.moving.services import Services, Settings
from accelvisor.daemon.moving.shelf import Shelf
from accelvisor.daemon.moving.switch import Switch
from accelvisor.daemon.moving.tensors import Processes
from accelvisor.daemon.moving.uploads import Uploads
from accelvisor.daemon.moving.watermarks import Watermarks
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.store import Function
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DeadlineError,
    SystemFailure,
    UsageError,
)
from accelvisor.frames.trust import Host
from accelvisor.hypervisor import context, entries, rewrite
from accelvisor.hypervisor.xml import memory_bytes
from accelvisor.hypervisor.xmltree import child, parse
from accelvisor.migration import joining, joining_io
from accelvisor.migration import messages as wire
from accelvisor.migration.ledger import Ledger
from accelvisor.migration.listener import Deposit, Listener
from accelvisor.migration.tickets import Tickets

LOG = logging.getLogger(__name__)


class ClosingLedger(Ledger, Protocol):
    """A ledger that is ours to end."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Around:
    """What of the daemon this part is given.

    Attributes:
        record: an event for operators (kind, subject, message).
        look: look at libvirt's domains again.
        domain_state: "running", "paused" or "gone", as libvirt says.
        leaves: whether somebody here migrates a domain away, as libvirt says.
        make_ledger: who owns what, and who decides about moves.
        group: gid of QEMU's sockets.
    """

    paths: Paths
    config: Config
    host: UUID
    name: str
    functions: Functions
    record: Callable[[str, str, str], Awaitable[Any]]
    look: Callable[[], Awaitable[None]]
    domain_state: Callable[[str], Awaitable[str]]
    leaves: Callable[[str], Awaitable[bool]]
    make_ledger: Callable[[Keys], tuple[ClosingLedger, Arbiter]]
    group: int | None = None
    clock_ns: Callable[[], int] = time.time_ns
    fault: Callable[[str], None] = lambda step: None


class MovingHost:
    """One per daemon."""

    def __init__(self, around: Around) -> None:
        self._around = around
        #: Everything is about to move away from this host.
        self.draining = False
        self._expected: set[str] = set()  # domains for which room is being made
        self._undo = AsyncExitStack()

    @property
    def config(self) -> MigrationConfig:
        """Of this host."""
        return self._around.config.migration

    @property
    def paths(self) -> Paths:
        """Of this daemon."""
        return self._around.paths

    async def start(self) -> None:
        """Come up; what was begun before a restart goes on. Undone when it fails."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await self._undo.aclose()

    async def _start(self) -> None:
        around, undo = self._around, self._undo
        settings = around.config.migration
        state = around.paths.state
        address = settings.address or _default_address(settings.listen)
        later = asyncio.get_running_loop().call_later
        self.keys = Keys(
            state / "trust", around.host, around.name, address, around.clock_ns, later
        )
        undo.callback(self.keys.close)
        journal = Journal(state / "moves.db", lambda: around.clock_ns() / 1e9)
        undo.callback(journal.close)
        audit = AuditFile(state / "audit")
        undo.callback(audit.close)
        nonces = Nonces(state / "nonces.db", around.clock_ns)
        undo.callback(nonces.close)
        ledger, arbiter = around.make_ledger(self.keys)
        undo.push_async_callback(ledger.close)
        owners = Owners(ledger, self.keys, arbiter)
        tickets: Tickets[Deposit] = Tickets(os.urandom)
        self.services = Services(
            keys=self.keys,
            owners=owners,
            functions=around.functions,
            journal=journal,
            tickets=tickets,
            audit=audit,
            nonces=nonces,
            watermarks=self._watermarks(audit),
            boot=journal.start(),
            record=around.record,
            context=self._context,
            arrived=around.look,
            leaves=around.leaves,
            settings=Settings(
                downtime_s=settings.downtime_ms / 1000,
                rate=float(settings.rate) or None,
                streams=settings.streams,
                first_pass_s=settings.first_pass_s,
            ),
            clock_ns=around.clock_ns,
            fault=around.fault,
        )
        self.moves = Moves(self.services, self._domain_state)
        undo.push_async_callback(self.moves.close)
        self.checkpoints = self._checkpoints()
        undo.callback(self.checkpoints.close)
        store = self.checkpoints.library.store
        self.uploads = Uploads(state / "checkpoints", store.require_room)
        undo.callback(self.uploads.close)
        saves = DomainSaves(self.checkpoints, self._domain_state)
        self.switch = Switch(self.moves, saves)
        undo.push_async_callback(self.switch.close)
        self.doors = Doors(around.paths.run, self.switch, self.switch.event, around.group)
        self.switch.use(self.doors)
        self.arriving = Arriving(self.services, self.doors)
        undo.push_async_callback(self.doors.close)
        around.functions.on_removed = self._removed
        around.functions.on_owner = self.follow
        around.functions.may_run = self._may_run
        await self.follow()
        self.listener: Listener | None = None
        if settings.listen:
            self.listener = Listener(
                _listen(settings.listen), self.keys.credentials, self.moves.handler, tickets=tickets
            )
            await self.listener.start()
            undo.push_async_callback(self.listener.stop)
        await self.moves.recover()
        await self.checkpoints.recover()
        # Beside: a QEMU that is not there is waited for, while libvirt waits for us to start one.
        self.moves.spawn(saves.recover())
        watchman = Watchman(
            self.services, self.checkpoints, self._policy(), lambda: self.draining
        )
        watchman.start()
        undo.push_async_callback(watchman.stop)

    def _checkpoints(self) -> Checkpoints:
        around, settings = self._around, self._around.config.checkpoints
        return Checkpoints(
            self.services,
            Shelf(around.paths.state / "checkpoints"),
            Numbers(around.paths.state / "checkpoints.db"),
            self._domain_state,
            checkpoints.Settings(keep=settings.keep, zstd=settings.compress),
        )

    def _policy(self) -> Policy:
        settings = self._around.config.checkpoints
        return Policy(
            every_s=float(settings.every_s),
            faults=settings.faults,
            restarts=settings.restarts,
            keep=settings.keep,
        )

    def _watermarks(self, audit: AuditFile) -> Watermarks:
        around = self._around
        find = around.functions.registry.find
        return Watermarks(
            Marks(around.paths.state / "watermarks"),
            Processes(around.paths, lambda uuid: find(uuid).memory_bytes),
            str(around.host),
            lambda: self.keys.identity,
            audit,
            around.record,
            policy=lambda: around.config.migration.watermark,
        )

    async def _removed(self, uuid: str) -> None:
        """A function is no more here."""
        try:
            self.checkpoints.forget_base(uuid)
            await asyncio.to_thread(self.services.watermarks.forget, uuid)
            await self.services.owners.give_up(uuid)
        except AccelvisorError as error:
            LOG.warning("function %s, which is gone: %s", uuid, error.message)
        await self.follow()

    async def _may_run(self, function: Function) -> None:
        known = function.domain_uuid is not None
        await self.services.owners.require_ours(function.uuid, known=known)

    async def follow(self) -> None:
        """Sockets for exactly the domains that have functions, or are about to."""
        await self.doors.keep(self._accompanied)

    def _accompanied(self) -> set[str]:
        functions = self._around.functions.registry.all()
        owners = {f.domain_uuid for f in functions if f.domain_uuid is not None}
        return owners | self.moves.domains() | self._expected

    # --- trust ------------------------------------------------------------------------------------

    def invite(self, address: str | None, again: str | None = None) -> tuple[str, float]:
        """A join code for one other host, and until when it is good (seconds since 1970).

        Args:
            again: a trusted host that is to come with other keys.

        Raises:
            NotFoundError: ``trust-host-unknown``.
            ConflictError: ``peer-listen``: this host lets no others in.
        """
        listener, text = self._listening(), address or self._address()
        where, port = Keys.address_of_text(text)
        keys = self.keys
        learn = partial(self._learn, again=UUID(keys.find(again).uuid) if again else None)
        invitation = joining.invite(
            where, port, keys.host, keys.identity, entropy=os.urandom, now_s=time.time()
        )
        listener.join = joining_io.answering(
            invitation, keys.credentials, learn, name=self._around.name, address=text
        )
        return str(invitation.code), float(invitation.code.expires_s)

    async def join(self, text: str) -> Host:
        """Trust the host that made a code, and be trusted by it.

        Raises:
            UsageError, PermissionDenied: ``join-...``; UnavailableError: ``peer-unreachable``.
        """
        code = joining.Code.parse(text)
        port = self._around.config.migration.listen.rpartition(":")[2]
        mine = self._around.config.migration.address or (f":{port}" if port else "")
        card = await joining_io.join(
            code,
            self.keys.credentials,
            self._learn,
            look=lambda card: self.keys.admit(card.host, card.identity, _name(card)),
            name=self._around.name,
            address=mine,
        )
        return self.keys.find(str(card.host))

    async def _learn(self, card: joining.Card, again: UUID | None = None) -> None:
        uuid, name = str(card.host), _name(card)
        try:
            replaced = self.keys.learn(card.host, card.identity, name, card.address, again)
        except AccelvisorError as error:
            await self._around.record("trust-refused", uuid, f"join: {error.message}")
            raise
        kind, how = ("trust-replaced", ", with other keys") if replaced else ("trust-added", "")
        await self._around.record(kind, uuid, f"host {name} is trusted{how}")

    async def forget(self, name: str) -> Host:
        """Trust a host no longer. NotFoundError ``trust-host-unknown``."""
        host = self.keys.remove(name)
        words = f"host {host.name} is trusted no more"
        await self._around.record("trust-removed", host.uuid, words)
        return host

    async def revoke(self, key: str) -> None:
        """A key counts no more. NotFoundError ``trust-key-unknown``."""
        self.keys.revoke(key)
        await self._around.record("trust-revoked", "", f"key {key} counts no more")

    async def rotate(self) -> tuple[list[str], list[str]]:
        """New keys for this host; (names of the hosts that were told, of those that were not)."""
        peers = self.keys.peers()
        results = await self.moves.neighbours.rotate(peers, self.keys.rotate)
        told = [h.name for h, r in zip(peers, results, strict=True) if r is None]
        missed = [h.name for h, r in zip(peers, results, strict=True) if r is not None]
        words = f"this host has key {self.keys.identity.key_id}"
        await self._around.record("trust-rotated", "", words)
        return told, missed

    async def adopt(self, envelope: bytes, roots: frozenset[str] | None) -> None:
        """Take over a trust document: the next version, or with ``roots`` a fleet's first one.

        Raises:
            DataError: ``trust-...``: why it is refused.
        """
        if roots is None:
            self.keys.replace(envelope)
        else:
            self.keys.join_fleet(envelope, roots)
        words = f"version {self.keys.document.version} of the trust document is in force"
        await self._around.record("trust-imported", "", words)

    def _listening(self) -> Listener:
        if self.listener is None:
            raise ConflictError(
                "this host lets no other hosts in",
                code="peer-listen",
                where="config:[migration] listen",
                hint='set it, for example to "0.0.0.0:16519", and restart accelvisord',
            )
        return self.listener

    def _address(self) -> str:
        settings = self._around.config.migration
        return settings.address or _default_address(settings.listen)

    # --- the hook ---------------------------------------------------------------------------------

    async def reserve(self, xml: str) -> str:
        """A domain is about to come by a migration: make room, and answer with its XML here.

        Raises:
            AccelvisorError: why it cannot.
        """
        domain, domain_uuid, functions = _read(xml)
        if not functions:
            return xml
        whose = entries.ownership(xml)
        wanted = tuple(wire.Wanted(function, "") for function in functions)
        self._expected.add(domain_uuid)
        try:
            await self.doors.open(domain_uuid)
            move = await self.moves.begin(
                domain,
                domain_uuid,
                wanted,
                source_host=whose.host,
                owner=whose.owner,
                ram_bytes=memory_bytes(xml),
            )
            self.moves.spawn(self.arriving.expect(move))
        finally:
            self._expected.discard(domain_uuid)
        return rewrite.rewrite(xml, host=str(self.keys.host), run=self._around.paths.run)

    async def prepare_restore(self, xml: str) -> str:
        """A domain is about to come back from a file: its XML here."""
        _, domain_uuid, functions = _read(xml)
        if not functions:
            return xml
        await self.admitted(domain_uuid)
        return rewrite.rewrite(xml, host=str(self.keys.host), run=self._around.paths.run)

    async def admitted(self, domain_uuid: str) -> None:
        """A domain with functions is about to start: its QEMU finds what it connects to."""
        await self.doors.open(domain_uuid)
        self.switch.starting(domain_uuid)

    async def restore_context(self, domain: str, domain_uuid: str) -> None:
        """The domain's QEMU has started. If it waits for a VM, give it its functions' PCI context,
        and wait for the first pass over device memory: QEMU's own pass begins after this.
        """
        move = self.moves.coming(domain_uuid)
        if move is None:
            await self.switch.restore_context(self.doors, domain_uuid)
            return
        await self.arriving.restore_context(move)

    async def gone(self, domain_uuid: str, reason: str) -> None:
        """The domain's QEMU is not there any more."""
        await self._around.functions.carry(self.switch.gone(domain_uuid))

    async def _context(self, domain: str, function: str, config: bytes) -> bytes:
        pair = self.doors.find(domain)
        if pair is None or not pair.monitor.connected:
            raise ConflictError(
                "the domain's QEMU has no private monitor",
                code="migration-monitor",
                where=f"domain:{domain}",
                hint="start the domain anew: it was started before accelvisor knew of migration",
            )
        return await context.observe(pair.monitor, function, config)

    async def _domain_state(self, domain: str) -> str:
        """What the domain does: its own monitor knows best; of one that is gone libvirt knows."""
        pair = self.doors.find(domain)
        if pair is not None:
            try:
                await pair.monitor.wait_connected(MONITOR_S)
                status = await pair.monitor.execute("query-status")
                return "running" if status.get("running") else "paused"
            except (DeadlineError, AccelvisorError):
                pass
        return await self._around.domain_state(domain)


def _name(card: joining.Card) -> str:
    return card.name or str(card.host)


def _read(xml: str) -> tuple[str, str, list[str]]:
    """(name, UUID, functions) of a domain. Raises UsageError."""
    document = parse(xml)
    name, uuid = child(document.root, "name"), child(document.root, "uuid")
    if name is None or uuid is None or not name.text or not uuid.text:
        raise UsageError("the domain XML has no name and UUID", where="admin")
    functions = [entry.uuid for entry in entries.functions(document)]
    return name.text.strip(), str(UUID(uuid.text.strip())), list(dict.fromkeys(functions))


def _listen(text: str) -> socket.socket:
    """Raises SystemFailure ``peer-listen``."""
    host, _, port = text.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=64)
    except (OSError, ValueError) as error:
        raise SystemFailure(
            f"cannot listen for other hosts on {text}: {error}",
            code="peer-listen",
            where="config:[migration] listen",
            hint='another program may have the port; "" lets no host in',
        ) from error


def _default_address(listen: str) -> str:
    """How peers reach this host where nothing is configured: by its name, at the same port."""
    if not listen:
        return ""
    host, _, port = listen.rpartition(":")
    known = host.strip("[]") not in ("", "0.0.0.0", "::")
    return f"{host if known else socket.gethostname()}:{port}"
