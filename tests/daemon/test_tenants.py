"""Nobody reads what somebody else wrote (case P11): real function processes, every way in which a
function comes from one domain to the next. The pattern of a tenant fills device memory, window and
registers; the next looks at every byte.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from accelvisor.abi.registers import Reg
from accelvisor.daemon.config import CardConfig, ProfileConfig, Size
from accelvisor.daemon.daemon import Daemon
from accelvisor.daemon.supervisor import SubprocessSupervisor
from accelvisor.guest.function import Function
from accelvisor.hypervisor.port import DomainEventKind
from accelvisor.limits import MIB
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.transport import ClientTransport

from .harness import Harness

MEMORY = 4 * MIB
#: A tensor that fills all of it but for the pages of what is created beside it.
ALL = (MEMORY - 64 * 4096,)


@pytest.fixture
def real(harness: Harness) -> Iterator[Harness]:
    """Real processes in the fake's place, on a card that one function fills."""
    harness.supervisor = SubprocessSupervisor(harness.paths)
    harness.config = msgspec.structs.replace(
        harness.config,
        cards={"card0": CardConfig(chips=1, cores_per_chip=1, memory=Size(MEMORY), banks=1)},
        profiles={
            "small": ProfileConfig(memory=Size(MEMORY), window=Size(MIB), queues=2, ring_entries=16)
        },
    )
    yield harness

    async def end() -> None:
        for uuid in await harness.supervisor.list():
            await harness.supervisor.stop(uuid)

    asyncio.run(end())


class Tenant:
    """A domain's guest on the function that it has."""

    def __init__(self, harness: Harness, made: dict[str, Any], domain: str) -> None:
        socket = harness.paths.function(made["uuid"]).domain_socket(
            harness.domains.get(domain).uuid
        )
        self.transport = ClientTransport(Client(str(socket)), ram_bytes=8 * MIB)
        self.function = Function(self.transport, timeout_s=30.0)

    def look(self) -> int:
        """How many bytes of anything are not zero."""
        found = int(np.count_nonzero(self.function.empty(ALL, "uint8").numpy()))
        staging = self.transport.read64(Reg.STAGING_OFFSET_64)
        found += len(bytes(self.transport.window[staging + MIB // 2 :]).strip(b"\0"))
        return found + self.transport.read32(Reg.SCRATCH)

    def write(self, tag: int) -> None:
        tensor = self.function.empty(ALL, "uint8")
        tensor.copy_(np.full(ALL, tag, np.uint8))
        self.transport.window[-MIB // 4 :] = bytes([tag]) * (MIB // 4)
        self.transport.write32(Reg.SCRATCH, tag)
        assert self.transport.read32(Reg.SCRATCH) == tag

    def vanish(self) -> None:
        """As a QEMU that is killed: nothing is closed in order."""
        self.transport.close()


async def take(harness: Harness, domain: str, name: str = "mine") -> None:
    if domain not in harness.domains.domains:
        harness.domains.put(domain, DomainEventKind.DEFINED)
    await harness.call("AttachFunction", domain=domain, function=name, persistent=True)


Way = Callable[[Harness, Daemon, dict[str, Any], Tenant], Awaitable[dict[str, Any]]]


async def detached(
    harness: Harness, _: Daemon, made: dict[str, Any], tenant: Tenant
) -> dict[str, Any]:
    tenant.vanish()
    await harness.call("DetachFunction", domain="one", function="mine")
    return made


async def worker_killed(
    harness: Harness, daemon: Daemon, made: dict[str, Any], tenant: Tenant
) -> dict[str, Any]:
    from accelvisor.daemon import function_link

    holder = harness.paths.function(made["uuid"]).holder_socket
    await function_link.call(holder, "kill-worker")
    return await detached(harness, daemon, made, tenant)


async def holder_killed(
    harness: Harness, _: Daemon, made: dict[str, Any], tenant: Tenant
) -> dict[str, Any]:
    pid = await harness.supervisor.pid(made["uuid"])
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    tenant.vanish()
    async with asyncio.timeout(10):
        while (await harness.call("GetFunction", function="mine"))["function"]["epoch"] == 1:
            await asyncio.sleep(0.01)
    await harness.call("DetachFunction", domain="one", function="mine")
    return made


async def deleted(
    harness: Harness, daemon: Daemon, made: dict[str, Any], tenant: Tenant
) -> dict[str, Any]:
    await detached(harness, daemon, made, tenant)
    await harness.call("DeleteFunction", function="mine")
    return await harness.create("mine")


async def undefined(
    harness: Harness, _: Daemon, made: dict[str, Any], tenant: Tenant
) -> dict[str, Any]:
    tenant.vanish()
    await harness.call("UndefineDomain", domain="one")
    await harness.until("mine", "ready")
    return made


async def resized(
    harness: Harness, daemon: Daemon, made: dict[str, Any], tenant: Tenant
) -> dict[str, Any]:
    """Another function gets the memory that this one gave up."""
    tenant.function.restart()
    await harness.call("ResizeFunction", function="mine", memory_bytes=MIB)
    await harness.call("ResizeFunction", function="mine", memory_bytes=MEMORY)
    assert tenant.look() <= 0xFF + MIB // 4, "only what is still its own"
    return await detached(harness, daemon, made, tenant)


@pytest.mark.parametrize(
    "way", [detached, worker_killed, holder_killed, deleted, undefined, resized]
)
def test_the_next_tenant_finds_nothing(real: Harness, way: Way) -> None:
    async def scenario() -> None:
        async with real.daemon(poll_s=0.1) as daemon:
            made = await real.create("mine")
            await take(real, "one")
            first = await asyncio.to_thread(Tenant, real, made, "one")
            await asyncio.to_thread(first.write, 0xA5)
            made = await way(real, daemon, made, first)
            await take(real, "two")
            second = await asyncio.to_thread(Tenant, real, made, "two")
            try:
                assert await asyncio.to_thread(second.look) == 0
            finally:
                second.vanish()

    asyncio.run(scenario())


def test_a_pattern_is_seen_where_nothing_was_scrubbed(real: Harness) -> None:
    """The look above can fail: the tenant itself sees what it wrote."""

    async def scenario() -> None:
        async with real.daemon():
            made = await real.create("mine")
            await take(real, "one")
            tenant = await asyncio.to_thread(Tenant, real, made, "one")
            try:
                await asyncio.to_thread(tenant.write, 0xA5)
                assert tenant.transport.read32(Reg.SCRATCH) == 0xA5
                assert bytes(tenant.transport.window[-16:]) == b"\xa5" * 16
            finally:
                tenant.vanish()

    asyncio.run(scenario())
