"""What must be done so that store, processes and domains tell the same story. Pure plans.

:func:`at_start` compares the store with what the machine shows when the daemon starts: after a
clean restart, a crash at any step, or a reboot. :func:`follow` compares the functions with what
libvirt says of its domains. Both look at states, not at events: a lost event costs nothing once the
next look came.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from accelvisor.daemon.lifecycle import Event, State
from accelvisor.daemon.store import Function
from accelvisor.hypervisor.port import Domain


class Action(StrEnum):
    ADOPT = "adopt"  # the process runs: go on with it
    RESTART = "restart"  # it does not: start a new one, empty as after a reset
    FAIL = "fail"  # it does not, and a domain may still hold on to the old one
    REMOVE = "remove"  # half created or half deleted: stop it, remove files and row
    STOP_ORPHAN = "stop-orphan"  # a process that no row knows
    SWEEP = "sweep"  # a directory that no row knows


@dataclass(frozen=True, slots=True)
class Repair:
    """One thing to do for one function, and why, in words for the event log."""

    action: Action
    uuid: str
    why: str


def at_start(
    functions: Sequence[Function],
    running: Collection[str],
    directories: Collection[str],
    *,
    same_boot: bool,
) -> list[Repair]:
    """The repairs after a start, orphans first: they may hold what the others need."""
    known = {item.uuid for item in functions}
    repairs = [
        Repair(Action.STOP_ORPHAN, uuid, "its process runs, but the store does not know it")
        for uuid in sorted(set(running) - known)
    ]
    repairs += [
        Repair(Action.SWEEP, uuid, "its directory was left behind")
        for uuid in sorted(set(directories) - known - set(running))
    ]
    repairs += [_one(item, item.uuid in running, same_boot) for item in functions]
    return repairs


def _one(function: Function, running: bool, same_boot: bool) -> Repair:
    match function.state:
        case State.CREATING:
            return Repair(Action.REMOVE, function.uuid, "its creation was interrupted")
        case State.DELETING:
            return Repair(Action.REMOVE, function.uuid, "its deletion was interrupted")
        case _ if running:
            return Repair(Action.ADOPT, function.uuid, "its process runs")
        case State.RUNNING if same_boot:
            return Repair(Action.FAIL, function.uuid, "its process ended while the daemon was away")
        case _ if same_boot:
            return Repair(
                Action.RESTART, function.uuid, "its process ended while the daemon was away"
            )
        case _:
            return Repair(Action.RESTART, function.uuid, "the host was booted")


@dataclass(frozen=True, slots=True)
class Change:
    """One function whose domain changed: the event for its life, and the domain it has now."""

    uuid: str
    event: Event
    domain: str | None
    domain_uuid: str | None


@dataclass(frozen=True, slots=True)
class Claim:
    """A domain that names a function which another domain has: reported, never followed."""

    function: str
    domain: str
    domain_uuid: str


@dataclass(frozen=True, slots=True)
class View:
    """What libvirt's domains mean for the functions.

    Attributes:
        changes: none where both agree already.
        claims: of domains that do not own what they name.
        unreadable: names of domains of which it is not known what they have.
    """

    changes: Sequence[Change]
    claims: Sequence[Claim]
    unreadable: Sequence[str]


def follow(functions: Sequence[Function], domains: Sequence[Domain]) -> View:
    """The changes that libvirt's view asks for.

    A function stays with its domain as long as that one names it: whoever pastes or clones a
    definition does not take it away. One that no domain has is taken by the first that names it, a
    running one before others. What is not known releases nothing. A failed function of a domain is
    revived (``PROCESS_READY`` is asked for) once no running domain has it: QEMU does not connect
    again, so its guest has lost the device until it is started anew. One without a domain is left
    to its administrator.
    """
    live: defaultdict[str, list[Domain]] = defaultdict(list)
    stored: defaultdict[str, list[Domain]] = defaultdict(list)
    for domain in domains:
        if domain.state.active:
            for uuid in dict.fromkeys(domain.live_functions):
                live[uuid].append(domain)
        # One that is just being started does not run yet, and may have no stored definition.
        starting = () if domain.state.active else domain.live_functions
        for uuid in dict.fromkeys((*starting, *domain.persistent_functions)):
            stored[uuid].append(domain)
    unknown = {domain.uuid for domain in domains if not domain.functions_known}
    changes: list[Change] = []
    claims: list[Claim] = []
    for function in functions:
        running, defined = live[function.uuid], stored[function.uuid]
        owner = _owner(function, [*running, *defined])
        change = _change(function, owner, running, unknown)
        if change is not None:
            changes.append(change)
        has = owner.uuid if owner is not None else function.domain_uuid
        others = {item.uuid: item for item in (*running, *defined) if item.uuid != has}
        claims += [Claim(function.uuid, item.name, item.uuid) for item in others.values()]
    return View(changes, claims, [item.name for item in domains if item.uuid in unknown])


def _owner(function: Function, naming: Sequence[Domain]) -> Domain | None:
    """Whose it is, of the domains that name it, the running ones first."""
    for domain in naming:
        if domain.uuid == function.domain_uuid:
            return domain
    # A newcomer gets only what nobody has.
    return naming[0] if naming and function.state is State.READY else None


def _change(
    function: Function, owner: Domain | None, running: Sequence[Domain], unknown: Collection[str]
) -> Change | None:
    if function.state in (State.CREATING, State.DELETING) or function.domain_uuid in unknown:
        return None
    name, uuid = (owner.name, owner.uuid) if owner else (None, None)
    if function.state is State.FAILED:
        if running or (owner is None and function.domain_uuid is None):
            return None
        return Change(function.uuid, Event.PROCESS_READY, name, uuid)
    if owner is not None and uuid in {item.uuid for item in running}:
        wanted, event = State.RUNNING, Event.STARTED
    elif owner is not None:
        wanted, event = State.ATTACHED, Event.TAKEN
    else:
        wanted, event = State.READY, Event.RELEASED
    same = (function.state, function.domain, function.domain_uuid) == (wanted, name, uuid)
    return None if same else Change(function.uuid, event, name, uuid)
