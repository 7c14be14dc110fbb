"""How much of a function is there to be sent, and how fast it changes: looked at for a moment.

What a dry run predicts from. The function goes on; it is held meanwhile, so that no move and no
checkpoint begins to watch its memory at the same time.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from accelvisor.daemon.moving import documents, orders
from accelvisor.daemon.moving.lent import Lent
from accelvisor.daemon.moving.services import Services
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
    """Raises what hinders the function process from answering."""
    paths = services.functions.world.paths.function(function.uuid)
    said = documents.described(await orders.order(paths.control_socket, "describe"))
    held = services.functions.held
    watched = not said.tracking and function.uuid not in held
    given = await orders.order(paths.holder_socket, "lend", expected=4)
    lent = Lent(given.fds, function.memory_bytes, function.window_bytes)
    if not watched:
        try:
            return Sample(said.firmware, await asyncio.to_thread(lent.held_bytes), 0, 0.0)
        finally:
            lent.close()
    loop = asyncio.get_running_loop()
    held.add(function.uuid)
    try:
        await orders.order(paths.control_socket, "track", {"on": True})
        began = loop.time()
        lent.take_marks()
        state = await asyncio.to_thread(lent.held_bytes)
        await asyncio.sleep(max(0.0, began + SAMPLE_S - loop.time()))
        dirty, seconds = lent.dirty_bytes(), loop.time() - began
        await orders.order(paths.control_socket, "track", {"on": False})
    finally:
        held.discard(function.uuid)
        lent.close()
    return Sample(said.firmware, state, dirty, seconds)
