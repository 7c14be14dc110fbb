"""From the daemon's objects to those of the Admin interface. Plain dictionaries, no logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelvisor.daemon import inventory
from accelvisor.daemon.inventory import Card, Placement, Profile
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.store import EventRecord, Function
from accelvisor.errors import UsageError
from accelvisor.hypervisor.port import Attachment, Domain, DomainOptions

#: Empty root ports that a domain may have: each costs address space for a window.
MOST_PORTS = 16


def card(item: Card, functions: Sequence[Function]) -> dict[str, Any]:
    mine = [function for function in functions if function.card == item.name]
    left = inventory.free(item, [function.placement for function in mine])
    return {
        "name": item.name,
        "chips": item.chips,
        "cores_per_chip": item.cores_per_chip,
        "cores": item.cores,
        "cores_free": left.core_count,
        "memory_bytes": item.memory_bytes,
        "memory_free": left.memory_bytes,
        "free_by_chip": [len(left.cores[chip]) for chip in range(item.chips)],
        "functions": [function.uuid for function in mine],
    }


def profile(item: Profile, cards: Sequence[Card], held: Sequence[Placement]) -> dict[str, Any]:
    fit = inventory.fits(cards, held, item)
    return {
        "name": item.name,
        "cores": item.cores,
        "chips": item.chips,
        "memory_bytes": item.memory_bytes,
        "window_bytes": item.window_bytes,
        "queues": item.queues,
        "ring_entries": item.ring_entries,
        "fits": fit.count,
        "limit": fit.limit,
    }


def function(item: Function, paths: Paths) -> dict[str, Any]:
    files = paths.function(item.uuid)
    return {
        "uuid": item.uuid,
        "name": item.name,
        "profile": item.profile,
        "card": item.card,
        "placement": [
            {"chip": chip, "cores": list(cores)} for chip, cores in item.placement.cores.items()
        ],
        "cores": item.cores,
        "chips": item.chips,
        "memory_bytes": item.memory_bytes,
        "window_bytes": item.window_bytes,
        "queues": item.queues,
        "ring_entries": item.ring_entries,
        "state": item.state.value,
        "reason": item.reason,
        "socket": str(files.vfio_socket),
        "domain_socket": str(files.domain_socket(item.domain_uuid)) if item.domain_uuid else None,
        "domain": item.domain,
        "domain_uuid": item.domain_uuid,
        "created": item.created,
    }


def event(item: EventRecord) -> dict[str, Any]:
    return {
        "id": item.id,
        "time": item.time,
        "kind": item.kind,
        "subject": item.subject,
        "message": item.message,
    }


def domain(item: Domain) -> dict[str, Any]:
    return {
        "name": item.name,
        "uuid": item.uuid,
        "state": item.state.value,
        "persistent": item.persistent,
        "vcpus": item.vcpus,
        "memory_bytes": item.memory_bytes,
        "live_functions": list(item.live_functions),
        "persistent_functions": list(item.persistent_functions),
    }


def attachment(item: Attachment) -> dict[str, Any]:
    return {
        "domain": item.domain,
        "domain_uuid": item.domain_uuid,
        "function": item.function,
        "live": item.live,
        "persistent": item.persistent,
        "bus": item.bus,
        "address": item.address,
    }


def domain_options(fields: dict[str, Any]) -> DomainOptions:
    """The interface has checked names and types; the bounds are checked here.

    Raises:
        UsageError: ``domain-options``.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name, low, high in (
        ("memory_bytes", 16 << 20, 1 << 44),
        ("vcpus", 1, 1024),
        ("hotplug_ports", 0, MOST_PORTS),
    ):
        if name in given and not low <= given[name] <= high:
            raise UsageError(
                f"{name} is {given[name]}, it must be {low} to {high}",
                code="domain-options",
                where="admin",
            )
    return DomainOptions(**given)
