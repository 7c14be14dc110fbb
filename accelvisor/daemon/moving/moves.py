"""All moves of this host: who asks for one, what belongs to which, and what a restart finds.

Three kinds of callers: other hosts (messages and questions over the link), QEMU (its bus and its
private monitor) and the hook. Each is led to the one move that it means, which decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from accelvisor.daemon.moving import documents, fit, orders, sealing
from accelvisor.daemon.moving.destination import DestinationMove
from accelvisor.daemon.moving.fit import AskFit
from accelvisor.daemon.moving.journal import KEPT
from accelvisor.daemon.moving.neighbours import Neighbours
from accelvisor.daemon.moving.peers import (
    Answering,
    AskDomain,
    AskTickets,
    TellRotation,
    Ways,
    read_question,
    send,
)
from accelvisor.daemon.moving.places import AskPlace, AskPlaces, Giving
from accelvisor.daemon.moving.record import (
    DESTINATION_ENDED,
    DESTINATION_OVER,
    ENDED,
    SOURCE_OVER,
)
from accelvisor.daemon.moving.recovery import Recovery
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.moving.source import SourceMove
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DataError,
    NotFoundError,
    UnavailableError,
)
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
#: Messages that are kept for a move until it is known where its VM is.
_HEARD = 64
#: States in which a VM's QEMU has loaded all it will: if it asks, it saves.
_ARRIVED = frozenset(
    (
        destination.State.LOADED, destination.State.COMMITTING, destination.State.COMMITTED,
        destination.State.FENCED,
    )
)  # fmt: skip


class Moves:
    """One per daemon.

    Args:
        domain_state: what a domain does now: "running", "paused" or "gone".
    """

    def __init__(
        self, services: Services, domain_state: Callable[[str], Awaitable[str]]
    ) -> None:
        self._services = services
        self.sources: dict[bytes, SourceMove] = {}
        self.destinations: dict[bytes, DestinationMove] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.handler = Handler(request=self._question, notice=self._notice)
        self.ways = Ways(services.keys, self.handler, self._link)
        self.neighbours = Neighbours(services.keys)
        #: Gives static functions to what other hosts bring; from when that is there.
        self.giving: Giving | None = None
        self._recovery = Recovery(self, services, domain_state)

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
        await self.ways.close()

    # --- a VM comes -------------------------------------------------------------------------------

    async def begin(
        self,
        domain: str,
        domain_uuid: str,
        wanted: Sequence[wire.Wanted],
        *,
        source_host: str = "",
        owner: str = "",
        ram_bytes: int | None = None,
    ) -> DestinationMove:
        """Reserve everything for a domain that is about to come. Carried to its end or undone.

        Args:
            source_host: UUID of the host that has it; empty to ask all that are trusted.
            ram_bytes: of the VM, by its definition; None where that does not say.

        Raises:
            NotFoundError: ``migration-no-source``: no trusted host has the domain's functions.
            AccelvisorError: why it is refused, there or here.
        """
        for earlier in list(self.destinations.values()):
            if earlier.domain_uuid == domain_uuid:
                await self._give_up(earlier)
        await self._left(domain_uuid)
        host = await self.neighbours.source_of(domain_uuid, source_host)
        id_ = self._services.entropy(16)
        asking = self.ways.to(host, id_)
        move = DestinationMove(
            self._services, id_, domain, domain_uuid, tuple(wanted), asking, owner, self.over,
            ram_bytes,
        )  # fmt: skip
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
                self.over(move)
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
        if move.driver.state in DESTINATION_ENDED:
            return
        with suppress(ConflictError):
            await move.driver.tell(_D.CANCEL)
        try:
            async with asyncio.timeout(LIMITS.migration_reserve_s):
                await move.driver.reach(*DESTINATION_ENDED)
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

    def over(self, move: DestinationMove) -> None:
        def told() -> None:
            move.told = True
            self._forget(move)

        self.ways.retire(move.peer.host, move.id, told)

    def _forget(self, move: DestinationMove) -> None:
        """What has ended, as its source knows, and which no QEMU has anything to do with."""
        ended = move.driver.state is destination.State.RUNNING or (
            move.driver.state is destination.State.CLOSED and move.left
        )
        if move.told and ended and self.destinations.pop(move.id, None) is not None:
            self.spawn(move.close())

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
            self.spawn(self._committed(move, message))
            return
        if isinstance(message, wire.Aborted):
            mine = move.arbiter == "source"
            move.driver.post(_D.ARBITER_ABORTED if mine else _D.NUDGE)
            return
        if isinstance(message, wire.Offer):
            if move.offer is None:
                move.offer = message
        elif isinstance(message, wire.Round):
            move.receiving.round(message)
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
            if move is None:
                return
        if move is None or move.peer.host != link.host:
            LOG.info("host %s tells of a move that is not known here", link.host)
            return
        if move.heard is not None:
            if len(move.heard) < _HEARD:  # one that talks without end is not listened to
                move.heard.append(lambda: self._to_source(link, message))
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

    def listen(self, move: SourceMove) -> None:
        """It is known what a restart found: what was heard meanwhile is answered now."""
        heard, move.heard = move.heard or (), None
        for one in heard:
            one()

    def _new_source(self, link: PeerLink, asked: wire.Reserve) -> SourceMove | None:
        """None when the other host has too many open: it is told so."""
        id_ = asked.migration
        of_it = (move for move in self.sources.values() if move.peer.host == link.host)
        if sum(move.driver.state not in SOURCE_OVER for move in of_it) >= LIMITS.migration_open:
            many = f"{LIMITS.migration_open} of its moves have not ended"
            send(link, wire.Refuse(id_, "migration-busy", many, "migration", "try again later"))
            return None
        self._forget_sources()
        peer = Answering(link, link.host, lambda: self.source_lost(id_))
        move = self.sources[id_] = SourceMove(self._services, asked, peer)
        return move

    def source_lost(self, id_: bytes) -> None:
        """A source's link broke."""
        move = self.sources.get(id_)
        if move is not None:
            move.driver.post(_S.LINK_LOST)

    def _forget_sources(self) -> None:
        """Of the moves that have ended only the newest are kept: a host may ask for any number."""
        ended = [id_ for id_, move in self.sources.items() if move.driver.state in ENDED]
        for id_ in ended[: max(0, len(ended) - KEPT)]:
            self.spawn(self._end_source(self.sources.pop(id_)))

    async def _end_source(self, move: SourceMove) -> None:
        await move.driver.close()
        await move.let_go()
        await asyncio.to_thread(self._services.journal.prune, ENDED)

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
        if isinstance(question, AskPlaces | AskPlace):
            if self.giving is None:
                raise UnavailableError("it is just starting", code="peer-request", where="peer")
            return await self.giving.answer(link.host, question)
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
        paths = self._services.functions.world.paths
        said = documents.described(await orders.control(paths, uuid, "describe"))
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

    def domains(self) -> set[str]:
        """UUIDs of all that come or go."""
        here, away = self.destinations.values(), self.sources.values()
        coming = {m.domain_uuid for m in here if m.driver.state not in DESTINATION_OVER}
        going = {m.asked.domain for m in away if m.driver.state not in SOURCE_OVER}
        return coming | going

    async def owners(self, domain_uuid: str) -> bool | None:
        """QEMU asks who has state: the last moment to say no. None: no move has to do with it.

        Raises:
            ConflictError: ``migration-busy``: it has arrived, and is saved before that has ended.
        """
        coming = self.coming(domain_uuid)
        if coming is not None:
            if coming.driver.state in _ARRIVED:
                raise ConflictError(
                    "the move that brought the domain here has not ended",
                    code="migration-busy",
                    where=f"domain:{domain_uuid}",
                    hint="it ends when the VM runs: accelctl migration list",
                )
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
                if move.heard is not None:
                    move.heard.append(partial(move.driver.post, there))
                else:
                    move.driver.post(there)
        for coming in reversed(self.destinations.values()):
            if coming.domain_uuid == domain:
                # Only the last one: what QEMU does now has to do with no earlier attempt. Nor with
                # that one, when it was given up and its own QEMU is gone.
                if not (coming.left and coming.driver.state is destination.State.CLOSED):
                    coming.driver.post(here)
                break

    async def recover(self) -> None:
        """Take up the moves that the journal knows of."""
        await self._recovery.recover()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside; it ends with the daemon."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

