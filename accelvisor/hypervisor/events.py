"""Domain events as plain records, across restarts of libvirt.

A subscription has a connection and a thread of its own. libvirt calls back in its event loop's
thread; the records go through a queue, so a slow subscriber never holds libvirt up, and they arrive
in order. Losing libvirt is an event, too (DISCONNECTED): what happened meanwhile is not told again,
so a subscriber lists the domains after each CONNECTED.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from accelvisor.hypervisor import binding
from accelvisor.hypervisor.port import DomainEvent, DomainEventKind

logger = logging.getLogger(__name__)

#: Between two tries to reach libvirt: from the first to the last, doubling (seconds).
RETRY_S = (0.25, 8.0)

_Kind = DomainEventKind
#: virDomainEventType in libvirt's order, with the words of its details (libvirt-domain.h).
_LIFECYCLE: tuple[tuple[DomainEventKind | None, tuple[str, ...]], ...] = (
    (_Kind.DEFINED, ("added", "updated", "renamed", "from-snapshot")),
    (_Kind.UNDEFINED, ("removed", "renamed")),
    (_Kind.STARTED, ("booted", "migrated", "restored", "from-snapshot", "wakeup", "recovered")),
    (
        _Kind.SUSPENDED,
        (
            "paused",
            "migrated",
            "io-error",
            "watchdog",
            "restored",
            "from-snapshot",
            "api-error",
            "postcopy",
            "postcopy-failed",
            "guest-shutdown",
        ),
    ),
    (
        _Kind.RESUMED,
        ("unpaused", "migrated", "from-snapshot", "postcopy", "postcopy-failed"),
    ),
    (
        _Kind.STOPPED,
        ("shutdown", "destroyed", "crashed", "migrated", "saved", "failed", "from-snapshot"),
    ),
    (None, ()),  # shutdown: the guest powered off, STOPPED follows at once
    (_Kind.SUSPENDED, ("pm-memory", "pm-disk")),
    (_Kind.CRASHED, ("panicked", "crash-loaded")),
)


def lifecycle(event: int, detail: int) -> tuple[DomainEventKind, str] | None:
    """Kind and detail of a lifecycle event; None for one that says nothing new. Numbers of a newer
    libvirt come out as ``unknown-N``.
    """
    if not 0 <= event < len(_LIFECYCLE):
        return None
    kind, words = _LIFECYCLE[event]
    if kind is None:
        return None
    return kind, words[detail] if 0 <= detail < len(words) else f"unknown-{detail}"


class EventSubscription:
    """See :class:`accelvisor.hypervisor.port.Subscription`. Starts at once."""

    def __init__(self, connect: Callable[[], Any], callback: Callable[[DomainEvent], None]) -> None:
        """``connect`` opens a new connection; it raises AccelvisorError when it cannot."""
        self._connect = connect
        self._callback = callback
        self._queue: queue.SimpleQueue[DomainEvent | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="domain-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop it and join its thread. Idempotent; may be called from the callback."""
        self._stop.set()
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        wait_s = RETRY_S[0]
        told = False
        while not self._stop.is_set():
            try:
                held = _Held(self._connect, self._queue)
            except Exception as error:
                # Whatever it is, a daemon that stays deaf for good would be worse.
                if not told:
                    logger.warning("no domain events: %s", error)
                    told = True
                self._stop.wait(wait_s)
                wait_s = min(wait_s * 2, RETRY_S[1])
                continue
            wait_s, told = RETRY_S[0], False
            try:
                self._deliver(DomainEvent(_Kind.CONNECTED))
                self._pump()
            finally:
                held.close()
            self._deliver(DomainEvent(_Kind.DISCONNECTED))
            self._stop.wait(wait_s)

    def _pump(self) -> None:
        """Deliver until the connection breaks or the subscription is closed."""
        while not self._stop.is_set():
            event = self._queue.get()
            if event is None or event.kind is _Kind.DISCONNECTED:
                return
            self._deliver(event)

    def _deliver(self, event: DomainEvent) -> None:
        if self._stop.is_set():
            return
        try:
            self._callback(event)
        except Exception:
            logger.exception("a subscriber to domain events failed at %s", event)


class _Held:
    """One connection with its callbacks; puts records into the queue until closed."""

    def __init__(
        self, connect: Callable[[], Any], into: queue.SimpleQueue[DomainEvent | None]
    ) -> None:
        binding.EVENT_LOOP.hold()
        try:
            self._lv = binding.libvirt()
            # Callbacks of a connection that was given up may still be on their way.
            self._open = True
            self._put = into.put
            self._connection = connect()
            self._ids: list[int] = []
            try:
                self._register()
            except BaseException:
                self._connection.close()
                raise
        except BaseException:
            binding.EVENT_LOOP.release()
            raise

    def close(self) -> None:
        self._open = False
        for identifier in self._ids:
            self._try(partial(self._connection.domainEventDeregisterAny, identifier))
        self._try(self._deregister_monitor)
        self._try(self._connection.unregisterCloseCallback)
        self._try(self._connection.close)
        binding.EVENT_LOOP.release()

    def _register(self) -> None:
        lv, connection = self._lv, self._connection
        # A local driver such as test:/// has neither a socket to watch nor keep-alive.
        self._try(lambda: connection.registerCloseCallback(self._closed, None))
        self._try(lambda: connection.setKeepAlive(5, 3))
        for event, function in (
            (lv.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._on_lifecycle),
            (lv.VIR_DOMAIN_EVENT_ID_REBOOT, self._on_reboot),
            (lv.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, self._on_device_removed),
        ):
            self._ids.append(connection.domainEventRegisterAny(None, event, function, None))
        self._monitor_id: int | None = None
        self._try(self._register_monitor)

    def _register_monitor(self) -> None:
        """libvirt tells of no device that it does not know, which functions are: QEMU's own event
        does. Other drivers (test:///) have no monitor.
        """
        register = import_module("libvirt_qemu").qemuMonitorEventRegister
        self._monitor_id = register(
            self._connection, None, "DEVICE_DELETED", self._on_device_deleted, None
        )

    def _deregister_monitor(self) -> None:
        if self._monitor_id is not None:
            deregister = import_module("libvirt_qemu").qemuMonitorEventDeregister
            deregister(self._connection, self._monitor_id)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except self._lv.libvirtError as error:
            logger.debug("libvirt: %s", error)

    def _event(self, kind: DomainEventKind, domain: Any, detail: str = "") -> None:
        if self._open:
            self._put(DomainEvent(kind, domain.name(), domain.UUIDString(), detail))

    def _closed(self, _connection: Any, _reason: int, _opaque: object) -> None:
        if self._open:
            self._put(DomainEvent(_Kind.DISCONNECTED))

    def _on_lifecycle(
        self, _connection: Any, domain: Any, event: int, detail: int, _opaque: object
    ) -> None:
        found = lifecycle(event, detail)
        if found is not None:
            self._event(found[0], domain, found[1])

    def _on_reboot(self, _connection: Any, domain: Any, _opaque: object) -> None:
        self._event(_Kind.REBOOTED, domain)

    def _on_device_removed(
        self, _connection: Any, domain: Any, device: str, _opaque: object
    ) -> None:
        self._event(_Kind.DEVICE_REMOVED, domain, device)

    def _on_device_deleted(
        self,
        _connection: Any,
        domain: Any,
        _event: str,
        _seconds: int,
        _micros: int,
        details: str,
        _opaque: object,
    ) -> None:
        try:
            device = json.loads(details).get("device", "")
        except (ValueError, AttributeError):
            return
        if str(device).startswith("accel-"):  # of all others libvirt tells itself
            self._event(_Kind.DEVICE_REMOVED, domain, str(device))
