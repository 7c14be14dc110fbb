"""This host's checkpoints as a whole: what each continues, and their verification against what this
host knows of the function (owner, domain, size, epoch, how far it has come).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from accelvisor.daemon.moving import packing
from accelvisor.daemon.moving.capture import Taken
from accelvisor.daemon.moving.numbers import Mark, Numbers
from accelvisor.daemon.moving.packing import Content, Recipient
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.moving.shelf import Shelf
from accelvisor.daemon.moving.unpacking import Link, Opening, Unpacked, unpack
from accelvisor.daemon.store import Function
from accelvisor.errors import FrameRefused
from accelvisor.frames import manifest as manifests
from accelvisor.frames.audit import Event
from accelvisor.frames.container import Readable
from accelvisor.frames.manifest import Captured, Manifest, owner_digest
from accelvisor.frames.report import Report, report
from accelvisor.frames.seal import Opener
from accelvisor.frames.store import Entry
from accelvisor.frames.verify import AT_REST, Expected, Verifier
from accelvisor.limits import KIB, LIMITS


class Library:
    """What taking, restoring, saving and exchanging have in common.

    Args:
        owner: the name of a function's owner.
    """

    def __init__(
        self,
        services: Services,
        store: Shelf,
        numbers: Numbers,
        owner: Callable[[Function], str],
    ) -> None:
        self.services = services
        self.store = store
        self.numbers = numbers
        self._owner = owner

    # --- writing ----------------------------------------------------------------------------------

    async def next_mark(self, uuid: str) -> Mark:
        """The number of a function's next checkpoint. ConflictError ``ledger-...``: not ours."""
        epoch = await self.services.owners.next_epoch(uuid) - 1
        last = await asyncio.to_thread(self.numbers.mark, uuid)
        if last.epoch < epoch:
            return Mark(epoch, 1)
        return Mark(last.epoch, last.sequence + 1)

    async def content(
        self, function: Function, taken: Taken, mark: Mark, frames: Captured
    ) -> Content:
        """What is written of a function's state. Its models are those whose marks it has now: it
        may have gone on since it was copied, but weights lose no mark in a moment.
        """
        return packing.content(
            taken,
            frames,
            domain=function.domain_uuid or "",
            owner=owner_digest(self._owner(function)),
            mark=mark,
            models=await self.services.watermarks.expected(function.uuid),
        )

    def keep(self, name: str, content: Content, whom: Recipient, zstd: bool) -> Entry:
        """Write it, durable and whole, and remember how far its function has come. Blocks."""
        services = self.services
        self.store.require_room(sum(len(view) for _, _, view in content.pieces) + KIB)
        with self.store.put(name) as file:
            packing.write(services, file, content, whom, zstd=zstd)
            services.fault("checkpoint:written")
        services.fault("checkpoint:kept")
        self.numbers.reached(content.function, content.mark)
        return self.store.entry(name)

    def marks(self, uuid: str) -> set[Mark]:
        """Of the checkpoints of a function that this host made and that are there. Blocks."""
        found = [self.store.head(entry.name).manifest for entry in self.store.list(uuid)]
        mine = str(self.services.keys.host)
        return {Mark(m.epoch, m.sequence) for m in found if m.source == mine}

    # --- looking ----------------------------------------------------------------------------------

    def report(self, name: str) -> Report:
        """Is it whole, and who signed it? Blocks."""
        services = self.services
        with self.store.open(name) as file:
            return report(
                cast(Readable, file),
                services.keys.keyring,
                services.clock_ns,
                opener=self._opener,
            )

    def _opener(self, manifest: Manifest) -> Opener | None:
        keys = self.services.keys
        if manifest.seal is None or (manifest.audience or manifest.source) != str(keys.host):
            return None
        identity = keys.identity
        return Opener(manifest, identity.sealing, identity.public_identity.sealing)

    # --- verifying --------------------------------------------------------------------------------

    async def verified(
        self, name: str, uuid: str, function: Function | None, *, older: bool
    ) -> Unpacked:
        """All seven steps, for this checkpoint and for what it continues.

        Args:
            uuid: whose it must be; ``function``: that, where it is here.
            older: one that lies behind the function's mark will do.

        Raises:
            FrameRefused, DataError, StateError, ConflictError: see ``unpacking``; ``ledger-...``.
        """
        services = self.services
        if function is not None:
            epoch = await services.owners.next_epoch(uuid) - 1
        else:
            epoch = await services.owners.ledger.floor(uuid)
        mark = await asyncio.to_thread(self.numbers.mark, uuid)
        floor = Mark(0, 0) if older else max(mark, Mark(epoch, 0))
        expected = self._expected(uuid, function, floor)
        try:
            return await asyncio.to_thread(self._unpack, name, expected)
        except FrameRefused as error:
            words = f"checkpoint {name} was refused: {error.message} ({error.code})"
            await services.record("checkpoint-refused", uuid, words)
            raise

    def verifier(self, expected: Expected) -> Verifier:
        """For a checkpoint at rest."""
        services = self.services
        return Verifier(
            keyring=lambda: services.keys.keyring,
            policy=AT_REST,
            expected=expected,
            clock_ns=services.clock_ns,
            audit=services.audit,
            used=services.nonces,
        )

    async def step_back(self, uuid: str, mark: Mark, digest: bytes) -> None:
        """Record that somebody goes behind the function's mark, if that is so."""
        known = await asyncio.to_thread(self.numbers.mark, uuid)
        if mark >= known:
            return
        services = self.services
        words = (
            f"function {uuid} goes back from {known.epoch}.{known.sequence}"
            f" to {mark.epoch}.{mark.sequence}"
        )
        event = Event(services.clock_ns(), 0, "rollback", digest.hex(), words)
        await asyncio.to_thread(services.audit.record, event)
        await services.record("checkpoint-rollback", uuid, words)

    def _expected(self, uuid: str, function: Function | None, floor: Mark) -> Expected:
        expected = Expected(
            me=str(self.services.keys.host),
            function=uuid,
            epoch=floor.epoch,
            sequence=floor.sequence - 1,
        )
        if function is None:
            return expected
        if function.domain_uuid is not None:
            owner = owner_digest(self._owner(function))
            expected = replace(expected, owner=owner, domain=function.domain_uuid)
        return replace(expected, profile=_profile(function))

    def _unpack(self, name: str, last: Expected) -> Unpacked:
        names, parents = self._chain(name)
        behind = replace(last, epoch=0, sequence=-1, domain=None)
        links = []
        for own, parent in zip(names, parents, strict=True):
            expected = replace(last if own == names[-1] else behind, parent=parent)
            links.append(Link(self._opening(own), self.verifier(expected)))
        return unpack(links, self.services.keys.identity)

    def _opening(self, name: str) -> Opening:
        return lambda: self.store.open(name)

    def _chain(self, name: str) -> tuple[list[str], list[bytes]]:
        """(names, what each continues), the whole one first. What the heads say is held against
        what is verified.
        """
        by_digest = {entry.digest: entry for entry in self.store.list(name.partition("/")[0])}
        entry = self.store.entry(name)
        found = [entry]
        while entry.parent in by_digest and len(found) < 2 * LIMITS.checkpoint_chain:
            entry = by_digest[entry.parent]
            found.append(entry)
        # Where one is missing, the oldest that is there is asked to be whole, and is not.
        found.reverse()
        parents = [b"", *(entry.digest for entry in found[:-1])]
        return [entry.name for entry in found], parents


def _profile(function: Function) -> manifests.Profile:
    return manifests.Profile(
        name=function.profile,
        cores=function.cores,
        memory_bytes=function.memory_bytes,
        window_bytes=function.window_bytes,
        queues=function.queues,
        ring_entries=function.ring_entries,
    )
