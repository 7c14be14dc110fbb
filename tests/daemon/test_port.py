"""Host ports of function processes are balanced by weight, and nobody is woken for it."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType
from accelvisor.daemon.moving.orders import ask
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.port import Member, Port, Shares, Watched
from accelvisor.errors import ProtocolError
from accelvisor.function import state as s
from accelvisor.limits import KIB, LIMITS, MIB
from tests.descriptors import open_fds
from tests.function.harness import Guest, Process, call, memfd, running

CARD = "card0"
LIMIT = 8 * MIB
DEADLINE_S = 30.0


def paths(run: Path) -> Paths:
    return Paths(run, run / "state", run / "none.toml")


@contextmanager
def function(run: Path) -> Iterator[Process]:
    """A function process where the daemon of ``run`` looks for it."""
    uuid = str(uuid4())
    found = paths(run).function(uuid)
    found.directory.mkdir(parents=True)
    with running(
        uuid=uuid, holder_socket=str(found.holder_socket), control_socket=str(found.control_socket)
    ) as process:
        yield process


class Copying:
    """A guest that copies as fast as it may until it is stopped."""

    def __init__(self, process: Process) -> None:
        self._going = True
        self._process = process
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with Guest(self._process) as guest:
            ring, each, flying = guest.ring(), 64 * KIB, 0
            ring.open()
            tensor = ring.ok(abi.tensor_create, DType.UINT8, (each,))
            buffer = guest.buffer(bytes(each))
            while self._going or flying:
                while self._going and flying < 8:
                    ring.post(abi.copy_in(ring.next_cookie(), tensor, 0, buffer.whole(each)))
                    flying += 1
                ring.submit()
                while ring.ready():
                    assert ring.take().status == 0
                    flying -= 1
                time.sleep(0.002)

    def stop(self) -> None:
        self._going = False
        self._thread.join(DEADLINE_S)


def passed(process: Process) -> int:
    return int(process.control("statistics")["port_bytes"])


def rate(process: Process, seconds: float = 1.5) -> float:
    """Bytes a second that pass now."""
    before, began = passed(process), time.monotonic()
    time.sleep(seconds)
    return (passed(process) - before) / (time.monotonic() - began)


@contextmanager
def balanced(run: Path, shares: Shares) -> Iterator[Callable[[Shares], None]]:
    """A balancer on a loop of its own; what it returns changes who shares what."""
    loop, now = asyncio.new_event_loop(), [shares]
    port = Port(paths(run), lambda: now[0])
    thread = threading.Thread(target=loop.run_until_complete, args=(port.run(),))

    def change(to: Shares) -> None:
        now[0] = to
        loop.call_soon_threadsafe(port.changed)

    thread.start()
    try:
        yield change
    finally:
        loop.call_soon_threadsafe(port.stop)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.02)


def told(process: Process) -> bool:
    """Whether a rate has reached the function."""
    given = ask(Path(process.spec.holder_socket), "lend", None, [], 4, DEADLINE_S)
    try:
        [rate] = struct.unpack("<Q", os.pread(given.fds[0], 8, s.W_PORT_RATE * 8))
    finally:
        given.close()
    return bool(rate)


def test_two_that_copy_at_full_speed_get_bytes_by_weight(short_path: Path) -> None:
    with ExitStack() as stack:
        one, three = (stack.enter_context(function(short_path)) for _ in range(2))
        gone = str(uuid4())  # a function whose process does not answer hinders nobody
        members = {
            one.spec.uuid: Member(CARD, 100),
            three.spec.uuid: Member(CARD, 300),
            gone: Member(CARD, 1000),
        }
        stack.enter_context(balanced(short_path, Shares(members, {CARD: LIMIT})))
        until(lambda: told(one) and told(three), "rates")
        first, second = Copying(one), Copying(three)
        stack.callback(first.stop)
        stack.callback(second.stop)
        until(lambda: passed(one) > MIB and passed(three) > 3 * MIB, "both to copy")
        before, began = (passed(one), passed(three)), time.monotonic()
        time.sleep(2.5)
        took = passed(one) - before[0], passed(three) - before[1]
        seconds = time.monotonic() - began
        assert 3 * 0.85 < took[1] / took[0] < 3 / 0.85
        assert 0.8 * LIMIT < sum(took) / seconds < 1.1 * LIMIT
        second.stop()
        time.sleep(0.8)
        assert rate(one) > 0.8 * LIMIT  # all but what the other keeps to begin with


def test_one_alone_gets_all_and_a_card_without_a_limit_lets_go(short_path: Path) -> None:
    with function(short_path) as process, ExitStack() as stack:
        members = {process.spec.uuid: Member(CARD, 1)}
        change = stack.enter_context(balanced(short_path, Shares(members, {CARD: LIMIT})))
        until(lambda: told(process), "a rate")
        copying = Copying(process)
        stack.callback(copying.stop)
        until(lambda: passed(process) > MIB, "it to copy")
        assert 0.8 * LIMIT < rate(process) < 1.1 * LIMIT
        change(Shares(members, {CARD: 0}))
        until(lambda: rate(process, 0.3) > 2 * LIMIT, "the limit to be gone")


def test_a_rate_that_an_earlier_daemon_left_goes_where_there_is_no_limit(short_path: Path) -> None:
    with function(short_path) as process:
        call(process.spec.control_socket, "port", {"rate": MIB})
        with (
            balanced(short_path, Shares({process.spec.uuid: Member(CARD, 1)}, {})),
            Guest(process) as guest,
        ):
            ring = guest.ring()
            ring.open()
            until(lambda: took(guest, ring) < 0.5, "the rate to be taken away")


def took(guest: Guest, ring: object) -> float:
    """Seconds for a copy of 2 MiB."""
    began = time.monotonic()
    handle = ring.ok(abi.tensor_create, DType.UINT8, (2 * MIB,))  # type: ignore[attr-defined]
    buffer = guest.buffer(bytes(2 * MIB))
    ring.ok(abi.copy_in, handle, 0, buffer.whole(2 * MIB))  # type: ignore[attr-defined]
    buffer.release()
    ring.ok(abi.tensor_destroy, handle)  # type: ignore[attr-defined]
    return time.monotonic() - began


def test_functions_that_rest_are_not_woken(short_path: Path) -> None:
    def switches(process: Process) -> int:
        pid = process.holder("status")["worker_pid"]
        tasks = Path(f"/proc/{pid}/task").iterdir()
        lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    with function(short_path) as process:
        shares = Shares({process.spec.uuid: Member(CARD, 1)}, {CARD: LIMIT})
        with balanced(short_path, shares):
            time.sleep(1.0)
            before = switches(process)
            time.sleep(1.5)
            assert switches(process) == before


def test_without_a_limit_there_is_no_timer(short_path: Path) -> None:
    looks = 0

    def look() -> Shares:
        nonlocal looks
        looks += 1
        return Shares({}, {CARD: 0})

    async def body() -> None:
        port = Port(paths(short_path), look)
        task = asyncio.create_task(port.run())
        await asyncio.sleep(0.5)
        assert looks == 1
        port.stop()
        async with asyncio.timeout(1):
            await task

    asyncio.run(body())


def test_a_bug_in_one_round_does_not_end_the_loop(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("accelvisor.daemon.port._RETRY_S", 0.01)
    looks = 0

    def look() -> Shares:
        nonlocal looks
        looks += 1
        raise ValueError("broken")

    async def body() -> None:
        port = Port(paths(short_path), look)
        task = asyncio.create_task(port.run())
        while looks < 3:
            await asyncio.sleep(0.01)
        port.stop()
        await task

    asyncio.run(body())
    assert "balancing host ports" in caplog.text


def test_what_is_no_state_is_not_read(short_path: Path) -> None:
    """The reply comes from a process that a guest may have taken over."""
    before = open_fds()
    watched = Watched(paths(short_path).function(str(uuid4())))
    for fd in (
        os.open(short_path, os.O_RDONLY),
        os.open("/dev/zero", os.O_RDONLY),
        memfd("short", 4096),
        memfd("unsealed", LIMITS.memory_bytes, sealed=False),
    ):
        with pytest.raises(ProtocolError):
            watched.adopt(fd, 0.0)
    assert watched.look() is None
    assert open_fds() == before
