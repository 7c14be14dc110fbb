"""What another host may ask of one that has a VM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from accelvisor.daemon.moving.journal import KEPT
from accelvisor.daemon.moving.peers import Asking, Ways
from accelvisor.errors import ConflictError, StateError
from accelvisor.hypervisor.port import DomainEventKind, DomainState
from accelvisor.migration import actions, destination, source
from accelvisor.migration import messages as wire
from accelvisor.migration.link import Handler
from tests.daemon.moving.pair import Pair, pair


def scenario(body: Callable[[Pair, str, str], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with pair() as made:
            function = (await made.a.call("CreateFunction", profile="small"))["function"]["uuid"]
            domains = made.a.domains
            domains.put(
                "web", DomainEventKind.STARTED, state=DomainState.RUNNING,
                live_functions=(function,),
            )  # fmt: skip
            async with asyncio.timeout(20):
                while (await owner(made, function)) is None:
                    await asyncio.sleep(0.01)
            await body(made, function, str(await owner(made, function)))

    asyncio.run(run())


async def owner(made: Pair, function: str) -> Any:
    return (await made.a.call("GetFunction", function=function))["function"]["domain_uuid"]


class Peer:
    """The second host's link to the first, and what comes over it."""

    def __init__(self, made: Pair) -> None:
        self.heard: asyncio.Queue[wire.Message] = asyncio.Queue()
        keys = made.daemon_b._moving.keys
        (host,) = [one for one in keys.keyring.effective.hosts if one.name == "hosta"]
        self._uuid = str(keys.host)
        handler = Handler(
            request=None,  # type: ignore[arg-type]
            notice=lambda _, payload: self.heard.put_nowait(wire.decode(payload)),
        )
        self.asking = Asking(keys, host, handler, lambda: None, lambda: None)

    async def reserve(self, domain: str, function: str) -> wire.Message:
        """The first host's answer."""
        await self.asking.open()
        wanted = (wire.Wanted(function, ""),)
        self.asking.send(wire.Reserve(uuid4().bytes, domain, self._uuid, bytes(16), wanted))
        async with asyncio.timeout(20):
            return await self.heard.get()


def test_a_trusted_host_gets_nothing_of_a_vm_that_nobody_migrates() -> None:
    async def body(made: Pair, function: str, domain: str) -> None:
        peer = Peer(made)
        answer = await peer.reserve(domain, function)
        assert isinstance(answer, wire.Refuse)
        assert answer.code == "migration-not-asked"
        await peer.asking.close()

    scenario(body)


def test_a_host_that_asks_without_end_leaves_a_bounded_number_behind() -> None:
    async def body(made: Pair, function: str, domain: str) -> None:
        peer = Peer(made)
        moves = made.daemon_a._moving.moves
        tasks = len(asyncio.all_tasks())
        for _ in range(KEPT + 20):
            await peer.reserve(domain, function)
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > tasks + KEPT + 20:
                await asyncio.sleep(0.01)
        assert len(moves.sources) <= KEPT + 1
        assert len(moves._services.journal.rows()) <= KEPT + 1
        await peer.asking.close()

    scenario(body)


# --- moves that are known, and what QEMU and the ledger say of them -------------------------------


class Coming:
    """A move to the second host, in a state."""

    def __init__(self, state: destination.State, *, left: bool = False) -> None:
        self.domain_uuid, self.left, self.told = "vm", left, False
        self.heard: list[destination.Event] = []
        self.driver = SimpleNamespace(state=state, post=self.heard.append)


@pytest.mark.parametrize("state", ["LOADED", "COMMITTING", "COMMITTED", "FENCED"])
def test_a_vm_that_has_arrived_is_not_saved_before_it_runs(state: str) -> None:
    async def body(made: Pair, function: str, domain: str) -> None:
        moves = made.daemon_b._moving.moves
        moves.destinations[b"id"] = Coming(destination.State[state])  # type: ignore[assignment]
        try:
            with pytest.raises(ConflictError) as caught:
                await moves.owners("vm")
            assert caught.value.code == "migration-busy"
            moves.destinations[b"id"].driver.state = destination.State.LOADING
            assert await moves.owners("vm")
        finally:
            moves.destinations.clear()

    scenario(body)


def test_an_arrival_that_was_given_up_has_no_part_in_the_vms_next_life() -> None:
    async def body(made: Pair, function: str, domain: str) -> None:
        moves = made.daemon_b._moving.moves
        for left, heard in ((True, []), (False, [destination.Event.QEMU_RESUMED])):
            one = Coming(destination.State.CLOSED, left=left)
            moves.destinations[b"id"] = one  # type: ignore[assignment]
            moves.resumed("vm")
            moves.destinations.clear()
            assert one.heard == heard

    scenario(body)


def test_a_ledger_that_answers_nonsense_is_asked_again() -> None:
    async def body(made: Pair, function: str, domain: str) -> None:
        peer = Peer(made)
        await peer.reserve(domain, function)
        (move,) = made.daemon_a._moving.moves.sources.values()
        heard: list[source.Event] = []
        move.driver.post = heard.append  # type: ignore[method-assign]

        class Damaged:
            async def abort(self, transfer: object) -> None:
                raise StateError("it holds what cannot be", code="ledger-damaged")

        owners = made.daemon_a._moving.services.owners
        kept, owners.ledger = owners.ledger, Damaged()  # type: ignore[assignment]
        try:
            await move._decide(actions.Decision.ABORT)
        finally:
            owners.ledger = kept
        assert heard == [source.Event.ARBITER_UNREACHABLE]
        await peer.asking.close()

    scenario(body)


def test_what_is_over_twice_is_over() -> None:
    async def body(made: Pair, function: str, domain: str) -> None:
        keys = made.daemon_b._moving.keys
        (host,) = [one for one in keys.keyring.effective.hosts if one.name == "hosta"]
        ways = Ways(keys, Handler(None, None), lambda *_: None)  # type: ignore[arg-type]
        ways.to(host, b"one")
        await ways._retire(str(UUID(host.uuid)), b"other", lambda: pytest.fail("it was not ours"))
        assert host.uuid in ways._askings
        await ways.close()

    scenario(body)


def test_a_qemu_that_is_not_there_does_not_keep_the_daemon_from_being_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(_self: object, _domain: str) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def body(made: Pair, function: str, domain: str) -> None:
        monkeypatch.setattr("accelvisor.daemon.moving.host.MovingHost._domain_state", never)
        await made.daemon_a.stop()
        async with asyncio.timeout(30), made.a.daemon():
            assert await owner(made, function) == domain

    scenario(body)


def test_a_qemu_that_ends_before_a_restart_was_looked_into_decides_nothing() -> None:
    """It may have handed its VM over: to ask for an abort then would leave nobody to compute."""

    async def body(made: Pair, function: str, domain: str) -> None:
        heard: list[source.Event] = []
        moves = made.daemon_a._moving.moves
        driver = SimpleNamespace(state=source.State.SEALED, post=heard.append)
        move: Any = SimpleNamespace(
            asked=SimpleNamespace(domain=domain), driver=driver, heard=[]
        )
        moves.sources[b"id"] = move
        try:
            moves.gone(domain)
            assert heard == []
            heard.append(source.Event.RESTARTED_GONE)
            moves.listen(move)
        finally:
            moves.sources.clear()
        assert heard == [source.Event.RESTARTED_GONE, source.Event.QEMU_GONE]

    scenario(body)
