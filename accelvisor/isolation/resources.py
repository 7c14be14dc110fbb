"""What a card has, and the part of it that one function holds. Numbers only, nothing here acts.

Cores, links, queues and vectors are numbered within their card, memory lies in equal banks. All of
these belong to one function at a time; what functions share is the card's host port, by weight
(:mod:`accelvisor.isolation.fair`), and host CPUs, by policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import chain, pairwise

from accelvisor.abi.registers import PAGE
from accelvisor.fabric.grid import Grid
from accelvisor.fabric.links import ChipState
from accelvisor.isolation.ranges import Range as Range


class Policy(StrEnum):
    """How a function gets host CPUs when others want them too."""

    GUARANTEED = "guaranteed"  # a host CPU of its own for each core
    BURSTABLE = "burstable"  # its share, and cores that nobody holds until somebody does
    BEST_EFFORT = "best-effort"  # what the others leave


class Links(StrEnum):
    """What a function of several chips must have to be placed."""

    ANY = "any"  # the best there is: a ring of its chips, else whatever links join them
    RING = "ring"  # a ring of its chips, or it is not placed


@dataclass(frozen=True, slots=True)
class Card:
    """One emulated card: a grid of chips on one or several boards.

    Attributes:
        memory_bytes: of the whole card, in ``banks`` equal banks.
        queues: pairs of rings that its functions may have together.
        functions: the most it can be cut into (SR-IOV's TotalVFs); each takes one vector.
        host_port: bytes a second that DMA moves, for all functions together; 0 is no limit.
        boards: physical cards, cabled together.
        rows: of chips on each of them; a row has ``chips / (boards * rows)``.
        disabled, passing: chips that the operator has set to these modes; the others are enabled.
    """

    name: str
    chips: int
    cores_per_chip: int
    memory_bytes: int
    banks: int = 1
    queues: int = 1024
    functions: int = 256
    host_port: int = 0
    boards: int = 1
    rows: int = 1
    disabled: frozenset[int] = frozenset()
    passing: frozenset[int] = frozenset()

    @property
    def cores(self) -> int:
        return self.chips * self.cores_per_chip

    @property
    def bank_bytes(self) -> int:
        """Of each bank, in whole pages."""
        return self.memory_bytes // self.banks // PAGE * PAGE

    @property
    def columns(self) -> int:
        return self.chips // (self.boards * self.rows)

    @property
    def links(self) -> Sequence[tuple[int, int]]:
        """The chips that each link joins, in the order of the links' numbers."""
        return tuple(link.ends for link in self.grid.links)

    @property
    def grid(self) -> Grid:
        """Its chips as the fabric numbers them."""
        return _grid(self.boards, self.rows, self.columns)

    def board(self, chip: int) -> int:
        """The board that a chip is on."""
        return self.grid.board(chip)

    def kind(self, link: int) -> str:
        """``inter-chip``, or ``inter-card`` where its ends are on two boards."""
        return self.grid.links[link].kind.value

    def mode(self, chip: int) -> ChipState:
        if chip in self.disabled:
            return ChipState.DISABLED
        return ChipState.PASS_THROUGH if chip in self.passing else ChipState.ENABLED


@dataclass(frozen=True, slots=True)
class Profile:
    """A named size of function: ``cores / chips`` cores on each of ``chips`` chips of a card.

    Attributes:
        shape: pairs of its chips, by the function's own numbers, that a link has to join; of one
            that was elsewhere before, whose programs name these.
    """

    name: str
    cores: int
    chips: int
    memory_bytes: int
    window_bytes: int
    queues: int
    ring_entries: int
    policy: Policy = Policy.BURSTABLE
    weight: int = 100
    links: Links = Links.ANY
    shape: Sequence[tuple[int, int]] = ()

    @property
    def cores_per_chip(self) -> int:
        return self.cores // self.chips


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a function sits, all of it its own.

    Attributes:
        cores: by chip, both numbered within ``card``; the function's chip 0 is the first.
        ranges: its memory; the function sees them one after the other, from address 0 on.
        queues: numbers of the card's queues; the function's queue 0 is the first.
        vector: its interrupt vector; -1 with no part of a card.
        cpus: host CPUs that no other function may use; of guaranteed functions only.
        links: numbers of the card's links.
    """

    card: str
    cores: Mapping[int, Sequence[int]]
    ranges: Sequence[Range] = ()
    queues: Sequence[int] = ()
    vector: int = -1
    cpus: Sequence[int] = ()
    links: Sequence[int] = ()

    @property
    def memory_bytes(self) -> int:
        return sum(item.nbytes for item in self.ranges)

    @property
    def core_count(self) -> int:
        return sum(map(len, self.cores.values()))

    def pairs(self) -> set[tuple[int, int]]:
        """The cores as (chip, core)."""
        return {(chip, core) for chip, cores in self.cores.items() for core in cores}


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
        for link in item.links:
            claim(name, card.name, "link", link)
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
    wrong += [
        f"chip {chip} is {card.mode(chip)}"
        for chip, cores in item.cores.items()
        if cores and card.mode(chip) is not ChipState.ENABLED
    ]
    wrong += _astray(card, item)
    wrong += [f"no queue {queue}" for queue in item.queues if not 0 <= queue < card.queues]
    if not 0 <= item.vector < card.functions:
        wrong.append(f"no vector {item.vector}")
    for piece in item.ranges:
        inside = 0 <= piece.bank < card.banks and 0 <= piece.start < piece.end <= card.bank_bytes
        if not inside or piece.start % PAGE or piece.nbytes % PAGE:
            wrong.append(f"no memory {piece.start:#x}+{piece.nbytes:#x} in bank {piece.bank}")
    return wrong


@lru_cache(maxsize=64)
def _grid(boards: int, rows: int, columns: int) -> Grid:
    """Its links are worked out once for all cards of a size."""
    return Grid(boards, rows, columns)


def _astray(card: Card, item: Placement) -> list[str]:
    """Links that are not there, and those that end at a chip which is neither its own nor lets
    links pass.
    """
    ends = card.links
    wrong = [f"no link {link}" for link in item.links if not 0 <= link < len(ends)]
    may = {chip for chip, cores in item.cores.items() if cores} | card.passing
    for link in item.links:
        if 0 <= link < len(ends) and not may.issuperset(ends[link]):
            wrong.append(f"link {link} joins chips {ends[link]}, which are not both its own")
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
