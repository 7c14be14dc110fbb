from __future__ import annotations

import asyncio
from typing import Any

import pytest

from accelvisor.control.client import AdminClient
from accelvisor.daemon import events
from accelvisor.daemon.events import EventHub
from accelvisor.daemon.store import EventRecord
from accelvisor.errors import UnavailableError

from .harness import Harness


def record(number: int) -> EventRecord:
    return EventRecord(number, 0.0, "kind", "", str(number))


def test_every_watcher_gets_every_event_in_order() -> None:
    async def scenario() -> None:
        hub = EventHub()
        with hub.watch() as one, hub.watch() as two:
            hub.publish(record(1))
            hub.publish(record(2))
            for watcher in (one, two):
                assert [await watcher.next(1), await watcher.next(1)] == [record(1), record(2)]
                assert await watcher.next(0) is None
        hub.publish(record(3))  # to nobody

    asyncio.run(scenario())


def test_who_falls_behind_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "QUEUED", 2)

    async def scenario() -> None:
        hub = EventHub()
        with hub.watch() as watcher:
            for number in range(3):
                hub.publish(record(number))
            with pytest.raises(UnavailableError) as caught:
                await watcher.next(1)
            assert caught.value.code == "events-lost"

    asyncio.run(scenario())


def test_watching_from_an_id_on_misses_nothing_and_repeats_nothing(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("one")  # events 1 and 2
            seen: list[int] = []
            started = asyncio.Event()
            loop = asyncio.get_running_loop()

            def watch() -> None:
                with AdminClient(str(harness.paths.admin_socket)) as client:
                    for reply in client.stream("WatchEvents", {"after": 1}):
                        loop.call_soon_threadsafe(started.set)
                        if reply["event"] is not None:
                            seen.append(reply["event"]["id"])
                        if seen and seen[-1] == 4:
                            return

            watching = asyncio.to_thread(watch)
            task = asyncio.ensure_future(watching)
            await started.wait()
            await harness.create("two")  # events 3 and 4
            await asyncio.wait_for(task, 10)
            assert seen == [2, 3, 4]

    asyncio.run(scenario())


def test_an_idle_stream_shows_that_it_lives(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelvisor.daemon.service.ALIVE_S", 0.01)

    async def scenario() -> None:
        async with harness.daemon():

            def watch() -> list[Any]:
                with AdminClient(str(harness.paths.admin_socket)) as client:
                    stream = client.stream("WatchEvents", gap_s=5)
                    return [next(stream) for _ in range(3)]

            assert await asyncio.to_thread(watch) == [{"event": None}] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize("given", [{"limit": 0}, {"limit": 1001}, {"after": -1}])
def test_bounds_of_the_list(harness: Harness, given: dict[str, int]) -> None:
    from accelvisor.errors import UsageError

    async def scenario() -> None:
        async with harness.daemon():
            with pytest.raises(UsageError):
                await harness.call("ListEvents", **given)

    asyncio.run(scenario())


def test_a_follower_that_was_away_for_long_misses_nothing(harness: Harness) -> None:
    """More than one page: none of the middle is lost."""

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            for number in range(2500):
                await daemon._functions.registry.record("test", "", str(number))

            def watch() -> list[int]:
                seen: list[int] = []
                with AdminClient(str(harness.paths.admin_socket)) as client:
                    for reply in client.stream("WatchEvents", {"after": 1}):
                        if reply["event"] is not None:
                            seen.append(reply["event"]["id"])
                        if seen and seen[-1] == 2500:
                            return seen
                return seen

            assert await asyncio.to_thread(watch) == list(range(2, 2501))
            first = (await harness.call("ListEvents", after=1, limit=3))["events"]
            assert [event["id"] for event in first] == [2, 3, 4]
            newest = (await harness.call("ListEvents", limit=3))["events"]
            assert [event["id"] for event in newest] == [2498, 2499, 2500]

    asyncio.run(scenario())
