"""Creating, deleting and resetting functions: the executor of what planner and life table decide.

Each verb does its steps in an order that survives a kill between any two of them: the journal row
first, the machine next, the row last (docs/contracts.md). A verb that has begun is carried to its
end even when the client that asked for it goes away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import uuid as uuid_module
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from accelvisor.daemon import files, function_link, specifying, working
from accelvisor.daemon.card_config import card_of, profile_of
from accelvisor.daemon.config import NAME, Config, host_cpus
from accelvisor.daemon.lifecycle import Event, State, move
from accelvisor.daemon.names import is_uuid
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.registry import Registry
from accelvisor.daemon.spares import Spares
from accelvisor.daemon.store import Function
from accelvisor.daemon.supervisor import Supervisor
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    NotFoundError,
    UsageError,
)
from accelvisor.isolation import placing, planner
from accelvisor.isolation.planner import Plan
from accelvisor.isolation.resources import Card, Placement, Profile
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
T = TypeVar("T")
#: Where a static function goes: the place, and the number of its partition.
Part: TypeAlias = tuple[Placement, int]

#: The named points after each step, for fault injection in tests.
CREATE_STEPS = (
    "create:planned",
    "create:journaled",
    "create:written",
    "create:started",
    "create:ready",
    "create:committed",
)
DELETE_STEPS = ("delete:journaled", "delete:stopped", "delete:removed", "delete:committed")


@dataclass(frozen=True, slots=True)
class World:
    """What the functions need of the world outside.

    Attributes:
        clock: seconds since 1970.
        new_uuid: random UUIDs in their usual form.
        ready_s: how long a new process may take until it is ready (seconds).
        poll_s: how often a process is asked whether it gave up (seconds).
        fault: called with the name of each step that was just done.
    """

    paths: Paths
    supervisor: Supervisor
    clock: Callable[[], float]
    new_uuid: Callable[[], str] = lambda: str(uuid_module.uuid4())
    ready_s: float = LIMITS.function_ready_s
    poll_s: float = LIMITS.function_poll_s
    fault: Callable[[str], None] = lambda step: None


class Functions:
    """The verbs. One function is acted on by one verb at a time."""

    def __init__(self, registry: Registry, world: World, config: Config) -> None:
        self.registry = registry
        self.world = world
        #: Cards with what the operator said of their chips.
        self.as_set: Callable[[Sequence[Card]], Sequence[Card]] = lambda cards: cards
        self.configure(config)
        #: Held while resources are looked for, until what was found is in the store.
        self.placing = asyncio.Lock()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._verbs: set[asyncio.Task[Any]] = set()
        #: UUIDs of functions that take part in a move: only the move decides about them.
        self.held: set[str] = set()
        #: What a new function may be made of; none are kept until this is started.
        self.spares = Spares(world.paths, world.supervisor, world.new_uuid, config.daemon.spares)
        #: Called with the UUID of each function that is no more on this host.
        self.on_removed: Callable[[str], Awaitable[None]] = _nothing
        #: Called when a function has got another domain, or none, before anybody uses it there.
        self.on_owner: Callable[[], Awaitable[None]] = _nothing
        #: Asked before a domain is let into a function; raises when another host has it.
        self.may_run: Callable[[Function], Awaitable[None]] = _nothing
        #: Called with each function that has just got a new process, empty as it is.
        self.on_fresh: Callable[[Function], Awaitable[None]] = _nothing
        #: Called with each function whose process is gone for good.
        self.on_ended: Callable[[Function], Awaitable[None]] = _nothing
        #: Called when what functions share, host CPUs and ports, has to be divided anew.
        self.on_shared: Callable[[], Awaitable[None]] = _nothing
        #: Called with the UUID of a function that has another shape.
        self.on_reshaped: Callable[[str], None] = lambda uuid: None
        #: Brings a change of shape that has begun to its end.
        self.finish_change: Callable[[Function], Awaitable[Function]] = _same
        #: Scrubs a function, or finds that it is clean, before a domain gets it; the row then.
        self.scrub: Callable[[Function, str], Awaitable[Function]] = _same
        #: Scrubs one that has no domain any more.
        self.released: Callable[[Function], Awaitable[Function]] = _same
        #: Names of cards that are cut once: no function is placed on these.
        self.static: Callable[[], Collection[str]] = frozenset
        #: Called with the UUID of each function whose process was found ready.
        self.on_ready: Callable[[str], None] = lambda uuid: None

    def configure(self, config: Config) -> None:
        """Take cards and profiles from a (re)loaded configuration; functions that exist stay."""
        cards = [card_of(*item) for item in config.cards.items()]
        self.cards: Sequence[Card] = self.as_set(cards)
        self.profiles: Sequence[Profile] = [profile_of(*item) for item in config.profiles.items()]
        #: Host CPUs that functions may use.
        self.cpus: Sequence[int] = host_cpus(config.host.cpus) or sorted(os.sched_getaffinity(0))
        self.socket_group = config.daemon.socket_group

    async def place_all(self) -> None:
        """Give functions that an older accelvisord made their place in memory, queues and vectors,
        of which it knew only the amount. Once, before anything else.
        """
        for function in self.registry.all():
            if function.placement.ranges or function.revoked:
                continue
            card = next((item for item in self.cards if item.name == function.card), None)
            if card is None:
                continue  # its card is no longer configured; it goes on as it is
            left = placing.Free(card, self.registry.held())
            placement = replace(
                function.placement,
                ranges=tuple(left.ranges(function.memory_bytes)),
                queues=tuple(left.queues[: function.queues]),
                vector=left.vectors[0] if left.vectors else -1,
            )
            placed = replace(function, placement=placement)
            await self.registry.commit(placed, "function-placed", f"{function.name} has its place")

    def lock(self, uuid: str) -> asyncio.Lock:
        """Held while a verb acts on the function."""
        return self._locks[uuid]

    async def create(self, profile: str, name: str | None, card: str | None) -> Function:
        """Place, journal, start, wait until ready, commit.

        Raises:
            NotFoundError: ``profile-not-found``, ``card-not-found``.
            UsageError: ``name-invalid``.
            CapacityError: ``no-room``.
            ConflictError: ``function-exists``, ``card-enabled``.
            DeadlineError, HostError: the process did not come up; everything was undone.
        """
        return await self.carry(self._create(self._profile(profile), name, card))

    async def fill(self, profile: Profile, placement: Placement, partition: int) -> Function:
        """A function in a static partition, which nobody else has; made as by :meth:`create`."""
        made = self._create(profile, None, placement.card, (placement, partition))
        return await self.carry(made)

    async def plan(self, profile: str, card: str | None) -> Plan:
        """What :meth:`create` would do now; errors as there."""
        async with self.placing:
            found = self._plan("", "", self._profile(profile), card, None)
        return planner.create(found.placement)

    async def bring(self, uuid: str, profile: Profile, name: str = "") -> Function:
        """A function that comes from another host: with its UUID, its name if nobody has that here,
        and of its size, whatever the profiles here say. Made as by :meth:`create`.

        Raises:
            CapacityError: ``no-room``.
            ConflictError: ``function-exists``: it is here already.
            DeadlineError, HostError: the process did not come up; everything was undone.
        """
        if self.registry.get(uuid) is not None:
            raise ConflictError(
                f"function {uuid} is on this host already",
                code="function-exists",
                where="functions",
                hint="accelctl function show says whose it is",
            )
        taken = name in {function.name for function in self.registry.all()}
        # The name of one that was given none is its UUID, and is so here again.
        wanted = name if re.match(NAME, name) and not taken and name != uuid else None
        return await self.carry(self._create_as(uuid, _checked_name(wanted, uuid), profile, None))

    async def drop(self, uuid: str, words: str) -> None:
        """End a function that a move took away, or did not bring; repeatable."""
        await self.carry(self._drop(uuid, words))

    async def _drop(self, uuid: str, words: str) -> None:
        async with self.lock(uuid):
            function = self.registry.get(uuid)
            if function is None:
                return
            await self.end(function, words, Event.MOVED)

    async def end(self, function: Function, words: str, event: Event = Event.DELETE) -> None:
        """From whatever it is in to nothing. The caller holds the lock."""
        going = function.with_state(move(function.state, event, function.name), words)
        await self.registry.commit(going, "function-deleting", f"{function.name}: {words}")
        await self.remove(going, f"{function.name}: {words}")

    async def wait_disconnected(self, uuid: str, deadline_s: float) -> None:
        """Wait until no QEMU is connected, but not for ever."""
        path = self.world.paths.function(uuid).holder_socket
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while loop.time() < end:
            try:
                if not (await function_link.call(path, "status")).get("connected"):
                    return
            except AccelvisorError:
                return  # it has no process
            await asyncio.sleep(0.05)
        LOG.warning("a QEMU is still connected to function %s, which is not its own now", uuid)

    async def delete(
        self, key: str, unused: Callable[[Function], Awaitable[None]] | None = None
    ) -> None:
        """End it. Deleting what a deletion could not finish tries again.

        Args:
            unused: asked under the function's lock; raises when it is in use after all.

        Raises:
            NotFoundError: ``function-not-found``.
            ConflictError: ``function-in-use``.
        """
        await self.carry(self._delete(key, unused))

    async def reset(self, key: str) -> Function:
        """A function-level reset; a failed function gets a new process.

        Raises:
            NotFoundError, ConflictError; and what the function process answers.
        """
        return await self.carry(self._reset(key))

    async def statistics(self, key: str) -> dict[str, Any]:
        """What the function process counts."""
        return await self._ask(key, "statistics")

    async def trace(self, key: str) -> dict[str, Any]:
        """What ran on its chips lately.

        Raises:
            FunctionFailure: ``unknown-method``: its process is of an older accelvisord.
        """
        return await self._ask(key, "trace")

    async def _ask(self, key: str, method: str) -> dict[str, Any]:
        function = self.registry.find(key)
        move(function.state, Event.RESET, function.name)  # refused for those that come or go
        paths = self.world.paths.function(function.uuid)
        return await function_link.call(paths.control_socket, method)

    async def start_process(self, function: Function) -> Function:
        """Write its files, start its process, wait until it is ready. The caller holds the lock.

        Returns:
            the row to commit: a new process is a new epoch, and begins with nothing.
        """
        if function.state is not State.CREATING:
            function = replace(function, epoch=function.epoch + 1)
            if self.registry.change(function.uuid) is not None:
                words = f"{function.name} keeps its size: its process is gone"
                await self.registry.end_change(function, "function-unchanged", words)
        spec = self.specification(function)
        files.write(self.world.paths.function(function.uuid), spec)
        self.world.fault("create:written")
        memory = function.memory_bytes + function.window_bytes
        if not await self.spares.become(function.uuid, spec, memory):
            await self.world.supervisor.start(function.uuid, memory)
        self.world.fault("create:started")
        await working.come_up(self.world, function)
        self.on_ready(function.uuid)
        await self.on_fresh(function)
        return function

    async def remove(self, function: Function, message: str) -> None:
        """From the journal row ``deleting`` to nothing. The caller holds the lock."""
        await self.world.supervisor.stop(function.uuid)
        self.world.fault("delete:stopped")
        self.sweep(function.uuid)
        await self.on_ended(function)
        self.world.fault("delete:removed")
        await self.registry.remove(function.uuid, message)
        await self.on_shared()
        await self.on_removed(function.uuid)
        self._locks.pop(function.uuid, None)
        self.world.fault("delete:committed")

    def sweep(self, uuid: str) -> None:
        """Remove a function's files. What it made so that it cannot be removed stays."""
        if not files.sweep(self.world.paths.function(uuid)):
            LOG.warning("function %s left something behind that only a boot removes", uuid)

    async def settle(self, deadline_s: float) -> None:
        """Wait for the verbs in flight before the daemon ends; what remains is journaled."""
        if self._verbs:
            await asyncio.wait(self._verbs, timeout=deadline_s)

    def require_free(self, function: Function) -> None:
        """ConflictError ``function-moving`` while a move decides about it."""
        if function.uuid in self.held:
            raise ConflictError(
                f'function "{function.name}" is being moved with its domain',
                code="function-moving",
                where=f"function:{function.name}",
                hint="wait for the migration's end, or cancel it",
            )

    # --- inside ----------------------------------------------------------------------------------

    async def _create(
        self, profile: Profile, name: str | None, card: str | None, part: Part | None = None
    ) -> Function:
        uuid = await self.spares.take() or self.world.new_uuid()
        try:
            return await self._create_as(uuid, _checked_name(name, uuid), profile, card, part)
        finally:
            self.spares.give_back(uuid)  # unless it came to be used
            self.spares.refill()

    async def _create_as(
        self, uuid: str, name: str, profile: Profile, card: str | None, part: Part | None = None
    ) -> Function:
        async with self.lock(uuid):
            async with self.placing:
                function = self._plan(uuid, name, profile, card, part)
                self.world.fault("create:planned")
                where = f"on {function.card}, profile {profile.name}"
                await self.registry.insert(function, f"creating {name} {where}")
            self.world.fault("create:journaled")
            await self.on_shared()  # whoever had borrowed its cores gives them back
            try:
                function = await self.start_process(function)
                self.world.fault("create:ready")
                function = function.with_state(move(function.state, Event.PROCESS_READY, name))
                await self.registry.commit(function, "function-created", f"{name} is ready")
                await self.on_shared()
            except Exception as error:
                await self._undo(function, error)
                raise
            self.world.fault("create:committed")
        return function

    async def _undo(self, function: Function, error: Exception) -> None:
        """Back to before. If that fails too, the journal row stays for the next start."""
        reason = error.message if isinstance(error, AccelvisorError) else repr(error)
        try:
            going = function.with_state(move(function.state, Event.PROCESS_LOST, ""), reason)
            await self.registry.commit(going, "function-failed", f"{function.name}: {reason}")
            await self.remove(going, f"{function.name} was not created: {reason}")
        except AccelvisorError:
            LOG.exception(
                "undoing the creation of %s failed; it is left to the next start", function.uuid
            )

    def _plan(
        self, uuid: str, name: str, profile: Profile, card: str | None, part: Part | None
    ) -> Function:
        held = self.registry.held()
        placement, partition = part or (
            placing.choose(self.cards, held, profile, card, self.cpus, self.static()), None
        )  # fmt: skip
        return Function(
            uuid=uuid,
            name=name,
            profile=profile.name,
            placement=placement,
            cores=profile.cores,
            chips=profile.chips,
            memory_bytes=profile.memory_bytes,
            window_bytes=profile.window_bytes,
            queues=profile.queues,
            ring_entries=profile.ring_entries,
            policy=profile.policy,
            weight=profile.weight,
            state=State.CREATING,
            created=self.world.clock(),
            partition=partition,
        )

    async def _delete(self, key: str, unused: Callable[[Function], Awaitable[None]] | None) -> None:
        uuid = self.registry.find(key).uuid
        async with self.lock(uuid):
            function = self.registry.find(uuid)  # it may have gone while we waited
            self.require_free(function)
            move(function.state, Event.DELETE, function.name)
            if unused is not None:
                await unused(function)
            going = function.with_state(move(function.state, Event.DELETE, function.name))
            await self.registry.commit(going, "function-deleting", f"deleting {function.name}")
            self.world.fault("delete:journaled")
            await self.remove(going, f"{function.name} is deleted")

    async def _reset(self, key: str) -> Function:
        uuid = self.registry.find(key).uuid
        async with self.lock(uuid):
            function = self.registry.find(uuid)
            self.require_free(function)
            move(function.state, Event.RESET, function.name)
            if function.state is State.FAILED:
                return await self.revive(function)
            paths = self.world.paths.function(uuid)
            await working.reset(paths, function)
            function = replace(function, quarantine="")
            await self.registry.commit(function, "function-reset", f"{function.name} was reset")
            return function

    async def revive(self, function: Function) -> Function:
        """A new process for a failed function. The caller holds the lock."""
        await self.world.supervisor.stop(function.uuid)
        function = await self.start_process(function)
        state = move(function.state, Event.PROCESS_READY, function.name)
        function = replace(function.with_state(state), quarantine="")
        await self.registry.commit(
            function, "function-started", f"{function.name} has a new process"
        )
        return function

    def specification(self, function: Function) -> dict[str, object]:
        """What its process is told."""
        return specifying.specification(
            function, self.cards, self.world.paths, self.socket_group
        )

    def _profile(self, name: str) -> Profile:
        for profile in self.profiles:
            if profile.name == name:
                return profile
        known = ", ".join(profile.name for profile in self.profiles)
        raise NotFoundError(
            f'there is no profile "{name}"',
            code="profile-not-found",
            where="functions",
            hint=f"profiles: {known}",
        )

    async def carry(self, verb: Coroutine[Any, Any, T]) -> T:
        """Run a verb so that a cancelled caller does not cancel it half-way."""
        task = asyncio.get_running_loop().create_task(verb)
        self._verbs.add(task)
        task.add_done_callback(self._carried)
        return await asyncio.shield(task)

    def _carried(self, task: asyncio.Task[Any]) -> None:
        self._verbs.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone: the outcome is in the event log


def _checked_name(name: str | None, uuid: str) -> str:
    """A name of one's own, which cannot be taken for another function's UUID."""
    if name is None:
        return uuid
    if re.match(NAME, name) is None or is_uuid(name):
        raise UsageError(
            f'"{name[:80]}" cannot be the name of a function',
            code="name-invalid",
            where="functions",
            hint="1 to 64 letters, digits, . _ -, beginning with a letter or digit, and no UUID",
        )
    return name


@contextmanager
def holding(held: set[str], uuid: str) -> Iterator[None]:
    """No move begins with a function of ``Functions.held`` meanwhile. Nobody else may hold it."""
    held.add(uuid)
    try:
        yield
    finally:
        held.discard(uuid)


async def _same(function: Function, *_of: object) -> Function:
    """Nobody scrubs: there is no daemon around."""
    return function


async def _nothing(*_of: object) -> None:
    """Nobody wants to know."""
