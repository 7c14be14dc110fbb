"""A function in this process, small and disobedient on purpose.

It answers the guest's registers and rings as abi/ describes them and can be told to misbehave: to
be absent for a while, to lose doorbells and interrupts, to complete late, out of order or wrongly.
It runs when its doorbell is rung or, with ``asleep = False``, when time passes (:class:`Clock`).
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import numpy as np

from accelvisor.abi import ABI_VERSION, commands, programs
from accelvisor.abi.attributes import from_description, unpack
from accelvisor.abi.commands import BINDING, SEGMENT, Completion, Memory, Opcode, Query, Space
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Role
from accelvisor.abi.registers import (
    CQ_TAIL,
    MAGIC,
    NEED_WAKEUP,
    QUEUE_STRIDE,
    SQ_HEAD,
    SQ_TAIL,
    QueueControl,
    QueueReg,
    QueueStatus,
    Reg,
    Status,
    WindowLayout,
)
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import CapacityError, NumericError, ProgramError

RAM = 0x1_0000_0000
FAKE_UUID = UUID("6fd2f3c0-1b3f-4c55-9d8a-0a52f6a3b111")


class BadAddress(Exception):  # noqa: N818
    """DMA outside the guest's memory."""


def _operand(name: str, access: str, shape: str, like: str = "") -> dict[str, Any]:
    types = ["float32", "int32"]
    return {"name": name, "access": access, "dtypes": types, "shape": shape, "like": like}


def _row(
    name: str, opcode: int, reads: list[tuple[str, str]], out: str, attributes: Any = ()
) -> dict[str, Any]:
    operands = [_operand(n, "read", s, reads[0][0] if i else "") for i, (n, s) in enumerate(reads)]
    operands.append(_operand("out", "write", out, reads[0][0] if reads else ""))
    return {
        "name": name,
        "opcode": opcode,
        "doc": f"{name} of the fake device.",
        "operands": operands,
        "attributes": list(attributes),
        "requires": [],
        "queue": "compute",
    }


def _real(name: str, default: float) -> dict[str, Any]:
    return {"name": name, "type": "float", "min": None, "max": None, "default": default}


_PAIR = [("a", "*s"), ("b", "*s")]
TABLE = [
    _row("fill", 1, [], "*s", [_real("value", 0.0)]),
    _row("add", 2, _PAIR, "*s"),
    _row("sub", 3, _PAIR, "*s"),
    _row("mul", 4, _PAIR, "*s"),
    _row("relu", 5, [("x", "*s")], "*s"),
    _row("matmul", 6, [("a", "m k"), ("b", "k n")], "m n"),
    _row("sgd", 7, [("w", "*s"), ("g", "*s")], "*s", [_real("rate", 0.1)]),
]
KERNELS: dict[int, Callable[..., Any]] = {
    1: lambda value, shape: np.full(shape, value),
    2: lambda a, b: a + b,
    3: lambda a, b: a - b,
    4: lambda a, b: a * b,
    5: lambda x: np.maximum(x, 0),
    6: lambda a, b: a @ b,
    7: lambda w, g, rate: w - np.float32(rate) * g,
}


@dataclass
class Clock:
    """Time that passes only by being asked for and slept through; the device ticks meanwhile."""

    now: float = 100.0
    device: FakeDevice | None = None
    slept: float = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        if self.device is not None:
            self.device.tick()


@dataclass
class Buffer:
    """DMA memory of the fake guest."""

    address: int
    view: memoryview
    segments: list[tuple[int, int]]
    released: int = 0

    def release(self) -> None:
        self.released += 1


@dataclass
class FakeDevice:
    """Registers, window and a single-threaded engine. Fields say how it misbehaves."""

    queues: int = 2
    entries: int = 16
    window_bytes: int = 1 << 18
    clock: Clock = field(default_factory=Clock)
    interrupts: bool = True
    bdf: str | None = None

    asleep: bool = True  # it always asks for a doorbell; else it looks at its rings at each tick
    absent_reads: int = 0  # MAGIC reads as `absent_value` this many times, the window as well
    absent_value: int = 0xFFFFFFFF
    lost_doorbells: int = 0
    lose_interrupts: bool = False
    late_ticks: int = 0  # ticks until finished commands show up in the completion ring
    reverse: bool = False  # completions of one batch in the opposite order
    statuses: dict[int, int] = field(default_factory=dict)  # opcode -> status to answer with
    stray_cookie: int | None = None  # complete this cookie instead of the right one, once
    frozen: bool = False
    broken: bool = False
    scattered: bool = False  # DMA memory in pieces of one page
    dma_refused: bool = False
    epoch: int = 1
    reset_count: int = 0
    abi: int = ABI_VERSION
    memory_limit: int = 1 << 24
    real_kernels: bool = False  # the function's own instructions, on its own kernels

    def __post_init__(self) -> None:
        self.layout = WindowLayout(self.queues, self.entries)
        self._bytes = bytearray(self.window_bytes)
        self.window = memoryview(self._bytes)
        self._words = self.window.cast("I")
        self.clock.device = self
        self.ram: dict[int, memoryview] = {}
        self._next_ram = RAM
        self.doorbells = 0
        self.interrupts_raised = 0
        self.cause = 0
        self.scratch = 0
        self.waits = 0
        self.closed = 0
        self.log: list[str] = []
        self._hidden: bytes | None = None
        self._pending_interrupts = 0
        self._queue_status = [QueueStatus.DISABLED] * self.queues
        self._late: list[tuple[int, int, bytes, int]] = []
        self._ticks = 0
        self._lock = threading.RLock()
        self._wipe()

    def _wipe(self) -> None:
        self.tensors: dict[int, tuple[DType, tuple[int, ...], bytearray]] = {}
        self.programs: dict[int, programs.Program] = {}
        self.context: dict[int, str] = {}
        self.stopped: set[int] = set()
        self.uploads = 0
        self._handles = 0
        self.detail = ""

    # --- transport -------------------------------------------------------------------------------

    def read32(self, offset: int) -> int:
        if offset == Reg.MAGIC:
            if self.absent_reads > 0:
                self.absent_reads -= 1
                self._hide()
                return self.absent_value
            self._show()
            return MAGIC
        if self._hidden is not None:
            return self.absent_value
        if offset >= Reg.QUEUE:
            queue, register = divmod(offset - Reg.QUEUE, QUEUE_STRIDE)
            return int(self._queue_status[queue]) if register == QueueReg.STATUS else 0
        status = Status.READY
        status |= Status.FROZEN if self.frozen else Status(0)
        status |= Status.BROKEN if self.broken else Status(0)
        values = {
            Reg.SCRATCH: self.scratch,
            Reg.ABI_VERSION: self.abi,
            Reg.STATUS: int(status),
            Reg.EPOCH: self.epoch,
            Reg.RESET_COUNT: self.reset_count,
            Reg.QUEUES: self.queues,
            Reg.RING_ENTRIES: self.entries,
            Reg.CORES: 2,
            Reg.CHIPS: 1,
            Reg.WINDOW_BYTES_64: self.window_bytes,
            Reg.MEMORY_BYTES_64: self.memory_limit,
            Reg.STAGING_OFFSET_64: self.layout.staging,
        }
        if Reg.UUID <= offset < Reg.UUID + 16:
            return int(struct.unpack_from("<I", FAKE_UUID.bytes, offset - Reg.UUID)[0])
        return values.get(Reg(offset), 0) if offset in set(Reg) else 0

    def read64(self, offset: int) -> int:
        return self.read32(offset)

    def write32(self, offset: int, value: int) -> None:
        if self._hidden is not None:
            return
        if Reg.DOORBELL <= offset < Reg.QUEUE:
            self.doorbells += 1
            if self.lost_doorbells > 0:
                self.lost_doorbells -= 1
                return
            self.run((offset - Reg.DOORBELL) // 4)
        elif offset >= Reg.QUEUE:
            queue, register = divmod(offset - Reg.QUEUE, QUEUE_STRIDE)
            if register == QueueReg.CONTROL:
                self._control(queue, value)
        elif offset == Reg.SCRATCH:
            self.scratch = value
        elif offset == Reg.INTERRUPT_CAUSE:
            self.cause &= ~value
            if self.cause:  # as the function does: another cause is left, so it interrupts again
                self.interrupts_raised += 1
                self._pending_interrupts += 1
        elif offset == Reg.CONTROL:
            self.reset()

    def allocate_dma(self, nbytes: int) -> Buffer:
        if self.dma_refused:
            raise CapacityError("no DMA here", code="dma-memory")
        view = memoryview(bytearray(nbytes))
        step = 4096 if self.scattered else nbytes
        segments = []
        for at in range(0, nbytes, step):
            size = min(step, nbytes - at)
            segments.append((self._next_ram, size))
            self.ram[self._next_ram] = view[at : at + size]
            self._next_ram += size + 8192
        return Buffer(segments[0][0], view, segments)

    def wait_interrupt(self, timeout_s: float) -> bool:
        self.waits += 1
        if self._pending_interrupts:
            self._pending_interrupts = 0
            return True
        self.clock.sleep(timeout_s)
        return False

    def close(self) -> None:
        self.closed += 1

    # --- trouble ---------------------------------------------------------------------------------

    def _hide(self) -> None:
        if self._hidden is None:
            self._hidden = bytes(self._bytes)
            self._bytes[:] = bytes([self.absent_value & 0xFF]) * self.window_bytes

    def _show(self) -> None:
        if self._hidden is not None:
            self._bytes[:] = self._hidden
            self._hidden = None

    def vanish(self, reads: int) -> None:
        """Be absent for the next ``reads`` looks at MAGIC."""
        self.absent_reads = reads
        self._hide()

    def reset(self) -> None:
        """As after FLR: indices gone, queues disabled, objects gone."""
        self.reset_count += 1
        self._bytes[: self.layout.staging] = bytes(self.layout.staging)
        self._queue_status = [QueueStatus.DISABLED] * self.queues
        self._late.clear()
        self._wipe()

    def _control(self, queue: int, value: int) -> None:
        page = self.layout.control(queue)
        if value == QueueControl.DISABLE:
            self._queue_status[queue] = QueueStatus.DISABLED
            if self.context.pop(queue, None) is not None:
                self.tensors.clear()
                self.programs.clear()
        else:
            self._bytes[page : page + 4096] = bytes(4096)
            self.stopped.discard(queue)
            self._queue_status[queue] = QueueStatus.ENABLED
            self._words[(page + NEED_WAKEUP) >> 2] = int(self.asleep)

    def tick(self) -> None:
        """Time passes."""
        self._ticks += 1
        if self._hidden is not None:
            return
        due = [late for late in self._late if late[0] <= self._ticks]
        self._late = [late for late in self._late if late[0] > self._ticks]
        for _, queue, raw, flags in due:
            self._complete(queue, raw, flags)
        if not self.asleep:
            for queue in range(self.queues):
                self.run(queue)

    # --- engine ----------------------------------------------------------------------------------

    def run(self, queue: int) -> None:
        """Take everything out of one submission ring."""
        with self._lock:
            self._run(queue)

    def _run(self, queue: int) -> None:
        if self._queue_status[queue] is not QueueStatus.ENABLED or self.frozen:
            return
        page = self.layout.control(queue)
        head = self._words[(page + SQ_HEAD) >> 2]
        tail = self._words[(page + SQ_TAIL) >> 2]
        batch = []
        while head != tail:
            at = self.layout.submission(queue) + head % self.entries * 64
            entry = bytes(self.window[at : at + 64])
            batch.append((self._execute(queue, entry), commands.HEADER.unpack_from(entry)[1]))
            head = (head + 1) & 0xFFFFFFFF
        if self.reverse:
            batch.reverse()
        for completion, flags in batch:
            raw = commands.pack_completion(completion)
            if self.late_ticks:
                self._late.append((self._ticks + self.late_ticks, queue, raw, flags))
            else:
                self._complete(queue, raw, flags)
        self._words[(page + SQ_HEAD) >> 2] = head

    def _complete(self, queue: int, raw: bytes, flags: int) -> None:
        page = self.layout.control(queue)
        tail = self._words[(page + CQ_TAIL) >> 2]
        if self.stray_cookie is not None:
            raw = struct.pack("<I", self.stray_cookie) + raw[4:]
            self.stray_cookie = None
        at = self.layout.completion(queue) + tail % self.entries * 32
        self.window[at : at + 32] = raw
        self._words[(page + CQ_TAIL) >> 2] = (tail + 1) & 0xFFFFFFFF
        if flags & commands.Flag.INTERRUPT:
            if not self.cause & 1:
                self.interrupts_raised += 1
                if not self.lose_interrupts:
                    self._pending_interrupts += 1
            self.cause |= 1

    def _execute(self, queue: int, entry: bytes) -> Completion:
        opcode, _, cookie = commands.HEADER.unpack_from(entry)
        self.log.append(Opcode(opcode).name.lower())
        status, value = self.statuses.get(opcode, 0), 0
        if queue in self.stopped and opcode != Opcode.QUERY:
            status = CommandStatus.CONTEXT_STOPPED
        if not status:
            try:
                status, value = getattr(self, "_" + Opcode(opcode).name.lower())(queue, entry[8:])
            except BadAddress as error:
                status, self.detail = CommandStatus.BAD_ADDRESS, str(error)
        if status >= 0x100:
            self.stopped.add(queue)
        return Completion(cookie, status, opcode, value, 7)

    def _nop(self, queue: int, raw: bytes) -> tuple[int, int]:
        return 0, 0

    _fence = _nop

    def _context_open(self, queue: int, raw: bytes) -> tuple[int, int]:
        if queue in self.context:
            return CommandStatus.CONTEXT_EXISTS, 0
        self.context[queue] = commands.OPEN.unpack_from(raw)[1].rstrip(b"\0").decode()
        return 0, queue

    def _tensor_create(self, queue: int, raw: bytes) -> tuple[int, int]:
        dtype, rank, _, *dims = commands.CREATE.unpack_from(raw)
        shape = tuple(dims[:rank])
        size = DType(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        if size + sum(len(b) for _, _, b in self.tensors.values()) > self.memory_limit:
            return CommandStatus.OUT_OF_MEMORY, 0
        self._handles += 1
        self.tensors[self._handles] = (DType(dtype), shape, bytearray(size))
        return 0, self._handles

    def _tensor_destroy(self, queue: int, raw: bytes) -> tuple[int, int]:
        (handle,) = commands.HANDLE.unpack_from(raw)
        found = self.tensors.pop(handle, None)
        return (0 if found else CommandStatus.BAD_HANDLE), 0

    def _program_load(self, queue: int, raw: bytes) -> tuple[int, int]:
        data = self._get(commands.parse_memory(raw[:24]))
        try:
            program = programs.decode(data)
            if self.real_kernels:
                from accelvisor.kernels.programs import validate

                validate(program)
        except ProgramError as error:
            self.detail = f"{error.where}: {error}"
            return CommandStatus.PROGRAM_INVALID, 0
        self.uploads += 1
        self._handles += 1
        self.programs[self._handles] = program
        return 0, self._handles

    def _program_unload(self, queue: int, raw: bytes) -> tuple[int, int]:
        (handle,) = commands.HANDLE.unpack_from(raw)
        return (0 if self.programs.pop(handle, None) else CommandStatus.BAD_HANDLE), 0

    def _copy_in(self, queue: int, raw: bytes) -> tuple[int, int]:
        handle, offset, source = commands.COPY.unpack_from(raw)
        data = self._get(commands.parse_memory(source))
        self.tensors[handle][2][offset : offset + len(data)] = data
        return 0, len(data)

    def _copy_out(self, queue: int, raw: bytes) -> tuple[int, int]:
        handle, offset, target = commands.COPY.unpack_from(raw)
        memory = commands.parse_memory(target)
        self._put(memory, bytes(self.tensors[handle][2][offset : offset + memory.length]))
        return 0, memory.length

    def _launch(self, queue: int, raw: bytes) -> tuple[int, int]:
        handle, repeat, count, source = commands.LAUNCH.unpack_from(raw)
        bindings = self._get(commands.parse_memory(source)) if count else b""
        bound = list(BINDING.iter_unpack(bindings[: 16 * count]))
        program = self.programs[handle]
        if self.real_kernels:
            return self._interpret(program, bound, repeat)
        arrays = {}
        for index, slot in enumerate(program.slots):
            if slot.role is Role.TEMPORARY:
                arrays[index] = np.zeros(slot.shape, slot.dtype.label)
            else:
                _, _, data = self.tensors[bound[0][0]]
                part = memoryview(data)[bound[0][1] : bound[0][1] + slot.nbytes]
                arrays[index] = np.frombuffer(part, slot.dtype.label).reshape(slot.shape)
                del bound[0]
        for _ in range(repeat):
            for operation in program.operations:
                row = next(r for r in TABLE if r["opcode"] == operation.opcode)
                declared = [from_description(a) for a in row["attributes"]]
                values = list(unpack(declared, operation.attributes))
                ins = [arrays[s] for s in operation.operands[:-1]]
                out = arrays[operation.operands[-1]]
                extra = values + ([out.shape] if row["name"] == "fill" else [])
                out[...] = KERNELS[operation.opcode](*ins, *extra)
        return 0, 0

    def _interpret(
        self, program: programs.Program, bound: list[tuple[int, int]], repeat: int
    ) -> tuple[int, int]:
        from accelvisor.kernels.interpreter import execute

        arrays = []
        for (handle, offset), index in zip(bound, program.arguments(), strict=True):
            slot = program.slots[index]
            part = memoryview(self.tensors[handle][2])[offset : offset + slot.nbytes]
            arrays.append(np.frombuffer(part, slot.dtype.label).reshape(slot.shape))
        try:
            execute(program, arrays, repeat=repeat)
        except NumericError as error:
            self.detail = str(error)
            return CommandStatus.NUMERIC, 0
        return 0, 0

    def _query(self, queue: int, raw: bytes) -> tuple[int, int]:
        what, _, _, target = commands.QUERY.unpack_from(raw)
        answer: Any = {
            Query.INFO: {"uuid": str(FAKE_UUID), "memory_used_bytes": 0},
            Query.INSTRUCTIONS: self._table(),
            Query.STATISTICS: {"commands": len(self.log)},
            Query.FAULT: {"text": self.detail},
            Query.OBJECTS: [],
        }[Query(what)]
        data = json.dumps(answer).encode()
        memory = commands.parse_memory(target)
        self._put(memory, data[: memory.length])
        return 0, len(data)

    def _table(self) -> list[dict[str, Any]]:
        if not self.real_kernels:
            return TABLE
        from accelvisor.kernels.registry import describe

        return describe()

    def _spans(self, memory: Memory) -> list[tuple[int, int]]:
        if not memory.transfer & commands.Transfer.SCATTER:
            return [(memory.address, memory.length)]
        raw = bytes(self.ram[memory.address][: memory.count * SEGMENT.size])
        return [SEGMENT.unpack_from(raw, i * SEGMENT.size) for i in range(memory.count)]

    def _find(self, space: int, address: int, size: int) -> memoryview:
        if space == Space.WINDOW:
            assert self.layout.staging <= address <= address + size <= self.window_bytes
            return self.window[address : address + size]
        for start, view in self.ram.items():
            if start <= address and address + size <= start + len(view):
                return view[address - start : address - start + size]
        raise BadAddress(f"DMA to {address:#x}, {size} bytes: not the guest's memory")

    def _get(self, memory: Memory) -> bytes:
        return b"".join(
            bytes(self._find(memory.space, a, n)) for a, n in self._spans(memory)
        )

    def _put(self, memory: Memory, data: bytes) -> None:
        for address, size in self._spans(memory):
            part, data = data[:size], data[size:]
            self._find(memory.space, address, len(part))[:] = part

