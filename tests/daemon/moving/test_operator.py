"""Migrate, CancelMigration, ListMigrations, DrainHost and the trust methods, on two daemons whose
libvirt is in memory: what an operator is told, and what libvirt is asked for.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from accelvisor.daemon.moving.fit import AskFit, Need
from accelvisor.daemon.moving.peers import read_question
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DataError,
    NotFoundError,
    PermissionDenied,
    ProtocolError,
    SystemFailure,
)
from accelvisor.frames import changes, trust
from accelvisor.frames.identity import SigningKey
from accelvisor.hypervisor.port import DomainEventKind, DomainState
from accelvisor.limits import LIMITS
from tests.daemon.moving.pair import Pair, pair

Body = Callable[[Pair], Coroutine[Any, Any, None]]


def scenario(body: Body, **options: Any) -> None:
    async def run() -> None:
        async with pair(**options) as made:
            await body(made)

    asyncio.run(run())


def put(made: Pair, name: str = "web", **changes: Any) -> None:
    made.a.domains.put(name, DomainEventKind.STARTED, state=DomainState.RUNNING, **changes)


async def begin(made: Pair) -> asyncio.Task[list[dict[str, Any]]]:
    """A migration that libvirt has begun."""
    task = asyncio.create_task(made.a.stream("Migrate", domain="web", host="hostb"))
    async with asyncio.timeout(20):
        while made.a.domains.migrating.empty():
            await asyncio.sleep(0.01)
            if task.done():
                raise AssertionError(task.result())
    return task


async def kinds(made: Pair) -> list[str]:
    return [event["kind"] for event in (await made.a.call("ListEvents"))["events"]]


# --- dry run --------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_happen_and_does_nothing() -> None:
    async def body(made: Pair) -> None:
        put(made)
        (reply,) = await made.a.stream("Migrate", domain="web", host="hostb", dry_run=True)
        plan = reply["plan"]
        assert plan["possible"]
        assert plan["uri"] == "fake+tcp://127.0.0.1/system"
        assert {item["code"] for item in plan["reasons"]} == {
            "migration-no-functions", "migration-memory",
        }  # fmt: skip
        assert made.a.domains.calls == []

    scenario(body)


def test_a_dry_run_shows_all_reasons_at_once() -> None:
    """A host that is not trusted, and a VM that libvirt does not know."""

    async def body(made: Pair) -> None:
        (reply,) = await made.a.stream("Migrate", domain="nothing", host="hostb", dry_run=True)
        codes = [item["code"] for item in reply["plan"]["reasons"]]
        assert codes == ["domain-not-found", "trust-host-unknown"]
        assert not reply["plan"]["possible"]

    scenario(body, trust=False)


def test_a_host_that_is_down_is_a_reason_and_no_failure() -> None:
    async def body(made: Pair) -> None:
        put(made)
        await made.daemon_b.stop()
        (reply,) = await made.a.stream("Migrate", domain="web", host="hostb", dry_run=True)
        blockers = [i for i in reply["plan"]["reasons"] if i["severity"] == "blocker"]
        assert [item["code"] for item in blockers] == ["peer-unreachable"]

    scenario(body)


def test_functions_of_the_vm_are_looked_at_and_room_is_asked_for() -> None:
    async def body(made: Pair) -> None:
        function = await made.a.create("nn0")
        put(made, live_functions=(function["uuid"],))
        await made.a.until("nn0", "running")
        (reply,) = await made.a.stream("Migrate", domain="web", host="hostb", dry_run=True)
        codes = {i["code"] for i in reply["plan"]["reasons"] if i["severity"] == "blocker"}
        assert reply["plan"]["functions"] == [function["uuid"]]
        # Its QEMU is none: it has connected nothing, and its memory is nobody's.
        assert {"migration-monitor", "migration-bus"} <= codes

    scenario(body)


@pytest.mark.parametrize("host", ["hosta", None])
def test_nobody_moves_a_vm_to_where_it_is(host: str | None) -> None:
    async def body(made: Pair) -> None:
        put(made)
        name = host or (await made.a.call("GetHost"))["host"]["uuid"]
        with pytest.raises(ConflictError) as caught:
            await made.a.stream("Migrate", domain="web", host=name)
        assert caught.value.code == "migration-self"

    scenario(body)


# --- a migration ----------------------------------------------------------------------------------


def test_progress_comes_then_the_report() -> None:
    async def body(made: Pair) -> None:
        put(made)
        task = await begin(made)
        await asyncio.sleep(0)
        made.a.domains.end_migration.put(None)
        first, *steps, last = await task
        assert first["plan"]["possible"]
        assert all(step["progress"]["cancellable"] for step in steps)
        assert last["report"]["outcome"] == "moved"
        assert last["report"]["host"] == "hostb"
        assert made.a.domains.calls == ["migrate fake+tcp://127.0.0.1/system"]
        assert {"migration-begun", "migration-moved"} <= set(await kinds(made))
        assert "web" not in made.a.domains.domains

    scenario(body)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (SystemFailure("no route to host", code="libvirt-failed"), "failed"),
        (ConflictError("too much changes", code="migration-convergence"), "unconverged"),
        (DataError("a bit is another one", code="frame-root"), "unverified"),
    ],
)
def test_what_libvirt_says_against_it_is_in_the_report(
    error: AccelvisorError, outcome: str
) -> None:
    async def body(made: Pair) -> None:
        put(made)
        task = await begin(made)
        made.a.domains.end_migration.put(error)
        report = (await task)[-1]["report"]
        assert (report["outcome"], report["code"]) == (outcome, error.code)
        assert report["message"] == error.message
        assert "migration-returned" in await kinds(made)

    scenario(body)


def test_a_cancel_ends_it() -> None:
    async def body(made: Pair) -> None:
        put(made)
        task = await begin(made)
        await made.a.call("CancelMigration", domain="web")
        report = (await task)[-1]["report"]
        assert report["outcome"] == "cancelled"
        assert made.a.domains.domains["web"].state is DomainState.RUNNING
        with pytest.raises(NotFoundError) as caught:
            await made.a.call("CancelMigration", domain="web")
        assert caught.value.code == "migration-unknown"

    scenario(body)


def test_one_vm_has_one_migration_at_a_time() -> None:
    async def body(made: Pair) -> None:
        put(made)
        task = await begin(made)
        with pytest.raises(ConflictError) as caught:
            await made.a.stream("Migrate", domain="web", host="hostb")
        assert caught.value.code == "migration-busy"
        made.a.domains.end_migration.put(None)
        await task

    scenario(body)


def test_it_goes_on_when_nobody_watches_it_any_more() -> None:
    async def body(made: Pair) -> None:
        put(made)
        reader, writer = await asyncio.open_unix_connection(str(made.a.paths.admin_socket))
        writer.write(
            b'{"method": "io.accelvisor.Admin.Migrate", "more": true,'
            b' "parameters": {"domain": "web", "host": "hostb"}}\0'
        )
        await reader.readuntil(b"\0")
        async with asyncio.timeout(20):
            while made.a.domains.migrating.empty():
                await asyncio.sleep(0.01)
        writer.close()
        made.a.domains.end_migration.put(None)
        async with asyncio.timeout(20):
            while "migration-moved" not in await kinds(made):
                await asyncio.sleep(0.01)

    scenario(body)


@pytest.mark.parametrize("given", [{"downtime_ms": 0}, {"downtime_ms": 60_001}, {"bandwidth": -1}])
def test_numbers_out_of_range_are_refused(given: dict[str, int]) -> None:
    async def body(made: Pair) -> None:
        put(made)
        with pytest.raises(AccelvisorError) as caught:
            await made.a.stream("Migrate", domain="web", host="hostb", **given)
        assert caught.value.code == "usage"

    scenario(body)


def test_there_are_no_migrations_at_first() -> None:
    async def body(made: Pair) -> None:
        assert (await made.a.call("ListMigrations"))["migrations"] == []
        with pytest.raises(NotFoundError) as caught:
            await made.a.call("GetMigration", id="0123")
        assert caught.value.code == "migration-unknown"

    scenario(body)


# --- drain ----------------------------------------------------------------------------------------


def test_a_drain_names_what_stays_and_what_to_do_with_it() -> None:
    async def body(made: Pair) -> None:
        await made.a.create("free")
        busy = await made.a.create("busy")
        put(made, live_functions=(busy["uuid"],))
        await made.a.until("busy", "running")
        replies = await made.a.stream("DrainHost")
        stays = {reply["stay"]["name"]: reply["stay"] for reply in replies if reply["stay"]}
        assert set(stays) == {"web", "free"}
        assert stays["free"]["what"] == "function"
        assert "checkpoint" in stays["free"]["fix"]
        assert made.a.domains.calls == []  # nothing was begun that cannot end well

    scenario(body)


@pytest.mark.parametrize("to", [None, ["nohost"]])
def test_a_host_without_others_cannot_be_drained(to: list[str] | None) -> None:
    async def body(made: Pair) -> None:
        with pytest.raises(NotFoundError) as caught:
            await made.a.stream("DrainHost", **({"to": to} if to else {}))
        assert caught.value.code == "trust-host-unknown"

    scenario(body, trust=False)


# --- trust ----------------------------------------------------------------------------------------


def test_a_fleets_document_takes_the_place_of_the_hosts_own() -> None:
    async def body(made: Pair) -> None:
        mine = trust.first(
            base64.b64decode((await made.a.call("ExportTrust"))["document"]),
            frozenset((await made.a.call("GetTrust"))["trust"]["roots"]),
        ).document
        root = SigningKey.generate(lambda count: bytes(range(count)))
        key = trust.RootKey(algorithm="ed25519", public=root.public)
        fleet = changes.change(mine, 1, roots=trust.Roots(threshold=1, keys=(key,)))
        text = base64.b64encode(trust.sign(fleet, [root])).decode()
        with pytest.raises(DataError):  # its own roots did not sign that they give up
            await made.a.call("ImportTrust", document=text)
        with pytest.raises(DataError) as caught:
            await made.a.call("ImportTrust", document=text, roots=["00" * 16])
        assert caught.value.code == "trust-roots"
        found = await made.a.call("ImportTrust", document=text, roots=[root.key_id])
        assert not found["trust"]["own_roots"]
        with pytest.raises(PermissionDenied):
            await made.a.call("RemoveHost", host="hostb")

    scenario(body)


@pytest.mark.parametrize("document", ["", "no base64!", "AAAA"])
def test_what_is_no_trust_document_is_refused(document: str) -> None:
    async def body(made: Pair) -> None:
        with pytest.raises(DataError) as caught:
            await made.a.call("ImportTrust", document=document)
        assert caught.value.code == "trust-shape"

    scenario(body, trust=False)


# --- what another host is asked -------------------------------------------------------------------


def test_a_question_about_too_many_functions_is_refused() -> None:
    need = Need("u", "n", "p", 1, 1, 1, 1, 1, 2)
    many = AskFit("d", (need,) * (LIMITS.migration_functions + 1))
    with pytest.raises(ProtocolError):
        read_question(msgspec.msgpack.encode(many))
