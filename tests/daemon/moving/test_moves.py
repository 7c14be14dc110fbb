"""What another host may ask of one that has a VM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import uuid4

from accelvisor.daemon.moving.journal import KEPT
from accelvisor.daemon.moving.peers import Asking
from accelvisor.hypervisor.port import DomainEventKind, DomainState
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
