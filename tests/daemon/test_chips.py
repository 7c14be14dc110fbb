"""Chips that the operator switches, cards as grids, and what a daemon tells of links."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from accelvisor.control import admin
from accelvisor.daemon import specifying
from accelvisor.daemon.card_config import CardConfig, ProfileConfig, Size, profile_of
from accelvisor.daemon.topology import heard
from accelvisor.errors import AccelvisorError, CapacityError
from accelvisor.function.spec import parse
from accelvisor.isolation.resources import Links
from accelvisor.limits import MIB
from tests.daemon.harness import Harness

PROFILES = {
    "one": ProfileConfig(memory=Size(MIB)),
    "ring": ProfileConfig(cores=4, chips=4, memory=Size(MIB), links=Links.RING),
    "four": ProfileConfig(cores=16, chips=4, memory=Size(MIB)),
}


def configure(harness: Harness, **card: Any) -> None:
    made = {"memory": Size(64 * MIB), **card}
    harness.config = msgspec.structs.replace(
        harness.config, cards={"card0": CardConfig(**made)}, profiles=PROFILES
    )


def scenario(harness: Harness, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with harness.daemon():
            await body()

    asyncio.run(run())


async def refused(harness: Harness, member: str, **parameters: Any) -> AccelvisorError:
    with pytest.raises(AccelvisorError) as caught:
        await harness.call(member, **parameters)
    return caught.value


def spec(harness: Harness, uuid: str) -> dict[str, Any]:
    return json.loads(harness.paths.function(uuid).spec.read_text())


def test_a_function_is_told_its_chips_and_links_on_two_boards(harness: Harness) -> None:
    configure(harness, boards=2, rows=1, columns=2)

    async def body() -> None:
        made = (await harness.call("CreateFunction", profile="ring"))["function"]
        assert made["links"] == [0, 1, 2, 3]
        told = spec(harness, made["uuid"])
        assert told["fabric"] == {
            "chips": [[0, 0, 1], [0, 1, 1], [1, 3, 1], [1, 2, 1]],  # around the ring
            "links": [
                [0, 0, 1, "inter-chip"],
                [2, 0, 3, "inter-card"],
                [3, 1, 2, "inter-card"],
                [1, 2, 3, "inter-chip"],
            ],
        }
        assert [link.number for link in parse(told).fabric.links] == [0, 2, 3, 1]
        plan = (await harness.call("ResizeFunction", function=made["uuid"], cores=8))["plan"]
        assert plan["links"] == [0, 1, 2, 3]
        told = spec(harness, made["uuid"])["fabric"]
        assert [row[2] for row in told["chips"]] == [2, 2, 2, 2]
        assert len(told["links"]) == 4
        card = (await harness.call("GetCard", card="card0"))["card"]
        assert (card["boards"], card["rows"], card["columns"]) == (2, 1, 2)
        assert card["links_free"] == []
        assert card["shares"][0]["links"] == [0, 1, 2, 3]
        await harness.call("RevokeFunction", function=made["uuid"])
        told = parse(spec(harness, made["uuid"]))
        assert (len(told.fabric.chips), told.fabric.links) == (4, ())

    scenario(harness, body)


def test_links_are_still_held_after_a_restart(harness: Harness) -> None:
    configure(harness)

    async def first() -> None:
        await harness.call("CreateFunction", profile="ring", name="a")

    async def second() -> None:
        item = (await harness.call("GetFunction", function="a"))["function"]
        assert item["links"] == [0, 1, 2, 3]
        error = await refused(harness, "CreateFunction", profile="ring")
        assert "are in a ring of free links" in error.message
        profile = (await harness.call("ListProfiles"))["profiles"][1]
        assert (profile["links"], profile["limited_by"]) == ("ring", ["links"])

    scenario(harness, first)
    scenario(harness, second)


def test_a_chip_that_is_switched_off_stays_so(harness: Harness) -> None:
    configure(harness)

    async def first() -> None:
        card = (await harness.call("SetChip", card="card0", chip=1, mode="disabled"))["card"]
        assert card["modes"] == ["enabled", "disabled", "enabled", "enabled"]
        assert card["cores_free"] == 12
        assert card["links_free"] == [2, 3]
        error = await refused(harness, "CreateFunction", profile="ring")
        assert "3 of 4 chips have 1 core free, 4 wanted" in error.message
        error = await refused(harness, "SetCardFunctions", card="card0", number=2)
        assert (error.code, "chip 1 is disabled" in error.message) == ("functions-count", True)

    async def second() -> None:
        assert (await harness.call("GetCard", card="card0"))["card"]["cores_free"] == 12
        events = (await harness.call("ListEvents"))["events"]
        assert "chip 1 of card card0 is disabled now" in [item["message"] for item in events]
        await harness.call("SetChip", card="card0", chip=1, mode="enabled")
        assert (await harness.call("GetCard", card="card0"))["card"]["cores_free"] == 16

    scenario(harness, first)
    scenario(harness, second)


def test_a_chip_is_not_switched_under_a_function(harness: Harness) -> None:
    configure(harness, chips=5)

    async def body() -> None:
        await harness.call("SetChip", card="card0", chip=1, mode="pass_through")
        made = (await harness.call("CreateFunction", profile="ring", name="a"))["function"]
        assert [place["chip"] for place in made["placement"]] == [0, 2, 3, 4]
        assert made["links"] == [0, 1, 2, 3, 4], "two of them lead over chip 1"
        told = spec(harness, made["uuid"])["fabric"]["links"]
        assert [row[:3] for row in told if row[0] in (0, 1)] == [[0, 0, 1], [1, 0, 1]]
        for chip, mode in ((0, "disabled"), (0, "pass_through"), (1, "enabled"), (1, "disabled")):
            error = await refused(harness, "SetChip", card="card0", chip=chip, mode=mode)
            assert (error.code, "a" in error.message) == ("chip-in-use", True)
        await harness.call("SetChip", card="card0", chip=1, mode="pass_through")  # as it is
        await harness.call("DeleteFunction", function="a")
        await harness.call("SetChip", card="card0", chip=1, mode="disabled")

    scenario(harness, body)


def test_chips_that_are_not_there_and_cards_that_are_cut(harness: Harness) -> None:
    configure(harness)

    async def body() -> None:
        async def code(card: str, chip: int) -> str:
            return (await refused(harness, "SetChip", card=card, chip=chip, mode="disabled")).code

        assert await code("card1", 0) == "card-not-found"
        assert await code("card0", 4) == "chip-not-found"
        assert await code("card0", -1) == "chip-not-found"
        await harness.call("SetCardFunctions", card="card0", number=2)
        assert await code("card0", 0) == "card-enabled"

    scenario(harness, body)


def test_a_partition_has_the_links_between_its_chips(harness: Harness) -> None:
    configure(harness, rows=2)
    harness.domains.define("<domain><name>vm</name></domain>")

    async def body() -> None:
        await harness.call("SetCardFunctions", card="card0", number=2)
        await harness.stream("AttachPartition", domain="vm", card="any")
        (item,) = (await harness.call("ListFunctions"))["functions"]
        assert [place["chip"] for place in item["placement"]] == [0, 1]
        assert item["links"] == [0]
        assert spec(harness, item["uuid"])["fabric"]["links"] == [[0, 0, 1, "inter-chip"]]

    scenario(harness, body)


def test_a_function_that_comes_gets_links_of_the_shape_that_it_had(harness: Harness) -> None:
    """A square into a row: chips in another order, so that its programs find their links."""
    configure(harness)
    square = ((0, 1), (0, 2), (1, 3), (2, 3))
    profile = replace(profile_of("ring", PROFILES["ring"]), shape=square)

    async def run() -> None:
        async with harness.daemon() as daemon:
            functions = daemon._functions
            made = await functions.bring(str(uuid.uuid4()), profile)
            assert specifying.shape(made, functions.cards) == square
            assert list(made.placement.cores) != sorted(made.placement.cores)
            with pytest.raises(CapacityError, match="with the links that it has"):
                await functions.bring(str(uuid.uuid4()), profile)

    asyncio.run(run())


# --- what is seen ---------------------------------------------------------------------------------


def test_topology_says_whose_each_link_is_and_how_it_is(harness: Harness) -> None:
    configure(harness)

    async def body() -> None:
        made = (await harness.call("CreateFunction", profile="four", name="a"))["function"]
        reply = await harness.call("Topology")
        admin.interface().check_reply("Topology", reply)
        (card,) = reply["cards"]
        assert [link["name"] for link in card["links"]] == ["a"] * 4
        assert {link["state"] for link in card["links"]} == {None}, "its process does not say"
        rows = [{"number": 0, "state": "up", "bytes": 4096}, {"number": 7, "state": "up"}]
        _said(harness, made["uuid"], {"chips": [], "links": rows})
        (card,) = (await harness.call("Topology", card="card0"))["cards"]
        assert [(link["state"], link["bytes"]) for link in card["links"][:2]] == [
            ("up", 4096), (None, None),
        ]  # fmt: skip
        assert card["chips"][2]["holders"] == [
            {"function": made["uuid"], "name": "a", "cores": [0, 1, 2, 3]}
        ]
        assert (await refused(harness, "Topology", card="zz")).code == "card-not-found"

    scenario(harness, body)


def _said(harness: Harness, uuid: str, reply: dict[str, Any]) -> None:
    """What its process answers from now on."""
    path: Path = harness.paths.function(uuid).spec
    path.with_suffix(".fabric").write_text(json.dumps(reply))


@pytest.mark.parametrize(
    "row",
    [
        7,
        {},
        {"number": 2, "state": "up", "bytes": 0},
        {"number": True, "state": "up", "bytes": 0},
        {"number": 1, "state": "sideways", "bytes": 0},
        {"number": 1, "state": [], "bytes": 0},
        {"number": 1, "state": "up", "bytes": -1},
        {"number": 1, "state": "up", "bytes": 1 << 60},
        {"number": 1, "state": "up", "bytes": 1.5},
    ],
)
def test_what_a_process_says_of_its_links_is_not_believed_blindly(row: object) -> None:
    good = {"number": 0, "state": "draining", "bytes": 5}
    assert heard({"links": [row, good]}, (0, 1)) == {0: ("draining", 5)}
    for links in (None, "x", {"a": 1}):
        assert heard({"links": links}, (0, 1)) == {}


def test_a_trace_is_passed_on_and_an_older_process_has_none(harness: Harness) -> None:
    configure(harness)

    async def body() -> None:
        made = (await harness.call("CreateFunction", profile="one", name="a"))["function"]
        assert (await refused(harness, "Trace", function="a")).code == "unknown-method"
        said = {"clock": "monotonic", "spans": [], "dropped": 3}
        harness.paths.function(made["uuid"]).spec.with_suffix(".trace").write_text(json.dumps(said))
        assert (await harness.call("Trace", function="a")) == {"trace": said}
        assert (await refused(harness, "Trace", function="b")).code == "function-not-found"

    scenario(harness, body)
