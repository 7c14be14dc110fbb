"""What must be done so that store, processes and domains tell the same story. Pure plans.

:func:`at_start` compares the store with what the machine shows when the daemon starts: after a
clean restart, a crash at any step, or a reboot. :func:`follow` compares the functions with what
libvirt says of its domains. Both look at states, not at events: a lost event costs nothing once the
next look came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


def follow(functions: Sequence[Function], domains: Sequence[Domain]) -> list[Change]:
    """The changes that libvirt's view asks for; none where both agree already.

    A domain that runs counts for more than one whose stored definition names the same function.
    A failed function of a domain is revived (``PROCESS_READY`` is asked for) once no running domain
    has it: QEMU does not connect again, so its guest has lost the device until it is started anew.
    One without a domain is left to its administrator.
    """
    live: dict[str, Domain] = {}
    stored: dict[str, Domain] = {}
    for domain in domains:
        if domain.state.active:
            live.update(dict.fromkeys(domain.live_functions, domain))
        stored.update(dict.fromkeys(domain.persistent_functions, domain))
    changes = [_change(function, live, stored) for function in functions]
    return [change for change in changes if change is not None]


def _change(
    function: Function, live: Mapping[str, Domain], stored: Mapping[str, Domain]
) -> Change | None:
    if function.state in (State.CREATING, State.DELETING):
        return None
    domain = live.get(function.uuid) or stored.get(function.uuid)
    name, uuid = (domain.name, domain.uuid) if domain else (None, None)
    if function.state is State.FAILED:
        if function.uuid in live or (domain is None and function.domain_uuid is None):
            return None
        return Change(function.uuid, Event.PROCESS_READY, name, uuid)
    if function.uuid in live:
        wanted, event = State.RUNNING, Event.STARTED
    elif domain is not None:
        wanted, event = State.ATTACHED, Event.TAKEN
    else:
        wanted, event = State.READY, Event.RELEASED
    same = (function.state, function.domain, function.domain_uuid) == (wanted, name, uuid)
    return None if same else Change(function.uuid, event, name, uuid)
