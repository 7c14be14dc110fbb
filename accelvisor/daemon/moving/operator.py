"""An operator's move: looked at first, then begun, watched, cancelled, and told of at the end.

libvirt is asked to migrate, and everything else follows from that as it does when a person asks it
with virsh; so the migration goes on whoever watches it, and no watcher is needed. What is shown on
the way comes from the source's machine, from its rounds, and from libvirt's job.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from accelvisor.daemon.domains import DomainsLink
from accelvisor.daemon.moving import views
from accelvisor.daemon.moving.facts import Looked, Looking, Wish
from accelvisor.daemon.moving.host import MovingHost
from accelvisor.daemon.moving.planner import Plan, plan
from accelvisor.daemon.moving.source import SourceMove
from accelvisor.errors import AccelvisorError, ConflictError, NotFoundError, UnavailableError
from accelvisor.frames.trust import Host
from accelvisor.hypervisor.port import Domain, Job, MigrateRequest
from accelvisor.migration.source import State

#: Between two signs of life (seconds).
WATCH_S = 0.25
#: How long the functions' own move may take to end when libvirt's has.
_END_S = 20.0

#: What an operator is shown for each state of the source's machine.
PHASES: Mapping[State, str] = {
    State.START: "reserving",
    State.INSPECTING: "reserving",
    State.OFFERED: "reserving",
    State.PRECOPY: "copying",
    State.FREEZING: "freezing",
    State.SHIPPING: "last round",
    State.SEALING: "sealing",
    State.SEALED: "verifying",
    State.CONFIRMED: "handing over",
    State.HANDED: "loading",
    State.COMMITTING: "committing",
    State.ABORTING: "turning back",
    State.COMMITTED: "moved",
    State.DONE: "moved",
    State.ABORTED: "turning back",
    State.RETURNED: "stayed",
    State.REFUSED: "stayed",
}
_BACK = (State.ABORTED, State.RETURNED, State.REFUSED)
_AWAY = (State.COMMITTED, State.DONE)


@dataclass
class Running:
    """A migration that this host's operator has begun."""

    domain: Domain
    host: Host
    request: MigrateRequest
    began: float
    task: asyncio.Task[None] | None = None
    move: SourceMove | None = None
    job: Job | None = None
    error: AccelvisorError | None = None
    cancelled: bool = False
    #: How long it took; 0 while it does.
    took_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.took_s or time.monotonic() - self.began

    @property
    def phase(self) -> str:
        return "reserving" if self.move is None else PHASES[self.move.driver.state]


class Operator:
    """One per daemon.

    Args:
        uri: template of the other hosts' libvirt, with ``{address}`` in it.
    """

    def __init__(self, moving: MovingHost, links: DomainsLink[Any], uri: str) -> None:
        self._moving = moving
        self._links = links
        self.looking = Looking(moving, links, uri)
        self._running: dict[str, Running] = {}

    # --- verbs ------------------------------------------------------------------------------------

    async def plan(self, wish: Wish) -> tuple[Looked, Plan]:
        """What would happen. Never raises for what stands against it."""
        busy = any(wish.domain in (r.domain.name, r.domain.uuid) for r in self._running.values())
        looked = await self.looking.look(wish, busy=busy)
        return looked, await asyncio.to_thread(plan, looked.facts)

    async def migrate(
        self, wish: Wish, *, dry_run: bool = False
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The plan, then progress, then the report; with ``dry_run`` only the plan.

        Whoever stops listening does not stop the migration.

        Raises:
            AccelvisorError: with the code of the first reason against it.
        """
        looked, made = await self.plan(wish)
        yield {"plan": views.plan(looked, made)}
        if dry_run:
            return
        if made.blockers:
            raise self._refusal(made)
        async for step in self.carry(looked, wish):
            yield step

    async def carry(self, looked: Looked, wish: Wish) -> AsyncGenerator[dict[str, Any], None]:
        """Progress, then the report, of what nothing stands against."""
        running = self._begin(looked, wish)
        task = running.task
        while task is not None and not task.done():
            await asyncio.wait((task,), timeout=WATCH_S)
            yield {"progress": views.progress(running)}
        yield {"report": views.report(running)}

    async def cancel(self, name: str) -> None:
        """End a migration away from here.

        Raises:
            NotFoundError: ``migration-unknown``: there is none.
            ConflictError: ``migration-no-return``: QEMU has handed the VM over.
        """
        uuid = await self._uuid(name)
        running, move = self._running.get(uuid), self._moving.moves.going(uuid)
        if running is None and move is None:
            raise NotFoundError(
                f'no migration of VM "{name}" away from this host is in progress',
                code="migration-unknown",
                where="migration",
                hint="accelctl migration list; where a VM comes to, it cannot be cancelled",
            )
        if move is not None:
            await move.driver.tell(views.CANCEL)
        if running is not None:
            running.cancelled = True
        await self._end_job(uuid)

    def running(self) -> list[Running]:
        """What is in progress."""
        return list(self._running.values())

    async def history(self) -> list[dict[str, Any]]:
        """The journal's moves, the newest first, as they stand now."""
        rows = await asyncio.to_thread(self._moving.services.journal.rows)
        known = {host.uuid: host for host in self._moving.keys.keyring.effective.hosts}
        moves = self._moving.moves
        found = []
        for row in reversed(rows):
            live = (moves.sources if row.role == "source" else moves.destinations).get(row.id)
            state = live.driver.state.value if live is not None else None
            found.append(views.migration(row, known, state))
        return found

    async def find(self, id_: str) -> dict[str, Any]:
        """One of them. NotFoundError ``migration-unknown``."""
        found = [item for item in await self.history() if item["id"].startswith(id_.lower())]
        if not id_ or len({item["id"] for item in found}) != 1:
            words = "several migrations begin so" if found and id_ else "there is no such migration"
            raise NotFoundError(
                f'"{id_}": {words}',
                code="migration-unknown",
                where="migration",
                hint="accelctl migration list",
            )
        return found[0]

    # --- carrying out -----------------------------------------------------------------------------

    def _begin(self, looked: Looked, wish: Wish) -> Running:
        domain, host = looked.domain, looked.host
        if domain is None or host is None:
            raise UnavailableError("there is nothing to be moved", where="migration")
        if domain.uuid in self._running:
            raise ConflictError(
                f"a migration of VM {domain.name} is in progress",
                code="migration-busy",
                where="migration",
            )
        request = MigrateRequest(
            domain.uuid,
            looked.uri,
            host.uuid,
            wish.stored,
            wish.bandwidth,
            round(wish.downtime_s * 1000),
        )
        running = Running(domain, host, request, time.monotonic())
        self._running[domain.uuid] = running
        running.task = asyncio.get_running_loop().create_task(self._run(running))
        return running

    async def _run(self, running: Running) -> None:
        uuid = running.domain.uuid
        services = self._moving.services
        if running.request.downtime_ms:
            services.targets[uuid] = running.request.downtime_ms / 1000
        watch = asyncio.get_running_loop().create_task(self._watch(running))
        try:
            words = f"VM {running.domain.name} goes to host {running.host.name}"
            await services.record("migration-begun", uuid, words)
            await self._links.call(
                lambda port: port.migrate(running.request), patient=True, deadline_s=math.inf
            )
        except AccelvisorError as error:
            running.error = error
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            services.targets.pop(uuid, None)
            self._running.pop(uuid, None)
        await self._ended(running)

    async def _watch(self, running: Running) -> None:
        """Follow the move; when it has turned back, libvirt's part is ended too."""
        uuid = running.domain.uuid
        ended = False
        while True:
            running.move = self._find(running) or running.move
            with suppress(AccelvisorError):
                running.job = await self._links.call(lambda port: port.job(uuid)) or running.job
            move = running.move
            if move is not None and move.driver.state in _BACK and not ended:
                ended = True
                await self._end_job(uuid)
            await asyncio.sleep(WATCH_S)

    def _find(self, running: Running) -> SourceMove | None:
        for move in reversed(self._moving.moves.sources.values()):
            if move.asked.domain == running.domain.uuid:
                return move if move.begun >= running.began else None
        return None

    async def _ended(self, running: Running) -> None:
        move = running.move = self._find(running) or running.move
        if move is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await move.driver.reach(State.DONE, State.RETURNED, State.REFUSED)
            if move.driver.state in _AWAY:
                running.error = None  # whatever libvirt says: the functions compute there
            elif move.driver.error is not None:
                # libvirt only knows that QEMU turned back.
                running.error = move.driver.error
            elif running.error is None:
                running.error = ConflictError(
                    "the VM moved without its functions",
                    code="migration-fenced",
                    where="migration",
                    hint="journalctl -u accelvisor, on both hosts",
                )
        running.took_s = time.monotonic() - running.began
        await self._links.look()
        if move is None:
            # Of a VM without functions, and of one that was refused, nobody else tells.
            kind = "migration-returned" if running.error else "migration-moved"
            words = f"VM {running.domain.name} " + (
                f"stays ({running.error.message})"
                if running.error
                else f"runs on host {running.host.name}"
            )
            await self._moving.services.record(kind, running.domain.uuid, words)

    async def _end_job(self, uuid: str) -> None:
        with suppress(AccelvisorError):  # it may have ended by itself
            await self._links.call(lambda port: port.migrate_cancel(uuid))

    async def _uuid(self, name: str) -> str:
        for running in self._running.values():
            if name in (running.domain.name, running.domain.uuid):
                return running.domain.uuid
        return (await self._links.call(lambda port: port.get(name))).uuid

    def _refusal(self, made: Plan) -> AccelvisorError:
        first, *others = made.blockers
        more = f" (and {len(others)} more)" if others else ""
        return ConflictError(
            first.message + more,
            code=first.code,
            where="migration",
            hint=first.fix if not others else "accelctl migrate --dry-run shows all reasons",
        )
