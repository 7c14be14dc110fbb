"""A card as a grid: the numbers of its chips and links, and which port leads where.

Standard library only, and nothing of accelvisor's: every room may import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple


class LinkKind(StrEnum):
    """Where a link runs."""

    INTER_CHIP = "inter-chip"  # between chips of one board
    INTER_CARD = "inter-card"  # a cable between two boards


class Axis(StrEnum):
    """Which rings a link is part of."""

    ROW = "row"
    COLUMN = "column"


class Port(StrEnum):
    """The ports of a chip."""

    WEST = "W"
    EAST = "E"
    NORTH = "N"
    SOUTH = "S"


@dataclass(frozen=True, slots=True)
class Wire:
    """What a link can carry in each of its two directions, at the same time.

    Attributes:
        latency: model cycles from the last byte that leaves to its arrival.
        bytes_per_cycle: of each direction.
    """

    latency: int
    bytes_per_cycle: int


#: With these two, eight flits of 256 bytes are just what is under way until the first one's credit
#: is back, so a long message never waits for credits.
INTER_CHIP = Wire(latency=28, bytes_per_cycle=32)
INTER_CARD = Wire(latency=56, bytes_per_cycle=16)
#: CCIX as in US 11,544,067: 16 lanes of 25 GT/s at a model clock of 1 GHz. The latency, that of a
#: PCIe hop, is our own; long messages wait for credits on it (docs/fabric.md).
CCIX = Wire(latency=150, bytes_per_cycle=50)

WIRES: Mapping[LinkKind, Wire] = {
    LinkKind.INTER_CHIP: INTER_CHIP,
    LinkKind.INTER_CARD: INTER_CARD,
}


class Place(NamedTuple):
    """Where a chip sits; ``row`` counts within its board."""

    board: int
    row: int
    column: int


@dataclass(frozen=True, slots=True)
class GridLink:
    """One link.

    Attributes:
        ends: the chips that it joins; the first one's port is E or S, the second one's W or N.
        ring: of a link along a row, the row's number counted through all boards; of one along a
            column, the column's.
    """

    number: int
    ends: tuple[int, int]
    kind: LinkKind
    axis: Axis
    ring: int

    def other(self, chip: int) -> int:
        """The end that is not ``chip``."""
        return self.ends[1] if chip == self.ends[0] else self.ends[0]


@dataclass(frozen=True)
class Grid:
    """``boards`` boards of ``rows`` times ``columns`` chips, cabled together.

    Chip number = (board * rows + row) * columns + column. Links go along each row, which a link
    closes to a horizontal ring when there are more than two columns; columns continue through the
    boards and close to vertical rings when there are more than two rows in all. They are numbered
    row by row, then column by column, the closing link last in each.

    Raises:
        ValueError: a size is less than 1.
    """

    boards: int
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.boards, self.rows, self.columns) < 1:
            raise ValueError(f"a grid of {self.boards} x {self.rows} x {self.columns} chips")

    @property
    def lines(self) -> int:
        """Rows of all boards together."""
        return self.boards * self.rows

    @property
    def chips(self) -> int:
        return self.lines * self.columns

    @cached_property
    def links(self) -> tuple[GridLink, ...]:
        """By their numbers."""
        found: list[GridLink] = []

        def lay(axis: Axis, ring: int, chips: list[int]) -> None:
            for ends in pairwise([*chips, chips[0]] if len(chips) > 2 else chips):
                same = self.board(ends[0]) == self.board(ends[1])
                kind = LinkKind.INTER_CHIP if same else LinkKind.INTER_CARD
                found.append(GridLink(len(found), ends, kind, axis, ring))

        for line in range(self.lines):
            lay(Axis.ROW, line, [line * self.columns + at for at in range(self.columns)])
        for column in range(self.columns):
            lay(Axis.COLUMN, column, [line * self.columns + column for line in range(self.lines)])
        return tuple(found)

    @cached_property
    def _ports(self) -> tuple[Mapping[Port, GridLink], ...]:
        ports: tuple[dict[Port, GridLink], ...] = tuple({} for _ in range(self.chips))
        for link in self.links:
            out, into = (
                (Port.EAST, Port.WEST) if link.axis is Axis.ROW else (Port.SOUTH, Port.NORTH)
            )
            ports[link.ends[0]][out] = link
            ports[link.ends[1]][into] = link
        return ports

    def ports(self, chip: int) -> Mapping[Port, GridLink]:
        """The link at each port of a chip that has one. Raises IndexError: no such chip."""
        return self._ports[self._known(chip)]

    def neighbours(self, chip: int) -> Mapping[int, int]:
        """From each chip that a link joins with ``chip`` to that link's number.

        Raises:
            IndexError: no such chip.
        """
        return {link.other(chip): link.number for link in self.ports(chip).values()}

    def board(self, chip: int) -> int:
        """The board that a chip is on."""
        return chip // (self.rows * self.columns)

    def line(self, chip: int) -> int:
        """A chip's row, counted through all boards."""
        return chip // self.columns

    def column(self, chip: int) -> int:
        return chip % self.columns

    def place(self, chip: int) -> Place:
        """Raises IndexError: no such chip."""
        line, column = divmod(self._known(chip), self.columns)
        return Place(*divmod(line, self.rows), column)

    def chip(self, board: int, row: int, column: int) -> int:
        """The chip at a place. Raises IndexError: there is none."""
        inside = 0 <= board < self.boards and 0 <= row < self.rows and 0 <= column < self.columns
        if not inside:
            raise IndexError(f"no chip at board {board}, row {row}, column {column}")
        return (board * self.rows + row) * self.columns + column

    def _known(self, chip: int) -> int:
        if not 0 <= chip < self.chips:
            raise IndexError(f"no chip {chip}")
        return chip
