"""Cards and what is taken of them; the planner that places a function. Pure: nothing here acts.

A function takes ``cores / chips`` cores on each of ``chips`` different chips of one card, and its
memory from that card. :func:`plan` answers with a placement, or with every reason why none exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelvisor.errors import CapacityError, NotFoundError
from accelvisor.limits import LIMITS, MIB


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    chips: int
    cores_per_chip: int
    memory_bytes: int

    @property
    def cores(self) -> int:
        return self.chips * self.cores_per_chip


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    cores: int
    chips: int
    memory_bytes: int
    window_bytes: int
    queues: int
    ring_entries: int

    @property
    def cores_per_chip(self) -> int:
        return self.cores // self.chips


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a function sits: its cores by chip, both numbered within ``card``."""

    card: str
    cores: Mapping[int, Sequence[int]]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement, or the reasons against it, one for each card that was considered."""

    placement: Placement | None
    reasons: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Free:
    """What is left of one card."""

    card: Card
    cores: Mapping[int, Sequence[int]]
    memory_bytes: int

    @property
    def core_count(self) -> int:
        return sum(len(cores) for cores in self.cores.values())


@dataclass(frozen=True, slots=True)
class Fit:
    """How many more functions of a profile fit now, and what limits that number."""

    count: int
    limit: str


def free(card: Card, held: Sequence[Placement]) -> Free:
    """What ``held`` leaves of ``card``; placements on other cards are ignored."""
    taken = {
        (chip, core)
        for placement in held
        if placement.card == card.name
        for chip, cores in placement.cores.items()
        for core in cores
    }
    cores = {
        chip: tuple(core for core in range(card.cores_per_chip) if (chip, core) not in taken)
        for chip in range(card.chips)
    }
    memory = sum(item.memory_bytes for item in held if item.card == card.name)
    return Free(card, cores, max(0, card.memory_bytes - memory))


def plan(
    cards: Sequence[Card], held: Sequence[Placement], profile: Profile, card: str | None = None
) -> Plan:
    """Place ``profile`` beside what is ``held``: first card in order, fullest chips that suffice.

    Packing the fullest chips keeps whole chips free for profiles that want many cores of one.
    """
    if len(held) >= LIMITS.functions:
        return Plan(None, [f"this host has {len(held)} functions, the maximum"])
    chosen = [item for item in cards if card is None or item.name == card]
    if not chosen:
        return Plan(None, [f'there is no card "{card}"' if card else "no card is configured"])
    reasons: list[str] = []
    for item in chosen:
        answer = _on_card(free(item, held), profile)
        if isinstance(answer, Placement):
            return Plan(answer)
        reasons += answer
    return Plan(None, reasons)


def _on_card(left: Free, profile: Profile) -> Placement | list[str]:
    """The placement on one card, or *all* reasons against it."""
    name, each = left.card.name, profile.cores_per_chip
    reasons: list[str] = []
    if left.memory_bytes < profile.memory_bytes:
        reasons.append(
            f"{name}: {left.memory_bytes // MIB} MiB of memory free,"
            f" {profile.memory_bytes // MIB} MiB wanted"
        )
    able = sorted(
        (chip for chip, cores in left.cores.items() if len(cores) >= each),
        key=lambda chip: (len(left.cores[chip]), chip),
    )
    if len(able) < profile.chips:
        reasons.append(
            f"{name}: {len(able)} of {left.card.chips} chips have {_cores(each)} free,"
            f" {profile.chips} wanted"
        )
    if reasons:
        return reasons
    cores = {chip: tuple(left.cores[chip][:each]) for chip in sorted(able[: profile.chips])}
    return Placement(name, cores, profile.memory_bytes)


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def fits(cards: Sequence[Card], held: Sequence[Placement], profile: Profile) -> Fit:
    """How many more of ``profile`` fit, by placing them one after the other."""
    placed = list(held)
    while True:
        answer = plan(cards, placed, profile)
        if answer.placement is None:
            return Fit(len(placed) - len(held), "; ".join(answer.reasons))
        placed.append(answer.placement)


def choose(
    cards: Sequence[Card], held: Sequence[Placement], profile: Profile, card: str | None
) -> Placement:
    """:func:`plan`, with a refusal as an error.

    Raises:
        NotFoundError: ``card-not-found``.
        CapacityError: ``no-room``; the message holds every reason.
    """
    if card is not None and card not in {item.name for item in cards}:
        known = ", ".join(item.name for item in cards)
        raise NotFoundError(
            f'there is no card "{card}"',
            code="card-not-found",
            where="planner",
            hint=f"cards: {known}",
        )
    answer = plan(cards, held, profile, card)
    if answer.placement is None:
        raise CapacityError(
            f'no room for a function of profile "{profile.name}": {"; ".join(answer.reasons)}',
            code="no-room",
            where="planner",
            hint="delete a function, take a smaller profile or another card (accelctl profiles)",
        )
    return answer.placement
