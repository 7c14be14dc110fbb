"""Static functions to VMs: one each, in order, and what is given back goes to whoever waits."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from accelvisor.control import admin
from accelvisor.control.client import AdminClient
from accelvisor.daemon.daemon import Daemon
from accelvisor.errors import AccelvisorError, CapacityError, ConflictError
from accelvisor.hypervisor.port import DomainEventKind, DomainState
from accelvisor.isolation import static
from accelvisor.isolation.resources import violations
from accelvisor.limits import MIB

from .harness import Harness
from .test_cutting import attach, code, configure, cut, shown, vm
from .victim import killed_at

WORK = """
from tests.daemon.test_cutting import attach, cut, vm

await cut(harness, 4)
vm(harness, "vm")
if step == "attached":
    harness.domains.attach = lambda request: os.kill(os.getpid(), signal.SIGKILL)
await attach(harness, "vm")
"""


async def until_waiting(harness: Harness, *names: str) -> None:
    async with asyncio.timeout(10):
        while (await shown(harness))["waiting"] != list(names):
            await asyncio.sleep(0.01)


async def wait(harness: Harness, name: str, **changes: Any) -> asyncio.Task[dict[str, Any]]:
    """A VM that is in the queue by now."""
    vm(harness, name)
    before = (await shown(harness))["waiting"]
    task = asyncio.create_task(attach(harness, name, on_exhaustion="wait", **changes))
    await until_waiting(harness, *before, name)
    return task


def sound(daemon: Daemon) -> None:
    """No two functions share anything, and each has exactly its part."""
    registry = daemon._functions.registry
    cards = daemon._functions.cards
    assert violations(cards, registry.placements()) == []
    for item in registry.all():
        if item.partition is not None:
            number = daemon._cutting.enabled()[item.card]
            card = next(card for card in cards if card.name == item.card)
            assert item.placement == static.partition(card, number).placement(item.partition)


def test_a_vm_gets_the_lowest_free_partition_whole(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await cut(harness, 4)
            for name in ("one", "two"):
                vm(harness, name)
            first, second = [await attach(harness, name) for name in ("one", "two")]
            assert (first["partition"], second["partition"]) == (0, 1)
            found = (await harness.call("GetFunction", function=second["function"]))["function"]
            assert (found["profile"], found["partition"]) == ("static/4", 1)
            assert (found["cores"], found["chips"], found["queues"]) == (4, 1, 64)
            assert (found["memory_bytes"], found["window_bytes"]) == (1024 * MIB, 16 * MIB)
            assert (found["state"], found["domain"]) == ("attached", "two")
            card = await shown(harness)
            assert card["partitions_free"] == [2, 3]
            assert [(item["partition"], item["domain"]) for item in card["holders"]] == [
                (0, "one"), (1, "two"),
            ]  # fmt: skip
            sound(daemon)

    asyncio.run(scenario())


def test_a_slice_is_hard_what_nobody_has_is_not_lent_to_it(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await cut(harness, 2)
            vm(harness, "one")
            got = await attach(harness, "one")
            await daemon._sharing.settle()
            shares = harness.paths.function(got["function"]).spec.with_suffix(".shares")
            lent = json.loads(shares.read_text()) if shares.exists() else []
            assert not any(lent)
            assert daemon._sharing.given[got["function"]].borrowed == 0

    asyncio.run(scenario())


def test_a_vm_has_one_function_whichever_came_first(harness: Harness) -> None:
    cards = harness.config.cards | {"card1": harness.config.cards["card0"]}
    harness.config = type(harness.config)(
        daemon=harness.config.daemon, libvirt=harness.config.libvirt,
        migration=harness.config.migration, cards=cards,
    )  # fmt: skip

    async def scenario() -> None:
        async with harness.daemon():
            await cut(harness, 4)
            for name in ("one", "two"):
                vm(harness, name)
            got = await attach(harness, "one")
            assert await code(attach(harness, "one")) == "one-function-per-vm"
            await harness.create("mine")
            give = {"function": "mine", "persistent": True}
            refused = harness.call("AttachFunction", domain="one", **give)
            assert await code(refused) == "one-function-per-vm"
            one = harness.domains.get("one")
            hook = harness.call(
                "AdmitDomain", function="mine", domain="one", domain_uuid=one.uuid
            )
            assert await code(hook) == "one-function-per-vm"
            await harness.call("AttachFunction", domain="two", **give)
            assert await code(attach(harness, "two")) == "one-function-per-vm"
            assert await code(attach(harness, "one", on_exhaustion="wait")) == "one-function-per-vm"
            assert (await shown(harness))["partitions_free"] == [1, 2, 3]
            assert got["partition"] == 0

    asyncio.run(scenario())


def test_who_may_not_wait_is_denied(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            vm(harness, "two")
            assert await code(attach(harness, "two")) == "card-not-static"
            await cut(harness, 1)
            vm(harness, "one")
            await attach(harness, "one")
            for given in ({}, {"on_exhaustion": "deny"}, {"on_exhaustion": "migrate"}):
                with pytest.raises(CapacityError, match='VM "two"') as caught:
                    await attach(harness, "two", **given)
                assert caught.value.code == "no-function-free"
            assert await code(attach(harness, "two", card="no")) == "card-not-static"
            assert await code(attach(harness, "none")) == "domain-not-found"
            assert await code(attach(harness, "two", timeout=1e9)) == "usage"

    asyncio.run(scenario())


def test_what_is_given_back_goes_to_the_first_who_waits(harness: Harness) -> None:
    """By detach, undefine, delete and the end of a transient attachment."""

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await cut(harness, 1)
            vm(harness, "zero")
            got = await attach(harness, "zero")
            names = ["one", "two", "three", "four"]
            tasks = [await wait(harness, name) for name in names]
            await harness.call("DetachFunction", domain="zero", function=got["function"])
            got = await tasks[0]
            await until_waiting(harness, "two", "three", "four")
            await harness.call("UndefineDomain", domain="one")
            got = await tasks[1]
            await harness.call("DeleteFunction", function=got["function"], force=True)
            got = await tasks[2]
            sound(daemon)
            await daemon._functions.drop(got["function"], "it moved away")
            got = await tasks[3]
            assert got["partition"] == 0
            await harness.call("DetachFunction", domain="four", function=got["function"])
            assert (await shown(harness))["partitions_free"] == [0]
            assert harness.processes() == set()

    asyncio.run(scenario())


def test_a_vm_that_stops_gives_back_what_only_the_running_one_had(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await cut(harness, 1)
            harness.domains.put("one", DomainEventKind.STARTED, state=DomainState.RUNNING)
            await attach(harness, "one", live=True)
            task = await wait(harness, "two")
            await harness.call("DestroyDomain", domain="one")
            assert (await task)["partition"] == 0

    asyncio.run(scenario())


def test_a_deadline_is_kept_and_the_next_is_not_harmed(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await cut(harness, 1)
            vm(harness, "zero")
            got = await attach(harness, "zero")
            began = time.monotonic()
            late = await wait(harness, "one", timeout=0.5)
            task = await wait(harness, "two")
            assert await code(late) == "no-function-free"
            assert 0.5 <= time.monotonic() - began < 5
            await harness.call("DetachFunction", domain="zero", function=got["function"])
            assert (await task)["partition"] == 0

    asyncio.run(scenario())


def test_who_goes_away_waits_no_more(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await cut(harness, 1)
            for name in ("zero", "one"):
                vm(harness, name)
            got = await attach(harness, "zero")
            client = await asyncio.to_thread(AdminClient, str(harness.paths.admin_socket))
            given = {"domain": "one", "card": "any", "on_exhaustion": "wait"}
            stream = client.stream("AttachPartition", given)
            assert (await asyncio.to_thread(next, stream))["waiting"] == 1
            client.close()
            await until_waiting(harness)
            await harness.call("DetachFunction", domain="zero", function=got["function"])
            assert (await shown(harness))["partitions_free"] == [0]
            await attach(harness, "one")

    asyncio.run(scenario())


def test_when_attaching_fails_the_function_ends_and_the_next_is_served(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await cut(harness, 1)
            vm(harness, "zero")
            got = await attach(harness, "zero")
            bad, good = await wait(harness, "bad"), await wait(harness, "good")
            plain = harness.domains.attach

            def picky(request: Any) -> Any:
                if harness.domains.get(request.domain).name == "bad":
                    raise ConflictError("no port is free", code="no-free-port")
                return plain(request)

            harness.domains.attach = picky  # type: ignore[method-assign]
            await harness.call("DetachFunction", domain="zero", function=got["function"])
            assert await code(bad) == "no-free-port"
            got = await good
            assert len(daemon._functions.registry.all()) == 1
            vm(harness, "late")
            assert await code(attach(harness, "late", live=True)) == "no-function-free"
            await harness.call("DetachFunction", domain="good", function=got["function"])
            # Refused before it is any domain's: it ends all the same.
            assert await code(attach(harness, "late", live=True)) == "domain-state"
            assert daemon._functions.registry.all() == []
            assert (await shown(harness))["partitions_free"] == [0]

    asyncio.run(scenario())


def test_a_process_that_does_not_come_up_leaves_its_partition_free(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await cut(harness, 4)
            vm(harness, "vm")
            temper = harness.paths.specs / "temper"
            temper.write_text("quits")
            assert await code(attach(harness, "vm")) == "function-not-ready"
            assert (await shown(harness))["partitions_free"] == [0, 1, 2, 3]
            temper.unlink()
            assert (await attach(harness, "vm"))["partition"] == 0

    asyncio.run(scenario())


def test_a_function_of_one_vm_is_no_other_s(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await cut(harness, 2)
            for name in ("one", "two"):
                vm(harness, name)
            got = await attach(harness, "one")
            row = daemon._functions.registry.find(got["function"])
            other = harness.domains.get("two").uuid
            assert await code(daemon._functions.scrub(row, other)) == "function-in-use"
            resize = harness.call("ResizeFunction", function=row.uuid, cores=1)
            assert await code(resize) == "card-enabled"

    asyncio.run(scenario())


def test_only_for_a_card_that_it_named(harness: Harness) -> None:
    cards = harness.config.cards | {"card1": harness.config.cards["card0"]}
    configure(harness)
    harness.config = type(harness.config)(
        daemon=harness.config.daemon, libvirt=harness.config.libvirt,
        migration=harness.config.migration, cards=cards,
    )  # fmt: skip

    async def scenario() -> None:
        async with harness.daemon():
            await cut(harness, 1)
            await cut(harness, 1, "card1")
            for name in ("a", "b"):
                vm(harness, name)
            first = await attach(harness, "a", card="card0")
            second = await attach(harness, "b", card="card1")
            task = await wait(harness, "picky", card="card0")
            assert (await shown(harness, "card1"))["waiting"] == []
            await harness.call("DetachFunction", domain="b", function=second["function"])
            vm(harness, "c")
            assert (await attach(harness, "c"))["card"] == "card1"
            await harness.call("DetachFunction", domain="a", function=first["function"])
            assert (await task)["card"] == "card0"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "step", ["create:journaled", "create:started", "create:ready", "create:committed", "attached"]
)
def test_a_daemon_killed_on_the_way_gives_the_partition_to_the_next(
    harness: Harness, step: str
) -> None:
    killed_at(step, harness.paths.run.parent, WORK)

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            async with asyncio.timeout(10):  # libvirt knows no domain that has it
                while daemon._functions.registry.all():
                    await asyncio.sleep(0.01)
            assert (await shown(harness))["partitions_free"] == [0, 1, 2, 3]
            vm(harness, "next")
            assert (await attach(harness, "next"))["partition"] == 0

    asyncio.run(scenario())


def test_after_a_restart_each_has_what_it_had(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await cut(harness, 2)
            for name in ("one", "two"):
                vm(harness, name)
                got = await attach(harness, name)
        async with harness.daemon():
            holders = (await shown(harness))["holders"]
            assert [item["domain"] for item in holders] == ["one", "two"]
            task = await wait(harness, "three")
            assert await code(attach(harness, "two")) == "one-function-per-vm"
            await harness.call("DetachFunction", domain="two", function=got["function"])
            assert (await task)["partition"] == 1

    asyncio.run(scenario())


def test_moving_a_vm_for_a_function_needs_the_level_of_moving() -> None:
    policy = admin.Policy(operate=(7,), uids=())
    peer = admin.Peer(1000, (7,))
    admin.authorise(policy, peer, "AttachPartition", {"on_exhaustion": "wait"})
    with pytest.raises(AccelvisorError, match="level admin") as caught:
        admin.authorise(policy, peer, "AttachPartition", {"on_exhaustion": "migrate"})
    assert caught.value.code == "permission-denied"
