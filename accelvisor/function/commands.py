"""What each command does. Decoding never trusts the guest; executing never trusts that it is the
first try: a command whose worker died runs again, led by what its cursor remembers.

A handler returns ``(status, value, cycles)``, or a generator of pauses that returns it. It raises
Refused (nothing was changed), DmaFault (the context stops), or Interrupted (try again later).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias

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
from accelvisor.function.query import Queries
from accelvisor.function.state import State
from accelvisor.kernels.declare import BYTES_PER_CYCLE, ISSUE_CYCLES
from accelvisor.limits import LIMITS, MIB

Result: TypeAlias = tuple[int, int, int]
Pauses: TypeAlias = Generator[None, None, Result]
Spans: TypeAlias = Sequence[tuple[int, int]]

#: Bytes that a copy moves between two looks at whether something else wants the engine.
_COPY_STEP = 4 * MIB
_BODY = 8  # operands begin after the header
_COPY_FLAGS = int(Transfer.SCATTER)


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
        self._attention = attention
        self.table: dict[int, Callable[[Where, bytes], Result | Pauses]] = {
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

    def _close(self, where: Where, entry: bytes) -> Result:
        u32 = self._u32
        if not u32[where.cursor + s.C_INTENT]:
            u32[where.cursor + s.C_INTENT] = self.context(where) + 1
        self.close_context(where.record, u32[where.cursor + s.C_INTENT] - 1)
        return 0, 0, 0

    def close_context(self, record: int, number: int) -> None:
        """Destroy a context with all its objects; repeatable."""
        self._objects.destroy_context(number)
        self._contexts.close(number)
        self._u32[record + s.Q_CONTEXT] = 0

    # --- objects ----------------------------------------------------------------------------------

    def _create(self, where: Where, entry: bytes) -> Result:
        context = self.context(where)
        dtype, rank, _, *dims = abi.CREATE.unpack_from(entry, _BODY)
        kind, shape, nbytes = check_shape(dtype, rank, tuple(dims))
        slot = self._intend(where)
        made = self._objects.create(slot, context, TENSOR, nbytes, nbytes, dtype=kind, shape=shape)
        return 0, made.handle, 0

    def _load(self, where: Where, entry: bytes) -> Result:
        context = self.context(where)
        source = abi.parse_memory(entry[_BODY : _BODY + abi.MEMORY.size])
        if source.length > LIMITS.program_bytes:
            raise Refused(
                CommandStatus.LIMIT,
                f"a program of {source.length} bytes, the limit is {LIMITS.program_bytes}",
            )
        raw = self._fetch(source)
        try:
            digest, code = self._codes.load(raw)
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

    def _destroy_tensor(self, where: Where, entry: bytes) -> Result:
        return self._destroy(where, entry, TENSOR)

    def _unload(self, where: Where, entry: bytes) -> Result:
        return self._destroy(where, entry, PROGRAM)

    def _destroy(self, where: Where, entry: bytes, kind: int) -> Result:
        word = where.cursor + s.C_INTENT
        context = self.context(where)
        if not self._u32[word]:
            (handle,) = abi.HANDLE.unpack_from(entry, _BODY)
            self._u32[word] = self._objects.get(handle, context, kind).slot + 1
        self._objects.destroy(self._u32[word] - 1)
        return 0, 0, 0

    # --- memory operands --------------------------------------------------------------------------

    def _spans(self, m: abi.Memory, write: bool) -> Spans:
        """Resolve a memory operand to checked (address, bytes) spans.

        The list is copied out of the guest's memory once; what is checked is what is used.
        """
        if m.space not in (Space.GUEST, Space.WINDOW) or m.transfer & ~_COPY_FLAGS:
            raise Refused(
                CommandStatus.BAD_DESCRIPTOR, f"space {m.space}, transfer {m.transfer:#x}"
            )
        spans: Spans = ((m.address, m.length),)
        if m.transfer & Transfer.SCATTER:
            if not 1 <= m.count <= LIMITS.scatter_segments:
                raise Refused(
                    CommandStatus.LIMIT,
                    f"{m.count} segments, the limit is {LIMITS.scatter_segments}",
                )
            raw = bytearray(m.count * abi.SEGMENT.size)
            self._move(m.space, m.address, memoryview(raw), write=False)
            spans = list(abi.SEGMENT.iter_unpack(raw))
            total = sum(count for _, count in spans)
            if total != m.length:
                raise Refused(
                    CommandStatus.BAD_DESCRIPTOR,
                    f"the segments hold {total} bytes, the operand {m.length}",
                )
        elif m.count:
            raise Refused(CommandStatus.BAD_DESCRIPTOR, "a segment count without SCATTER")
        if m.space == Space.GUEST:
            # One span that moves in one step is checked by that step.
            if len(spans) > 1 or m.length > _COPY_STEP:
                self._dma.check(spans, write)
        else:
            for address, count in spans:
                self._check_window(address, count)
        return spans

    def _check_window(self, address: int, count: int) -> None:
        if not self._staging <= address <= len(self._window) - count:
            raise Fault(
                CommandStatus.BAD_ADDRESS, f"{count} bytes at {address:#x} leave the staging area"
            )

    def _move(self, space: int, address: int, view: memoryview, *, write: bool) -> None:
        """One span between the guest's memory and ``view`` (written to the guest, or filled)."""
        if space == Space.GUEST:
            if write:
                self._dma.write(address, view)
            else:
                self._dma.read(address, view)
            return
        self._check_window(address, len(view))
        window = self._window[address : address + len(view)]
        if write:
            copy(window, view)
        else:
            copy(view, window)

    def _fetch(self, source: abi.Memory) -> bytes:
        """A small memory operand, whole."""
        raw = bytearray(source.length)
        at = 0
        for address, count in self._spans(source, write=False):
            self._move(source.space, address, memoryview(raw)[at : at + count], write=False)
            at += count
        return bytes(raw)

    # --- copies -----------------------------------------------------------------------------------

    def _copy_in(self, where: Where, entry: bytes) -> Pauses:
        return self._copy(where, entry, write=False)

    def _copy_out(self, where: Where, entry: bytes) -> Pauses:
        return self._copy(where, entry, write=True)

    def _copy(self, where: Where, entry: bytes, *, write: bool) -> Pauses:
        context = self.context(where)
        handle, offset, raw = abi.COPY.unpack_from(entry, _BODY)
        tensor = self._objects.get(handle, context, TENSOR)
        m = abi.parse_memory(raw)
        if offset > tensor.nbytes or m.length > tensor.nbytes - offset:
            raise Refused(
                CommandStatus.BUFFER_TOO_SMALL,
                f"{m.length} bytes at {offset}, the tensor has {tensor.nbytes}",
            )
        spans = self._spans(m, write)
        done_at = (where.cursor + s.C_POSITION64) // 2
        skip = self._u64[done_at]
        device = tensor.address + offset
        view = self._memory.view
        passed = 0
        since = 0
        for address, count in spans:
            at = max(0, min(count, skip - passed))
            while at < count:
                step = min(count - at, _COPY_STEP)
                part = view[device + passed + at : device + passed + at + step]
                self._move(m.space, address + at, part, write=write)
                at += step
                since += step
                if since >= _COPY_STEP:
                    since = 0
                    self._u64[done_at] = passed + at
                    if self._attention():
                        yield
            passed += count
        self._state.count("bytes_out" if write else "bytes_in", m.length)
        return 0, m.length, ISSUE_CYCLES + -(-m.length // BYTES_PER_CYCLE)

    # --- launch -----------------------------------------------------------------------------------

    def _launch(self, where: Where, entry: bytes) -> Pauses:
        context = self.context(where)
        handle, repeat, count, raw = abi.LAUNCH.unpack_from(entry, _BODY)
        program = self._objects.get(handle, context, PROGRAM)
        code = self._codes.of(program, self._memory)
        if not repeat:
            raise Refused(CommandStatus.BAD_DESCRIPTOR, "repeat is 0")
        if count != len(code.arguments):
            raise Refused(
                CommandStatus.BINDING_MISMATCH,
                f"{count} bindings, the program has {len(code.arguments)} arguments",
            )
        bindings = self._bindings(where, abi.parse_memory(raw), count)
        launch = self._launcher.resolve(program, context, bindings)
        if launch.scratch:
            self._launcher.place(launch, self._scratch(where, launch.scratch))
        try:
            yield from self._launcher.run(launch, where.cursor, repeat, self._attention)
        except NumericError as error:
            raise Fault(CommandStatus.NUMERIC, error.message) from error
        self._state.count("launches")
        return 0, 0, (code.cycles * repeat) & 0xFFFF_FFFF_FFFF_FFFF

    def _bindings(self, where: Where, source: abi.Memory, count: int) -> bytes:
        """The bindings: fetched once, then kept in the state, the guest may change its own."""
        at = s.bindings_at(where.queue)
        size = count * abi.BINDING.size
        if not self._u32[where.cursor + s.C_BINDINGS]:
            if source.length != size:
                raise Refused(
                    CommandStatus.BAD_DESCRIPTOR, f"{source.length} bytes for {count} bindings"
                )
            if count:
                self._state.u8[at : at + size] = self._fetch(source)
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

    def release(self, where: Where) -> None:
        """Give back what a command held beside its objects; repeatable."""
        size = (where.cursor + s.C_SCRATCH_BYTES64) // 2
        if self._u64[size]:
            address = self._u64[(where.cursor + s.C_SCRATCH64) // 2]
            self._memory.scrub(address, self._u64[size])
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
        result = self.table[opcode](where, entry)
        return result if isinstance(result, tuple) else None

    # --- query ------------------------------------------------------------------------------------

    def _query(self, where: Where, entry: bytes) -> Result:
        what, _, _, raw = abi.QUERY.unpack_from(entry, _BODY)
        number = self._u32[where.record + s.Q_CONTEXT]
        answer = self._queries.answer(what, number - 1 if number else None)
        target = abi.parse_memory(raw)
        if len(answer) > min(target.length, LIMITS.query_bytes):
            return CommandStatus.BUFFER_TOO_SMALL, len(answer), 0
        view = memoryview(answer)
        for address, count in self._spans(target, write=True):
            part, view = view[:count], view[count:]
            if part:
                self._move(target.space, address, part, write=True)
        return 0, len(answer), 0

