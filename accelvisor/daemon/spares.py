"""Spare function processes: started before anybody asks, so that creating a function waits for
neither an interpreter nor its imports (accelvisor/function/spare.py is the other side).

A spare is what a function will be, in the same unit and sandbox, under a UUID that no function has
yet; the function that takes it gets this UUID. It is in no store: it ends with the connection that
the daemon holds to it, so a daemon that is killed leaves none, and what files it left the next
start sweeps. Everything here is best effort: without a spare a function is started from nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from accelvisor.daemon import files, function_link
from accelvisor.daemon.function_link import Link
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.supervisor import Supervisor
from accelvisor.errors import AccelvisorError, UnavailableError
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)

#: Seconds after a function was created until the next spare is started: whoever makes several in a
#: row shall not wait for processors that spares are warming up on.
REFILL_S = 0.2
#: Seconds before another try after a spare did not come up; doubled each time, up to the last.
RETRY_S = (1.0, 300.0)
#: Seconds that a creation waits at most for a spare that is coming up.
COMING_S = 2.0
#: Seconds that one which is coming up gets when the daemon ends.
STOP_S = 3.0


class Spares:
    """Keeps ``count`` of them."""

    def __init__(
        self, paths: Paths, supervisor: Supervisor, new_uuid: Callable[[], str], count: int
    ) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._new_uuid = new_uuid
        self._count = count
        self._links: deque[tuple[str, Link]] = deque()
        self._taken: dict[str, Link] = {}
        self._wanted = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._keeping: asyncio.Task[None] | None = None
        #: The one that is coming up.
        self._coming: asyncio.Task[Link] | None = None
        self._started: set[str] = set()  # what stop must look after
        self._clearing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to keep spares."""
        if self._count:
            self._wanted.set()
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    @property
    def ready(self) -> int:
        """How many there are."""
        return sum(link.open for _, link in self._links)

    async def stop(self) -> None:
        """End them all."""
        self._hold()
        coming = self._coming
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        if coming is not None:
            # A start that is cut off in the middle leaves a process that nobody knows.
            await asyncio.wait((coming,), timeout=STOP_S)
            coming.cancel()
            (link,) = await asyncio.gather(coming, return_exceptions=True)
            if isinstance(link, Link):
                link.close()
        for _, link in self._links:
            link.close()
        self._links.clear()
        await asyncio.gather(*map(self._clear, sorted(self._started)), *self._clearing)

    async def take(self) -> str | None:
        """The UUID of a spare for the function that is about to be created; None without one. One
        that is just coming up is waited for: it is ahead of any that would be started now.
        """
        self._hold()
        if not self._links and self._coming is not None:
            await asyncio.wait((self._coming,), timeout=COMING_S)
            await asyncio.sleep(0)  # the keeper comes first
        while self._links:
            uuid, link = self._links.popleft()
            if link.open:
                self._taken[uuid] = link
                return uuid
            link.close()
            LOG.warning("spare %s has ended by itself", uuid)
            clearing = asyncio.get_running_loop().create_task(self._clear(uuid))
            self._clearing.add(clearing)
            clearing.add_done_callback(self._clearing.discard)
        return None

    def give_back(self, uuid: str) -> None:
        """The function will not be created."""
        link = self._taken.pop(uuid, None)
        if link is not None:
            self._links.append((uuid, link))

    async def become(self, uuid: str, spec: Mapping[str, object], memory_bytes: int) -> bool:
        """Make the spare that was taken the function of ``spec``. False when there is none, or it
        does not do it: then nothing is left of it, and the function can be started as usual.
        """
        link = self._taken.pop(uuid, None)
        if link is None:
            return False
        self._started.discard(uuid)
        try:
            await self._supervisor.allow(uuid, memory_bytes)
            await link.call("become", {"spec": dict(spec)})
            return True
        except AccelvisorError as error:
            LOG.warning("spare %s did not become a function: %s", uuid, error.message)
            with suppress(AccelvisorError):
                await self._supervisor.stop(uuid)
            return False
        finally:
            link.close()

    def refill(self) -> None:
        """A spare may be missing: start it once nothing was created for a moment."""
        self._hold()
        if self._keeping is not None:
            self._timer = asyncio.get_running_loop().call_later(REFILL_S, self._wanted.set)

    def _hold(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _keep(self) -> None:
        pause, longest = RETRY_S
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while len(self._links) < self._count:
                uuid = self._new_uuid()
                self._coming = asyncio.get_running_loop().create_task(self._make(uuid))
                try:
                    self._links.append((uuid, await asyncio.shield(self._coming)))
                    pause = RETRY_S[0]
                except Exception as error:
                    # Not worth more than a line, whatever it is: functions are made without.
                    said = error.message if isinstance(error, AccelvisorError) else repr(error)
                    LOG.warning("no spare function process: %s", said)
                    await self._clear(uuid)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, longest)
                finally:
                    self._coming = None

    async def _make(self, uuid: str) -> Link:
        paths = self._paths.function(uuid)
        self._started.add(uuid)
        files.write(
            paths, {"spare": True, "uuid": uuid, "holder_socket": str(paths.holder_socket)}
        )
        await self._supervisor.start(uuid)
        loop = asyncio.get_running_loop()
        end = loop.time() + LIMITS.function_ready_s
        while True:
            try:
                return await function_link.link(paths.holder_socket)
            except UnavailableError:
                if loop.time() > end:
                    raise
            await asyncio.sleep(0.02)

    async def _clear(self, uuid: str) -> None:
        self._started.discard(uuid)
        try:
            await self._supervisor.stop(uuid)
            files.sweep(self._paths.function(uuid))
        except AccelvisorError as error:
            LOG.warning("spare %s is left to the next start: %s", uuid, error.message)
