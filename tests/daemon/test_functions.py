"""Functions through the whole daemon: create, list, reset, delete, and what may go wrong."""

from __future__ import annotations

import asyncio
import json
import os
import uuid

import pytest

from accelvisor import errors
from accelvisor.daemon.config import CardConfig, Config, LibvirtConfig, Size
from accelvisor.function.spare import obtain
from accelvisor.limits import MIB

from .harness import Harness


def test_create_show_delete(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            assert made["state"] == "ready"
            assert made["name"] == "mine"
            assert made["placement"] == [{"chip": 0, "cores": [0]}]
            assert harness.processes() == {made["uuid"]}
            assert (await harness.call("GetFunction", function=made["uuid"]))["function"] == made
            statistics = await harness.call("FunctionStatistics", function="mine")
            assert statistics == {"statistics": {"resets": 0, "commands": 0}}
            assert (await harness.call("ResetFunction", function="mine"))["function"] == made
            statistics = await harness.call("FunctionStatistics", function="mine")
            assert statistics["statistics"]["resets"] == 1
            await harness.call("DeleteFunction", function="mine")
            assert (await harness.call("ListFunctions"))["functions"] == []
            assert not harness.paths.function(made["uuid"]).directory.exists()
            assert harness.processes() == set()

    asyncio.run(scenario())


def test_the_spec_is_what_the_function_process_accepts(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine", "medium")
            spec = obtain(str(harness.paths.function(made["uuid"]).spec))
            assert (spec.uuid, spec.cores, spec.queues) == (made["uuid"], 4, 16)
            assert spec.memory_bytes == made["memory_bytes"] == 256 * MIB
            assert spec.vfio_socket == made["socket"]

    asyncio.run(scenario())


def test_a_process_that_ends_at_once_is_not_waited_for(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TEMPER", "quits")
    monkeypatch.setattr("accelvisor.daemon.working.FAILED_S", 0.05)

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            object.__setattr__(daemon._functions.world, "ready_s", 600.0)
            with pytest.raises(errors.HostError) as caught:
                await harness.call("CreateFunction", profile="small")
            assert caught.value.code == "function-not-ready"
            assert "ended before" in caught.value.message

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("temper", "code"),
    [("quits", "function-not-ready"), ("never", "function-not-ready"), ("refuses", "no-memory")],
)
def test_what_does_not_come_up_leaves_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, temper: str, code: str
) -> None:
    monkeypatch.setenv("FAKE_TEMPER", temper)

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            world = daemon._functions.world
            object.__setattr__(world, "ready_s", 0.5)
            with pytest.raises(errors.HostError) as caught:
                await harness.create("mine")
            assert caught.value.code == code
            assert (await harness.call("ListFunctions"))["functions"] == []
            assert harness.processes() == set()
            assert os.listdir(harness.paths.functions) == []
            kinds = [event["kind"] for event in (await harness.call("ListEvents"))["events"]]
            assert kinds == ["function-creating", "function-failed", "function-deleted"]

    asyncio.run(scenario())


def test_a_slow_one_is_waited_for(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TEMPER", "slow")

    async def scenario() -> None:
        async with harness.daemon():
            assert (await harness.create("mine"))["state"] == "ready"

    asyncio.run(scenario())


def test_a_stubborn_process_is_killed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TEMPER", "stubborn")
    monkeypatch.setattr("accelvisor.daemon.supervisor.SHUTDOWN_S", 0.1)
    monkeypatch.setattr("accelvisor.daemon.supervisor.TERMINATE_S", 0.1)

    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("mine")
            await harness.call("DeleteFunction", function="mine")
            assert harness.processes() == set()

    asyncio.run(scenario())


def test_a_full_host_says_all_reasons_and_takes_nothing(harness: Harness) -> None:
    harness.config = Config(
        libvirt=LibvirtConfig(uri=""),
        cards={
            "a": CardConfig(chips=1, cores_per_chip=1, memory=Size(64 * MIB)),
            "b": CardConfig(chips=1, cores_per_chip=2, memory=Size(64 * MIB)),
        },
    )

    async def scenario() -> None:
        async with harness.daemon():
            assert (await harness.create("one"))["card"] == "a"
            assert (await harness.create("two"))["card"] == "b"
            with pytest.raises(errors.CapacityError) as caught:
                await harness.create("three")
            assert caught.value.code == "no-room"
            assert "a: 0 MiB of memory free" in caught.value.message
            assert "a: 0 of 1 chips have 1 core free" in caught.value.message
            assert "b: 0 MiB of memory free" in caught.value.message
            assert len((await harness.call("ListFunctions"))["functions"]) == 2
            profiles = (await harness.call("ListProfiles"))["profiles"]
            assert [item["fits"] for item in profiles] == [0, 0, 0]
            assert all(item["limit"] for item in profiles)

    asyncio.run(scenario())


def test_many_creations_at_once_never_share_a_core(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await asyncio.gather(*(harness.create(f"f{n}") for n in range(8)))
            places = [place for item in made for place in item["placement"]]
            cores = [(place["chip"], core) for place in places for core in place["cores"]]
            assert len(set(cores)) == 8
            card = (await harness.call("GetCard", card="card0"))["card"]
            assert card["cores_free"] == 8
            assert sorted(card["functions"]) == sorted(item["uuid"] for item in made)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("profile", "name", "card", "code"),
    [
        ("huge", None, None, "profile-not-found"),
        ("small", "a b", None, "name-invalid"),
        ("small", "x" * 65, None, "name-invalid"),
        ("small", "\ud800", None, "message-syntax"),
        ("small", str(uuid.UUID(int=5)), None, "name-invalid"),
        ("small", None, "card9", "card-not-found"),
        ("small", "taken", None, "function-exists"),
    ],
)
def test_wrong_requests(
    harness: Harness, profile: str, name: str | None, card: str | None, code: str
) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("taken")
            with pytest.raises(errors.AccelvisorError) as caught:
                await harness.call("CreateFunction", profile=profile, name=name, card=card)
            assert caught.value.code == code
            assert len((await harness.call("ListFunctions"))["functions"]) == 1

    asyncio.run(scenario())


def test_two_deletions_at_once_one_is_told_it_is_gone(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("mine")
            results = await asyncio.gather(
                *(harness.call("DeleteFunction", function="mine") for _ in range(2)),
                return_exceptions=True,
            )
            failed = [item for item in results if isinstance(item, errors.AccelvisorError)]
            assert [error.code for error in failed] == ["function-not-found"]

    asyncio.run(scenario())


def test_a_client_that_leaves_does_not_leave_half_a_function(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            _, writer = await asyncio.open_unix_connection(str(harness.paths.admin_socket))
            call = {
                "method": "io.accelvisor.Admin.CreateFunction",
                "parameters": {"profile": "small", "name": "mine"},
            }
            writer.write(json.dumps(call).encode() + b"\0")
            await writer.drain()
            async with asyncio.timeout(10):
                while not (await harness.call("ListFunctions"))["functions"]:
                    await asyncio.sleep(0.001)
            writer.close()
            assert (await harness.until("mine", "ready"))["state"] == "ready"

    asyncio.run(scenario())
