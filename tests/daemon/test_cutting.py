"""Cards that are cut once: a signed table that stays what it was, whatever dies when."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from accelvisor.daemon import cutting
from accelvisor.daemon.config import CardConfig
from accelvisor.daemon.cutting import DISABLE_STEPS, ENABLE_STEPS
from accelvisor.daemon.daemon import Daemon
from accelvisor.errors import AccelvisorError
from accelvisor.frames import canonical, envelope
from accelvisor.hypervisor.port import DomainEventKind
from accelvisor.isolation import static
from accelvisor.limits import GIB

from .harness import Harness
from .victim import killed_at

WORK = """
    await harness.call("SetCardFunctions", card="card0", number=4)
    await harness.call("SetCardFunctions", card="card0", number=0)
"""


async def cut(harness: Harness, number: int, card: str = "card0") -> dict[str, Any]:
    return (await harness.call("SetCardFunctions", card=card, number=number))["card"]


async def shown(harness: Harness, card: str = "card0") -> dict[str, Any]:
    return (await harness.call("GetCard", card=card))["card"]


async def code(awaitable: Any) -> str:
    with pytest.raises(AccelvisorError) as caught:
        await awaitable
    return caught.value.code


async def rows(daemon: Daemon) -> list[tuple[str, str, int, bytes | None]]:
    return await daemon._functions.registry.cards()


def vm(harness: Harness, name: str) -> None:
    harness.domains.put(name, DomainEventKind.DEFINED)


async def attach(harness: Harness, domain: str, **changes: Any) -> dict[str, Any]:
    """The last step."""
    given = {"card": "any", **changes}
    return (await harness.stream("AttachPartition", domain=domain, **given))[-1]["assigned"]


def configure(harness: Harness, **changes: Any) -> None:
    card = msgspec.structs.replace(CardConfig(), **changes)
    harness.config = msgspec.structs.replace(harness.config, cards={"card0": card})


@pytest.mark.parametrize("step", [*ENABLE_STEPS, *DISABLE_STEPS])
def test_a_daemon_killed_at_any_step_leaves_enabled_or_disabled(
    harness: Harness, step: str
) -> None:
    killed_at(step, harness.paths.run.parent, WORK)

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            enabled = step == "card:committed"
            [(name, state, number, table)] = await rows(daemon)
            assert name == "card0"
            assert (state, number) == (("enabled", 4) if enabled else ("disabled", 0))
            assert (table is not None) == enabled
            card = await shown(harness)
            assert card["mode"] == ("static" if enabled else "dynamic")
            assert card["partitions_free"] == ([0, 1, 2, 3] if enabled else [])
            await cut(harness, 0)  # and it can go on
            assert (await cut(harness, 2))["partitions"] == 2

    asyncio.run(scenario())


def test_every_named_step_is_passed(harness: Harness) -> None:
    seen: list[str] = []

    async def scenario() -> None:
        async with harness.daemon(fault=seen.append):
            await cut(harness, 4)
            await cut(harness, 0)

    asyncio.run(scenario())
    assert seen == [*ENABLE_STEPS, *DISABLE_STEPS]


def test_what_is_signed_is_the_table_and_the_signature_is_the_host_s(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            card = await cut(harness, 4)
            [(_, _, _, data)] = await rows(daemon)
            sealed = envelope.decode(data or b"", kind=cutting.TYPE, max_bytes=1 << 16)
            [signature] = sealed.signatures
            assert signature.key_id == daemon._moving.keys.signer.key_id
            document = canonical.decode(sealed.payload)
            table = static.partition(daemon._functions.cards[0], 4)
            host = (await harness.call("GetHost"))["host"]["uuid"]
            assert (document["host"], document["card"], document["number"]) == (host, "card0", 4)
            assert document["digest"] == card["table_digest"] == table.digest()
            assert document["document"] == canonical.decode(canonical.encode(table.document()))

    asyncio.run(scenario())


def test_the_number_is_frozen_while_it_is_enabled(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            assert await code(cut(harness, 3)) == "functions-count"
            assert await code(cut(harness, -1)) == "functions-count"
            assert await code(cut(harness, 1, "other")) == "card-not-found"
            await cut(harness, 4)
            before = await rows(daemon)
            assert await code(cut(harness, 2)) == "card-enabled"
            await cut(harness, 4)
            assert await rows(daemon) == before  # nothing is signed a second time
            await cut(harness, 0)
            await cut(harness, 0)

    asyncio.run(scenario())


def test_a_card_in_use_is_neither_enabled_nor_disabled(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("mine")
            assert await code(cut(harness, 4)) == "card-in-use"
            await harness.call("DeleteFunction", function="mine")
            await cut(harness, 4)
            vm(harness, "vm")
            got = await attach(harness, "vm")
            assert await code(cut(harness, 0)) == "card-in-use"
            await harness.call("DeleteFunction", function=got["function"], force=True)
            await cut(harness, 0)

    asyncio.run(scenario())


def test_functions_of_a_profile_leave_a_static_card_alone(harness: Harness) -> None:
    cards = {"card0": CardConfig(), "card1": CardConfig()}
    harness.config = msgspec.structs.replace(harness.config, cards=cards)

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            before = (await harness.call("ListProfiles"))["profiles"]
            await cut(harness, 4)
            after = (await harness.call("ListProfiles"))["profiles"]
            assert [item["fits"] * 2 for item in after] == [item["fits"] for item in before]
            assert "card0: it is cut into static functions" in after[0]["limit"]
            refused = harness.call("CreateFunction", profile="small", card="card0")
            assert await code(refused) == "card-enabled"
            assert (await harness.create("mine"))["card"] == "card1"
            size = daemon._functions.profiles[0]
            moved = await daemon._functions.bring("11111111-2222-4333-8444-555555555555", size)
            assert moved.card == "card1"
            await cut(harness, 0)
            await cut(harness, 1, "card0")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "changes", [{"memory": GIB}, {"chips": 2}, {"queues": 64}, {"functions": 8}, {"banks": 2}]
)
def test_another_card_under_the_same_name_gives_nothing_more(
    harness: Harness, changes: dict[str, Any]
) -> None:
    async def begin() -> None:
        async with harness.daemon():
            await cut(harness, 4)
            vm(harness, "vm")
            await attach(harness, "vm")

    async def changed() -> None:
        async with harness.daemon() as daemon:
            before = await rows(daemon)
            vm(harness, "other")
            card = await shown(harness)
            assert "is not the one whose partition table was signed" in card["problem"]
            assert card["partitions_free"] == []
            for name in ("card0", "any"):
                assert await code(attach(harness, "other", card=name)) == "card-table-changed"
            [found] = (await harness.call("ListFunctions"))["functions"]
            assert found["state"] == "attached"  # what exists goes on
            checks = {item["name"]: item for item in (await harness.call("Doctor"))["checks"]}
            assert checks["partitions"]["severity"] == "problem"
            assert await rows(daemon) == before  # and nothing is signed anew

    async def restored() -> None:
        async with harness.daemon():
            assert (await shown(harness))["problem"] == ""
            assert (await attach(harness, "other"))["partition"] == 1

    asyncio.run(begin())
    plain = harness.config
    configure(harness, **changes)
    asyncio.run(changed())
    harness.config = plain
    asyncio.run(restored())


def test_a_reload_is_looked_at_and_the_way_back_serves_who_waits(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await cut(harness, 1)
            for name in ("one", "two"):
                vm(harness, name)
            await attach(harness, "one")
            given = {"domain": "two", "card": "any", "on_exhaustion": "wait"}
            waits = asyncio.create_task(harness.stream("AttachPartition", **given))
            async with asyncio.timeout(10):
                while (await shown(harness))["waiting"] != ["two"]:
                    await asyncio.sleep(0.01)
            plain = harness.config
            configure(harness, memory=GIB)
            await daemon.reload(harness.config)
            [function] = (await harness.call("ListFunctions"))["functions"]
            await harness.call("DeleteFunction", function=function["uuid"], force=True)
            assert (await shown(harness))["waiting"] == ["two"]
            await daemon.reload(plain)
            assert (await waits)[-1]["assigned"]["partition"] == 0

    asyncio.run(scenario())


def test_a_table_that_somebody_else_signed_is_none(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await cut(harness, 4)
            [(_, _, _, data)] = await rows(daemon)
            sealed = envelope.decode(data or b"", kind=cutting.TYPE, max_bytes=1 << 16)
            document = canonical.decode(sealed.payload)
            payload = canonical.encode({**document, "number": 2})
            forged = envelope.Envelope(cutting.TYPE, payload, sealed.signatures).encode()
            store = daemon._functions.registry._store
            store._db.execute("UPDATE cards SET envelope = ?", (forged,))
        async with harness.daemon():
            vm(harness, "vm")
            assert await code(attach(harness, "vm")) == "card-table-changed"

    asyncio.run(scenario())


def test_a_table_that_was_signed_before_cards_were_grids_still_counts(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed as it was then: without grid and links."""
    document, digest = static.Table.document, static.Table.digest

    async def scenario() -> None:
        with monkeypatch.context() as then:
            then.setattr(static.Table, "document", lambda table, _=1: document(table, 1))
            then.setattr(static.Table, "digest", lambda table, _=1: digest(table, 1))
            async with harness.daemon():
                await cut(harness, 4)
        async with harness.daemon():
            vm(harness, "vm")
            assert (await shown(harness))["problem"] == ""
            assert (await attach(harness, "vm"))["partition"] == 0
        configure(harness, rows=2)
        async with harness.daemon():
            assert "was signed" in (await shown(harness))["problem"]

    asyncio.run(scenario())


def test_a_new_key_of_the_host_leaves_the_table_its_own(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await cut(harness, 4)
            await harness.call("RotateKeys")
            vm(harness, "vm")
            assert (await attach(harness, "vm"))["partition"] == 0

    asyncio.run(scenario())


def test_the_physical_function_s_configuration_space_follows(harness: Harness) -> None:
    def word(dump: str, at: int) -> int:
        line = dump.splitlines()[1 + at // 16].split(":")[1].split()
        return int(line[at % 16], 16) | int(line[at % 16 + 1], 16) << 8

    async def scenario() -> None:
        async with harness.daemon():
            for number in (4, 0, 8):
                await cut(harness, number)
                dump = (await harness.call("GetCardConfigSpace", card="card0"))["hexdump"]
                assert word(dump, 0x140 + 0x10) == number
                assert word(dump, 0x140 + 0x08) & 1 == bool(number)
            assert await code(harness.call("GetCardConfigSpace", card="no")) == "card-not-found"

    asyncio.run(scenario())


def test_a_part_that_is_more_than_a_function_can_be_is_refused(harness: Harness) -> None:
    configure(harness, memory=256 * GIB, chips=16)

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            assert await code(cut(harness, 2)) == "functions-count"
            assert await rows(daemon) == []
            await cut(harness, 4)

    asyncio.run(scenario())
