"""Domains over libvirt: :class:`accelvisor.hypervisor.port.DomainsPort` for real.

Each verb finds a working connection (and makes a new one when libvirtd was restarted), asks
libvirt, and translates its errors. What is to be changed in an XML or plugged where is decided
elsewhere, in :mod:`~accelvisor.hypervisor.xml` and :mod:`~accelvisor.hypervisor.hotplug`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid as uuids
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
)
from accelvisor.hypervisor import binding, migrating, xml
from accelvisor.hypervisor.builder import build
from accelvisor.hypervisor.capabilities import kvm_verdict
from accelvisor.hypervisor.entries import Ownership
from accelvisor.hypervisor.events import EventSubscription
from accelvisor.hypervisor.live import LiveDomain
from accelvisor.hypervisor.port import (
    Attachment,
    AttachRequest,
    Domain,
    DomainEvent,
    DomainEventKind,
    DomainOptions,
    DomainState,
    Job,
    MigrateRequest,
    Subscription,
)

logger = logging.getLogger(__name__)

#: virDomainState by number (libvirt-domain.h).
_STATES = (
    DomainState.UNKNOWN,
    DomainState.RUNNING,
    DomainState.BLOCKED,
    DomainState.PAUSED,
    DomainState.SHUTDOWN,
    DomainState.SHUTOFF,
    DomainState.CRASHED,
    DomainState.PMSUSPENDED,
)
#: How often a state is looked at while waiting for it; libvirt answers in well under a millisecond.
_POLL_S = 0.05


class Domains:
    """One libvirt. Thread-safe. Holds libvirt's event loop from the first verb until closed."""

    def __init__(
        self,
        uri: str = "qemu:///system",
        *,
        monitor: Callable[[Any, str], str] = binding.monitor_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is connected yet. ``monitor`` sends one QMP command to a libvirt domain."""
        self.uri = uri
        self._monitor = monitor
        self._clock = clock
        self._lock = threading.Lock()
        self._connection: Any = None
        # One lock a domain (by UUID): who changes a definition reads it under this lock first.
        self._changing: WeakValueDictionary[str, _DomainLock] = WeakValueDictionary()

    # --- connection ------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the connection up. Idempotent; a later verb connects again."""
        with self._lock:
            self._drop()

    def _connect(self) -> Any:
        """A connection that answered just now."""
        lv = binding.libvirt()
        with self._lock:
            if self._connection is not None:
                try:
                    self._connection.getLibVersion()
                    return self._connection
                except lv.libvirtError:
                    self._drop()
            binding.EVENT_LOOP.hold()
            try:
                self._connection = self._open()
            except BaseException:
                binding.EVENT_LOOP.release()
                raise
            return self._connection

    def _open(self) -> Any:
        lv = binding.libvirt()
        try:
            connection = lv.open(self.uri)
        except lv.libvirtError as error:
            raise binding.unavailable(error.get_error_message() or str(error)) from error
        # A libvirtd that hangs ends the connection, and with it the calls that wait. A local driver
        # such as test:/// has no keep-alive.
        with suppress(lv.libvirtError):
            connection.setKeepAlive(5, 3)
        return connection

    def _drop(self) -> None:
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        with suppress(binding.libvirt().libvirtError):
            connection.close()
        binding.EVENT_LOOP.release()

    def version(self) -> str:
        """libvirt's and the hypervisor's version in words."""
        with binding.translated("libvirt"):
            connection = self._connect()
            libvirt, hypervisor = connection.getLibVersion(), connection.getVersion()
            kind = connection.getType()
        return f"libvirt {_dotted(libvirt)}, {kind} {_dotted(hypervisor)}"

    # --- reading ---------------------------------------------------------------------------------

    def list(self) -> Sequence[Domain]:
        """All domains, by name. One that vanishes meanwhile is left out; one that libvirt does not
        describe is there with nothing known of it.
        """
        found = []
        with binding.translated("libvirt"):
            for handle in self._connect().listAllDomains(0):
                name = handle.name()
                try:
                    with binding.translated(name):
                        found.append(_describe(handle))
                except NotFoundError:
                    continue
                except UnavailableError:
                    raise
                except AccelvisorError as error:
                    logger.warning("domain %s: %s", name, error.message)
                    found.append(_unknown(handle))
        return sorted(found, key=lambda domain: domain.name)

    def get(self, domain: str) -> Domain:
        with binding.translated(domain):
            return _describe(self._find(domain))

    def xml(self, domain: str, *, live: bool) -> str:
        with binding.translated(domain):
            handle = self._find(domain)
            if live and not handle.isActive():
                raise _not_running(domain)
            if not live and not handle.isPersistent():
                raise _transient(domain)
            flags = 0 if live else binding.libvirt().VIR_DOMAIN_XML_INACTIVE
            return str(handle.XMLDesc(flags))

    def _find(self, domain: str) -> Any:
        """The libvirt handle, by UUID or name. A UUID is never taken for a name as long as a domain
        has it, so that no domain's name can stand in for another domain.
        """
        connection = self._connect()
        lv = binding.libvirt()
        try:
            return connection.lookupByUUIDString(str(uuids.UUID(domain)))
        except ValueError:
            pass
        except lv.libvirtError as error:
            if error.get_error_code() != lv.VIR_ERR_NO_DOMAIN:
                raise
        return connection.lookupByName(domain)

    def _lock_of(self, handle: Any) -> _DomainLock:
        """Held while its definition (stored or live) is read, changed and written."""
        with self._lock:
            return self._changing.setdefault(handle.UUIDString(), _DomainLock())

    # --- definitions -----------------------------------------------------------------------------

    def define(self, xml: str) -> Domain:
        with binding.translated("domain-xml"):
            return _describe(self._connect().defineXML(xml))

    def domain_xml(self, options: DomainOptions) -> str:
        return build(options, kvm=options.accelerator == "auto" and kvm_verdict().usable)

    def attachment_xml(self, function: str, socket: str) -> str:
        return xml.attachment_xml(function, socket)

    def prepare(self, domain: str, *, hotplug_ports: int, dry_run: bool) -> tuple[Domain, str]:
        with binding.translated(domain):
            handle = self._find(domain)
            if not handle.isPersistent():
                raise _transient(domain)
            with self._lock_of(handle):
                shown = xml.prepare(_shown(handle), spare_ports=hotplug_ports)
                if not dry_run:
                    changed = xml.prepare(_stored(handle), spare_ports=hotplug_ports)
                    self._connect().defineXML(changed)
            return _describe(handle), shown

    def undefine(self, domain: str) -> None:
        with binding.translated(domain):
            handle = self._find(domain)
            lv = binding.libvirt()
            # A domain with UEFI variables can't be undefined without a word about them.
            nvram = "<nvram" in handle.XMLDesc(lv.VIR_DOMAIN_XML_INACTIVE)
            handle.undefineFlags(lv.VIR_DOMAIN_UNDEFINE_NVRAM if nvram else 0)

    # --- life ------------------------------------------------------------------------------------

    def start(self, domain: str) -> Domain:
        return self._do(domain, lambda handle: handle.create(), active=False)

    def destroy(self, domain: str) -> Domain:
        return self._do(domain, lambda handle: handle.destroy(), active=True)

    def suspend(self, domain: str) -> Domain:
        return self._do(domain, lambda handle: handle.suspend(), active=True)

    def resume(self, domain: str) -> Domain:
        return self._do(domain, lambda handle: handle.resume(), active=True)

    def reboot(self, domain: str) -> Domain:
        return self._do(domain, lambda handle: handle.reboot(0), active=True)

    def reset(self, domain: str) -> Domain:
        return self._do(domain, lambda handle: handle.reset(0), active=True)

    def shutdown(self, domain: str, *, deadline_s: float) -> Domain:
        until = self._clock() + deadline_s
        with binding.translated(domain):
            handle = self._find(domain)
            if not handle.isActive():
                raise _not_running(domain)
            handle.shutdown()
            while True:
                found = _after(handle)
                if not found.state.active:
                    return found
                if self._clock() >= until:
                    raise DeadlineError(
                        f"the guest did not power off within {deadline_s:g} s",
                        code="domain-shutdown-deadline",
                        where=domain,
                        hint="its operating system may ignore the power button;"
                        " accelctl vm destroy ends it at once",
                    )
                time.sleep(_POLL_S)

    def _do(self, domain: str, verb: Callable[[Any], object], *, active: bool) -> Domain:
        with binding.translated(domain):
            handle = self._find(domain)
            # Drivers differ in what they call this refusal, so it is made here.
            if active and not handle.isActive():
                raise _not_running(domain)
            if not active and handle.isActive():
                raise ConflictError(
                    "the domain is running already", code="domain-state", where=domain
                )
            verb(handle)
            return _after(handle)

    # --- migration -------------------------------------------------------------------------------

    def migrate(self, request: MigrateRequest) -> None:
        with binding.translated(request.domain):
            handle = self._find(request.domain)
            if not handle.isActive():
                raise _not_running(request.domain)
            migrating.migrate(handle, request)

    def migrate_cancel(self, domain: str) -> None:
        with binding.translated(domain):
            self._find(domain).abortJob()

    def job(self, domain: str) -> Job | None:
        with binding.translated(domain):
            return migrating.job(self._find(domain))

    def leaves(self, domain: str) -> bool:
        with binding.translated(domain):
            return migrating.leaves(self._find(domain))

    # --- functions -------------------------------------------------------------------------------

    def attach(self, request: AttachRequest) -> Attachment:
        uuid = xml.function_uuid(request.function)
        with binding.translated(request.domain):
            handle = self._find(request.domain)
            self._check(handle, request)
            plugged = ("", "")
            with self._lock_of(handle):
                if request.persistent:
                    self._attach_persistent(handle, request, uuid)
                if request.live:
                    try:
                        live = self._live(handle, _whose(request))
                        plugged = live.plug(uuid, request.socket, request.window_bytes)
                    except BaseException:
                        if request.persistent:
                            self._remove_persistent(handle, uuid)
                        raise
            return _attachment(handle, request, uuid, *plugged)

    def _attach_persistent(self, handle: Any, request: AttachRequest, uuid: str) -> None:
        stored = _stored(handle)
        if uuid in {entry.uuid for entry in xml.functions(stored)}:
            raise _attached(request)
        self._connect().defineXML(xml.add(stored, uuid, request.socket, _whose(request)))

    def _remove_persistent(self, handle: Any, uuid: str) -> None:
        """From what is stored now: others may have changed it since, even done this."""
        with suppress(NotFoundError):
            self._connect().defineXML(xml.remove(_stored(handle), uuid))

    def detach(self, request: AttachRequest, *, deadline_s: float) -> Attachment:
        uuid = xml.function_uuid(request.function)
        with binding.translated(request.domain):
            handle = self._find(request.domain)
            self._check(handle, request)
            if request.persistent:
                xml.remove(_stored(handle), uuid)  # refuses before the guest is asked
            if request.live:
                # A guest may take minutes: the domain's other functions do not wait for it.
                self._live(handle).unplug(uuid, deadline_s=deadline_s)
            with self._lock_of(handle):
                if request.live:
                    self._live(handle).forget(uuid)
                if request.persistent:
                    self._remove_persistent(handle, uuid)
            return _attachment(handle, request, uuid)

    def _live(self, handle: Any, whose: Ownership | None = None) -> LiveDomain:
        def monitor(command: str) -> str:
            return self._monitor(handle, command)

        return LiveDomain(handle, monitor, self._clock, whose)

    def _check(self, handle: Any, request: AttachRequest) -> None:
        if not (request.live or request.persistent):
            raise ConflictError(
                "neither the running nor the stored definition is meant",
                code="domain-state",
                where=request.domain,
                hint="say --live, --persistent or both",
            )
        if request.live and not handle.isActive():
            raise _not_running(request.domain)
        if request.persistent and not handle.isPersistent():
            raise _transient(request.domain)

    # --- events ----------------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[DomainEvent], None]) -> Subscription:
        def after_removal(event: DomainEvent) -> None:
            if event.kind is DomainEventKind.DEVICE_REMOVED:
                self._forget_removed(event)
            callback(event)

        return EventSubscription(self._open, after_removal)

    def _forget_removed(self, event: DomainEvent) -> None:
        """A guest let go of a function, maybe long after a detach had given up waiting."""
        prefix, _, function = event.detail.partition("-")
        try:
            uuid = str(uuids.UUID(function)) if prefix == "accel" else None
        except ValueError:
            uuid = None
        if uuid is None:
            return
        try:
            with binding.translated(event.domain):
                handle = self._find(event.uuid)
                with self._lock_of(handle):
                    self._live(handle).forget(uuid)
        except AccelvisorError as error:
            logger.warning("domain %s let go of %s: %s", event.domain, uuid, error.message)


class _DomainLock:
    """A lock that a weak dictionary can hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _shown(handle: Any) -> str:
    """The stored definition without passwords."""
    return str(handle.XMLDesc(binding.libvirt().VIR_DOMAIN_XML_INACTIVE))


def _stored(handle: Any) -> str:
    lv = binding.libvirt()
    # Without SECURE, redefining would lose passwords.
    return str(handle.XMLDesc(lv.VIR_DOMAIN_XML_INACTIVE | lv.VIR_DOMAIN_XML_SECURE))


def _describe(handle: Any) -> Domain:
    lv = binding.libvirt()
    state, memory_kib, _, vcpus, _ = handle.info()
    persistent, active = bool(handle.isPersistent()), bool(handle.isActive())
    live: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    known = True
    try:
        if active:
            live = _named(handle.XMLDesc(0), _in_metadata)
        if persistent:
            stored = _named(handle.XMLDesc(lv.VIR_DOMAIN_XML_INACTIVE), xml.claimed)
    except AccelvisorError as error:
        # Metadata is free text: one odd domain must not hide all others.
        logger.warning("functions of domain %s: %s", handle.name(), error.message)
        known = False
    return Domain(
        name=handle.name(),
        uuid=handle.UUIDString(),
        state=_STATES[state] if state < len(_STATES) else DomainState.UNKNOWN,
        persistent=persistent,
        vcpus=vcpus,
        memory_bytes=memory_kib * 1024,
        live_functions=live,
        persistent_functions=stored,
        functions_known=known,
    )


def _unknown(handle: Any) -> Domain:
    """A domain of which libvirt says nothing but that it is there."""
    state = DomainState.UNKNOWN
    return Domain(handle.name(), handle.UUIDString(), state, False, 0, 0, functions_known=False)


def _named(text: str, reader: Callable[[str], Sequence[str]]) -> tuple[str, ...]:
    # Most domains name nothing of ours, and parsing is most of the cost.
    if xml.NAMESPACE not in text and xml.QEMU_NAMESPACE not in text:
        return ()
    return tuple(reader(text))


def _in_metadata(text: str) -> list[str]:
    return [entry.uuid for entry in xml.functions(text)]


def _after(handle: Any) -> Domain:
    """The domain now; a transient one that ended is gone, and described as shut off."""
    name, uuid = handle.name(), handle.UUIDString()
    try:
        with binding.translated(name):
            return _describe(handle)
    except NotFoundError:
        return Domain(name, uuid, DomainState.SHUTOFF, False, 0, 0)


def _attachment(
    handle: Any, request: AttachRequest, uuid: str, bus: str = "", address: str = ""
) -> Attachment:
    return Attachment(
        domain=handle.name(),
        domain_uuid=handle.UUIDString(),
        function=uuid,
        live=request.live,
        persistent=request.persistent,
        bus=bus,
        address=address,
    )


def _whose(request: AttachRequest) -> Ownership:
    return Ownership(request.host, request.owner)


def _not_running(domain: str) -> AccelvisorError:
    return ConflictError(
        "the domain is not running",
        code="domain-state",
        where=domain,
        hint="accelctl vm start starts it",
    )


def _transient(domain: str) -> AccelvisorError:
    return ConflictError(
        "the domain is transient: it has no stored definition",
        code="domain-state",
        where=domain,
        hint="use --live, or define the domain",
    )


def _attached(request: AttachRequest) -> AccelvisorError:
    return ConflictError(
        f"function {request.function} is attached to this domain already",
        code="function-attached",
        where=request.domain,
    )


def _dotted(version: int) -> str:
    """libvirt's 1000000 * major + 1000 * minor + release."""
    return f"{version // 1_000_000}.{version // 1000 % 1000}.{version % 1000}"
