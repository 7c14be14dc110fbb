"""The daemon's side of the hypervisor port: blocking calls in threads, events into the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

from accelvisor.errors import AccelvisorError, DeadlineError, NotFoundError, UnavailableError
from accelvisor.hypervisor.port import (
    Domain,
    DomainEvent,
    DomainEventKind,
    DomainsPort,
    DomainState,
    Subscription,
)
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

#: Verbs that may block at once. Those that wait for a guest, for minutes if need be, have threads
#: of their own: they must not keep the functions from following the other domains.
THREADS = 4
PATIENT_THREADS = 16
#: How long the end of the connection may take when the daemon ends (seconds).
STOP_S = 5.0
#: How long a description of the host waits for libvirt's version (seconds).
VERSION_S = 2.0


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


class DomainsLink(Generic[S]):
    """Calls the port's verbs from the loop, and looks again at all domains after each event.

    Args:
        uri: of libvirt.
        snapshot: what ``on_look`` compares with, taken before libvirt is asked.
        on_look: given that and all domains, after the start and whenever something happened to one.
        on_event: given each event, before the look that it causes.
        loader: makes the port.
        deadline_s: for each call, so that a libvirt that hangs does not hang us.
        patience_s: for those that wait for a guest.
    """

    def __init__(
        self,
        uri: str,
        snapshot: Callable[[], S],
        on_look: Callable[[S, Sequence[Domain]], Awaitable[None]],
        on_event: Callable[[DomainEvent], Awaitable[None]],
        loader: Callable[[str], DomainsPort] = load,
        *,
        deadline_s: float = LIMITS.libvirt_call_s,
        patience_s: float = LIMITS.libvirt_patient_s,
    ) -> None:
        self._uri = uri
        self._snapshot = snapshot
        self._on_look = on_look
        self._on_event = on_event
        self._loader = loader
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="domains")
        self._patient = ThreadPoolExecutor(PATIENT_THREADS, thread_name_prefix="patient")
        self._port: DomainsPort | None = None
        self._loading = asyncio.Lock()
        self._events: asyncio.Queue[DomainEvent] = asyncio.Queue()
        self._subscription: asyncio.Future[Subscription] | None = None
        self._task: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._later: set[asyncio.Task[None]] = set()
        self._version: str | None = None

    def start(self) -> None:
        """Begin to look, subscribe and follow. An unreachable libvirt is no error: it may come
        later. Nothing waits for it: libvirt itself may be waiting for us, in its hook."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
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

        self._subscription = loop.run_in_executor(self._threads, lambda: port.subscribe(deliver))
        await asyncio.shield(self._subscription)
        await self._guarded(self.look())
        await self._follow()

    async def stop(self) -> None:
        """End the subscription and the threads; idempotent."""
        tasks = [*self._later, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):  # a libvirt that hangs does not keep us
            async with asyncio.timeout(STOP_S):
                if self._subscription is not None:
                    subscription = await self._subscription
                    await loop.run_in_executor(self._threads, subscription.close)
                    self._subscription = None
                if self._port is not None:
                    await loop.run_in_executor(self._threads, self._port.close)
                    self._port = None
        for pool in (self._threads, self._patient):
            pool.shutdown(wait=False, cancel_futures=True)

    async def call(
        self,
        verb: Callable[[DomainsPort], T],
        *,
        patient: bool = False,
        deadline_s: float | None = None,
    ) -> T:
        """Run ``verb(port)`` in a thread; a ``patient`` one waits for a guest or for QEMU, for
        ``deadline_s`` where that is given (infinity for as long as it takes).

        Raises:
            UnavailableError: ``libvirt-unavailable``; and whatever the verb raises.
            DeadlineError: ``libvirt-deadline``: libvirt hangs. The thread is lost until it answers.
        """
        port = await self._get()
        pool = self._patient if patient else self._threads
        work = asyncio.get_running_loop().run_in_executor(pool, verb, port)
        seconds = self._patience_s if patient else self._deadline_s
        if deadline_s is not None:
            seconds = deadline_s
        waited = None if seconds == math.inf else seconds
        done, _ = await asyncio.wait((work,), timeout=waited)
        if done:
            return await work
        work.cancel()  # takes it out of the queue, if it still waits there
        raise DeadlineError(
            f"libvirt did not answer within {seconds:g} s",
            code="libvirt-deadline",
            where="libvirt",
            hint="look at libvirtd (systemctl status libvirtd), or restart it",
        )

    async def version(self) -> str | None:
        """libvirt's and QEMU's version; None when it is not there or does not say at once."""
        if self._version is None:
            try:
                async with asyncio.timeout(VERSION_S):
                    self._version = await self.call(lambda port: port.version())
            except (AccelvisorError, TimeoutError):
                return None
        return self._version

    async def look(self) -> None:
        """Show all domains to ``on_look``; one look at a time, so that none undoes a newer one."""
        async with self._looking:
            before = self._snapshot()
            try:
                domains = await self.call(lambda port: port.list())
            except AccelvisorError as error:
                LOG.warning("cannot list domains: %s", error.message)
                return
            await self._on_look(before, domains)

    def look_later(self, *seconds: float) -> None:
        """Look again after each of these times, for what libvirt tells no event of."""

        async def one(pause: float) -> None:
            await asyncio.sleep(pause)
            await self._guarded(self.look())

        for pause in seconds:
            task = asyncio.get_running_loop().create_task(one(pause))
            self._later.add(task)
            task.add_done_callback(self._later.discard)

    async def state(self, domain: str) -> str:
        """What a domain does now: "running", "paused", or "gone" for all else."""
        try:
            found = await self.call(lambda port: port.get(domain))
        except AccelvisorError:
            return "gone"
        if found.state in (DomainState.RUNNING, DomainState.BLOCKED):
            return "running"
        return "paused" if found.state.active else "gone"

    async def leaves(self, domain: str) -> bool:
        """Whether somebody here migrates a domain away. A host that is configured without libvirt
        has nobody to ask: there whoever is trusted may.

        Raises:
            AccelvisorError: it is not known.
        """
        if not self._uri:
            return True
        try:
            return await self.call(lambda port: port.leaves(domain))
        except NotFoundError:
            return False

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
                if event.kind is DomainEventKind.DISCONNECTED:
                    self._version = None  # the next libvirt may be a newer one
                await self._guarded(self._on_event(event))
            if any(event.kind is not DomainEventKind.DISCONNECTED for event in batch):
                await self._guarded(self.look())

    async def _guarded(self, work: Awaitable[None]) -> None:
        """One that fails must not make us deaf to all that follow."""
        try:
            await work
        except AccelvisorError as error:
            LOG.warning("following the domains: %s", error.message)
        except Exception:
            LOG.exception("following the domains failed; going on")
