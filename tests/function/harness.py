"""A function's process tree under test, and a small ring driver over the in-tree client."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType, by_label
from accelvisor.abi.programs import Operation, Program, Role, Slot, encode
from accelvisor.abi.registers import (
    CQ_HEAD,
    CQ_TAIL,
    NEED_WAKEUP,
    SQ_TAIL,
    QueueControl,
    QueueReg,
    QueueStatus,
    Reg,
)
from accelvisor.function.descriptors import Descriptors
from accelvisor.function.device import Device
from accelvisor.function.spec import Spec
from accelvisor.function.state import STATE_BYTES, TRACK_BYTES, W_STARTS, State
from accelvisor.kernels.registry import BY_NAME
from accelvisor.limits import MIB
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.transport import ClientTransport

DEADLINE_S = 30.0


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Poll until ``condition`` is true; its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.001)


def make_spec(folder: Path, **changes: Any) -> Spec:
    fields: dict[str, Any] = {
        "uuid": str(uuid.uuid4()), "profile": "test", "cores": 2, "chips": 1,
        "memory_bytes": 64 * MIB, "window_bytes": 4 * MIB, "queues": 4, "ring_entries": 64,
        "vfio_socket": str(folder / "vfio.sock"), "holder_socket": str(folder / "holder.sock"),
        "control_socket": str(folder / "control.sock"), "socket_group": "", "keeper": os.geteuid(),
    }  # fmt: skip
    return Spec(**{**fields, **changes})


def environment() -> dict[str, str]:
    """Function processes share compiled modules: most of a cold start would be compiling."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**variables, "PYTHONPYCACHEPREFIX": _COMPILED.name}


_COMPILED = tempfile.TemporaryDirectory(prefix="avf-pyc-", ignore_cleanup_errors=True)


class Process:
    """A running function."""

    def __init__(self, folder: Path, spec: Spec) -> None:
        self.spec = spec
        path = folder / "spec.json"
        path.write_text(spec.to_json())
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "accelvisor.function", str(path)],
                cwd=Path(__file__).parents[2],
                env=environment(),
                stderr=log,
            )
        try:
            wait_for(self._ready, "the function to be ready")
        except BaseException:
            self.stop()
            raise

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.holder("status")["ready"])
        except OSError:
            return False

    def holder(self, method: str) -> Any:
        return call(self.spec.holder_socket, method)

    def control(self, method: str) -> Any:
        return call(self.spec.control_socket, method)

    def client(self) -> Client:
        return Client(self.spec.vfio_socket, timeout_s=DEADLINE_S)

    def kill_worker(self) -> int:
        """SIGKILL the worker as soon as there is one; returns its pid."""
        pid = wait_for(lambda: self.holder("status")["worker_pid"], "a worker")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return int(pid)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(DEADLINE_S)


def call(path: str, method: str, parameters: dict[str, Any] | None = None) -> Any:
    """One request on holder.sock or control.sock."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(path)
        request = {"method": method, "parameters": parameters or {}}
        sock.sendall(json.dumps(request).encode() + b"\0")
        raw = b""
        while not raw.endswith(b"\0"):
            data = sock.recv(65536)
            if not data:
                raise ConnectionError(f"{path} closed without an answer")
            raw += data
    reply = json.loads(raw[:-1])
    if "error" in reply:
        raise AssertionError(reply["error"])
    return reply["parameters"]


@contextmanager
def running(**changes: Any) -> Iterator[Process]:
    """A function in a directory of its own (socket paths must be short)."""
    folder = Path(tempfile.mkdtemp(prefix="avf-"))
    process = None
    try:
        process = Process(folder, make_spec(folder, **changes))
        yield process
    finally:
        if process is not None:
            process.stop()
        shutil.rmtree(folder)


class Ring:
    """One queue, driven command by command, as plainly as possible."""

    def __init__(self, guest: Guest | Local, index: int) -> None:
        self.guest = guest
        self.index = index
        spec = guest.spec
        layout = spec.layout
        self.entries = layout.entries
        self.control = layout.control(index)
        self.sq = layout.submission(index)
        self.cq = layout.completion(index)
        self.tail = 0
        self.head = 0
        self.cookie = 0
        self.words = guest.window.cast("I")
        self.set(QueueControl.DISABLE, QueueStatus.DISABLED)
        self.set(QueueControl.ENABLE, QueueStatus.ENABLED)

    def register(self, offset: int) -> int:
        return self.guest.read32(Reg.QUEUE + 0x40 * self.index + offset)

    def set(self, value: int, wanted: int) -> None:
        self.guest.write32(Reg.QUEUE + 0x40 * self.index + QueueReg.CONTROL, value)
        wait_for(lambda: self.register(QueueReg.STATUS) == wanted, f"queue status {wanted}")

    def post(self, entry: bytes) -> None:
        at = self.sq + self.tail % self.entries * 64
        self.guest.window[at : at + 64] = entry
        self.tail = self.tail + 1 & 0xFFFFFFFF

    def submit(self) -> None:
        self.words[(self.control + SQ_TAIL) // 4] = self.tail
        with self.guest.fence:
            pass
        if self.words[(self.control + NEED_WAKEUP) // 4]:
            self.guest.write32(Reg.DOORBELL + 4 * self.index, 1)

    def ready(self) -> int:
        return self.words[(self.control + CQ_TAIL) // 4] - self.head & 0xFFFFFFFF

    def take(self) -> abi.Completion:
        at = self.cq + self.head % self.entries * 32
        done = abi.parse_completion(bytes(self.guest.window[at : at + 32]))
        self.head = self.head + 1 & 0xFFFFFFFF
        self.words[(self.control + CQ_HEAD) // 4] = self.head
        return done

    def next_cookie(self) -> int:
        self.cookie += 1
        return self.cookie

    def run(self, entry: bytes, timeout_s: float = DEADLINE_S) -> abi.Completion:
        """Submit one command and wait for it."""
        self.post(entry)
        self.submit()
        self.guest.wait(self.ready, timeout_s)
        return self.take()

    def do(self, build: Callable[..., bytes], *arguments: Any, **options: Any) -> abi.Completion:
        cookie = self.next_cookie()
        done = self.run(build(cookie, *arguments, **options))
        assert done.cookie == cookie
        return done

    def ok(self, build: Callable[..., bytes], *arguments: Any, **options: Any) -> int:
        done = self.do(build, *arguments, **options)
        assert done.status == 0, (build.__name__, done, self.fault())
        return done.value

    # --- conveniences -------------------------------------------------------------------------

    def open(self, name: str = "test") -> int:
        return self.ok(abi.context_open, 4711, name)

    def tensor(self, array: np.ndarray) -> int:
        handle = self.ok(abi.tensor_create, by_label(str(array.dtype)), array.shape)
        self.write(handle, array)
        return handle

    def write(self, handle: int, array: np.ndarray) -> None:
        buffer = self.guest.buffer(np.ascontiguousarray(array).tobytes())
        self.ok(abi.copy_in, handle, 0, buffer.whole(array.nbytes))
        buffer.release()

    def read(self, handle: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        like = np.empty(shape, dtype)
        buffer = self.guest.buffer(bytes(max(1, like.nbytes)))
        self.ok(abi.copy_out, handle, 0, buffer.whole(like.nbytes))
        like = np.frombuffer(bytes(buffer.view[: like.nbytes]), dtype).reshape(shape)
        buffer.release()
        return like

    def load(self, program: Program | bytes) -> int:
        raw = program if isinstance(program, bytes) else encode(program)
        buffer = self.guest.buffer(raw)
        handle = self.ok(abi.program_load, buffer.whole(len(raw)))
        buffer.release()
        return handle

    def launch(self, program: int, *bindings: tuple[int, int] | int, repeat: int = 1) -> Any:
        pairs = [b if isinstance(b, tuple) else (b, 0) for b in bindings]
        raw = b"".join(abi.BINDING.pack(*pair) for pair in pairs)
        buffer = self.guest.buffer(raw or b"\0")
        done = self.do(
            abi.launch, program, len(pairs), buffer.whole(len(raw)), repeat=repeat
        )
        buffer.release()
        return done

    def query(self, what: abi.Query) -> Any:
        buffer = self.guest.buffer(bytes(256 * 1024))
        size = self.ok(abi.query, what, buffer.whole(256 * 1024))
        answer = json.loads(bytes(buffer.view[:size]))
        buffer.release()
        return answer

    def fault(self) -> Any:
        return self.query(abi.Query.FAULT) if self.register(QueueReg.CONTEXT) else None


class Buffer:
    """Guest RAM with its address."""

    def __init__(self, inner: Any, raw: bytes) -> None:
        self._inner = inner
        self.address = inner.address
        self.view = inner.view
        self.view[: len(raw)] = raw

    def whole(self, length: int) -> abi.Memory:
        return abi.Memory(abi.Space.GUEST, 0, self.address, length, 0)

    def release(self) -> None:
        self._inner.release()


class Guest:
    """The in-tree client as a VM with 32 MiB of RAM."""

    def __init__(self, process: Process, ram_bytes: int = 32 * MIB) -> None:
        self.spec = process.spec
        self.transport = ClientTransport(process.client(), ram_bytes=ram_bytes)
        self.window = self.transport.window
        self.client = self.transport.client
        self.fence = threading.Lock()
        self._rings: list[Ring] = []

    def read32(self, offset: int) -> int:
        return self.client.read32(0, offset)

    def write32(self, offset: int, value: int) -> None:
        self.client.write32(0, offset, value)

    def buffer(self, raw: bytes) -> Buffer:
        return Buffer(self.transport.allocate_dma(len(raw)), raw)

    def ring(self, index: int = 0) -> Ring:
        ring = Ring(self, index)
        self._rings.append(ring)
        return ring

    def wait(self, condition: Callable[[], Any], timeout_s: float = DEADLINE_S) -> None:
        """Poll, answering the function's DMA requests meanwhile."""
        deadline = time.monotonic() + timeout_s
        spins = 0
        while not condition():
            spins += 1
            if spins > 200:
                self.client.pump(0.0001)
                assert time.monotonic() < deadline, "no completion in time"

    def close(self) -> None:
        for ring in self._rings:
            ring.words.release()
        self.transport.close()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Local:
    """A device in this process, its engine running, with RAM mapped: the same face as Guest."""

    RAM = 0x1000_0000

    def __init__(self, ram_bytes: int = 4 * MIB, **changes: Any) -> None:
        spec = make_spec(Path("/tmp"), **{"memory_bytes": 16 * MIB, **changes})
        self.spec = spec
        self.fds = [memfd("state", STATE_BYTES), memfd("window", spec.window_bytes),
                    memfd("memory", spec.memory_bytes, grows=True),
                    memfd("track", TRACK_BYTES)]  # fmt: skip
        self.told: list[tuple[bytes, int]] = []
        self.held: dict[int, int] = {}
        self.fence = threading.Lock()
        self._next = 0
        self._rings: list[Ring] = []
        self.start()
        self.ram_fd = memfd("ram", ram_bytes)
        self.ram = mmap.mmap(self.ram_fd, ram_bytes)
        self.map(self.RAM, ram_bytes, self.ram_fd)
        self.device.config.write(0x04, b"\x06\x00")

    def start(self) -> None:
        """What a worker does at its start."""
        self.state = State(self.fds[0])
        self.state.u64[W_STARTS] += 1
        self.descriptors = Descriptors(self._tell, self.held)
        self.device = Device(self.spec, self.state, *self.fds[1:], self.descriptors)
        self.window = self.device.window
        self.device.start()

    def restart(self) -> None:
        """Stop this worker at a boundary and start another over the same memory."""
        self.device.stop()
        self.held = {slot: os.dup(fd) for slot, fd in self.descriptors.fds.items()}
        self._close_device()
        self.start()

    def _tell(self, data: bytes, fds: tuple[int, ...]) -> None:
        self.told.append((data, len(fds)))

    def map(self, address: int, size: int, fd: int | None, flags: int = 3, offset: int = 0) -> None:
        """DMA_MAP as the worker would hand it to the model."""
        if fd is None:
            self.device.dma_map(address, size, flags, offset, None)
            return
        slot = self.descriptors.keep(os.dup(fd))
        passed = os.dup(fd)
        self.device.incoming = {passed: slot}
        try:
            self.device.dma_map(address, size, flags, offset, passed)
        finally:
            self.device.incoming = {}
            self.device.sweep()

    def read32(self, offset: int) -> int:
        return int.from_bytes(self.device.region_read(0, offset, 4), "little")

    def write32(self, offset: int, value: int) -> None:
        self.device.region_write(0, offset, value.to_bytes(4, "little"))

    def buffer(self, raw: bytes) -> Buffer:
        size = max(4096, (len(raw) + 4095) // 4096 * 4096)
        if self._next + size > len(self.ram):
            self._next = 0
        at, self._next = self._next, self._next + size
        return Buffer(_Span(self.RAM + at, memoryview(self.ram)[at : at + size]), raw)

    def ring(self, index: int = 0) -> Ring:
        ring = Ring(self, index)
        self._rings.append(ring)
        return ring

    def wait(self, condition: Callable[[], Any], timeout_s: float = DEADLINE_S) -> None:
        wait_for(condition, "a completion", timeout_s)

    def ring_of(self, other: Ring) -> Ring:
        """A ring of another function that was moved here."""
        moved = Ring.__new__(Ring)
        moved.__dict__.update(other.__dict__)
        moved.guest, moved.words = self, self.window.cast("I")
        self._rings.append(moved)
        return moved

    def _close_device(self) -> None:
        for fd in self.descriptors.fds.values():
            os.close(fd)

    def close(self) -> None:
        self.device.stop()
        self._close_device()
        for fd in (*self.fds, self.ram_fd):
            os.close(fd)

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Span:
    """A part of RAM; released when the test ends."""

    def __init__(self, address: int, view: memoryview) -> None:
        self.address = address
        self.view = view

    def release(self) -> None:
        self.view.release()


def memfd(name: str, size: int, *, sealed: bool = True, grows: bool = False) -> int:
    """A memfd of ``size`` bytes, sealed against shrinking as QEMU's are."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        grow = 0 if grows else fcntl.F_SEAL_GROW
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | grow)
    return fd


def operation(name: str, *operands: int, **attributes: float) -> Operation:
    """An operation by instruction name, attributes by name."""
    from accelvisor.abi.attributes import pack

    instruction = BY_NAME[name]
    return Operation(
        instruction.opcode, operands, tuple(pack(instruction.attributes, attributes, name))
    )


def sgd(n: int) -> Program:
    """One step of SGD in place: argument 0 are weights, argument 1 is the gradient."""
    slots = (Slot(DType.FLOAT32, (n,), Role.OUTPUT), Slot(DType.FLOAT32, (n,), Role.INPUT))
    return Program(slots, (operation("sgd", 0, 1, 0, rate=0.01),))
