"""What a function's process is told and says, and whether it does it: come up, reset."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from accelvisor.daemon import function_link
from accelvisor.daemon.paths import FunctionPaths
from accelvisor.daemon.store import Function
from accelvisor.daemon.supervisor import ProcessState
from accelvisor.errors import SystemFailure
from accelvisor.function.shape import Shape
from accelvisor.isolation.resources import Placement
from accelvisor.isolation.segments import lay

if TYPE_CHECKING:
    from accelvisor.daemon.functions import World

#: How often a process that does not come up is looked at (seconds).
FAILED_S = 0.5


def shape(placement: Placement, epoch: int) -> Shape:
    """What it is told of a placement."""
    return Shape(epoch, placement.core_count, lay(placement.ranges))


async def epoch(paths: FunctionPaths, function: Function) -> int:
    """Where it is: the row's, or what the process is at, since a move made that grow.

    Raises:
        what :func:`accelvisor.daemon.function_link.call` raises.
    """
    status = await function_link.call(paths.control_socket, "status")
    return max(function.epoch, int(status.get("epoch", 0)))


async def come_up(world: World, function: Function) -> None:
    """Until it is ready, or has ended: then nobody needs to wait for the deadline.

    Raises:
        SystemFailure: ``function-not-ready``: it ended.
        and what :func:`accelvisor.daemon.function_link.wait_ready` raises.
    """
    paths = world.paths.function(function.uuid)
    loop = asyncio.get_running_loop()
    ready = loop.create_task(
        function_link.wait_ready(paths.holder_socket, deadline_s=world.ready_s)
    )
    failed = 0
    try:
        while not (await asyncio.wait((ready,), timeout=FAILED_S))[0]:
            # Twice: a unit that failed before stays so until its new start begins.
            state = await world.supervisor.state(function.uuid)
            failed = failed + 1 if state is ProcessState.FAILED else 0
            if failed == 2:
                raise SystemFailure(
                    "the function process ended before it was ready",
                    code="function-not-ready",
                    where=f"function:{function.uuid}",
                    hint="its log says why (journalctl -u accelvisor-function@UUID)",
                )
        await ready
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)


async def reset(paths: FunctionPaths, function: Function) -> None:
    """Ask for it, and look whether it was done: the function counts its resets.

    Raises:
        SystemFailure: ``reset-not-done``.
        and what the function answers.
    """
    before = (await function_link.call(paths.control_socket, "status")).get("resets")
    after = (await function_link.call(paths.control_socket, "reset")).get("resets")
    if not isinstance(before, int) or not isinstance(after, int) or after == before:
        raise SystemFailure(
            f'function "{function.name}" was not reset: it counts {after!r}, {before!r} before',
            code="reset-not-done",
            where=f"function:{function.name}",
            hint="delete it, and create another: its process does not do what it is told",
        )
