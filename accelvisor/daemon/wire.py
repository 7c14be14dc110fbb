"""From the daemon's objects to those of the Admin interface. Plain dictionaries, no logic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from accelvisor.daemon.paths import Paths
from accelvisor.daemon.store import EventRecord, Function
from accelvisor.errors import UsageError
from accelvisor.hypervisor.port import Attachment, Domain, DomainOptions
from accelvisor.isolation import placing
from accelvisor.isolation.planner import Plan
from accelvisor.isolation.resources import Card, Placement, Profile, Range

#: Empty root ports that a domain may have: each costs address space for a window.
MOST_PORTS = 16


def card(item: Card, functions: Sequence[Function]) -> dict[str, Any]:
    mine = [function for function in functions if function.card == item.name]
    left = placing.Free(item, [function.placement for function in mine])
    return {
        "name": item.name,
        "chips": item.chips,
        "boards": item.boards,
        "rows": item.rows,
        "columns": item.columns,
        "modes": [name(item.mode(chip)) for chip in range(item.chips)],
        "cores_per_chip": item.cores_per_chip,
        "cores": item.cores,
        "cores_free": left.core_count,
        "memory_bytes": item.memory_bytes,
        "memory_free": left.memory_bytes,
        "free_by_chip": [len(cores) for cores in left.cores],
        "banks": item.banks,
        "free_ranges": ranges(left.gaps),
        "queues": item.queues,
        "queues_free": len(left.queues),
        "vectors": item.functions,
        "vectors_free": len(left.vectors),
        "links": [link(item, number) for number in range(len(item.links))],
        "links_free": left.links,
        "host_port": item.host_port,
        "functions": [function.uuid for function in mine],
        "shares": [_share(function) for function in mine],
    }


def link(item: Card, number: int) -> dict[str, Any]:
    """One link of a card."""
    one, other = item.links[number]
    return {"number": number, "one": one, "other": other, "kind": name(item.kind(number))}


def _share(function: Function) -> dict[str, Any]:
    placement = function.placement
    return {
        "function": function.uuid,
        "name": function.name,
        "cores": chip_cores(placement),
        "ranges": ranges(placement.ranges),
        "queues": list(placement.queues),
        "vector": placement.vector,
        "cpus": list(placement.cpus),
        "links": list(placement.links),
        "policy": name(function.policy),
        "weight": function.weight,
    }


def ranges(items: Iterable[Range]) -> list[dict[str, Any]]:
    return [{"bank": item.bank, "start": item.start, "bytes": item.nbytes} for item in items]


def chip_cores(item: Placement) -> list[dict[str, Any]]:
    return [{"chip": chip, "cores": list(cores)} for chip, cores in item.cores.items()]


def name(item: str) -> str:
    """A word of ours as the interface writes it: its names have no hyphen."""
    return item.replace("-", "_")


def plan(item: Plan) -> dict[str, Any]:
    return {
        "verb": item.verb.value,
        "function": item.function,
        "epoch": item.epoch,
        "same": item.same,
        "cores": item.after.core_count,
        "memory_bytes": item.after.memory_bytes,
        "placement": chip_cores(item.after),
        "links": list(item.after.links),
        "ranges": ranges(item.after.ranges),
        "moves": [f"{a}.{b} {c}.{d}" for (a, b), (c, d) in item.moves],
        "quiesce": list(item.quiesce),
        "scrub_bytes": item.scrub_bytes,
        "estimate_ms": item.estimate_ms,
        "steps": [
            {"action": step.action.value, "text": step.text, "estimate_ms": step.estimate_ms}
            for step in item.steps
        ],
    }


def profile(
    item: Profile,
    cards: Sequence[Card],
    held: Sequence[Placement],
    cpus: Sequence[int],
    static: Collection[str],
) -> dict[str, Any]:
    fit = placing.fits(cards, held, item, cpus, static)
    return {
        "name": item.name,
        "cores": item.cores,
        "chips": item.chips,
        "memory_bytes": item.memory_bytes,
        "window_bytes": item.window_bytes,
        "queues": item.queues,
        "ring_entries": item.ring_entries,
        "policy": name(item.policy),
        "weight": item.weight,
        "links": item.links.value,
        "fits": fit.count,
        "limit": fit.limit,
        "limited_by": list(fit.resources),
    }


def function(item: Function, paths: Paths) -> dict[str, Any]:
    files = paths.function(item.uuid)
    return {
        "uuid": item.uuid,
        "name": item.name,
        "profile": item.profile,
        "card": item.card,
        "placement": chip_cores(item.placement),
        "links": list(item.placement.links),
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
        "epoch": item.epoch,
        "policy": name(item.policy),
        "weight": item.weight,
        "revoked": item.revoked,
        "quarantine": item.quarantine,
        "partition": item.partition,
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
