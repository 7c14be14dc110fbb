"""Receiving the functions of a move: rounds of chunks, over as many connections as it takes.

Every complete round is held against the offer and counted in a tree for each function, which the
seal must name. Nothing that comes is looked into here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.driver import in_thread
from accelvisor.daemon.moving.record import Peer
from accelvisor.daemon.moving.staged import Staged
from accelvisor.errors import (
    AccelvisorError,
    DeadlineError,
    ProtocolError,
    SystemFailure,
    UnavailableError,
)
from accelvisor.frames import receive, verify
from accelvisor.frames.chunks import Header
from accelvisor.frames.manifest import Offer
from accelvisor.frames.verify import Verified, Verifier
from accelvisor.limits import LIMITS
from accelvisor.migration import messages as wire
from accelvisor.migration.channel import Channel
from accelvisor.migration.receiver import Received, Receiver
from accelvisor.migration.tickets import TICKET_BYTES

LOG = logging.getLogger(__name__)
#: A connection that broke, or nothing comes through: it may be better in a moment.
_GONE = (UnavailableError, DeadlineError)
T = TypeVar("T")
#: How long one look for a complete round lasts; then it is looked whether anybody still wants it.
_LOOK_S = 1.0
#: Between two tries to open the bulk connections again (seconds).
_AGAIN_S = 0.2
_OVER = UnavailableError("the transfer is over", code="peer-lost", where="migration")
#: A payload of any length for whoever only wants to know its length.
_ANY = memoryview(bytes(LIMITS.chunk_bytes))


class Source(Peer, Protocol):
    """The source, as this host reaches it."""

    async def tickets(self, migration: bytes) -> list[list[bytes]]:
        """For each function, in the offer's order."""
        ...

    async def channel(self, ticket: bytes) -> Channel:
        """A bulk connection."""
        ...

    async def open(self) -> object:
        """Be connected. Raises UnavailableError."""
        ...

    async def context(self, migration: bytes) -> list[bytes]:
        """For each function its PCI configuration space, as it is now."""
        ...


class InPlace:
    """Staging for a verifier whose bytes lie in their place already."""

    def write(self, header: Header, payload: object) -> None:
        """The bulk receiver has written it."""


@dataclass
class Part:
    """One function that comes."""

    offered: wire.Offered
    offer: verify.Opened[Offer]
    verifier: Verifier
    receiver: receive.Receiver
    staged: Staged
    bulk: Receiver
    received: int = 0
    verified: Verified | None = None
    frame: documents.FunctionFrame | None = None
    channels: list[Channel] = field(default_factory=list)

    @property
    def uuid(self) -> str:
        return self.offered.function

    def count(self, round_: Received) -> None:
        """Hold a complete round against the offer. Raises FrameRefused."""
        for header, stored, leaf in zip(round_.headers, round_.stored, round_.leaves, strict=True):
            self.receiver.feed(header, _ANY[:stored], leaf)
        self.received += len(round_.leaves)

    def close(self) -> None:
        """Forget what came. Blocks for a moment."""
        self.bulk.release()
        self.staged.close()


def _require_tickets(tickets: Sequence[Sequence[bytes]], functions: int) -> None:
    """Each ticket becomes a connection, a buffer and a thread, so the source may not send any
    number of them. Raises ProtocolError ``peer-answer``.
    """
    if len(tickets) != functions:
        raise _bad_tickets(f"tickets for {len(tickets)} functions, {functions} come")
    for some in tickets:
        if not 1 <= len(some) <= LIMITS.bulk_streams:
            raise _bad_tickets(f"{len(some)} tickets for one function")
        if any(len(ticket) != TICKET_BYTES for ticket in some):
            raise _bad_tickets("what is no ticket")


def _bad_tickets(what: str) -> ProtocolError:
    return ProtocolError(f"the source sent {what}", code="peer-answer", where="migration")


class Receiving:
    """The rounds of one move.

    Args:
        name: for the log.
        id: of the move.
        failed: told why no more rounds can come.
    """

    def __init__(
        self,
        name: str,
        id: bytes,
        peer: Source,
        failed: Callable[[AccelvisorError], None],
    ) -> None:
        self._name = name
        self._id = id
        self._peer = peer
        self._failed = failed
        self.parts: list[Part] = []
        #: The last round that the source told of.
        self.rounds = 0
        self.first_pass = asyncio.Event()
        self._no_more = asyncio.Event()
        self._bulk: asyncio.Task[None] | None = None

    @property
    def received(self) -> int:
        """Chunks of complete rounds, of all functions."""
        return sum(part.received for part in self.parts)

    def begin(self) -> None:
        """Open the bulk connections and receive; called again it does nothing."""
        if self._bulk is None:
            self._bulk = asyncio.get_running_loop().create_task(self._receive())

    def no_more(self) -> None:
        """The source seals, or the move is given up: what is done beside the rounds ends."""
        self._no_more.set()

    async def counted(self, part: Part, chunks: int) -> None:
        """Until so many chunks of one function are counted, or no more come.

        A round may be acknowledged a moment before it is counted.
        """
        while part.received < chunks and self._bulk is not None and not self._bulk.done():
            await asyncio.sleep(0.001)

    async def end(self) -> None:
        """No more connections."""
        if self._bulk is not None and self._bulk is not asyncio.current_task():
            self._bulk.cancel()
            await asyncio.gather(self._bulk, return_exceptions=True)

    async def seal(self, chunks: Sequence[int]) -> None:
        """No more bytes: of each function so many chunks came, and nothing beside them.

        Raises:
            DataError: as :meth:`accelvisor.migration.receiver.Receiver.seal`.
        """
        await self.end()
        await asyncio.gather(
            *(
                asyncio.to_thread(part.bulk.seal, count)
                for part, count in zip(self.parts, chunks, strict=True)
            )
        )

    async def close(self) -> None:
        """Forget what came; what is mapped of the functions' memory is given back."""
        await self.end()
        parts, self.parts = self.parts, []
        for part in parts:
            await asyncio.to_thread(part.close)

    async def _receive(self) -> None:
        """All rounds of all functions, over as many connections as it takes."""
        try:
            try:
                await self._connect()
            except _GONE as error:
                await self._reconnect(error)
            await self._all_rounds()
        except AccelvisorError as error:
            self._failed(error)
        except Exception as error:
            LOG.exception("%s", self._name)
            self._failed(SystemFailure(f"{type(error).__name__}: {error}", where="migration"))

    async def _all_rounds(self) -> None:
        rounds = [asyncio.ensure_future(self._rounds_of(part)) for part in self.parts]
        try:
            await asyncio.gather(*rounds)
        finally:
            for each in rounds:  # one that failed ends the others
                each.cancel()

    async def _connect(self) -> None:
        tickets = await self._peer.tickets(self._id)
        _require_tickets(tickets, len(self.parts))
        for part, some in zip(self.parts, tickets, strict=True):
            await asyncio.to_thread(part.bulk.attach, await self._channels(some))

    async def _channels(self, tickets: Sequence[bytes]) -> list[Channel]:
        opened: list[Channel] = []
        try:
            for ticket in tickets:
                opened.append(await self._peer.channel(ticket))
        except BaseException:
            for channel in opened:
                channel.close()
            raise
        return opened

    async def _rounds_of(self, part: Part) -> None:
        while True:
            try:
                received: Received = await in_thread(
                    lambda: part.bulk.wait_round(_LOOK_S), lambda: part.bulk.cancel(_OVER)
                )
            except DeadlineError as error:
                if error.code == "peer-deadline":
                    continue
                await self._reconnect(error)
            except UnavailableError as error:
                await self._reconnect(error)
            else:
                await asyncio.to_thread(part.count, received)

    async def _reconnect(self, why: AccelvisorError) -> None:
        """New bulk connections; the machine's deadline says for how long this is tried."""
        LOG.info("%s: %s", self._name, why.message)
        while True:
            await asyncio.sleep(_AGAIN_S)
            try:
                await self._connect()
                return
            except _GONE as error:
                LOG.info("%s: %s", self._name, error.message)

    def round(self, message: wire.Round) -> None:
        """The source tells that a round is over."""
        self.rounds = message.number
        self.first_pass.set()

    async def still_receiving(self, after_s: float) -> bool:
        """Whether rounds are still coming in, ``after_s`` seconds from now."""
        try:
            async with asyncio.timeout(after_s):
                await self._no_more.wait()
        except TimeoutError:
            pass
        return not self._no_more.is_set()

    async def while_receiving(self, work: asyncio.Task[T]) -> T | None:
        """What ``work`` gives; None when the rounds end first, with which it is given up."""
        over = asyncio.ensure_future(self._no_more.wait())
        try:
            await asyncio.wait((work, over), return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            for each in (work, over):
                each.cancel()
            await asyncio.gather(work, over, return_exceptions=True)
