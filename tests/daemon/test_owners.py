"""A function has one domain, whoever comes at the same time and whatever definitions say."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from accelvisor import errors
from accelvisor.control import admin
from accelvisor.control.client import AdminClient
from accelvisor.control.codec import Call
from accelvisor.hypervisor.port import DomainEventKind, DomainState

from .harness import Harness, wait_until


@pytest.fixture
def vms(harness: Harness) -> list[str]:
    for name in ("m", "a-clone", "z-clone"):
        harness.domains.put(name, DomainEventKind.DEFINED)
    return list(harness.domains.domains)


def slowly(harness: Harness, verb: str) -> tuple[threading.Event, threading.Event]:
    """Hold a verb of the port up; (it has begun, let it go on)."""
    begun, go_on = threading.Event(), threading.Event()
    inner = getattr(harness.domains, verb)

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return inner(*args, **kwargs)

    setattr(harness.domains, verb, slow)
    return begun, go_on


def naming(harness: Harness, uuid: str) -> list[str]:
    return [item.name for item in harness.domains.list() if uuid in item.persistent_functions]


async def outcomes(*calls: Any) -> list[str]:
    done = await asyncio.gather(*calls, return_exceptions=True)
    return [getattr(item, "code", "ok") for item in done]


def test_two_attaches_at_once_give_it_to_one(harness: Harness, vms: list[str]) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            begun, go_on = slowly(harness, "attach")
            first = asyncio.ensure_future(harness.call("AttachFunction", domain="m", function="f"))
            await asyncio.to_thread(begun.wait, 10)
            second = asyncio.ensure_future(
                harness.call("AttachFunction", domain="z-clone", function="f")
            )
            threading.Timer(0.1, go_on.set).start()
            assert await outcomes(first, second) == ["ok", "function-in-use"]
            assert naming(harness, made["uuid"]) == ["m"]
            assert (await harness.until("f", "attached"))["domain"] == "m"

    asyncio.run(scenario())


def test_a_function_is_not_deleted_under_the_domain_that_just_got_it(
    harness: Harness, vms: list[str]
) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            begun, go_on = slowly(harness, "attach")
            attaching = asyncio.ensure_future(
                harness.call("AttachFunction", domain="m", function="f")
            )
            await asyncio.to_thread(begun.wait, 10)
            deleting = asyncio.ensure_future(harness.call("DeleteFunction", function="f"))
            threading.Timer(0.1, go_on.set).start()
            assert await outcomes(attaching, deleting) == ["ok", "function-in-use"]
            assert naming(harness, made["uuid"]) == ["m"]
            assert harness.processes() == {made["uuid"]}

    asyncio.run(scenario())


def test_an_old_look_does_not_undo_a_newer_attach(harness: Harness, vms: list[str]) -> None:
    """A listing that was made before the attach arrives after it."""

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await harness.create("f")
            registry = daemon._functions.registry
            before, domains = registry.all(), harness.domains.list()
            await harness.call("AttachFunction", domain="m", function="f")
            await daemon._keeper.follow(before, domains)
            assert await harness.state("f") == "attached"
            before, domains = registry.all(), harness.domains.list()
            await harness.call("DetachFunction", domain="m", function="f")
            await daemon._keeper.follow(before, domains)
            assert await harness.state("f") == "ready"

    asyncio.run(scenario())


def test_a_failed_attach_leaves_it_free(harness: Harness, vms: list[str]) -> None:
    def refuse(request: Any) -> Any:
        raise errors.CapacityError("no port", code="no-hotplug-port")

    harness.domains.attach = refuse  # type: ignore[method-assign]

    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("f")
            with pytest.raises(errors.CapacityError):
                await harness.call("AttachFunction", domain="m", function="f")
            found = (await harness.call("GetFunction", function="f"))["function"]
            assert (found["state"], found["domain"]) == ("ready", None)

    asyncio.run(scenario())


def test_a_daemon_killed_between_owner_and_libvirt_finds_it_free(
    harness: Harness, vms: list[str]
) -> None:
    """The owner is in the store, the definition never got it: the next look decides."""

    async def scenario() -> None:
        async with harness.daemon() as daemon:
            await harness.create("f")
            begun, go_on = slowly(harness, "attach")
            caller = asyncio.ensure_future(harness.call("AttachFunction", domain="m", function="f"))
            await asyncio.to_thread(begun.wait, 10)
            [row] = daemon._functions.registry.all()
            assert (row.state, row.domain) == ("attached", "m")
            copy = harness.paths.database.read_bytes()  # and its journal, as kill -9 leaves them
            wal = harness.paths.database.with_name("accelvisor.db-wal").read_bytes()
            go_on.set()
            await caller
        harness.paths.database.write_bytes(copy)
        harness.paths.database.with_name("accelvisor.db-wal").write_bytes(wal)
        harness.domains.put("m", DomainEventKind.DEFINED, persistent_functions=())
        async with harness.daemon():
            assert (await harness.until("f", "ready"))["domain"] is None

    asyncio.run(scenario())


def test_an_attach_is_carried_on_when_its_caller_goes(harness: Harness, vms: list[str]) -> None:
    given = {"domain": "m", "function": "f"}

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            begun, go_on = slowly(harness, "attach")

            def hang_up() -> None:
                with AdminClient(str(harness.paths.admin_socket)) as client:
                    client._send(Call(admin.INTERFACE, "AttachFunction", given))
                    assert begun.wait(10)

            await asyncio.to_thread(hang_up)
            go_on.set()
            await asyncio.to_thread(wait_until, lambda: naming(harness, made["uuid"]) == ["m"])
            await harness.until("f", "attached")

    asyncio.run(scenario())


@pytest.mark.parametrize("clone", ["a-clone", "z-clone"])
def test_a_cloned_definition_is_reported_and_not_followed(
    harness: Harness, vms: list[str], clone: str
) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            await harness.call("AttachFunction", domain="m", function="f")
            functions = (made["uuid"],)
            harness.domains.put(clone, DomainEventKind.DEFINED, persistent_functions=functions)
            harness.domains.put("m", DomainEventKind.DEFINED)  # one more look
            async with asyncio.timeout(10):
                while not await claims(harness):
                    await asyncio.sleep(0.01)
            [event] = await claims(harness)
            text = f"domain {clone} names f, which belongs to domain m"
            assert (event["message"], event["subject"]) == (text, made["uuid"])
            found = (await harness.call("GetFunction", function="f"))["function"]
            assert (found["state"], found["domain"]) == ("attached", "m")
            checks = {item["name"]: item for item in (await harness.call("Doctor"))["checks"]}
            assert checks["claims"]["severity"] == "problem"
            assert checks["claims"]["found"] == f"{clone} names f"
            # Once its own domain gives it up, and only then, it is the other's.
            await harness.call("DetachFunction", domain="m", function="f")
            async with asyncio.timeout(10):
                while (await harness.until("f", "attached"))["domain"] != clone:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


async def claims(harness: Harness) -> list[dict[str, Any]]:
    events = (await harness.call("ListEvents"))["events"]
    return [event for event in events if event["kind"] == "function-claimed"]


def test_what_another_definition_names_is_not_attached(harness: Harness, vms: list[str]) -> None:
    """Even when its event has not arrived."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            harness.domains._callbacks.clear()
            functions = (made["uuid"],)
            harness.domains.put("m", DomainEventKind.DEFINED, persistent_functions=functions)
            with pytest.raises(errors.ConflictError) as caught:
                await harness.call("AttachFunction", domain="z-clone", function="f")
            assert caught.value.code == "function-in-use"
            with pytest.raises(errors.ConflictError) as caught:
                await harness.call("DeleteFunction", function="f")
            assert caught.value.code == "function-in-use"

    asyncio.run(scenario())


def test_without_libvirt_a_connected_function_is_not_deleted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelvisor.daemon.attach.GONE_S", 0.1)

    def gone() -> Any:
        raise errors.UnavailableError("gone", code="libvirt-unavailable")

    harness.domains.list = gone  # type: ignore[method-assign]

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            mark = harness.paths.function(made["uuid"]).spec.with_suffix(".connected")
            mark.touch()
            with pytest.raises(errors.ConflictError) as caught:
                await harness.call("DeleteFunction", function="f")
            assert "QEMU is connected" in caught.value.message
            mark.unlink()
            await harness.call("DeleteFunction", function="f")

    asyncio.run(scenario())


def test_a_connected_function_is_not_plugged_into_another_vm(
    harness: Harness, vms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second QEMU would wait for its greeting with its monitor blocked."""
    monkeypatch.setattr("accelvisor.daemon.attach.GONE_S", 0.1)

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            await harness.call("StartDomain", domain="m")
            harness.paths.function(made["uuid"]).spec.with_suffix(".connected").touch()
            with pytest.raises(errors.ConflictError) as caught:
                await harness.call("AttachFunction", domain="m", function="f", live=True)
            assert caught.value.code == "function-in-use"
            assert harness.domains.calls == []

    asyncio.run(scenario())


def test_a_function_whose_socket_was_replaced_is_not_attached(
    harness: Harness, vms: list[str]
) -> None:
    """A link there would connect the guest to another tenant's function."""

    async def scenario() -> None:
        async with harness.daemon():
            other = await harness.create("other")
            made = await harness.create("f")
            m = harness.domains.get("m")
            await harness.call("AdmitDomain", function="f", domain="m", domain_uuid=m.uuid)
            socket = harness.paths.function(made["uuid"]).domain_socket(m.uuid)
            socket.unlink()
            socket.symlink_to(harness.paths.function(other["uuid"]).vfio_socket)
            with pytest.raises(errors.SystemFailure) as caught:
                await harness.call("AttachFunction", domain="m", function="f")
            assert caught.value.code == "function-socket"

    asyncio.run(scenario())


def test_a_domain_that_cannot_be_read_keeps_its_function(harness: Harness, vms: list[str]) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("f")
            await harness.call("AttachFunction", domain="m", function="f")
            odd = {"persistent_functions": (), "functions_known": False}
            harness.domains.put("m", DomainEventKind.DEFINED, **odd)
            await harness.call("StartDomain", domain="a-clone")  # its look has seen the odd one
            assert await harness.state("f") == "attached"
            checks = {item["name"]: item for item in (await harness.call("Doctor"))["checks"]}
            assert "m" in checks["domains"]["found"]

    asyncio.run(scenario())


def test_following_survives_what_nobody_foresaw(harness: Harness, vms: list[str]) -> None:
    """One bad event or look must not make the daemon deaf."""
    listing, calls = harness.domains.list, 0

    def broken() -> Any:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError("a bug")

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            harness.domains.list = broken  # type: ignore[method-assign]
            before = calls
            harness.domains.put("m", DomainEventKind.DEFINED)
            await asyncio.to_thread(wait_until, lambda: calls > before)
            harness.domains.list = listing  # type: ignore[method-assign]
            functions = (made["uuid"],)
            harness.domains.put("m", DomainEventKind.DEFINED, persistent_functions=functions)
            await harness.until("f", "attached")

    asyncio.run(scenario())


def test_clients_are_served_while_libvirt_waits_for_us(harness: Harness, vms: list[str]) -> None:
    """libvirt's hook asks GetFunction with a domain's lock held; a look needs that lock."""
    begun, go_on = slowly(harness, "list")

    async def scenario() -> None:
        try:
            async with harness.daemon():
                await asyncio.to_thread(begun.wait, 10)
                async with asyncio.timeout(5):
                    made = await harness.create("f")
                    assert await harness.state("f") == "ready"
                go_on.set()
                functions = (made["uuid"],)
                harness.domains.put("m", DomainEventKind.DEFINED, persistent_functions=functions)
                await harness.until("f", "attached")
        finally:
            go_on.set()

    asyncio.run(scenario())


def test_a_hanging_libvirt_does_not_hang_the_daemon(harness: Harness) -> None:
    from accelvisor.daemon.domains import DomainsLink

    _, go_on = slowly(harness, "version")
    seen: list[Any] = []

    async def look(before: None, domains: Any) -> None:
        seen.append(domains)

    async def scenario() -> None:
        async def no_event(event: Any) -> None: ...

        link = DomainsLink(
            "fake", lambda: None, look, no_event, lambda uri: harness.domains, deadline_s=0.1
        )
        try:
            for _ in range(6):  # more than there are threads
                with pytest.raises(errors.DeadlineError) as caught:
                    await link.call(lambda port: port.version())
                assert caught.value.code == "libvirt-deadline"
            assert await link.version() is None
        finally:
            go_on.set()
        async with asyncio.timeout(10):
            while await link.version() is None:
                await asyncio.sleep(0.01)
        await link.look()
        assert len(seen) == 1
        await link.stop()

    asyncio.run(scenario())


def test_a_broken_function_does_not_stall_the_verbs(
    harness: Harness, vms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again after pauses, not at each look."""
    monkeypatch.setattr("accelvisor.daemon.keeper.REVIVE_S", 0.2)

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            await harness.call("AttachFunction", domain="m", function="f")
            await harness.call("StartDomain", domain="m")
            monkeypatch.setenv("FAKE_TEMPER", "never")
            harness.kill(made["uuid"])
            await harness.until("f", "failed")
            loop = asyncio.get_running_loop()
            begin = loop.time()
            await harness.call("DestroyDomain", domain="m")
            for _ in range(5):
                await harness.call("StartDomain", domain="a-clone")
                await harness.call("DestroyDomain", domain="a-clone")
            assert loop.time() - begin < 5  # one attempt alone takes 10 s
            # It comes up once it can: with the pause that the first failure begins.
            monkeypatch.setattr("accelvisor.daemon.keeper.PAUSE_S", 0.05)
            monkeypatch.delenv("FAKE_TEMPER")
            async with asyncio.timeout(30):
                await wait_for(harness, "f", "attached")

    asyncio.run(scenario())


async def wait_for(harness: Harness, name: str, state: str) -> None:
    while await harness.state(name) != state:
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("running", [False, True])
def test_a_function_that_gave_up_is_noticed(
    harness: Harness, vms: list[str], running: bool
) -> None:
    """Its holder lives, so nobody sees an end; a VM that starts with it would not come up."""

    async def scenario() -> None:
        async with harness.daemon(poll_s=0.05):
            made = await harness.create("f")
            await harness.call("AttachFunction", domain="m", function="f")
            if running:
                await harness.call("StartDomain", domain="m")
            mark = harness.paths.function(made["uuid"]).spec.with_suffix(".gave-up")
            mark.write_text("30 restarts within a minute")
            if running:
                found = await harness.until("f", "failed")
                assert found["reason"] == (
                    "its process gave up: 30 restarts within a minute while domain m used it"
                )
                assert harness.domains.domains["m"].state is DomainState.RUNNING
                await harness.call("DestroyDomain", domain="m")
            await asyncio.to_thread(wait_until, lambda: not mark.exists())
            await harness.until("f", "attached")

    asyncio.run(scenario())


def test_a_function_that_gave_up_is_not_attached(harness: Harness, vms: list[str]) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            harness.paths.function(made["uuid"]).spec.with_suffix(".gave-up").write_text("tired")
            with pytest.raises(errors.ConflictError) as caught:
                await harness.call("AttachFunction", domain="m", function="f")
            assert caught.value.code == "function-failed"
            assert "tired" in caught.value.message

    asyncio.run(scenario())
