"""Loans of cores and host CPUs follow the partition, before anybody else gets them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from accelvisor.daemon.config import CardConfig, HostConfig, ProfileConfig, Size
from accelvisor.daemon.supervisor import SubprocessSupervisor
from accelvisor.isolation.resources import Policy
from accelvisor.limits import MIB

from .harness import Harness

SMALL = ProfileConfig(memory=Size(MIB), window=Size(MIB), queues=4)


class Confined(SubprocessSupervisor):
    """Writes down who was confined to what."""

    def __init__(self, like: SubprocessSupervisor) -> None:
        super().__init__(like._paths, like._command)
        self.calls: list[tuple[str, tuple[int, ...], int]] = []

    async def confine(self, uuid: str, cpus: Sequence[int], weight: int) -> None:
        self.calls.append((uuid, tuple(cpus), weight))


@pytest.fixture
def wide(harness: Harness) -> Harness:
    """As if the host had eight CPUs, and a card of eight cores."""
    harness.config = replace_config(harness)
    harness.supervisor = Confined(harness.supervisor)
    return harness


def replace_config(harness: Harness):
    import msgspec

    return msgspec.structs.replace(
        harness.config,
        host=HostConfig(cpus="0-7"),
        cards={"card0": CardConfig(chips=2, cores_per_chip=4, memory=Size(64 * MIB))},
        profiles={
            "small": SMALL,
            "heavy": msgspec.structs.replace(SMALL, cores=2, weight=300),
            "sure": msgspec.structs.replace(SMALL, cores=2, policy=Policy.GUARANTEED),
            "least": msgspec.structs.replace(SMALL, policy=Policy.BEST_EFFORT),
        },
    )


def lent(harness: Harness, uuid: str) -> list[int]:
    file = harness.paths.function(uuid).spec.with_suffix(".shares")
    return json.loads(file.read_text()) if file.exists() else []


def test_cores_come_back_before_somebody_else_gets_them(wide: Harness) -> None:
    async def scenario() -> None:
        at: dict[str, list[int]] = {}

        def fault(step: str) -> None:
            if step == "create:written":
                at["second"] = lent(wide, first["uuid"])

        first: dict[str, str] = {"uuid": "none"}
        async with wide.daemon(fault=fault) as daemon:
            first = await wide.create("first")
            assert lent(wide, first["uuid"]) == [6], "seven are free, one CPU is the host's"
            second = await wide.create("second", "heavy")
            assert at["second"] == [6, 5], "before its process started"
            assert (lent(wide, first["uuid"])[-1], lent(wide, second["uuid"])[-1]) == (1, 4)
            await wide.call("ResizeFunction", function="second", cores=4)
            given = daemon._sharing.given
            assert sum(item.borrowed for item in given.values()) == 3
            await wide.call("DeleteFunction", function="second")
            assert lent(wide, first["uuid"])[-1] == 6

    asyncio.run(scenario())


def test_a_guaranteed_function_takes_its_cpus_from_the_others(wide: Harness) -> None:
    async def scenario() -> None:
        async with wide.daemon() as daemon:
            made = await wide.create("first")
            supervisor = daemon._functions.world.supervisor
            assert isinstance(supervisor, Confined)
            supervisor.calls.clear()
            sure = await wide.create("sure", "sure")
            assert supervisor.calls == [
                (made["uuid"], (0, 1, 2, 3, 4, 5), 100), (sure["uuid"], (6, 7), 100),
            ]  # fmt: skip
            supervisor.calls.clear()
            await wide.call("DeleteFunction", function="sure")
            assert supervisor.calls == [(made["uuid"], tuple(range(8)), 100)]

    asyncio.run(scenario())


def test_best_effort_is_told_so(wide: Harness) -> None:
    async def scenario() -> None:
        async with wide.daemon() as daemon:
            made = await wide.create("e", "least")
            assert daemon._functions.world.supervisor.calls == [(made["uuid"], tuple(range(8)), 0)]
            assert lent(wide, made["uuid"])[-1] == 0

    asyncio.run(scenario())


def test_a_daemon_that_starts_tells_everybody_anew(wide: Harness) -> None:
    async def scenario() -> None:
        async with wide.daemon():
            made = await wide.create("first")
        async with wide.daemon() as daemon:
            assert daemon._sharing.given[made["uuid"]].borrowed == 6
            assert lent(wide, made["uuid"]) == [6, 6]

    asyncio.run(scenario())
