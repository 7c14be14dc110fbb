"""What a card has, and the part of it that one function holds. Numbers only, nothing here acts.

Cores, queues and vectors are numbered within their card, memory lies in equal banks. All of these
belong to one function at a time; what functions share is the card's host port and its links, by
weight (:mod:`accelvisor.isolation.fair`), and host CPUs, by policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise

from accelvisor.abi.registers import PAGE


class Policy(StrEnum):
    """How a function gets host CPUs when others want them too."""

    GUARANTEED = "guaranteed"  # a host CPU of its own for each core
    BURSTABLE = "burstable"  # its share, and cores that nobody holds until somebody does
    BEST_EFFORT = "best-effort"  # what the others leave


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """``nbytes`` from ``start`` of a memory bank; both are multiples of 4 KiB."""

    bank: int
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class Card:
    """One emulated card.

    Attributes:
        memory_bytes: of the whole card, in ``banks`` equal banks.
        queues: pairs of rings that its functions may have together.
        functions: the most it can be cut into (SR-IOV's TotalVFs); each takes one vector.
        host_port: bytes a second that DMA moves, for all functions together; 0 is no limit.
    """

    name: str
    chips: int
    cores_per_chip: int
    memory_bytes: int
    banks: int = 1
    queues: int = 1024
    functions: int = 256
    host_port: int = 0

    @property
    def cores(self) -> int:
        return self.chips * self.cores_per_chip

    @property
    def bank_bytes(self) -> int:
        """Of each bank, in whole pages."""
        return self.memory_bytes // self.banks // PAGE * PAGE

    @property
    def links(self) -> Sequence[tuple[int, int]]:
        """The chips that each link joins: a ring, in chip order."""
        if self.chips < 2:
            return ()
        if self.chips == 2:
            return ((0, 1),)
        return tuple((chip, (chip + 1) % self.chips) for chip in range(self.chips))


@dataclass(frozen=True, slots=True)
class Profile:
    """A named size of function: ``cores / chips`` cores on each of ``chips`` chips of a card."""

    name: str
    cores: int
    chips: int
    memory_bytes: int
    window_bytes: int
    queues: int
    ring_entries: int
    policy: Policy = Policy.BURSTABLE
    weight: int = 100

    @property
    def cores_per_chip(self) -> int:
        return self.cores // self.chips


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a function sits, all of it its own.

    Attributes:
        cores: by chip, both numbered within ``card``.
        ranges: its memory; the function sees them one after the other, from address 0 on.
        queues: numbers of the card's queues; the function's queue 0 is the first.
        vector: its interrupt vector; -1 with no part of a card.
        cpus: host CPUs that no other function may use; of guaranteed functions only.
    """

    card: str
    cores: Mapping[int, Sequence[int]]
    ranges: Sequence[Range] = ()
    queues: Sequence[int] = ()
    vector: int = -1
    cpus: Sequence[int] = ()

    @property
    def memory_bytes(self) -> int:
        return sum(item.nbytes for item in self.ranges)

    @property
    def core_count(self) -> int:
        return sum(map(len, self.cores.values()))

    def pairs(self) -> set[tuple[int, int]]:
        """The cores as (chip, core)."""
        return {(chip, core) for chip, cores in self.cores.items() for core in cores}

    def links(self, card: Card) -> list[tuple[int, int]]:
        """Links of ``card`` that are this function's alone: it has all cores at both ends."""
        whole = {chip for chip, cores in self.cores.items() if len(cores) == card.cores_per_chip}
        return [link for link in card.links if whole.issuperset(link)]


#: No part of any card: what a revoked function holds.
NOTHING = Placement("", {})


def violations(
    cards: Sequence[Card], placements: Mapping[str, Placement], cpus: Sequence[int] | None = None
) -> list[str]:
    """What is wrong with a partition: anything outside its card, or held twice. Empty when all is
    well. Deliberately the plainest way to say it: planner and executor are held against this.

    Args:
        placements: by the name of their holder.
        cpus: of the host; None when unknown.
    """
    known = {card.name: card for card in cards}
    owner: dict[tuple[object, ...], str] = {}
    wrong: list[str] = []

    def claim(name: str, *what: object) -> None:
        before = owner.setdefault(what, name)
        if before != name:
            wrong.append(f"{' '.join(map(str, what))}: held by {before} and {name}")

    for name, item in placements.items():
        card = known.get(item.card)
        if item == NOTHING:
            continue
        if card is None:
            wrong.append(f"{name}: there is no card {item.card}")
            continue
        wrong += [f"{name}: {text}" for text in _outside(card, item)]
        for chip, core in item.pairs():
            claim(name, card.name, "core", chip, core)
        for queue in item.queues:
            claim(name, card.name, "queue", queue)
        claim(name, card.name, "vector", item.vector)
        for cpu in item.cpus:
            claim(name, "cpu", cpu)
            if cpus is not None and cpu not in cpus:
                wrong.append(f"{name}: the host has no CPU {cpu}")
    return wrong + _overlaps(placements)


def _outside(card: Card, item: Placement) -> list[str]:
    wrong = [
        f"no core {chip}.{core}"
        for chip, core in item.pairs()
        if not (0 <= chip < card.chips and 0 <= core < card.cores_per_chip)
    ]
    wrong += [f"no queue {queue}" for queue in item.queues if not 0 <= queue < card.queues]
    if not 0 <= item.vector < card.functions:
        wrong.append(f"no vector {item.vector}")
    for piece in item.ranges:
        inside = 0 <= piece.bank < card.banks and 0 <= piece.start < piece.end <= card.bank_bytes
        if not inside or piece.start % PAGE or piece.nbytes % PAGE:
            wrong.append(f"no memory {piece.start:#x}+{piece.nbytes:#x} in bank {piece.bank}")
    return wrong


def _overlaps(placements: Mapping[str, Placement]) -> list[str]:
    every = sorted(
        chain.from_iterable(
            ((item.card, piece.bank, piece.start, piece.end, name) for piece in item.ranges)
            for name, item in placements.items()
        )
    )
    return [
        f"{card} bank {bank}: {start:#x} is held by {one} and {two}"
        for (before, bank_before, _, end, one), (card, bank, start, _, two) in pairwise(every)
        if (before, bank_before) == (card, bank) and start < end
    ]
