"""LAUNCH: from a program and its bindings to tiles on device memory.

What can be computed once is: validation and planning at upload (kernels.prepare), arrays and
hazards when a set of bindings is first launched. The loop that is left moves one 64-bit position
(repeat, operation, tile) in the state memfd, from which any worker can go on.

An operand that is read and overlaps one that is written by the same operation (SGD in place,
aliased bindings) is first copied to scratch memory; the copy is marked valid in the cursor, and
then read in its stead, by this worker and by the next. So a tile never reads what a tile writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from accelvisor.abi.programs import Role
from accelvisor.abi.status import CommandStatus
from accelvisor.function.cache import Cache
from accelvisor.function.codes import Code, aligned
from accelvisor.function.objects import TENSOR, Memory, Object, Objects, Refused
from accelvisor.function.pauses import Pauses, marking
from accelvisor.function.pool import Pool
from accelvisor.function.state import State
from accelvisor.isolation.segments import SegmentTable, Unmapped
from accelvisor.kernels import programs as kernels
from accelvisor.limits import MIB

#: Operations and slots (a few hundred bytes each) of cached launches.
_CACHED_LAUNCHES = 32_768
#: Operations that are bound between two pauses.
_PORTION = 64
#: What a snapshot copies between two looks at whether something else wants the engine.
_COPY_STEP = 4 * MIB
#: A tile shorter than this is not worth handing to another core.
_PARALLEL_S = 60e-6

Array = npt.NDArray[Any]


class Carrier(Protocol):
    """The function's links, as an operation uses them. Called from any engine's thread."""

    def begin(self, source: int, target: int) -> None:
        """A transfer begins, or goes on. Raises Refused LINK_DOWN."""

    def end(self, source: int, target: int, nbytes: int) -> None:
        """It is complete with so many bytes, or interrupted (0)."""


@dataclass(slots=True)
class Step:
    """One operation on concrete memory. ``hazards`` are positions that need a snapshot."""

    operation: kernels.PlannedOperation
    arrays: list[Array]
    hazards: tuple[int, ...]
    #: (address, bytes) of the operands that are written
    written: tuple[tuple[int, int], ...] = ()
    #: seconds that a tile took when it was last looked at; 0 before
    tile_s: float = 0.0


class Kept(NamedTuple):
    """Where a run keeps operands that it overwrites: the step's arrays with scratch in their place,
    and that scratch as (address, bytes).
    """

    arrays: list[Array]
    span: tuple[int, int]


class Progress(NamedTuple):
    """Where a run writes down how far it is: 64-bit words of the state."""

    position: int
    snapshot: int


@dataclass(slots=True)
class Launch:
    """A program on concrete memory: addresses that were looked up in ``table``."""

    code: Code
    steps: list[Step]
    scratch: int  # bytes, 0 when no operation has a hazard
    table: SegmentTable


class Launcher:
    """Resolves and runs launches. Only the engine's thread calls it, but for :meth:`run`.

    Args:
        fabric: is asked before data crosses a link.
    """

    def __init__(
        self, state: State, memory: Memory, objects: Objects, fabric: Carrier
    ) -> None:
        self._state = state
        self._memory = memory
        self._objects = objects
        self._fabric = fabric
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

    def place(self, launch: Launch, scratch: int) -> dict[int, Kept]:
        """Lay the snapshots of the steps that need one out in memory at address ``scratch``. Of one
        run alone: another of the same launch may go on beside it.
        """
        places = {}
        for n, step in enumerate(launch.steps):
            if not step.hazards:
                continue
            arrays = list(step.arrays)
            at = scratch
            for p in step.hazards:
                array = step.arrays[p]
                arrays[p] = self._memory.array(array.shape, array.dtype, at)
                at = aligned(at + array.nbytes)
            places[n] = Kept(arrays, (scratch, at - scratch))
        return places

    def run(
        self,
        launch: Launch,
        kept: Mapping[int, Kept],
        progress: Progress,
        repeat: int,
        attention: Callable[[], bool],
        pool: Pool,
    ) -> Pauses[None]:
        """Run from what ``progress`` says to the end, on the cores of ``pool``; yields at tile
        boundaries when ``attention`` says that something else wants the engine.

        Raises:
            Unmapped: the function's memory is another by now than what the launch was resolved on.
            Refused: LINK_DOWN, a transfer over a link that is not up.
            whatever a kernel raises.
        """
        for pause in self._run(launch, kept, progress, repeat, attention, pool):
            yield pause
            self._require(launch)

    def _require(self, launch: Launch) -> None:
        if launch.table is not self._memory.table:
            raise Unmapped(f"resolved under epoch {launch.table.epoch}, which is over")

    def _run(
        self,
        launch: Launch,
        kept: Mapping[int, Kept],
        progress: Progress,
        repeat: int,
        attention: Callable[[], bool],
        pool: Pool,
    ) -> Pauses[None]:
        self._require(launch)
        u64 = self._state.u64
        at, mark = progress
        steps = launch.steps
        position = u64[at]
        turn, index, tile = position >> 32, position >> 20 & 0xFFF, position & 0xF_FFFF
        clock = time.perf_counter
        parallel = pool.cores > 1
        while turn < repeat:
            while index < len(steps):
                step = steps[index]
                operation = step.operation
                tiles = operation.tiles
                base = turn << 32 | index << 20
                arrays = step.arrays
                if operation.link is not None:
                    self._fabric.begin(*operation.link)
                if step.hazards:
                    arrays, scratch = kept[index]
                    key = (turn << 12 | index) + 1
                    if u64[mark] != key:
                        # Until the mark is there it may be copied again, as often as need be.
                        for p in step.hazards:
                            copying = _snapshot(arrays[p], step.arrays[p], attention)
                            yield from marking(copying, partial(self._memory.wrote, *scratch))
                        u64[mark] = key
                        self._state.count("snapshots")
                try:
                    while tile < tiles:
                        if parallel and step.tile_s > _PARALLEL_S and tile + 1 < tiles:
                            tile = self._side_by_side(step, arrays, base, at, tile, attention, pool)
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
                    if operation.link is not None:
                        sent = operation.crossing(step.arrays) if tile >= tiles else 0
                        self._fabric.end(*operation.link, sent)
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
        pool: Pool,
    ) -> int:
        u64 = self._state.u64

        def progress(low: int) -> None:
            u64[at] = base | low

        began = time.perf_counter()
        reached = pool.run(step.operation, arrays, tile, progress, attention)
        if reached > tile:
            # What is handed out although it is short goes back to one core with this.
            took = time.perf_counter() - began
            step.tile_s = took * min(pool.cores, reached - tile) / (reached - tile)
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
