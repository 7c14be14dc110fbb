"""What the operator lets each chip do: kept in the store, and folded into the cards as the planner
sees them.

A mode is changed while nothing is placed, and only where no function has a core or a link at that
chip: so whoever has a chip keeps it, and a daemon that is killed finds the old mode or the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accelvisor.daemon.functions import Functions
from accelvisor.errors import ConflictError, NotFoundError, StateError
from accelvisor.fabric.links import ChipState
from accelvisor.isolation import placing
from accelvisor.isolation.resources import Card, Placement


class Chips:
    """One per daemon."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._registry = functions.registry
        self._modes: dict[tuple[str, int], ChipState] = {}
        functions.as_set = self.as_set

    async def load(self) -> None:
        """Read the modes; once, before any function is placed.

        Raises:
            StateError: ``store-damaged``.
        """
        for card, chip, mode in await self._registry.chips():
            try:
                self._modes[card, chip] = ChipState(mode)
            except ValueError as error:
                raise StateError(
                    f"damaged: chip {chip} of card {card}: {error}",
                    code="store-damaged",
                    where="store",
                ) from error
        self._fold()

    def as_set(self, cards: Sequence[Card]) -> Sequence[Card]:
        """The cards with the modes of their chips. What was said of a chip that a card has no more
        is kept for when it has it again.
        """
        return [
            replace(
                item,
                disabled=self._those(item, ChipState.DISABLED),
                passing=self._those(item, ChipState.PASS_THROUGH),
            )
            for item in cards
        ]

    async def set_mode(self, card: str, chip: int, mode: ChipState) -> None:
        """Change one chip.

        Raises:
            NotFoundError: ``card-not-found``, ``chip-not-found``.
            ConflictError: ``card-enabled``, ``chip-in-use``.
        """
        await self._functions.carry(self._set(card, chip, mode))

    async def _set(self, name: str, chip: int, mode: ChipState) -> None:
        functions = self._functions
        async with functions.placing:
            placing.require_card(functions.cards, name)
            card = next(item for item in functions.cards if item.name == name)
            if not 0 <= chip < card.chips:
                raise NotFoundError(
                    f'card "{name}" has no chip {chip}',
                    code="chip-not-found",
                    where=f"card:{name}",
                    hint=f"its chips are 0 to {card.chips - 1}",
                )
            if card.mode(chip) is mode:
                return
            if name in functions.static():
                raise ConflictError(
                    f'card "{name}" is cut into static functions, and its chips are frozen',
                    code="card-enabled",
                    where=f"card:{name}",
                    hint=f"accelctl card set {name} --functions 0",
                )
            self._require_unused(card, chip)
            words = f"chip {chip} of card {name} is {mode} now"
            await self._registry.set_chip(name, chip, mode.value, words)
            functions.world.fault("chip:journaled")
            self._modes[name, chip] = mode
            self._fold()
        await functions.on_shared()  # its cores can be borrowed now, or no more

    def _require_unused(self, card: Card, chip: int) -> None:
        placements = [item for item in self._registry.held() if item.card == card.name]
        if any(_touches(card, item, chip) for item in placements):
            names = sorted(
                item.name for item in self._registry.all() if _touches(card, item.placement, chip)
            )
            raise ConflictError(
                f'chip {chip} of card "{card.name}" has functions: {", ".join(names)}',
                code="chip-in-use",
                where=f"card:{card.name}",
                hint="delete them, or move them to another card or host",
            )

    def _fold(self) -> None:
        self._functions.cards = self.as_set(self._functions.cards)

    def _those(self, card: Card, mode: ChipState) -> frozenset[int]:
        modes = self._modes.items()
        return frozenset(
            chip for (name, chip), has in modes
            if name == card.name and has is mode and chip < card.chips
        )  # fmt: skip


def _touches(card: Card, placement: Placement, chip: int) -> bool:
    """It has cores of the chip, or a link that ends there."""
    if placement.card != card.name:
        return False
    ends = {end for n in placement.links if 0 <= n < len(card.links) for end in card.links[n]}
    return bool(placement.cores.get(chip)) or (chip in ends and chip not in placement.cores)
