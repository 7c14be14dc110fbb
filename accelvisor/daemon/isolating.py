"""The methods of the Admin interface that change who has how much of a card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelvisor.daemon import wire
from accelvisor.daemon.shaping import Shaping, Size

if TYPE_CHECKING:
    from accelvisor.daemon.functions import Functions
    from accelvisor.isolation.planner import Plan


class IsolationMethods:
    """A part of :class:`accelvisor.daemon.service.AdminService`."""

    _functions: Functions
    _shaping: Shaping

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
