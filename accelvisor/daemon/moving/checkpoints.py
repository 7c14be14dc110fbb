"""Checkpoints at rest: taken while a function computes, kept on disk, looked at, restored.

A checkpoint of a running VM's function is *of the function alone*: the VM's memory goes on. It is
of use where the VM's memory does not matter or is rolled back with it; what belongs together is
saved together by libvirt (:mod:`accelvisor.daemon.moving.saving`).

Reading and writing happen in threads; a verb that has begun is carried to its end even when whoever
asked for it goes away. What a kill leaves is looked after by :meth:`Checkpoints.recover`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import BinaryIO, Literal, cast

from accelvisor.daemon.functions import holding
from accelvisor.daemon.moving import capture, documents, exchange, packing
from accelvisor.daemon.moving.capture import Base, Taken, Taker
from accelvisor.daemon.moving.library import Library
from accelvisor.daemon.moving.numbers import Begun, Mark, Numbers
from accelvisor.daemon.moving.packing import Recipient
from accelvisor.daemon.moving.restoring import Restoring
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.moving.shelf import AUTOMATIC, Head, Shelf, checked_label
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, ConflictError
from accelvisor.frames.chunks import Kind
from accelvisor.frames.container import Readable
from accelvisor.frames.manifest import Captured
from accelvisor.frames.report import Report, offline_keyring, report
from accelvisor.frames.store import Entry, surplus
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
Trigger = Literal["operator", "timer", "drain", "health"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may set.

    Attributes:
        keep: automatic checkpoints of a function that are kept.
        zstd: compress where nothing else is said.
    """

    keep: int = 2
    zstd: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """A checkpoint for people: ``frame`` and ``status`` only where ``report.verified``."""

    name: str
    report: Report
    frame: documents.FunctionFrame | None = None
    status: documents.StatusFrame | None = None


@dataclass(frozen=True, slots=True)
class _Want:
    """What was asked for, with nothing left open."""

    label: str | None
    parent: bytes | None
    follow: bool
    zstd: bool
    whom: Recipient
    trigger: Trigger
    keep: int
    frames: Captured


class Checkpoints:
    """One per daemon.

    Args:
        store: and ``numbers``, this host's.
        domain_state: what a domain does: "running", "paused" or "gone".
        owner: the name of a function's owner; by default its domain's UUID.
    """

    def __init__(
        self,
        services: Services,
        store: Shelf,
        numbers: Numbers,
        domain_state: Callable[[str], Awaitable[str]],
        settings: Settings | None = None,
        owner: Callable[[Function], str] = lambda function: function.domain_uuid or "",
    ) -> None:
        self.library = Library(services, store, numbers, owner)
        self.settings = settings or Settings()
        self.locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.restoring = Restoring(self.library, self.locks, domain_state, self.forget_base)
        self._services = services
        self._store = store
        self._numbers = numbers
        self._bases: dict[str, Base] = {}

    def close(self) -> None:
        """Give back the memory that is followed."""
        for uuid in list(self._bases):
            self.forget_base(uuid)

    # --- taking -----------------------------------------------------------------------------------

    async def create(
        self,
        function: str,
        *,
        label: str | None = None,
        parent: bytes | None = None,
        follow: bool = False,
        zstd: bool | None = None,
        seal_for: str | None = None,
        trigger: Trigger = "operator",
        keep: int | None = None,
        frames: Captured = "both",
    ) -> Entry:
        """Take one and keep it.

        Args:
            function: name or UUID.
            label: its name. One that an operator asks for is kept until an operator deletes it.
            parent: digest of the checkpoint to continue; where that is not possible any more, a
                whole one is made.
            follow: what the function writes from now on is followed, so that the next one can
                continue this (with ``parent`` it is in any case).
            seal_for: encrypt it for this host (name or UUID), which alone may load it.
            keep: automatic ones of this function to keep; None: the setting.

        Raises:
            NotFoundError: ``function-not-found``, ``trust-host-unknown``.
            UsageError: ``checkpoint-name``. ConflictError: ``checkpoint-exists``,
                ``checkpoint-state``, ``function-moving``, ``ledger-...``.
            CapacityError: ``checkpoint-space``, ``checkpoint-memory``.
            UnavailableError: ``function-standing``: it does not go on, and an event says so.
            AccelvisorError: what the function answered. It goes on.
        """
        compress = self.settings.zstd if zstd is None else zstd
        packing.require_zstd(compress)
        if label is not None:
            checked_label(label)
        found = self._services.functions.registry.find(function)
        whom = packing.recipient(self._services, seal_for, sealed=seal_for is not None)
        want = _Want(
            label=label,
            parent=parent,
            # A chain is for one host, and has both frames.
            follow=(follow or parent is not None) and not whom.audience and frames == "both",
            zstd=compress,
            whom=whom,
            trigger=trigger,
            keep=self.settings.keep if keep is None else keep,
            frames=frames,
        )
        return await self._services.functions.carry(self._create(found.uuid, want))

    async def _create(self, uuid: str, want: _Want) -> Entry:
        services = self._services
        async with self.locks[uuid]:
            function = services.functions.registry.find(uuid)
            function.require_whole()
            mark = await self.library.next_mark(uuid)
            name = f"{uuid}/{_name(mark, want)}"
            if name in await asyncio.to_thread(self._store.names, uuid):
                raise ConflictError(
                    f'there is a checkpoint "{name}" already',
                    code="checkpoint-exists",
                    where="checkpoints",
                )
            left = await asyncio.to_thread(self._begin, uuid, mark)
            services.fault("checkpoint:begun")
            try:
                taken = await self._take(function, mark, want)
                content = await self.library.content(function, taken, mark, want.frames)
                entry = await asyncio.to_thread(
                    self.library.keep, name, content, want.whom, want.zstd
                )
            except BaseException as error:
                await self._unfollow(function)
                await self._failed(uuid, left, error)
                raise
            await asyncio.to_thread(self._numbers.end, uuid)
            if taken.base is not None:
                taken.base.digest, taken.base.length = entry.digest, taken.length
            await self._retain(uuid, want.keep)
        words = f"checkpoint {name} ({want.trigger}), stood still {taken.frozen_s * 1e3:.0f} ms"
        await services.record("checkpoint-created", uuid, words)
        return entry

    def _begin(self, uuid: str, mark: Mark) -> Begun | None:
        """From here on a kill leaves something; what is left already."""
        left = next((line for line in self._numbers.begun() if line.function == uuid), None)
        self._numbers.begin(uuid, "create", mark)
        return left

    async def _failed(self, uuid: str, left: Begun | None, error: BaseException) -> None:
        """A function that is left standing, or was found so, is still looked after at a restart."""
        code = error.code if isinstance(error, AccelvisorError) else ""
        if code == capture.STANDING:
            await self._services.record(capture.STANDING, uuid, f"after a checkpoint: {error}")
        elif left is not None and code == "checkpoint-state":
            line = (uuid, left.what, left.mark, left.digest)
            await asyncio.to_thread(self._numbers.begin, *line)
        else:
            await asyncio.to_thread(self._numbers.end, uuid)

    async def _take(self, function: Function, mark: Mark, want: _Want) -> Taken:
        functions = self._services.functions
        async with functions.lock(function.uuid):
            functions.require_free(function)
            # No move may begin meanwhile: it would take the marks that we look for, and lose its
            # own when we let go of ours. Writing the file, which takes long, holds none up.
            with holding(functions.held, function.uuid):
                taker = await self._taker(function, mark, want)
                return await asyncio.to_thread(self._capture, taker, want)

    def _capture(self, taker: Taker, want: _Want) -> Taken:
        """What is followed when this returns is known as a base, so that it ends with that."""
        try:
            if want.frames == "function":
                taken = Taken(documents.function_frame(taker.link.describe()))
            else:
                taken = capture.take_running(taker, self._services.fault)
        except BaseException:
            taker.drop()
            raise
        if want.follow and taken.base is not None:
            self._bases[taker.function.uuid] = taken.base
        else:
            taker.drop()
        return taken

    async def _unfollow(self, function: Function) -> None:
        """No checkpoint came of what was followed. A move that has begun since needs it, and ends
        it itself.
        """
        functions, uuid = self._services.functions, function.uuid
        async with functions.lock(uuid):
            ours = uuid in self._bases and uuid not in functions.held
            self.forget_base(uuid)
            if not ours:
                return
            with holding(functions.held, uuid):
                link = capture.Link(functions.world.paths.function(uuid))
                try:
                    await asyncio.to_thread(link.control, "track", on=False)
                except AccelvisorError as error:
                    LOG.info("function %s: %s", uuid, error.message)

    async def _taker(self, function: Function, mark: Mark, want: _Want) -> Taker:
        """Whatever is taken takes the marks: an old base is continued now or never."""
        base = self._bases.pop(function.uuid, None)
        ours = base is not None
        if base is not None:
            known = await asyncio.to_thread(self._store.list, function.uuid)
            fits = (
                want.follow
                and want.parent == base.digest
                and base.length < LIMITS.checkpoint_chain
                and any(entry.digest == base.digest for entry in known)
            )
            if not fits:
                base.lent.close()
                base = None
        paths = self._services.functions.world.paths.function(function.uuid)
        return Taker(function, paths, mark.epoch, base, ours=ours)

    @property
    def followed(self) -> frozenset[str]:
        """Functions whose next checkpoint can continue the last."""
        return frozenset(self._bases)

    def forget_base(self, uuid: str) -> None:
        """What the function writes is followed for no checkpoint any more."""
        base = self._bases.pop(uuid, None)
        if base is not None:
            base.lent.close()

    async def _retain(self, uuid: str, keep: int) -> None:
        def work() -> list[Entry]:
            going = surplus(self._store.list(uuid), keep)
            for entry in going:
                self._store.delete(entry.name)
            return going

        for entry in await asyncio.to_thread(work):
            words = f"checkpoint {entry.name} made room for newer ones"
            await self._services.record("checkpoint-deleted", uuid, words)

    # --- looking ----------------------------------------------------------------------------------

    async def list(self, function: str | None = None) -> tuple[Entry, ...]:
        """The newest last: of one function (name or UUID), or of all, also of those that are gone.
        """
        uuid = self._services.functions.registry.find(function).uuid if function else None
        return tuple(await asyncio.to_thread(self._store.list, uuid))

    async def digest(self, name: str, function: str) -> bytes:
        """Of a checkpoint of this function (name or UUID). NotFoundError ``checkpoint-not-found``.
        """
        uuid = self._services.functions.registry.find(function).uuid
        return (await asyncio.to_thread(self._entry, name, uuid)).digest

    def _entry(self, name: str, function: str) -> Entry:
        return self._store.entry(self._store.find(name, function))

    async def verify(self, name: str) -> Report:
        """Is it whole, and who signed it? Nothing is loaded, and nothing is used up."""
        return await asyncio.to_thread(self.library.report, self._store.find(name))

    async def show(self, name: str) -> Shown:
        """What it is. The frames are shown only when it is verified."""
        full = self._store.find(name)
        found = await asyncio.to_thread(self.library.report, full)
        frame = status = None
        if Kind.FUNCTION in found.documents:
            frame = documents.decode(found.documents[Kind.FUNCTION], documents.FunctionFrame)
        if Kind.STATUS in found.documents:
            status = documents.decode(found.documents[Kind.STATUS], documents.StatusFrame)
        return Shown(full, found, frame, status)

    async def delete(self, name: str) -> None:
        """Delete one. ConflictError ``checkpoint-needed``: another continues it."""
        full = self._store.find(name)
        uuid = full.partition("/")[0]
        async with self.locks[uuid]:
            await asyncio.to_thread(self._delete, full, uuid)
        await self._services.record("checkpoint-deleted", uuid, f"checkpoint {full} was deleted")

    def _delete(self, name: str, uuid: str) -> None:
        entries = self._store.list(uuid)
        mine = {entry.digest for entry in entries if entry.name == name}
        children = [entry.name for entry in entries if entry.parent in mine]
        if children:
            raise ConflictError(
                f"checkpoint {children[0]} continues it",
                code="checkpoint-needed",
                where="checkpoints",
                hint="delete that one first",
            )
        self._store.delete(name)

    # --- restoring --------------------------------------------------------------------------------

    async def restore(
        self, name: str, function: str | None = None, *, rollback: bool = False
    ) -> Function:
        """Load it into its function, which is made if it is not here.

        Args:
            function: UUID or name; None: whose it is.
            rollback: go back behind what was taken or restored last: that is recorded.

        Raises:
            FrameRefused: it is not what it should be; ``frame-epoch-old``: an older one.
            ConflictError: ``function-in-use``: its VM runs; ``checkpoint-partial``,
                ``function-moving``, ``ledger-...``.
            StateError: ``status-...``; NotFoundError: ``checkpoint-not-found``.
            Whatever is raised, the function has the state that it had.
        """
        full = self._store.find(name)
        work = self.restoring.restore(full, function, rollback)
        return await self._services.functions.carry(work)

    async def recover(self) -> None:
        """At the start: sweep, and let functions go on that a kill left standing."""
        await asyncio.to_thread(self._store.sweep)
        await self.restoring.recover()

    # --- to and from other hosts ------------------------------------------------------------------

    async def export(
        self, name: str, file: BinaryIO, audience: str | None = None, *, sealed: bool = True
    ) -> bytes:
        """Write a copy that stands for itself; its digest.

        Args:
            file: empty, binary, seekable; the caller's.
            audience: host that may load it: verified here, then signed anew for it. None: this one.
            sealed: encrypted for that host.

        Raises:
            FrameRefused; NotFoundError: ``checkpoint-not-found``, ``trust-host-unknown``.
        """
        full = self._store.find(name)
        if audience is None and not self._store.entry(full).parent:
            return await asyncio.to_thread(exchange.copy_out, self.library, full, file)
        whom = packing.recipient(self._services, audience, sealed=sealed and audience is not None)
        state = await self.library.verified(full, full.partition("/")[0], None, older=True)
        try:
            return await asyncio.to_thread(exchange.sign_again, self.library, state, file, whom)
        finally:
            await asyncio.to_thread(state.close)

    async def import_(self, file: BinaryIO, label: str | None = None) -> Entry:
        """Verify a whole checkpoint that was made for this host, and keep it until an operator
        deletes it. Nothing is loaded.

        Args:
            file: binary, seekable, at its beginning; the caller's.

        Raises:
            FrameRefused; ConflictError: ``checkpoint-exists``, ``checkpoint-known``.
            CapacityError: ``checkpoint-space``.
        """
        if label is not None:
            checked_label(label)

        def name(head: Head) -> str:
            return label or f"import-{head.manifest.epoch}.{head.manifest.sequence}"

        work = asyncio.to_thread(exchange.take_in, self.library, file, name)
        entry: Entry = await self._services.functions.carry(work)
        words = f"checkpoint {entry.name} was imported"
        await self._services.record("checkpoint-imported", entry.function, words)
        return entry


def verify_file(file: BinaryIO, trust: bytes, clock_ns: Callable[[], int]) -> Report:
    """Verify on any machine, with a trust document that a person brought. DataError ``trust-...``.
    """
    return report(cast(Readable, file), offline_keyring(trust), clock_ns)


def _name(mark: Mark, want: _Want) -> str:
    number = f"{mark.epoch}.{mark.sequence}"
    if want.trigger == "operator":
        return want.label or number
    label = f"-{want.label}" if want.label else ""
    return f"{AUTOMATIC}{number}{label}"[: LIMITS.name_chars]
