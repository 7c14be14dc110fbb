"""All moves of this host: who asks for one, what belongs to which, and what a restart finds.

Three kinds of callers: other hosts (messages and questions over the link), QEMU (its bus and its
private monitor) and the hook. Each is led to the one move that it means, which decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

import msgspec

from accelvisor.daemon.moving import documents, fit, orders, sealing
from accelvisor.daemon.moving.destination import DestinationMove
from accelvisor.daemon.moving.fit import AskFit, Fit
from accelvisor.daemon.moving.peers import (
    Answering,
    AskDomain,
    Asking,
    AskTickets,
    TellRotation,
    Ways,
    read_question,
)
from accelvisor.daemon.moving.record import Record
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.moving.source import SourceMove
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DataError,
    NotFoundError,
    UnavailableError,
)
from accelvisor.frames.trust import Host
from accelvisor.limits import LIMITS
from accelvisor.migration import destination, source
from accelvisor.migration import messages as wire
from accelvisor.migration.link import Handler, PeerLink

LOG = logging.getLogger(__name__)
_S, _D = source.Event, destination.Event

_TO_SOURCE: Mapping[type[wire.Message], source.Event] = {
    wire.Accept: _S.ACCEPT,
    wire.Ack: _S.ACK,
    wire.Resume: _S.RESUME,
    wire.Verified: _S.VERIFIED,
    wire.Refuse: _S.REFUSE,
    wire.Commit: _S.COMMIT,
    wire.Discarded: _S.DISCARDED,
    wire.Running: _S.RUNNING,
}
_TO_DESTINATION: Mapping[type[wire.Message], destination.Event] = {
    wire.Offer: _D.OFFER,
    wire.Refuse: _D.REFUSE,
    wire.Round: _D.ROUND,
    wire.Sealed: _D.SEALED,
    wire.Abort: _D.ABORT,
}
#: States in which a move is over for everybody who does not name it.
SOURCE_OVER = frozenset(
    (source.State.DONE, source.State.RETURNED, source.State.REFUSED, source.State.ABORTED)
)
DESTINATION_OVER = frozenset(
    (destination.State.RUNNING, destination.State.CLOSED, destination.State.DISCARDED)
)

#: Of the way to another host: a busy CPU on either side may spoil one of them.
_PROBES = 3
_ENDED = frozenset((destination.State.RUNNING, destination.State.CLOSED))


class Moves:
    """One per daemon.

    Args:
        domain_state: what a domain does now: "running", "paused" or "gone".
    """

    def __init__(
        self, services: Services, domain_state: Callable[[str], Awaitable[str]]
    ) -> None:
        self._services = services
        self._domain_state = domain_state
        self.sources: dict[bytes, SourceMove] = {}
        self.destinations: dict[bytes, DestinationMove] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.handler = Handler(request=self._question, notice=self._notice)
        self._ways = Ways(services.keys, self.handler, self._link)

    async def close(self) -> None:
        """The daemon ends; what is journaled goes on with the next one."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for move in self.sources.values():
            await move.driver.close()
            await move.let_go()
        for coming in self.destinations.values():
            await coming.close()
        await self._ways.close()

    # --- a VM comes -------------------------------------------------------------------------------

    async def begin(
        self,
        domain: str,
        domain_uuid: str,
        wanted: Sequence[wire.Wanted],
        *,
        source_host: str = "",
        owner: str = "",
    ) -> DestinationMove:
        """Reserve everything for a domain that is about to come. Carried to its end or undone.

        Args:
            source_host: UUID of the host that has it; empty to ask all that are trusted.

        Raises:
            NotFoundError: ``migration-no-source``: no trusted host has the domain's functions.
            AccelvisorError: why it is refused, there or here.
        """
        for earlier in list(self.destinations.values()):
            if earlier.domain_uuid == domain_uuid:
                await self._give_up(earlier)
        await self._left(domain_uuid)
        host = await self._find_source(domain_uuid, source_host)
        id_ = self._services.entropy(16)
        asking = self._ways.to(host, id_)
        move = DestinationMove(
            self._services, id_, domain, domain_uuid, tuple(wanted), asking, owner, self._over
        )
        self.destinations[id_] = move
        try:
            await asking.open()
            await move.driver.ask(_D.BEGIN, "hook")
        except BaseException as error:
            if isinstance(error, AccelvisorError):
                move.driver.error = error
            move.left = True  # no QEMU will be started for it
            if move.driver.state is destination.State.START:
                # Nobody was asked for anything: there is no move.
                del self.destinations[id_]
                self._over(move)
                await move.close()
            else:
                with suppress(ConflictError):
                    await move.driver.tell(_D.CANCEL)
            raise
        return move

    async def _give_up(self, move: DestinationMove) -> None:
        """An earlier attempt of the operator's cannot become anything any more; what it made here
        must be gone before it is made again.
        """
        if move.driver.state in _ENDED:
            return
        with suppress(ConflictError):
            await move.driver.tell(_D.CANCEL)
        try:
            async with asyncio.timeout(LIMITS.migration_reserve_s):
                await move.driver.reach(*_ENDED)
        except TimeoutError:
            raise ConflictError(
                "an earlier attempt to bring this domain here has not ended yet",
                code="migration-busy",
                where="migration",
                hint="accelctl migration list says what it waits for",
            ) from None

    async def _left(self, domain_uuid: str) -> None:
        """A domain that has just gone away comes back: what it left here is cleared first."""
        for move in list(self.sources.values()):
            if move.asked.domain == domain_uuid and move.driver.state not in SOURCE_OVER:
                try:
                    async with asyncio.timeout(LIMITS.migration_reserve_s):
                        await move.driver.reach(*SOURCE_OVER)
                except TimeoutError:
                    raise ConflictError(
                        "the move that took this domain away from here has not ended yet",
                        code="migration-busy",
                        where="migration",
                        hint="it ends when its QEMU here has ended and the other host says so",
                    ) from None

    def _link(self, id_: bytes, back: bool) -> None:
        move = self.destinations.get(id_)
        if move is not None:
            move.driver.post(_D.LINK_BACK if back else _D.LINK_LOST)

    def _over(self, move: DestinationMove) -> None:
        def told() -> None:
            move.told = True
            self._forget(move)

        self._ways.retire(move.peer.host, move.id, told)

    def _forget(self, move: DestinationMove) -> None:
        """What has ended, as its source knows, and which no QEMU has anything to do with."""
        ended = move.driver.state is destination.State.RUNNING or (
            move.driver.state is destination.State.CLOSED and move.left
        )
        if move.told and ended and self.destinations.pop(move.id, None) is not None:
            self._spawn(move.close())

    async def _find_source(self, domain_uuid: str, hint: str) -> Host:
        hosts = self._services.keys.peers()
        named = [host for host in hosts if host.uuid == hint]
        if named:
            return named[0]
        asked = {asyncio.ensure_future(self._has(host, domain_uuid)): host for host in hosts}
        left = set(asked)
        try:
            # A host that is down must not hold up the one that answers.
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for answer in done:
                    if answer.exception() is None and answer.result():
                        return asked[answer]
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        raise NotFoundError(
            "no host that this one trusts has the functions of this domain",
            code="migration-no-source",
            where="migration",
            hint="accelctl trust show; accelctl trust invite and join make hosts trust each other",
        )

    async def _has(self, host: Host, domain_uuid: str) -> bool:
        asking = Asking(self._services.keys, host, Handler(), lambda: None, lambda: None)
        try:
            return (await asking.ask(AskDomain(domain_uuid))) == b"\1"
        finally:
            await asking.close()

    async def ask_fit(self, host: Host, question: AskFit) -> tuple[Fit, float]:
        """(what a host says, bytes a second of the same question, filled up, and at its quickest).

        Raises:
            as :func:`accelvisor.migration.link.connect`; ProtocolError ``peer-answer``.
        """
        asking = Asking(self._services.keys, host, Handler(), lambda: None, lambda: None)
        loop = asyncio.get_running_loop()
        try:
            said = await asking.fit(question)
            filled = msgspec.structs.replace(question, filler=bytes(LIMITS.chunk_bytes))
            took = []
            for _ in range(_PROBES):
                began = loop.time()
                await asking.fit(filled)
                took.append(loop.time() - began)
            return said, LIMITS.chunk_bytes / max(min(took), 1e-6)
        finally:
            await asking.close()

    async def tell_rotation(
        self, hosts: Sequence[Host], rotate: Callable[[], bytes]
    ) -> list[BaseException | None]:
        """Change our keys and tell these hosts; for each what hinders it, or None.

        They are connected to before that: who does not know the new keys yet lets nobody in that
        shows them.
        """
        keys = self._services.keys
        ways = [Asking(keys, host, Handler(), lambda: None, lambda: None) for host in hosts]
        try:
            opened = await asyncio.gather(*(way.open() for way in ways), return_exceptions=True)
            question = TellRotation(rotate())
            found: list[BaseException | None] = []
            for way, link in zip(ways, opened, strict=True):
                if isinstance(link, BaseException):
                    found.append(link)
                    continue
                try:
                    await way.ask(question)
                    found.append(None)
                except AccelvisorError as error:
                    found.append(error)
            return found
        finally:
            await asyncio.gather(*(way.close() for way in ways))

    # --- other hosts ------------------------------------------------------------------------------

    def _notice(self, link: PeerLink, payload: bytes) -> None:
        """A message. Order is kept: nothing here waits."""
        try:
            message = wire.decode(payload)
        except DataError as error:
            LOG.warning("host %s: %s", link.host, error.message)
            link.cut(error)
            return
        coming = self.destinations.get(getattr(message, "migration", b""))
        if coming is not None and coming.peer.host == link.host:
            self._to_destination(coming, message)
        else:
            self._to_source(link, message)

    def _to_destination(self, move: DestinationMove, message: wire.Message) -> None:
        if isinstance(message, wire.Committed):
            self._spawn(self._committed(move, message))
            return
        if isinstance(message, wire.Aborted):
            mine = move.arbiter == "source"
            move.driver.post(_D.ARBITER_ABORTED if mine else _D.NUDGE)
            return
        if isinstance(message, wire.Offer):
            if move.offer is None:
                move.offer = message
        elif isinstance(message, wire.Round):
            move.round(message)
        elif isinstance(message, wire.Sealed) and move.sealed is None:
            move.sealed = message
        elif isinstance(message, wire.Refuse | wire.Abort) and message.message:
            where = f"source:{getattr(message, 'where', '')}".rstrip(":")
            move.driver.error = ConflictError(
                message.message, code=message.code, where=where, hint=getattr(message, "hint", "")
            )
        event = _TO_DESTINATION.get(type(message))
        if event is not None:
            move.driver.post(event)

    async def _committed(self, move: DestinationMove, message: wire.Committed) -> None:
        if move.arbiter != "source":
            move.driver.post(_D.NUDGE)
            return
        try:
            await move.committed(message)
        except AccelvisorError as error:
            LOG.error("%s: %s", move.driver.name, error.message)

    def _to_source(self, link: PeerLink, message: wire.Message) -> None:
        id_ = getattr(message, "migration", b"")
        move = self.sources.get(id_)
        if isinstance(message, wire.Reserve) and move is None:
            move = self._new_source(link, message)
        if move is None or move.peer.host != link.host:
            LOG.info("host %s tells of a move that is not known here", link.host)
            return
        if isinstance(move.peer, Answering) and move.peer.use(link):
            move.driver.post(_S.LINK_BACK)
        event = _S.RESERVE if isinstance(message, wire.Reserve) else _TO_SOURCE.get(type(message))
        if event is None:
            return
        if isinstance(message, wire.Verified | wire.Commit) and not move.knows(message.parts):
            LOG.warning("%s: host %s names another seal", move.driver.name, link.host)
            return
        if isinstance(message, wire.Refuse | wire.Discarded) and message.message:
            move.driver.error = ConflictError(
                message.message, code=message.code, where=f"destination:{link.host}",
                hint=getattr(message, "hint", ""),
            )  # fmt: skip
        if isinstance(message, wire.Running):
            move.pace.mark("running")
        move.driver.post(event)

    def _new_source(self, link: PeerLink, asked: wire.Reserve) -> SourceMove:
        id_ = asked.migration
        peer = Answering(link, link.host, lambda: self.sources[id_].driver.post(_S.LINK_LOST))
        move = self.sources[id_] = SourceMove(self._services, asked, peer)
        return move

    async def _question(self, link: PeerLink, payload: bytes) -> bytes:
        question = read_question(payload)
        if isinstance(question, AskDomain):
            functions = self._services.functions.registry.all()
            return b"\1" if any(f.domain_uuid == question.domain for f in functions) else b"\0"
        if isinstance(question, TellRotation):
            self._services.keys.rotated(question.statement)
            return b""
        if isinstance(question, AskFit):
            return await fit.answer(self._services, question)
        move = self.sources.get(question.migration)
        if move is None or move.peer.host != link.host:
            raise NotFoundError(
                "that move is not known here", code="migration-unknown", where="migration"
            )
        if isinstance(question, AskTickets):
            return msgspec.msgpack.encode(move.tickets())
        domain = move.asked.domain
        return msgspec.msgpack.encode(
            [await self._context(domain, part.uuid) for part in move.parts]
        )

    async def _context(self, domain: str, uuid: str) -> bytes:
        paths = self._services.functions.world.paths.function(uuid)
        said = documents.described(await orders.order(paths.control_socket, "describe"))
        return await self._services.context(domain, uuid, bytes.fromhex(said.config))

    # --- QEMU -------------------------------------------------------------------------------------

    def coming(self, domain_uuid: str) -> DestinationMove | None:
        """The move that brings a domain here; None when there is none."""
        for move in reversed(self.destinations.values()):
            if move.domain_uuid == domain_uuid and move.driver.state not in DESTINATION_OVER:
                return move
        return None

    def going(self, domain_uuid: str) -> SourceMove | None:
        """The move that takes a domain away; None when there is none."""
        for move in reversed(self.sources.values()):
            if move.asked.domain == domain_uuid and move.driver.state not in SOURCE_OVER:
                return move
        return None

    async def owners(self, domain_uuid: str) -> bool | None:
        """QEMU asks who has state: the last moment to say no. None: no move has to do with it."""
        if self.coming(domain_uuid) is not None:
            return True
        move = self.going(domain_uuid)
        if move is None:
            return None
        return bool(await move.driver.ask(_S.QUIESCE, "owners"))

    async def save(self, domain_uuid: str) -> bytes | None:
        """The token of a move; None when no move takes the domain away."""
        move = self.going(domain_uuid)
        return None if move is None else bytes(await move.driver.ask(_S.SAVE, "save"))

    async def load(self, domain_uuid: str, token: bytes) -> bool:
        """Load what the token names. False when no move brings the domain here.

        Raises:
            AccelvisorError: it must not run here.
        """
        move = self.coming(domain_uuid)
        if move is None:
            return False
        try:
            found = sealing.read_token(token)
            if found.migration != move.id or found.parts != move.digests():
                raise DataError(
                    "the token in QEMU's stream names another seal than the one that was verified",
                    code="token",
                    where="migration",
                )
        except DataError as error:
            move.driver.error = error
            move.driver.post(_D.BAD_LOAD)
            raise
        await move.driver.ask(_D.LOAD, "load")
        return True

    def resumed(self, domain_uuid: str) -> None:
        """The domain's QEMU runs its guest (again)."""
        self._tell(domain_uuid, _S.QEMU_RESUMED, _D.QEMU_RESUMED)

    def gone(self, domain_uuid: str) -> None:
        """The domain's QEMU has ended."""
        self._tell(domain_uuid, _S.QEMU_GONE, _D.QEMU_GONE)
        for move in list(self.destinations.values()):
            if move.domain_uuid == domain_uuid:
                move.left = True
                self._forget(move)

    def _tell(self, domain: str, there: source.Event, here: destination.Event) -> None:
        for move in list(self.sources.values()):
            if move.asked.domain == domain and move.driver.state not in SOURCE_OVER:
                move.driver.post(there)
        for coming in reversed(self.destinations.values()):
            if coming.domain_uuid == domain:
                # Only the last one: what QEMU does now has to do with no earlier attempt.
                coming.driver.post(here)
                break

    # --- a restart --------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Take up the moves that the journal knows of."""
        journal = self._services.journal
        ended = frozenset(
            state.value
            for state in (
                source.State.DONE, source.State.RETURNED,
                destination.State.RUNNING, destination.State.CLOSED,
            )
        )  # fmt: skip
        await asyncio.to_thread(journal.prune, ended)
        now = self._services.clock_ns() / 1e9
        for row in await asyncio.to_thread(journal.rows):
            record = msgspec.msgpack.decode(row.record, type=Record)
            over = row.state in ended
            if row.role == "source":
                self._recover_source(row.id, row.domain, row.state, record)
                if not over:
                    self._spawn(self._restarted_source(row.id, row.domain))
            elif not over:
                self._recover_destination(row.id, row.domain, row.state, record)
                self._spawn(self._restarted_destination(row.id, row.domain))
            elif now < row.changed + LIMITS.migration_scrub_s:
                # What it said last may not have arrived, and the source waits for it.
                self._recover_destination(row.id, row.domain, row.state, record)
                self._spawn(self._reach(row.id))

    def _recover_source(self, id_: bytes, domain: str, state: str, record: Record) -> None:
        host = UUID(hex=record.peer)
        asked = wire.Reserve(
            id_, domain, str(host), bytes(16),
            tuple(wire.Wanted(uuid, "") for uuid in record.functions),
        )  # fmt: skip
        peer = Answering(None, host, lambda: self.sources[id_].driver.post(_S.LINK_LOST))
        move = self.sources[id_] = SourceMove(self._services, asked, peer)
        move.driver.state = source.State(state)
        move.record_parts = _parts(record)
        move.domain_name = record.domain_name
        if move.driver.state not in SOURCE_OVER or move.driver.state is source.State.ABORTED:
            move.held = set(record.functions)
            self._services.functions.held |= move.held

    def _recover_destination(self, id_: bytes, domain: str, state: str, record: Record) -> None:
        wanted = tuple(wire.Wanted(uuid, "") for uuid in record.functions)
        try:
            host = self._services.keys.find(str(UUID(hex=record.peer)))
        except NotFoundError:
            LOG.error("host %s, whose move of %s is open, is trusted no more", record.peer, domain)
            return
        move = DestinationMove(
            self._services, id_, record.domain_name, domain, wanted, self._ways.to(host, id_),
            over=self._over,
        )  # fmt: skip
        self.destinations[id_] = move
        move.driver.state = destination.State(state)
        move.arbiter = record.arbiter
        move.known = _parts(record)
        move.brought = record.brought
        if move.brought and move.driver.state not in _ENDED:
            self._services.functions.held.update(record.functions)

    async def _restarted_source(self, id_: bytes, domain: str) -> None:
        state = await self._domain_state(domain)
        events = {"running": _S.RESTARTED_RUNNING, "paused": _S.RESTARTED_PAUSED}
        self.sources[id_].driver.post(events.get(state, _S.RESTARTED_GONE))

    async def _restarted_destination(self, id_: bytes, domain: str) -> None:
        coming = self.destinations.get(id_)
        if coming is None:
            return
        state = await self._domain_state(domain)
        events = {"running": _D.RESTARTED_RUNNING, "paused": _D.RESTARTED_PAUSED}
        coming.driver.post(events.get(state, _D.RESTARTED_GONE))
        await self._reach(id_)

    async def _reach(self, id_: bytes) -> None:
        """Connect to the source of a move that was taken up, however long that takes."""
        move = self.destinations.get(id_)
        while move is not None:
            try:
                await move.peer.open()
                break
            except UnavailableError:
                await asyncio.sleep(1)
            except AccelvisorError as error:
                LOG.error("%s", error.message)
                return
        if move is not None:
            move.driver.post(_D.LINK_BACK)
            if move.driver.state in _ENDED:
                self._over(move)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _parts(record: Record) -> tuple[wire.Part, ...]:
    digests = record.digests or [bytes(32)] * len(record.functions)
    epochs = record.epochs or [1] * len(record.functions)
    return tuple(
        wire.Part(uuid, epoch, digest)
        for uuid, epoch, digest in zip(record.functions, epochs, digests, strict=True)
    )
