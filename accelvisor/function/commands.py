"""What each command does. Decoding never trusts the guest; executing never trusts that it is the
first try: a command whose worker died runs again, led by what its cursor remembers.

A handler returns ``(status, value, cycles)``, or a generator of pauses that returns it. It raises
Refused (nothing was changed), or DmaFault or Fault (the context stops). Between two pauses lie
milliseconds at most, whatever the guest asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import Opcode
from accelvisor.abi.graphs import Graph
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import ProgramError
from accelvisor.function import state as s
from accelvisor.function.codes import Code, Codes
from accelvisor.function.dma import Dma
from accelvisor.function.links import Links
from accelvisor.function.objects import (
    GRAPH,
    PROGRAM,
    TENSOR,
    Contexts,
    Memory,
    Objects,
    Refused,
    check_shape,
)
from accelvisor.function.operands import COPY_STEP, GUEST, SEGMENT_BYTES, SEGMENTS, Operands
from accelvisor.function.pauses import Pauses, attentively, marking
from accelvisor.function.port import Port
from accelvisor.function.query import Queries
from accelvisor.function.running import Result, Running, Where
from accelvisor.function.state import State
from accelvisor.kernels.declare import BYTES_PER_CYCLE, ISSUE_CYCLES
from accelvisor.limits import LIMITS

T = TypeVar("T")

_BODY = 8  # operands begin after the header

class Commands:
    """Handlers by opcode. Runs on the engine's thread alone."""

    def __init__(
        self,
        state: State,
        operands: Operands,
        running: Running,
        memory: Memory,
        objects: Objects,
        contexts: Contexts,
        codes: Codes[Code],
        graphs: Codes[Graph],
        queries: Queries,
        links: Links,
        dma: Dma,
        port: Port,
        attention: Callable[[], bool],
    ) -> None:
        self._state = state
        self._u32 = state.u32
        self._u64 = state.u64
        self._operands = operands
        self.running = running
        self._memory = memory
        self._objects = objects
        self._contexts = contexts
        self._codes = codes
        self._graphs = graphs
        self._queries = queries
        self._links = links
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
            Opcode.GRAPH_LOAD: self._load_graph,
            Opcode.GRAPH_UNLOAD: self._unload_graph,
            Opcode.GRAPH_LAUNCH: self._graph,
            Opcode.QUERY: self._query,
            Opcode.LINK_SWITCH: self._switch,
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
        self._queries.opened(number)
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
        yield from attentively(self._objects.destroy_context(number), self._attention)
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

    def _load(self, where: Where, entry: bytes) -> Pauses[Result]:
        context = self.context(where)
        raw = yield from self._source(entry, LIMITS.program_bytes)
        digest, code = yield from _valid(self._codes.load(raw))
        slot = self._intend(where)
        made = self._objects.create(
            slot, context, PROGRAM, len(raw), code.extent, digest=digest, content=raw
        )
        return 0, made.handle, 0

    def _load_graph(self, where: Where, entry: bytes) -> Pauses[Result]:
        context = self.context(where)
        raw = yield from self._source(entry, LIMITS.graph_bytes)
        digest, _ = yield from _valid(self._graphs.load(raw))
        slot = self._intend(where)
        made = self._objects.create(
            slot, context, GRAPH, len(raw), len(raw), digest=digest, content=raw
        )
        return 0, made.handle, 0

    def _source(self, entry: bytes, most: int) -> Pauses[bytes]:
        """The bytes of a program or graph that is uploaded."""
        source = abi.parse_memory(entry[_BODY : _BODY + abi.MEMORY.size])
        if source.length > most:
            raise Refused(
                CommandStatus.LIMIT, f"{source.length} bytes are uploaded, the limit is {most}"
            )
        return (yield from self._operands.fetch(source))

    def _intend(self, where: Where) -> int:
        """Write down which slot the command is about to create in. Creation follows at once."""
        slot = self._objects.next_slot()
        self._u32[where.cursor + s.C_INTENT] = slot + 1
        return slot

    def _destroy_tensor(self, where: Where, entry: bytes) -> Pauses[Result]:
        return self._destroy(where, entry, TENSOR)

    def _unload(self, where: Where, entry: bytes) -> Pauses[Result]:
        return self._destroy(where, entry, PROGRAM)

    def _unload_graph(self, where: Where, entry: bytes) -> Pauses[Result]:
        return self._destroy(where, entry, GRAPH)

    def _destroy(self, where: Where, entry: bytes, kind: int) -> Pauses[Result]:
        word = where.cursor + s.C_INTENT
        context = self.context(where)
        if not self._u32[word]:
            (handle,) = abi.HANDLE.unpack_from(entry, _BODY)
            self._u32[word] = self._objects.get(handle, context, kind).slot + 1
        yield from attentively(
            self._objects.destroy(self._u32[word] - 1), self._attention
        )
        return 0, 0, 0

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
        if m.space == GUEST and not m.transfer and not m.count and m.length <= COPY_STEP:
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
        spans = yield from self._operands.spans(m, write)
        done_at = (where.cursor + s.C_POSITION64) // 2
        skip = self._u64[done_at]
        stride = self._dma.stride if m.space == GUEST else _whole
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
                moving = self._operands.move(m.space, address + at, part, write=write)
                if not write:
                    moving = marking(moving, partial(self._memory.wrote, here, step))
                yield from moving
                at += step
                if at < count:
                    self._u64[done_at] = passed + at
                    if self._attention():
                        yield None
            passed += count
            since += count + SEGMENT_BYTES
            if since >= COPY_STEP:
                since = 0
                self._u64[done_at] = max(skip, passed)
                if self._attention():
                    yield None
        return self._copied(m.length, write)

    # --- programs and graphs that run -------------------------------------------------------------

    def _launch(self, where: Where, entry: bytes) -> Pauses[Result]:
        return self.running.launch(where, self.context(where), entry)

    def _graph(self, where: Where, entry: bytes) -> Pauses[Result]:
        return self.running.graph(where, self.context(where), entry)

    def recover(self, where: Where, opcode: int, entry: bytes) -> Result | None:
        """Finish a command whose worker died between its intent and its end, before any other
        command can take the slot. None when nothing was intended, or nothing had come of it.
        """
        word = where.cursor + s.C_INTENT
        intent = self._u32[word]
        if not intent:
            return None
        if opcode in (Opcode.TENSOR_CREATE, Opcode.PROGRAM_LOAD, Opcode.GRAPH_LOAD):
            made = self._objects.at(intent - 1)
            if made is not None:
                return 0, made.handle, 0
            self._u32[word] = 0
            return None
        if opcode in (Opcode.TENSOR_DESTROY, Opcode.PROGRAM_UNLOAD, Opcode.GRAPH_UNLOAD):
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

    # --- links ------------------------------------------------------------------------------------

    def _switch(self, where: Where, entry: bytes) -> Pauses[Result]:
        self.context(where)
        link, on = abi.LINK.unpack_from(entry, _BODY)
        if on > 1:
            raise Refused(CommandStatus.BAD_DESCRIPTOR, f"a link is switched to 0 or 1, not {on}")
        cycles = yield from self._links.switch(link, bool(on))
        return 0, 0, cycles

    # --- query ------------------------------------------------------------------------------------

    def _query(self, where: Where, entry: bytes) -> Pauses[Result]:
        what, _, _, raw = abi.QUERY.unpack_from(entry, _BODY)
        number = self._u32[where.record + s.Q_CONTEXT]
        answer = self._queries.answer(what, number - 1 if number else None)
        target = abi.parse_memory(raw)
        if len(answer) > min(target.length, LIMITS.query_bytes):
            return CommandStatus.BUFFER_TOO_SMALL, len(answer), 0
        view = memoryview(answer)
        spans = yield from self._operands.spans(target, write=True)
        for n, (address, count) in enumerate(spans):
            part, view = view[:count], view[count:]
            if part:
                yield from self._port.passing(len(part))
                yield from self._operands.move(target.space, address, part, write=True)
            if n % SEGMENTS == SEGMENTS - 1 and self._attention():
                yield None
        return 0, len(answer), 0


def _valid(loading: Pauses[T]) -> Pauses[T]:
    """The same steps; what they find invalid is refused."""
    try:
        return (yield from loading)
    except ProgramError as error:
        text = f"{error.where}: {error.message}" if error.where else error.message
        raise Refused(CommandStatus.PROGRAM_INVALID, text) from error


def _whole(address: int, count: int) -> int:
    """The stride of memory that needs none."""
    return count
