"""kill -9 of the daemon at every step of create and delete: before or after, once started again."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from accelvisor.daemon.functions import CREATE_STEPS, DELETE_STEPS

from .harness import Harness
from .victim import killed_at

WORK = """
    await harness.create("mine")
    await harness.call("DeleteFunction", function="mine")
"""


@pytest.mark.parametrize("step", [*CREATE_STEPS, *DELETE_STEPS])
def test_killed_daemon_leaves_before_or_after(harness: Harness, step: str) -> None:
    killed_at(step, harness.paths.run.parent, WORK)

    async def scenario() -> None:
        async with harness.daemon():
            functions = (await harness.call("ListFunctions"))["functions"]
            # Creation is rolled back until its last commit, deletion forward from its first.
            expected = {"create:committed": ["ready"]}.get(step, [])
            assert [item["state"] for item in functions] == expected
            uuids = {item["uuid"] for item in functions}
            assert harness.processes() == uuids
            assert set(os.listdir(harness.paths.functions)) == uuids
            card = (await harness.call("GetCard", card="card0"))["card"]
            assert card["cores_free"] == card["cores"] - len(uuids)
            # And the name and the cores can be used again.
            if not uuids:
                again = await harness.create("mine")
                assert again["placement"] == [{"chip": 0, "cores": [0]}]

    asyncio.run(scenario())


def test_every_named_step_is_passed(harness: Harness) -> None:
    """The parameters above are all the steps there are, in order."""
    seen: list[str] = []

    async def scenario() -> None:
        async with harness.daemon(fault=seen.append):
            await harness.create("mine")
            await harness.call("DeleteFunction", function="mine")

    asyncio.run(scenario())
    assert seen == [*CREATE_STEPS, *DELETE_STEPS]


def test_a_killed_daemon_finds_its_functions_again(harness: Harness) -> None:
    """The process of a function is not touched: pid and start time stay the same."""
    killed_at("create:committed", harness.paths.run.parent, WORK)
    [uuid] = harness.processes()
    before = harness.paths.function(uuid).process.read_text()

    async def scenario() -> None:
        async with harness.daemon():
            assert await harness.state("mine") == "ready"
            assert harness.paths.function(uuid).process.read_text() == before
            await harness.call("ResetFunction", function="mine")

    asyncio.run(scenario())


def test_a_failing_rollback_is_finished_by_the_next_start(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TEMPER", "refuses")

    async def scenario() -> None:
        from accelvisor.errors import AccelvisorError, SystemFailure

        async with harness.daemon() as daemon:

            def refuse(uuid: str) -> None:
                raise SystemFailure("no", code="sweep")

            monkeypatch.setattr(daemon._functions, "sweep", refuse)
            with pytest.raises(AccelvisorError):
                await harness.create("mine")
            assert await harness.state("mine") == "deleting"
        async with harness.daemon():
            assert (await harness.call("ListFunctions"))["functions"] == []
            events = (await harness.call("ListEvents"))["events"]
            assert events[-1]["message"] == "mine is removed: its deletion was interrupted"

    asyncio.run(scenario())


def test_the_journal_says_what_was_interrupted(harness: Harness) -> None:
    killed_at("create:started", harness.paths.run.parent, WORK)

    async def scenario() -> None:
        async with harness.daemon():
            events = (await harness.call("ListEvents"))["events"]
            assert events[-1]["message"] == "mine is removed: its creation was interrupted"
            assert json.dumps(events)

    asyncio.run(scenario())
