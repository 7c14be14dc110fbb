"""Spare function processes: used, replaced, given back, and never in the way."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from accelvisor import errors
from accelvisor.daemon import spares as module
from accelvisor.daemon.config import CardConfig, Size
from accelvisor.embedded import EmbeddedHost
from accelvisor.limits import MIB

from .harness import Harness, wait_until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFILL_S", 0.0)
    monkeypatch.setattr(module, "RETRY_S", (0.01, 0.02))


@pytest.fixture
def host(harness: Harness) -> Harness:
    """A harness whose daemons keep one spare."""
    daemon = msgspec.structs.replace(harness.config.daemon, spares=1)
    harness.config = msgspec.structs.replace(harness.config, daemon=daemon)
    return harness


async def there(host: Harness, count: int = 1) -> set[str]:
    """Once so many spares are ready: the UUIDs of all processes."""
    async with asyncio.timeout(10):
        while (await host.call("GetHost"))["host"]["spares"] != count:
            await asyncio.sleep(0.005)
    return host.processes()


def test_a_new_function_is_the_spare_and_another_takes_its_place(host: Harness) -> None:
    async def scenario() -> None:
        async with host.daemon():
            (first,) = await there(host)
            pid = await host.supervisor.pid(first)
            made = await host.create("mine")
            assert made["uuid"] == first
            assert await host.supervisor.pid(first) == pid
            assert made["state"] == "ready"
            assert len(await there(host)) == 2
            assert (await host.call("ListFunctions"))["functions"] == [made]
            await host.call("DeleteFunction", function="mine")
            assert first not in host.processes()

    asyncio.run(scenario())


def test_a_stopped_daemon_leaves_neither_spare_nor_its_files(host: Harness) -> None:
    async def scenario() -> None:
        async with host.daemon():
            await there(host)
            made = await host.create("mine")
            await there(host)
        assert host.processes() == {made["uuid"]}
        assert os.listdir(host.paths.functions) == [made["uuid"]]
        assert {name.split(".")[0] for name in os.listdir(host.paths.specs)} == {made["uuid"]}

    asyncio.run(scenario())


def test_a_killed_daemon_leaves_no_spare(short_path) -> None:
    with EmbeddedHost(directory=short_path, spares=1) as host:
        functions = short_path / "r" / "function"
        wait_until(lambda: _spares(host) == 1)
        (uuid,) = os.listdir(functions)
        pid = int((short_path / "r" / "spec" / f"{uuid}.process").read_text().split()[0])
        host.stop(signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
        host.start()
        wait_until(lambda: _spares(host) == 1)
        assert uuid not in os.listdir(functions)


def test_a_real_function_is_created_from_a_real_spare(short_path) -> None:
    with EmbeddedHost(directory=short_path, spares=1) as host:
        wait_until(lambda: _spares(host) == 1)
        (uuid,) = os.listdir(short_path / "r" / "function")
        made = host.create("small", "mine")
        assert made["uuid"] == uuid
        with host.open(made) as fn:
            assert fn.tensor([1.0, 2.0]).numpy().tolist() == [1.0, 2.0]


def test_a_spare_that_was_killed_is_not_used(host: Harness) -> None:
    async def scenario() -> None:
        async with host.daemon():
            (first,) = await there(host)
            host.kill(first)
            await there(host, 0)
            made = await host.create("mine")
            assert made["uuid"] != first
            assert made["state"] == "ready"
            assert made["uuid"] in (await there(host)) - {first}
            assert first not in host.processes()

    asyncio.run(scenario())


def test_a_spare_that_dies_as_it_is_wanted_costs_only_time(host: Harness) -> None:
    async def scenario() -> None:
        def fault(step: str) -> None:
            if step == "create:written":
                (uuid,) = host.processes()
                host.kill(uuid)

        async with host.daemon(fault=fault):
            (first,) = await there(host)
            made = await host.create("mine")
            assert (made["uuid"], made["state"]) == (first, "ready")

    asyncio.run(scenario())


def test_a_spare_that_refuses_is_replaced_by_a_fresh_process(
    host: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setenv("FAKE_TEMPER", "unwilling")
        async with host.daemon():
            (first,) = await there(host)
            pid = await host.supervisor.pid(first)
            monkeypatch.setenv("FAKE_TEMPER", "ready")
            made = await host.create("mine")
            assert (made["uuid"], made["state"]) == (first, "ready")
            assert await host.supervisor.pid(first) not in (None, pid)

    asyncio.run(scenario())


def test_a_refused_creation_gives_the_spare_back(host: Harness) -> None:
    card = {"card0": CardConfig(chips=1, cores_per_chip=1, memory=Size(MIB))}
    host.config = msgspec.structs.replace(host.config, cards=card)

    async def scenario() -> None:
        async with host.daemon():
            before = await there(host)
            with pytest.raises(errors.CapacityError):
                await host.create("mine")
            with pytest.raises(errors.UsageError):
                await host.create("not a name")
            assert await there(host) == before

    asyncio.run(scenario())


def test_without_spares_nothing_waits(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            assert (await harness.call("GetHost"))["host"]["spares"] == 0
            assert harness.processes() == {made["uuid"]}

    asyncio.run(scenario())


def test_a_host_that_cannot_start_spares_goes_on_without(
    host: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[str] = []

    async def scenario() -> None:
        start = host.supervisor.start

        async def refuse(uuid: str, memory_bytes: int = 0) -> None:
            starts.append(uuid)
            if len(starts) < 4:
                raise errors.SystemFailure("no processes today", code="supervisor")
            await start(uuid, memory_bytes)

        monkeypatch.setattr(host.supervisor, "start", refuse)
        async with host.daemon():
            assert (await host.call("GetHost"))["host"]["spares"] in (0, 1)
            processes = await there(host)
            assert len(processes) == 1
            assert len(starts) == 4
            assert os.listdir(host.paths.functions) == list(processes)

    asyncio.run(scenario())


def test_two_creations_at_once_share_no_spare(host: Harness) -> None:
    async def scenario() -> None:
        async with host.daemon():
            await there(host)
            one, two = await asyncio.gather(host.create("one"), host.create("two"))
            assert one["uuid"] != two["uuid"]
            assert {one["state"], two["state"]} == {"ready"}

    asyncio.run(scenario())


def _spares(host: EmbeddedHost) -> int:
    with host.admin() as admin:
        return int(admin.call("GetHost")["host"]["spares"])
