"""Domains over libvirt: :class:`accelvisor.hypervisor.port.DomainsPort` for real.

Each verb finds a working connection (and makes a new one when libvirtd was restarted), asks
libvirt, and translates its errors. What is to be changed in an XML or plugged where is decided
elsewhere, in :mod:`~accelvisor.hypervisor.xml` and :mod:`~accelvisor.hypervisor.hotplug`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from accelvisor.errors import AccelvisorError, ConflictError, DeadlineError, NotFoundError
from accelvisor.hypervisor import binding, xml
from accelvisor.hypervisor.builder import build
from accelvisor.hypervisor.capabilities import kvm_verdict
from accelvisor.hypervisor.events import EventSubscription
from accelvisor.hypervisor.live import LiveDomain
from accelvisor.hypervisor.port import (
    Attachment,
    AttachRequest,
    Domain,
    DomainEvent,
    DomainOptions,
    DomainState,
    Subscription,
)

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
            return lv.open(self.uri)
        except lv.libvirtError as error:
            raise binding.unavailable(error.get_error_message() or str(error)) from error

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
        """All domains, by name. One that vanishes meanwhile is left out."""
        found = []
        with binding.translated("libvirt"):
            for handle in self._connect().listAllDomains(0):
                with suppress(NotFoundError), binding.translated(handle.name()):
                    found.append(_describe(handle))
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
        """The libvirt handle, by UUID or name."""
        connection = self._connect()
        lv = binding.libvirt()
        try:
            return connection.lookupByName(domain)
        except lv.libvirtError as error:
            if error.get_error_code() != lv.VIR_ERR_NO_DOMAIN:
                raise
            with suppress(lv.libvirtError):
                return connection.lookupByUUIDString(domain)
            raise

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
            shown = xml.prepare(self.xml(domain, live=False), spare_ports=hotplug_ports)
            if not dry_run:
                self._connect().defineXML(xml.prepare(_stored(handle), spare_ports=hotplug_ports))
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

    # --- functions -------------------------------------------------------------------------------

    def attach(self, request: AttachRequest) -> Attachment:
        uuid = xml.function_uuid(request.function)
        with binding.translated(request.domain):
            handle = self._find(request.domain)
            self._check(handle, request)
            plugged = ("", "")
            before = self._attach_persistent(handle, request, uuid) if request.persistent else None
            if request.live:
                try:
                    plugged = self._live(handle).plug(uuid, request.socket)
                except BaseException:
                    if before is not None:  # the stored definition again as it was
                        self._connect().defineXML(before)
                    raise
            return _attachment(handle, request, uuid, *plugged)

    def _attach_persistent(self, handle: Any, request: AttachRequest, uuid: str) -> str:
        before = _stored(handle)
        if uuid in {entry.uuid for entry in xml.functions(before)}:
            raise _attached(request)
        self._connect().defineXML(xml.add(before, uuid, request.socket))
        return before

    def detach(self, request: AttachRequest, *, deadline_s: float) -> Attachment:
        uuid = xml.function_uuid(request.function)
        with binding.translated(request.domain):
            handle = self._find(request.domain)
            self._check(handle, request)
            stored = xml.remove(_stored(handle), uuid) if request.persistent else None
            if request.live:
                self._live(handle).unplug(uuid, deadline_s=deadline_s)
            if stored is not None:
                self._connect().defineXML(stored)
            return _attachment(handle, request, uuid)

    def _live(self, handle: Any) -> LiveDomain:
        return LiveDomain(handle, lambda command: self._monitor(handle, command), self._clock)

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
        return EventSubscription(self._open, callback)


def _stored(handle: Any) -> str:
    lv = binding.libvirt()
    # Without SECURE, redefining would lose passwords.
    return str(handle.XMLDesc(lv.VIR_DOMAIN_XML_INACTIVE | lv.VIR_DOMAIN_XML_SECURE))


def _describe(handle: Any) -> Domain:
    lv = binding.libvirt()
    state, memory_kib, _, vcpus, _ = handle.info()
    persistent, active = bool(handle.isPersistent()), bool(handle.isActive())
    return Domain(
        name=handle.name(),
        uuid=handle.UUIDString(),
        state=_STATES[state] if state < len(_STATES) else DomainState.UNKNOWN,
        persistent=persistent,
        vcpus=vcpus,
        memory_bytes=memory_kib * 1024,
        live_functions=_functions(handle.XMLDesc(0)) if active else (),
        persistent_functions=(
            _functions(handle.XMLDesc(lv.VIR_DOMAIN_XML_INACTIVE)) if persistent else ()
        ),
    )


def _functions(text: str) -> tuple[str, ...]:
    if xml.NAMESPACE not in text:  # most domains have none, and parsing is most of the cost
        return ()
    return tuple(entry.uuid for entry in xml.functions(text))


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
