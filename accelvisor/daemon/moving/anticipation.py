"""Checkpoints in anticipation: taken because something is to be expected, without anybody asking.

:class:`Anticipation` decides for one function, with the time and what is known of its health as
arguments. :class:`Watchman` asks the functions, takes what is due, and keeps the last few.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from accelvisor.daemon import function_link
from accelvisor.daemon.moving.checkpoints import Trigger
from accelvisor.daemon.moving.services import Services
from accelvisor.errors import AccelvisorError
from accelvisor.frames.store import Entry

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Policy:
    """When a function is captured. Nothing is on by default.

    Attributes:
        every_s: a timer; 0: none.
        faults: after so many faults of its programs since the last one; 0: never.
        restarts: after so many restarts of its worker since the last one; 0: never.
        rest_s: never sooner than so long after the last one, but for a drain.
        keep: how many are kept.
    """

    every_s: float = 0.0
    faults: int = 0
    restarts: int = 0
    rest_s: float = 10.0
    keep: int = 2

    @property
    def on(self) -> bool:
        """Whether anything could ever be due but a drain."""
        return bool(self.every_s or self.faults or self.restarts)


@dataclass(frozen=True, slots=True)
class Health:
    """Counters that only grow; one that went back belongs to a new process."""

    faults: int = 0
    restarts: int = 0


class Anticipation:
    """Of one function. The clock is any that never goes back, in seconds.

    Args:
        now_s: the timer begins here.
        health: and the counters with this.
    """

    def __init__(self, policy: Policy, now_s: float, health: Health) -> None:
        self._policy = policy
        self._last_s = now_s
        self._begun = True
        self._health = health
        self._drained = False

    def due(self, now_s: float, health: Health, *, draining: bool = False) -> Trigger | None:
        """Why one should be taken now; None when there is no reason. Says the same again until
        :meth:`taken` or :meth:`failed`.
        """
        if health.faults < self._health.faults or health.restarts < self._health.restarts:
            self._health = health
        if draining:
            return None if self._drained else "drain"
        self._drained = False
        policy, since = self._policy, now_s - self._last_s
        if since < policy.rest_s and not self._begun:
            return None
        worse = (
            (policy.faults, health.faults - self._health.faults),
            (policy.restarts, health.restarts - self._health.restarts),
        )
        if any(limit and count >= limit for limit, count in worse):
            return "health"
        if policy.every_s and since >= policy.every_s:
            return "timer"
        return None

    def taken(self, now_s: float, health: Health, *, draining: bool = False) -> None:
        """One was taken."""
        self._last_s, self._health, self._begun = now_s, health, False
        self._drained = draining

    def failed(self, now_s: float) -> None:
        """One could not be taken: not again at once."""
        self._last_s, self._begun = now_s, False


class Takes(Protocol):
    """:class:`accelvisor.daemon.moving.checkpoints.Checkpoints`, as far as it is needed."""

    def create(
        self,
        function: str,
        *,
        parent: bytes | None = None,
        follow: bool = False,
        trigger: Trigger = "operator",
        keep: int | None = None,
    ) -> Awaitable[Entry]: ...


class Watchman:
    """Looks at all functions now and then.

    Args:
        draining: whether everything is about to move away from this host.
        poll_s: how often it is looked.
    """

    def __init__(
        self,
        services: Services,
        checkpoints: Takes,
        policy: Policy,
        draining: Callable[[], bool],
        poll_s: float = 1.0,
    ) -> None:
        self._services = services
        self._checkpoints = checkpoints
        self._policy = policy
        self._draining = draining
        self._poll_s = poll_s
        self._known: dict[str, Anticipation] = {}
        self._digests: dict[str, bytes] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """No more; what is being taken is carried to its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(self._poll_s)

    async def look(self, now_s: float) -> None:
        """Once: take what is due."""
        draining = self._draining()
        if not self._policy.on and not draining:
            return
        functions = self._services.functions
        uuids = {function.uuid for function in functions.registry.all()}
        for gone in self._known.keys() - uuids:
            del self._known[gone]
            self._digests.pop(gone, None)
        for uuid in sorted(uuids - functions.held):
            try:
                await self._look_at(uuid, now_s, draining)
            except AccelvisorError as error:
                LOG.info("function %s: %s", uuid, error.message)
            except Exception:
                LOG.exception("function %s", uuid)

    async def _look_at(self, uuid: str, now_s: float, draining: bool) -> None:
        health = await self._health(uuid)
        known = self._known.get(uuid)
        if known is None:
            known = self._known[uuid] = Anticipation(self._policy, now_s, health)
        trigger = known.due(now_s, health, draining=draining)
        if trigger is None:
            return
        try:
            # With a timer there will be a next one, which need not copy what did not change.
            entry = await self._checkpoints.create(
                uuid,
                parent=self._digests.get(uuid),
                follow=bool(self._policy.every_s),
                trigger=trigger,
                keep=self._policy.keep,
            )
        except AccelvisorError:
            known.failed(now_s)
            raise
        self._digests[uuid] = entry.digest
        known.taken(now_s, health, draining=draining)

    async def _health(self, uuid: str) -> Health:
        paths = self._services.functions.world.paths.function(uuid)
        counts = await function_link.call(paths.control_socket, "statistics")
        holder = await function_link.call(paths.holder_socket, "status")
        return Health(_count(counts.get("faults")), _count(holder.get("worker_restarts")))


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
