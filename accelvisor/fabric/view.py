"""What a picture of cards shows: values that are taken from wherever, and drawn in two ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from accelvisor.errors import UsageError
from accelvisor.fabric.fabric import NOBODY, Fabric
from accelvisor.fabric.grid import Grid
from accelvisor.fabric.links import ChipState, LinkState


@dataclass(frozen=True, slots=True)
class ChipView:
    """A chip; ``held`` of its ``total`` cores are somebody's."""

    state: ChipState = ChipState.ENABLED
    owner: str = NOBODY
    held: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class LinkView:
    """A link, and the bytes that it carried."""

    state: LinkState = LinkState.DOWN
    owner: str = NOBODY
    bytes: int = 0


@dataclass(frozen=True)
class CardView:
    """One card; chips and links in the order of their numbers, which the grid gives them.

    Raises:
        UsageError: not as many chips or links as the grid has.
    """

    name: str
    grid: Grid
    chips: Sequence[ChipView]
    links: Sequence[LinkView]

    def __post_init__(self) -> None:
        have, want = (len(self.chips), len(self.links)), (self.grid.chips, len(self.grid.links))
        if have != want:
            raise UsageError(
                f"card {self.name} is drawn with {have[0]} chips and {have[1]} links, its grid has "
                f"{want[0]} and {want[1]}", where="fabric",
            )  # fmt: skip

    @cached_property
    def owners(self) -> tuple[str, ...]:
        """In the order in which they appear."""
        names = [chip.owner for chip in self.chips] + [link.owner for link in self.links]
        return tuple(dict.fromkeys(name for name in names if name != NOBODY))

    def links_of(self, owner: str) -> list[LinkView]:
        return [link for link in self.links if link.owner == owner]


@dataclass(frozen=True, slots=True)
class View:
    """Cards, in the order in which they are drawn."""

    cards: Sequence[CardView]


def card_view(name: str, fabric: Fabric, held: Sequence[int] = (), total: int = 0) -> CardView:
    """A fabric as it is now.

    Args:
        held: cores of each chip that are somebody's; none when empty.
        total: cores of each chip.
    """
    numbers = range(fabric.grid.chips)
    cores = list(held) or [0] * len(numbers)
    chips = [ChipView(fabric.chip(n), fabric.owner(n), cores[n], total) for n in numbers]
    links = [
        LinkView(link.state, fabric.link_owner(n) or NOBODY, link.bytes)
        for n, link in ((n, fabric.link(n)) for n in range(len(fabric.grid.links)))
    ]
    return CardView(name, fabric.grid, chips, links)


def amount(nbytes: int) -> str:
    """At most five characters: 999, 1.2K, 340M."""
    value = float(nbytes)
    for unit in ("", "K", "M", "G", "T", "P"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"
        value /= 1024
    return f"{value:.0f}E"
