"""How much of a function is there to be sent, and how fast it changes: looked at for a moment.

What a dry run predicts from. The function goes on; it is held meanwhile, so that no move and no
checkpoint begins to watch its memory at the same time.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import NamedTuple

from accelvisor.daemon.functions import holding
from accelvisor.daemon.moving import documents, orders
from accelvisor.daemon.moving.lent import Lent
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.paths import FunctionPaths
from accelvisor.daemon.store import Function

#: Long enough to see a training loop's working set, short enough for somebody who waits.
SAMPLE_S = 0.2


class Sample(NamedTuple):
    """Bytes that it holds, bytes that it changed within ``seconds``; 0 when it was not watched."""

    firmware: dict[str, str]
    state_bytes: int
    dirty_bytes: int
    seconds: float


async def take(services: Services, function: Function) -> Sample:
    """Raises what hinders the function process from answering. Carried to its end, also when
    whoever asked goes away: nobody else would end what it began.
    """
    return await services.functions.carry(_take(services, function))


async def _take(services: Services, function: Function) -> Sample:
    paths, held = services.functions.world.paths.function(function.uuid), services.functions.held
    said = documents.described(await orders.order(paths.control_socket, "describe"))
    # One that stands still changes nothing, and must not be found held when its VM goes on.
    computes = said.migration_state == "RUNNING" and not said.fenced
    watched = computes and not said.tracking and function.uuid not in held
    # Before anything is waited for: a move may begin in between.
    with holding(held, function.uuid) if watched else nullcontext():
        given = await orders.order(paths.holder_socket, "lend", expected=4)
        lent = Lent(given.fds, function.memory_bytes, function.window_bytes)
        try:
            if watched:
                return await _watch(paths, lent, said.firmware)
            return Sample(said.firmware, await asyncio.to_thread(lent.held_bytes), 0, 0.0)
        finally:
            lent.close()


async def _watch(paths: FunctionPaths, lent: Lent, firmware: dict[str, str]) -> Sample:
    loop = asyncio.get_running_loop()
    try:
        await orders.order(paths.control_socket, "track", {"on": True})
        began = loop.time()
        lent.take_marks()
        state = await asyncio.to_thread(lent.held_bytes)
        await asyncio.sleep(max(0.0, began + SAMPLE_S - loop.time()))
        return Sample(firmware, state, lent.dirty_bytes(), loop.time() - began)
    finally:
        await orders.order(paths.control_socket, "track", {"on": False})
