"""Changing how much of a card a function has, while it runs: the executor of the planner's plans.

Journal, apply, read back, commit. Between the journal and the commit both placements are held, so
whatever a kill leaves behind, no resource is anybody else's too early. The function's process is
the one that decides: it takes the new shape at once or not at all, under the plan's epoch, and a
daemon that comes back asks it which one it has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accelvisor.daemon import files, function_link, working
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import ALIVE, State
from accelvisor.daemon.rows import Change
from accelvisor.daemon.scrubs import Scrubs
from accelvisor.daemon.store import Function
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DeadlineError,
    ProtocolError,
    SystemFailure,
    UnavailableError,
)
from accelvisor.function.shape import Shape
from accelvisor.isolation import planner
from accelvisor.isolation.planner import Plan, Verb, Wanted
from accelvisor.isolation.resources import Placement, Range
from accelvisor.limits import MIB

LOG = logging.getLogger(__name__)

#: The named points after each step, for fault injection in tests.
CHANGE_STEPS = (
    "change:journaled",
    "change:allowed",
    "change:applied",
    "change:read-back",
    "change:written",
    "change:committed",
)
#: A reshape waits for a tile, and scrubs up to 64 GiB.
APPLY_S = 30.0
#: Errors after which it is not known what the function did.
_UNKNOWN = (DeadlineError, UnavailableError, ProtocolError)


@dataclass(frozen=True, slots=True)
class Size:
    """What a resize asks for; None leaves it as it is."""

    cores: int | None = None
    memory_bytes: int | None = None


class Shaping:
    """The verbs. One function is acted on by one verb at a time."""

    def __init__(self, functions: Functions, scrubs: Scrubs) -> None:
        self._functions = functions
        self._registry = functions.registry
        self._scrubs = scrubs
        functions.finish_change = self.finish

    async def resize(self, key: str, size: Size, *, dry_run: bool = False) -> Plan:
        """Give a function more or less of its card.

        Returns:
            the plan, which has been carried out unless ``dry_run``.

        Raises:
            NotFoundError: ``function-not-found``.
            UsageError: ``resize-invalid``.
            CapacityError: ``no-room``.
            ConflictError: ``function-moving``, ``function-failed``, ``function-revoked``,
                ``memory-in-use``, ``change-unfinished``.
            SystemFailure: ``change-not-applied``: the function says that it has another shape.
        """
        return await self._functions.carry(self._resize(key, size, dry_run))

    async def revoke(self, key: str, *, dry_run: bool = False) -> Plan:
        """Take everything from a function; a domain that has it keeps a device that does nothing.
        Errors as of :meth:`resize`.
        """
        return await self._functions.carry(self._revoke(key, dry_run))

    # --- the verbs --------------------------------------------------------------------------------

    async def _resize(self, key: str, size: Size, dry_run: bool) -> Plan:
        uuid = self._registry.find(key).uuid
        async with self._functions.lock(uuid):
            function = await self._ready(uuid)
            wanted = Wanted(
                function.cores if size.cores is None else size.cores,
                function.memory_bytes if size.memory_bytes is None else size.memory_bytes,
                function.policy,
            )
            epoch = await self._epoch(function)
            async with self._functions.placing:
                plan = planner.resize(
                    self._functions.cards, self._held(), uuid, wanted, epoch,
                    self._functions.cpus,
                )  # fmt: skip
                if dry_run or plan.same:
                    return plan
                await self._begin(plan)
            await self._apply(function, plan)
            return plan

    async def _revoke(self, key: str, dry_run: bool) -> Plan:
        uuid = self._registry.find(key).uuid
        async with self._functions.lock(uuid):
            function = await self._ready(uuid)
            epoch = await self._epoch(function)
            plan = planner.revoke(self._registry.placements(), uuid, epoch)
            if not dry_run:
                await self._begin(plan)
                await self._apply(function, plan)
            return plan

    async def _ready(self, uuid: str) -> Function:
        """The row, of a function whose process can be asked and of which no move decides."""
        function = self._registry.find(uuid)
        self._functions.require_free(function)
        if self._registry.change(uuid) is not None:
            function = await self.finish(function)
        if function.state not in ALIVE:
            code, hint = "function-failed", "accelctl function reset restarts it"
            if function.state is not State.FAILED:
                code, hint = "function-busy", "wait until that is done"
            raise _conflict(function, f"it is {function.state}", code, hint)
        if function.revoked:
            hint = "detach it, and create another"
            raise _conflict(function, "it was revoked", "function-revoked", hint)
        if function.partition is not None:
            hint = "static partitions have one size until accelctl card set --functions 0"
            raise _conflict(function, "its card is cut once and for all", "card-enabled", hint)
        return function

    async def _epoch(self, function: Function) -> int:
        return await working.epoch(self._functions.world.paths.function(function.uuid), function)

    def _held(self) -> dict[str, Placement]:
        """By UUID, with what changes of others are about to have: it is not free either."""
        held = self._registry.placements()
        for uuid in list(held):
            change = self._registry.change(uuid)
            if change is not None:
                held[f"{uuid} soon"] = change.after
        return held

    # --- carrying out -----------------------------------------------------------------------------

    async def _begin(self, plan: Plan) -> None:
        change = Change(plan.function, plan.verb, plan.epoch, plan.before, plan.after)
        await self._registry.begin_change(change)
        await self._functions.on_shared()  # whoever had borrowed what it gets gives that back
        self._functions.world.fault("change:journaled")

    async def _apply(self, function: Function, plan: Plan) -> None:
        world = self._functions.world
        paths = world.paths.function(function.uuid)
        try:
            memory = max(plan.after.memory_bytes, function.memory_bytes) + function.window_bytes
            await world.supervisor.allow(function.uuid, memory)
            world.fault("change:allowed")
            wanted = working.shape(plan.after, plan.epoch).to_dict()
            told = await function_link.call(
                paths.control_socket, "reshape", wanted, deadline_s=APPLY_S
            )
        except AccelvisorError as error:
            if isinstance(error, _UNKNOWN):
                # Whatever it did: the journal stays until it can be asked.
                await self._try_finish(function)
            else:
                await self._back(function, error.message)
            raise
        world.fault("change:applied")
        change = self._registry.change(function.uuid)
        if change is not None:
            await self._commit(function, change, int(told.get("scrubbed", 0)))

    async def _commit(self, function: Function, change: Change, scrubbed: int) -> Function:
        """The function has the new shape: read it back, write what its next process is told, then
        the row.
        """
        world = self._functions.world
        paths = world.paths.function(function.uuid)
        wanted = working.shape(change.after, change.epoch)
        await self._read_back(function, wanted)
        world.fault("change:read-back")
        placement = change.after
        made = replace(
            function, placement=placement, cores=placement.core_count,
            memory_bytes=placement.memory_bytes, epoch=change.epoch,
        )  # fmt: skip
        await function_link.call(paths.holder_socket, "shape", wanted.to_dict())
        files.write(paths, self._functions.specification(made))
        world.fault("change:written")
        gone = _without(change.before, change.after)
        if gone.ranges:
            await self._scrubs.resized(made, gone, scrubbed or gone.memory_bytes)
        kind = "function-resized" if change.verb is Verb.RESIZE else "function-revoked"
        words = (
            f"{function.name} has {made.cores} cores and {made.memory_bytes // MIB} MiB of memory,"
            f" epoch {made.epoch}"
        )
        await self._registry.end_change(made, kind, words)
        self._functions.on_reshaped(made.uuid)
        await self._functions.on_shared()
        world.fault("change:committed")
        return made

    async def _read_back(self, function: Function, wanted: Shape) -> None:
        """SystemFailure ``change-not-applied`` with every difference."""
        paths = self._functions.world.paths.function(function.uuid)
        told = await function_link.call(paths.control_socket, "reshape", wanted.to_dict())
        expected: Mapping[str, Any] = {
            **wanted.to_dict(),
            "table_epoch": wanted.epoch,
            "table_bytes": wanted.memory_bytes,
        }
        differ = [
            f"{name} is {told.get(name)!r}, not {value!r}"
            for name, value in expected.items()
            if told.get(name) != value
        ]
        if differ:
            raise SystemFailure(
                f'function "{function.name}" did not take its new shape: {"; ".join(differ)}',
                code="change-not-applied",
                where=f"function:{function.name}",
                hint="accelctl function reset; if it comes back, delete the function",
            )

    # --- after a kill, or no answer ---------------------------------------------------------------

    async def finish(self, function: Function) -> Function:
        """Bring a change that has begun to its end: forward if the function took it, else back. The
        caller holds the lock.

        Raises:
            ConflictError: ``change-unfinished``: its process cannot be asked now.
        """
        change = self._registry.change(function.uuid)
        if change is None:
            return function
        if function.state in (State.FAILED, State.CREATING, State.DELETING):
            return await self._back(function, "its process is gone")
        paths = self._functions.world.paths.function(function.uuid)
        try:
            status = await function_link.call(paths.control_socket, "status")
        except AccelvisorError as error:
            raise _conflict(
                function, f"whether it took its new shape is not known: {error.message}",
                "change-unfinished", "try again when its process answers",
            ) from error  # fmt: skip
        if status.get("shape_epoch") == change.epoch:
            return await self._commit(function, change, 0)
        return await self._back(function, "it had not taken it")

    async def _back(self, function: Function, why: str) -> Function:
        words = f"{function.name} keeps its size: {why}"
        await self._registry.end_change(function, "function-unchanged", words)
        return self._registry.find(function.uuid)

    async def _try_finish(self, function: Function) -> None:
        try:
            await self.finish(function)
        except AccelvisorError as error:
            LOG.warning("change of function %s: %s", function.uuid, error.message)


def _without(before: Placement, after: Placement) -> Placement:
    """The memory of ``before`` that ``after`` has no more."""
    kept = {(item.bank, item.start): item.nbytes for item in after.ranges}
    gone = []
    for item in before.ranges:
        size = kept.get((item.bank, item.start), 0)
        if size < item.nbytes:
            gone.append(Range(item.bank, item.start + size, item.nbytes - size))
    cores = {
        chip: tuple(core for core in cores if core not in after.cores.get(chip, ()))
        for chip, cores in before.cores.items()
    }
    return Placement(before.card, {c: i for c, i in cores.items() if i}, tuple(gone))


def _conflict(function: Function, why: str, code: str, hint: str) -> ConflictError:
    where = f"function:{function.name}"
    return ConflictError(f'function "{function.name}": {why}', code=code, where=where, hint=hint)
