"""The functions of a VM compute again after a move, or after one that was given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.moving import orders
from accelvisor.errors import AccelvisorError
from accelvisor.migration import actions

LOG = logging.getLogger(__name__)


async def wake(
    functions: Functions, uuids: Sequence[str], *, full_speed: bool, moved: bool = False
) -> bool:
    """All take each step before one takes the next: they may speak with each other. One whose
    process is lost keeps none of the others from computing.

    Args:
        full_speed: they may have been slowed down.
        moved: their guest is told that they are other devices now.

    Returns:
        whether none is lost.

    Raises:
        AccelvisorError: one that is not lost did not take its steps; it can be tried again.
    """
    failed: dict[str, AccelvisorError] = {}

    async def step(method: str, **parameters: object) -> None:
        async def one(uuid: str) -> None:
            try:
                await orders.control(functions.world.paths, uuid, method, parameters)
            except AccelvisorError as error:
                if method == "throttle":  # a process of an older version does not know the word
                    LOG.warning("function %s: %s", uuid, error.message)
                else:
                    failed[uuid] = error

        await asyncio.gather(*(one(uuid) for uuid in uuids if uuid not in failed))

    for state in actions.THAW_WALK:
        await step("migrate", to=state)
    if full_speed:
        await step("throttle", percent=100)
    if moved:
        await step("moved")
    await step("fence", on=False)
    await step("track", on=False)
    for uuid, error in failed.items():
        known = functions.registry.get(uuid)
        if known is not None and known.state is not State.FAILED:
            raise error
        LOG.error("function %s does not go on: it is lost (%s)", uuid, error.message)
    return not failed
