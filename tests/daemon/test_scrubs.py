"""Between two owners: a scrub, its signed record, and nobody who gets a function without it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from accelvisor.daemon.daemon import Daemon
from accelvisor.errors import AccelvisorError
from accelvisor.frames import canonical, envelope
from accelvisor.frames.envelope import SignatureError
from accelvisor.hypervisor.port import DomainEventKind
from accelvisor.isolation import scrub

from .harness import Harness


async def attach(harness: Harness, domain: str) -> None:
    if domain not in harness.domains.domains:
        harness.domains.put(domain, DomainEventKind.DEFINED)
    await harness.call("AttachFunction", domain=domain, function="mine", persistent=True)


async def detach(harness: Harness, domain: str) -> None:
    await harness.call("DetachFunction", domain=domain, function="mine")


async def records(daemon: Daemon, uuid: str) -> list[dict[str, Any]]:
    """Oldest first, each with a signature that is this host's."""
    found = await daemon._functions.registry.scrubs(uuid)
    return [daemon._scrubs.verified(data) for _, data in reversed(found)]


def test_every_owner_gets_a_function_at_an_epoch_of_its_own(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            made = await harness.create("mine")
            for domain in ("one", "two", "three"):
                await attach(harness, domain)
                await detach(harness, domain)
            await harness.call("DeleteFunction", function="mine")
            found = await records(daemon, made["uuid"])
            assert [(item["how"], item["epoch"]) for item in found] == [
                ("new-process", 1), ("renewed", 2), ("renewed", 3), ("renewed", 4), ("ended", 4),
            ]  # fmt: skip
            tenants = [harness.domains.get(name).uuid for name in ("one", "two", "three")]
            assert [item["tenant"] for item in found[1:4]] == tenants
            assert all(item["ranges"] == [[0, 0, 64 << 20]] for item in found)
            assert not any(value for item in found for value in item["evidence"].values())

    asyncio.run(scenario())


def test_its_own_domain_keeps_what_it_has(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            made = await harness.create("mine")
            await attach(harness, "one")
            await harness.call("StartDomain", domain="one")
            await harness.call("DestroyDomain", domain="one")
            await harness.call("StartDomain", domain="one")
            assert len(await records(daemon, made["uuid"])) == 1

    asyncio.run(scenario())


def test_a_function_without_a_record_is_scrubbed_first(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            made = await harness.create("mine")
            store = daemon._functions.registry._store
            store._db.execute("DELETE FROM scrubs")
            await attach(harness, "one")
            assert [item["how"] for item in await records(daemon, made["uuid"])] == ["renewed"]

    asyncio.run(scenario())


def test_a_record_that_somebody_else_signed_counts_for_nothing(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            made = await harness.create("mine")
            registry = daemon._functions.registry
            [(epoch, data)] = await registry.scrubs(made["uuid"])
            sealed = envelope.decode(data, kind=scrub.TYPE, max_bytes=1 << 16)
            document = canonical.decode(sealed.payload, max_bytes=1 << 16)
            assert isinstance(document, dict)
            changed = canonical.encode({**document, "epoch": 7})
            forged = envelope.Envelope(scrub.TYPE, changed, sealed.signatures).encode()
            with pytest.raises(SignatureError):
                daemon._scrubs.verified(forged)
            registry._store._db.execute("UPDATE scrubs SET envelope = ?", (forged,))
            registry._store._db.execute("UPDATE scrubs SET epoch = ?", (epoch,))
            await attach(harness, "one")
            newest = (await registry.scrubs(made["uuid"]))[0][1]
            assert daemon._scrubs.verified(newest)["how"] == "renewed"

    asyncio.run(scenario())


def test_a_function_that_does_not_read_as_empty_is_given_to_nobody(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            await attach(harness, "one")
            dirty = harness.paths.function(made["uuid"]).spec.with_suffix(".dirty")
            dirty.write_text("")
            await detach(harness, "one")
            with pytest.raises(AccelvisorError) as caught:
                await attach(harness, "two")
            assert caught.value.code == "function-not-scrubbed"
            assert "memory: 1" in caught.value.message
            dirty.unlink()
            await attach(harness, "two")

    asyncio.run(scenario())


def test_a_function_whose_last_qemu_stays_is_given_to_nobody(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            await attach(harness, "one")
            connected = harness.paths.function(made["uuid"]).spec.with_suffix(".connected")
            connected.write_text("")
            await detach(harness, "one")
            with pytest.raises(AccelvisorError) as caught:
                await attach(harness, "two")
            assert caught.value.code in ("function-not-scrubbed", "function-in-use")
            connected.unlink()
            await attach(harness, "two")

    asyncio.run(scenario())


def test_a_function_that_ends_by_itself_leaves_a_record_too(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            made = await harness.create("mine")
            await attach(harness, "one")
            harness.kill(made["uuid"])
            async with asyncio.timeout(10):
                while len(await records(daemon, made["uuid"])) < 2:
                    await asyncio.sleep(0.01)
            newest = (await records(daemon, made["uuid"]))[-1]
            assert (newest["how"], newest["epoch"]) == ("new-process", 2)

    asyncio.run(scenario())


def test_a_function_that_a_failed_move_brought_leaves_a_record(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon() as daemon:
            functions = daemon._functions
            profile = next(item for item in functions.profiles if item.name == "small")
            uuid = "6f9619ff-8b86-4d01-b42d-00c04fc964ff"
            await functions.bring(uuid, profile)
            await functions.drop(uuid, "the move failed")
            found = await records(daemon, uuid)
            assert [item["how"] for item in found] == ["new-process", "ended"]
            assert found[-1]["ranges"] == [[0, 0, 64 << 20]]

    asyncio.run(scenario())


def test_records_of_a_start_are_signed_once_the_key_is_there(harness: Harness) -> None:
    """Functions are started again before the host's key is read."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
        harness.kill(made["uuid"])
        async with harness.daemon() as daemon:
            found = await records(daemon, made["uuid"])
            assert [item["how"] for item in found] == ["new-process"] * 2

    asyncio.run(scenario())
