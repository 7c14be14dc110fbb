"""Whom a function lets in follows from who owns it, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from accelvisor import errors
from accelvisor.daemon import function_link, service
from accelvisor.daemon.daemon import Daemon
from accelvisor.daemon.paths import peer
from accelvisor.function.spare import obtain
from accelvisor.hypervisor.port import DomainEventKind, DomainState
from accelvisor.limits import LIMITS
from accelvisor.migration import messages as wire

from .harness import Harness
from .test_owners import slowly


@pytest.fixture
def vm(harness: Harness) -> str:
    """The UUID of a domain called vm."""
    harness.domains.put("vm", DomainEventKind.DEFINED)
    return harness.domains.get("vm").uuid


async def let_in(harness: Harness, uuid: str) -> str:
    """By the running process; by the next one it is the same."""
    paths = harness.paths.function(uuid)
    status = await function_link.call(paths.holder_socket, "status")
    told = obtain(str(paths.spec)).peer
    assert told == status["peer"]
    sockets = {name for name in os.listdir(paths.directory) if name.startswith("libvirt-")}
    assert sockets == ({told} if told else set())
    return told


async def until(harness: Harness, uuid: str, wanted: str) -> None:
    """A look follows an event in its own time, and a process needs some to start."""
    holder = harness.paths.function(uuid).holder_socket
    async with asyncio.timeout(10):
        while True:
            with suppress(errors.UnavailableError):
                if (await function_link.call(holder, "status"))["peer"] == wanted:
                    break
            await asyncio.sleep(0.01)
    assert await let_in(harness, uuid) == wanted


async def admit(harness: Harness, uuid: str, name: str = "vm") -> dict[str, Any]:
    reply = await harness.call("AdmitDomain", function="f", domain=name, domain_uuid=uuid)
    found: dict[str, Any] = reply["function"]
    return found


def test_a_new_function_lets_no_vm_in(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            assert await let_in(harness, made["uuid"]) == ""
            assert made["domain_socket"] is None

    asyncio.run(scenario())


def test_an_attached_domain_is_let_in_and_after_a_detach_it_is_not(
    harness: Harness, vm: str
) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            await harness.call("AttachFunction", domain="vm", function="f")
            assert await let_in(harness, uuid) == f"libvirt-{vm}"
            found = (await harness.call("GetFunction", function="f"))["function"]
            assert Path(found["domain_socket"]).is_socket()
            for verb in ("StartDomain", "RebootDomain", "DestroyDomain"):
                await harness.call(verb, domain="vm")
                assert await let_in(harness, uuid) == f"libvirt-{vm}"
            await harness.call("DetachFunction", domain="vm", function="f")
            assert await let_in(harness, uuid) == ""
            assert not Path(found["domain_socket"]).exists()

    asyncio.run(scenario())


def test_it_is_let_in_before_libvirt_is_asked(harness: Harness, vm: str) -> None:
    """QEMU connects while libvirt plugs."""
    seen: list[bool] = []
    inner = harness.domains.attach

    def look(request: Any) -> Any:
        seen.append(Path(request.socket).is_socket())
        return inner(request)

    harness.domains.attach = look  # type: ignore[method-assign]

    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("f")
            await harness.call("AttachFunction", domain="vm", function="f")

    asyncio.run(scenario())
    assert seen == [True]


def test_who_does_not_get_it_after_all_is_not_let_in(harness: Harness, vm: str) -> None:
    def refuse(request: Any) -> Any:
        raise errors.CapacityError("no port", code="no-hotplug-port")

    harness.domains.attach = refuse  # type: ignore[method-assign]

    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            with pytest.raises(errors.CapacityError):
                await harness.call("AttachFunction", domain="vm", function="f")
            assert await let_in(harness, uuid) == ""

    asyncio.run(scenario())


def test_a_process_that_makes_no_socket_keeps_the_function_free(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            harness.paths.specs.joinpath("temper").write_text("shy")
            for verb in (
                harness.call("AttachFunction", domain="vm", function="f"),
                admit(harness, vm),
            ):
                with pytest.raises(errors.SystemFailure) as caught:
                    await verb
                assert caught.value.code == "function-socket"
                found = (await harness.call("GetFunction", function="f"))["function"]
                assert (found["state"], found["domain_uuid"]) == ("ready", None)
            assert harness.domains.calls == []
            assert await let_in(harness, uuid) == ""

    asyncio.run(scenario())


def test_what_is_done_with_virsh_is_followed(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            harness.domains.put("vm", DomainEventKind.DEFINED, persistent_functions=(uuid,))
            await until(harness, uuid, f"libvirt-{vm}")
            harness.domains.put("vm", DomainEventKind.DEFINED, persistent_functions=())
            await until(harness, uuid, "")
            await harness.call("AttachFunction", domain="vm", function="f")
            await harness.call("UndefineDomain", domain="vm")
            assert await let_in(harness, uuid) == ""

    asyncio.run(scenario())


def test_a_process_that_is_started_again_lets_its_owner_in(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            await harness.call("AttachFunction", domain="vm", function="f")
            pid = await harness.supervisor.pid(uuid)
            harness.kill(uuid)
            async with asyncio.timeout(10):
                while await harness.supervisor.pid(uuid) in (None, pid):
                    await asyncio.sleep(0.01)
            await harness.until("f", "attached")
            await until(harness, uuid, f"libvirt-{vm}")

    asyncio.run(scenario())


@pytest.mark.parametrize("owned", [True, False])
def test_a_daemon_that_was_killed_in_between_makes_it_true(
    harness: Harness, vm: str, owned: bool
) -> None:
    """The row was committed, and the process heard nothing of it, or the other way round."""

    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            if owned:
                await harness.call("AttachFunction", domain="vm", function="f")
        paths = harness.paths.function(uuid)
        wrong = None if owned else peer(vm)
        await function_link.call(paths.holder_socket, "admit", {"peer": wrong})
        fields = json.loads(paths.spec.read_text())
        paths.spec.write_text(json.dumps({**fields, "peer": wrong or ""}))
        async with harness.daemon():
            await harness.until("f", "attached" if owned else "ready")
            assert await let_in(harness, uuid) == (f"libvirt-{vm}" if owned else "")

    asyncio.run(scenario())


def test_a_running_process_that_cannot_admit_is_left_to_its_vm(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            await harness.call("AttachFunction", domain="vm", function="f")
            await harness.call("StartDomain", domain="vm")
        paths = harness.paths.function(uuid)
        await function_link.call(paths.holder_socket, "admit", {"peer": None})
        harness.paths.specs.joinpath("temper").write_text("shy")
        async with harness.daemon():
            assert await harness.state("f") == "running"

    asyncio.run(scenario())


# --- what the hook asks ---------------------------------------------------------------------------


def test_a_domain_that_starts_gets_a_free_function(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            for _ in range(2):
                found = await admit(harness, vm)
                assert (found["state"], found["domain_uuid"]) == ("attached", vm)
                assert found["domain_socket"] == str(
                    harness.paths.function(uuid).domain_socket(vm)
                )
                assert await let_in(harness, uuid) == f"libvirt-{vm}"

    asyncio.run(scenario())


def test_of_two_domains_that_start_at_once_one_gets_it(harness: Harness, vm: str) -> None:
    harness.domains.put("other", DomainEventKind.DEFINED)
    other = harness.domains.get("other").uuid

    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            done = await asyncio.gather(
                admit(harness, vm), admit(harness, other, "other"), return_exceptions=True
            )
            refused = [item for item in done if isinstance(item, errors.ConflictError)]
            assert [item.code for item in refused] == ["function-in-use"]
            got = next(item for item in done if isinstance(item, dict))
            assert await let_in(harness, uuid) == f"libvirt-{got['domain_uuid']}"

    asyncio.run(scenario())


def test_another_domains_function_is_refused(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            await harness.call("AttachFunction", domain="vm", function="f")
            with pytest.raises(errors.ConflictError, match="belongs to domain vm") as caught:
                await admit(harness, "0b36e1ad-94f1-4e5c-8a5e-0e5a6a7f1a01", "thief")
            assert caught.value.code == "function-in-use"
            assert caught.value.hint == f"accelctl detach {uuid}"
            assert await let_in(harness, uuid) == f"libvirt-{vm}"

    asyncio.run(scenario())


def test_a_function_that_failed_is_refused_with_its_reason(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            await harness.call("AttachFunction", domain="vm", function="f")
            await harness.call("StartDomain", domain="vm")
            harness.kill(uuid)
            await harness.until("f", "failed")
            with pytest.raises(errors.ConflictError, match="is failed: its process ended"):
                await admit(harness, vm)

    asyncio.run(scenario())


async def given_away(daemon: Daemon, uuid: str) -> None:
    """By the ledger it runs at another host."""
    owners = daemon._moving.services.owners
    await owners.next_epoch(uuid)
    move = owners.transfer(b"m" * 16, "another host", (wire.Part(uuid, 2, b"d" * 32),))
    await owners.ledger.prepare(move)
    assert (await owners.ledger.commit(move)).committed


@pytest.mark.parametrize("own", [False, True], ids=["free", "its own"])
def test_what_another_host_owns_lets_no_domain_in(harness: Harness, vm: str, own: bool) -> None:
    """An old state directory was put back, and brought the function with it."""

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            uuid = (await harness.create("f"))["uuid"]
            if own:
                await harness.call("AttachFunction", domain="vm", function="f")
            await given_away(daemon, uuid)
            for verb in (
                harness.call("AttachFunction", domain="vm", function="f", live=True),
                admit(harness, vm),
            ):
                with pytest.raises(errors.ConflictError) as caught:
                    await verb
                assert caught.value.code == "ledger-not-owner"
            assert await let_in(harness, uuid) == (f"libvirt-{vm}" if own else "")

    asyncio.run(scenario())


@pytest.mark.parametrize("own", [False, True], ids=["free", "its own"])
def test_a_silent_ledger_keeps_no_domain_from_its_own_function_within_the_hooks_deadline(
    harness: Harness, vm: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(function: str) -> None:
        await asyncio.sleep(60)

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await harness.create("f")
            if own:
                await harness.call("AttachFunction", domain="vm", function="f")
            monkeypatch.setattr(daemon._moving.services.owners.ledger, "get", silent)
            async with asyncio.timeout(LIMITS.hook_s):
                if own:
                    for _ in range(8):
                        assert (await admit(harness, vm))["domain_uuid"] == vm
                    return
                with pytest.raises(errors.UnavailableError) as caught:
                    await admit(harness, vm)
                assert caught.value.code == "ledger-unreachable"

    asyncio.run(scenario())


@pytest.mark.parametrize("uuid", ["", "vm", "../x", "libvirt-0b36e1ad-94f1-4e5c-8a5e-0e5a6a7f1a01"])
def test_only_a_uuid_is_a_domain(harness: Harness, uuid: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("f")
            with pytest.raises(errors.UsageError):
                await admit(harness, uuid)
            assert await harness.state("f") == "ready"

    asyncio.run(scenario())


def test_a_domain_may_start_while_a_verb_waits_for_it(harness: Harness, vm: str) -> None:
    """libvirt lets no verb at a domain that is in its hook: the hook may not wait for the verb."""

    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("f")
            await harness.call("AttachFunction", domain="vm", function="f")
            begun, go_on = slowly(harness, "detach")
            verb = asyncio.ensure_future(
                harness.call("DetachFunction", domain="vm", function="f")
            )
            try:
                await asyncio.to_thread(begun.wait, 10)
                assert (await admit(harness, vm))["domain_uuid"] == vm
            finally:
                go_on.set()
                await verb

    asyncio.run(scenario())


def test_a_look_at_a_domain_that_is_just_starting_leaves_it_its_function(
    harness: Harness, vm: str
) -> None:
    """A transient domain: active by its id, in no running state yet, with no stored definition."""

    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            await admit(harness, vm)
            harness.domains.put(
                "vm",
                DomainEventKind.DEFINED,
                persistent=False,
                state=DomainState.SHUTOFF,
                live_functions=(uuid,),
            )
            harness.domains.put("unrelated", DomainEventKind.DEFINED)
            await harness.call("StartDomain", domain="unrelated")
            assert await harness.state("f") == "attached"
            assert await let_in(harness, uuid) == f"libvirt-{vm}"
            events = (await harness.call("ListEvents"))["events"]
            assert [item for item in events if "free again" in item["message"]] == []

    asyncio.run(scenario())


def test_a_transient_domain_that_could_not_start_gives_it_back(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libvirt tells no event of that."""
    monkeypatch.setattr(service, "STARTED_S", (0.05,))

    async def scenario() -> None:
        async with harness.daemon():
            uuid = (await harness.create("f"))["uuid"]
            await admit(harness, "0b36e1ad-94f1-4e5c-8a5e-0e5a6a7f1a01", "gone")
            await until(harness, uuid, "")
            await harness.until("f", "ready")

    asyncio.run(scenario())
