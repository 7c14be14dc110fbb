"""Contexts and their objects (tensors, programs), and the device memory that they occupy.

The object table in the state memfd is the only truth: the allocator and the lookup index are
derived from it, so a replaced worker allocates exactly as its predecessor would have (lowest free
slot, first fit). Rules kept at every instant:

* free device memory is zero: memory is scrubbed before its record is released, so no owner ever
  sees another's bytes, and equal states are equal files;
* a handle is ``(generation + 1) << 32 | slot`` and belongs to one context; the generation moves
  when a record is released, so a stale handle never names a new object;
* extents are 4 KiB aligned: whole pages can be scrubbed by punching a hole, which also returns
  the host's memory, and page-wise dirty tracking never mixes two objects.
"""

from __future__ import annotations

import heapq
import math
import mmap
import struct
from bisect import bisect_left, insort
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelvisor.abi.dtypes import DType
from accelvisor.abi.registers import PAGE
from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as s
from accelvisor.function.pauses import Pauses, finish
from accelvisor.function.state import State
from accelvisor.function.track import Track, data_ranges
from accelvisor.isolation.segments import SegmentTable
from accelvisor.limits import LIMITS

Array = npt.NDArray[Any]

TENSOR = 1
PROGRAM = 2
GRAPH = 3
KINDS = {TENSOR: "tensor", PROGRAM: "program", GRAPH: "graph"}

#: kind, generation, context, dtype, rank, -, 8 dims, address, bytes, extent, SHA-256
RECORD = struct.Struct("<IIIBBH8IQQQ32s")
#: Below this a scrub writes zeros; above, giving the pages back is cheaper.
_PUNCH_BYTES = 256 * 1024
#: What is given back in one step: a millisecond or two, in which the interpreter is kept.
_PUNCH_STEP = 2 * 1024 * 1024
_ZERO_PAGE = bytes(PAGE)


class Refused(Exception):  # noqa: N818 - a status on its way to the guest
    """A command that cannot be carried out; nothing was changed."""

    def __init__(self, status: CommandStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Object:
    """One live record. ``nbytes`` of content at device address ``address``, ``extent`` occupied."""

    slot: int
    kind: int
    generation: int
    context: int
    dtype: DType | None
    shape: tuple[int, ...]
    address: int
    nbytes: int
    extent: int
    digest: bytes

    @property
    def handle(self) -> int:
        """What the guest calls it."""
        return (self.generation + 1) << 32 | self.slot


class Memory:
    """Device memory: first-fit allocation over sorted live extents, scrubbing, and the gate that
    every access passes: ``part`` and ``array`` hold it against the segment table.

    Who writes into what they return says so to ``wrote`` (address, bytes), after the write and
    before the engine may be frozen. ``view`` is for those who save, load and compare all of it.
    """

    def __init__(self, mapped: mmap.mmap, table: SegmentTable, track: Track) -> None:
        self.map = mapped
        self.view = memoryview(mapped)
        self.table = table
        self.wrote = track.memory
        self._live: list[tuple[int, int]] = []
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are the function's: addresses below."""
        return self.table.nbytes

    def part(self, address: int, nbytes: int) -> memoryview:
        """Bytes of the device's memory.

        Raises:
            Unmapped: not all of them are the function's.
        """
        self.table.check(address, nbytes, self.table.epoch)
        return self.view[address : address + nbytes]

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike, address: int) -> Array:
        """A C-contiguous array in the device's memory.

        Raises:
            Unmapped: not all of it is the function's.
        """
        dtype = np.dtype(dtype)
        self.table.check(address, math.prod(shape) * dtype.itemsize, self.table.epoch)
        return np.ndarray(shape, dtype, self.map, address)

    @property
    def used(self) -> int:
        """Bytes of live extents."""
        return self._used

    def find(self, nbytes: int) -> int:
        """Address of the first gap of ``nbytes`` (rounded up to pages).

        Raises:
            Refused: OUT_OF_MEMORY.
        """
        need = pages(nbytes)
        at = 0
        for start, size in self._live:
            if start - at >= need:
                return at
            at = start + size
        if self.nbytes - at >= need:
            return at
        raise Refused(
            CommandStatus.OUT_OF_MEMORY,
            f"no {need} contiguous bytes are free; {self.nbytes - self._used} of {self.nbytes} are",
        )

    def claim(self, address: int, extent: int) -> None:
        """Mark an extent as live. Empty extents occupy nothing."""
        if extent:
            insort(self._live, (address, extent))
            self._used += extent

    def release(self, address: int, extent: int) -> None:
        """The extent is free again. The caller has scrubbed it."""
        if extent:
            del self._live[bisect_left(self._live, (address, extent))]
            self._used -= extent

    def scrub(self, address: int, extent: int) -> Pauses[None]:
        """Zero an extent, in steps; repeatable, and quick over what was scrubbed before."""
        if extent < _PUNCH_BYTES:
            self.part(address, extent)[:] = bytes(extent)
            self.wrote(address, extent)
            return
        self.part(address, extent)
        for at in range(address, address + extent, _PUNCH_STEP):
            step = min(_PUNCH_STEP, address + extent - at)
            self.map.madvise(mmap.MADV_REMOVE, at, step)
            self.wrote(at, step)
            yield None

    def extents(self) -> list[tuple[int, int]]:
        """Live (address, bytes), sorted."""
        return list(self._live)

    def forget(self) -> None:
        """Forget every extent; the object table is about to be read anew."""
        self._live.clear()
        self._used = 0

    def replace(self, mapped: mmap.mmap, table: SegmentTable) -> None:
        """Another file, or more or less of it, is the device's memory from here on; the object
        table is read anew next.
        """
        self.table = table
        self.view.release()
        self.map, old = mapped, self.map
        self.view = memoryview(mapped)
        self.forget()
        with suppress(BufferError):  # arrays of launches that were cached keep it until they go
            old.close()

    def scrub_all(self) -> None:
        """Zero everything, and forget every extent."""
        finish(self.scrub(0, self.nbytes))
        self.forget()


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return (nbytes + PAGE - 1) // PAGE * PAGE


class Objects:
    """The object table. Creating and destroying take the slot as an argument, so that a command
    that is executed again after a crash does what it did before.
    """

    def __init__(self, state: State, memory: Memory) -> None:
        self._state = state
        self._memory = memory
        self._live: dict[int, Object] = {}
        #: Free slots below ``_fresh``, a heap; those from there on are all free.
        self._free: list[int] = []
        self._fresh = 0
        self.version = 0  # moves when an object comes or goes; resolved launches depend on it
        self.reload()

    def reload(self) -> None:
        """Read the table anew. The memory must have forgotten its extents.

        A record that is not live and not clean was being made or cleared when a worker died; as
        nothing was allocated since, its memory can be scrubbed (again).
        """
        self._live.clear()
        self._free.clear()
        self._fresh = 0
        self.version += 1
        half = []
        step = PAGE // s.OBJECT_BYTES
        # A page that was never written is not read: reading would make it, a megabyte in all.
        table = data_ranges(self._state.fd, s.OBJECTS_AT, s.object_at(s.OBJECTS))
        written = {page for a, b in table for page in range(a // PAGE, (b + PAGE - 1) // PAGE)}
        for first in range(0, s.OBJECTS, step):
            at = s.object_at(first)
            if at // PAGE not in written or bytes(self._state.u8[at : at + PAGE]) == _ZERO_PAGE:
                continue
            self._free.extend(range(self._fresh, first))
            self._fresh = first + step
            for slot in range(first, first + step):
                at = s.object_at(slot)
                if self._state.u32[at // 4]:
                    found = self._load(slot)
                    self._live[slot] = found
                    self._memory.claim(found.address, found.extent)
                    continue
                self._free.append(slot)
                if any(self._state.u8[at + 8 : at + s.OBJECT_BYTES]):
                    half.append(slot)
        for slot in half:
            self.abandon(slot)

    def __len__(self) -> int:
        return len(self._live)

    def of(self, context: int) -> list[Object]:
        """A context's objects in slot order."""
        return [o for _, o in sorted(self._live.items()) if o.context == context]

    def get(self, handle: int, context: int, kind: int) -> Object:
        """The object that a guest names.

        Raises:
            Refused: BAD_HANDLE.
        """
        found = self._live.get(handle & 0xFFFF_FFFF)
        if found is None or found.handle != handle or found.context != context:
            raise Refused(CommandStatus.BAD_HANDLE, f"handle {handle:#x} names no object of yours")
        if found.kind != kind:
            raise Refused(CommandStatus.BAD_HANDLE, f"handle {handle:#x} names no {KINDS[kind]}")
        return found

    def find(self, handle: int, context: int, kind: int) -> Object | None:
        """As :meth:`get`, and None where there is none."""
        found = self._live.get(handle & 0xFFFF_FFFF)
        if found is None or (found.handle, found.context, found.kind) != (handle, context, kind):
            return None
        return found

    def at(self, slot: int) -> Object | None:
        """The live object in a slot."""
        return self._live.get(slot)

    def next_slot(self) -> int:
        """The slot that the next object takes.

        Raises:
            Refused: TOO_MANY_OBJECTS.
        """
        if self._free:
            return self._free[0]
        if self._fresh == s.OBJECTS:
            raise Refused(CommandStatus.TOO_MANY_OBJECTS, f"{s.OBJECTS} objects exist")
        return self._fresh

    def create(
        self,
        slot: int,
        context: int,
        kind: int,
        nbytes: int,
        extent: int,
        *,
        dtype: DType | None = None,
        shape: tuple[int, ...] = (),
        digest: bytes = b"",
        content: bytes = b"",
    ) -> Object:
        """Make an object in ``slot``; ``extent`` bytes are reserved and start with ``content``.

        Raises:
            Refused: OUT_OF_MEMORY, nothing was changed.
        """
        address = self._memory.find(extent) if extent else 0
        at = s.object_at(slot)
        generation = self._state.u32[at // 4 + 1]
        dims = shape + (0,) * (8 - len(shape))
        RECORD.pack_into(
            self._state.u8, at, 0, generation, context, dtype or 0, len(shape), 0, *dims,
            address, nbytes, pages(extent), digest.ljust(32, b"\0"),
        )  # fmt: skip
        self._memory.part(address, len(content))[:] = content
        self._memory.wrote(address, len(content))
        self._state.u32[at // 4] = kind
        self.version += 1
        made = self._load(slot)
        self._live[slot] = made
        if self._free:
            heapq.heappop(self._free)
        else:
            self._fresh += 1
        self._memory.claim(made.address, made.extent)
        return made

    def destroy(self, slot: int) -> Pauses[None]:
        """Scrub in steps, then release; a slot that is free already is left alone. The caller sees
        to it that nobody uses the object meanwhile.
        """
        gone = self._live.get(slot)
        if gone is None:
            return
        yield from self._memory.scrub(gone.address, gone.extent)
        self._clear(slot, gone.generation + 1)
        self._memory.release(gone.address, gone.extent)
        self.version += 1
        del self._live[slot]
        heapq.heappush(self._free, slot)

    def destroy_context(self, context: int) -> Pauses[None]:
        """Destroy everything of a context, in steps."""
        for found in self.of(context):
            yield from self.destroy(found.slot)
            yield None

    def destroy_all(self) -> None:
        """Everything, at a reset: one scrub of the whole memory instead of one for each object."""
        self._memory.scrub_all()
        for slot, gone in self._live.items():
            self._clear(slot, gone.generation + 1)
        self._live.clear()
        self._free.clear()
        self._fresh = 0
        self.version += 1

    def abandon(self, slot: int) -> None:
        """Clear a record that is not live, and the memory that it names."""
        if slot not in self._live:
            half = self._load(slot)
            finish(self._memory.scrub(half.address, half.extent))
            self._clear(slot, half.generation)

    def _clear(self, slot: int, generation: int) -> None:
        at = s.object_at(slot)
        # Kind 0 and the next generation in one store: a crash cannot come between the two.
        self._state.u64[at // 8] = (generation & 0x7FFF_FFFF) << 32
        self._state.zero(at + 8, s.OBJECT_BYTES - 8)

    def _load(self, slot: int) -> Object:
        kind, generation, context, dtype, rank, _, *rest = RECORD.unpack_from(
            self._state.u8, s.object_at(slot)
        )
        address, nbytes, extent, digest = rest[8:]
        return Object(
            slot, kind, generation, context, DType(dtype) if dtype else None, tuple(rest[:rank]),
            address, nbytes, extent, digest,
        )  # fmt: skip


def check_shape(dtype: int, rank: int, dims: tuple[int, ...]) -> tuple[DType, tuple[int, ...], int]:
    """A tensor descriptor's type, shape and bytes.

    Raises:
        Refused: BAD_DESCRIPTOR or LIMIT.
    """
    try:
        kind = DType(dtype)
    except ValueError:
        raise Refused(CommandStatus.BAD_DESCRIPTOR, f"unknown dtype {dtype}") from None
    if rank > LIMITS.tensor_rank:
        raise Refused(
            CommandStatus.BAD_DESCRIPTOR, f"rank {rank}, the limit is {LIMITS.tensor_rank}"
        )
    if any(dims[rank:]):
        raise Refused(CommandStatus.BAD_DESCRIPTOR, "dims beyond the rank are not zero")
    nbytes = kind.itemsize
    for dim in dims[:rank]:
        nbytes *= dim
    if nbytes > LIMITS.tensor_bytes:
        raise Refused(CommandStatus.LIMIT, f"{nbytes} bytes, the limit is {LIMITS.tensor_bytes}")
    return kind, dims[:rank], nbytes


class Contexts:
    """Context records: who opened it (as the guest says), on which queue, and its last trouble."""

    def __init__(self, state: State) -> None:
        self._state = state

    def open(self, context: int, queue: int, pid: int, name: bytes) -> None:
        """Fill a free record."""
        at = s.context_at(context)
        struct.pack_into("<II", self._state.u8, at + s.X_PID, pid, 0)
        self._state.u8[at + s.X_NAME : at + s.X_NAME + s.X_NAME_BYTES] = name.ljust(
            s.X_NAME_BYTES, b"\0"
        )[: s.X_NAME_BYTES]
        self._state.u32[at // 4] = queue + 1

    def free(self) -> int:
        """The lowest free context number.

        Raises:
            Refused: TOO_MANY_CONTEXTS.
        """
        for context in range(s.CONTEXTS):
            if not self._state.u32[s.context_at(context) // 4]:
                return context
        raise Refused(CommandStatus.TOO_MANY_CONTEXTS, f"{s.CONTEXTS} contexts are open")

    def close(self, context: int) -> None:
        """Clear the record; its objects are gone already."""
        at = s.context_at(context)
        self._state.u32[at // 4] = 0
        self._state.zero(at, s.CONTEXT_BYTES)

    def owner(self, context: int) -> int | None:
        """The queue that opened a context; None when it is free."""
        queue = self._state.u32[s.context_at(context) // 4]
        return queue - 1 if queue else None

    def identity(self, context: int) -> tuple[int, str]:
        """(pid, process name) as the guest gave them."""
        at = s.context_at(context)
        raw = bytes(self._state.u8[at + s.X_NAME : at + s.X_NAME + s.X_NAME_BYTES])
        pid = self._state.u32[(at + s.X_PID) // 4]
        return pid, raw.rstrip(b"\0").decode("utf-8", "replace")

    def note(self, context: int, status: int, cookie: int, text: str) -> None:
        """Remember a refusal or fault; the guest reads it with Query.FAULT."""
        at = s.context_at(context)
        raw = text.encode()[: s.X_TEXT_BYTES]
        self._state.u8[at + s.X_TEXT : at + s.X_TEXT + s.X_TEXT_BYTES] = raw.ljust(
            s.X_TEXT_BYTES, b"\0"
        )
        self._state.u32[(at + s.X_COOKIE) // 4] = cookie
        self._state.u32[(at + s.X_FAULT) // 4] = status

    def trouble(self, context: int) -> tuple[int, int, str]:
        """(status, cookie, text) of the last refusal or fault; status 0 when there was none."""
        at = s.context_at(context)
        raw = bytes(self._state.u8[at + s.X_TEXT : at + s.X_TEXT + s.X_TEXT_BYTES])
        return (
            self._state.u32[(at + s.X_FAULT) // 4],
            self._state.u32[(at + s.X_COOKIE) // 4],
            raw.rstrip(b"\0").decode("utf-8", "replace"),
        )
