"""Each domain's two sockets: the bus that QEMU asks when it saves or loads, the private monitor.

They are there while the domain has a function. A domain whose QEMU found them gone (a restart of
the daemon) connects its monitor by itself; over that it is made to connect the bus again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelvisor.errors import AccelvisorError
from accelvisor.hypervisor.companions import Companions
from accelvisor.hypervisor.private import Private
from accelvisor.hypervisor.qmp import Event
from accelvisor.hypervisor.vmstate import Bus, Handler

LOG = logging.getLogger(__name__)
#: How long a QEMU gets to connect its bus by itself before it is told to.
_OWN_S = 1.0


@dataclass
class Pair:
    """Of one domain."""

    bus: Bus
    monitor: Private
    status: str | None = None  # what QEMU last said; None: nothing yet
    fresh: bool = False  # said since it connected

    async def close(self) -> None:
        await self.bus.close()
        await self.monitor.close()


class Doors:
    """Of all domains.

    Args:
        run: accelvisord's run directory.
        group: gid of QEMU, None to leave the directory's.
        on_event: (domain UUID, event name): STOP, RESUME, SHUTDOWN, RESET, and LOST when the
            monitor's QEMU went.
    """

    def __init__(
        self,
        run: Path,
        handler: Handler,
        on_event: Callable[[str, str], None],
        group: int | None = None,
    ) -> None:
        self._run = run
        self._handler = handler
        self._on_event = on_event
        self._group = group
        self._pairs: dict[str, Pair] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self, domain: str) -> Pair:
        """The domain's sockets, made when they are not there. Raises SystemFailure."""
        async with self._opening.setdefault(domain, asyncio.Lock()):
            pair = self._pairs.get(domain)
            if pair is None:
                paths = Companions.of(self._run, domain)
                pair = Pair(
                    Bus(paths.bus, domain, self._handler),
                    Private(paths.monitor, domain, self._event, on_connect=self._connected),
                )
                await pair.bus.start(group=self._group)
                try:
                    await pair.monitor.start(group=self._group)
                except BaseException:
                    await pair.bus.close()
                    raise
                self._pairs[domain] = pair
            return pair

    def find(self, domain: str) -> Pair | None:
        """The domain's sockets, if they are there."""
        return self._pairs.get(domain)

    def status(self, domain: str) -> str | None:
        """What the domain's QEMU does, as it said last: "running", "paused", "inmigrate" and so
        on. None: it has not said so yet.
        """
        pair = self._pairs.get(domain)
        known = pair is not None and pair.monitor.connected and pair.fresh
        return pair.status if pair is not None and known else None

    def loaded(self, domain: str) -> None:
        """Its QEMU has loaded a VM, and does not run it yet: it tells nobody."""
        pair = self._pairs.get(domain)
        if pair is not None:
            pair.status = "paused"

    async def keep(self, wanted: Callable[[], Iterable[str]]) -> None:
        """Sockets for exactly these domains. It is asked for each one again before its sockets are
        taken away: meanwhile somebody may have opened them."""
        for domain in list(self._pairs):
            async with self._opening.setdefault(domain, asyncio.Lock()):
                if domain in self._pairs and domain not in set(wanted()):
                    await self._pairs.pop(domain).close()
        for domain in set(wanted()):
            try:
                await self.open(domain)
            except AccelvisorError as error:
                LOG.error("domain %s: %s", domain, error.message)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pair in self._pairs.values():
            await pair.close()
        self._pairs.clear()

    def _event(self, domain: str, event: Event) -> None:
        pair = self._pairs.get(domain)
        if pair is not None and event.name in ("STOP", "RESUME"):
            pair.status, pair.fresh = "running" if event.name == "RESUME" else "paused", True
        if event.name == "MIGRATION" and event.data.get("status") != "setup":
            return  # what matters is that the VM's memory begins to be copied
        self._on_event(domain, event.name)

    def _connected(self, domain: str) -> None:
        pair = self._pairs.get(domain)
        if pair is not None:
            pair.fresh = False
        task = asyncio.get_running_loop().create_task(self._look(domain))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, domain: str) -> None:
        """A QEMU connected its monitor: events may have been missed, and its bus may be gone."""
        pair = self._pairs.get(domain)
        if pair is None:
            return
        try:
            status = await pair.monitor.execute("query-status")
            running = bool(status.get("running"))
            if pair.status is not None and running != (pair.status == "running"):
                self._on_event(domain, "RESUME" if running else "STOP")
            pair.status, pair.fresh = str(status.get("status")), True
            await asyncio.sleep(_OWN_S)
            if not pair.bus.connected and pair.monitor.connected:
                await pair.monitor.reattach(Companions.of(self._run, domain).bus)
        except AccelvisorError as error:
            LOG.warning("domain %s: %s", domain, error.message)
