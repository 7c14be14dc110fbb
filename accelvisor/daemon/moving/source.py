"""The source's side of one move: what the actions of :mod:`accelvisor.migration.source` do here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from accelvisor.daemon.moving import awakening, documents, orders, sealing
from accelvisor.daemon.moving.asked import Asked
from accelvisor.daemon.moving.copying import Copying, Part
from accelvisor.daemon.moving.driver import Driver
from accelvisor.daemon.moving.lent import Lent
from accelvisor.daemon.moving.pace import Pace
from accelvisor.daemon.moving.record import Peer, Record
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, ConflictError, UnavailableError
from accelvisor.frames.chunks import Kind
from accelvisor.function.moving import SECTION_BYTES
from accelvisor.limits import LIMITS, MIB
from accelvisor.migration import actions, source
from accelvisor.migration import messages as wire
from accelvisor.migration.ledger import Transfer, Verdict
from accelvisor.migration.sender import Sender
from accelvisor.migration.source import Event, State

LOG = logging.getLogger(__name__)
#: How long QEMU may take to end after it handed its VM over.
_GONE_S = 10.0
#: Of the written pages: the list of DMA windows, a behind-the-IOMMU guest's longest being 1.5 MiB.
_EXTENTS_HEAD = 2 * MIB
#: How long another move of the functions may take to end; less than the destination waits.
_BUSY_S = LIMITS.migration_reserve_s / 2


class SourceMove:
    """One move away from this host.

    Args:
        asked: what the destination wants.
        peer: the destination.
    """

    def __init__(self, services: Services, asked: wire.Reserve, peer: Peer) -> None:
        self._services = services
        self.asked = asked
        self.peer = peer
        self.rounds = 0
        self.begun = time.monotonic()
        self.frozen_at = 0.0
        self.domain_name = ""
        target = services.targets.get(asked.domain, services.settings.downtime_s)
        self.pace = Pace(target)
        #: What the first round has to send.
        self.state_bytes = 0
        #: Of a move that is known from the journal alone.
        self.record_parts: tuple[wire.Part, ...] = ()
        #: The functions that nobody else may act on because of this move.
        self.held: set[str] = set()
        self.records: tuple[bytes, ...] = ()
        #: What was heard since a restart, of the destination or of QEMU, until it is known where
        #: the VM is: only then can it be answered. None: nothing waits.
        self.heard: list[Callable[[], None]] | None = None
        self._offer: wire.Offer
        self._asked = Asked(services.leaves, asked.domain)
        self.copying = Copying(
            services, f"move of {asked.domain} away", self.pace, self._everywhere,
            self._round_done, self._round_failed,
        )  # fmt: skip
        a = actions
        self.driver: Driver[State, Event] = Driver(
            f"move of {asked.domain} away",
            source.answer,
            State.START,
            {
                a.Send: self._send,
                a.Journal: self._journal,
                a.Inspect: self._inspect,
                a.StartRounds: self._start_rounds,
                a.NextRound: self._next_round,
                a.Rewind: self._rewind,
                a.Freeze: self._freeze,
                a.ShipLast: self._ship_last,
                a.Seal: self._seal,
                a.AnswerOwners: self._answer_owners,
                a.AnswerSave: self._answer_save,
                a.AskArbiter: self._ask_arbiter,
                a.Thaw: self._thaw,
                a.Scrub: self._scrub,
                a.Report: self._report,
            },
            Event.FAILED,
            Event.DEADLINE,
            self._entered,
        )

    @property
    def parts(self) -> list[Part]:
        """Its functions, while there is something to be done with them."""
        return self.copying.parts

    def tickets(self) -> list[list[bytes]]:
        """For the destination's bulk connections."""
        return self.copying.tickets(self.peer.host)

    def _round_done(self) -> None:
        copying = self.copying
        self.peer.send(
            wire.Round(self.asked.migration, self.rounds, copying.chunks, copying.sent_bytes)
        )

    def _round_failed(self, error: AccelvisorError) -> None:
        self.driver.error = error
        self.driver.post(Event.FAILED)

    def _entered(self, state: State) -> None:
        self.pace.mark(state)
        if state is State.REFUSED:
            # What looking at it has taken, or is about to take, is given back.
            self.driver.begin(self.let_go(), None)

    # --- messages and records ---------------------------------------------------------------------

    async def _send(self, action: actions.Send) -> None:
        if action.message is wire.Committed and not self.records:
            # After a restart: asking for what was decided already gives the same records again.
            parts = self._named() or self.record_parts
            verdict = await self._services.owners.ledger.commit(self._transfer(parts))
            self._keep(parts, verdict)
        self.peer.send(self._message(action.message))

    def _message(self, kind: type[wire.Message]) -> wire.Message:
        id_ = self.asked.migration
        if kind is wire.Offer:
            return self._offer
        if kind is wire.Sealed:
            return wire.Sealed(id_, self._named(), tuple(part.envelope for part in self.parts))
        if kind is wire.Committed:
            return wire.Committed(id_, self.record_parts, self.records)
        error = self.driver.error
        if kind is wire.Refuse and error is not None:
            return wire.Refuse(id_, error.code, error.message[:900], error.where, error.hint[:900])
        if kind is wire.Abort and error is not None:
            return wire.Abort(id_, error.code, error.message[:900])
        return kind(id_)

    async def _journal(self, action: actions.Journal) -> None:
        record = Record(
            self.peer.host.hex,
            [part.function for part in self._all()],
            [part.epoch for part in self._all()],
            [part.digest for part in self._all()],
            self._services.owners.arbiter,
            self.domain_name,
            numbers=self.pace.numbers(),
            reason=self._reason(),
        )
        services, asked = self._services, self.asked
        await asyncio.to_thread(
            services.journal.write,
            asked.migration,
            "source",
            asked.domain,
            action.state,
            msgspec.msgpack.encode(record),
        )
        services.fault(f"source:{action.state}")

    @property
    def cancellable(self) -> bool:
        """Whether a cancel would be carried out now."""
        return isinstance(source.answer(self.driver.state, Event.CANCEL), actions.Move)

    @property
    def sent_bytes(self) -> int:
        """Of payload so far, all rounds and functions."""
        return max(self.copying.sent_bytes, self.pace.sent_bytes)

    @property
    def copied_bytes(self) -> int:
        """What that stands for: zeros are not sent."""
        covered = sum(part.sender.progress.covered for part in self.parts)
        return covered if self.parts else self.state_bytes

    def _reason(self) -> str:
        """Why it was given up, if it was."""
        error = self.driver.error
        return f"{error.message} [{error.code}]" if error is not None else ""

    def _named(self) -> tuple[wire.Part, ...]:
        return tuple(
            wire.Part(part.uuid, part.epoch, part.digest) for part in self.parts if part.digest
        )

    def _all(self) -> tuple[wire.Part, ...]:
        """The functions, also those that nothing was sealed of."""
        if not self.parts:
            return self.record_parts
        return tuple(
            wire.Part(part.uuid, part.epoch, part.digest or bytes(32)) for part in self.parts
        )

    def knows(self, parts: tuple[wire.Part, ...]) -> bool:
        """Whether these are this move's functions with their seals."""
        return parts == (self._named() or self.record_parts)

    # --- before the switch-over -------------------------------------------------------------------

    async def _inspect(self, _: actions.Inspect) -> None:
        self.driver.begin(self._look(), Event.INSPECTED)

    async def _look(self) -> None:
        """Are the functions here, the domain's, ours, and in a state to be moved?"""
        asked, services = self.asked, self._services
        if asked.destination != str(self.peer.host):
            raise ConflictError(
                "a host asks for a move to another host", code="migration-peer", where="migration"
            )
        await self._asked.require()
        mine = {
            function.uuid: function
            for function in services.functions.registry.all()
            if function.domain_uuid == asked.domain
        }
        wanted = {wanted.function for wanted in asked.functions}
        if set(mine) != wanted:
            raise ConflictError(
                "the domain's functions here are not those of its definition: "
                + ", ".join(sorted(set(mine) ^ wanted)),
                code="migration-functions",
                where="migration",
                hint="accelctl function list shows whose they are",
            )
        await self._hold(set(mine))
        for function in mine.values():
            self.domain_name = function.domain or ""
            function.require_whole()
            self.parts.append(await self._part(function))
        envelopes = tuple(sealing.offer(services, self, part) for part in self.parts)
        self._offer = wire.Offer(
            asked.migration,
            services.owners.arbiter,
            tuple(
                sealing.offered(part, services.functions.cards) for part in self.parts
            ),
            envelopes,
        )

    async def _hold(self, mine: set[str]) -> None:
        """A domain that came a moment ago may go on at once: its arrival ends soon."""
        held = self._services.functions.held
        loop = asyncio.get_running_loop()
        end = loop.time() + _BUSY_S
        while busy := mine & held:
            if loop.time() > end:
                raise ConflictError(
                    f"function {busy.pop()} takes part in another move",
                    code="migration-busy",
                    where="migration",
                )
            await asyncio.sleep(0.02)
        held.update(mine)
        self.held = mine

    async def _part(self, function: Function) -> Part:
        services = self._services
        paths = services.functions.world.paths.function(function.uuid)
        said = documents.described(await orders.order(paths.control_socket, "describe"))
        given = await orders.order(paths.holder_socket, "lend", expected=4)
        lent = Lent(given.fds, function.memory_bytes, function.window_bytes)
        try:
            self.state_bytes += await asyncio.to_thread(lent.held_bytes)
            epoch = await services.owners.next_epoch(function.uuid)
        except BaseException:
            lent.close()
            raise
        sections: dict[int, int] = {
            Kind.FUNCTION: LIMITS.manifest_bytes,
            Kind.STATUS: LIMITS.manifest_bytes,
            Kind.STATE: SECTION_BYTES,
            Kind.WINDOW: function.window_bytes,
            Kind.MEMORY: function.memory_bytes,
            Kind.EXTENTS: said.ram_bytes + _EXTENTS_HEAD,
        }
        sender = Sender(rate=services.settings.rate)
        frame = documents.function_frame(said)
        return Part(function, frame, lent, sender, epoch, sections)

    async def _start_rounds(self, _: actions.StartRounds) -> None:
        self.copying.round(first=True)
        self._asked.watch(lambda: self.driver.state is State.PRECOPY, self._round_failed)

    async def _next_round(self, _: actions.NextRound) -> None:
        self.rounds += 1
        self.copying.round(first=False)

    async def _rewind(self, _: actions.Rewind) -> None:
        """The bulk connections tell each other what is missing; the word that a round is over may
        have been lost with the link."""
        if not self.copying.busy:
            self._round_done()

    # --- the switch-over --------------------------------------------------------------------------

    async def _freeze(self, _: actions.Freeze) -> None:
        self.copying.stop()
        self.driver.begin(self._walk_to_stop(), Event.FROZEN)

    async def _walk_to_stop(self) -> None:
        self.frozen_at = time.monotonic()
        await self._everywhere("fence", on=True)
        for state in actions.FREEZE_WALK:
            await self._everywhere("migrate", to=state)

    async def _ship_last(self, _: actions.ShipLast) -> None:
        self.driver.begin(self.copying.last(), Event.SHIPPED)

    async def _seal(self, _: actions.Seal) -> None:
        self.driver.begin(self._sign(), Event.SEALED)

    async def _sign(self) -> None:
        for part in self.parts:
            models = await self._services.watermarks.expected(part.uuid)
            part.envelope, part.digest = sealing.manifest(self._services, self, part, models)
        await self._services.owners.ledger.prepare(self._transfer(self._named()))

    async def _answer_owners(self, action: actions.AnswerOwners) -> None:
        self.driver.reply("owners", action.yes)

    async def _answer_save(self, action: actions.AnswerSave) -> None:
        if action.yes:
            self.driver.reply("save", sealing.token(self.asked.migration, self._named()))
        else:
            self.driver.reply("save", _NOT_NOW)

    # --- after it ---------------------------------------------------------------------------------

    async def _ask_arbiter(self, action: actions.AskArbiter) -> None:
        self.driver.begin(self._decide(action.decision), None)

    async def _decide(self, decision: actions.Decision) -> None:
        ledger = self._services.owners.ledger
        parts = self._named() or self.record_parts
        decide = ledger.commit if decision is actions.Decision.COMMIT else ledger.abort
        try:
            verdict = await decide(self._transfer(parts))
        except AccelvisorError as error:
            # Whatever it is: without an answer neither side may compute, so it is asked again.
            level = logging.WARNING if isinstance(error, UnavailableError) else logging.ERROR
            LOG.log(level, "%s: %s", self.driver.name, error.message)
            self.driver.post(Event.ARBITER_UNREACHABLE)
            return
        self._keep(parts, verdict)
        self.driver.post(
            Event.ARBITER_COMMITTED if verdict.committed else Event.ARBITER_ABORTED
        )

    def _keep(self, parts: tuple[wire.Part, ...], verdict: Verdict) -> None:
        if verdict.committed:
            self.record_parts = parts
            self.records = tuple(signed.envelope for signed in verdict.records)

    def _transfer(self, parts: tuple[wire.Part, ...]) -> Transfer:
        return self._services.owners.transfer(self.asked.migration, str(self.peer.host), parts)

    async def _thaw(self, _: actions.Thaw) -> None:
        """At once: the guest waits. What is copied beside is cut off first."""
        self.copying.cancel()
        await self.driver.settle()
        self.driver.begin(self._go_on(), Event.THAWED)

    async def _go_on(self) -> None:
        full = self.pace.throttle < 100 or not self.parts  # of what a restart found, nobody knows
        whole = await awakening.wake(self._services.functions, self._uuids(), full_speed=full)
        await self.let_go()
        if not whole:
            with suppress(AccelvisorError):
                await self._services.arrived()  # nobody looked after the lost one meanwhile

    async def _scrub(self, _: actions.Scrub) -> None:
        self.driver.begin(self._remove(), Event.SCRUBBED)

    async def _remove(self) -> None:
        functions = self._services.functions
        uuids = [part.function for part in self.record_parts] or [p.uuid for p in self.parts]
        for uuid in uuids:
            await functions.wait_disconnected(uuid, _GONE_S)
            await functions.drop(uuid, f"moved to host {self._peer_name()}")
        await self.let_go()

    async def _report(self, action: actions.Report) -> None:
        words = {
            actions.Outcome.MOVED: f"its functions compute on host {self._peer_name()}",
            actions.Outcome.RETURNED: "its functions stay",
            actions.Outcome.FENCED: "its functions belong to the other host now",
        }[action.outcome]
        error = self.driver.error
        why = f" ({error.message})" if error is not None and action.outcome != "moved" else ""
        kind = f"migration-{action.outcome}"
        await self._services.record(kind, self.asked.domain, f"{words}{why}")

    async def let_go(self) -> None:
        """Give back what was borrowed; the move may still be asked about."""
        self.record_parts = self._all()
        self._asked.close()
        await self.copying.close()
        self._services.functions.held -= self.held
        self.held = set()

    # --- help -------------------------------------------------------------------------------------

    async def _everywhere(self, method: str, **parameters: object) -> None:
        """The same order to every function of the VM; done when all have carried it out."""
        paths = self._services.functions.world.paths
        await asyncio.gather(
            *(orders.control(paths, uuid, method, parameters) for uuid in self._uuids())
        )

    def _uuids(self) -> list[str]:
        return [part.uuid for part in self.parts] or [p.function for p in self.record_parts]

    def _peer_name(self) -> str:
        known = self._services.keys.keyring.effective.host(str(self.peer.host))
        return known.name if known is not None else str(self.peer.host)


_NOT_NOW = ConflictError(
    "nothing was sealed for this VM", code="migration-out-of-order", where="migration"
)
