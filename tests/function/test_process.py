"""The process tree: start, and clients that come and go."""

from __future__ import annotations

import os
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
from accelvisor.kernels.interpreter import execute
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import PciIrq
from tests.function.harness import (
    DEADLINE_S,
    Guest,
    Process,
    call,
    environment,
    make_spec,
    operation,
    sgd,
    wait_for,
)

F32 = DType.FLOAT32


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
            assert notify.recv(100).startswith(b"READY=1\nSTATUS=serves ")
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
    def descriptors() -> list[int]:
        return [ask("status")["open_descriptors"] for ask in (fresh.holder, fresh.control)]

    def alone() -> bool:
        return not fresh.control("status")["connected"]

    wait_for(alone, "no client")
    with Guest(fresh):
        pass
    wait_for(alone, "the client to be gone")
    before = descriptors()
    for _ in range(5):
        with Guest(fresh) as guest:
            guest.ring().open()
    wait_for(alone, "the client to be gone")
    wait_for(lambda: fresh.holder("status")["kept_descriptors"] == 0, "the holder to let go")
    # Asking opens a connection of its own, which may still be closing.
    wait_for(lambda: all(a <= b for a, b in zip(descriptors(), before, strict=True)),
             "descriptors to be closed")  # fmt: skip


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


def test_a_client_that_says_nothing_makes_room_for_the_next(process: Process) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(process.spec.vfio_socket)
        with Guest(process) as guest:  # within its own patience
            assert guest.read32(Reg.MAGIC) == MAGIC
        assert silent.recv(1) == b""


def test_a_vector_that_is_no_eventfd_is_refused(process: Process, guest: Guest) -> None:
    """A read-only descriptor killed worker after worker; a full pipe would stop one for ever."""
    ring = guest.ring()
    source, target = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    for fd in (null, source, target):
        with pytest.raises(Refusal):
            guest.client.set_irqs(PciIrq.MSI, 0x24, 0, 1, fds=[fd])
        os.close(fd)
    blocking = os.eventfd(0, 0)
    guest.client.set_irqs(PciIrq.MSI, 0x24, 0, 1, fds=[blocking])
    assert not os.get_blocking(blocking)
    os.eventfd_write(blocking, (1 << 64) - 2)  # no room for another
    guest.write32(Reg.INTERRUPT_CAUSE, 0xF)
    assert ring.do(abi.nop, flags=abi.Flag.INTERRUPT).status == 0
    assert guest.read32(Reg.INTERRUPT_CAUSE)
    os.close(blocking)
    assert process.holder("status")["worker_restarts"] == 0


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

    def reset(client: Client) -> float:
        began = time.monotonic()
        client.reset()
        return time.monotonic() - began

    ring.submit()
    with socket_of(guest) as silent:
        took = reset(silent)
    # Far from the time after which it is given up, given what a reset costs here and now.
    assert took < LIMITS.vfio_reply_s / 2 + 20 * reset(guest.client)
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
