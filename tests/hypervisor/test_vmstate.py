from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from accelvisor.errors import CapacityError, StateError, SystemFailure
from accelvisor.hypervisor.vmstate import Bus
from tests.hypervisor.bus_client import answer, bus_call, load, messages, owners, save
from tests.hypervisor.samples import DOMAIN

#: As the client of a process with the uid of these tests.
HANDSHAKE = f"\0AUTH EXTERNAL {str(os.getuid()).encode().hex()}\r\nBEGIN\r\n".encode()
DEADLINE_S = 20.0


class Decides:
    """A handler that returns or raises what it was made with."""

    def __init__(self, owners: Any = True, save: Any = b"token", load: Any = None) -> None:
        self._answers = {"owners": owners, "save": save, "load": load}
        self.asked: list[Any] = []
        self.cancelled = asyncio.Event()

    async def _say(self, what: str, *given: Any) -> Any:
        self.asked.append((what, *given))
        found = self._answers[what]
        if found is FOREVER:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if isinstance(found, Exception):
            raise found
        return found

    async def owners(self, domain: str) -> bool:
        return bool(await self._say("owners", domain))

    async def save(self, domain: str) -> bytes:
        return bytes(await self._say("save", domain))

    async def load(self, domain: str, token: bytes) -> None:
        await self._say("load", domain, token)


FOREVER = object()


class Qemu:
    """A client of the bus."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def ask(self, data: bytes, serial: int) -> Any:
        self.writer.write(data)
        received = b""
        while True:
            received += await self._reader.read(1 << 16)
            if any(m.header.fields.get(5) == serial for m in messages(received)):
                return answer(received, serial)

    async def ended(self) -> bool:
        return await self._reader.read() == b""


class Scene:
    """A bus and those who connect to it."""

    def __init__(self, bus: Bus, path: Path) -> None:
        self.bus = bus
        self._path = path
        self._writers: list[asyncio.StreamWriter] = []

    async def stranger(self) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_unix_connection(self._path)
        self._writers.append(writer)
        return reader

    async def connect(self) -> Qemu:
        reader = await self.stranger()
        writer = self._writers[-1]
        writer.write(HANDSHAKE)
        await reader.readline()
        return Qemu(reader, writer)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        await self.bus.close()


@asynccontextmanager
async def serving(tmp_path: Path, handler: Decides, **options: Any) -> AsyncIterator[Scene]:
    scene = Scene(Bus(tmp_path / "bus", DOMAIN, handler, **options), tmp_path / "bus")
    await scene.bus.start()
    try:
        yield scene
    finally:
        await scene.close()


def run(scene: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene

    asyncio.run(bounded())


async def until(condition: Any) -> None:
    """Within the deadline of the scene."""
    while not condition():
        await asyncio.sleep(0)


def test_a_migration_carries_the_token(tmp_path: Path) -> None:
    handler = Decides()

    async def scene() -> None:
        async with serving(tmp_path, handler) as on:
            assert not on.bus.connected
            qemu = await on.connect()
            assert await qemu.ask(bus_call("Hello"), 1) == ("", (":1.1",))
            assert on.bus.connected
            assert await qemu.ask(owners(), 7) == ("", ([":1.2"],))
            assert await qemu.ask(save(), 8) == ("", (b"token",))
            assert await qemu.ask(load(b"other"), 9) == ("", ())
            qemu.writer.close()
            await until(lambda: not on.bus.connected)

    run(scene())
    assert handler.asked == [("owners", DOMAIN), ("save", DOMAIN), ("load", DOMAIN, b"other")]
    assert not (tmp_path / "bus").exists()


@pytest.mark.parametrize("answered", [False, CapacityError("x"), ValueError("a bug"), FOREVER])
def test_whatever_goes_wrong_with_owners_nobody_is_there(tmp_path: Path, answered: Any) -> None:
    async def scene() -> None:
        async with serving(tmp_path, Decides(owners=answered), deadline_s=0.1) as on:
            qemu = await on.connect()
            assert await qemu.ask(owners(), 7) == ("", ([],))

    run(scene())


@pytest.mark.parametrize(
    ("answered", "text"),
    [
        (StateError("the signature is wrong"), "the signature is wrong"),
        (ValueError("a bug"), "ValueError: a bug"),
        (FOREVER, "no answer to load within 0.1 s"),
    ],
)
def test_a_load_that_fails_says_why(
    tmp_path: Path, answered: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with serving(tmp_path, Decides(load=answered), deadline_s=0.1) as on:
            qemu = await on.connect()
            assert await qemu.ask(load(b"x"), 9) == ("io.accelvisor.Refused", (text,))
            assert (await qemu.ask(owners(), 7))[1] == ([":1.2"],), "the bus goes on"

    with caplog.at_level(logging.WARNING):
        run(scene())
    assert text in caplog.text


@pytest.mark.parametrize("answered", [StateError("no"), bytes((1 << 20) + 1)])
def test_a_save_that_fails_is_an_error(tmp_path: Path, answered: Any) -> None:
    async def scene() -> None:
        async with serving(tmp_path, Decides(save=answered)) as on:
            qemu = await on.connect()
            assert (await qemu.ask(save(), 8))[0] == "io.accelvisor.Refused"

    run(scene())


def test_a_qemu_that_hangs_up_ends_what_it_waited_for(tmp_path: Path) -> None:
    """A killed VM that is started again must not find its bus busy until a deadline."""
    handler = Decides(load=FOREVER)

    async def scene() -> None:
        async with serving(tmp_path, handler) as on:
            qemu = await on.connect()
            qemu.writer.write(load(b"x"))
            await until(lambda: handler.asked)
            qemu.writer.close()
            await handler.cancelled.wait()
            await until(lambda: not on.bus.connected)
            again = await on.connect()
            assert (await again.ask(owners(), 7))[1] == ([":1.2"],)

    run(scene())


def test_one_client_at_a_time_and_the_first_one_stays(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path, Decides()) as on:
            first = await on.connect()
            assert await (await on.stranger()).read() == b""
            assert (await first.ask(owners(), 7))[1] == ([":1.2"],)

    run(scene())


def test_a_peer_that_is_not_trusted_gets_nothing(tmp_path: Path) -> None:
    seen: list[int] = []

    async def scene() -> None:
        def trusted(peer: Any) -> bool:
            seen.append(peer.pid)
            return False

        async with serving(tmp_path, Decides(), trusted=trusted) as on:
            assert await (await on.stranger()).read() == b""

    run(scene())
    assert seen == [os.getpid()]


def test_a_client_that_breaks_the_protocol_is_hung_up_on(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path, Decides()) as on:
            qemu = await on.connect()
            qemu.writer.write(b"x" * 64)
            assert await qemu.ended()
            await until(lambda: not on.bus.connected)

    run(scene())


def test_a_later_server_takes_the_path_and_keeps_it(tmp_path: Path) -> None:
    async def scene() -> None:
        earlier = Bus(tmp_path / "bus", DOMAIN, Decides(owners=False))
        await earlier.start()
        async with serving(tmp_path, Decides()) as on:
            await earlier.close()
            assert (await (await on.connect()).ask(owners(), 7))[1] == ([":1.2"],)
            assert (tmp_path / "bus").stat().st_mode & 0o777 == 0o660

    run(scene())


def test_a_directory_that_cannot_be_written_is_an_error_with_a_place(tmp_path: Path) -> None:
    (tmp_path / "bus").mkdir()

    async def scene() -> None:
        with pytest.raises(SystemFailure) as caught:
            await Bus(tmp_path / "bus", DOMAIN, Decides()).start()
        assert (caught.value.code, caught.value.where) == ("domain-socket", str(tmp_path / "bus"))

    run(scene())


def test_closing_twice_or_before_the_start_is_fine(tmp_path: Path) -> None:
    async def scene() -> None:
        bus = Bus(tmp_path / "bus", DOMAIN, Decides())
        await bus.close()
        await bus.start()
        await bus.close()
        await bus.close()

    run(scene())
