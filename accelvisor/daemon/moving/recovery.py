"""What a restart finds in the journal: moves that were under way, and where their VMs are now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from accelvisor.daemon.moving.destination import DestinationMove
from accelvisor.daemon.moving.peers import Answering
from accelvisor.daemon.moving.record import DESTINATION_ENDED, ENDED, SOURCE_OVER, Record
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.moving.source import SourceMove
from accelvisor.errors import AccelvisorError, NotFoundError, UnavailableError
from accelvisor.limits import LIMITS
from accelvisor.migration import destination, source
from accelvisor.migration import messages as wire

if TYPE_CHECKING:
    from accelvisor.daemon.moving.moves import Moves

LOG = logging.getLogger(__name__)
_S, _D = source.Event, destination.Event


class Recovery:
    """Takes the journal's moves up again.

    Args:
        domain_state: what a domain does now: "running", "paused" or "gone".
    """

    def __init__(
        self, moves: Moves, services: Services, domain_state: Callable[[str], Awaitable[str]]
    ) -> None:
        self._moves = moves
        self._services = services
        self._domain_state = domain_state

    async def recover(self) -> None:
        """Take up the moves that the journal knows of."""
        journal = self._services.journal
        await asyncio.to_thread(journal.prune, ENDED)
        now = self._services.clock_ns() / 1e9
        for row in await asyncio.to_thread(journal.rows):
            record = msgspec.msgpack.decode(row.record, type=Record)
            over = row.state in ENDED
            if row.role == "source":
                self._recover_source(row.id, row.domain, row.state, record)
                if not over:
                    self._moves.sources[row.id].heard = []
                    self._moves.spawn(self._restarted_source(row.id, row.domain))
            elif not over:
                self._recover_destination(row.id, row.domain, row.state, record)
                self._moves.spawn(self._restarted_destination(row.id, row.domain))
            elif now < row.changed + LIMITS.migration_scrub_s:
                # What it said last may not have arrived, and the source waits for it.
                self._recover_destination(row.id, row.domain, row.state, record)
                self._moves.spawn(self._reach(row.id))

    def _recover_source(self, id_: bytes, domain: str, state: str, record: Record) -> None:
        host = UUID(hex=record.peer)
        asked = wire.Reserve(
            id_, domain, str(host), bytes(16),
            tuple(wire.Wanted(uuid, "") for uuid in record.functions),
        )  # fmt: skip
        peer = Answering(None, host, lambda: self._moves.source_lost(id_))
        move = self._moves.sources[id_] = SourceMove(self._services, asked, peer)
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
            self._services, id_, record.domain_name, domain, wanted, self._moves.ways.to(host, id_),
            over=self._moves.over,
        )  # fmt: skip
        self._moves.destinations[id_] = move
        move.driver.state = destination.State(state)
        move.arbiter = record.arbiter
        move.known = _parts(record)
        move.brought = record.brought
        # Whatever QEMU there is by now, it is none of one that was given up before the restart.
        move.left = move.driver.state is destination.State.CLOSED
        if move.brought and move.driver.state not in DESTINATION_ENDED:
            self._services.functions.held.update(record.functions)

    async def _restarted_source(self, id_: bytes, domain: str) -> None:
        state = await self._domain_state(domain)
        events = {"running": _S.RESTARTED_RUNNING, "paused": _S.RESTARTED_PAUSED}
        move = self._moves.sources[id_]
        move.driver.post(events.get(state, _S.RESTARTED_GONE))
        self._moves.listen(move)

    async def _restarted_destination(self, id_: bytes, domain: str) -> None:
        coming = self._moves.destinations.get(id_)
        if coming is None:
            return
        state = await self._domain_state(domain)
        events = {"running": _D.RESTARTED_RUNNING, "paused": _D.RESTARTED_PAUSED}
        coming.driver.post(events.get(state, _D.RESTARTED_GONE))
        await self._reach(id_)

    async def _reach(self, id_: bytes) -> None:
        """Connect to the source of a move that was taken up, however long that takes."""
        move = self._moves.destinations.get(id_)
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
            if move.driver.state in DESTINATION_ENDED:
                self._moves.over(move)


def _parts(record: Record) -> tuple[wire.Part, ...]:
    digests = record.digests or [bytes(32)] * len(record.functions)
    epochs = record.epochs or [1] * len(record.functions)
    return tuple(
        wire.Part(uuid, epoch, digest)
        for uuid, epoch, digest in zip(record.functions, epochs, digests, strict=True)
    )
