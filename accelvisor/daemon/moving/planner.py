"""What stands against a move, and how long it would take: facts in, all reasons out. Pure.

A *blocker* makes the move fail, here or on the way; a *warning* may, or costs something; an *info*
is worth knowing. A dry run shows all of them, each with what to do; the move itself begins only
without a blocker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.fit import Fit, Need
from accelvisor.errors import AccelvisorError
from accelvisor.hypervisor.port import Domain, DomainState
from accelvisor.limits import LIMITS, MIB
from accelvisor.migration.convergence import Prediction, Rules, Verdict, predict

#: Of what is not measured yet: a lower bound of what a 10 Gbit/s link carries.
ASSUMED_RATE = 500e6
#: A load writes the state to the device and reads it back: measured on the laboratory's hosts.
LOAD_RATE = 1.5e9


class Severity(StrEnum):
    BLOCKER = "blocker"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Reason:
    """One finding: a stable code, a sentence, what to do about it."""

    code: str
    severity: Severity
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """One function of the domain.

    Attributes:
        firmware: what its process says of itself; empty when it does not answer.
        state_bytes: what its memory and window hold.
        dirty_bytes, sampled_s: memory that it changed within that time.
        held: a move or a checkpoint has it just now.
        trouble: why it cannot be asked, or what the ledger says against it.
    """

    need: Need
    state: State
    firmware: Mapping[str, str] = field(default_factory=dict)
    state_bytes: int = 0
    dirty_bytes: int = 0
    sampled_s: float = 0.0
    held: bool = False
    trouble: AccelvisorError | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known before a move.

    Attributes:
        domain: None when there is none of that name.
        missing: why there is none, or libvirt cannot be asked.
        host: name of the destination; ``host_error``: why it is not trusted, ``fit_error``: why
            it cannot be asked.
        monitor, bus: whether the domain's QEMU has connected them.
        private_memory: why a function cannot reach the guest's memory; empty when it can.
        blocked: what QEMU itself says against a migration.
        rate: bytes a second to that host, measured; 0: not known. ``limit``: as configured.
        target_s: the downtime to aim at.
    """

    domain: Domain | None
    host: str
    missing: AccelvisorError | None = None
    host_error: AccelvisorError | None = None
    fit: Fit | None = None
    fit_error: AccelvisorError | None = None
    functions: Sequence[FunctionFacts] = ()
    monitor: bool = True
    bus: bool = True
    private_memory: str = ""
    blocked: Sequence[str] = ()
    version: str = ""
    arbiter: str = ""
    rate: float = 0.0
    limit: float = 0.0
    target_s: float = 0.05
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Whether to move, why not, and what it would take; no prediction where nothing is known."""

    reasons: Sequence[Reason]
    prediction: Prediction | None = None

    @property
    def blockers(self) -> Sequence[Reason]:
        return [reason for reason in self.reasons if reason.severity is Severity.BLOCKER]


def plan(facts: Facts) -> Plan:
    """All reasons, blockers first, and the prediction."""
    order = list(Severity)
    prediction = _predict(facts)
    found = [*_reasons(facts), *_of_prediction(facts, prediction)]
    return Plan(sorted(found, key=lambda reason: order.index(reason.severity)), prediction)


def _reasons(facts: Facts) -> Iterator[Reason]:
    if facts.missing is not None:
        yield _blocked(facts.missing)
    if facts.host_error is not None:
        yield _blocked(facts.host_error)
    if facts.fit_error is not None:
        yield _blocked(facts.fit_error)
    if facts.domain is not None:
        yield from _of_domain(facts, facts.domain)
    for function in facts.functions:
        yield from _of_function(function)
    if facts.fit is not None:
        yield from _of_peer(facts, facts.fit)


def _of_domain(facts: Facts, domain: Domain) -> Iterator[Reason]:
    running = domain.state in (DomainState.RUNNING, DomainState.BLOCKED)
    if not domain.state.active:
        yield _blocker(
            "domain-state", f"VM {domain.name} does not run ({domain.state})",
            f"accelctl vm start {domain.name}; a stopped VM is moved by its definition and disks",
        )  # fmt: skip
    elif not running:
        yield Reason(
            "migration-paused", Severity.WARNING,
            f"VM {domain.name} is {domain.state}: it stays so there",
            f"accelctl vm resume {domain.name}",
        )  # fmt: skip
    if not facts.functions:
        yield Reason(
            "migration-no-functions", Severity.INFO,
            f"VM {domain.name} has no functions: libvirt moves it alone",
        )  # fmt: skip
    if facts.busy:
        yield _blocker(
            "migration-busy", f"a migration of VM {domain.name} is in progress",
            f"accelctl migration list; accelctl migration cancel {domain.name}",
        )  # fmt: skip
    if not domain.state.active:
        return
    anew = "power the VM off and on: it was started before accelvisor knew of migration"
    if facts.functions and not facts.monitor:
        yield _blocker("migration-monitor", "its QEMU has not connected its private monitor", anew)
    if facts.functions and not facts.bus:
        yield _blocker("migration-bus", "its QEMU has not connected the bus of its state", anew)
    if facts.functions and facts.private_memory:
        yield _blocker(
            "domain-memory", f"a function cannot reach this guest's memory: {facts.private_memory}",
            f"accelctl vm prepare {domain.name}, then power it off and on",
        )  # fmt: skip
    for text in facts.blocked:
        yield _blocker("migration-blocked", f"QEMU says: {text}", "detach that device first")
    if not domain.persistent:
        yield Reason(
            "migration-transient", Severity.INFO,
            f"VM {domain.name} is transient: it is not defined there either",
        )  # fmt: skip
    yield Reason(
        "migration-memory", Severity.INFO,
        f"the guest's memory is {_size(domain.memory_bytes)}: QEMU sends it beside the functions",
    )  # fmt: skip


def _of_function(function: FunctionFacts) -> Iterator[Reason]:
    name = function.need.name
    if function.trouble is not None:
        yield replace(_blocked(function.trouble), message=f"{name}: {function.trouble.message}")
    if function.held:
        yield _blocker(
            "migration-busy", f"function {name} takes part in another move, or is being saved",
            "wait until that has ended",
        )  # fmt: skip
    if function.state is not State.RUNNING and function.trouble is None:
        yield _blocker(
            "function-state", f"function {name} is {function.state}, not running",
            f"accelctl function reset {name}" if function.state is State.FAILED else "",
        )  # fmt: skip


def _of_peer(facts: Facts, fit: Fit) -> Iterator[Reason]:
    for text in fit.missing:
        yield _blocker(
            "no-room", f"host {facts.host} has no room: {text}",
            "delete functions there (accelctl function list), or choose another host",
        )  # fmt: skip
    for uuid in fit.present:
        yield _blocker(
            "function-exists", f"host {facts.host} has a function {uuid} already",
            "accelctl function show there says whose it is; delete one of the two",
        )  # fmt: skip
    for name in fit.names:
        yield Reason(
            "function-name", Severity.WARNING,
            f'another function on {facts.host} is called "{name}": this one loses its name',
        )  # fmt: skip
    if facts.arbiter and fit.arbiter != facts.arbiter:
        yield _blocker(
            "migration-arbiter",
            f"the hosts ask different arbiters: {facts.arbiter} here, {fit.arbiter} there",
            "set [ledger] alike on both",
        )
    if fit.version != facts.version:
        yield Reason(
            "migration-version", Severity.WARNING,
            f"accelvisor is {facts.version} here and {fit.version} on {facts.host}",
            "upgrade both to the same version",
        )  # fmt: skip
    for function in facts.functions:
        if function.firmware:
            try:
                documents.require_compatible(function.firmware, fit.firmware)
            except AccelvisorError as error:
                yield _blocked(error)
                break  # the same for all of them


def _predict(facts: Facts) -> Prediction | None:
    if facts.fit is None or not facts.functions or any(f.trouble for f in facts.functions):
        return None
    rate = facts.rate or ASSUMED_RATE
    if facts.limit:
        rate = min(rate, facts.limit)
    state = sum(function.state_bytes for function in facts.functions)
    dirty = sum(
        function.dirty_bytes / function.sampled_s
        for function in facts.functions
        if function.sampled_s
    )
    # All that is held may be changed, but not more.
    working = min(state, sum(max(f.dirty_bytes, f.state_bytes) for f in facts.functions))
    fixed = 0.03 + max(f.state_bytes for f in facts.functions) / LOAD_RATE
    rules = Rules(target_s=max(facts.target_s, fixed))
    return predict(state, rate, dirty, working if dirty else 0, fixed, rules)


def _of_prediction(facts: Facts, made: Prediction | None) -> Iterator[Reason]:
    if made is None:
        return
    if made.ends is Verdict.GIVE_UP:
        yield _blocker(
            "migration-convergence",
            f"the functions change {_size(int(made.dirty_rate))} a second and"
            f" {_size(int(made.bandwidth))} a second can be sent: the VM would stand still for"
            f" {made.downtime_s:.1f} s, {LIMITS.migration_quiesce_s / 2:g} s are allowed",
            "move it when its functions compute less, or over a faster network",
        )
    elif made.throttle < 100:
        yield Reason(
            "migration-throttle", Severity.WARNING,
            f"the functions would be slowed down to {made.throttle} % while they are copied",
            "a greater --downtime needs less of that",
        )  # fmt: skip
    if made.ends is Verdict.ENOUGH:
        yield Reason(
            "migration-downtime", Severity.WARNING,
            f"the downtime would be {made.downtime_s * 1000:.0f} ms,"
            f" more than the {facts.target_s * 1000:.0f} ms that are aimed at",
        )  # fmt: skip
    if not facts.rate:
        yield Reason(
            "migration-rate", Severity.INFO,
            f"the network's speed is not known: {_size(int(ASSUMED_RATE))} a second are assumed",
        )  # fmt: skip


def _blocker(code: str, message: str, fix: str = "") -> Reason:
    return Reason(code, Severity.BLOCKER, message, fix)


def _blocked(error: AccelvisorError) -> Reason:
    return Reason(error.code, Severity.BLOCKER, error.message, error.hint)


def _size(count: int) -> str:
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count} B"
