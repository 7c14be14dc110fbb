"""The methods of the Admin interface that change who has how much of a card."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from accelvisor.daemon import topology, wire
from accelvisor.daemon.assigning import Assigning, Wish
from accelvisor.daemon.cutting import Cutting
from accelvisor.daemon.shaping import Shaping, Size
from accelvisor.errors import UsageError
from accelvisor.fabric.links import ChipState
from accelvisor.isolation import placing
from accelvisor.isolation.exhaustion import OnExhaustion
from accelvisor.limits import LIMITS

if TYPE_CHECKING:
    from accelvisor.daemon.functions import Functions
    from accelvisor.isolation.planner import Plan
    from accelvisor.isolation.resources import Card

#: For ``card``: whichever has a partition free.
ANY = "any"
_STEP: dict[str, Any] = {"waiting": None, "progress": None, "report": None, "assigned": None}


class IsolationMethods:
    """A part of :class:`accelvisor.daemon.service.AdminService`."""

    _functions: Functions
    _shaping: Shaping
    _cutting: Cutting
    _assigning: Assigning

    # --- cards ------------------------------------------------------------------------------------

    async def list_cards(self) -> dict[str, Any]:
        return {"cards": [self._card(item) for item in self._functions.cards]}

    async def get_card(self, card: str) -> dict[str, Any]:
        cards = self._functions.cards
        placing.require_card(cards, card)
        return {"card": next(self._card(item) for item in cards if item.name == card)}

    async def set_card_functions(self, card: str, number: int) -> dict[str, Any]:
        await self._cutting.set_number(card, number)
        return await self.get_card(card)

    async def get_card_config_space(self, card: str) -> dict[str, Any]:
        return {"hexdump": self._cutting.physical(card).hexdump()}

    async def set_chip(self, card: str, chip: int, mode: str) -> dict[str, Any]:
        await self._cutting.chips.set_mode(card, chip, ChipState(mode.replace("_", "-")))
        return await self.get_card(card)

    async def topology(self, card: str | None = None) -> dict[str, Any]:
        placing.require_card(self._functions.cards, card)
        wanted = [item for item in self._functions.cards if card in (None, item.name)]
        return {"cards": await topology.cards(self._functions, wanted)}

    def _card(self, card: Card) -> dict[str, Any]:
        made = wire.card(card, self._functions.registry.all())
        return made | self._assigning.view(card.name)

    async def attach_partition(
        self,
        domain: str,
        card: str,
        on_exhaustion: str | None = None,
        timeout: float | None = None,
        live: bool | None = None,
        persistent: bool | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        if timeout is not None and not 0 < timeout <= LIMITS.function_wait_s:
            raise UsageError(
                f"timeout is up to {LIMITS.function_wait_s:g} seconds", where="admin"
            )
        policy = OnExhaustion(on_exhaustion or OnExhaustion.DENY)
        wish = Wish(domain, None if card == ANY else card, policy, timeout, live, persistent)
        async with aclosing(self._assigning.attach(wish)) as steps:
            async for step in steps:
                yield _STEP | step

    # --- functions --------------------------------------------------------------------------------

    async def trace(self, function: str) -> dict[str, Any]:
        return {"trace": await self._functions.trace(function)}

    async def plan_function(self, profile: str, card: str | None = None) -> dict[str, Any]:
        return {"plan": wire.plan(await self._functions.plan(profile, card))}

    async def resize_function(
        self,
        function: str,
        cores: int | None = None,
        memory_bytes: int | None = None,
        dry_run: bool | None = None,
    ) -> dict[str, Any]:
        size = Size(cores, memory_bytes)
        return self._changed(await self._shaping.resize(function, size, dry_run=bool(dry_run)))

    async def revoke_function(self, function: str, dry_run: bool | None = None) -> dict[str, Any]:
        return self._changed(await self._shaping.revoke(function, dry_run=bool(dry_run)))

    def _changed(self, plan: Plan) -> dict[str, Any]:
        functions = self._functions
        item = functions.registry.find(plan.function)
        return {"plan": wire.plan(plan), "function": wire.function(item, functions.world.paths)}
