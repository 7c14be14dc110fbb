"""Keeping functions true: repairs at the start, processes that end, domains that come and go.

What happens to a function when its domain does something (each is tested):

================================ =============================================================
the domain                       the function
================================ =============================================================
starts with it                   running
reboots, resets                  running; QEMU resets the device behind the same socket
shuts down, is destroyed,        attached (ready if only the running domain had it); its process
crashes, fails                   sees the end of the connection and resets itself
is undefined                     ready
================================ =============================================================

A process that ends by itself is started again while no running domain has the function; with one it
is ``failed`` until that domain stops, since QEMU does not connect a second time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from accelvisor.daemon import function_link, processes, reconcile
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import Event, State, move
from accelvisor.daemon.reconcile import Action, Change, Repair
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError
from accelvisor.hypervisor.port import Domain

LOG = logging.getLogger(__name__)

#: A function whose process ends by itself is started again this often within RESTART_WINDOW_S.
RESTARTS = 3
RESTART_WINDOW_S = 60.0
#: How long a process that was found running may take to answer (seconds).
ADOPT_S = 3.0


class Keeper:
    """Watches over the functions of one :class:`Functions`."""

    def __init__(self, functions: Functions, boot_id: str) -> None:
        self._functions = functions
        self._registry = functions.registry
        self._boot_id = boot_id
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        functions.on_ready = self.watch

    async def recover(
        self, progress: Callable[[int, int], None] = lambda done, count: None
    ) -> Sequence[Repair]:
        """Bring store and machine together after a start; one failure does not stop the others.

        Args:
            progress: told how many of how many repairs are done, before each.
        """
        new_boot = await self._registry.new_boot(self._boot_id)
        paths = self._functions.world.paths
        running = await self._functions.world.supervisor.list()
        directories = set(os.listdir(paths.functions) if paths.functions.is_dir() else [])
        if paths.specs.is_dir():
            directories |= {Path(name).stem for name in os.listdir(paths.specs)}
        repairs = reconcile.at_start(
            self._registry.all(), running, directories, same_boot=not new_boot
        )
        progress(0, len(repairs))
        for number, repair in enumerate(repairs):
            progress(number, len(repairs))
            try:
                await self._repair(repair)
            except AccelvisorError as error:
                LOG.error("%s of %s failed: %s", repair.action, repair.uuid, error.message)
                await self._mark_failed(repair.uuid, error.message)
        return repairs

    async def follow(self, domains: Sequence[Domain]) -> None:
        """Let the functions follow what libvirt says of its domains."""
        for change in reconcile.follow(self._registry.all(), domains):
            try:
                async with self._functions.lock(change.uuid):
                    await self._apply(change)
            except AccelvisorError as error:
                LOG.warning("function %s: %s", change.uuid, error.message)

    def watch(self, uuid: str) -> None:
        """Notice the end of the function's process."""
        self.unwatch(uuid)
        task = asyncio.get_running_loop().create_task(self._watch(uuid))
        self._watches[uuid] = task

    def unwatch(self, uuid: str) -> None:
        task = self._watches.pop(uuid, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def stop(self) -> None:
        """Stop watching; the functions go on."""
        tasks = list(self._watches.values())
        for uuid in list(self._watches):
            self.unwatch(uuid)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- repairs at the start --------------------------------------------------------------------

    async def _repair(self, repair: Repair) -> None:
        if repair.action is not Action.ADOPT:
            LOG.info("%s %s: %s", repair.action, repair.uuid, repair.why)
        function = self._registry.get(repair.uuid)
        if function is None:
            await self._repair_orphan(repair)
            return
        async with self._functions.lock(repair.uuid):
            match repair.action:
                case Action.ADOPT:
                    await self._adopt(function)
                case Action.RESTART:
                    await self._restart(function, repair.why)
                case Action.FAIL:
                    await self._mark_failed(function.uuid, repair.why)
                case _:
                    message = f"{function.name} is removed: {repair.why}"
                    await self._functions.remove(function, message)

    async def _repair_orphan(self, repair: Repair) -> None:
        if repair.action is Action.STOP_ORPHAN:
            await self._functions.world.supervisor.stop(repair.uuid)
        self._functions.sweep(repair.uuid)
        await self._registry.record("function-orphan", repair.uuid, f"removed: {repair.why}")

    async def _adopt(self, function: Function) -> None:
        files = self._functions.world.paths.function(function.uuid)
        try:
            await function_link.wait_ready(files.holder_socket, deadline_s=ADOPT_S)
        except AccelvisorError as error:
            if function.state is State.RUNNING:
                await self._mark_failed(function.uuid, error.message)
            else:
                await self._restart(function, error.message)
            return
        self.watch(function.uuid)
        if function.state is State.FAILED:
            await self._commit(function, Event.PROCESS_READY, "its process runs")

    async def _restart(self, function: Function, why: str) -> None:
        if function.state is State.RUNNING:  # of a boot before: no domain survived that
            function = function.with_state(move(function.state, Event.TAKEN, function.name))
        await self._functions.world.supervisor.stop(function.uuid)
        await self._functions.start_process(function)
        await self._commit(function, Event.PROCESS_READY, f"restarted: {why}")

    # --- processes that end ----------------------------------------------------------------------

    async def _watch(self, uuid: str) -> None:
        try:
            await self._ended(uuid)
            await self._after_end(uuid)
        except AccelvisorError as error:
            LOG.error("watching function %s failed: %s", uuid, error.message)
        finally:
            if self._watches.get(uuid) is asyncio.current_task():
                del self._watches[uuid]

    async def _ended(self, uuid: str) -> None:
        while True:
            try:
                pid = await self._functions.world.supervisor.pid(uuid)
                break
            except AccelvisorError as error:  # the system is slow: that is not the function's end
                LOG.warning("cannot see the process of function %s: %s", uuid, error.message)
                await asyncio.sleep(ADOPT_S)
        process = processes.of_pid(pid) if pid is not None else None
        if process is not None:
            await process.ended()

    async def _after_end(self, uuid: str) -> None:
        async with self._functions.lock(uuid):
            function = self._registry.get(uuid)
            if function is None or self._watches.get(uuid) is not asyncio.current_task():
                return  # deleted, or another process is watched by now
            if function.state in (State.CREATING, State.DELETING):
                return
            await self._lost(function)

    async def _lost(self, function: Function) -> None:
        """Its process ended by itself."""
        if function.state is State.RUNNING:
            why = f"its process ended while domain {function.domain} used it"
            await self._mark_failed(function.uuid, why)
            return
        now = asyncio.get_running_loop().time()
        recent = self._restarts[function.uuid]
        while recent and recent[0] < now - RESTART_WINDOW_S:
            recent.popleft()
        if len(recent) >= RESTARTS:
            why = f"its process ended {RESTARTS + 1} times within {RESTART_WINDOW_S:g} s"
            await self._mark_failed(function.uuid, why)
            return
        recent.append(now)
        try:
            await self._restart(function, "its process ended by itself")
        except AccelvisorError as error:
            await self._mark_failed(function.uuid, error.message)

    async def _mark_failed(self, uuid: str, why: str) -> None:
        function = self._registry.get(uuid)
        if function is None or function.state in (State.CREATING, State.DELETING):
            return
        state = move(function.state, Event.PROCESS_LOST, function.name)
        failed = function.with_state(state, why)
        await self._registry.commit(failed, "function-failed", f"{function.name}: {why}")

    # --- domains that come and go ----------------------------------------------------------------

    async def _apply(self, change: Change) -> None:
        function = self._registry.get(change.uuid)
        if function is None:
            return
        if change.event is Event.PROCESS_READY:
            function = await self._functions.revive(function)
            event = Event.RELEASED if change.domain is None else Event.TAKEN
        else:
            event = change.event
        placed = replace(function, domain=change.domain, domain_uuid=change.domain_uuid)
        words = {
            Event.STARTED: f"runs in domain {change.domain}",
            Event.TAKEN: f"is attached to domain {change.domain}",
            Event.RELEASED: f"is free again (was with domain {function.domain})",
        }
        await self._commit(placed, event, words[event])

    async def _commit(self, function: Function, event: Event, words: str) -> None:
        state = move(function.state, event, function.name)
        kind = "function-started" if event is Event.PROCESS_READY else f"function-{state}"
        await self._registry.commit(function.with_state(state), kind, f"{function.name} {words}")
