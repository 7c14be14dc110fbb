"""The daemon's side of the hypervisor port: blocking calls in threads, events into the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from accelvisor.errors import AccelvisorError, UnavailableError
from accelvisor.hypervisor.port import (
    Domain,
    DomainEvent,
    DomainEventKind,
    DomainsPort,
    Subscription,
)

LOG = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

#: Verbs that may block at once. Those that wait for a guest, for minutes if need be, have threads
#: of their own: they must not keep the functions from following the other domains.
THREADS = 4
PATIENT_THREADS = 16


def load(uri: str) -> DomainsPort:
    """libvirt's implementation of the port. Imports libvirt's bindings: call it in a thread.

    Raises:
        UnavailableError: ``libvirt-unavailable``.
    """
    if not uri:
        raise UnavailableError(
            "this host is configured without libvirt",
            code="libvirt-unavailable",
            where="config",
            hint="set [libvirt] uri in accelvisor.toml",
        )
    try:
        from accelvisor.hypervisor.domains import Domains
    except ImportError as error:
        raise UnavailableError(
            f"libvirt's Python bindings are missing: {error}",
            code="libvirt-unavailable",
            where="libvirt",
            hint="apt install python3-libvirt, or pip install accelvisor[host]",
        ) from error
    return Domains(uri)


class DomainsLink:
    """Calls the port's verbs from the loop, and looks again at all domains after each event.

    Args:
        uri: of libvirt.
        on_look: given all domains after the start and whenever something happened to one.
        on_event: given each event, before the look that it causes.
        loader: makes the port.
    """

    def __init__(
        self,
        uri: str,
        on_look: Callable[[Sequence[Domain]], Awaitable[None]],
        on_event: Callable[[DomainEvent], Awaitable[None]],
        loader: Callable[[str], DomainsPort] = load,
    ) -> None:
        self._uri = uri
        self._on_look = on_look
        self._on_event = on_event
        self._loader = loader
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="domains")
        self._patient = ThreadPoolExecutor(PATIENT_THREADS, thread_name_prefix="patient")
        self._port: DomainsPort | None = None
        self._loading = asyncio.Lock()
        self._events: asyncio.Queue[DomainEvent] = asyncio.Queue()
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()

    async def start(self) -> None:
        """Look once, subscribe, follow. An unreachable libvirt is no error: it may come later."""
        try:
            port = await self._get()
        except UnavailableError as error:
            LOG.warning("no domains: %s (%s)", error.message, error.hint)
            return
        loop = asyncio.get_running_loop()

        def deliver(event: DomainEvent) -> None:
            try:
                loop.call_soon_threadsafe(self._events.put_nowait, event)
            except RuntimeError:
                pass  # the loop has ended, and with it the interest in events

        self._subscription = await loop.run_in_executor(
            self._threads, lambda: port.subscribe(deliver)
        )
        self._task = loop.create_task(self._follow())
        await self.look()

    async def stop(self) -> None:
        """End the subscription and the threads; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        loop = asyncio.get_running_loop()
        if self._subscription is not None:
            await loop.run_in_executor(self._threads, self._subscription.close)
            self._subscription = None
        if self._port is not None:
            await loop.run_in_executor(self._threads, self._port.close)
            self._port = None
        for pool in (self._threads, self._patient):
            pool.shutdown(wait=False, cancel_futures=True)

    async def call(self, verb: Callable[[DomainsPort], T], *, patient: bool = False) -> T:
        """Run ``verb(port)`` in a thread; a ``patient`` one waits for a guest.

        Raises:
            UnavailableError: ``libvirt-unavailable``; and whatever the verb raises.
        """
        port = await self._get()
        pool = self._patient if patient else self._threads
        return await asyncio.get_running_loop().run_in_executor(pool, verb, port)

    async def look(self) -> None:
        """Show all domains to ``on_look``; one look at a time, so that none undoes a newer one."""
        async with self._looking:
            try:
                domains = await self.call(lambda port: port.list())
            except AccelvisorError as error:
                LOG.warning("cannot list domains: %s", error.message)
                return
            await self._on_look(domains)

    async def _get(self) -> DomainsPort:
        async with self._loading:
            if self._port is None:
                loop = asyncio.get_running_loop()
                self._port = await loop.run_in_executor(self._threads, self._loader, self._uri)
            return self._port

    async def _follow(self) -> None:
        while True:
            batch = [await self._events.get()]
            while not self._events.empty():
                batch.append(self._events.get_nowait())
            for event in batch:
                try:
                    await self._on_event(event)
                except AccelvisorError as error:
                    LOG.warning("event of domain %s: %s", event.domain, error.message)
            if any(event.kind is not DomainEventKind.DISCONNECTED for event in batch):
                await self.look()
