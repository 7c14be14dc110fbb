"""Copying the functions of a move: everything once, what changed in rounds, the rest when they
stand still. What was sent is counted in a tree for each function, which the seal signs.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import UUID

from accelvisor.daemon.moving import documents, orders
from accelvisor.daemon.moving.driver import in_thread
from accelvisor.daemon.moving.lent import Lent
from accelvisor.daemon.moving.pace import Pace
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.store import Function
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DeadlineError,
    ProtocolError,
    UnavailableError,
)
from accelvisor.frames.chunks import Kind
from accelvisor.frames.merkle import Merkle
from accelvisor.limits import LIMITS
from accelvisor.migration import convergence
from accelvisor.migration.channel import Channel
from accelvisor.migration.sender import Sender

LOG = logging.getLogger(__name__)
#: Between two rounds that had little to copy (seconds).
_PAUSE_S = 0.1
#: How long the bulk connections may be gone before the transfer is given up.
_LOST_S = 30.0


@dataclass
class Part:
    """One function of the move."""

    function: Function
    frame: documents.FunctionFrame
    lent: Lent
    sender: Sender
    epoch: int
    sections: dict[int, int]
    tree: Merkle = field(default_factory=Merkle)
    status_digest: bytes = b""
    waiting: list[Channel] = field(default_factory=list)
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    envelope: bytes = b""
    digest: bytes = b""
    record: bytes = b""

    @property
    def uuid(self) -> str:
        return self.function.uuid

    @property
    def payload_bytes(self) -> int:
        """Of all chunks whose leaves are counted."""
        return self.sender.payload_bytes

    def close(self) -> None:
        """Give the memory back and end the transfer. Blocks for a moment."""
        self.sender.close()
        self.lent.close()
        for channel in self.waiting:
            channel.close()
        self.waiting.clear()


class Copying:
    """The rounds of one move.

    Args:
        name: for the log.
        everywhere: gives an order to every function of the move.
        done: told of each round that the destination has.
        failed: told why there are no more.
    """

    def __init__(
        self,
        services: Services,
        name: str,
        pace: Pace,
        everywhere: Callable[..., Awaitable[None]],
        done: Callable[[], None],
        failed: Callable[[AccelvisorError], None],
    ) -> None:
        self._services = services
        self._name = name
        self._pace = pace
        self._everywhere = everywhere
        self._done = done
        self._failed = failed
        self.parts: list[Part] = []
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    @property
    def sent_bytes(self) -> int:
        """Of payload, all rounds and functions."""
        return sum(part.sender.progress.sent for part in self.parts)

    @property
    def chunks(self) -> int:
        """That the destination has."""
        return sum(part.tree.size for part in self.parts)

    def tickets(self, host: UUID) -> list[list[bytes]]:
        """For the destination, which opens the bulk connections: for each function its tickets."""
        services = self._services
        loop = asyncio.get_running_loop()
        now = time.monotonic()

        def issue(part: Part) -> bytes:
            def deposit(channel: Channel) -> None:
                loop.call_soon_threadsafe(self._deposit, part, channel)

            return services.tickets.issue(host, deposit, now)

        return [[issue(part) for _ in range(services.settings.streams)] for part in self.parts]

    def round(self, *, first: bool) -> None:
        """A round beside; the freeze may come in the middle of one, and does not wait for it."""
        if not self.busy:
            self._task = asyncio.get_running_loop().create_task(self._round(first))

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        return self._task is not None and not self._task.done()

    def stop(self) -> None:
        """No further round begins; one that is under way ends."""
        self._stop.set()

    def cancel(self) -> None:
        """Nothing more is sent, from now on."""
        self._stop.set()
        for part in self.parts:
            part.sender.cancel(CANCELLED)

    async def last(self) -> None:
        """The functions stand still: what is left, and what can only be taken now."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._pace.begin(self.sent_bytes)
        await asyncio.gather(*(self._last_of(part) for part in self.parts))
        self._pace.end(self.sent_bytes, 0)

    async def close(self) -> None:
        """Give back what was borrowed: the parts hold mappings of the functions' memory."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        parts, self.parts = self.parts, []
        for part in parts:
            await asyncio.to_thread(part.close)

    async def throttle(self, percent: int) -> None:
        """Have the functions served so much of the time."""
        LOG.info("%s: the functions get %d %% of the time", self._name, percent)
        try:
            await self._everywhere("throttle", percent=percent)
        except AccelvisorError as error:  # a process of an older version does not know the word
            LOG.warning("%s: %s", self._name, error.message)

    # --- inside -----------------------------------------------------------------------------------

    def _deposit(self, part: Part, channel: Channel) -> None:
        part.waiting.append(channel)
        if len(part.waiting) == self._services.settings.streams:
            channels, part.waiting = part.waiting, []
            attaching = asyncio.get_running_loop().create_task(self._attach(part, channels))
            attaching.add_done_callback(lambda done: done.exception())

    async def _attach(self, part: Part, channels: list[Channel]) -> None:
        try:
            await asyncio.to_thread(part.sender.attach, channels)
        except ProtocolError as error:
            self._failed(error)  # one that broke comes again; one that talks nonsense does not
            return
        part.attached.set()

    async def _round(self, first: bool) -> None:
        try:
            if first:
                await self._everywhere("migrate", to="PRE_COPY")
                await self._everywhere("track", on=True)
            else:
                await self._pause()
            if self._stop.is_set():
                return
            self._pace.begin(self.sent_bytes)
            await asyncio.gather(*(self._copy_part(part, first) for part in self.parts))
            if not self._stop.is_set():
                await self._judge()
            self._done()
        except AccelvisorError as error:
            LOG.warning("%s: %s", self._name, error.message)
            self._failed(error)

    async def _judge(self) -> None:
        """Do the rounds lead anywhere? When they end is QEMU's business; ours is to slow functions
        down that change their memory faster than it can be sent, and to say when it is in vain.
        """
        dirty = sum(part.lent.dirty_bytes() for part in self.parts)
        verdict = self._pace.end(self.sent_bytes, dirty)
        if verdict is convergence.Verdict.THROTTLE:
            await self.throttle(self._pace.throttle)
        elif verdict is convergence.Verdict.GIVE_UP:
            raise ConflictError(
                "the functions change their memory faster than it can be sent:"
                f" {dirty >> 20} MiB are left after {self._pace.rounds} rounds",
                code="migration-convergence",
                where="migration",
                hint="try again when they compute less, or over a faster network",
            )

    async def _pause(self) -> None:
        """Rounds go on until the VM stops; one that has little to do may wait."""
        quiet = sum(part.lent.dirty_bytes() for part in self.parts) < LIMITS.chunk_bytes
        try:
            async with asyncio.timeout(_PAUSE_S if quiet else _PAUSE_S / 10):
                await self._stop.wait()
        except TimeoutError:
            pass

    async def _copy_part(self, part: Part, first: bool) -> None:
        def fill() -> None:
            for piece in part.lent.everything() if first else part.lent.changes():
                part.sender.send(piece.kind, piece.offset, piece.view)

        await asyncio.to_thread(fill)
        await self._end_round(part)

    async def _end_round(self, part: Part) -> None:
        """Wait until the destination has the round, over new connections when they break."""

        def end() -> None:
            for leaf in part.sender.end_round():
                part.tree.add(leaf)

        lost: AccelvisorError | None = None
        while True:
            try:
                async with asyncio.timeout(_LOST_S):
                    await part.attached.wait()
            except TimeoutError:
                raise lost or UnavailableError(
                    "the destination did not open its connections",
                    code="peer-lost",
                    where="migration",
                ) from None
            try:
                await in_thread(end, lambda: part.sender.cancel(CANCELLED))
                return
            except (UnavailableError, DeadlineError) as error:  # broken, or nothing comes through
                if error is CANCELLED:
                    raise
                lost = error
                part.attached.clear()

    async def _last_of(self, part: Part) -> None:
        paths = self._services.functions.world.paths
        said = documents.described(await orders.control(paths, part.uuid, "describe"))
        if not said.tracking:
            # The digests are sums of what was sent: they would not tell what is missing.
            raise ConflictError(
                f"what function {part.function.name} wrote while it was copied is not known",
                code="migration-untracked",
                where="migration",
                hint="migrate the VM again",
            )
        extents = await orders.control(paths, part.uuid, "extents", expected=1)
        try:
            size = os.fstat(extents.fds[0]).st_size
            mapped = mmap.mmap(extents.fds[0], size, prot=mmap.PROT_READ)
        finally:
            extents.close()

        def fill() -> None:
            for piece in part.lent.changes():
                part.sender.send(piece.kind, piece.offset, piece.view)
            part.frame = documents.function_frame(said)
            status = documents.status_frame(said, part.lent.digests())
            part.status_digest = documents.status_digest(status.digests)
            last: dict[Kind, bytes | mmap.mmap] = {
                Kind.FUNCTION: documents.encode(part.frame),
                Kind.STATUS: documents.encode(status),
                Kind.STATE: part.lent.section(),
                Kind.EXTENTS: mapped,
            }
            for kind, data in last.items():
                part.sections[kind] = len(data)
                part.sender.send(kind, 0, memoryview(data))

        await asyncio.to_thread(fill)
        await self._end_round(part)


CANCELLED = UnavailableError("the move was given up", code="migration-aborted", where="migration")
