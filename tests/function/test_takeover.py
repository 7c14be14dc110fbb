"""A worker takes over from one that died in the middle of a message, in this process."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelvisor.function import state as s
from accelvisor.function import zygote
from accelvisor.function.channel import DROP, GONE, KEEP, unpack
from accelvisor.function.state import STATE_BYTES, TRACK_BYTES
from accelvisor.function.wire import Disconnected
from accelvisor.function.worker import Inherited, Worker
from accelvisor.limits import LIMITS, MIB
from accelvisor.vfio_user.features import pack_feature, pack_logging
from accelvisor.vfio_user.protocol import (
    FLAG_ERROR,
    HEADER,
    TYPE_REPLY,
    Command,
    Feature,
    FeatureFlag,
    UnmapFlag,
)
from accelvisor.vfio_user.session import ServerSession
from accelvisor.vfio_user.wire import encode_command, encode_reply
from tests.function.harness import Path, make_spec, memfd

VERSION = struct.pack("<HH", 0, 1) + b'{"capabilities":{"max_msg_fds":8}}\0'
BASE = 0x7_0000_0000


class Died(BaseException):
    """The worker was killed here."""


class Bench:
    """A holder and a client in one: what a worker is given, and the other ends of it."""

    def __init__(self) -> None:
        self.spec = make_spec(Path("/tmp"), memory_bytes=4 * MIB)
        self.fds = [memfd("state", STATE_BYTES), memfd("window", self.spec.window_bytes),
                    memfd("memory", self.spec.memory_bytes),
                    memfd("track", TRACK_BYTES)]  # fmt: skip
        self.pipe = os.pipe()
        self.client, self.connection = socket.socketpair()
        self.client.settimeout(10)
        self.kept: dict[int, int] = {}
        self.channel: socket.socket | None = None
        self.worker = self.fresh()
        self.do(Command.VERSION, VERSION)

    def fresh(self, *, crashed: bool = True) -> Worker:
        """The next worker; the last one is left as a killed one leaves everything."""
        self.told()
        self.end()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        held = {slot: os.dup(fd) for slot, fd in self.kept.items()}
        given = Inherited(
            theirs, self.client, *self.fds, self.pipe, self.connection.dup(), 1, held, crashed
        )
        self.worker = Worker(self.spec, given, {})
        self.worker._state.u32[s.R_FREEZE] |= s.FREEZE_DETACHED
        self.worker._device.start()
        return self.worker

    def attach(self) -> None:
        """What the worker does first."""
        connection = self.worker._given.connection
        assert connection is not None
        self.worker._attach(connection, 1)

    def end(self) -> None:
        if self.channel is None:
            return
        self.worker._device.stop()
        for fd in self.worker._descriptors.fds.values():
            os.close(fd)
        given = self.worker._given
        for sock in (self.channel, given.channel, given.connection):
            assert sock is not None
            sock.close()

    def told(self) -> list[int]:
        """Do what the worker told its holder; which kinds of message that were."""
        kinds = []
        while self.channel is not None:
            try:
                data, fds, _, _ = socket.recv_fds(self.channel, 100, 1)
            except BlockingIOError:
                break
            kind, argument = unpack(data)
            kinds.append(kind)
            if kind == KEEP:
                self.kept[argument] = fds[0]
            elif kind == DROP and argument in self.kept:
                os.close(self.kept.pop(argument))
        return kinds

    def send(self, command: int, body: bytes, fds: tuple[int, ...] = ()) -> None:
        raw = encode_command(7, command, body)
        if fds:
            socket.send_fds(self.client, [raw], list(fds))
        else:
            self.client.send(raw)

    def receive(self) -> tuple[int, bytes]:
        """(errno, body) of the next reply."""
        head = self.client.recv(HEADER.size, socket.MSG_WAITALL)
        _, _, size, flags, number = HEADER.unpack(head)
        assert flags & TYPE_REPLY
        body = self.client.recv(size - HEADER.size, socket.MSG_WAITALL)
        return (number if flags & FLAG_ERROR else 0), body

    def serve(self) -> None:
        wire = self.worker._wire
        assert wire is not None
        self.worker._from_client(wire)

    def do(self, command: int, body: bytes, fds: tuple[int, ...] = ()) -> bytes:
        if self.worker._wire is None:
            self.attach()
        self.send(command, body, fds)
        self.serve()
        number, answer = self.receive()
        assert number == 0
        return answer

    def close(self) -> None:
        self.told()
        self.end()
        self.client.close()
        self.connection.close()
        for fd in (*self.fds, *self.pipe, *self.kept.values()):
            os.close(fd)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def dma_map(address: int, size: int) -> bytes:
    return struct.pack("<IIQQQ", 32, 3, 0, address, size)


def deadly(bench: Bench, patch: pytest.MonkeyPatch, what: Callable[[Any], bool]) -> None:
    """From here on a message that ``what`` says yes to kills its worker."""
    inner = ServerSession.handle

    def handle(self: ServerSession, message: Any) -> Any:
        if what(message):
            raise Died
        return inner(self, message)

    patch.setattr(ServerSession, "handle", handle)


@pytest.mark.parametrize(
    ("command", "body", "number"),
    [
        (Command.REGION_READ, struct.pack("<QII", 0, 0, 4), errno.EIO),
        (Command.DEVICE_RESET, b"", errno.EIO),
        # QEMU aborts its VM when a map fails: the commands that need it fault instead.
        (Command.DMA_MAP, dma_map(BASE, 4096), 0),
    ],
)
def test_a_message_that_kills_every_worker_is_refused_and_the_next_is_served(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, command: Command, body: bytes, number: int
) -> None:
    deadly(bench, monkeypatch, lambda message: message.command == command)
    bench.send(command, body)
    with pytest.raises(Died):
        bench.serve()
    for _ in range(LIMITS.worker_deaths - 1):
        bench.fresh()
        with pytest.raises(Died):
            bench.attach()
    bench.fresh()
    bench.attach()
    assert bench.receive()[0] == number
    monkeypatch.undo()
    assert len(bench.do(Command.DEVICE_GET_INFO, struct.pack("<IIII", 16, 0, 0, 0))) == 16


def test_a_worker_that_is_killed_from_outside_is_hardly_the_messages_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        deadly(bench, patch, lambda _: True)
        bench.send(Command.REGION_READ, struct.pack("<QII", 0, 0, 4))
        with pytest.raises(Died):
            bench.serve()
        for _ in range(LIMITS.worker_kills - 1):
            bench.fresh(crashed=False)
            with pytest.raises(Died):
                bench.attach()
    bench.fresh()
    bench.attach()
    assert bench.receive()[0] == errno.EIO


@pytest.mark.parametrize(
    ("how", "crashed"),
    [("kill -ABRT $$", True), ("kill -SEGV $$", True), ("kill -BUS $$", True), ("exit 1", True),
     ("kill -KILL $$", False), ("exit 0", False)],
)  # fmt: skip
def test_the_zygote_tells_a_crash_from_a_kill(how: str, crashed: bool) -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"ulimit -c 0; {how}"], {})
    assert zygote._crashed(pid, {}) is crashed


def test_deaths_over_one_message_do_not_count_for_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2 * LIMITS.worker_deaths):
        with monkeypatch.context() as patch:
            deadly(bench, patch, lambda _: True)
            bench.send(Command.REGION_READ, struct.pack("<QII", 0, 0, 4))
            with pytest.raises(Died):
                bench.serve()
            bench.fresh()
            with pytest.raises(Died):
                bench.attach()
        bench.fresh()
        bench.attach()
        assert bench.receive()[0] == 0


def half_a_map(bench: Bench) -> bytes:
    """Send the first 20 bytes of a DMA_MAP, and its descriptor; returns all of the message."""
    fd = memfd("half", 4096)
    raw = encode_command(7, Command.DMA_MAP, dma_map(BASE, 4096))
    socket.send_fds(bench.client, [raw[:20]], [fd])
    os.close(fd)
    bench.serve()
    return raw


def test_descriptors_of_half_a_message_outlive_the_worker(bench: Bench) -> None:
    """They were swept, and the rest of the message killed worker after worker."""
    raw = half_a_map(bench)
    bench.fresh()
    bench.attach()
    bench.client.send(raw[20:])
    bench.serve()
    assert bench.receive() == (0, b"")
    assert list(bench.worker._device.maps) == [(BASE, 4096)]


def test_a_lost_descriptor_ends_the_connection_and_not_the_worker(bench: Bench) -> None:
    raw = half_a_map(bench)
    bench.told()
    for kept in bench.kept.values():
        os.close(kept)
    bench.kept.clear()
    bench.fresh()
    bench.attach()
    bench.client.send(raw[20:])
    bench.serve()
    assert GONE in bench.told()


def test_an_unmap_done_by_half_reports_what_was_dirty(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = memfd("dirty", 16 * 4096)
    bench.do(Command.DMA_MAP, dma_map(BASE, 16 * 4096), (fd,))
    os.close(fd)
    start = pack_feature(
        FeatureFlag.SET, Feature.DMA_LOGGING_START, pack_logging(4096, ((BASE, 16 * 4096),))
    )
    bench.do(Command.DEVICE_FEATURE, start)
    bench.worker._device.migration.wrote(BASE + 3 * 4096, 10)
    body = struct.pack("<IIQQ", 48, UnmapFlag.GET_DIRTY_BITMAP, BASE, 16 * 4096)
    body += struct.pack("<QQ", 4096, 8)
    inner = bench.worker._device.dma_unmap

    def die_after(*arguments: int) -> None:
        inner(*arguments)
        raise Died

    bench.worker._device.dma_unmap = die_after  # type: ignore[method-assign]
    bench.send(Command.DMA_UNMAP, body)
    with pytest.raises(Died):
        bench.serve()
    bench.fresh()
    bench.attach()
    number, answer = bench.receive()
    assert number == 0
    assert answer[-8] & 1 << 3


def test_no_command_goes_on_before_the_predecessors_reply_is_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was let go first sent its DMA request into the middle of a reply."""
    reply = encode_reply(7, Command.DEVICE_GET_INFO, b"R" * 24)
    wire = bench.worker._wire
    assert wire is not None
    wire._start(reply, 1 << 62)
    os.write(bench.pipe[1], reply)
    bench.fresh()
    device = bench.worker._device
    order: list[str] = []
    attach, attached = device.remote.attach, device.attached
    monkeypatch.setattr(
        device.remote, "attach", lambda send: (order.append(f"attach {pending(bench)}"),
                                               attach(send))[1],
    )  # fmt: skip
    monkeypatch.setattr(
        device, "attached", lambda: (order.append(f"thaw {pending(bench)}"), attached())[1]
    )
    assert bench.worker._state.u32[s.R_FREEZE] & s.FREEZE_DETACHED
    bench.attach()
    assert order == ["attach 0", "thaw 0"]
    assert bench.receive() == (0, b"R" * 24)


def pending(bench: Bench) -> int:
    return bench.worker._wire._piped() if bench.worker._wire is not None else -1


def test_a_request_of_ours_waits_for_half_a_reply(bench: Bench) -> None:
    wire = bench.worker._wire
    assert wire is not None
    wire._start(b"R" * 40, 1 << 62)
    os.write(bench.pipe[1], b"R" * 40)
    bench.fresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(wire), "resume", lambda _: None)
        bench.attach()
    taken = bench.worker._wire
    assert taken is not None
    taken.send(b"D" * 24)
    assert bench.client.recv(100) == b"R" * 40 + b"D" * 24


def test_a_client_that_does_not_greet_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stray connection kept every other client out."""
    clock = [1000.0]
    monkeypatch.setattr("accelvisor.function.worker.time.monotonic", lambda: clock[0])
    bench = Bench()
    try:
        assert bench.worker._patience_ms() is None
        silent, theirs = socket.socketpair()
        worker = bench.worker
        worker._hang_up(Disconnected("test"))
        worker._attach(theirs, 2)
        assert worker._patience_ms() == LIMITS.vfio_reply_s * 1000
        clock[0] += LIMITS.vfio_reply_s + 1
        assert worker._patience_ms() == 0
        silent.close()
        worker._hang_up(Disconnected("test"))
        assert worker._patience_ms() is None
    finally:
        bench.close()


