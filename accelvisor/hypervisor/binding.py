"""The way to libvirt's Python binding: lazy import, its event loop, its errors as ours.

libvirt-python has no type information, so what comes out of here is ``Any``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from accelvisor.errors import (
    AccelvisorError,
    ConfigError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    PermissionDenied,
    SystemFailure,
    UnavailableError,
)

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_quiet = False

#: virErrorNumber -> (class, code, hint); by name, since an older libvirt lacks some.
_ERRORS: dict[str, tuple[type[AccelvisorError], str, str]] = {
    "VIR_ERR_NO_DOMAIN": (NotFoundError, "domain-not-found", "accelctl vm list shows them"),
    "VIR_ERR_DOM_EXIST": (ConflictError, "domain-exists", "choose another name or UUID"),
    "VIR_ERR_OPERATION_INVALID": (ConflictError, "domain-state", ""),
    "VIR_ERR_XML_ERROR": (ConfigError, "domain-xml", ""),
    "VIR_ERR_XML_DETAIL": (ConfigError, "domain-xml", ""),
    "VIR_ERR_XML_INVALID_SCHEMA": (ConfigError, "domain-xml", ""),
    "VIR_ERR_NO_NAME": (ConfigError, "domain-xml", ""),
    "VIR_ERR_NO_OS": (ConfigError, "domain-xml", ""),
    "VIR_ERR_OS_TYPE": (ConfigError, "domain-xml", ""),
    "VIR_ERR_NO_KERNEL": (ConfigError, "domain-xml", ""),
    "VIR_ERR_NO_ROOT": (ConfigError, "domain-xml", ""),
    "VIR_ERR_NO_SOURCE": (ConfigError, "domain-xml", ""),
    "VIR_ERR_NO_TARGET": (ConfigError, "domain-xml", ""),
    "VIR_ERR_CONFIG_UNSUPPORTED": (ConfigError, "domain-xml", "accelctl doctor"),
    "VIR_ERR_NO_NETWORK": (NotFoundError, "network-not-found", "virsh net-list --all"),
    "VIR_ERR_HOOK_SCRIPT_FAILED": (ConflictError, "hook-refused", ""),
    "VIR_ERR_OPERATION_DENIED": (PermissionDenied, "libvirt-denied", ""),
    "VIR_ERR_AUTH_FAILED": (PermissionDenied, "libvirt-denied", ""),
    "VIR_ERR_AUTH_CANCELLED": (PermissionDenied, "libvirt-denied", ""),
    "VIR_ERR_AUTH_UNAVAILABLE": (PermissionDenied, "libvirt-denied", ""),
    "VIR_ERR_ACCESS_DENIED": (PermissionDenied, "libvirt-denied", ""),
    "VIR_ERR_OPERATION_TIMEOUT": (DeadlineError, "libvirt-deadline", ""),
    "VIR_ERR_OPERATION_ABORTED": (ConflictError, "migration-cancelled", ""),
    "VIR_ERR_MIGRATE_UNSAFE": (
        ConflictError, "migration-unsafe", "its disks must lie on storage that both hosts share",
    ),
    "VIR_ERR_AGENT_UNRESPONSIVE": (DeadlineError, "guest-agent-deadline", ""),
}
_LOST = ("VIR_ERR_NO_CONNECT", "VIR_ERR_RPC", "VIR_ERR_INVALID_CONN")


def libvirt() -> Any:
    """The module ``libvirt``; UnavailableError (``libvirt-unavailable``) without it."""
    global _quiet
    try:
        module = import_module("libvirt")
    except ImportError as error:
        raise UnavailableError(
            f"libvirt's Python binding is not installed ({error})",
            code="libvirt-unavailable",
            where="libvirt",
            hint="apt install python3-libvirt libvirt-daemon-system",
        ) from error
    if not _quiet:
        # Every error reaches the caller as an exception; libvirt would print it, too.
        module.registerErrorHandler(lambda _context, _error: None, None)
        _quiet = True
    return module


def monitor_command(domain: Any, command: str) -> str:
    """virDomainQemuMonitorCommand: JSON in, JSON out."""
    module = import_module("libvirt_qemu")
    return str(module.qemuMonitorCommand(domain, command, 0))


def lost(error: Any) -> bool:
    """The error says that the connection is gone, not that libvirt refused."""
    lv = libvirt()
    code, domain = error.get_error_code(), error.get_error_domain()
    if code in {getattr(lv, name) for name in _LOST if hasattr(lv, name)}:
        return True
    transport = {lv.VIR_FROM_RPC, lv.VIR_FROM_REMOTE}
    return domain in transport and code in {lv.VIR_ERR_INTERNAL_ERROR, lv.VIR_ERR_SYSTEM_ERROR}


def translate(error: Any, where: str) -> AccelvisorError:
    """The error of our tree for a ``libvirtError``, with libvirt's own text."""
    text = error.get_error_message() or str(error)
    lv = libvirt()
    if lost(error):
        return unavailable(text)
    for name, (kind, code, hint) in _ERRORS.items():
        if getattr(lv, name, None) == error.get_error_code():
            return kind(text, code=code, where=where, hint=hint)
    return SystemFailure(text, code="libvirt-failed", where=where, hint="journalctl -u libvirtd")


def unavailable(text: str) -> UnavailableError:
    """libvirt can't be reached."""
    return UnavailableError(
        f"libvirt is not reachable: {text}",
        code="libvirt-unavailable",
        where="libvirt",
        hint="systemctl status libvirtd",
    )


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Within it, a ``libvirtError`` becomes an error of our tree (the original is its cause)."""
    lv = libvirt()
    try:
        yield
    except lv.libvirtError as error:
        raise translate(error, where) from error


class EventLoop:
    """libvirt's default event loop in a thread, as long as somebody holds it.

    It belongs to the process, not to a connection, and has to be registered before the first
    connection that wants events (https://libvirt.org/html/libvirt-libvirt-event.html).
    """

    def __init__(self) -> None:
        self._holders = 0
        self._registered = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self) -> None:
        """Start it, or count one more holder."""
        lv = libvirt()
        with _lock:
            if not self._registered:
                lv.virEventRegisterDefaultImpl()
                self._registered = True
            self._holders += 1
            if self._holders == 1:
                self._stop.clear()
                self._thread = threading.Thread(
                    target=self._run, args=(lv,), name="libvirt-events", daemon=True
                )
                self._thread.start()

    def release(self) -> None:
        """Count one holder less; the last one stops the thread and waits for it."""
        lv = libvirt()
        with _lock:
            self._holders -= 1
            if self._holders:
                return
            thread, self._thread = self._thread, None
            self._stop.set()
            # A due timer takes the loop out of its poll.
            timer = lv.virEventAddTimeout(0, lambda *_: None, None)
            if thread is not None:
                thread.join()
            lv.virEventRemoveTimeout(timer)

    def _run(self, lv: Any) -> None:
        while not self._stop.is_set():
            try:
                lv.virEventRunDefaultImpl()
            except lv.libvirtError:
                logger.exception("libvirt's event loop failed")
                self._stop.wait(0.5)


EVENT_LOOP = EventLoop()
