"""What functions get of what they share: host CPUs, and the cores of their card that nobody holds.

Decided anew whenever the partition changes, never by a timer: guaranteed functions have host CPUs
of their own, all others share the rest by weight, and a burstable function may borrow cores that
no function holds. Whoever is given those cores gets them before it starts: a loan ends at the
borrower's next tile boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelvisor.isolation.fair import Demand, max_min
from accelvisor.isolation.placing import Cpus, Free
from accelvisor.isolation.resources import Card, Placement, Policy


@dataclass(frozen=True, slots=True)
class Member:
    """A function as this decision sees it."""

    placement: Placement
    policy: Policy
    weight: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one function gets.

    Attributes:
        cpus: host CPUs that its threads may run on.
        weight: of its CPU time among those that share CPUs (as cgroup's cpu.weight, 1 to 10000);
            0: only what all others leave.
        borrowed: cores beside its own, until it is told otherwise.
    """

    cpus: tuple[int, ...]
    weight: int
    borrowed: int


def divide(
    members: Mapping[str, Member],
    cards: Sequence[Card],
    held: Sequence[Placement],
    cpus: Sequence[int],
) -> Mapping[str, Share]:
    """The share of each function.

    Args:
        members: by UUID.
        held: every placement that is not free, also of functions that are no member (yet).
        cpus: of the host, for functions.
    """
    shared = Cpus(cpus, held).shared
    borrowed = _borrowed(members, cards, held, len(shared))
    found: dict[str, Share] = {}
    for uuid, member in members.items():
        match member.policy:
            case Policy.GUARANTEED if member.placement.cpus:
                found[uuid] = Share(tuple(member.placement.cpus), member.weight, 0)
            case Policy.BEST_EFFORT:
                found[uuid] = Share(shared, 0, 0)
            case _:
                found[uuid] = Share(shared, member.weight, borrowed.get(uuid, 0))
    return found


def _borrowed(
    members: Mapping[str, Member],
    cards: Sequence[Card],
    held: Sequence[Placement],
    cpus: int,
) -> dict[str, int]:
    """Free cores of each card, by weight, to those of its burstable functions that have host CPUs
    to run them on. One CPU is left to the host and its VMs.
    """
    found: dict[str, int] = {}
    for card in cards:
        demands = {
            uuid: Demand(member.weight, max(0, cpus - 1 - member.placement.core_count))
            for uuid, member in members.items()
            if member.policy is Policy.BURSTABLE
            and member.placement.card == card.name
            and member.placement.cores
        }
        if demands:
            found.update(max_min(Free(card, held).core_count, demands))
    return found
