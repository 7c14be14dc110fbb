"""A grid's chips and links with their owners: who may switch what, and when.

A chip belongs to one owner, or to nobody (:data:`NOBODY`). A link belongs to whoever has both of
its ends. So no two owners ever have a link together, and one between two owners stays down. What
changes a link's owner, or takes an end away, is refused until the link is down.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from accelvisor.errors import ConflictError, NotFoundError, PermissionDenied
from accelvisor.fabric.former import NoRing, Ring, Torus, form
from accelvisor.fabric.grid import Grid, GridLink
from accelvisor.fabric.links import (
    CHIP_TABLE,
    Broken,
    ChipEvent,
    ChipState,
    Link,
    LinkState,
    Refusal,
)

#: Owner of what is free.
NOBODY = ""


class Power(StrEnum):
    """What a chip draws."""

    OFF = "off"  # disabled
    LOW = "low"  # none of its links is anything but down
    FULL = "full"


class Fabric:
    """The chips and links of one card, fresh or as they were elsewhere.

    Args:
        owners, states: of each chip; all are free and enabled when None.
        links: in the order of their numbers; all are down when None.

    Raises:
        ValueError: not so many owners, states or links as the grid has.
    """

    def __init__(
        self,
        grid: Grid,
        owners: Sequence[str] | None = None,
        links: Sequence[Link] | None = None,
        states: Sequence[ChipState] | None = None,
    ) -> None:
        self.grid = grid
        self._owners = [NOBODY] * grid.chips if owners is None else list(owners)
        self._chips = [ChipState.ENABLED] * grid.chips if states is None else list(states)
        self._links = [Link() for _ in grid.links] if links is None else list(links)
        if not len(self._owners) == len(self._chips) == grid.chips or (
            len(self._links) != len(grid.links)
        ):
            raise ValueError(f"a grid of {grid.chips} chips and {len(grid.links)} links")

    # --- what there is ----------------------------------------------------------------------------

    def chip(self, chip: int) -> ChipState:
        """Raises NotFoundError: ``chip-not-found``."""
        return self._chips[self._known(chip)]

    def owner(self, chip: int) -> str:
        """Raises NotFoundError: ``chip-not-found``."""
        return self._owners[self._known(chip)]

    def power(self, chip: int) -> Power:
        """Raises NotFoundError: ``chip-not-found``."""
        if self.chip(chip) is ChipState.DISABLED:
            return Power.OFF
        return Power.FULL if self._live(chip) else Power.LOW

    def card_enabled(self, board: int) -> bool:
        """Whether any chip of a board is enabled."""
        return any(
            state is ChipState.ENABLED
            for chip, state in enumerate(self._chips)
            if self.grid.board(chip) == board
        )

    def link(self, number: int) -> Link:
        """To send and deliver on; switching is done here. Raises NotFoundError: ``link-not-found``.
        """
        self._laid(number)
        return self._links[number]

    def link_owner(self, number: int) -> str | None:
        """Who has both ends, :data:`NOBODY` if both are free; None where two owners meet.

        Raises:
            NotFoundError: ``link-not-found``.
        """
        one, other = (self._owners[chip] for chip in self._laid(number).ends)
        return one if one == other else None

    def group(self, owner: str) -> tuple[int, ...]:
        """The enabled chips of an owner."""
        return tuple(
            chip
            for chip, state in enumerate(self._chips)
            if state is ChipState.ENABLED and self._owners[chip] == owner
        )

    def formed(self, owner: str) -> Ring | Torus | NoRing:
        """What the owner's enabled chips make over those of its links that are up; what passes for
        it may lie between.
        """
        passing = [
            chip
            for chip, state in enumerate(self._chips)
            if state is ChipState.PASS_THROUGH and self._owners[chip] == owner
        ]
        up = [
            link.number
            for link in self.grid.links
            if self._links[link.number].state is LinkState.UP
            and self.link_owner(link.number) == owner
        ]
        return form(self.grid, self.group(owner), up, passing)

    # --- chips, by the host -----------------------------------------------------------------------

    def enable(self, chip: int) -> None:
        """Raises NotFoundError: ``chip-not-found``."""
        self._switch(chip, ChipEvent.ENABLE)

    def pass_through(self, chip: int) -> None:
        """Let it only pass on what comes. Raises NotFoundError: ``chip-not-found``."""
        self._switch(chip, ChipEvent.PASS)

    def disable(self, chip: int) -> None:
        """Raises as :meth:`own`."""
        self._at_rest(chip)
        self._switch(chip, ChipEvent.DISABLE)

    def own(self, chip: int, owner: str) -> None:
        """Give a chip to an owner, or to nobody.

        Raises:
            NotFoundError: ``chip-not-found``.
            ConflictError: ``link-busy``, one of its links is not down.
        """
        if owner != self.owner(chip):
            self._at_rest(chip)
            self._owners[chip] = owner

    # --- links ------------------------------------------------------------------------------------

    def activate(self, number: int, by: str, now: int) -> None:
        """Begin to train a link.

        Raises:
            NotFoundError: ``link-not-found``.
            PermissionDenied: ``link-not-yours``, ``by`` has not both ends.
            ConflictError: ``chip-disabled``, an end is; ``link-busy``, it is not down;
                ``link-failed``.
        """
        link = self._yours(number, by)
        for chip in link.ends:
            if self._chips[chip] is ChipState.DISABLED:
                raise ConflictError(
                    f"link {number} ends at chip {chip}, which is disabled",
                    code="chip-disabled", where="fabric", hint="enable the chip first",
                )  # fmt: skip
        self._links[number].activate(now)

    def deactivate(self, number: int, by: str, now: int) -> None:
        """Let a link drain, then drop it.

        Raises:
            NotFoundError: ``link-not-found``.
            PermissionDenied: ``link-not-yours``.
            ConflictError: ``link-not-up``, it is down; ``link-busy``, it drains already;
                ``link-failed``.
        """
        self._yours(number, by)
        self._links[number].deactivate(now)

    def fail(self, number: int) -> Broken:
        """A link broke. Raises NotFoundError: ``link-not-found``."""
        return self.link(number).fail()

    def clear(self, number: int, by: str) -> None:
        """A failed link may be activated again. Raises as :meth:`deactivate`."""
        self._yours(number, by)
        self._links[number].clear()

    def advance(self, now: int) -> None:
        """Do on all links what is due by now."""
        for link in self._links:
            link.advance(now)

    # --- rules ------------------------------------------------------------------------------------

    def _known(self, chip: int) -> int:
        if not 0 <= chip < self.grid.chips:
            raise NotFoundError(
                f"there is no chip {chip}, the card has {self.grid.chips}",
                code="chip-not-found", where="fabric",
            )  # fmt: skip
        return chip

    def _laid(self, number: int) -> GridLink:
        if not 0 <= number < len(self.grid.links):
            raise NotFoundError(
                f"there is no link {number}, the card has {len(self.grid.links)}",
                code="link-not-found", where="fabric",
            )  # fmt: skip
        return self.grid.links[number]

    def _yours(self, number: int, by: str) -> GridLink:
        link = self._laid(number)
        if self.link_owner(number) != by:
            names = " and ".join(self._owners[chip] or "nobody" for chip in link.ends)
            raise PermissionDenied(
                f"the ends of link {number} belong to {names}, not both to {by or 'nobody'}",
                code="link-not-yours", where="fabric",
            )  # fmt: skip
        return link

    def _live(self, chip: int) -> list[int]:
        """Links of a chip that are not down."""
        numbers = [link.number for link in self.grid.ports(chip).values()]
        return sorted(n for n in numbers if self._links[n].state is not LinkState.DOWN)

    def _at_rest(self, chip: int) -> None:
        live = self._live(self._known(chip))
        if live:
            state = self._links[live[0]].state.name.lower()
            raise ConflictError(
                f"link {live[0]} of chip {chip} is {state}",
                code=Refusal.BUSY.value, where="fabric",
                hint="deactivate the chip's links, and wait until they are down",
            )  # fmt: skip

    def _switch(self, chip: int, event: ChipEvent) -> None:
        self._chips[chip] = CHIP_TABLE[self.chip(chip), event]
