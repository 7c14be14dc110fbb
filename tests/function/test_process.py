"""The process tree: start, clients that come and go, killed workers, giving up."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.abi.registers import MAGIC, QueueReg, QueueStatus, Reg
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import DeadlineError, UnavailableError
from accelvisor.kernels.interpreter import execute
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import PciIrq, PciRegion
from tests.function.harness import (
    DEADLINE_S,
    Guest,
    Process,
    call,
    environment,
    make_spec,
    memfd,
    open_fds,
    operation,
    running,
    wait_for,
)

F32 = DType.FLOAT32


def sgd(n: int) -> Program:
    slots = (Slot(F32, (n,), Role.OUTPUT), Slot(F32, (n,), Role.INPUT))
    return Program(slots, (operation("sgd", 0, 1, 0, rate=0.01),))


# --- start and stop -------------------------------------------------------------------------------


def test_ready_is_told_to_the_supervisor() -> None:
    with tempfile.TemporaryDirectory(prefix="avf-") as name:
        folder = Path(name)
        spec = make_spec(folder)
        path = folder / "spec.json"
        path.write_text(spec.to_json())
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(str(folder / "notify"))
        notify.settimeout(DEADLINE_S)
        child = subprocess.Popen(
            [sys.executable, "-m", "accelvisor.function", str(path)],
            env={**environment(), "NOTIFY_SOCKET": str(folder / "notify")},
            cwd=Path(__file__).parents[2],
        )
        try:
            assert notify.recv(100) == b"READY=1"
            status = call(spec.holder_socket, "status")
            assert status["ready"]
            assert call(spec.control_socket, "status")["ready"]
        finally:
            child.terminate()
            assert child.wait(DEADLINE_S) == 0
            notify.close()
        assert not (folder / "vfio.sock").exists()
        for pid in (status["worker_pid"], status["zygote_pid"]):
            wait_for(lambda p=pid: not Path(f"/proc/{p}").exists(), "no process to be left")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "usage"),
        (["--help"], 2, "usage"),
        (["/nonexistent/spec.json"], 1, "spec-invalid"),
    ],
)
def test_wrong_starts_say_why(arguments: list[str], code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accelvisor.function", *arguments],
        capture_output=True, text=True, env=environment(), cwd=Path(__file__).parents[2],
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_holder_of_the_same_function_is_refused(process: Process, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(process.spec.to_json())
    done = subprocess.run(
        [sys.executable, "-m", "accelvisor.function", str(path)],
        capture_output=True, text=True, env=environment(), cwd=Path(__file__).parents[2],
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "function-running" in done.stderr
    assert process.holder("status")["ready"]


def test_shutdown_ends_everything(fresh: Process) -> None:
    fresh.holder("shutdown")
    assert fresh.process.wait(DEADLINE_S) == 0


# --- clients --------------------------------------------------------------------------------------


def test_a_program_runs_end_to_end(guest: Guest) -> None:
    ring = guest.ring()
    ring.open("end-to-end")
    rng = np.random.default_rng(3)
    a = rng.standard_normal((64, 32), dtype=np.float32)
    b = rng.standard_normal((32, 48), dtype=np.float32)
    slots = (Slot(F32, (64, 32), Role.INPUT), Slot(F32, (32, 48), Role.INPUT),
             Slot(F32, (64, 48), Role.OUTPUT))  # fmt: skip
    program = Program(slots, (operation("matmul", 0, 1, 2),))
    out = ring.tensor(np.zeros((64, 48), np.float32))
    assert ring.launch(ring.load(program), ring.tensor(a), ring.tensor(b), out).status == 0
    expected = np.zeros((64, 48), np.float32)
    execute(program, [a, b, expected])
    assert np.array_equal(ring.read(out, "float32", (64, 48)), expected)


def test_the_interrupt_arrives(guest: Guest) -> None:
    ring = guest.ring()
    assert not guest.transport.wait_interrupt(0)
    ring.post(abi.nop(1, flags=abi.Flag.INTERRUPT))
    ring.submit()
    assert guest.transport.wait_interrupt(DEADLINE_S)
    assert ring.ready() == 1


def test_a_new_client_finds_a_clean_function(process: Process) -> None:
    with Guest(process) as first:
        ring = first.ring()
        ring.open("first")
        ring.tensor(np.full(1000, 3, np.float32))
        first.window[process.spec.layout.staging] = 0x5A
        first.write32(Reg.SCRATCH, 77)
    with Guest(process) as second:
        assert second.read32(Reg.SCRATCH) == 0
        assert second.window[process.spec.layout.staging] == 0
        assert second.read32(Reg.QUEUE + QueueReg.STATUS) == QueueStatus.DISABLED
        assert process.control("status")["memory_used_bytes"] == 0
        assert process.control("objects") == {"contexts": []}


def test_a_client_that_went_leaves_no_descriptor(fresh: Process) -> None:
    pids = [fresh.holder("status")[name] for name in ("holder_pid", "worker_pid")]

    def alone() -> bool:
        return not fresh.control("status")["connected"]

    wait_for(alone, "no client")
    with Guest(fresh):
        pass
    wait_for(alone, "the client to be gone")
    before = [open_fds(pid) for pid in pids]
    for _ in range(5):
        with Guest(fresh) as guest:
            guest.ring().open()
    wait_for(alone, "the client to be gone")
    wait_for(lambda: fresh.holder("status")["kept_descriptors"] == 0, "the holder to let go")
    # Asking opens a connection of its own, which may still be closing.
    wait_for(lambda: [open_fds(pid) for pid in pids] <= before, "descriptors to be closed")


def test_a_second_client_waits_for_the_first(process: Process) -> None:
    with Guest(process) as first:
        got: list[Client] = []
        thread = threading.Thread(target=lambda: got.append(process.client()))
        thread.start()
        assert first.read32(Reg.MAGIC) == MAGIC
        assert not got
    thread.join(DEADLINE_S)
    assert got[0].read32(0, Reg.MAGIC) == MAGIC
    got[0].close()


def test_a_client_that_dies_in_a_program_stops_it(process: Process) -> None:
    guest = Guest(process)
    ring = guest.ring()
    ring.open()
    n = 100_000
    w, g = ring.tensor(np.ones(n, np.float32)), ring.tensor(np.ones(n, np.float32))
    program = ring.load(sgd(n))
    buffer = guest.buffer(abi.BINDING.pack(w, 0) + abi.BINDING.pack(g, 0))
    ring.post(abi.launch(1, program, 2, buffer.whole(32), repeat=1 << 30))
    ring.submit()
    guest.close()
    wait_for(lambda: not process.control("status")["connected"], "the client to be gone")
    before = process.control("statistics")["tiles"]
    with Guest(process) as again:
        assert again.ring().do(abi.nop).status == 0
    assert process.control("statistics")["tiles"] == before


def test_dma_by_messages_reaches_memory_without_a_file(guest: Guest) -> None:
    ring = guest.ring()
    ring.open()
    memory = bytearray(200_000)
    base = 0x2_0000_0000
    guest.client.dma_map(base, 0x40000, memory=memoryview(memory).cast("B"))
    data = np.random.default_rng(5).integers(0, 256, 200_000, dtype=np.uint8)
    handle = ring.ok(abi.tensor_create, DType.UINT8, (200_000,))
    ring.write(handle, data)
    ring.ok(abi.copy_out, handle, 0, abi.Memory(0, 0, base, 150_000, 0))
    assert memory[:150_000] == data[:150_000].tobytes()
    memory[:4] = b"\1\2\3\4"
    ring.ok(abi.copy_in, handle, 0, abi.Memory(0, 0, base, 4, 0))
    assert ring.read(handle, "uint8", (200_000,))[:4].tolist() == [1, 2, 3, 4]


def test_a_reset_does_not_wait_for_a_dma_reply_that_will_not_come(guest: Guest) -> None:
    """QEMU cannot answer DMA while it waits for our reply to its reset."""
    ring = guest.ring()
    ring.open()
    handle = ring.ok(abi.tensor_create, DType.UINT8, (1000,))
    guest.client.dma_map(0x2_0000_0000, 0x1000)
    ring.post(abi.copy_in(1, handle, 0, abi.Memory(0, 0, 0x2_0000_0000, 1000, 0)))
    ring.submit()
    began = time.monotonic()
    with socket_of(guest) as silent:
        silent.reset()
    assert time.monotonic() - began < 3
    assert guest.read32(Reg.RESET_COUNT) > 0


class socket_of:  # noqa: N801 - reads as what it is: the client, not answering DMA
    """The client with its DMA answers taken away."""

    def __init__(self, guest: Guest) -> None:
        self._client = guest.client

    def __enter__(self) -> Client:
        self._reply = self._client._reply
        self._client._reply = lambda *_: None  # type: ignore[method-assign]
        return self._client

    def __exit__(self, *exc: object) -> None:
        self._client._reply = self._reply  # type: ignore[method-assign]


# --- killed workers -------------------------------------------------------------------------------


def test_twenty_kills_under_load_cost_a_pause_and_no_bit(fresh: Process, tenant: Guest) -> None:
    """In-place SGD on the device while the worker dies; registers are read all the time."""
    n, repeat = 120_000, 6000
    rng = np.random.default_rng(11)
    w, g = (rng.standard_normal(n, dtype=np.float32) for _ in range(2))
    ring = tenant.ring()
    ring.open()
    weights, gradient = ring.tensor(w), ring.tensor(g)
    program = ring.load(sgd(n))
    buffer = tenant.buffer(abi.BINDING.pack(weights, 0) + abi.BINDING.pack(gradient, 0))
    ring.post(abi.launch(99, program, 2, buffer.whole(32), repeat=repeat))
    ring.submit()
    stop = threading.Event()
    kills: list[int] = []

    def reap() -> None:
        while not stop.is_set() and len(kills) < 25:
            kills.append(fresh.kill_worker())
            stop.wait(0.03)

    thread = threading.Thread(target=reap)
    thread.start()
    gaps = []
    reads = 0
    while thread.is_alive() or not ring.ready():
        began = time.perf_counter()
        assert tenant.read32(Reg.MAGIC) == MAGIC
        gaps.append(time.perf_counter() - began)
        tenant.write32(Reg.SCRATCH, reads)
        assert tenant.read32(Reg.SCRATCH) == reads
        reads += 1
    thread.join()
    done = ring.take()
    assert (done.cookie, done.status) == (99, 0)
    expected = w.copy()
    execute(sgd(n), [expected, g], repeat=repeat)
    assert np.array_equal(ring.read(weights, "float32", (n,)), expected)
    status = fresh.holder("status")
    assert len(set(kills)) >= 20
    assert status["worker_restarts"] >= 20
    assert tenant.read32(Reg.WORKER_STARTS) == status["worker_restarts"] + 1
    # 50 ms is the goal on a quiet machine; what is asserted leaves room for a crowded one.
    assert max(gaps) < 1.0, f"longest pause {max(gaps) * 1000:.1f} ms"
    print(f"kills {len(kills)}, longest pause {max(gaps) * 1000:.1f} ms, {reads} reads")


def test_maps_and_interrupts_that_change_while_workers_die(fresh: Process, tenant: Guest) -> None:
    """Descriptors on their way when the worker is killed are neither lost nor kept for ever."""
    ring = tenant.ring()
    ring.open()
    handle = ring.ok(abi.tensor_create, DType.UINT8, (4096,))
    stop = threading.Event()

    def reap() -> None:
        for _ in range(20):
            fresh.kill_worker()
            if stop.wait(0.02):
                return

    thread = threading.Thread(target=reap)
    thread.start()
    base, rounds = 0x5_0000_0000, 0
    while thread.is_alive() or rounds < 20:
        fd = memfd(f"round{rounds}", 8192)
        os.pwrite(fd, bytes([rounds & 0xFF]) * 4096, 4096)
        tenant.client.dma_map(base, 4096, fd=fd, offset=4096)
        ring.ok(abi.copy_in, handle, 0, abi.Memory(0, 0, base, 4096, 0))
        ring.ok(abi.copy_out, handle, 0, abi.Memory(0, 0, base, 4096, 0))
        assert os.pread(fd, 4096, 4096) == bytes([rounds & 0xFF]) * 4096
        tenant.client.dma_unmap(base, 4096)
        eventfd = tenant.client.irq_eventfd(PciIrq.MSI)
        tenant.write32(Reg.INTERRUPT_CAUSE, 0xF)
        ring.do(abi.nop, flags=abi.Flag.INTERRUPT)
        assert select.select([eventfd], [], [], DEADLINE_S)[0]
        os.close(eventfd)
        os.close(fd)
        rounds += 1
    stop.set()
    thread.join()
    assert fresh.control("status")["dma_maps"] == 1
    # RAM and the last eventfd; what died on its way has been let go of.
    wait_for(lambda: fresh.holder("status")["kept_descriptors"] <= 2, "descriptors to be dropped")


def test_a_client_that_shrinks_its_memory_gets_a_fault_and_kills_nobody(
    process: Process, guest: Guest
) -> None:
    """Case V15."""
    ring = guest.ring()
    ring.open()
    handle = ring.ok(abi.tensor_create, DType.UINT8, (8192,))
    fd = memfd("shrinking", 8192, sealed=False)
    guest.client.dma_map(0x5_0000_0000, 8192, fd=fd)
    ring.ok(abi.copy_in, handle, 0, abi.Memory(0, 0, 0x5_0000_0000, 8192, 0))
    os.ftruncate(fd, 0)
    done = ring.do(abi.copy_in, handle, 0, abi.Memory(0, 0, 0x5_0000_0000, 8192, 0))
    assert done.status == CommandStatus.BAD_ADDRESS
    assert guest.read32(Reg.MAGIC) == MAGIC
    assert process.holder("status")["worker_restarts"] == 0
    os.close(fd)


def test_maps_interrupt_and_agreement_survive_the_worker(fresh: Process, tenant: Guest) -> None:
    ring = tenant.ring()
    ring.open()
    handle = ring.tensor(np.arange(100, dtype=np.float32))
    fresh.kill_worker()
    assert np.array_equal(ring.read(handle, "float32", (100,)), np.arange(100, dtype=np.float32))
    while tenant.transport.wait_interrupt(0):
        pass
    tenant.write32(Reg.INTERRUPT_CAUSE, 0xF)
    ring.post(abi.nop(5, flags=abi.Flag.INTERRUPT))
    ring.submit()
    assert tenant.transport.wait_interrupt(DEADLINE_S)


def test_a_worker_killed_while_asleep_is_replaced_unasked(fresh: Process, tenant: Guest) -> None:
    pid = fresh.kill_worker()
    wait_for(lambda: fresh.holder("status")["worker_pid"] not in (0, pid), "a new worker")
    assert tenant.ring().do(abi.nop).status == 0


def test_the_zygote_may_die_too(fresh: Process, tenant: Guest) -> None:
    os.kill(fresh.holder("status")["zygote_pid"], signal.SIGKILL)
    fresh.kill_worker()
    assert tenant.ring().do(abi.nop).status == 0


def test_nothing_outlives_the_holder(fresh: Process, tenant: Guest) -> None:
    status = fresh.holder("status")
    os.kill(status["holder_pid"], signal.SIGKILL)
    fresh.process.wait(DEADLINE_S)
    for name in ("worker_pid", "zygote_pid"):
        wait_for(lambda n=name: _is_gone(status[n]), f"{name} to end")
    assert tenant.transport.read32(Reg.MAGIC) == 0xFFFF_FFFF


def _is_gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_stopped_worker_does_not_stop_the_holder(process: Process) -> None:
    pid = process.holder("status")["worker_pid"]
    os.kill(pid, signal.SIGSTOP)
    assert process.holder("status")["worker_pid"] == pid
    os.kill(pid, signal.SIGCONT)


def test_a_worker_has_no_privilege_left(process: Process) -> None:
    pid = process.control("status")["pid"]
    assert all(process.control("status")["sandbox"].values())
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert fields["NoNewPrivs"] == "1"
    for kind in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert int(fields[kind], 16) == 0, kind
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert "Max open files            512" in limits


# --- giving up ------------------------------------------------------------------------------------


def test_a_function_that_gave_up_reads_as_a_pulled_device(fresh: Process, tenant: Guest) -> None:
    tenant.write32(Reg.SCRATCH, 5)
    fresh.holder("give-up")
    client = tenant.client
    assert tenant.read32(Reg.SCRATCH) == 0xFFFF_FFFF
    assert client.region_read(PciRegion.CONFIG, 0, 64) == b"\xff" * 64
    tenant.write32(Reg.SCRATCH, 6)
    client.reset()
    fd = memfd("late", 4096)
    client.dma_map(0x9000_0000, 4096, fd=fd)
    client.dma_unmap(0x9000_0000, 4096)
    os.close(fd)
    client.irq_disable(PciIrq.MSI)
    with pytest.raises(Refusal):
        client.region_info(0)
    status = fresh.holder("status")
    assert (status["ready"], status["gave_up"], status["worker_pid"]) == (False, "asked to", 0)


def test_a_new_client_of_a_function_that_gave_up_is_refused(fresh: Process) -> None:
    fresh.holder("give-up")
    for _ in range(3):
        with pytest.raises((Refusal, UnavailableError)):
            Guest(fresh)


def test_workers_that_die_at_once_are_not_restarted_for_ever() -> None:
    with running() as process, Guest(process) as guest:
        deadline = time.monotonic() + DEADLINE_S
        while not process.holder("status")["gave_up"]:
            assert time.monotonic() < deadline
            pid = process.holder("status")["worker_pid"]
            if pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        assert "30 restarts" in process.holder("status")["gave_up"]
        assert guest.read32(Reg.MAGIC) == 0xFFFF_FFFF
        assert "gave up" in process.log.read_text()


def test_a_request_in_flight_is_answered_by_the_holder(fresh: Process, tenant: Guest) -> None:
    """The worker dies with a request consumed and unanswered, and there is no next worker."""
    pid = fresh.holder("status")["worker_pid"]
    os.kill(pid, signal.SIGSTOP)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(tenant.read32(Reg.MAGIC)))
    thread.start()
    fresh.holder("give-up")
    thread.join(DEADLINE_S)
    assert got == [0xFFFF_FFFF]


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


def test_register_reads_are_quick_while_a_program_computes(guest: Guest) -> None:
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
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        guest.read32(Reg.STATUS)
        times.append(time.perf_counter() - began)
    assert not ring.ready()
    times.sort()
    print(f"p50 {times[1000] * 1e6:.0f} us, p99 {times[1980] * 1e6:.0f} us")
    # The goal is a p99 of 2 ms on a quiet machine (benchmarks); here only that nothing queues.
    assert times[1000] < 0.005
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
