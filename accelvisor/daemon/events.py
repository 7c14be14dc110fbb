"""Events to those who watch: each watcher has a bounded queue; who falls behind is told so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from accelvisor.daemon.store import EventRecord
from accelvisor.errors import UnavailableError

#: Events that may wait for one watcher.
QUEUED = 1024


class Watcher:
    """One reader of the flow."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[EventRecord] = asyncio.Queue(QUEUED)
        self._lost = False

    def offer(self, record: EventRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except asyncio.QueueFull:
            self._lost = True

    async def next(self, patience_s: float) -> EventRecord | None:
        """The next event; None when none came within ``patience_s`` seconds.

        Raises:
            UnavailableError: ``events-lost``: it did not read fast enough.
        """
        if self._lost:
            raise UnavailableError(
                f"more than {QUEUED} events waited for this reader, the newest were lost",
                code="events-lost",
                where="events",
                hint="watch again with the id of the last event that you saw",
            )
        try:
            async with asyncio.timeout(patience_s):
                return await self._queue.get()
        except TimeoutError:
            return None


class EventHub:
    """Hands each recorded event to all watchers."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()

    def publish(self, record: EventRecord) -> None:
        for watcher in self._watchers:
            watcher.offer(record)

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
