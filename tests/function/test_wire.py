"""The connection survives a worker that dies between any two steps.

A death is simulated where it hurts: a call that the wire makes (a store, a system call) is made to
raise just before or just after it took effect, and another Wire goes on over the same state, socket
and pipe. Whatever the point, the client must see exactly one reply with the right bytes.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelvisor.errors import ProtocolError
from accelvisor.function import wire as module
from accelvisor.function.state import STATE_BYTES, State
from accelvisor.function.wire import Disconnected, Wire
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.wire import encode_command, encode_reply
from tests.descriptors import open_fds
from tests.function.harness import memfd, wait_for


class Died(BaseException):
    """The worker was killed here."""


class Bench:
    """A client's socket, and wires one after the other at the other end."""

    def __init__(self) -> None:
        self.state = State(memfd("state", STATE_BYTES))
        self.client, self.server = socket.socketpair()
        self.pipe = os.pipe()
        self.kept: dict[int, int] = {}
        self.wire = self.fresh()

    def fresh(self) -> Wire:
        return Wire(self.state, self.server, self.pipe, self._keep, self.kept.__getitem__)

    def _keep(self, fd: int) -> int:
        slot = len(self.kept)
        self.kept[slot] = fd
        return slot

    def close(self) -> None:
        self.client.close()
        self.server.close()
        for fd in (*self.pipe, *self.kept.values()):
            os.close(fd)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def receive(wire: Wire) -> bytes:
    return wait_for(wire.receive, "a message")


def test_a_message_and_its_reply(bench: Bench) -> None:
    bench.client.send(encode_command(7, 9, b"body"))
    assert receive(bench.wire) == encode_command(7, 9, b"body")
    bench.wire.answer(encode_reply(7, 9, b"answer"))
    assert bench.client.recv(100) == encode_reply(7, 9, b"answer")
    assert bench.wire.receive() is None


@pytest.mark.parametrize("step", [1, 3, 15, 17])
def test_messages_in_any_cut(bench: Bench, step: int) -> None:
    messages = [encode_command(n, 9, bytes([n]) * (n * 7)) for n in range(5)]
    stream = b"".join(messages)
    got = []
    for at in range(0, len(stream), step):
        bench.client.send(stream[at : at + step])
        while (message := bench.wire.receive()) is not None:
            got.append(message)
            bench.wire.answer(None)
    assert got == messages


def test_pipelined_descriptors_stay_with_their_message(bench: Bench) -> None:
    files = [memfd(f"f{n}", 4096) for n in range(2)]
    plain = encode_command(1, 9, b"first")
    bench.client.send(plain)
    for n, fd in enumerate(files):
        socket.send_fds(bench.client, [encode_command(2 + n, 2, b"x" * 32)], [fd])
    assert receive(bench.wire) == plain
    assert bench.wire.slots() == []
    bench.wire.answer(None)
    for n in range(2):
        receive(bench.wire)
        (slot,) = bench.wire.slots()
        assert os.fstat(bench.kept[slot]).st_ino == os.fstat(files[n]).st_ino
        bench.wire.answer(None)
    for fd in files:
        os.close(fd)


def test_a_message_before_one_with_a_descriptor_does_not_get_it(bench: Bench) -> None:
    """Linux shows a peek the descriptors of whatever message in the queue has some."""
    fd = memfd("file", 4096)
    bench.client.send(encode_command(1, 3, b"x" * 24))
    bench.client.send(encode_command(2, 9, b"x" * 5000))
    socket.send_fds(bench.client, [encode_command(3, 2, b"x" * 32)], [fd])
    counts = []
    for _ in range(3):
        receive(bench.wire)
        counts.append(len(bench.wire.slots()))
        bench.wire.answer(None)
    assert counts == [0, 0, 1]
    os.close(fd)


def test_a_message_of_the_largest_size_and_as_large_a_reply(bench: Bench) -> None:
    import threading

    body = os.urandom(LIMITS.vfio_transfer_bytes)
    message = encode_command(1, 10, body)
    sender = threading.Thread(target=bench.client.sendall, args=(message,))
    sender.start()
    assert receive(bench.wire) == message
    sender.join()
    reply = encode_reply(1, 9, body)
    sender = threading.Thread(target=bench.wire.answer, args=(reply,))
    sender.start()
    got = b""
    while len(got) < len(reply):
        got += bench.client.recv(1 << 20)
    sender.join()
    assert got == reply


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<HHIII", 1, 9, 15, 0, 0),
        struct.pack("<HHIII", 1, 9, 0xFFFFFFFF, 0, 0),
        struct.pack("<HHIII", 1, 9, 16, 0xFF, 0),
    ],
)
def test_bytes_that_cannot_be_followed_end_the_connection(bench: Bench, head: bytes) -> None:
    before = open_fds()
    fd = os.eventfd(0)
    socket.send_fds(bench.client, [head], [fd])
    os.close(fd)
    with pytest.raises(ProtocolError):
        receive(bench.wire)
    assert open_fds() <= before


def test_too_many_descriptors_end_the_connection_and_leak_none(bench: Bench) -> None:
    before = open_fds()
    fds = [os.eventfd(0) for _ in range(LIMITS.vfio_message_fds + 8)]
    socket.send_fds(bench.client, [encode_command(1, 2, b"x" * 32)], fds)
    for fd in fds:
        os.close(fd)
    with pytest.raises(ProtocolError):
        receive(bench.wire)
    assert open_fds() <= before


def test_the_end_of_the_stream_is_told(bench: Bench) -> None:
    bench.client.send(b"half a hea")
    assert bench.wire.receive() is None
    bench.client.shutdown(socket.SHUT_WR)
    with pytest.raises(Disconnected):
        wait_for(bench.wire.receive, "the end")


# --- death at every step ------------------------------------------------------------------------


class Reaper:
    """Counts effects and raises Died at one of them, before or after it happened."""

    def __init__(self, at: int, after: bool) -> None:
        self.at = at
        self.after = after
        self.seen = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            self.seen += 1
            if self.seen == self.at and not self.after:
                raise Died
            value = call(*arguments)
            if self.seen == self.at:
                raise Died
            return value

        return wrapped


class _Words:
    """A view of words whose stores are counted."""

    def __init__(self, words: memoryview, reaper: Reaper) -> None:
        self._words = words
        self._store = reaper.around(words.__setitem__)

    def __getitem__(self, index: Any) -> Any:
        return self._words[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._store(index, value)


class _Socket:
    """The server's socket whose consuming reads are counted."""

    def __init__(self, inner: socket.socket, reaper: Reaper) -> None:
        self._inner = inner
        self.recv_into = reaper.around(inner.recv_into)
        self.recvmsg_into = reaper.around(inner.recvmsg_into)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def mortal(bench: Bench, reaper: Reaper, patch: pytest.MonkeyPatch) -> Wire:
    """A wire that dies at the reaper's step."""
    wire = bench.fresh()
    patch.setattr(wire, "_u64", _Words(wire._u64, reaper))
    patch.setattr(wire, "_u32", _Words(wire._u32, reaper))
    patch.setattr(wire, "_socket", _Socket(bench.server, reaper))
    patch.setattr(wire, "_keep", reaper.around(wire._keep))
    patch.setattr(module.os, "write", reaper.around(os.write))
    patch.setattr(module.os, "splice", reaper.around(os.splice))
    return wire


def serve(wire: Wire, message: bytes | None) -> bool:
    """Handle one message as a worker does; False when there is none."""
    if message is None:
        message = wire.receive()
    if message is None:
        return False
    wire.answer(encode_reply(message[0] | message[1] << 8, 9, message[16:] * 3))
    return True


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("body", [b"", b"small", b"large" * 3000], ids=["empty", "small", "large"])
@pytest.mark.parametrize("with_fd", [False, True])
def test_death_at_any_step_costs_no_message_and_doubles_none(
    body: bytes, with_fd: bool, after: bool
) -> None:
    at = 0
    while True:
        at += 1
        bench = Bench()
        bench.client.settimeout(10)
        reaper = Reaper(at, after)
        fd = memfd("file", 4096)
        first, second = encode_command(11, 9, body), encode_command(12, 9, b"next")
        socket.send_fds(bench.client, [first], [fd] if with_fd else [])
        bench.client.send(second)
        died = False
        with pytest.MonkeyPatch.context() as patch:
            wire = mortal(bench, reaper, patch)
            try:
                while serve(wire, None):
                    pass
            except Died:
                died = True
        if died:
            wire = bench.fresh()
            if (message := wire.resume()) is not None:
                serve(wire, message)
            while serve(wire, None):
                pass
        expected = encode_reply(11, 9, body * 3) + encode_reply(12, 9, b"next" * 3)
        got = b""
        while len(got) < len(expected):
            got += bench.client.recv(65536)
        assert got == expected, f"step {at}"
        bench.client.setblocking(False)
        with pytest.raises(BlockingIOError):
            bench.client.recv(1)
        os.close(fd)
        bench.close()
        if not died:
            assert at > 8
            return


def test_death_while_taking_over_is_survived_too() -> None:
    """The successor of the successor goes on as well."""
    body = b"x" * 40_000
    for first in range(1, 30):
        for second in range(1, 8):
            bench = Bench()
            bench.client.settimeout(10)
            bench.client.send(encode_command(5, 9, body))
            for at in (first, second):
                with pytest.MonkeyPatch.context() as patch:
                    wire = mortal(bench, Reaper(at, True), patch)
                    try:
                        message = wire.resume()
                        while serve(wire, message):
                            message = None
                    except Died:
                        pass
            wire = bench.fresh()
            message = wire.resume()
            while serve(wire, message):
                message = None
            expected = encode_reply(5, 9, body * 3)
            got = b""
            while len(got) < len(expected):
                got += bench.client.recv(65536)
            assert got == expected, (first, second)
            bench.close()


def test_discarding_empties_records_and_pipe(bench: Bench) -> None:
    os.write(bench.pipe[1], b"left over")
    bench.client.send(encode_command(1, 9, b"")[:10])
    assert bench.wire.receive() is None
    bench.wire.discard()
    assert bench.wire.resume() is None
    flags = fcntl.fcntl(bench.pipe[0], fcntl.F_GETFL)
    fcntl.fcntl(bench.pipe[0], fcntl.F_SETFL, flags | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        os.read(bench.pipe[0], 1)
