"""Restoring: from a verified checkpoint to a function that computes, and what a kill leaves of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

from accelvisor.daemon import function_link
from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.library import Library
from accelvisor.daemon.moving.numbers import Begun, Mark
from accelvisor.daemon.moving.reloading import Reloading
from accelvisor.daemon.moving.unpacking import Unpacked
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, ConflictError, StateError
from accelvisor.isolation.resources import Profile

LOG = logging.getLogger(__name__)
Locks = defaultdict[str, asyncio.Lock]


class Restoring:
    """One per daemon.

    Args:
        locks: one for each function, shared with whoever takes checkpoints.
        domain_state: what a domain does: "running", "paused" or "gone".
        moved_on: told of a function that has another state now, before it gets it.
    """

    def __init__(
        self,
        library: Library,
        locks: Locks,
        domain_state: Callable[[str], Awaitable[str]],
        moved_on: Callable[[str], None],
    ) -> None:
        self._library = library
        self._services = library.services
        self._locks = locks
        self._domain_state = domain_state
        self._moved_on = moved_on

    async def restore(self, name: str, function: str | None, rollback: bool) -> Function:
        """As :meth:`accelvisor.daemon.moving.checkpoints.Checkpoints.restore`."""
        registry = self._services.functions.registry
        uuid = registry.find(function).uuid if function else name.partition("/")[0]
        async with self._locks[uuid]:
            known = registry.get(uuid)
            if known is not None:
                await self._require_idle(known)
            state = await self._library.verified(name, uuid, known, older=rollback)
            self._services.fault("restore:verified")
            try:
                if known is None:
                    known = await self._make(uuid, state, rollback)
                else:
                    await self._load(known, state, rollback)
            finally:
                await asyncio.to_thread(state.close)
        words = f"checkpoint {name} was restored"
        await self._services.record("checkpoint-restored", uuid, words)
        return known

    async def reload(
        self, function: Function, state: Unpacked, *, go: bool, context: bool = True
    ) -> None:
        """Give a verified state to a function.

        Args:
            go: it computes then. Else it stands still, also when it was refused.
            context: the VM that is connected must have the state's PCI context by now.

        Raises:
            StateError: ``status-...``; what the function answered: it has its old state again.
        """
        services, manifest = self._services, state.manifest
        paths = services.functions.world.paths.function(function.uuid)
        clients = context and await _connected(paths.control_socket)
        reloading = Reloading(function, paths, clients=clients)
        self._moved_on(function.uuid)
        try:
            try:
                await asyncio.to_thread(reloading.load, state, services.fault)
                await services.watermarks.require(
                    function.uuid,
                    manifest.models,
                    nonce=manifest.nonce,
                    manifest=state.verified.digest,
                )
            except AccelvisorError as error:
                await asyncio.to_thread(reloading.back, error)
                if go:
                    await asyncio.to_thread(reloading.resume)
                raise
            if go:
                await asyncio.to_thread(reloading.go)
                services.fault("restore:going")
        finally:
            # Giving back the old memory takes its time: nobody waits for that.
            await asyncio.to_thread(reloading.release)

    async def _make(self, uuid: str, state: Unpacked, rollback: bool) -> Function:
        """Of a function that is not here: whole, or nothing is left of it."""
        services = self._services
        # First: what moved away must not be here a second time, not even for a moment.
        await services.owners.next_epoch(uuid)
        function = None
        try:
            function = await self._bring(uuid, state)
            await self._load(function, state, rollback)
        except Exception:
            await self._take_back(uuid, function)
            raise
        return function

    async def _take_back(self, uuid: str, brought: Function | None) -> None:
        functions = self._services.functions
        try:
            if brought is not None:
                await functions.drop(uuid, "it could not be restored")
            if functions.registry.get(uuid) is None:
                await self._services.owners.give_up(uuid)
        except AccelvisorError as error:
            LOG.warning("function %s, which was not restored: %s", uuid, error.message)

    async def _load(self, function: Function, state: Unpacked, rollback: bool) -> None:
        services, numbers, uuid = self._services, self._library.numbers, function.uuid
        await services.owners.next_epoch(uuid)  # it must be ours
        manifest = state.manifest
        mark = Mark(manifest.epoch, manifest.sequence)
        async with services.functions.lock(uuid):
            await self._require_idle(function)
            services.functions.held.add(uuid)
            try:
                if rollback:
                    await self._library.step_back(uuid, mark, state.verified.digest)
                await asyncio.to_thread(numbers.begin, uuid, "restore", mark, manifest.digest)
                services.fault("restore:begun")
                await self.reload(function, state, go=True)
                await asyncio.to_thread(numbers.reached, uuid, mark)
            finally:
                services.functions.held.discard(uuid)
                await asyncio.to_thread(numbers.end, uuid)

    async def _require_idle(self, function: Function) -> None:
        functions = self._services.functions
        functions.require_free(function)
        if not await _connected(functions.world.paths.function(function.uuid).control_socket):
            return
        domain = function.domain_uuid
        if domain is None or await self._domain_state(domain) == "running":
            raise ConflictError(
                "the function's VM runs: it would find another function under its hands",
                code="function-in-use",
                where=f"function:{function.name}",
                hint="virsh suspend it first, or save and restore the VM with its function",
            )

    async def _bring(self, uuid: str, state: Unpacked) -> Function:
        said = state.manifest.profile
        profile = Profile(
            said.name,
            said.cores,
            state.frame.chips if state.frame is not None else 1,
            said.memory_bytes,
            said.window_bytes,
            said.queues,
            said.ring_entries,
        )
        function = await self._services.functions.bring(uuid, profile)
        self._services.fault("restore:brought")
        return function

    # --- after a kill -----------------------------------------------------------------------------

    async def recover(self) -> None:
        """Let functions go on that a kill left standing in the middle of something."""
        for begun in await asyncio.to_thread(self._library.numbers.begun):
            try:
                await self._recover(begun)
            except AccelvisorError as error:
                LOG.error("function %s: %s", begun.function, error.message)
                await self._services.record("checkpoint-half", begun.function, error.message)

    async def _recover(self, begun: Begun) -> None:
        numbers, functions = self._library.numbers, self._services.functions
        if begun.what == "create":
            marks = await asyncio.to_thread(self._library.marks, begun.function)
            if begun.mark in marks:
                await asyncio.to_thread(numbers.reached, begun.function, begun.mark)
        function = functions.registry.get(begun.function)
        if function is not None and function.uuid not in functions.held:
            await asyncio.to_thread(self._go_on, function, begun)
        await asyncio.to_thread(numbers.end, begun.function)

    def _go_on(self, function: Function, begun: Begun) -> None:
        paths = self._services.functions.world.paths.function(function.uuid)
        reloading = Reloading(function, paths, clients=False)
        said = reloading.link.describe()
        if begun.what == "restore" and said.migration_state == "STOP":
            found = reloading.link.control("digests")
            digests = documents.Digests(*(str(found.get(n)) for n in ("state", "window", "memory")))
            if documents.status_digest(digests) != begun.digest:
                raise StateError(
                    f"function {function.name} was loaded by half when the daemon was killed: it"
                    " stands still",
                    code="checkpoint-half",
                    where=f"function:{function.name}",
                    hint="restore a checkpoint again, or reset the function",
                )
            reloading.go()
            self._library.numbers.reached(function.uuid, begun.mark)
        elif said.fenced or said.migration_state != "RUNNING":
            reloading.resume()
            reloading.link.control("track", on=False)


async def _connected(control_socket: Path) -> bool:
    status = await function_link.call(control_socket, "status")
    return bool(status.get("connected"))
