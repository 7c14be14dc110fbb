from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from accelvisor.errors import AccelvisorError, ConflictError
from accelvisor.hypervisor.private import EVENTS, Private
from accelvisor.hypervisor.qmp import Event
from tests.hypervisor.samples import DOMAIN

GREETING = {"QMP": {"version": {"qemu": {"major": 11, "minor": 1, "micro": 3}}, "capabilities": []}}
DEADLINE_S = 20.0


class Qemu:
    """The other end: connects, greets, and answers as it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\r\n")

    async def command(self) -> dict[str, Any]:
        return dict(json.loads(await self.reader.readline()))

    async def serve(self, answers: dict[str, Any]) -> list[str]:
        """Answer until the end; a str is an error. Returns what it was asked."""
        asked = []
        while line := await self.reader.readline():
            command = json.loads(line)
            asked.append(command["execute"])
            answer = answers.get(command["execute"], {})
            if isinstance(answer, str):
                error = {"class": "GenericError", "desc": answer}
                self.say({"error": error, "id": command["id"]})
            else:
                self.say({"return": answer, "id": command["id"]})
        return asked


class Scene:
    def __init__(self, path: Path) -> None:
        self.events: list[tuple[str, str]] = []
        self.connections = 0
        self.path = path / "monitor"
        self.private = Private(self.path, DOMAIN, self._event, on_connect=self._connected)
        self.clients: list[Qemu] = []

    def _event(self, domain: str, event: Event) -> None:
        self.events.append((domain, event.name))

    def _connected(self, domain: str) -> None:
        assert domain == DOMAIN
        self.connections += 1

    async def qemu(self, *, ready: bool = True) -> Qemu:
        qemu = Qemu(*await asyncio.open_unix_connection(self.path))
        self.clients.append(qemu)
        if ready:
            qemu.say(GREETING)
            command = await qemu.command()
            assert command["execute"] == "qmp_capabilities"
            qemu.say({"return": {}, "id": command["id"]})
            await self.private.wait_connected(DEADLINE_S)
        return qemu


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[Scene]:
    scene = Scene(path)
    await scene.private.start()
    try:
        yield scene
    finally:
        for client in scene.clients:
            client.writer.close()
        await scene.private.close()


def run(scene: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene

    asyncio.run(bounded())


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


async def refusal(call: Coroutine[Any, Any, Any]) -> AccelvisorError:
    with pytest.raises(AccelvisorError) as caught:
        await call
    return caught.value


def test_a_command_and_its_reply_with_events_between(tmp_path: Path) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            qemu = await on.qemu()
            asking = asyncio.ensure_future(on.private.execute("query-status", {"a": 1}))
            command = await qemu.command()
            assert command["arguments"] == {"a": 1}
            for name in ("STOP", "NIC_RX_FILTER_CHANGED", "MIGRATION"):
                qemu.say({"event": name, "data": {}})
            qemu.say({"return": {"status": "paused"}, "id": command["id"]})
            assert await asking == {"status": "paused"}
            assert on.events == [(DOMAIN, "STOP"), (DOMAIN, "MIGRATION")]
            assert {name for _, name in on.events} <= EVENTS

    run(scene())


def test_the_human_monitor_and_a_refusal(tmp_path: Path) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            qemu = await on.qemu()
            answering = asyncio.ensure_future(
                qemu.serve({"human-monitor-command": "port = 1\r\n", "cont": {}})
            )
            error = await refusal(on.private.human("i /w 0xcf8"))
            assert error.code == "monitor-failed"
            assert "port = 1" in error.message
            await on.private.execute("cont")
            await on.private.close()
            assert await answering == ["human-monitor-command", "cont"]

    run(scene())


def test_without_a_qemu_it_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            for call in (on.private.execute("cont"), on.private.wait_connected(0.01)):
                error = await refusal(call)
                assert (error.code, error.where) == ("monitor-unavailable", f"domain:{DOMAIN}")
            qemu = await on.qemu(ready=False)
            qemu.say(GREETING)
            await qemu.command()  # it is still to be answered
            assert (await refusal(on.private.execute("cont"))).code == "monitor-unavailable"

    run(scene())


def test_a_qemu_that_goes_ends_the_commands_that_wait_and_may_come_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            qemu = await on.qemu()
            asking = asyncio.ensure_future(on.private.execute("cont", deadline_s=DEADLINE_S))
            await qemu.command()
            qemu.writer.close()
            assert (await refusal(asking)).code == "monitor-closed"  # type: ignore[arg-type]
            assert not on.private.connected
            qemu = await on.qemu()
            asking = asyncio.ensure_future(on.private.execute("cont"))
            qemu.say({"return": {}, "id": (await qemu.command())["id"]})
            assert await asking == {}
            assert on.connections == 2

    run(scene())


def test_a_command_that_is_late_and_its_reply_that_comes_after(tmp_path: Path) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            qemu = await on.qemu()
            error = await refusal(on.private.execute("migrate", deadline_s=0.01))
            assert error.code == "monitor-deadline"
            late = await qemu.command()
            asking = asyncio.ensure_future(on.private.execute("query-status"))
            command = await qemu.command()
            qemu.say({"return": "late", "id": late["id"]})
            qemu.say({"return": "now", "id": command["id"]})
            assert await asking == "now"

    run(scene())


@pytest.mark.parametrize("noise", [b"nonsense\n", b"{}\n", b'{"QMP": 5}\n', b"[" * 70_000 + b"\n"])
def test_what_is_no_qemu_is_hung_up_on(tmp_path: Path, noise: bytes) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            stranger = await on.qemu(ready=False)
            stranger.writer.write(noise)
            assert await stranger.reader.read() == b""
            await on.qemu()

    run(scene())


def test_a_qemu_that_refuses_to_leave_negotiation_is_hung_up_on(tmp_path: Path) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            qemu = await on.qemu(ready=False)
            qemu.say(GREETING)
            await qemu.serve({"qmp_capabilities": "no"})
            assert on.connections == 0

    run(scene())


def test_one_qemu_at_a_time(tmp_path: Path) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            await on.qemu()
            second = await on.qemu(ready=False)
            assert await second.reader.read() == b""
            assert on.private.connected

    run(scene())


@pytest.mark.parametrize("there", [{}, "object 'accel-vmstate' not found"])
def test_the_bus_is_attached_again_whether_or_not_it_was(tmp_path: Path, there: Any) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            qemu = await on.qemu()
            asked = asyncio.ensure_future(qemu.serve({"object-del": there}))
            await on.private.reattach("/run/x.bus")
            await on.private.close()
            assert await asked == ["object-del", "object-add"]

    run(scene())


def test_a_bus_that_qemu_cannot_reach_is_an_error(tmp_path: Path) -> None:
    async def scene() -> None:
        async with listening(tmp_path) as on:
            qemu = await on.qemu()
            asked = asyncio.ensure_future(qemu.serve({"object-add": "failed to connect to DBus"}))
            error = await refusal(on.private.reattach("/run/x.bus"))
            assert "failed to connect" in error.message
            await on.private.close()
            await asked

    run(scene())


@pytest.mark.parametrize("state", [False, True])
def test_a_vm_that_is_to_run_before_its_memory_came_is_refused(tmp_path: Path, state: bool) -> None:
    told = [
        {"capability": "auto-converge", "state": True},
        {"capability": "postcopy-ram", "state": state},
    ]

    async def scene() -> None:
        async with listening(tmp_path) as on:
            qemu = await on.qemu()
            asked = asyncio.ensure_future(qemu.serve({"query-migrate-capabilities": told}))
            with pytest.raises(ConflictError, match="post-copy") if state else nullcontext():
                await on.private.require_precopy()
            await on.private.close()
            assert await asked == ["query-migrate-capabilities"]

    run(scene())
