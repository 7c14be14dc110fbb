"""holder.sock and control.sock, and what a function does while it is asked."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.abi.registers import MAGIC, QueueReg, QueueStatus, Reg
from accelvisor.daemon.function_link import FunctionFailure
from accelvisor.daemon.moving.orders import ask
from accelvisor.errors import DeadlineError
from tests.function.harness import (
    DEADLINE_S,
    Guest,
    Process,
    operation,
    sgd,
    wait_for,
)

F32 = DType.FLOAT32


# --- holder.sock and control.sock -----------------------------------------------------------------


@pytest.mark.parametrize("which", ["holder_socket", "control_socket"])
@pytest.mark.parametrize(
    "raw",
    [b"{}\0", b"[]\0", b"\xff\xfe\0", b'{"method": "no-such"}\0', b'{"method": 7}\0', b"\0",
     b"[" * 50_000 + b"\0", b'{"method": "status", "parameters": {"a": 1}}\0'],
    ids=["empty", "list", "bytes", "unknown", "number", "nothing", "deep", "parameters"],
)  # fmt: skip
def test_bad_requests_get_typed_errors(process: Process, which: str, raw: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(getattr(process.spec, which))
        sock.sendall(raw)
        answer = b""
        while not answer.endswith(b"\0"):
            answer += sock.recv(65536)
    reply = json.loads(answer[:-1])
    if which == "control_socket" or b"parameters" not in raw:
        assert set(reply["error"]) == {"code", "message", "where", "hint"}
    assert process.holder("status")["ready"]


def test_a_client_that_sends_without_end_is_dropped(process: Process) -> None:
    for path in (process.spec.holder_socket, process.spec.control_socket):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(path)
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                sock.sendall(b"x" * (64 << 20))
    assert process.holder("status")["ready"]


def test_freeze_stops_commands_and_thaw_lets_them_go_on(fresh: Process, tenant: Guest) -> None:
    ring = tenant.ring()
    ring.open()
    n = 100_000
    w, g = ring.tensor(np.ones(n, np.float32)), ring.tensor(np.zeros(n, np.float32))
    program = ring.load(sgd(n))
    buffer = tenant.buffer(abi.BINDING.pack(w, 0) + abi.BINDING.pack(g, 0))
    ring.post(abi.launch(1, program, 2, buffer.whole(32), repeat=3000))
    ring.post(abi.nop(2))
    ring.submit()
    frozen = fresh.control("freeze")
    assert tenant.read32(Reg.STATUS) & 4
    assert fresh.control("status")["frozen_by"] == ["control"]
    tiles = fresh.control("statistics")["tiles"]
    assert fresh.control("freeze")["digest"] == frozen["digest"]
    fresh.kill_worker()
    wait_for(lambda: fresh.holder("status")["worker_pid"], "a new worker")
    assert fresh.control("status")["frozen"]
    assert fresh.control("statistics")["tiles"] == tiles
    assert not ring.ready()
    fresh.control("thaw")
    tenant.wait(lambda: ring.ready() == 2)
    assert [ring.take().status for _ in range(2)] == [0, 0]


def test_reset_from_the_control_socket(process: Process, guest: Guest) -> None:
    ring = guest.ring()
    ring.open()
    before = guest.read32(Reg.RESET_COUNT)
    assert process.control("reset")["resets"] == before + 1
    assert guest.read32(Reg.RESET_COUNT) == before + 1
    assert ring.register(QueueReg.STATUS) == QueueStatus.DISABLED


def test_register_reads_are_answered_while_a_program_computes(guest: Guest) -> None:
    ring = guest.ring()
    ring.open()
    n = 512
    slots = (Slot(F32, (n, n), Role.INPUT), Slot(F32, (n, n), Role.OUTPUT))
    program = ring.load(Program(slots, (operation("matmul", 0, 0, 1),)))
    a = ring.tensor(np.ones((n, n), np.float32))
    out = ring.tensor(np.zeros((n, n), np.float32))
    buffer = guest.buffer(abi.BINDING.pack(a, 0) + abi.BINDING.pack(out, 0))
    ring.post(abi.launch(1, program, 2, buffer.whole(32), repeat=1 << 20))
    ring.submit()
    # How soon each is, the benchmarks tell; here, that none waits for the program, which has
    # hours to go.
    for _ in range(2000):
        guest.read32(Reg.STATUS)
    assert not ring.ready()
    ring.set(0, QueueStatus.DISABLED)


def test_a_long_program_does_not_starve_another_queue(guest: Guest) -> None:
    long, short = guest.ring(0), guest.ring(1)
    long.open()
    short.open()
    n = 200_000
    w, g = long.tensor(np.ones(n, np.float32)), long.tensor(np.zeros(n, np.float32))
    buffer = guest.buffer(abi.BINDING.pack(w, 0) + abi.BINDING.pack(g, 0))
    long.post(abi.launch(1, long.load(sgd(n)), 2, buffer.whole(32), repeat=1 << 30))
    long.submit()
    for _ in range(20):
        short.ok(abi.nop)
        handle = short.tensor(np.ones(100, np.float32))
        short.ok(abi.tensor_destroy, handle)
    assert not long.ready()
    long.set(0, QueueStatus.DISABLED)
    assert short.ok(abi.nop) == 0


def test_the_holder_refuses_to_kill_a_worker_that_is_not_there(fresh: Process) -> None:
    fresh.holder("give-up")
    with pytest.raises(AssertionError, match="no-worker"):
        fresh.holder("kill-worker")


def test_a_message_cut_in_the_middle_does_not_block_the_control_socket(process: Process) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(process.spec.vfio_socket)
        sock.sendall(b"\1\0\1\0")
        assert process.control("status")["ready"]
    with Guest(process) as guest:
        assert guest.read32(Reg.MAGIC) == MAGIC


def test_garbage_ends_its_connection_alone(fresh: Process) -> None:
    for raw in (b"\xff" * 64, bytes(64), b"GET / HTTP/1.0\r\n\r\n" * 4):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(fresh.spec.vfio_socket)
            sock.sendall(raw)
            try:
                while sock.recv(4096):
                    pass
            except (ConnectionResetError, DeadlineError):
                pass
    with Guest(fresh) as guest:
        assert guest.read32(Reg.MAGIC) == MAGIC
    assert fresh.holder("status")["worker_restarts"] == 0


@pytest.mark.parametrize("percent", [0, 101, -1, "50", None, 2.5])
def test_what_is_no_share_of_the_time_is_refused(process: Process, percent: object) -> None:
    path = Path(process.spec.control_socket)
    assert ask(path, "throttle", {"percent": 50}, (), 0, DEADLINE_S) == {"percent": 50}
    with pytest.raises(FunctionFailure, match="percent"):
        ask(path, "throttle", {"percent": percent}, (), 0, DEADLINE_S)
