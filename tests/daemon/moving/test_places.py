"""A VM for which no static function is free goes where one is: two daemons, libvirt in memory; and
hosts that are fakes, for what stands in the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pytest

from accelvisor.daemon.assigning import Wish
from accelvisor.daemon.moving import peers
from accelvisor.daemon.moving.elsewhere import Elsewhere
from accelvisor.daemon.moving.fit import AskFit
from accelvisor.daemon.moving.peers import AskContext, AskDomain, AskTickets, TellRotation
from accelvisor.daemon.moving.places import AskPlace, Giving, Placed
from accelvisor.errors import AccelvisorError, ConflictError, DataError, UnavailableError
from accelvisor.hypervisor.port import DomainEventKind, DomainState
from accelvisor.isolation.exhaustion import Candidate
from accelvisor.limits import LIMITS
from tests.daemon.moving.pair import Pair, pair

WEB = "99999999-0000-4000-8000-000000000001"
#: Of a VM whose memory a function can reach.
SHARED = """<domain><name>web</name><memoryBacking><source type='memfd'/>
<access mode='shared'/></memoryBacking></domain>"""


def scenario(body: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with pair() as made:
            await body(made)

    asyncio.run(run())


async def exhausted(made: Pair, there: int) -> None:
    """The only partition of the first host is taken; the second has ``there``."""
    await made.a.call("SetCardFunctions", card="card0", number=1)
    if there:
        await made.b.call("SetCardFunctions", card="card0", number=there)
    made.a.domains.put("other", DomainEventKind.DEFINED)
    await made.a.stream("AttachPartition", domain="other", card="any")
    made.a.domains.xml = lambda domain, *, live: SHARED  # type: ignore[method-assign]
    run(made.a)


def run(host: Any) -> None:
    host.domains.put("web", DomainEventKind.STARTED, uuid=WEB, state=DomainState.RUNNING)


def ask(made: Pair) -> asyncio.Task[list[dict[str, Any]]]:
    given = {"domain": "web", "card": "any", "on_exhaustion": "migrate"}
    return asyncio.create_task(made.a.stream("AttachPartition", **given))


async def under_way(made: Pair, task: asyncio.Task[Any]) -> None:
    async with asyncio.timeout(20):
        while made.a.domains.migrating.empty():
            await asyncio.sleep(0.01)
            if task.done():
                raise AssertionError(task.result())


async def refused(task: asyncio.Task[Any]) -> AccelvisorError:
    with pytest.raises(AccelvisorError) as caught:
        await task
    return caught.value


def test_the_vm_moves_and_gets_one_there() -> None:
    async def body(made: Pair) -> None:
        await exhausted(made, 2)
        task = ask(made)
        await under_way(made, task)
        run(made.b)
        made.a.domains.end_migration.put(None)
        *_, report, last = await task
        assert report["report"]["outcome"] == "moved"
        got = last["assigned"]
        assert (got["host"], got["card"], got["partition"]) == ("hostb", "card0", 0)
        found = (await made.b.call("GetFunction", function=got["function"]))["function"]
        assert (found["domain"], found["domain_uuid"]) == ("web", WEB)
        assert found["profile"] == "static/2"

    scenario(body)


def test_one_that_is_free_here_is_taken_here() -> None:
    async def body(made: Pair) -> None:
        await exhausted(made, 2)
        await made.a.call("UndefineDomain", domain="other")
        [last] = await ask(made)
        assert last["assigned"]["host"] is None
        assert made.a.domains.migrating.empty()

    scenario(body)


def test_a_vm_that_moved_and_got_none_is_told_of_with_both_reasons() -> None:
    async def body(made: Pair) -> None:
        await exhausted(made, 2)

        def full(request: Any) -> Any:
            raise ConflictError("no port is free", code="no-free-port")

        made.b.domains.attach = full  # type: ignore[method-assign]
        task = ask(made)
        await under_way(made, task)
        run(made.b)
        made.a.domains.end_migration.put(None)
        error = await refused(task)
        assert error.code == "moved-without-function"
        assert "runs on host hostb now, without a function: no port is free" in error.message
        assert (await made.b.call("ListFunctions"))["functions"] == []

    scenario(body)


def test_a_move_that_fails_leaves_the_vm_and_takes_nothing() -> None:
    async def body(made: Pair) -> None:
        await exhausted(made, 2)
        task = ask(made)
        await under_way(made, task)
        made.a.domains.end_migration.put(ConflictError("the disk is not there", code="libvirt"))
        error = await refused(task)
        assert "the VM stays" in error.message
        assert "hostb" in error.message
        assert "the disk is not there" in error.message
        assert (await made.b.call("ListFunctions"))["functions"] == []
        assert made.a.domains.get("web").state is DomainState.RUNNING

    scenario(body)


@pytest.mark.parametrize("older", [False, True])
def test_without_a_host_that_has_one_nothing_is_begun(
    older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has none; or is of a version that does not know the question."""
    if older:
        known = AskTickets | AskContext | AskDomain | TellRotation | AskFit
        monkeypatch.setattr(peers, "_QUESTIONS", msgspec.msgpack.Decoder(known))

    async def body(made: Pair) -> None:
        await exhausted(made, 0)
        error = await refused(ask(made))
        assert error.code == "no-function-free"
        said = "host hostb: no answer" if older else "host hostb has 0 free"
        assert said in error.message
        assert made.a.domains.migrating.empty()

    scenario(body)


def test_a_trusted_host_has_functions_given_to_what_it_brings_and_nothing_else() -> None:
    async def body(made: Pair) -> None:
        await made.b.call("SetCardFunctions", card="card0", number=2)
        keys, neighbours = made.daemon_a._moving.keys, made.daemon_a._moving.moves.neighbours
        [host] = keys.peers()

        async def place() -> str:
            with pytest.raises(AccelvisorError) as caught:
                await neighbours.place(host, AskPlace(WEB))
            return caught.value.code

        assert await place() == "migration-not-asked"  # never asked for
        assert await neighbours.places(host, WEB) == 2
        assert await place() == "migration-not-asked"  # has not come
        run(made.b)
        assert (await neighbours.place(host, AskPlace(WEB))).partition == 0
        assert await place() == "migration-not-asked"  # has its own already
        local = "99999999-0000-4000-8000-000000000002"
        made.b.domains.put("x", DomainEventKind.STARTED, uuid=local, state=DomainState.RUNNING)
        assert await neighbours.places(host, local) == 0  # was there all the time
        with pytest.raises(AccelvisorError):
            await neighbours.place(host, AskPlace(local))

    scenario(body)


def test_one_host_cannot_fill_the_memory_with_questions() -> None:
    async def call(verb: Callable[[Any], Any]) -> Any:
        return SimpleNamespace(state=SimpleNamespace(active=False))

    links: Any = SimpleNamespace(call=call)
    assigning: Any = SimpleNamespace(free=list)
    giving = Giving(assigning, links)

    async def body() -> None:
        host: Any = "a"
        for number in range(LIMITS.function_askers + 10):
            await giving.answer(host, peers.AskPlaces(str(UUID(int=number))))
        with pytest.raises(DataError):
            await giving.answer(host, peers.AskPlaces("web"))

    asyncio.run(body())
    assert len(giving._expected) == LIMITS.function_askers
    assert ("a", str(UUID(int=9))) not in giving._expected


# --- with fakes -----------------------------------------------------------------------------------


class Operator:
    """Plans what it is told to, and moves everything at once."""

    def __init__(self, blocked: dict[str, str], memory: str = "") -> None:
        self._blocked = blocked
        self._memory = memory
        self.moved: list[str] = []

    async def plan(self, wish: Any) -> tuple[Any, Any]:
        why = self._blocked.get(wish.host)
        reason = SimpleNamespace(message=why, code="no-way", fix="mend it")
        looked = SimpleNamespace(facts=SimpleNamespace(private_memory=self._memory))
        return looked, SimpleNamespace(blockers=[reason] if why else [])

    async def carry(self, looked: Any, wish: Any) -> AsyncGenerator[dict[str, Any], None]:
        self.moved.append(wish.host)
        yield {"report": {"outcome": "moved"}}


class Neighbours:
    """Each host has so many free, or does not answer."""

    def __init__(self, **free: int | None) -> None:
        self.free = free

    async def places(self, host: Any, domain: str) -> int:
        found = self.free[host.name]
        if found is None:
            raise UnavailableError("down", code="peer-unreachable")
        return found

    async def place(self, host: Any, asked: AskPlace) -> Placed:
        return Placed("f", "card1", 3)


def elsewhere(operator: Operator, **free: int | None) -> Elsewhere:
    hosts = [SimpleNamespace(name=name, uuid=f"uuid-{name}") for name in free]
    faked: Any = operator
    neighbours: Any = Neighbours(**free)
    listed: Any = lambda: hosts  # noqa: E731
    return Elsewhere(faked, neighbours, listed)


DOMAIN: Any = SimpleNamespace(uuid=WEB, name="web")


async def go(made: Elsewhere, *names: str) -> list[dict[str, Any]]:
    candidates = [Candidate(name, 1, True) for name in names]
    return [step async for step in made.go(DOMAIN, candidates, Wish("web"))]


def test_who_does_not_answer_is_no_candidate() -> None:
    found = asyncio.run(elsewhere(Operator({}), a=3, b=None).candidates(DOMAIN))
    assert found == [Candidate("a", 3, True), Candidate("b", 0, False)]


def test_the_next_host_is_tried_while_nothing_is_begun() -> None:
    operator = Operator({"uuid-a": "its disk is local"})
    *_, last = asyncio.run(go(elsewhere(operator, a=1, b=1), "a", "b"))
    assert operator.moved == ["uuid-b"]
    assert last["assigned"]["host"] == "b"


def test_when_all_refuse_each_is_named() -> None:
    operator = Operator({"uuid-a": "its disk is local", "uuid-b": "no bus"})
    with pytest.raises(ConflictError) as caught:
        asyncio.run(go(elsewhere(operator, a=1, b=1), "a", "b"))
    assert "host a: its disk is local; host b: no bus" in caught.value.message
    assert (caught.value.code, caught.value.hint) == ("no-way", "mend it")
    assert operator.moved == []


def test_a_vm_whose_memory_no_function_reaches_is_not_moved_for_one() -> None:
    operator = Operator({}, memory="it is private")
    with pytest.raises(ConflictError) as caught:
        asyncio.run(go(elsewhere(operator, a=1), "a"))
    assert caught.value.code == "domain-memory"
    assert operator.moved == []
