"""Resize and revoke: planner, journal, process and store tell one story, whatever dies when."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from accelvisor.daemon import function_link
from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.shaping import CHANGE_STEPS
from accelvisor.errors import AccelvisorError
from accelvisor.hypervisor.port import DomainEventKind, DomainState
from accelvisor.isolation.resources import violations
from accelvisor.limits import MIB

from .harness import Harness
from .victim import killed_at

WORK = {
    "resize": """
        await harness.create("mine")
        await harness.call("ResizeFunction", function="mine", cores=3, memory_bytes=32 << 20)
    """,
    "revoke": """
        await harness.create("mine")
        await harness.call("RevokeFunction", function="mine")
    """,
}


async def shape(harness: Harness, uuid: str) -> dict[str, Any]:
    """What the process itself says, without asking for anything else."""
    path = harness.paths.function(uuid).control_socket
    return await function_link.call(path, "status")


@pytest.mark.parametrize(
    ("verb", "step"),
    [
        *(("resize", step) for step in CHANGE_STEPS),
        *(("revoke", step) for step in ("change:journaled", "change:applied")),
    ],
)
def test_a_daemon_killed_at_any_step_leaves_before_or_after(
    harness: Harness, step: str, verb: str
) -> None:
    killed_at(step, harness.paths.run.parent, WORK[verb])
    applied = CHANGE_STEPS.index(step) >= CHANGE_STEPS.index("change:applied")
    size = ((3, 32 * MIB) if verb == "resize" else (0, 0)) if applied else (1, 64 * MIB)

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            found = (await harness.call("GetFunction", function="mine"))["function"]
            assert (found["cores"], found["memory_bytes"]) == size
            assert (await shape(harness, found["uuid"]))["shape_epoch"] == found["epoch"]
            registry = daemon._functions.registry
            assert registry.change(found["uuid"]) is None
            assert violations(daemon._functions.cards, registry.placements()) == []
            card = (await harness.call("GetCard", card="card0"))["card"]
            assert card["cores_free"] == card["cores"] - size[0]
            assert card["memory_free"] == card["memory_bytes"] - size[1]
            if size[0]:  # and it can go on
                await harness.call("ResizeFunction", function="mine", cores=2)

    asyncio.run(scenario())


def test_every_named_step_is_passed(harness: Harness) -> None:
    seen: list[str] = []

    async def scenario() -> None:
        async with harness.daemon(fault=seen.append):
            await harness.create("mine")
            seen.clear()
            await harness.call("ResizeFunction", function="mine", cores=2)

    asyncio.run(scenario())
    assert seen == list(CHANGE_STEPS)


def test_a_dry_run_shows_the_plan_and_does_nothing(harness: Harness) -> None:
    seen: list[str] = []

    async def scenario() -> None:
        async with harness.daemon(fault=seen.append):
            before = await harness.create("mine")
            seen.clear()
            reply = await harness.call(
                "ResizeFunction", function="mine", cores=4, memory_bytes=MIB, dry_run=True
            )
            assert reply["function"] == before
            assert (reply["plan"]["cores"], reply["plan"]["scrub_bytes"]) == (4, 63 * MIB)
            assert [step["action"] for step in reply["plan"]["steps"]] == [
                "take", "quiesce", "scrub", "translate", "notify", "resume", "release",
            ]  # fmt: skip
            await harness.call("RevokeFunction", function="mine", dry_run=True)

    asyncio.run(scenario())
    assert seen == []


def test_a_creation_can_be_planned_too(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("mine")
            plan = (await harness.call("PlanFunction", profile="medium"))["plan"]
            assert plan["placement"] == [{"chip": 1, "cores": [0, 1, 2, 3]}]
            assert (plan["verb"], plan["quiesce"], plan["scrub_bytes"]) == ("create", [], 0)
            assert plan["steps"][0]["text"] == "take cores 1.0, 1.1, 1.2, 1.3 and 256 MiB of card0"
            made = (await harness.call("CreateFunction", profile="medium"))["function"]
            assert made["placement"] == plan["placement"]
            with pytest.raises(AccelvisorError) as caught:
                await harness.call("PlanFunction", profile="medium", card="card9")
            assert caught.value.code == "card-not-found"

    asyncio.run(scenario())


def test_the_host_says_what_functions_can_have_of_it(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            host = (await harness.call("GetHost"))["host"]
            assert host["function_cpus"] == host["shared_cpus"] == sorted(os.sched_getaffinity(0))
            assert 0 < host["memory_available"] <= host["memory_bytes"]
            assert host["huge_pages_free"] <= host["huge_pages"]

    asyncio.run(scenario())


def test_the_size_that_it_has_is_no_change(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            reply = await harness.call("ResizeFunction", function="mine", cores=1)
            assert reply["plan"]["same"]
            assert reply["function"]["epoch"] == made["epoch"]

    asyncio.run(scenario())


async def refused(harness: Harness, **size: int) -> AccelvisorError:
    with pytest.raises(AccelvisorError) as caught:
        await harness.call("ResizeFunction", function="mine", **size)
    return caught.value


def mood(harness: Harness, uuid: str, text: str | None) -> None:
    file = harness.paths.function(uuid).spec.with_suffix(".shaping")
    if text is None:
        file.unlink()
    else:
        file.write_text(text)


def test_a_function_that_refuses_keeps_everything(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            made = await harness.create("mine")
            mood(harness, made["uuid"], "stiff")
            assert (await refused(harness, cores=2)).code == "memory-in-use"
            assert daemon._functions.registry.change(made["uuid"]) is None
            assert (await harness.call("GetFunction", function="mine"))["function"] == made
            mood(harness, made["uuid"], None)
            await harness.call("ResizeFunction", function="mine", cores=2)

    asyncio.run(scenario())


def test_a_function_that_only_says_so_is_found_out(harness: Harness) -> None:
    """Case P1: says done, made nothing."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            mood(harness, made["uuid"], "liar")
            error = await refused(harness, cores=2)
            assert error.code == "change-not-applied"
            assert "cores is 1, not 2" in error.message
            # What it has is not known to be free: nobody else gets it, nor what it should have.
            card = (await harness.call("GetCard", card="card0"))["card"]
            assert card["cores_free"] == card["cores"] - 1
            mood(harness, made["uuid"], None)
            reply = await harness.call("ResizeFunction", function="mine", cores=3)
            assert reply["function"]["cores"] == 3

    asyncio.run(scenario())


def test_a_reset_that_was_not_done_is_no_success(harness: Harness) -> None:
    """Case P5: reset failed silently."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            mood(harness, made["uuid"], "liar")
            with pytest.raises(AccelvisorError) as caught:
                await harness.call("ResetFunction", function="mine")
            assert caught.value.code == "reset-not-done"
            mood(harness, made["uuid"], None)
            await harness.call("ResetFunction", function="mine")

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["absent", "lost"])
def test_a_function_that_dies_in_the_middle_begins_anew_with_its_old_size(
    harness: Harness, text: str
) -> None:
    """Nobody was told that it changed, and its new process begins with nothing."""

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            made = await harness.create("mine")
            mood(harness, made["uuid"], text)
            error = await refused(harness, cores=2)
            assert error.code in ("function-unreachable", "function-deadline")
            mood(harness, made["uuid"], None)
            async with asyncio.timeout(10):
                while daemon._functions.registry.change(made["uuid"]) is not None:
                    await asyncio.sleep(0.01)
            found = await harness.until("mine", "ready")
            assert found["cores"] == 1
            assert found["epoch"] > made["epoch"]
            await harness.call("ResizeFunction", function="mine", cores=2)

    asyncio.run(scenario())


def test_two_that_grow_at_once_never_share_a_core(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            for name in ("a", "b", "c"):
                await harness.create(name)
            done = await asyncio.gather(
                *(harness.call("ResizeFunction", function=n, cores=4) for n in ("a", "b", "c")),
                return_exceptions=True,
            )
            assert not [item for item in done if isinstance(item, BaseException)]
            registry = daemon._functions.registry
            assert violations(daemon._functions.cards, registry.placements()) == []

    asyncio.run(scenario())


def test_neighbours_are_not_asked(harness: Harness) -> None:
    """Case P4: naming one leaves the others alone."""

    async def scenario() -> None:
        async with harness.daemon():
            other = await harness.create("other")
            await harness.create("mine")
            await harness.call("ResizeFunction", function="mine", cores=3, memory_bytes=MIB)
            assert (await harness.call("GetFunction", function="other"))["function"] == other

    asyncio.run(scenario())


def test_a_failed_function_has_no_size_to_change(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon(poll_s=30) as daemon:
            made = await harness.create("mine")
            registry = daemon._functions.registry
            row = registry.find("mine").with_state(State.FAILED, "gone")
            await registry.commit(row, "function-failed", "gone")
            assert (await refused(harness, cores=2)).code == "function-failed"
            assert made["state"] == "ready"

    asyncio.run(scenario())


def test_what_a_running_vm_has_can_be_revoked_and_goes_with_the_vm(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            harness.domains.put("vm", DomainEventKind.DEFINED)
            await harness.call("AttachFunction", domain="vm", function="mine", persistent=True)
            await harness.call("StartDomain", domain="vm")
            await harness.until("mine", "running")
            reply = await harness.call("RevokeFunction", function="mine")
            assert reply["plan"]["scrub_bytes"] == 64 * MIB
            assert reply["function"]["revoked"]
            assert reply["function"]["state"] == "running"
            card = (await harness.call("GetCard", card="card0"))["card"]
            assert card["cores_free"] == card["cores"]
            assert card["functions"] == []
            assert (await refused(harness, cores=2)).code == "function-revoked"
            harness.domains.put("vm", DomainEventKind.STOPPED, state=DomainState.SHUTOFF,
                                live_functions=())  # fmt: skip
            await harness.until("mine", "attached")
            await harness.call("DetachFunction", domain="vm", function="mine")
            async with asyncio.timeout(10):
                while (await harness.call("ListFunctions"))["functions"]:
                    await asyncio.sleep(0.01)
            assert made["uuid"] not in harness.processes()

    asyncio.run(scenario())


def test_a_quarantined_function_says_why_until_it_is_reset(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon(poll_s=0.05):
            made = await harness.create("mine")
            flag = harness.paths.function(made["uuid"]).spec.with_suffix(".quarantined")
            flag.write_text("")
            async with asyncio.timeout(10):
                while not (await harness.call("GetFunction", function="mine"))["function"][
                    "quarantine"
                ]:
                    await asyncio.sleep(0.01)
            flag.unlink()
            found = (await harness.call("ResetFunction", function="mine"))["function"]
            assert not found["quarantine"]
            kinds = [item["kind"] for item in (await harness.call("ListEvents"))["events"]]
            assert "function-quarantined" in kinds

    asyncio.run(scenario())
