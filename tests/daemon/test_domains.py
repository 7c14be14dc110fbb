"""Functions follow their domains: each thing a domain does leaves a defined state."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from accelvisor import errors
from accelvisor.hypervisor.port import DomainEventKind, DomainState

from .harness import Harness


@pytest.fixture
def vm(harness: Harness) -> str:
    harness.domains.put("vm", DomainEventKind.DEFINED)
    return "vm"


async def attached(harness: Harness, vm: str) -> dict[str, Any]:
    made = await harness.create("mine")
    await harness.call("AttachFunction", domain=vm, function="mine")
    return made


def test_attach_to_a_stopped_domain_is_persistent(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            reply = await harness.call("AttachFunction", domain=vm, function="mine")
            assert reply["attachment"]["persistent"]
            assert not reply["attachment"]["live"]
            found = (await harness.call("GetFunction", function="mine"))["function"]
            assert f"socket='{found['domain_socket']}'" in harness.domains.calls[0]
            assert (made["domain_socket"], found["socket"]) == (None, made["socket"])
            assert (found["state"], found["domain"]) == ("attached", "vm")

    asyncio.run(scenario())


def test_attach_to_a_running_domain_is_both(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await harness.call("StartDomain", domain=vm)
            await harness.create("mine")
            reply = await harness.call("AttachFunction", domain=vm, function="mine")
            assert reply["attachment"]["persistent"]
            assert reply["attachment"]["live"]
            assert await harness.state("mine") == "running"

    asyncio.run(scenario())


LIFE = [
    ("StartDomain", {}, "running"),
    ("SuspendDomain", {}, "running"),
    ("ResumeDomain", {}, "running"),
    ("RebootDomain", {}, "running"),
    ("ResetDomain", {}, "running"),
    ("StopDomain", {"deadline": 5.0}, "attached"),
    ("StartDomain", {}, "running"),
    ("DestroyDomain", {}, "attached"),
    ("UndefineDomain", {}, "ready"),
]


def test_a_domains_life(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await attached(harness, vm)
            for method, extra, state in LIFE:
                await harness.call(method, domain=vm, **extra)
                assert await harness.state("mine") == state, method
            found = (await harness.call("GetFunction", function="mine"))["function"]
            assert found["domain"] is None

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [DomainEventKind.STOPPED, DomainEventKind.CRASHED])
def test_a_domain_that_ends_by_itself(harness: Harness, vm: str, kind: DomainEventKind) -> None:
    """A crash or a kill of QEMU comes as an event, not through our verbs."""

    async def scenario() -> None:
        async with harness.daemon():
            await attached(harness, vm)
            await harness.call("StartDomain", domain=vm)
            harness.domains.put(vm, kind, state=DomainState.SHUTOFF, live_functions=())
            await harness.until("mine", "attached")

    asyncio.run(scenario())


def test_virsh_is_followed_too(harness: Harness, vm: str) -> None:
    """Somebody who edits the XML by hand is no stranger."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            harness.domains.put(vm, DomainEventKind.DEFINED, persistent_functions=(made["uuid"],))
            await harness.until("mine", "attached")
            harness.domains.put(vm, DomainEventKind.DEFINED, persistent_functions=())
            assert (await harness.until("mine", "ready"))["domain"] is None

    asyncio.run(scenario())


def test_what_happened_while_the_daemon_was_away(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await attached(harness, vm)
            await harness.call("StartDomain", domain=vm)
        harness.domains.put(
            vm, DomainEventKind.STOPPED, state=DomainState.SHUTOFF, live_functions=()
        )
        async with harness.daemon():
            await harness.until("mine", "attached")

    asyncio.run(scenario())


def test_a_process_that_dies_under_a_running_domain_fails_until_it_stops(
    harness: Harness, vm: str
) -> None:
    """QEMU does not connect again: a new process would look healthy and serve nobody."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await attached(harness, vm)
            await harness.call("StartDomain", domain=vm)
            harness.kill(made["uuid"])
            found = await harness.until("mine", "failed")
            assert found["reason"] == "its process ended while domain vm used it"
            await harness.call("SuspendDomain", domain=vm)
            assert await harness.state("mine") == "failed"
            await harness.call("DestroyDomain", domain=vm)
            assert await harness.state("mine") == "attached"
            assert harness.processes() == {made["uuid"]}

    asyncio.run(scenario())


def test_a_function_has_one_domain(harness: Harness, vm: str) -> None:
    harness.domains.put("other", DomainEventKind.DEFINED)

    async def scenario() -> None:
        async with harness.daemon():
            await attached(harness, vm)
            with pytest.raises(errors.ConflictError) as caught:
                await harness.call("AttachFunction", domain="other", function="mine")
            assert caught.value.code == "function-in-use"
            with pytest.raises(errors.ConflictError) as caught:
                await harness.call("DetachFunction", domain="other", function="mine")
            assert caught.value.code == "function-not-attached"

    asyncio.run(scenario())


def test_an_attached_function_is_not_deleted_without_force(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            made = await attached(harness, vm)
            await harness.call("StartDomain", domain=vm)
            with pytest.raises(errors.ConflictError) as caught:
                await harness.call("DeleteFunction", function="mine")
            assert caught.value.code == "function-in-use"
            assert harness.processes() == {made["uuid"]}
            await harness.call("DeleteFunction", function="mine", force=True)
            assert harness.processes() == set()
            domain = (await harness.call("GetDomain", domain=vm))["domain"]
            assert domain["live_functions"] == domain["persistent_functions"] == []

    asyncio.run(scenario())


def test_detach_takes_it_from_wherever_it_is(harness: Harness, vm: str) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await attached(harness, vm)
            await harness.call("StartDomain", domain=vm)
            reply = await harness.call("DetachFunction", domain=vm, function="mine")
            assert reply["attachment"]["live"]
            assert reply["attachment"]["persistent"]
            assert await harness.state("mine") == "ready"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("flags", "error", "code"),
    [
        ({"live": True}, errors.ConflictError, "domain-state"),
        ({"live": False, "persistent": False}, errors.UsageError, "usage"),
    ],
)
def test_flags_that_make_no_sense(
    harness: Harness, vm: str, flags: dict[str, bool], error: type[Exception], code: str
) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            await harness.create("mine")
            with pytest.raises(error) as caught:
                await harness.call("AttachFunction", domain=vm, function="mine", **flags)
            assert caught.value.code == code  # type: ignore[attr-defined]
            assert harness.domains.calls == []

    asyncio.run(scenario())


def test_libvirt_that_comes_later_is_looked_at_then(harness: Harness, vm: str) -> None:
    """Its events were lost meanwhile, so all domains are looked at anew."""
    listing = harness.domains.list

    def gone() -> Any:
        raise errors.UnavailableError("gone", code="libvirt-unavailable")

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
        harness.domains.put(vm, DomainEventKind.DEFINED, persistent_functions=(made["uuid"],))
        harness.domains.list = gone  # type: ignore[method-assign]
        async with harness.daemon():
            assert await harness.state("mine") == "ready"
            harness.domains.list = listing  # type: ignore[method-assign]
            harness.domains.put(vm, DomainEventKind.CONNECTED)
            await harness.until("mine", "attached")

    asyncio.run(scenario())


def test_guests_that_take_their_time_do_not_hold_up_the_others(harness: Harness) -> None:
    """More patient verbs than there are threads for quick ones."""
    release = threading.Event()
    for number in range(6):
        harness.domains.put(f"vm{number}", DomainEventKind.STARTED, state=DomainState.RUNNING)
    destroy = harness.domains.destroy

    def slow(domain: str, *, deadline_s: float) -> Any:
        release.wait(20)
        return destroy(domain)

    harness.domains.shutdown = slow  # type: ignore[method-assign]

    async def scenario() -> None:
        async with harness.daemon():
            stops = [
                asyncio.ensure_future(harness.call("StopDomain", domain=f"vm{number}"))
                for number in range(6)
            ]
            try:
                async with asyncio.timeout(10):
                    assert len((await harness.call("ListDomains"))["domains"]) == 6
                assert not any(stop.done() for stop in stops)
            finally:
                release.set()
            assert [item["domain"]["state"] for item in await asyncio.gather(*stops)] == [
                "shutoff"
            ] * 6

    asyncio.run(scenario())


def test_domains_without_libvirt(harness: Harness) -> None:
    """Everything else works, and the refusal says what to do."""

    def missing(uri: str) -> Any:
        raise errors.UnavailableError("no bindings", code="libvirt-unavailable", hint="apt install")

    async def scenario() -> None:
        async with harness.daemon(load_domains=missing):
            await harness.create("mine")
            for method, given in (
                ("ListDomains", {}),
                ("StartDomain", {"domain": "vm"}),
                ("AttachFunction", {"domain": "vm", "function": "mine"}),
            ):
                with pytest.raises(errors.UnavailableError) as caught:
                    await harness.call(method, **given)
                assert caught.value.code == "libvirt-unavailable"
                assert caught.value.hint
            assert (await harness.call("GetHost"))["host"]["hypervisor"] is None
            await harness.call("DeleteFunction", function="mine")

    asyncio.run(scenario())


Q35 = """<domain type='qemu'><name>vm</name>
<os><type machine='q35'>hvm</type></os><devices/></domain>"""


def test_an_existing_domain_is_prepared(harness: Harness, vm: str) -> None:
    harness.domains.xml = lambda domain, live: Q35  # type: ignore[method-assign]

    async def scenario() -> None:
        async with harness.daemon():
            dry = await harness.call("PrepareDomain", domain=vm, hotplug_ports=2, dry_run=True)
            assert dry["domain"] is None
            assert "memfd" in dry["xml"]
            assert dry["xml"].count("pcie-root-port") == 2
            done = await harness.call("PrepareDomain", domain=vm)
            assert done["domain"]["name"] == vm
            assert done["xml"].count("pcie-root-port") == 4
            with pytest.raises(errors.UsageError):
                await harness.call("PrepareDomain", domain=vm, hotplug_ports=17)

    asyncio.run(scenario())


def test_define_from_options_from_xml_and_dry(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.daemon():
            options = {"name": "new", "memory_bytes": 1 << 28}
            dry = await harness.call("DefineDomain", options=options, dry_run=True)
            assert dry == {"domain": None, "xml": "<domain><name>new</name></domain>"}
            assert (await harness.call("ListDomains"))["domains"] == []
            await harness.call("DefineDomain", options=options)
            await harness.call("DefineDomain", xml="<domain><name>other</name></domain>")
            domains = (await harness.call("ListDomains"))["domains"]
            assert [item["name"] for item in domains] == ["new", "other"]
            for wrong in ({}, {"options": options, "xml": "<domain/>"}):
                with pytest.raises(errors.UsageError):
                    await harness.call("DefineDomain", **wrong)
            with pytest.raises(errors.UsageError) as caught:
                await harness.call("DefineDomain", options={**options, "vcpus": 0})
            assert caught.value.code == "domain-options"

    asyncio.run(scenario())
