"""What the daemon asks of a hypervisor: verbs and results, without libvirt.

:class:`DomainsPort` is implemented by :class:`accelvisor.hypervisor.domains.Domains`. All verbs
block (the daemon calls them in a thread of its own). Every verb raises

* :class:`accelvisor.errors.UnavailableError` (``libvirt-unavailable``) when libvirt is not
  installed or not reachable; the next call tries to connect again;
* :class:`accelvisor.errors.NotFoundError` (``domain-not-found``) for an unknown domain;
* :class:`accelvisor.errors.ConflictError` (``domain-state``) when the domain's state forbids the
  verb;
* :class:`accelvisor.errors.SystemFailure` (``libvirt-failed``) for anything else libvirt refuses,
  with libvirt's own message.

A domain is named by its name or its UUID.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class DomainState(StrEnum):
    """libvirt's virDomainState, as words."""

    RUNNING = "running"
    BLOCKED = "blocked"
    PAUSED = "paused"
    SHUTDOWN = "shutdown"  # being shut down
    SHUTOFF = "shutoff"
    CRASHED = "crashed"
    PMSUSPENDED = "pmsuspended"
    UNKNOWN = "unknown"

    @property
    def active(self) -> bool:
        """A QEMU process exists."""
        return self not in (DomainState.SHUTOFF, DomainState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain as libvirt knows it now.

    ``live`` and ``persistent_functions`` are the UUIDs of the functions that the running and the
    stored definition carry; they differ between a ``--live`` and a ``--persistent`` attach. Where
    ``functions_known`` is false they could not be read, and the domain may have any.
    """

    name: str
    uuid: str
    state: DomainState
    persistent: bool
    vcpus: int
    memory_bytes: int
    live_functions: Sequence[str] = field(default=())
    persistent_functions: Sequence[str] = field(default=())
    functions_known: bool = True


@dataclass(frozen=True, slots=True)
class DomainOptions:
    """What ``accelctl vm define`` accepts instead of an XML; paths are of this host.

    A disk is the path of an image, whose format is told from its name (.qcow2 or raw), with
    ``,readonly`` after it when the guest must not write to it; several domains can share that one.
    """

    name: str
    memory_bytes: int
    vcpus: int = 1
    disk: str | None = None
    kernel: str | None = None
    initrd: str | None = None
    cmdline: str | None = None
    network: str | None = None  # libvirt network's name; None for no network card
    machine: str = "q35"
    accelerator: str = "auto"  # auto | kvm | tcg; auto probes whether KVM can run a guest
    hotplug_ports: int = 4  # empty pcie-root-ports, so that functions can be attached while it runs
    iommu: bool = False  # an emulated intel-iommu, so that the guest can use its own vfio-pci
    uuid: str | None = None  # None: libvirt chooses
    disks: Sequence[str] = field(default=())  # more images after ``disk``
    console_log: str | None = None  # file that gets a copy of what the serial console prints


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """One function and where it goes. At least one of ``live`` and ``persistent`` is true."""

    domain: str
    function: str  # UUID
    socket: str  # path of the function's socket for this domain
    live: bool
    persistent: bool
    window_bytes: int = 0  # of its BAR2; 0: unknown, so that it shows only once it is plugged
    host: str = ""  # UUID of this host, for the metadata: it owns the function
    owner: str = ""  # in whose name its states are signed; empty: the domain's UUID


@dataclass(frozen=True, slots=True)
class Attachment:
    """What an attach or detach did."""

    domain: str  # name
    domain_uuid: str
    function: str
    live: bool
    persistent: bool
    bus: str = ""  # id of the root port that holds the live device
    address: str = ""  # PCI address as far as the host knows it


@dataclass(frozen=True, slots=True)
class MigrateRequest:
    """A live migration that this host's libvirt drives: it connects to the other one itself.

    Attributes:
        uri: of the other host's libvirt, as this host reaches it.
        host: UUID of the other host, which will own the functions.
        stored: the definition moves along: it is stored there and no more here.
        bandwidth: of QEMU's own stream, bytes a second; 0 for no limit.
        downtime_ms: what QEMU aims at; 0 for its own default.
    """

    domain: str
    uri: str
    host: str = ""
    stored: bool = True
    bandwidth: int = 0
    downtime_ms: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """What libvirt says of a migration in progress: bytes, seconds, bytes a second.

    Attributes:
        downtime_s: what QEMU expects it to be.
        iteration: how often QEMU has gone over the memory.
    """

    elapsed_s: float
    memory_total: int
    memory_done: int
    memory_left: int
    rate: float
    dirty_rate: float
    iteration: int
    downtime_s: float


class DomainEventKind(StrEnum):
    """What happened to a domain. ``detail`` of the event carries libvirt's own word."""

    DEFINED = "defined"
    UNDEFINED = "undefined"
    STARTED = "started"
    SUSPENDED = "suspended"
    RESUMED = "resumed"
    # Any end; detail is shutdown, destroyed, crashed, migrated, saved, failed or from-snapshot.
    STOPPED = "stopped"
    CRASHED = "crashed"  # the guest panicked; the domain may still exist
    REBOOTED = "rebooted"
    DEVICE_REMOVED = "device-removed"  # detail: the device's id
    DISCONNECTED = "disconnected"  # libvirt went away: events were lost, list() again
    CONNECTED = "connected"  # libvirt is (again) there: list() now


@dataclass(frozen=True, slots=True)
class DomainEvent:
    kind: DomainEventKind
    domain: str = ""  # name; empty for (dis)connected
    uuid: str = ""
    detail: str = ""


class Subscription(Protocol):
    """A running flow of events."""

    def close(self) -> None:
        """Stop it and join its thread. Idempotent; no event is delivered after it returns."""


class DomainsPort(Protocol):
    """The verbs. ``Domains(uri)`` constructs without connecting; each verb connects when needed."""

    def version(self) -> str:
        """libvirt's and QEMU's version in words, e.g. ``libvirt 12.9.0, QEMU 11.1.3``."""
        ...

    def list(self) -> Sequence[Domain]:
        """All domains, active or not, ordered by name; also those that cannot be read."""
        ...

    def get(self, domain: str) -> Domain: ...

    def xml(self, domain: str, *, live: bool) -> str:
        """The domain's XML: of the running domain, or the stored one."""
        ...

    def define(self, xml: str) -> Domain:
        """Define (or redefine) from an XML. ConfigError (``domain-xml``) when it is malformed."""
        ...

    def domain_xml(self, options: DomainOptions) -> str:
        """The XML that ``define`` would get from these options; nothing is changed."""
        ...

    def prepare(self, domain: str, *, hotplug_ports: int, dry_run: bool) -> tuple[Domain, str]:
        """Make a stored definition ready for functions: shared memory, and at least that many spare
        root ports. Returns the domain and the new XML (passwords left out); nothing is changed with
        ``dry_run``. ConflictError ``domain-machine``.
        """
        ...

    def undefine(self, domain: str) -> None: ...

    def start(self, domain: str) -> Domain: ...

    def shutdown(self, domain: str, *, deadline_s: float) -> Domain:
        """Ask the guest to power off and wait; DeadlineError (``domain-shutdown-deadline``)."""
        ...

    def destroy(self, domain: str) -> Domain: ...

    def suspend(self, domain: str) -> Domain: ...

    def resume(self, domain: str) -> Domain: ...

    def reboot(self, domain: str) -> Domain: ...

    def reset(self, domain: str) -> Domain: ...

    def migrate(self, request: MigrateRequest) -> None:
        """Move a running domain to another host; returns when it runs there. ConflictError
        ``migration-cancelled``, ``migration-unsafe``; SystemFailure ``libvirt-failed`` with what
        the other host said.
        """
        ...

    def migrate_cancel(self, domain: str) -> None:
        """End the migration in progress; the domain stays. ConflictError when there is none."""
        ...

    def job(self, domain: str) -> Job | None:
        """The migration in progress; None when there is none."""
        ...

    def leaves(self, domain: str) -> bool:
        """Whether somebody here migrates the domain away now: from before the other host's hook is
        asked until it has gone, or stays.
        """
        ...

    def attach(self, request: AttachRequest) -> Attachment:
        """Make it so in the running and/or stored definition; both or none. Repeating it is a
        ConflictError (``function-attached``), as are private memory (``domain-memory``) and a
        machine without PCI Express (``domain-machine``); CapacityError ``no-hotplug-port`` or
        ``port-window``, SystemFailure ``device-add-failed`` for a live one.
        """
        ...

    def detach(self, request: AttachRequest, *, deadline_s: float) -> Attachment:
        """Hot-unplug and wait until the guest let go (DeadlineError ``detach-deadline``, and the
        stored definition stays as it is), and/or remove it from the stored definition.
        NotFoundError ``function-not-attached``.
        """
        ...

    def attachment_xml(self, function: str, socket: str) -> str:
        """The XML pieces to paste for those who manage domains with other tools."""
        ...

    def subscribe(self, callback: Callable[[DomainEvent], None]) -> Subscription:
        """Deliver events from a thread of the port's own until closed; survives restarts of libvirt
        (a DISCONNECTED, then a CONNECTED event). Never raises for an unreachable libvirt.
        """
        ...

    def close(self) -> None: ...
