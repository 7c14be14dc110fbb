"""LAUNCH: from a program and its bindings to tiles on device memory.

What can be computed once is: validation and planning at upload (kernels.prepare), arrays and
hazards when a set of bindings is first launched. The loop that is left moves one 64-bit position
(repeat, operation, tile) in the state memfd, from which any worker can go on.

An operand that is read and overlaps one that is written by the same operation (SGD in place,
aliased bindings) is first copied to scratch memory; the copy is marked valid in the cursor, and
then read in its stead, by this worker and by the next. So a tile never reads what a tile writes.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from accelvisor.abi.programs import Program, Role, decode
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import ProgramError
from accelvisor.function import state as s
from accelvisor.function.cache import Cache
from accelvisor.function.objects import TENSOR, Memory, Object, Objects, Refused
from accelvisor.function.pauses import Pauses, marking
from accelvisor.function.placement import lower_priority
from accelvisor.function.pool import Pool
from accelvisor.function.state import State
from accelvisor.isolation.segments import SegmentTable, Unmapped
from accelvisor.kernels import programs as kernels
from accelvisor.limits import MIB

_ALIGN = 64  # a cache line and the widest vector register: no kernel wants more
#: Operations and slots (a few hundred bytes each) of cached programs and of cached launches.
_CACHED_PROGRAMS = 65_536
_CACHED_LAUNCHES = 32_768
#: A longer program is validated beside the engine, not in it: that may take a tenth of a second.
_SHORT_BYTES = 16 * 1024
#: Operations that are bound between two pauses.
_PORTION = 64
#: What a snapshot copies between two looks at whether something else wants the engine.
_COPY_STEP = 4 * MIB
#: A tile shorter than this is not worth handing to another core.
_PARALLEL_S = 60e-6

Array = npt.NDArray[Any]


def aligned(n: int) -> int:
    """``n`` bytes rounded up to the alignment of temporaries."""
    return (n + _ALIGN - 1) // _ALIGN * _ALIGN


@dataclass(frozen=True, slots=True)
class Code:
    """A validated program. ``temporaries`` are (slot, offset from the object's start)."""

    program: Program
    plan: tuple[kernels.PlannedOperation, ...]
    arguments: tuple[int, ...]
    temporaries: tuple[tuple[int, int], ...]
    extent: int
    cycles: int

    @property
    def weight(self) -> int:
        """What it counts in a cache."""
        return len(self.plan) + len(self.program.slots) + 1


class _Build:
    """A program being validated on a thread of its own."""

    writes = False

    def __init__(self, raw: bytes, wake: Callable[[], None]) -> None:
        self._raw = raw
        self._wake = wake
        self._done = False
        self.code: Code | None = None
        self.error: BaseException | None = None
        threading.Thread(target=self._run, name="programs", daemon=True).start()

    def _run(self) -> None:
        lower_priority()
        try:
            self.code = _build(self._raw)
        except BaseException as error:
            self.error = error
        self._done = True
        self._wake()

    def ready(self) -> bool:
        """Whether it has ended."""
        return self._done


class Codes:
    """Validated programs by the SHA-256 of their bytes; rebuilt from device memory on demand.

    Args:
        wake: tells the engine that what a command waited for is there.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._by_digest: Cache[bytes, Code] = Cache(_CACHED_PROGRAMS)
        self._building: _Build | None = None

    def load(self, raw: bytes) -> Pauses[tuple[bytes, Code]]:
        """Digest and code of a program's bytes.

        Raises:
            ProgramError: it is not a valid program.
        """
        digest = hashlib.sha256(raw).digest()
        code = self._by_digest.get(digest)
        if code is None:
            code = yield from self._make(raw)
            self._by_digest.put(digest, code, code.weight)
        return digest, code

    def of(self, found: Object, memory: Memory) -> Pauses[Code]:
        """Code of a program object."""
        code = self._by_digest.get(found.digest)
        if code is None:
            raw = bytes(memory.part(found.address, found.nbytes))
            _, code = yield from self.load(raw)
        return code

    def _make(self, raw: bytes) -> Pauses[Code]:
        if len(raw) <= _SHORT_BYTES:
            return _build(raw)
        while self._building is not None and not self._building.ready():
            yield self._building  # one at a time, also when its command was aborted
        build = self._building = _Build(raw, self._wake)
        while not build.ready():
            yield build
        if self._building is build:
            self._building = None
        if build.code is None:
            raise build.error or RuntimeError("no program and no error")
        return build.code


def _build(raw: bytes) -> Code:
    program = decode(raw)
    plan = kernels.prepare(program)
    for operation in plan:
        if operation.tiles >= s.POSITION_TILES:
            raise ProgramError(
                f"{operation.tiles} tiles, the limit is {s.POSITION_TILES}",
                where=f"instruction {operation.index}",
                hint="split the tensors",
            )
    at = aligned(len(raw))
    temporaries = []
    for index, slot in enumerate(program.slots):
        if slot.role is Role.TEMPORARY:
            temporaries.append((index, at))
            at = aligned(at + slot.nbytes)
    return Code(
        program, plan, program.arguments(), tuple(temporaries), at, sum(o.cost.cycles for o in plan)
    )


@dataclass(slots=True)
class Step:
    """One operation on concrete memory. ``hazards`` are positions that need a snapshot."""

    operation: kernels.PlannedOperation
    arrays: list[Array]
    hazards: tuple[int, ...]
    #: (address, bytes) of the operands that are written
    written: tuple[tuple[int, int], ...] = ()
    #: with hazards: the arrays with scratch in their place, once scratch is allocated
    safe: list[Array] = field(default_factory=list)
    scratch: tuple[int, int] = (0, 0)  # (address, bytes) of these
    #: seconds that a tile took when it was last looked at; 0 before
    tile_s: float = 0.0


@dataclass(slots=True)
class Launch:
    """A program on concrete memory: addresses that were looked up in ``table``."""

    code: Code
    steps: list[Step]
    scratch: int  # bytes, 0 when no operation has a hazard
    table: SegmentTable


class Launcher:
    """Resolves and runs launches. Only the engine's thread calls it."""

    def __init__(
        self, state: State, memory: Memory, objects: Objects, pool: Pool
    ) -> None:
        self._state = state
        self._memory = memory
        self._objects = objects
        self._pool = pool
        self._cache: Cache[tuple[int, int, bytes], Launch] = Cache(_CACHED_LAUNCHES)
        self._version = -1

    def resolve(
        self, program: Object, context: int, code: Code, bindings: bytes
    ) -> Pauses[Launch]:
        """Check ``bindings`` (packed BINDING records) and build the arrays.

        Raises:
            Refused: BAD_HANDLE or BINDING_MISMATCH.
        """
        if self._version != self._objects.version:
            self._cache.clear()
            self._version = self._objects.version
        key = (context, program.handle, bindings)
        launch = self._cache.get(key)
        if launch is None:
            launch = yield from self._build(program, context, code, bindings)
            # Only objects of this context are in it, and those stay while its command lasts.
            self._cache.put(key, launch, code.weight)
        return launch

    def _build(
        self, program: Object, context: int, code: Code, bindings: bytes
    ) -> Pauses[Launch]:
        slots = code.program.slots
        addresses = {slot: program.address + at for slot, at in code.temporaries}
        words = np.frombuffer(bindings, "<u8")
        for n, index in enumerate(code.arguments):
            handle, offset = int(words[2 * n]), int(words[2 * n + 1])
            tensor = self._objects.get(handle, context, TENSOR)
            slot = slots[index]
            if tensor.dtype is not slot.dtype:
                raise _mismatch(index, f"is {slot.dtype.label}, the tensor has another type")
            if offset % slot.dtype.itemsize or offset + slot.nbytes > tensor.nbytes:
                raise _mismatch(
                    index, f"needs {slot.nbytes} bytes at {offset}, the tensor has {tensor.nbytes}"
                )
            addresses[index] = tensor.address + offset
        views = [
            self._memory.array(slot.shape, slot.dtype.label, addresses[i])
            if slot.nbytes
            else np.empty(slot.shape, slot.dtype.label)
            for i, slot in enumerate(slots)
        ]
        for i, slot in enumerate(slots):
            if slot.role is Role.INPUT:
                views[i].flags.writeable = False
        spans = [(addresses[i], addresses[i] + slot.nbytes) for i, slot in enumerate(slots)]
        steps: list[Step] = []
        for operation in code.plan:
            if len(steps) % _PORTION == _PORTION - 1:
                yield None
            steps.append(self._step(operation, views, spans))
        scratch = max((_scratch_bytes(step) for step in steps), default=0)
        return Launch(code, steps, scratch, self._memory.table)

    def _step(
        self,
        operation: kernels.PlannedOperation,
        views: Sequence[Array],
        spans: Sequence[tuple[int, int]],
    ) -> Step:
        slots = operation.operands
        written = [spans[slots[p]] for p in operation.writes]
        for a in range(len(written)):
            for b in range(a):
                if _overlap(written[a], written[b]):
                    raise Refused(
                        CommandStatus.BINDING_MISMATCH,
                        f"instruction {operation.index} writes two operands to the same memory",
                    )
        hazards = tuple(
            p for p in operation.reads if any(_overlap(spans[slots[p]], w) for w in written)
        )
        into = tuple((low, high - low) for low, high in written)
        return Step(operation, [views[slot] for slot in slots], hazards, into)

    def place(self, launch: Launch, scratch: int) -> None:
        """Lay the snapshots of each step out in scratch memory at device address ``scratch``."""
        for step in launch.steps:
            if not step.hazards:
                continue
            step.safe = list(step.arrays)
            at = scratch
            for p in step.hazards:
                array = step.arrays[p]
                step.safe[p] = self._memory.array(array.shape, array.dtype, at)
                at = aligned(at + array.nbytes)
            step.scratch = (scratch, at - scratch)

    def run(
        self, launch: Launch, cursor: int, repeat: int, attention: Callable[[], bool]
    ) -> Pauses[None]:
        """Run from the position in the cursor to the end; yields at tile boundaries when
        ``attention`` says that something else wants the engine.

        Raises:
            Unmapped: the function's memory is another by now than what the launch was resolved on.
            whatever a kernel raises.
        """
        for pause in self._run(launch, cursor, repeat, attention):
            yield pause
            self._require(launch)

    def _require(self, launch: Launch) -> None:
        if launch.table is not self._memory.table:
            raise Unmapped(f"resolved under epoch {launch.table.epoch}, which is over")

    def _run(
        self, launch: Launch, cursor: int, repeat: int, attention: Callable[[], bool]
    ) -> Pauses[None]:
        self._require(launch)
        u64 = self._state.u64
        at = (cursor + s.C_POSITION64) // 2
        mark = (cursor + s.C_SNAPSHOT64) // 2
        steps = launch.steps
        position = u64[at]
        turn, index, tile = position >> 32, position >> 20 & 0xFFF, position & 0xF_FFFF
        clock = time.perf_counter
        parallel = self._pool.cores > 1
        while turn < repeat:
            while index < len(steps):
                step = steps[index]
                operation = step.operation
                tiles = operation.tiles
                base = turn << 32 | index << 20
                arrays = step.arrays
                if step.hazards:
                    arrays = step.safe
                    key = (turn << 12 | index) + 1
                    if u64[mark] != key:
                        # Until the mark is there it may be copied again, as often as need be.
                        for p in step.hazards:
                            copying = _snapshot(arrays[p], step.arrays[p], attention)
                            yield from marking(copying, partial(self._memory.wrote, *step.scratch))
                        u64[mark] = key
                        self._state.count("snapshots")
                try:
                    while tile < tiles:
                        if parallel and step.tile_s > _PARALLEL_S and tile + 1 < tiles:
                            tile = self._side_by_side(step, arrays, base, at, tile, attention)
                            if tile < tiles:
                                self._wrote(step)
                                yield None
                            continue
                        began = clock()
                        operation.run_tile(arrays, tile)
                        step.tile_s = clock() - began
                        tile += 1
                        u64[at] = base | tile
                        if attention():
                            self._wrote(step)
                            yield None
                finally:
                    self._wrote(step)
                self._state.count("tiles", tiles)
                index += 1
                tile = 0
                if index < len(steps):  # the last one's successor is the next turn's first
                    u64[at] = turn << 32 | index << 20
            self._state.count("instructions", len(steps))
            turn += 1
            index = 0
            u64[at] = turn << 32
            if attention():
                yield None

    def _wrote(self, step: Step) -> None:
        for address, nbytes in step.written:
            self._memory.wrote(address, nbytes)

    def _side_by_side(
        self,
        step: Step,
        arrays: Sequence[Array],
        base: int,
        at: int,
        tile: int,
        attention: Callable[[], bool],
    ) -> int:
        u64 = self._state.u64

        def progress(low: int) -> None:
            u64[at] = base | low

        began = time.perf_counter()
        reached = self._pool.run(step.operation, arrays, tile, progress, attention)
        if reached > tile:
            # What is handed out although it is short goes back to one core with this.
            took = time.perf_counter() - began
            step.tile_s = took * min(self._pool.cores, reached - tile) / (reached - tile)
        return reached


def _snapshot(target: Array, source: Array, attention: Callable[[], bool]) -> Pauses[None]:
    """Copy a contiguous array in steps."""
    into, out = (a.reshape(-1).view(np.uint8) for a in (target, source))
    for at in range(0, len(out), _COPY_STEP):
        np.copyto(into[at : at + _COPY_STEP], out[at : at + _COPY_STEP])
        if attention():
            yield None


def _scratch_bytes(step: Step) -> int:
    return sum(aligned(step.arrays[p].nbytes) for p in step.hazards)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _mismatch(slot: int, text: str) -> Refused:
    return Refused(CommandStatus.BINDING_MISMATCH, f"slot {slot} {text}")
