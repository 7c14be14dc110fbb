"""What each command does. Decoding never trusts the guest; executing never trusts that it is the
first try: a command whose worker died runs again, led by what its cursor remembers.

A handler returns ``(status, value, cycles)``, or a generator of pauses that returns it. It raises
Refused (nothing was changed), or DmaFault or Fault (the context stops). Between two pauses lie
milliseconds at most, whatever the guest asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import Opcode, Space, Transfer
from accelvisor.abi.registers import PAGE
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import NumericError, ProgramError
from accelvisor.function import state as s
from accelvisor.function.dma import Dma, copy
from accelvisor.function.launch import Codes, Launcher
from accelvisor.function.objects import (
    PROGRAM,
    TENSOR,
    Contexts,
    Memory,
    Objects,
    Refused,
    check_shape,
)
from accelvisor.function.pauses import Pauses, marking
from accelvisor.function.port import Port
from accelvisor.function.query import Queries
from accelvisor.function.state import State
from accelvisor.kernels.declare import BYTES_PER_CYCLE, ISSUE_CYCLES
from accelvisor.limits import KIB, LIMITS, MIB

Result: TypeAlias = tuple[int, int, int]
T = TypeVar("T")

#: Bytes that a copy moves between two looks at whether something else wants the engine; a segment
#: of a scatter list counts as so many more, however short it is.
_COPY_STEP = 4 * MIB
_SEGMENT_BYTES = 64 * KIB
#: Segments that are summed up, or checked against the window, between two pauses.
_PORTION = 4096
_SEGMENTS = _COPY_STEP // _SEGMENT_BYTES
_BODY = 8  # operands begin after the header
# Plain numbers: an operation on a member of an enum takes as long as a small copy.
_SCATTER = int(Transfer.SCATTER)
_GUEST = int(Space.GUEST)
_WINDOW = int(Space.WINDOW)


class Fault(Exception):  # noqa: N818 - a status on its way to the guest
    """The command stops its context."""

    def __init__(self, status: CommandStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Where(NamedTuple):
    """Which command a handler works for: its queue, and words of its queue record and cursor."""

    queue: int
    record: int
    cursor: int


class Spans:
    """A memory operand's (address, bytes) spans, as the guest listed them: 16 bytes a span."""

    def __init__(self, raw: bytearray | bytes) -> None:
        self._words = memoryview(raw).cast("Q")

    def __len__(self) -> int:
        return len(self._words) // 2

    def __iter__(self) -> Iterator[tuple[int, int]]:
        words = self._words
        for n in range(0, len(words), 2):
            yield words[n], words[n + 1]


class Commands:
    """Handlers by opcode. Runs on the engine's thread alone."""

    def __init__(
        self,
        state: State,
        window: memoryview,
        staging: int,
        memory: Memory,
        objects: Objects,
        contexts: Contexts,
        codes: Codes,
        launcher: Launcher,
        queries: Queries,
        dma: Dma,
        port: Port,
        attention: Callable[[], bool],
    ) -> None:
        self._state = state
        self._u32 = state.u32
        self._u64 = state.u64
        self._window = window
        self._staging = staging
        self._memory = memory
        self._objects = objects
        self._contexts = contexts
        self._codes = codes
        self._launcher = launcher
        self._queries = queries
        self._dma = dma
        self._port = port
        self._attention = attention
        self.table: dict[int, Callable[[Where, bytes], Result | Pauses[Result]]] = {
            Opcode.CONTEXT_OPEN: self._open,
            Opcode.CONTEXT_CLOSE: self._close,
            Opcode.TENSOR_CREATE: self._create,
            Opcode.TENSOR_DESTROY: self._destroy_tensor,
            Opcode.PROGRAM_LOAD: self._load,
            Opcode.PROGRAM_UNLOAD: self._unload,
            Opcode.COPY_IN: self._copy_in,
            Opcode.COPY_OUT: self._copy_out,
            Opcode.LAUNCH: self._launch,
            Opcode.QUERY: self._query,
        }

    def context(self, where: Where) -> int:
        """The queue's context number.

        Raises:
            Refused: NO_CONTEXT.
        """
        number = self._u32[where.record + s.Q_CONTEXT]
        if not number:
            raise Refused(CommandStatus.NO_CONTEXT, "open a context first")
        return number - 1

    # --- contexts ---------------------------------------------------------------------------------

    def _open(self, where: Where, entry: bytes) -> Result:
        u32 = self._u32
        if not u32[where.cursor + s.C_INTENT]:
            if u32[where.record + s.Q_CONTEXT]:
                raise Refused(CommandStatus.CONTEXT_EXISTS, "the queue has a context already")
            u32[where.cursor + s.C_INTENT] = self._contexts.free() + 1
        number = u32[where.cursor + s.C_INTENT] - 1
        pid, name = abi.OPEN.unpack_from(entry, _BODY)
        self._contexts.open(number, where.queue, pid, name)
        u32[where.record + s.Q_CONTEXT] = number + 1
        return 0, number, 0

    def _close(self, where: Where, entry: bytes) -> Pauses[Result]:
        u32 = self._u32
        if not u32[where.cursor + s.C_INTENT]:
            u32[where.cursor + s.C_INTENT] = self.context(where) + 1
        yield from self.close_context(where.record, u32[where.cursor + s.C_INTENT] - 1)
        return 0, 0, 0

    def close_context(self, record: int, number: int) -> Pauses[None]:
        """Destroy a context with all its objects, in steps; repeatable."""
        yield from self._attentively(self._objects.destroy_context(number))
        self._contexts.close(number)
        self._u32[record + s.Q_CONTEXT] = 0

    def _attentively(self, steps: Pauses[T]) -> Pauses[T]:
        """Pause between steps only when something else wants the engine, or there is a wait."""
        while True:
            try:
                pause = next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result
            if pause is not None or self._attention():
                yield pause

    # --- objects ----------------------------------------------------------------------------------

    def _create(self, where: Where, entry: bytes) -> Result:
        context = self.context(where)
        dtype, rank, _, *dims = abi.CREATE.unpack_from(entry, _BODY)
        kind, shape, nbytes = check_shape(dtype, rank, tuple(dims))
        slot = self._intend(where)
        made = self._objects.create(slot, context, TENSOR, nbytes, nbytes, dtype=kind, shape=shape)
        return 0, made.handle, 0

    def _load(self, where: Where, entry: bytes) -> Pauses[Result]:
        context = self.context(where)
        source = abi.parse_memory(entry[_BODY : _BODY + abi.MEMORY.size])
        if source.length > LIMITS.program_bytes:
            raise Refused(
                CommandStatus.LIMIT,
                f"a program of {source.length} bytes, the limit is {LIMITS.program_bytes}",
            )
        raw = yield from self._fetch(source)
        try:
            digest, code = yield from self._codes.load(raw)
        except ProgramError as error:
            text = f"{error.where}: {error.message}" if error.where else error.message
            raise Refused(CommandStatus.PROGRAM_INVALID, text) from error
        slot = self._intend(where)
        made = self._objects.create(
            slot, context, PROGRAM, len(raw), code.extent, digest=digest, content=raw
        )
        return 0, made.handle, 0

    def _intend(self, where: Where) -> int:
        """Write down which slot the command is about to create in. Creation follows at once."""
        slot = self._objects.next_slot()
        self._u32[where.cursor + s.C_INTENT] = slot + 1
        return slot

    def _destroy_tensor(self, where: Where, entry: bytes) -> Pauses[Result]:
        return self._destroy(where, entry, TENSOR)

    def _unload(self, where: Where, entry: bytes) -> Pauses[Result]:
        return self._destroy(where, entry, PROGRAM)

    def _destroy(self, where: Where, entry: bytes, kind: int) -> Pauses[Result]:
        word = where.cursor + s.C_INTENT
        context = self.context(where)
        if not self._u32[word]:
            (handle,) = abi.HANDLE.unpack_from(entry, _BODY)
            self._u32[word] = self._objects.get(handle, context, kind).slot + 1
        yield from self._attentively(self._objects.destroy(self._u32[word] - 1))
        return 0, 0, 0

    # --- memory operands --------------------------------------------------------------------------

    def _spans(self, m: abi.Memory, write: bool) -> Pauses[Spans]:
        """Resolve a memory operand to checked (address, bytes) spans.

        The list is copied out of the guest's memory once; what is checked is what is used.
        """
        if m.space not in (_GUEST, _WINDOW) or m.transfer & ~_SCATTER:
            raise Refused(
                CommandStatus.BAD_DESCRIPTOR, f"space {m.space}, transfer {m.transfer:#x}"
            )
        if m.transfer & _SCATTER:
            spans = yield from self._list(m)
        elif m.count:
            raise Refused(CommandStatus.BAD_DESCRIPTOR, "a segment count without SCATTER")
        else:
            spans = Spans(abi.SEGMENT.pack(m.address, m.length))
        if m.space == _GUEST:
            # One span that moves in one step is checked by that step.
            if len(spans) > 1 or m.length > _COPY_STEP:
                yield from self._attentively(self._dma.check(spans, write))
            return spans
        for n, (address, count) in enumerate(spans):
            self._check_window(address, count)
            if n % _PORTION == _PORTION - 1 and self._attention():
                yield None
        return spans

    def _list(self, m: abi.Memory) -> Pauses[Spans]:
        """A scatter list. Its segments together are as long as the operand says."""
        if not 1 <= m.count <= LIMITS.scatter_segments:
            raise Refused(
                CommandStatus.LIMIT, f"{m.count} segments, the limit is {LIMITS.scatter_segments}"
            )
        raw = bytearray(m.count * abi.SEGMENT.size)
        yield from self._port.passing(len(raw))
        yield from self._move(m.space, m.address, memoryview(raw), write=False)
        spans = Spans(raw)
        total = 0
        for n, (_, count) in enumerate(spans):
            total += count
            if n % _PORTION == _PORTION - 1 and self._attention():
                yield None
        if total != m.length:
            raise Refused(
                CommandStatus.BAD_DESCRIPTOR,
                f"the segments hold {total} bytes, the operand {m.length}",
            )
        return spans

    def _check_window(self, address: int, count: int) -> None:
        if not self._staging <= address <= len(self._window) - count:
            raise Fault(
                CommandStatus.BAD_ADDRESS, f"{count} bytes at {address:#x} leave the staging area"
            )

    def _move(self, space: int, address: int, view: memoryview, *, write: bool) -> Pauses[None]:
        """One span between the guest's memory and ``view`` (written to the guest, or filled)."""
        if space == _GUEST:
            yield from (self._dma.write if write else self._dma.read)(address, view)
            return
        self._check_window(address, len(view))
        window = self._window[address : address + len(view)]
        if write:
            copy(window, view)
        else:
            copy(view, window)

    def _fetch(self, source: abi.Memory) -> Pauses[bytes]:
        """A small memory operand, whole."""
        raw = bytearray(source.length)
        at = 0
        spans = yield from self._spans(source, write=False)
        for n, (address, count) in enumerate(spans):
            part = memoryview(raw)[at : at + count]
            yield from self._port.passing(count)
            yield from self._move(source.space, address, part, write=False)
            at += count
            if n % _SEGMENTS == _SEGMENTS - 1 and self._attention():
                yield None
        return bytes(raw)

    # --- copies -----------------------------------------------------------------------------------

    def _copy_in(self, where: Where, entry: bytes) -> Result | Pauses[Result]:
        return self._copy(where, entry, write=False)

    def _copy_out(self, where: Where, entry: bytes) -> Result | Pauses[Result]:
        return self._copy(where, entry, write=True)

    def _copy(self, where: Where, entry: bytes, *, write: bool) -> Result | Pauses[Result]:
        context = self.context(where)
        handle, offset, raw = abi.COPY.unpack_from(entry, _BODY)
        tensor = self._objects.get(handle, context, TENSOR)
        m = abi.parse_memory(raw)
        if offset > tensor.nbytes or m.length > tensor.nbytes - offset:
            raise Refused(
                CommandStatus.BUFFER_TOO_SMALL,
                f"{m.length} bytes at {offset}, the tensor has {tensor.nbytes}",
            )
        device = tensor.address + offset
        if m.space == _GUEST and not m.transfer and not m.count and m.length <= _COPY_STEP:
            # By far the most frequent: one span that moves, and is checked, in one step.
            part = self._memory.part(device, m.length)
            dma, port = self._dma, self._port
            moves = dma.write_files if write else dma.read_files
            if port.holds(m.length) and moves(m.address, part):
                port.take(m.length)
                if not write:
                    self._memory.wrote(device, m.length)
                return self._copied(m.length, write)
        return self._copy_spans(where, m, device, write)

    def _copied(self, nbytes: int, write: bool) -> Result:
        self._state.count("bytes_out" if write else "bytes_in", nbytes)
        return 0, nbytes, ISSUE_CYCLES + -(-nbytes // BYTES_PER_CYCLE)

    def _copy_spans(
        self, where: Where, m: abi.Memory, device: int, write: bool
    ) -> Pauses[Result]:
        """The general case: any number of spans, from the position in the cursor on."""
        spans = yield from self._spans(m, write)
        done_at = (where.cursor + s.C_POSITION64) // 2
        skip = self._u64[done_at]
        stride = self._dma.stride if m.space == _GUEST else _whole
        passed = 0
        since = 0
        for address, count in spans:
            at = max(0, min(count, skip - passed))
            while at < count:
                step = stride(address + at, min(count - at, self._port.step))
                here = device + passed + at
                turn = self._port.take(step)
                if turn is not None:
                    yield turn
                part = self._memory.part(here, step)
                moving = self._move(m.space, address + at, part, write=write)
                if not write:
                    moving = marking(moving, partial(self._memory.wrote, here, step))
                yield from moving
                at += step
                if at < count:
                    self._u64[done_at] = passed + at
                    if self._attention():
                        yield None
            passed += count
            since += count + _SEGMENT_BYTES
            if since >= _COPY_STEP:
                since = 0
                self._u64[done_at] = max(skip, passed)
                if self._attention():
                    yield None
        return self._copied(m.length, write)

    # --- launch -----------------------------------------------------------------------------------

    def _launch(self, where: Where, entry: bytes) -> Pauses[Result]:
        context = self.context(where)
        handle, repeat, count, raw = abi.LAUNCH.unpack_from(entry, _BODY)
        program = self._objects.get(handle, context, PROGRAM)
        code = yield from self._codes.of(program, self._memory)
        if not repeat:
            raise Refused(CommandStatus.BAD_DESCRIPTOR, "repeat is 0")
        if count != len(code.arguments):
            raise Refused(
                CommandStatus.BINDING_MISMATCH,
                f"{count} bindings, the program has {len(code.arguments)} arguments",
            )
        bindings = yield from self._bindings(where, abi.parse_memory(raw), count)
        launch = yield from self._attentively(
            self._launcher.resolve(program, context, code, bindings)
        )
        if launch.scratch:
            self._launcher.place(launch, self._scratch(where, launch.scratch))
        try:
            yield from self._launcher.run(launch, where.cursor, repeat, self._attention)
        except NumericError as error:
            raise Fault(CommandStatus.NUMERIC, error.message) from error
        self._state.count("launches")
        return 0, 0, (code.cycles * repeat) & 0xFFFF_FFFF_FFFF_FFFF

    def _bindings(self, where: Where, source: abi.Memory, count: int) -> Pauses[bytes]:
        """The bindings: fetched once, then kept in the state, the guest may change its own."""
        at = s.bindings_at(where.queue)
        size = count * abi.BINDING.size
        if not self._u32[where.cursor + s.C_BINDINGS]:
            if source.length != size:
                raise Refused(
                    CommandStatus.BAD_DESCRIPTOR, f"{source.length} bytes for {count} bindings"
                )
            if count:
                self._state.u8[at : at + size] = yield from self._fetch(source)
            self._u32[where.cursor + s.C_BINDINGS] = count + 1
        return bytes(self._state.u8[at : at + size])

    def _scratch(self, where: Where, nbytes: int) -> int:
        size = (where.cursor + s.C_SCRATCH_BYTES64) // 2
        address = (where.cursor + s.C_SCRATCH64) // 2
        if not self._u64[size]:
            extent = (nbytes + PAGE - 1) // PAGE * PAGE
            self._u64[address] = self._memory.find(extent)
            self._u64[size] = extent
            self._memory.claim(self._u64[address], extent)
        return self._u64[address]

    def holds(self, where: Where) -> bool:
        """Whether a command holds anything beside its objects."""
        return bool(
            self._u64[(where.cursor + s.C_SCRATCH_BYTES64) // 2]
            or self._u32[where.cursor + s.C_BINDINGS] > 1
        )

    def release(self, where: Where) -> Pauses[None]:
        """Give back what a command held beside its objects, in steps; repeatable."""
        size = (where.cursor + s.C_SCRATCH_BYTES64) // 2
        if self._u64[size]:
            address = self._u64[(where.cursor + s.C_SCRATCH64) // 2]
            yield from self._attentively(self._memory.scrub(address, self._u64[size]))
            self._memory.release(address, self._u64[size])
            self._u64[size] = 0
        kept = self._u32[where.cursor + s.C_BINDINGS]
        if kept > 1:
            self._state.zero(s.bindings_at(where.queue), (kept - 1) * abi.BINDING.size)

    def reclaim(self, where: Where) -> None:
        """Tell the allocator about scratch that a predecessor's cursor holds."""
        size = self._u64[(where.cursor + s.C_SCRATCH_BYTES64) // 2]
        if size:
            self._memory.claim(self._u64[(where.cursor + s.C_SCRATCH64) // 2], size)

    def recover(self, where: Where, opcode: int, entry: bytes) -> Result | None:
        """Finish a command whose worker died between its intent and its end, before any other
        command can take the slot. None when nothing was intended, or nothing had come of it.
        """
        word = where.cursor + s.C_INTENT
        intent = self._u32[word]
        if not intent:
            return None
        if opcode in (Opcode.TENSOR_CREATE, Opcode.PROGRAM_LOAD):
            made = self._objects.at(intent - 1)
            if made is not None:
                return 0, made.handle, 0
            self._u32[word] = 0
            return None
        if opcode in (Opcode.TENSOR_DESTROY, Opcode.PROGRAM_UNLOAD):
            # A slot that is free already must not be looked at later: another may have taken it.
            return None if self._objects.at(intent - 1) is not None else (0, 0, 0)
        if opcode == Opcode.CONTEXT_CLOSE:
            if self._contexts.owner(intent - 1) == where.queue:
                return None
            if self._contexts.owner(intent - 1) is None:
                self._contexts.close(intent - 1)
            self._u32[where.record + s.Q_CONTEXT] = 0
            return 0, 0, 0
        result = self.table[opcode](where, entry)
        return result if isinstance(result, tuple) else None

    # --- query ------------------------------------------------------------------------------------

    def _query(self, where: Where, entry: bytes) -> Pauses[Result]:
        what, _, _, raw = abi.QUERY.unpack_from(entry, _BODY)
        number = self._u32[where.record + s.Q_CONTEXT]
        answer = self._queries.answer(what, number - 1 if number else None)
        target = abi.parse_memory(raw)
        if len(answer) > min(target.length, LIMITS.query_bytes):
            return CommandStatus.BUFFER_TOO_SMALL, len(answer), 0
        view = memoryview(answer)
        spans = yield from self._spans(target, write=True)
        for n, (address, count) in enumerate(spans):
            part, view = view[:count], view[count:]
            if part:
                yield from self._port.passing(len(part))
                yield from self._move(target.space, address, part, write=True)
            if n % _SEGMENTS == _SEGMENTS - 1 and self._attention():
                yield None
        return 0, len(answer), 0


def _whole(address: int, count: int) -> int:
    """The stride of memory that needs none."""
    return count
