"""What a dry run looks at for a moment, it leaves as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from accelvisor.daemon.moving import orders, sample
from accelvisor.daemon.store import Function
from tests.daemon.moving.resting import Host, describe
from tests.function.harness import Process, call


def test_a_dry_run_that_is_interrupted_follows_nothing_any_more(
    here: Host, one: tuple[Process, Function]
) -> None:
    process, found = one

    async def body() -> None:
        async with asyncio.timeout(20):
            asked = asyncio.create_task(sample.take(here.services, found))
            while not describe(process).tracking:
                await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            while here.functions.held:
                await asyncio.sleep(0.01)
        assert not describe(process).tracking

    asyncio.run(body())


def test_no_move_begins_between_the_looks_of_a_dry_run(
    here: Host, one: tuple[Process, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[str, bool] = {}
    order = orders.order

    async def watched(path: Path, method: str, *args: Any, **more: Any) -> orders.Given:
        held[method] = one[1].uuid in here.functions.held
        return await order(path, method, *args, **more)

    monkeypatch.setattr(orders, "order", watched)
    assert asyncio.run(sample.take(here.services, one[1])).seconds >= sample.SAMPLE_S
    assert held == {"describe": False, "lend": True, "track": True}
    assert not here.functions.held


def test_a_dry_run_leaves_the_hold_and_the_tracking_of_a_move(
    here: Host, one: tuple[Process, Function]
) -> None:
    process, found = one
    here.functions.held.add(found.uuid)
    assert asyncio.run(sample.take(here.services, found)).seconds == 0
    call(process.spec.control_socket, "track", {"on": True})
    assert asyncio.run(sample.take(here.services, found)).seconds == 0
    assert describe(process).tracking
    assert here.functions.held == {found.uuid}


def test_a_function_that_stands_still_is_not_held_by_a_dry_run(
    here: Host, one: tuple[Process, Function]
) -> None:
    """Its VM may go on at any moment, and what is held is left standing then."""
    call(one[0].spec.control_socket, "fence", {"on": True})
    assert asyncio.run(sample.take(here.services, one[1])).seconds == 0
