"""The destination's side of one move: what the actions of :mod:`accelvisor.migration.destination`
do here.

Nothing that comes is looked into before :meth:`DestinationMove._check` has verified it, and nothing
is given to a device but what that returned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from accelvisor.daemon import admission
from accelvisor.daemon.moving import awakening, documents, offers, orders
from accelvisor.daemon.moving.driver import Driver
from accelvisor.daemon.moving.evidence import FunctionNonces
from accelvisor.daemon.moving.receiving import InPlace, Part, Receiving, Source
from accelvisor.daemon.moving.record import Record
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.moving.staged import Staged
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DataError,
    StateError,
    UnavailableError,
)
from accelvisor.frames import receive
from accelvisor.frames.chunks import Kind
from accelvisor.frames.manifest import owner_digest
from accelvisor.frames.verify import MIGRATION, Expected, Verifier
from accelvisor.isolation.resources import Profile
from accelvisor.migration import actions, destination
from accelvisor.migration import messages as wire
from accelvisor.migration.destination import Event, State
from accelvisor.migration.ledger import Transfer
from accelvisor.migration.receiver import Receiver

LOG = logging.getLogger(__name__)


class DestinationMove:
    """One move to this host.

    Args:
        id: chosen by this host.
        domain, domain_uuid, owner: of the VM that comes.
        wanted: its functions, as its definition names them.
        peer: the source.
        over: told when the move has ended, well or not.
    """

    def __init__(
        self,
        services: Services,
        id: bytes,
        domain: str,
        domain_uuid: str,
        wanted: tuple[wire.Wanted, ...],
        peer: Source,
        owner: str = "",
        over: Callable[[DestinationMove], None] = lambda move: None,
        ram_bytes: int | None = None,
    ) -> None:
        self._services = services
        self.id = id
        self.domain = domain
        self.domain_uuid = domain_uuid
        self.peer = peer
        self._owner = owner_digest(owner or domain_uuid)
        self._wanted = wanted
        self._over = over
        self._ram_bytes = ram_bytes
        #: Whether the source knows how it ended, and whether its QEMU here has ended.
        self.told = self.left = False
        #: There was no function here of these UUIDs before, so any that is here now is this move's.
        self.brought = False
        self._nonce = services.entropy(16)
        self.offer: wire.Offer | None = None
        self.sealed: wire.Sealed | None = None
        self.known: tuple[wire.Part, ...] = ()  # of a move that is known from the journal alone
        self.receiving = Receiving(f"move of {domain} here", id, peer, self._failed)
        #: What is done to QEMU while rounds come in; ends with the seal.
        self.beside: asyncio.Task[None] | None = None
        self.arbiter = ""
        self.loaded_at = 0.0
        a = actions
        self.driver: Driver[State, Event] = Driver(
            f"move of {domain} here",
            destination.answer,
            State.START,
            {
                a.Send: self._send,
                a.Journal: self._journal,
                a.Prepare: self._prepare,
                a.AnswerHook: self._answer_hook,
                a.Verify: self._verify,
                a.Load: self._load,
                a.AnswerLoad: self._answer_load,
                a.AskArbiter: self._ask_arbiter,
                a.Thaw: self._thaw,
                a.Discard: self._discard,
                a.Report: self._report,
            },
            Event.FAILED,
            Event.DEADLINE,
            self._entered,
        )

    # --- messages and records ---------------------------------------------------------------------

    async def _send(self, action: actions.Send) -> None:
        self.peer.send(self._message(action.message))
        if action.message is wire.Accept:
            self.receiving.begin()

    def _message(self, kind: type[wire.Message]) -> wire.Message:
        if kind is wire.Reserve:
            host = str(self._services.keys.host)
            return wire.Reserve(self.id, self.domain_uuid, host, self._nonce, self._wanted)
        if kind is wire.Verified or kind is wire.Commit:
            return kind(self.id, self._named())
        if kind is wire.Ack:
            return wire.Ack(self.id, self.receiving.rounds, self.receiving.received)
        if kind is wire.Resume:
            return wire.Resume(self.id, self.receiving.received)
        error = self.driver.error
        if kind is wire.Refuse and error is not None:
            return wire.Refuse(
                self.id, error.code, error.message[:900], error.where[:900], error.hint[:900]
            )
        if kind is wire.Discarded and error is not None:
            return wire.Discarded(self.id, error.code, error.message[:900])
        return kind(self.id)

    async def _journal(self, action: actions.Journal) -> None:
        await self._write(action.state)
        self._services.fault(f"destination:{action.state}")

    async def _write(self, state: str) -> None:
        named = self._named()
        record = Record(
            self.peer.host.hex,
            [wanted.function for wanted in self._wanted],
            [part.epoch for part in named],
            [part.digest for part in named],
            self.arbiter,
            self.domain,
            self.brought,
        )
        await asyncio.to_thread(
            self._services.journal.write,
            self.id,
            "destination",
            self.domain_uuid,
            state,
            msgspec.msgpack.encode(record),
        )

    @property
    def parts(self) -> list[Part]:
        """Its functions, as far as they are made."""
        return self.receiving.parts

    def _failed(self, error: AccelvisorError) -> None:
        self.driver.error = error
        self.driver.post(Event.FAILED)

    def _named(self) -> tuple[wire.Part, ...]:
        return self.sealed.parts if self.sealed is not None else self.known

    def digests(self) -> dict[str, bytes]:
        """The seals that were verified, by function."""
        return {part.uuid: part.verified.digest for part in self.parts if part.verified}

    # --- reserving --------------------------------------------------------------------------------

    async def _prepare(self, _: actions.Prepare) -> None:
        self.driver.begin(self._make_room(), Event.RESERVED)

    async def _make_room(self) -> None:
        offer = self.offer
        if offer is None:
            raise ConflictError("there is no offer", code="migration-peer", where="migration")
        services = self._services
        if offer.arbiter != services.owners.arbiter:
            raise ConflictError(
                f"the hosts ask different arbiters: {offer.arbiter} there,"
                f" {services.owners.arbiter} here",
                code="migration-arbiter",
                where="migration",
                hint="set [ledger] alike on both",
            )
        self.arbiter = offer.arbiter
        if {o.function for o in offer.functions} != {w.function for w in self._wanted}:
            raise ConflictError(
                "the source offers other functions", code="migration-functions", where="migration"
            )
        here = services.functions
        for offered in offer.functions:
            uuid = offered.function
            if here.registry.get(uuid) is not None or uuid in here.held:
                raise ConflictError(
                    f"function {uuid} is on this host already",
                    code="function-exists",
                    where="functions",
                    hint="accelctl function show says whose it is",
                )
        here.held.update(self._uuids())
        self.brought = True
        # A restart that finds a half-made function must know whose it is.
        await self._write(State.RESERVING)
        services.fault("destination:preparing")
        making = [
            asyncio.ensure_future(self._part(offered, envelope))
            for offered, envelope in zip(offer.functions, offer.envelopes, strict=True)
        ]
        try:
            await asyncio.wait(making)
        finally:
            for part in making:
                part.cancel()
            made = await asyncio.gather(*making, return_exceptions=True)
            self.receiving.parts = [part for part in made if isinstance(part, Part)]
        for part in making:
            part.result()

    async def _part(self, offered: wire.Offered, envelope: bytes) -> Part:
        services = self._services
        known = await services.owners.ledger.floor(offered.function)
        verifier = Verifier(
            keyring=lambda: services.keys.keyring,
            policy=MIGRATION,
            expected=Expected(
                me=str(services.keys.host),
                source=str(self.peer.host),
                nonce=self._nonce,
                epoch=known,
                owner=self._owner,
                function=offered.function,
                domain=self.domain_uuid,
            ),
            clock_ns=services.clock_ns,
            audit=services.audit,
            used=FunctionNonces(services.nonces, offered.function),
        )
        opened = verifier.open_offer(envelope)
        said = opened.statement
        offers.require(offered, said, self._ram_bytes)
        function = await services.functions.bring(
            offered.function,
            Profile(
                offered.profile,
                offered.cores,
                offered.chips,
                offered.memory_bytes,
                offered.window_bytes,
                offered.queues,
                offered.ring_entries,
                shape=offered.links,
            ),
            offered.name,
        )
        words = f", which comes from host {self.peer.host}"
        await admission.take(services.functions, function, self.domain, self.domain_uuid, words)
        await self._order(offered.function, "fence", on=True)
        here = documents.described(await self._order(offered.function, "describe"))
        documents.require_compatible(offered.firmware, here.firmware)
        sections = {int(Kind[name.upper()]): size for name, size in said.sections.items()}
        staged = Staged(sections)
        return Part(
            offered,
            opened,
            verifier,
            receive.Receiver(verifier, opened, InPlace()),
            staged,
            Receiver(staged.views),
        )

    async def _answer_hook(self, action: actions.AnswerHook) -> None:
        self.driver.reply("hook", True if action.yes else self._why())

    def _entered(self, state: State) -> None:
        if state not in (State.RESERVING, State.PREPARING, State.RECEIVING):
            self.receiving.no_more()
        if state in (State.RUNNING, State.CLOSED):
            self._over(self)

    # --- the switch-over --------------------------------------------------------------------------

    async def _verify(self, _: actions.Verify) -> None:
        self.driver.begin(self._check(), Event.VERIFIED)

    async def _check(self) -> None:
        if self.beside is not None:
            await asyncio.gather(self.beside, return_exceptions=True)
        sealed = self.sealed
        if sealed is None or [p.function for p in sealed.parts] != [p.uuid for p in self.parts]:
            raise ConflictError(
                "the seal names other functions", code="migration-functions", where="migration"
            )
        signed = []
        for part, envelope in zip(self.parts, sealed.envelopes, strict=True):
            signed.append(part.verifier.open(envelope).statement.chunks)
            await self.receiving.counted(part, signed[-1])
        # What is verified below is what lies in staging only if nothing else came and none will.
        await self.receiving.seal(signed)
        for part, named, envelope in zip(self.parts, sealed.parts, sealed.envelopes, strict=True):
            verified = part.receiver.finish(envelope)
            if verified.digest != named.digest or verified.manifest.epoch != named.epoch:
                raise ConflictError(
                    "the seal is not of its manifest", code="migration-functions", where="migration"
                )
            part.verified = verified

    async def _load(self, _: actions.Load) -> None:
        self.driver.begin(self._load_all(), Event.LOADED)

    async def _load_all(self) -> None:
        for part in self.parts:
            await self._order(part.uuid, "fence", on=True)
            await self._order(part.uuid, "migrate", to="RESUMING")
        await asyncio.gather(*(self._load_one(part) for part in self.parts))
        self.loaded_at = time.monotonic()

    async def _load_one(self, part: Part) -> None:
        verified = part.verified
        if verified is None:
            raise ConflictError("nothing was verified", code="migration-peer", where="migration")
        sizes = {int(Kind[n.upper()]): s for n, s in verified.manifest.sections.items()}
        staged = part.staged
        frame = documents.decode(
            staged.document(Kind.FUNCTION, sizes[Kind.FUNCTION]), documents.FunctionFrame
        )
        status = documents.decode(
            staged.document(Kind.STATUS, sizes[Kind.STATUS]), documents.StatusFrame
        )
        if documents.status_digest(status.digests) != verified.manifest.digest:
            raise StateError(
                "the status frame is not the one that was signed",
                code="status-frame",
                where="status:V3",
            )
        before = documents.described(await self._order(part.uuid, "describe"))
        documents.require_context(frame, before)
        await asyncio.to_thread(staged.finish, sizes)
        after = await self._order(part.uuid, "load", staged.descriptors())
        documents.validate(frame, status, before, after)
        manifest = verified.manifest
        await self._services.watermarks.require(
            part.uuid, manifest.models, nonce=manifest.nonce, manifest=verified.digest
        )
        part.frame = frame
        self._services.fault("destination:device-loaded")

    async def _answer_load(self, action: actions.AnswerLoad) -> None:
        self.driver.reply("load", True if action.yes else self._why())

    # --- after it ---------------------------------------------------------------------------------

    async def _ask_arbiter(self, _: actions.AskArbiter) -> None:
        if self.arbiter == "source":
            self.peer.send(wire.Commit(self.id, self._named()))
            return
        self.driver.begin(self._commit(), None)

    async def _commit(self) -> None:
        try:
            verdict = await self._services.owners.ledger.commit(self._arrival())
        except UnavailableError as error:
            LOG.warning("%s: %s", self.driver.name, error.message)
            self.driver.post(Event.ARBITER_UNREACHABLE)
            return
        self.driver.post(
            Event.ARBITER_COMMITTED if verdict.committed else Event.ARBITER_ABORTED
        )

    def _arrival(self) -> Transfer:
        return self._services.owners.arrival(self.id, str(self.peer.host), self._named())

    async def committed(self, message: wire.Committed) -> None:
        """The source's ledger has given the functions to us: into ours, then it counts.

        Raises:
            DataError: a record is not signed by the source, or of another move.
        """
        if message.parts != self._named():
            raise DataError("it names another seal", code="ledger-record", where="ledger")
        await self._services.owners.adopt(message.records, self._arrival())
        self.driver.post(Event.ARBITER_COMMITTED)

    async def _thaw(self, _: actions.Thaw) -> None:
        self.driver.begin(self._go_on(), Event.THAWED)

    async def _go_on(self) -> None:
        uuids, functions = self._uuids(), self._services.functions
        await awakening.wake(functions, uuids, full_speed=False, moved=True)
        self._services.functions.held.difference_update(uuids)
        await self._services.arrived()
        await self._let_go()

    async def _discard(self, _: actions.Discard) -> None:
        await self.driver.settle()
        self.driver.begin(self._drop(), Event.DISCARDED)

    async def _drop(self) -> None:
        await self.receiving.end()
        functions = self._services.functions
        for uuid in self._uuids() if self.brought else ():
            await functions.drop(uuid, "its move to this host was given up")
            functions.held.discard(uuid)
        self.brought = False  # a function of that UUID is another one from here on
        await self._let_go()

    async def _report(self, action: actions.Report) -> None:
        words = {
            actions.Outcome.MOVED: "its functions compute here now",
            actions.Outcome.FENCED: "its functions belong to another host and do not compute here",
            actions.Outcome.RETURNED: "its functions stayed where they were",
        }[action.outcome]
        await self._services.record(f"migration-{action.outcome}", self.domain_uuid, words)

    # --- help -------------------------------------------------------------------------------------

    async def close(self) -> None:
        """The daemon ends."""
        await self.driver.close()
        await self._let_go()

    async def _let_go(self) -> None:
        await self.receiving.close()

    def _uuids(self) -> list[str]:
        return [wanted.function for wanted in self._wanted]

    async def _order(self, uuid: str, method: str, fds: Any = (), **parameters: object) -> Any:
        paths = self._services.functions.world.paths
        return await orders.control(paths, uuid, method, parameters, fds, deadline_s=_ORDER_S)

    def _why(self) -> AccelvisorError:
        return self.driver.error or ConflictError(
            "the move was given up", code="migration-aborted", where="migration"
        )


#: Loading reads all device memory back (seconds).
_ORDER_S = 20.0
