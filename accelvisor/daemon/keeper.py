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

A process that ends by itself, or whose holder gave up, is started again while no running domain
has the function; with one it is ``failed`` until that domain stops, since QEMU does not connect a
second time. One that does not come up is tried again after a pause that doubles each time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelvisor.daemon import admission, function_link, processes, reconcile
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import Event, State, move
from accelvisor.daemon.paths import peer
from accelvisor.daemon.reconcile import Action, Change, Repair, View
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, DeadlineError
from accelvisor.hypervisor.port import Domain
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)

#: A function whose process ends by itself is started again this often within RESTART_WINDOW_S.
RESTARTS = 3
RESTART_WINDOW_S = 60.0
#: How long a process that was found running may take to answer (seconds).
ADOPT_S = 3.0
#: Repairs at the start that are done at once: waiting for processes is most of them.
TOGETHER = 4
#: How long a look at the domains waits for the new processes that it asks for (seconds): whoever
#: stopped a VM mostly finds its function ready at once, and a broken one holds up nothing else.
REVIVE_S = 3.0
#: The pause after the first failed revival, and the longest one (seconds).
PAUSE_S = 5.0
#: How long a holder is waited for that has nothing to tell: then it is asked anew (seconds).
WAIT_S = 3600.0
#: Why a function stands still, for people.
QUARANTINED = (
    f"its programs faulted {LIMITS.fault_row} times in a row, again and again: resets did not help"
)
LONGEST_PAUSE_S = 300.0


class Keeper:
    """Watches over the functions of one :class:`Functions`."""

    def __init__(self, functions: Functions, boot_id: str) -> None:
        self._functions = functions
        self._registry = functions.registry
        self._boot_id = boot_id
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        self._revivals: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, asyncio.TimerHandle] = {}
        self._failures: defaultdict[str, int] = defaultdict(int)
        self._looks: set[asyncio.Task[None]] = set()
        #: What libvirt says that is not followed; for Doctor.
        self.view = View((), (), ())
        #: Looks at all domains again.
        self.look: Callable[[], Coroutine[Any, Any, None]] = _no_look
        functions.on_ready = self.watch

    async def recover(
        self, progress: Callable[[int, int], None] = lambda done, count: None
    ) -> Sequence[Repair]:
        """Bring store and machine together after a start; one failure does not stop the others.

        Args:
            progress: told how many of how many repairs are done, at the start and after each.
        """
        new_boot = await self._registry.boot_id() != self._boot_id
        paths = self._functions.world.paths
        running = await self._functions.world.supervisor.list()
        directories = set(os.listdir(paths.functions) if paths.functions.is_dir() else [])
        if paths.specs.is_dir():
            directories |= {Path(name).stem for name in os.listdir(paths.specs)}
        repairs = reconcile.at_start(
            self._registry.all(), running, directories, same_boot=not new_boot
        )
        done = 0
        progress(0, len(repairs))
        turn = asyncio.Semaphore(TOGETHER)

        async def one(repair: Repair) -> None:
            nonlocal done
            async with turn:
                await self._try_repair(repair)
                done += 1
                progress(done, len(repairs))

        # Orphans first, alone: they may hold what the others need.
        orphans = [item for item in repairs if self._registry.get(item.uuid) is None]
        await asyncio.gather(*map(one, orphans))
        await asyncio.gather(*(one(item) for item in repairs if item not in orphans))
        # Last: a start that is cut short must not take what ran in the boot before for its own.
        await self._registry.set_boot_id(self._boot_id)
        return repairs

    async def follow(self, functions: Sequence[Function], domains: Sequence[Domain]) -> None:
        """Let the functions follow what libvirt says of its domains.

        Args:
            functions: as they were before libvirt was asked. One that a verb has changed since is
                left to the look that follows the verb.
        """
        view = reconcile.follow(functions, domains)
        known = {item.uuid: item for item in functions}
        await self._report(view, known)
        started: list[asyncio.Task[None]] = []
        for change in view.changes:
            if change.uuid in self._functions.held:
                continue  # a domain comes or goes with it, and the move says when
            planned = known[change.uuid]
            if change.event is Event.PROCESS_READY:
                started += self._start_revival(change, planned)
                continue
            try:
                async with self._functions.lock(change.uuid):
                    if self._registry.get(change.uuid) is planned:
                        await self._apply(change, planned)
            except AccelvisorError as error:
                LOG.warning("function %s: %s", change.uuid, error.message)
        if started:
            await asyncio.wait(started, timeout=REVIVE_S)

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
        tasks = [*self._watches.values(), *self._revivals.values(), *self._looks]
        for uuid in list(self._watches):
            self.unwatch(uuid)
        for pause in self._pauses.values():
            pause.cancel()
        for task in (*self._revivals.values(), *self._looks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- repairs at the start --------------------------------------------------------------------

    async def _try_repair(self, repair: Repair) -> None:
        try:
            await self._repair(repair)
        except Exception as error:  # a start that ends here would end at each further one too
            reason = error.message if isinstance(error, AccelvisorError) else repr(error)
            LOG.error("%s of %s failed: %s", repair.action, repair.uuid, reason)
            await self._mark_failed(repair.uuid, reason)

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
            status = await function_link.wait_ready(files.holder_socket, deadline_s=ADOPT_S)
        except AccelvisorError as error:
            if function.state is State.RUNNING:
                await self._mark_failed(function.uuid, error.message)
            else:
                await self._restart(function, error.message)
            return
        self.watch(function.uuid)
        function = await self._functions.finish_change(function)
        if function.state is State.FAILED:
            function = await self._commit(function, Event.PROCESS_READY, "its process runs")
        # The daemon may have been killed between the row and what follows from it.
        if status.get("peer") != (peer(function.domain_uuid) or ""):
            await admission.follow(self._functions, function)

    async def _restart(self, function: Function, why: str) -> None:
        if function.state is State.RUNNING:  # of a boot before: no domain survived that
            function = function.with_state(move(function.state, Event.TAKEN, function.name))
        await self._functions.world.supervisor.stop(function.uuid)
        function = await self._functions.start_process(function)
        await self._commit(function, Event.PROCESS_READY, f"restarted: {why}")

    # --- processes that end ----------------------------------------------------------------------

    async def _watch(self, uuid: str) -> None:
        try:
            why = await self._ended(uuid)
            await self._after_end(uuid, why)
        except AccelvisorError as error:
            LOG.error("watching function %s failed: %s", uuid, error.message)
        finally:
            if self._watches.get(uuid) is asyncio.current_task():
                del self._watches[uuid]

    async def _ended(self, uuid: str) -> str:
        """Wait for the end of its process, or of its use; the reason in words."""
        while True:
            try:
                pid = await self._functions.world.supervisor.pid(uuid)
                break
            except AccelvisorError as error:  # the system is slow: that is not the function's end
                LOG.warning("cannot see the process of function %s: %s", uuid, error.message)
                await asyncio.sleep(ADOPT_S)
        process = processes.of_pid(pid) if pid is not None else None
        if process is None:
            return "ended"
        loop = asyncio.get_running_loop()
        ended = loop.create_task(process.ended())
        trouble = loop.create_task(self._gave_up(uuid))
        try:
            await asyncio.wait((ended, trouble), return_when=asyncio.FIRST_COMPLETED)
            return "ended" if ended.done() else f"gave up: {trouble.result()}"
        finally:
            for task in (ended, trouble):
                task.cancel()
            await asyncio.gather(ended, trouble, return_exceptions=True)

    async def _gave_up(self, uuid: str) -> str:
        """Wait until its holder serves no more; why. Whether its device stands still because of its
        faults goes into the row meanwhile.

        The holder answers when there is something new, so an idle function is not woken. One that
        does not answer, or answers at once with what is known, is asked again after a pause.
        """
        files = self._functions.world.paths.function(uuid)
        row = self._registry.get(uuid)
        quarantined = row is not None and bool(row.quarantine)
        known: dict[str, object] = {"gave_up": "", "quarantined": quarantined}
        while True:
            try:
                said = await function_link.call(
                    files.holder_socket, "wait", known, deadline_s=WAIT_S
                )
            except DeadlineError:
                continue
            except AccelvisorError as error:
                LOG.debug("function %s: %s", uuid, error.message)
                await asyncio.sleep(self._functions.world.poll_s)
                continue
            now: dict[str, object] = {
                "gave_up": str(said.get("gave_up") or "")[:200],
                "quarantined": bool(said.get("quarantined")),
            }
            if now["gave_up"]:
                return str(now["gave_up"])
            function = self._registry.get(uuid)
            if function is not None and now["quarantined"] != bool(function.quarantine):
                await self._quarantine(uuid, bool(now["quarantined"]))
            if now == known:
                await asyncio.sleep(self._functions.world.poll_s)
            known = now

    async def _quarantine(self, uuid: str, quarantined: bool) -> None:
        async with self._functions.lock(uuid):
            function = self._registry.get(uuid)
            if function is None or function.state in (State.CREATING, State.DELETING):
                return
            if bool(function.quarantine) == quarantined:
                return
            kind, why = "function-released", ""
            if quarantined:
                kind, why = "function-quarantined", QUARANTINED
            words = f"{function.name}: {why or 'it computes again'}"
            await self._registry.commit(replace(function, quarantine=why), kind, words)

    async def _after_end(self, uuid: str, why: str) -> None:
        async with self._functions.lock(uuid):
            function = self._registry.get(uuid)
            if function is None or self._watches.get(uuid) is not asyncio.current_task():
                return  # deleted, or another process is watched by now
            if function.state in (State.CREATING, State.DELETING):
                return
            await self._lost(function, why)

    async def _lost(self, function: Function, how: str) -> None:
        """Its process ended by itself, or gave up."""
        if function.state is State.RUNNING:
            why = f"its process {how} while domain {function.domain} used it"
            await self._mark_failed(function.uuid, why)
            return
        now = asyncio.get_running_loop().time()
        recent = self._restarts[function.uuid]
        while recent and recent[0] < now - RESTART_WINDOW_S:
            recent.popleft()
        if len(recent) >= RESTARTS:
            why = f"its process {how} {RESTARTS + 1} times within {RESTART_WINDOW_S:g} s"
            await self._mark_failed(function.uuid, why)
            self._pause(function.uuid)
            return
        recent.append(now)
        by_itself = "ended by itself" if how == "ended" else how
        try:
            await self._restart(function, f"its process {by_itself}")
        except AccelvisorError as error:
            await self._mark_failed(function.uuid, error.message)
            self._pause(function.uuid)

    async def _mark_failed(self, uuid: str, why: str) -> None:
        function = self._registry.get(uuid)
        if function is None or function.state in (State.CREATING, State.DELETING):
            return
        state = move(function.state, Event.PROCESS_LOST, function.name)
        failed = function.with_state(state, why)
        await self._registry.commit(failed, "function-failed", f"{function.name}: {why}")

    # --- domains that come and go ----------------------------------------------------------------

    async def _report(self, view: View, known: Mapping[str, Function]) -> None:
        """One event for each claim that was not there at the last look."""
        before, self.view = set(self.view.claims), view
        for claim in view.claims:
            if claim in before:
                continue
            function = known[claim.function]
            has = f"belongs to domain {function.domain}" if function.domain else "is not free"
            await self._registry.record(
                "function-claimed",
                claim.function,
                f"domain {claim.domain} names {function.name}, which {has}",
            )

    async def _apply(self, change: Change, function: Function) -> None:
        if change.domain_uuid is not None and function.domain_uuid is None:
            function = await self._functions.scrub(function, change.domain_uuid)
        placed = replace(function, domain=change.domain, domain_uuid=change.domain_uuid)
        words = {
            Event.STARTED: f"runs in domain {change.domain}",
            Event.TAKEN: f"is attached to domain {change.domain}",
            Event.RELEASED: f"is free again (was with domain {function.domain})",
        }
        placed = await self._commit(placed, change.event, words[change.event])
        if placed.domain_uuid != function.domain_uuid:
            await admission.follow(self._functions, self._registry.find(placed.uuid))

    def _start_revival(self, change: Change, planned: Function) -> list[asyncio.Task[None]]:
        """A task that gives a failed function a new process, unless one is at it or it pauses."""
        if change.uuid in self._revivals or change.uuid in self._pauses:
            return []
        task = asyncio.get_running_loop().create_task(self._revive(change, planned))
        self._revivals[change.uuid] = task
        return [task]

    async def _revive(self, change: Change, planned: Function) -> None:
        try:
            async with self._functions.lock(change.uuid):
                if self._registry.get(change.uuid) is not planned:
                    return
                function = await self._functions.revive(planned)
                event = Event.RELEASED if change.domain is None else Event.TAKEN
                await self._apply(replace(change, event=event), function)
                self._failures.pop(change.uuid, None)
        except Exception as error:
            reason = error.message if isinstance(error, AccelvisorError) else repr(error)
            LOG.warning("function %s: no new process: %s", change.uuid, reason)
            await self._mark_failed(change.uuid, reason)
            self._pause(change.uuid)
        finally:
            self._revivals.pop(change.uuid, None)

    def _pause(self, uuid: str) -> None:
        """Leave a failed function alone for a while, then look again."""
        self._failures[uuid] += 1
        pause = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(self._failures[uuid] - 1, 16))

        def over() -> None:
            self._pauses.pop(uuid, None)
            if self._registry.get(uuid) is None:
                self._failures.pop(uuid, None)
                return
            task = loop.create_task(self.look())
            self._looks.add(task)
            task.add_done_callback(self._looks.discard)

        loop = asyncio.get_running_loop()
        previous = self._pauses.pop(uuid, None)
        if previous is not None:
            previous.cancel()
        self._pauses[uuid] = loop.call_later(pause, over)

    async def _commit(self, function: Function, event: Event, words: str) -> Function:
        """The row as it is now."""
        state = move(function.state, event, function.name)
        kind = "function-started" if event is Event.PROCESS_READY else f"function-{state}"
        function = function.with_state(state)
        await self._registry.commit(function, kind, f"{function.name} {words}")
        return function


async def _no_look() -> None:
    """Without libvirt there is nothing to look at."""
