"""The holder keeps answering, whatever its worker, its zygote or its client do not do."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelvisor.abi.registers import MAGIC, Reg
from accelvisor.function import channel as ch
from accelvisor.function import state as s
from accelvisor.function.giveup import Answerer
from accelvisor.function.holder import Holder
from accelvisor.function.loop import Loop
from accelvisor.function.state import FD_SLOTS, STATE_BYTES, State
from accelvisor.function.watchdog import LOOK_S, Watchdog
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.protocol import HEADER, Command
from accelvisor.vfio_user.wire import encode_command, encode_reply
from tests.function.harness import DEADLINE_S, Guest, Process, make_spec, memfd, wait_for

READ = encode_command(7, Command.REGION_READ, struct.pack("<QII", 0, 0, 4))


def until_it_would_block(call: Callable[[], object]) -> None:
    """Repeat ``call`` until there is no room, or nothing left."""
    try:
        while True:
            call()
    except BlockingIOError:
        return


# --- a worker that hangs --------------------------------------------------------------------------


def test_a_worker_that_hangs_is_replaced_before_the_client_gives_up(
    fresh: Process, tenant: Guest
) -> None:
    """A stopped process stands for one that waits for ever."""
    pid = wait_for(lambda: fresh.holder("status")["worker_pid"], "a worker")
    os.kill(pid, signal.SIGSTOP)
    # Past the deadline of QEMU this would raise.
    assert tenant.read32(Reg.MAGIC) == MAGIC
    assert fresh.holder("status")["worker_restarts"] == 1


def test_an_idle_function_wakes_its_holder_never(fresh: Process, tenant: Guest) -> None:
    assert tenant.read32(Reg.MAGIC) == MAGIC
    status = Path(f"/proc/{fresh.process.pid}/status")

    def wakes() -> str:
        lines = status.read_text().splitlines()
        return next(line for line in lines if line.startswith("voluntary_ctxt_switches"))

    seen, since = wakes(), time.monotonic()

    def quiet() -> bool:
        nonlocal seen, since
        if wakes() != seen:
            seen, since = wakes(), time.monotonic()
        return time.monotonic() - since > 4 * LOOK_S

    wait_for(quiet, "a holder that sleeps", 12 * LOOK_S)


class Dog:
    """A watchdog, a connection and the records of a worker that does what the test says."""

    def __init__(self) -> None:
        self.fd = memfd("state", STATE_BYTES)
        self.state = State(self.fd)
        self.state.u32[s.N_SEEN] = 1
        self.dog = Watchdog(self.fd)
        self.client, self.connection = socket.socketpair()

    def take(self, raw: bytes, have: int | None = None) -> None:
        self.state.u8[s.RX_DATA_AT : s.RX_DATA_AT + len(raw)] = raw
        self.state.u64[s.RX_AT // 8] = len(raw) if have is None else have

    def bites(self, worker: int = 0) -> float | None:
        """Seconds until the worker is taken for stuck; None when it may go on for ever."""
        for now in range(40):
            if self.dog.look(self.connection, 1, worker, now / 2):
                return now / 2
        return None

    def close(self) -> None:
        self.client.close()
        self.connection.close()
        os.close(self.fd)


@pytest.fixture
def dog() -> Iterator[Dog]:
    made = Dog()
    yield made
    made.close()


def test_a_quick_request_may_take_half_of_what_a_client_waits(dog: Dog) -> None:
    dog.take(READ)
    assert dog.bites() == LIMITS.vfio_reply_s / 2 + LOOK_S


@pytest.mark.parametrize("command", [Command.DEVICE_RESET, Command.REGION_WRITE,
                                     Command.DEVICE_FEATURE])  # fmt: skip
def test_a_request_that_waits_for_the_engine_may_take_longer(dog: Dog, command: Command) -> None:
    dog.take(encode_command(7, command, bytes(20)))
    bite = dog.bites()
    assert bite is not None
    assert LIMITS.vfio_reply_s < bite < 2 * LIMITS.vfio_reply_s


def test_a_message_that_nobody_takes_is_noticed(dog: Dog) -> None:
    dog.client.send(READ)
    assert dog.bites() is not None


def test_the_end_of_a_connection_may_take_longer(dog: Dog) -> None:
    dog.client.shutdown(socket.SHUT_RDWR)
    bite = dog.bites()
    assert bite is not None
    assert bite > LIMITS.vfio_reply_s


def test_a_client_that_wipes_the_last_ones_memory_may_take_longest(dog: Dog) -> None:
    dog.client.send(READ)
    dog.state.u32[s.N_SEEN] = 0
    bite = dog.bites()
    assert bite is not None
    assert bite > 2 * LIMITS.vfio_reply_s


def test_a_client_that_waits_is_nobodys_fault(dog: Dog) -> None:
    assert dog.dog.look(dog.connection, 1, 0, 0.0) is None
    dog.take(READ, have=len(READ) - 1)  # the rest of its message has not come
    assert dog.bites() is None
    dog.take(READ)
    dog.state.u64[s.TX_AT // 8] = 100  # it does not take what it is sent
    dog.connection.setblocking(False)
    until_it_would_block(lambda: dog.connection.send(bytes(4096)))
    assert dog.bites() is None


def test_a_worker_that_stops_after_the_last_byte_of_a_reply_is_noticed(dog: Dog) -> None:
    dog.take(READ)
    dog.state.u64[s.TX_AT // 8] = 100
    assert dog.bites() is not None


def test_progress_is_seen(dog: Dog) -> None:
    dog.take(READ)
    for now in range(100):
        dog.state.u64[s.K["requests"]] += 1
        assert dog.dog.look(dog.connection, 1, 0, float(now)) is False
    dog.state.u64[s.RX_AT // 8] = 0
    assert dog.dog.look(dog.connection, 1, 0, 200.0) is None


# --- after giving up ------------------------------------------------------------------------------


def test_a_client_that_does_not_read_keeps_no_one_from_the_holder(
    fresh: Process, tenant: Guest
) -> None:
    fresh.holder("give-up")
    sock = socket.socket(fileno=os.dup(tenant.client.fileno()))
    with sock:
        sock.setblocking(False)
        request = encode_command(9, Command.REGION_READ, struct.pack("<QII", 0, 0, 10**6))
        until_it_would_block(lambda: sock.send(request))
    assert fresh.holder("status")["gave_up"]
    fresh.process.terminate()
    assert fresh.process.wait(DEADLINE_S) == 0


def test_what_the_last_worker_had_not_sent_is_sent_without_waiting() -> None:
    state_fd = memfd("state", STATE_BYTES)
    pipe = os.pipe()
    client, server = socket.socketpair()
    client.settimeout(10)
    state = State(state_fd)
    left = encode_reply(3, Command.REGION_READ, b"x" * 500_000)
    state.u8[s.TX_DATA_AT : s.TX_DATA_AT + len(left)] = left
    state.u64[s.TX_AT // 8 + 1] = 1000 | 2000 << 32
    state.u64[s.TX_AT // 8] = len(left) | 1 << 62
    os.write(pipe[1], left[2500:3000])  # of the chunk, 1500 bytes had reached the socket
    client.send(READ)
    answerer = Answerer(state_fd, server, pipe)
    assert answerer.resume()
    expected = left[2500:] + HEADER.pack(7, Command.REGION_READ, 36, 1, 0) + READ[16:] + b"\xff" * 4
    got = b""
    while len(got) < len(expected):
        got += client.recv(1 << 20)
        assert answerer.answer()
    assert got == expected
    client.close()
    while answerer.answer():
        pass
    server.close()
    for fd in (state_fd, *pipe):
        os.close(fd)


def test_a_new_client_gets_a_new_beginning_after_workers_died_too_often(fresh: Process) -> None:
    with Guest(fresh) as guest:
        guest.write32(Reg.SCRATCH, 77)
        guest.window[fresh.spec.layout.staging] = 9
        while not fresh.holder("status")["gave_up"]:
            pid = fresh.holder("status")["worker_pid"]
            if pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        assert guest.read32(Reg.MAGIC) == 0xFFFF_FFFF
    with Guest(fresh) as guest:
        assert guest.read32(Reg.MAGIC) == MAGIC
        assert guest.read32(Reg.SCRATCH) == 0
        assert guest.window[fresh.spec.layout.staging] == 0
        assert guest.ring().open() == 0
    status = fresh.holder("status")
    assert (status["ready"], status["gave_up"]) == (True, "")


# --- what the holder asks of others ---------------------------------------------------------------


class Asked:
    """A holder whose zygote is the test."""

    def __init__(self) -> None:
        self.holder = Holder(make_spec(Path("/tmp")))
        self.zygote, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        holder = self.holder
        holder._make_memory()
        holder._pipe = os.pipe()
        holder._control = self.control
        holder._adopt_zygote(ours, 0)
        holder._warm = True
        self.links: list[socket.socket] = []

    def worker(self) -> socket.socket:
        """The channel of the worker that was asked for."""
        data, fds, _, _ = socket.recv_fds(self.zygote, 65536, 253)
        assert ch.unpack(data[: ch.MESSAGE_BYTES])[0] == ch.FORK
        for fd in fds[1:]:
            os.close(fd)
        link = socket.socket(fileno=fds[0])
        self.links.append(link)
        return link

    def close(self) -> None:
        for sock in (self.holder._zygote, self.holder._worker, *self.links):
            if sock is not None:
                sock.close()
        self.zygote.close()
        self.control.close()
        self.holder._files.close()
        for fd in (*self.holder._pipe, *self.holder._kept.values()):
            os.close(fd)


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.close()


def test_a_worker_that_could_not_be_asked_for_is_asked_for_again(asked: Asked) -> None:
    """Any error was taken for a dead zygote: there was no worker ever after."""
    holder = asked.holder
    assert holder._zygote is not None
    link = holder._zygote
    until_it_would_block(lambda: link.send(b"x"))
    holder._start_worker()
    assert holder._worker is None
    until_it_would_block(lambda: asked.zygote.recv(10, socket.MSG_DONTWAIT))
    holder._loop.later(holder._loop.stop, 2 * LOOK_S)
    holder._loop.run()
    assert holder._worker is not None
    asked.worker()


def test_a_worker_that_never_said_who_it_is_ends_by_itself(asked: Asked) -> None:
    """It might else answer the client beside the holder."""
    asked.holder._start_worker()
    worker = asked.worker()
    asked.holder._give_up("test")
    with pytest.raises(BrokenPipeError):
        worker.send(ch.pack(ch.HERE, 1))


def test_a_worker_that_has_just_said_who_it_is_is_gone_before_the_holder_answers(
    asked: Asked,
) -> None:
    asked.holder._start_worker()
    worker = asked.worker()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        worker.send(ch.pack(ch.HERE, process.pid))
        asked.holder._give_up("test")
        assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_worker_cannot_make_the_holder_keep_more_than_there_are_slots(asked: Asked) -> None:
    asked.holder._start_worker()
    worker = asked.worker()
    for slot in (0, FD_SLOTS - 1, FD_SLOTS, 1 << 31):
        socket.send_fds(worker, [ch.pack(ch.KEEP, slot)], [worker.fileno()])
        asked.holder._from_worker()
    assert set(asked.holder._kept) == {0, FD_SLOTS - 1}


def test_a_timer_runs_once_and_another_wish_replaces_it() -> None:
    clock = [0.0]
    loop = Loop(lambda: clock[0])
    calls: list[str] = []

    def call() -> None:
        calls.append("call")

    def end() -> None:
        loop.stop()

    loop.later(call, 5)
    loop.later(call, 0)
    loop.later(end, 0)
    loop.run()
    assert calls == ["call"]
    assert loop._wait_ms() is None


