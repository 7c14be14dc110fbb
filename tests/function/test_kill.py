"""Workers, zygotes and holders that are killed; functions that give up."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType
from accelvisor.abi.registers import MAGIC, Reg
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import UnavailableError
from accelvisor.kernels.interpreter import execute
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import PciIrq, PciRegion
from tests.function.harness import (
    DEADLINE_S,
    Guest,
    Process,
    memfd,
    running,
    sgd,
    wait_for,
)

F32 = DType.FLOAT32


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
        # On a busy machine the next worker may not be there yet.
        while not stop.is_set() and len(set(kills)) < 25 and len(kills) < 200:
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
    # How long, the benchmarks tell; here, that no death holds up the registers until the end.
    assert max(gaps) < sum(gaps) / 2, f"longest pause {max(gaps) * 1000:.1f} ms"
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


def test_kills_while_memory_is_reached_by_messages_fault_nothing(
    fresh: Process, tenant: Guest
) -> None:
    """The next worker's engine ran before it had a client to ask, and faulted the context."""
    ring = tenant.ring()
    ring.open()
    memory = bytearray(os.urandom(1 << 20))
    base = 0x2_0000_0000
    tenant.client.dma_map(base, 1 << 20, memory=memoryview(memory).cast("B"))
    handle = ring.ok(abi.tensor_create, DType.UINT8, (1 << 20,))
    kills = 0
    while kills < 5:
        for n in range(10):
            ring.post(abi.copy_in(n, handle, 0, abi.Memory(0, 0, base, 1 << 20, 0)))
        ring.submit()
        tenant.client.pump(0.05)
        kills += ring.ready() < 10
        fresh.kill_worker()
        for _ in range(10):
            tenant.wait(ring.ready)
            assert ring.take().status == 0
    assert ring.read(handle, "uint8", (1 << 20,)).tobytes() == memory


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
    sandbox = process.control("status")["sandbox"]
    assert all(sandbox.values())
    assert sandbox["concealed"]  # inherited from the holder, through the zygote
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    assert len(threads) > 3  # each has capabilities of its own: engine, cores, control
    for thread in threads:
        lines = (thread / "status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert fields["NoNewPrivs"] == "1", thread
        for kind in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
            assert int(fields[kind], 16) == 0, (kind, thread)
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
    wait_for(lambda: _is_gone(pid), "the worker to end: two may not use one connection")
