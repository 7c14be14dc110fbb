"""What the daemon finds when it starts: functions, orphans, a new boot, lost processes."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.store import Store
from accelvisor.errors import ConflictError
from accelvisor.hypervisor.port import DomainEventKind, DomainState

from .harness import Harness


def messages(events: dict) -> list[str]:
    return [event["message"] for event in events["events"]]


def test_functions_survive_a_clean_restart(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
        assert harness.processes() == {made["uuid"]}
        async with harness.daemon():
            assert (await harness.call("GetFunction", function="mine"))["function"] == made
            assert harness.processes() == {made["uuid"]}
            harness.kill(made["uuid"])  # and it is watched again
            await wait_for_message(harness, "restarted: its process ended by itself")

    asyncio.run(scenario())


async def wait_for_message(harness: Harness, text: str) -> None:
    async with asyncio.timeout(10):
        while not any(text in item for item in messages(await harness.call("ListEvents"))):
            await asyncio.sleep(0.01)


def test_a_reboot_starts_functions_anew(harness: Harness) -> None:
    """P8: allocations dangle after a reboot. The run directory is gone, the boot id differs."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
        reboot(harness)
        async with harness.daemon():
            found = (await harness.call("GetFunction", function="mine"))["function"]
            assert found == {**made, "epoch": made["epoch"] + 1}, "what it held is gone"
            assert harness.processes() == {made["uuid"]}
            events = messages(await harness.call("ListEvents"))
            assert "mine restarted: the host was booted" in events

    asyncio.run(scenario())


def reboot(harness: Harness) -> None:
    harness.clean_up()
    shutil.rmtree(harness.paths.run)
    store = Store(harness.paths.database, lambda: 0.0)
    store.set_boot_id("of another boot")
    store.close()


def test_after_a_reboot_nothing_runs_in_a_domain(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            harness.domains.put(
                "vm",
                DomainEventKind.STARTED,
                state=DomainState.RUNNING,
                live_functions=(made["uuid"],),
                persistent_functions=(made["uuid"],),
            )
            await harness.until("mine", "running")
        reboot(harness)
        harness.domains.put(
            "vm", DomainEventKind.STOPPED, state=DomainState.SHUTOFF, live_functions=()
        )
        async with harness.daemon():
            assert await harness.state("mine") == "attached"

    asyncio.run(scenario())


def test_an_orphan_process_is_listed_and_stopped(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
        store = Store(harness.paths.database, lambda: 0.0)
        store.delete(made["uuid"], "lost")
        store.close()
        async with harness.daemon():
            assert harness.processes() == set()
            events = (await harness.call("ListEvents"))["events"]
            assert events[-1]["kind"] == "function-orphan"
            assert events[-1]["subject"] == made["uuid"]

    asyncio.run(scenario())


def test_an_orphan_directory_is_listed_and_removed(harness: Harness) -> None:
    async def scenario() -> None:
        directory = harness.paths.function("left-behind").directory
        directory.mkdir(parents=True)
        async with harness.daemon():
            assert not directory.exists()
            events = messages(await harness.call("ListEvents"))
            assert events == ["removed: its directory was left behind"]

    asyncio.run(scenario())


def test_a_process_that_ended_while_the_daemon_was_away(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
        harness.kill(made["uuid"])
        async with harness.daemon():
            assert await harness.state("mine") == "ready"
            assert harness.processes() == {made["uuid"]}

    asyncio.run(scenario())


def test_a_process_that_crashes_again_and_again_is_given_up(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            for number in range(1, 4):
                harness.kill(made["uuid"])
                async with asyncio.timeout(10):
                    while (await count(harness, "restarted")) < number:
                        await asyncio.sleep(0.01)
            harness.kill(made["uuid"])
            found = await harness.until("mine", "failed")
            assert found["reason"] == "its process ended 4 times within 60 s"
            with pytest.raises(ConflictError) as caught:
                await harness.call("AttachFunction", domain="vm", function="mine")
            assert caught.value.code == "function-failed"
            # Its administrator decides: a reset gives it a new process.
            await harness.call("ResetFunction", function="mine")
            assert await harness.state("mine") == "ready"
            assert harness.processes() == {made["uuid"]}

    asyncio.run(scenario())


async def count(harness: Harness, word: str) -> int:
    return sum(word in item for item in messages(await harness.call("ListEvents")))


def test_a_failed_function_can_be_deleted(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            made = await harness.create("mine")
            function = daemon._functions.registry.get(made["uuid"])
            await daemon._functions.registry.commit(
                function.with_state(State.FAILED, "test"), "function-failed", "test"
            )
            await harness.call("DeleteFunction", function="mine")
            assert harness.processes() == set()

    asyncio.run(scenario())


def test_a_second_daemon_does_not_start(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            with pytest.raises(ConflictError) as caught:
                async with harness.daemon():
                    pass
            assert caught.value.code == "already-running"
            assert (await harness.call("ListFunctions")) == {"functions": []}  # the first goes on

    asyncio.run(scenario())


def test_a_start_that_is_cut_short_after_a_reboot_is_a_reboot_again(harness: Harness) -> None:
    """The boot is remembered last: what ran in the boot before is not taken for our own."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            live = (made["uuid"],)
            running = {"state": DomainState.RUNNING, "live_functions": live}
            harness.domains.put("vm", DomainEventKind.STARTED, **running)
            await harness.until("mine", "running")
        reboot(harness)

        def cut(step: str) -> None:
            raise KeyboardInterrupt(step)

        with pytest.raises(KeyboardInterrupt):
            async with harness.daemon(fault=cut):
                pass
        store = Store(harness.paths.database, lambda: 0.0)
        assert store.boot_id() == "of another boot"
        store.close()

    async def again() -> None:
        off = {"state": DomainState.SHUTOFF, "live_functions": ()}
        harness.domains.put("vm", DomainEventKind.STOPPED, **off)
        async with harness.daemon():
            await harness.until("mine", "ready")
            events = messages(await harness.call("ListEvents"))
            assert not any("while the daemon was away" in event for event in events)

    try:
        asyncio.run(scenario())
    except KeyboardInterrupt:
        pass
    asyncio.run(again())


def test_a_repair_that_nobody_foresaw_does_not_end_the_start(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelvisor.daemon.keeper import Keeper

    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("mine")

        async def broken(self: Keeper, function: object) -> None:
            raise RecursionError("too deep")

        monkeypatch.setattr(Keeper, "_adopt", broken)
        async with harness.daemon():
            found = (await harness.call("GetFunction", function="mine"))["function"]
            assert found["state"] == "failed"
            assert "too deep" in found["reason"]

    asyncio.run(scenario())
