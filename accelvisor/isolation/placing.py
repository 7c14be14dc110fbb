"""Where a function goes: first card in order, fullest chips that suffice, fewest pieces of memory.
Of several chips those that links can join (:mod:`accelvisor.isolation.linking`).

:func:`plan` answers with a placement, or with every reason why none exists; each reason names the
resource, so that :func:`fits` can say what limits a profile's number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from accelvisor.abi.registers import PAGE
from accelvisor.errors import CapacityError, ConflictError, NotFoundError
from accelvisor.fabric.links import ChipState
from accelvisor.isolation import linking
from accelvisor.isolation.linking import Joined, Room
from accelvisor.isolation.resources import (
    Card,
    Links,
    Placement,
    Policy,
    Profile,
    Range,
)
from accelvisor.limits import LIMITS, MIB


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a function does not fit: which resource is short, and a sentence."""

    resource: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Answer:
    """A placement, or the reasons against it, for each card that was considered."""

    placement: Placement | None
    reasons: Sequence[Reason] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """How many more functions of a profile fit now, and what limits that number."""

    count: int
    limit: str
    resources: Sequence[str] = ()


class Free:
    """What is left of one card; shrinks as placements are taken."""

    def __init__(self, card: Card, held: Iterable[Placement] = ()) -> None:
        self.card = card
        self._cores = [
            set(range(card.cores_per_chip if card.mode(chip) is ChipState.ENABLED else 0))
            for chip in range(card.chips)
        ]
        self._links = {
            number for number, ends in enumerate(card.links) if card.disabled.isdisjoint(ends)
        }
        self._gaps = {bank: [(0, card.bank_bytes)] for bank in range(card.banks)}
        self._queues = set(range(card.queues))
        self._vectors = set(range(card.functions))
        for item in held:
            if item.card == card.name:
                self.take(item)

    def take(self, item: Placement) -> None:
        """Somebody holds this. What a card that shrank no longer has is ignored."""
        for chip, core in item.pairs():
            if chip < self.card.chips:
                self._cores[chip].discard(core)
        for piece in item.ranges:
            gaps = self._gaps.get(piece.bank, [])
            self._gaps[piece.bank] = [
                part for low, high in gaps for part in _without(low, high, piece.start, piece.end)
            ]
        self._links.difference_update(item.links)
        self._queues.difference_update(item.queues)
        self._vectors.discard(item.vector)

    @property
    def cores(self) -> list[list[int]]:
        """Free cores by chip."""
        return [sorted(cores) for cores in self._cores]

    @property
    def core_count(self) -> int:
        return sum(map(len, self._cores))

    @property
    def gaps(self) -> list[Range]:
        """Free memory, in bank order."""
        return [
            Range(bank, low, high - low)
            for bank, gaps in sorted(self._gaps.items())
            for low, high in gaps
        ]

    @property
    def memory_bytes(self) -> int:
        return sum(gap.nbytes for gap in self.gaps)

    @property
    def links(self) -> list[int]:
        """Numbers of free links; those of a disabled chip are not."""
        return sorted(self._links)

    @property
    def queues(self) -> list[int]:
        return sorted(self._queues)

    @property
    def vectors(self) -> list[int]:
        return sorted(self._vectors)

    def ranges(self, nbytes: int, most: int = LIMITS.segments) -> list[Range]:
        """Memory for a function: the smallest gap that is large enough, else the largest gaps.
        Empty when there is too little of it, or only in more than ``most`` pieces.
        """
        need = (nbytes + PAGE - 1) // PAGE * PAGE
        gaps = self.gaps
        whole = min(
            (gap for gap in gaps if gap.nbytes >= need),
            key=lambda gap: (gap.nbytes, gap),
            default=None,
        )
        if whole is not None:
            return [Range(whole.bank, whole.start, need)]
        taken: list[Range] = []
        for gap in sorted(gaps, key=lambda gap: (-gap.nbytes, gap))[:most]:
            size = min(gap.nbytes, need)
            taken.append(Range(gap.bank, gap.start, size))
            need -= size
            if not need:
                return sorted(taken)
        return []


def _without(low: int, high: int, start: int, end: int) -> list[tuple[int, int]]:
    parts = ((low, min(high, start)), (max(low, end), high))
    return [(a, b) for a, b in parts if a < b]


class Cpus:
    """The host CPUs that functions may use, and those that nobody holds for itself."""

    def __init__(self, every: Sequence[int], held: Iterable[Placement] = ()) -> None:
        self.every = tuple(every)
        self._held = {cpu for item in held for cpu in item.cpus}

    @property
    def shared(self) -> tuple[int, ...]:
        """For everybody who has none of its own, and the host itself."""
        return tuple(cpu for cpu in self.every if cpu not in self._held)

    def exclusive(self, count: int) -> tuple[int, ...]:
        """The last ``count`` of them; one is always left to the others. Empty: too few."""
        left = self.shared
        return left[len(left) - count :] if 0 < count < len(left) else ()

    def take(self, item: Placement) -> None:
        self._held.update(item.cpus)


def plan(
    cards: Sequence[Card],
    held: Sequence[Placement],
    profile: Profile,
    card: str | None = None,
    cpus: Sequence[int] = (),
    static: Collection[str] = (),
) -> Answer:
    """Place ``profile`` beside what is ``held``.

    Packing the fullest chips keeps whole chips free for profiles that want many cores of one.

    Args:
        card: the only one to look at.
        cpus: of the host, for guaranteed functions.
        static: names of cards that are cut once: nothing is placed on these.
    """
    chosen = [item for item in cards if card is None or item.name == card]
    if not chosen:
        text = f'there is no card "{card}"' if card else "no card is configured"
        return Answer(None, [Reason("cards", text)])
    left = [Free(item, held) for item in chosen]
    return _plan(left, Cpus(cpus, held), len(held), profile, static)


def _plan(
    left: Sequence[Free], cpus: Cpus, count: int, profile: Profile, static: Collection[str]
) -> Answer:
    if count >= LIMITS.functions:
        text = f"this host has {count} functions, the maximum"
        return Answer(None, [Reason("functions", text)])
    exclusive: tuple[int, ...] = ()
    reasons: list[Reason] = []
    if profile.policy is Policy.GUARANTEED:
        exclusive = cpus.exclusive(profile.cores)
        if not exclusive:
            able = max(0, len(cpus.shared) - 1)
            text = f"the host can give {able} of its CPUs away, {profile.cores} wanted"
            return Answer(None, [Reason("cpus", text)])
    for free in left:
        if free.card.name in static:
            reasons.append(Reason("cards", f"{free.card.name}: it is cut into static functions"))
            continue
        answer = on_card(free, profile, exclusive)
        if isinstance(answer, Placement):
            return Answer(answer)
        reasons += answer
    return Answer(None, reasons)


def on_card(left: Free, profile: Profile, cpus: Sequence[int] = ()) -> Placement | list[Reason]:
    """The placement on one card, or *all* reasons against it."""
    name, each = left.card.name, profile.cores_per_chip
    free = left.cores
    able = {chip: len(cores) for chip, cores in enumerate(free) if len(cores) >= each}
    ranges = left.ranges(profile.memory_bytes)
    reasons = [*_short(left, profile, bool(ranges))]
    joined: Joined | None = None
    if len(able) < profile.chips:
        text = (
            f"{name}: {len(able)} of {left.card.chips} chips have {_count(each, 'core')} free,"
            f" {profile.chips} wanted"
        )
        reasons.append(Reason("cores", text))
    else:
        joined = join(left, able, profile)
        if joined is None:
            what = "with the links that it has" if profile.shape else "in a ring of free links"
            text = f"{name}: no {profile.chips} chips with {_count(each, 'core')} free are {what}"
            reasons.append(Reason("links", text))
    if reasons or joined is None:
        return reasons
    cores = {chip: tuple(free[chip][:each]) for chip in joined.chips}
    queues = tuple(left.queues[: profile.queues])
    return Placement(
        name, cores, tuple(ranges), queues, left.vectors[0], tuple(cpus), tuple(joined.links)
    )


def join(left: Free, able: Mapping[int, int], profile: Profile) -> Joined | None:
    """Which of the ``able`` chips (with their free cores), and which links; None where links that
    have to be there are not.
    """
    whole = profile.cores_per_chip == left.card.cores_per_chip
    room = Room(left.card, able, whole, frozenset(left.links))
    if profile.shape:
        return linking.shaped(room, profile.chips, profile.shape)
    if profile.chips == 1:
        return linking.apart(room, 1)
    found = linking.ring(room, profile.chips)
    if found is None and profile.links is Links.ANY:
        found = linking.connected(room, profile.chips) or linking.apart(room, profile.chips)
    return found


def _short(left: Free, profile: Profile, placed: bool) -> Iterable[Reason]:
    """What else than cores is missing."""
    name, wanted = left.card.name, f"{profile.memory_bytes // MIB} MiB wanted"
    free = left.memory_bytes
    if free < profile.memory_bytes:
        yield Reason("memory", f"{name}: {free // MIB} MiB of memory free, {wanted}")
    elif not placed:
        text = f"{name}: {free // MIB} MiB of memory free, but in too small pieces, {wanted}"
        yield Reason("memory", text)
    if len(left.queues) < profile.queues:
        text = f"{name}: {_count(len(left.queues), 'queue')} free, {profile.queues} wanted"
        yield Reason("queues", text)
    if not left.vectors:
        yield Reason("vectors", f"{name}: it is cut into {left.card.functions}, the most it can be")


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def fits(
    cards: Sequence[Card],
    held: Sequence[Placement],
    profile: Profile,
    cpus: Sequence[int] = (),
    static: Collection[str] = (),
) -> Fit:
    """How many more of ``profile`` fit, by placing them one after the other; ``static`` as with
    :func:`plan`.
    """
    left = [Free(item, held) for item in cards]
    if not left:
        return Fit(0, "no card is configured", ("cards",))
    host = Cpus(cpus, held)
    count = 0
    while True:
        answer = _plan(left, host, len(held) + count, profile, static)
        if answer.placement is None:
            resources = tuple(dict.fromkeys(reason.resource for reason in answer.reasons))
            return Fit(count, "; ".join(map(str, answer.reasons)), resources)
        host.take(answer.placement)
        for item in left:
            if item.card.name == answer.placement.card:
                item.take(answer.placement)
        count += 1


def choose(
    cards: Sequence[Card],
    held: Sequence[Placement],
    profile: Profile,
    card: str | None,
    cpus: Sequence[int] = (),
    static: Collection[str] = (),
) -> Placement:
    """:func:`plan`, with a refusal as an error.

    Raises:
        NotFoundError: ``card-not-found``.
        ConflictError: ``card-enabled``: ``card`` is cut into static functions.
        CapacityError: ``no-room``; the message holds every reason.
    """
    require_card(cards, card)
    if card is not None and card in static:
        raise ConflictError(
            f'card "{card}" is cut into static functions, and none of a profile fits beside them',
            code="card-enabled",
            where=f"card:{card}",
            hint=f"accelctl attach VM --card {card}",
        )
    answer = plan(cards, held, profile, card, cpus, static)
    if answer.placement is None:
        reasons = "; ".join(map(str, answer.reasons))
        raise CapacityError(
            f'no room for a function of profile "{profile.name}": {reasons}',
            code="no-room",
            where="planner",
            hint="delete a function, take a smaller profile or another card (accelctl profiles)",
        )
    return answer.placement


def require_card(cards: Sequence[Card], name: str | None) -> None:
    """NotFoundError ``card-not-found``, unless a card of that name, or no name, is given."""
    if name is not None and name not in {item.name for item in cards}:
        known = ", ".join(item.name for item in cards)
        raise NotFoundError(
            f'there is no card "{name}"',
            code="card-not-found",
            where="planner",
            hint=f"cards: {known}",
        )
