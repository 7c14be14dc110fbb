"""LAUNCH and the commands of graphs: what is resolved, where it runs, and what it holds meanwhile.

A command runs inline, on the front end's thread and all of the function's cores, or on an engine of
a chip; a graph on the engines that it names. Bindings and scratch are the command's own until its
end and are written down in its cursor, so that any worker can go on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from accelvisor.abi import commands as abi
from accelvisor.abi import graphs as graph_abi
from accelvisor.abi.graphs import Graph, QueueType
from accelvisor.abi.registers import PAGE
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import NumericError
from accelvisor.function import state as s
from accelvisor.function.cache import Cache
from accelvisor.function.chips import Engines, Job
from accelvisor.function.codes import Code, Codes
from accelvisor.function.graphs import Bound, Pace, Run, Times, simulate
from accelvisor.function.launch import Launch, Launcher, Progress
from accelvisor.function.objects import GRAPH, PROGRAM, Memory, Object, Objects, Refused
from accelvisor.function.pauses import Pauses, attentively
from accelvisor.function.pool import Pool
from accelvisor.function.state import State
from accelvisor.function.trace import Span, Trace

Result: TypeAlias = tuple[int, int, int]
_BODY = 8
_M64 = 0xFFFF_FFFF_FFFF_FFFF
#: Nodes of graphs that are kept resolved.
_CACHED_NODES = 32_768
_PORTION = 64


class Fault(Exception):  # noqa: N818 - a status on its way to the guest
    """The command stops its context."""

    def __init__(self, status: CommandStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Where(NamedTuple):
    """Which command a handler works for: its queue, words of its queue record and cursor, and what
    it may use.

    Attributes:
        bindings: first byte of its bindings, ``slots`` of them.
        graph: number of its record of a graph's progress.
        engine: on which it runs; -1: inline, wherever it wants.
    """

    queue: int
    record: int
    cursor: int
    bindings: int
    slots: int
    graph: int
    engine: int

    @classmethod
    def ordered(cls, queue: int) -> Where:
        """A queue's ordered command."""
        return cls(
            queue, s.queue_word(queue), s.cursor_word(queue), s.bindings_at(queue), s.SLOTS, queue,
            -1,
        )  # fmt: skip

    @classmethod
    def on_engine(cls, queue: int, engine: int) -> Where:
        """The command of a queue that an engine works on."""
        return cls(
            queue, s.queue_word(queue), s.run_word(engine), s.run_bindings_at(engine), s.RUN_SLOTS,
            s.QUEUES + engine, engine,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph whose programs and tensors have been looked up."""

    graph: Graph
    launches: Sequence[Launch]
    labels: Sequence[str]
    costs: Sequence[int]
    times: Times
    #: by queue of the graph: where its scratch begins; then how much there is in all
    scratch: Sequence[int]
    pace: Pace


class Running:
    """Handlers of LAUNCH and GRAPH_LAUNCH. Runs on the front end's thread alone.

    Args:
        fetch: reads a small memory operand, whole.
    """

    def __init__(
        self,
        state: State,
        memory: Memory,
        objects: Objects,
        codes: Codes[Code],
        graphs: Codes[Graph],
        launcher: Launcher,
        engines: Engines,
        pool: Pool,
        trace: Trace,
        attention: Callable[[], bool],
        fetch: Callable[[abi.Memory], Pauses[bytes]],
    ) -> None:
        self._state = state
        self._u32 = state.u32
        self._u64 = state.u64
        self._memory = memory
        self._objects = objects
        self._codes = codes
        self._graphs = graphs
        self._launcher = launcher
        self._engines = engines
        self._pool = pool
        self._trace = trace
        self._attention = attention
        self._fetch = fetch
        self._plans: Cache[tuple[int, int], Plan] = Cache(_CACHED_NODES)
        self._version = -1

    # --- programs ---------------------------------------------------------------------------------

    def kind(self, context: int, entry: bytes) -> tuple[int, int]:
        """The queue type that a launch, which is not ordered, wants, and its cycles as far as they
        are known without looking at device memory.
        """
        handle, repeat, *_ = abi.LAUNCH.unpack_from(entry, _BODY)
        program = self._objects.find(handle, context, PROGRAM)
        code = self._codes.known(program) if program is not None else None
        if code is None:
            return QueueType.COMPUTE, 0
        return int(code.transfers), code.cycles * repeat

    def launch(self, where: Where, context: int, entry: bytes) -> Pauses[Result]:
        """Run a program, ``repeat`` times."""
        handle, repeat, count, raw = abi.LAUNCH.unpack_from(entry, _BODY)
        program = self._objects.get(handle, context, PROGRAM)
        code = yield from self._codes.of(program, self._memory)
        if not repeat:
            raise Refused(CommandStatus.BAD_DESCRIPTOR, "repeat is 0")
        _require_bindings(count, code)
        if count > where.slots:
            raise Refused(
                CommandStatus.LIMIT,
                f"{count} bindings; a launch that is not ordered has {where.slots} at most",
            )
        bindings = yield from self._bindings(where, abi.parse_memory(raw), count)
        launch = yield from attentively(
            self._launcher.resolve(program, context, code, bindings), self._attention
        )
        scratch = self._scratch(where, launch.scratch) if launch.scratch else 0
        kept = self._launcher.place(launch, scratch) if launch.scratch else {}
        progress = Progress(
            (where.cursor + s.C_POSITION64) // 2, (where.cursor + s.C_SNAPSHOT64) // 2
        )
        run = partial(self._launcher.run, launch, kept, progress, repeat)
        began = self._trace.clock()
        try:
            if where.engine < 0:
                yield from run(self._attention, self._pool)
            else:
                yield from self._engines.carry([Job(where.engine, run)])
        except NumericError as error:
            raise Fault(CommandStatus.NUMERIC, error.message) from error
        self._state.count("launches")
        cycles = (code.cycles * repeat) & _M64
        self._trace.add(
            Span(
                context, max(0, where.engine), code.label, int.from_bytes(entry[4:8], "little"), -1,
                began, self._trace.clock(), cycles, self._cycles(where),
            )
        )  # fmt: skip
        return 0, 0, cycles

    def _cycles(self, where: Where) -> int:
        return self._u64[(where.record + s.Q_CYCLES64) // 2]

    def _bindings(self, where: Where, source: abi.Memory, count: int) -> Pauses[bytes]:
        """The bindings: fetched once, then kept in the state, the guest may change its own."""
        at = where.bindings
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

    # --- graphs -----------------------------------------------------------------------------------

    def graph(self, where: Where, context: int, entry: bytes) -> Pauses[Result]:
        """Run a graph, ``repeat`` times."""
        handle, repeat = abi.GRAPH_LAUNCH.unpack_from(entry, _BODY)
        found = self._objects.get(handle, context, GRAPH)
        if not repeat:
            raise Refused(CommandStatus.BAD_DESCRIPTOR, "repeat is 0")
        plan = yield from self._plan(found, context)
        base = self._scratch(where, plan.scratch[-1]) if plan.scratch[-1] else 0
        nodes = self._bound(plan, base)
        start, command = self._cycles(where), int.from_bytes(entry[4:8], "little")

        def note(engine: int, node: int, began: int, ended: int) -> None:
            first = plan.times.spans[node][0]
            self._trace.add(
                Span(
                    context, engine, plan.labels[node], command, node, began, ended,
                    plan.costs[node], start + first,
                )
            )  # fmt: skip

        run = Run(
            self._state, self._engines, self._launcher, self._trace, plan.graph, nodes, where.graph,
            note, plan.pace, self._attention,
        )  # fmt: skip
        try:
            yield from run.go(repeat)
        except NumericError as error:
            raise Fault(CommandStatus.NUMERIC, error.message) from error
        self._state.count("launches", len(nodes) * repeat)
        return 0, 0, (plan.times.cycles * repeat) & _M64

    def _plan(self, found: Object, context: int) -> Pauses[Plan]:
        if self._version != self._objects.version:
            self._plans.clear()
            self._version = self._objects.version
        key = (context, found.handle)
        plan = self._plans.get(key)
        if plan is None or any(launch.table is not self._memory.table for launch in plan.launches):
            plan = yield from self._look_up(found, context)
            self._plans.put(key, plan, len(plan.launches) + 1)
        return plan

    def _look_up(self, found: Object, context: int) -> Pauses[Plan]:
        """Every program and tensor of a graph.

        Raises:
            Refused: one is not there, does not fit, or a compute program is on a transfer queue.
        """
        graph = yield from self._graphs.of(found, self._memory)
        if graph.chips > self._engines.chips:
            raise Refused(
                CommandStatus.BAD_DESCRIPTOR,
                f"the graph is for {graph.chips} chips, the function has {self._engines.chips}",
            )
        launches: list[Launch] = []
        for n, node in enumerate(graph.nodes):
            if n % _PORTION == _PORTION - 1 and self._attention():
                yield None
            program = self._objects.get(node.program, context, PROGRAM)
            code = yield from self._codes.of(program, self._memory)
            _require_bindings(len(node.bindings), code)
            bindings = b"".join(abi.BINDING.pack(*binding) for binding in node.bindings)
            launches.append(
                (yield from self._launcher.resolve(program, context, code, bindings))
            )
        _require_queues(graph, launches)
        costs = [launch.code.cycles for launch in launches]
        at, scratch = 0, []
        for row in graph.queues.values():
            scratch.append(at)
            mine = [launches[e.value].scratch for e in row if e.kind is graph_abi.Kind.RUN]
            at += -(-max(mine, default=0) // PAGE) * PAGE
        labels = [launch.code.label for launch in launches]
        times = simulate(graph, costs)
        return Plan(graph, launches, labels, costs, times, [*scratch, at], Pace())

    def _bound(self, plan: Plan, base: int) -> list[Bound]:
        """The nodes, with their queue's scratch for those that need it: one of a queue runs."""
        nodes = [Bound(launch, {}) for launch in plan.launches]
        for n, row in enumerate(plan.graph.queues.values()):
            for entry in row:
                if entry.kind is graph_abi.Kind.RUN and plan.launches[entry.value].scratch:
                    launch = plan.launches[entry.value]
                    kept = self._launcher.place(launch, base + plan.scratch[n])
                    nodes[entry.value] = Bound(launch, kept)
        return nodes

    # --- what a command holds ---------------------------------------------------------------------

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
            or self._u32[where.cursor] & 0xFFFF == abi.Opcode.GRAPH_LAUNCH
        )

    def release(self, where: Where) -> Pauses[None]:
        """Give back what a command held beside its objects, in steps; repeatable."""
        size = (where.cursor + s.C_SCRATCH_BYTES64) // 2
        if self._u64[size]:
            address = self._u64[(where.cursor + s.C_SCRATCH64) // 2]
            scrubbing = self._memory.scrub(address, self._u64[size])
            yield from attentively(scrubbing, self._attention)
            self._memory.release(address, self._u64[size])
            self._u64[size] = 0
        kept = self._u32[where.cursor + s.C_BINDINGS]
        if kept > 1:
            self._state.zero(where.bindings, (kept - 1) * abi.BINDING.size)
        if self._u32[where.cursor] & 0xFFFF == abi.Opcode.GRAPH_LAUNCH:
            self._state.zero(s.graph_word(where.graph) * 8, s.GRAPH_BYTES)

    def reclaim(self, where: Where) -> None:
        """Tell the allocator about scratch that a predecessor's cursor holds."""
        size = self._u64[(where.cursor + s.C_SCRATCH_BYTES64) // 2]
        if size:
            self._memory.claim(self._u64[(where.cursor + s.C_SCRATCH64) // 2], size)


def _require_bindings(count: int, code: Code) -> None:
    if count != len(code.arguments):
        raise Refused(
            CommandStatus.BINDING_MISMATCH,
            f"{count} bindings, the program has {len(code.arguments)} arguments",
        )


def _require_queues(graph: Graph, launches: Sequence[Launch]) -> None:
    """Computing is not what a transfer queue is for."""
    for (chip, kind), row in graph.queues.items():
        for entry in row:
            if kind is not QueueType.TRANSFER or entry.kind is not graph_abi.Kind.RUN:
                continue
            code = launches[entry.value].code
            if code.plan and not code.transfers:
                raise Refused(
                    CommandStatus.BINDING_MISMATCH,
                    f"node {entry.value} ({code.label}) computes, and is on the transfer queue of"
                    f" chip {chip}",
                )
