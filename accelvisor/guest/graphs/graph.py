"""Graphs recorded through streams and events, as CUDA graphs and PyTorch's streams are.

    with fn.graph() as g:
        s, t = g.stream(chip=0), g.stream(chip=1)
        y = s.run(program, x, w)
        e = s.record()
        t.wait(e)
        z = t.run(other, y)
    g()

A node is one run of a program on one queue of one chip. Three things order nodes: a stream's nodes
run in the order in which they were recorded; ``wait`` and ``after=`` say more; and, unless the
graph was made with ``automatic=False``, whoever touches bytes that another node writes comes before
or after it as they were recorded, so that a recorded graph has no races. At the end of the ``with``
block queues are made of it (:mod:`~accelvisor.guest.graphs.builder`) and uploaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from accelvisor.abi import graphs as abi
from accelvisor.abi.commands import Binding, Flag, graph_launch
from accelvisor.abi.graphs import Entry, Node, QueueType
from accelvisor.errors import ConflictError, ProgramError, UsageError
from accelvisor.guest.graphs.access import Accesses, Range
from accelvisor.guest.graphs.builder import Op, Plan, build
from accelvisor.guest.graphs.profile import Profile, profile
from accelvisor.guest.launch import Bound, Launch
from accelvisor.guest.program import Program
from accelvisor.guest.tensor import Tensor

if TYPE_CHECKING:
    from accelvisor.guest.function import Function
    from accelvisor.timeline.spans import Span

#: Model cycles that a signal takes to another chip, as the device's own clock has it.
LATENCY = 64


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """One node of a graph that is being recorded; what ``after=`` takes.

    Attributes:
        index: its number in the graph.
        tensors: what its program's arguments are, in binding order.
        bound: the same, and memory in place of the program's temporaries.
        result: what its program returns: a tensor, a tuple of them, or None.
    """

    graph: Graph
    index: int
    chip: int
    program: Program
    tensors: tuple[Tensor, ...]
    bound: tuple[Tensor, ...]
    deps: frozenset[int]
    profile: Profile
    result: Any

    def __repr__(self) -> str:
        return f"<node {self.index}: {self.program.name} on chip {self.chip}>"


class Event:
    """A point of a stream that other streams can wait for."""

    __slots__ = ("_graph", "node")

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.node: Recorded | None = None


class Stream:
    """Nodes of one chip, one after the other. Made by :meth:`Graph.stream`."""

    def __init__(self, graph: Graph, chip: int) -> None:
        self.graph = graph
        self.chip = chip
        self.last: Recorded | None = None
        self._awaited: list[Recorded] = []

    def run(
        self, program: Program, *args: Any, out: Any = None, after: After = (), **named: Any
    ) -> Any:
        """Record a run of ``program``; returns its results, as calling it would. :attr:`last` is
        the node. Arguments and errors as :meth:`Graph.node`.
        """
        before = [*self._awaited, *([self.last] if self.last else []), *_nodes(after)]
        node = self.graph.node(program, *args, chip=self.chip, out=out, after=before, **named)
        self._awaited.clear()
        self.last = node
        return node.result

    def record(self, event: Event | None = None) -> Event:
        """Let ``event`` (a new one when None) stand for all that was recorded here so far."""
        event = event or self.graph.event()
        event.node = self.last
        return event

    def wait(self, event: Event) -> None:
        """What is recorded here from now on runs after what ``event`` stands for now.

        Raises:
            UsageError: it was never recorded, or in another graph.
        """
        if event.node is None or event._graph is not self.graph:
            raise UsageError(
                "the event stands for nothing in this graph",
                code="event-unrecorded", where="graph", hint="record it first: stream.record(e)",
            )  # fmt: skip
        self._awaited.append(event.node)


After = Recorded | Event | Iterable["Recorded | Event"]


class Graph:
    """Programs over tensors on the queues of several chips: recorded once, launched often.

    Args:
        function: where it will run.
        automatic: order nodes by the tensors that they share.
        name: for people.
    """

    def __init__(
        self, function: Function, *, automatic: bool = True, name: str = "graph"
    ) -> None:
        self.function = function
        self.name = name
        self.nodes: list[Recorded] = []
        #: Hand-written queues; where there are none, the recorded dependencies make them.
        self.queues: dict[tuple[int, QueueType], Sequence[Entry]] = {}
        self.plan: Plan | None = None
        self._accesses = Accesses() if automatic else None
        self._profiles: dict[bytes, Profile] = {}
        self._cycles: dict[bytes, int] = {}
        self._scratch: dict[tuple[int, QueueType, bytes], list[Tensor]] = {}
        self._owned: list[Tensor] = []
        self._data = b""
        self._loaded: Loaded | None = None

    # --- recording -------------------------------------------------------------------------------

    def stream(self, chip: int = 0) -> Stream:
        """A new stream on a chip of the function."""
        return Stream(self, self._on(chip))

    def event(self) -> Event:
        """A new event."""
        return Event(self)

    def run(
        self, program: Program, *args: Any, chip: int = 0, out: Any = None, after: After = (),
        **named: Any,
    ) -> Any:  # fmt: skip
        """Record a run outside of any stream; returns its results. See :meth:`node`."""
        return self.node(program, *args, chip=chip, out=out, after=after, **named).result

    def node(
        self, program: Program, *args: Any, chip: int = 0, out: Any = None, after: After = (),
        **named: Any,
    ) -> Recorded:  # fmt: skip
        """Record a run of ``program``.

        It runs on the chip's transfer queue when all its instructions are such that move data, else
        on its compute queue.

        Args:
            args, named: tensors for its arguments; arrays are uploaded once, now.
            out: tensors for its results; new ones of the graph's own when None.
            after: nodes or events that must be done before.

        Raises:
            UsageError: the arguments do not fit, the chip is none, or a node of another graph.
            ConflictError: the graph is built already.
        """
        if self._data:
            raise ConflictError("the graph is built already", code="graph-built", where=self.name)
        chip = self._on(chip)
        with program.bind(*args, out=out, **named) as bound:
            tensors, result = bound.tensors, bound.result
        known = self._profiles.get(program.data)
        if known is None:
            known = profile(program.data, self.function.instructions)
            self._profiles[program.data] = known
        index = len(self.nodes)
        deps = {node.index for node in _nodes(after, self)}
        if self._accesses is not None:
            deps |= self._touch(self._accesses, index, tensors, known)
        bound_to = self._bind(chip, tensors, known)
        node = Recorded(
            self, index, chip, program, tensors, bound_to, frozenset(deps), known, result
        )
        self.nodes.append(node)
        return node

    def _bind(
        self, chip: int, tensors: Sequence[Tensor], known: Profile
    ) -> tuple[Tensor, ...]:
        """Tensors for ``known.data``. Nodes of one queue never run at a time, so they share what
        stands for temporaries.
        """
        key = (chip, known.type, known.data)
        if known.scratch and key not in self._scratch:
            self._scratch[key] = [
                self.own(self.function.empty(s.shape, s.dtype.label)) for s in known.scratch
            ]
        scratch = self._scratch.get(key, [])
        return tuple(tensors[n] if n >= 0 else scratch[~n] for n in known.layout)

    def copy(
        self, x: Tensor, out: Tensor | None = None, *, source: int, target: int, after: After = ()
    ) -> Tensor:
        """Copy ``x`` over the link from chip ``source`` to chip ``target``, on the transfer queue
        of the source; returns the copy (new when ``out`` is None).
        """
        from accelvisor.guest.graphs.collectives import link_copy

        program = link_copy(self.function, x.shape, x.dtype.name, source, target)
        result: Tensor = self.run(program, x, chip=source, out=out, after=after)
        return result

    def all_reduce(
        self, tensors: Sequence[Tensor], op: str = "sum", *, order: str = "rank", chunks: int = 4,
        compress: bool = False, chips: Sequence[int] | None = None, columns: int = 0,
        after: After = (),
    ) -> tuple[Recorded, ...]:  # fmt: skip
        """Reduce tensors over chips, in place: afterwards each holds the reduction of all.

        See :func:`accelvisor.guest.graphs.collectives.all_reduce`; ``reduce`` and ``broadcast``
        are there as well.
        """
        from accelvisor.guest.graphs.collectives import all_reduce

        return all_reduce(
            self, tensors, op, order=order, chunks=chunks, compress=compress, chips=chips,
            columns=columns, after=after,
        )  # fmt: skip

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Order what is recorded in the block by its tensors, also in a hand-written graph."""
        before = self._accesses
        self._accesses = Accesses() if before is None else before
        try:
            yield
        finally:
            self._accesses = before

    def own(self, tensor: Tensor) -> Tensor:
        """Free ``tensor`` with the graph."""
        self._owned.append(tensor)
        return tensor

    # --- building --------------------------------------------------------------------------------

    def build(self) -> bytes:
        """Make the queues and upload them: what the end of the ``with`` block does; the bytes.

        Raises:
            ProgramError: the queues wait for each other in a circle, or exceed a limit.
            ProgramRefused: the device found it invalid.
        """
        if not self._data:
            self._data = self._encode()
            self._loaded = Loaded(self, self.function.load_graph(self._data))
        return self._data

    def calibrate(self) -> None:
        """Order the queues by the cycles that the device's trace shows for the last launch, in
        place of estimates. Results do not change; the schedule may become shorter.

        Raises:
            ConflictError: it has not run, or the trace has forgotten it. Others as :meth:`build`.
        """
        for span in self._traced():
            if 0 <= span.node < len(self.nodes):
                self._cycles[self.nodes[span.node].program.data] = span.cycles
        data = self._encode()
        if data != self._data:
            self._unload()
            self._data = b""
            self.build()

    def _traced(self) -> list[Span]:
        """The spans of the last launch."""
        from accelvisor.timeline.spans import read

        launch = self._ready().last
        if launch is not None:
            launch.wait()
            spans = read(self.function.trace()).spans
            found = [s for s in spans if s.node >= 0 and s.command == launch.cookie]
            if found:
                return found
        raise ConflictError(
            "nothing is known of a run of the graph", code="graph-not-run", where=self.name,
            hint="launch it, wait for its end, then calibrate",
        )  # fmt: skip

    def _encode(self) -> bytes:
        if not self.nodes:
            raise UsageError("the graph has no nodes", code="graph-empty", where=self.name)
        nodes = [
            Node(
                self.function.load(n.profile.data),
                tuple(Binding(t.handle, t.offset) for t in n.bound),
            )
            for n in self.nodes
        ]
        self.plan = build(self._ops(), latency=LATENCY)
        graph = self.plan.graph(nodes)
        if self.queues:
            graph = abi.Graph(self._chips(), {k: tuple(v) for k, v in self.queues.items()},
                              tuple(nodes))  # fmt: skip
        # What the device would refuse is refused here, where it can be mended.
        return abi.encode(abi.decode(abi.encode(graph)))

    def _ops(self) -> list[Op]:
        return [
            Op(n.index, n.chip, n.profile.type, self._cost(n), tuple(sorted(n.deps)))
            for n in self.nodes
        ]

    def _cost(self, node: Recorded) -> int:
        return self._cycles.get(node.program.data, node.profile.cycles)

    def _chips(self) -> int:
        return max(self.function.identity.chips, 1 + max(n.chip for n in self.nodes))

    def _on(self, chip: int) -> int:
        if not 0 <= chip < self.function.identity.chips:
            raise UsageError(
                f"chip {chip} of {self.function.identity.chips}", code="chip-unknown",
                where=self.name,
            )  # fmt: skip
        return chip

    def _touch(
        self, accesses: Accesses, index: int, tensors: Sequence[Tensor], known: Profile
    ) -> set[int]:
        ranges = [Range(t.handle, t.offset, t.offset + t.nbytes) for t in tensors]
        reads = [r for r, flag in zip(ranges, known.reads, strict=True) if flag]
        writes = [r for r, flag in zip(ranges, known.writes, strict=True) if flag]
        return accesses.touch(index, reads, writes)

    # --- running ---------------------------------------------------------------------------------

    def launch(self, repeat: int = 1) -> Launch:
        """Start it ``repeat`` times, one after the other, in one command.

        Returns:
            A :class:`Launch`: ``done()``, ``wait()``, ``result()`` (None), ``cycles``.

        Raises:
            ConflictError: it is not built, or closed. UsageError: ``repeat`` is out of range.
        """
        ready = self._ready()
        ready.last = launch = ready.launch(repeat)
        return launch

    def __call__(self, repeat: int = 1, timeout_s: float | None = None) -> Launch:
        """Run it and wait; returns the finished :class:`Launch`.

        Raises:
            DeviceFault, CommandTimeout, DeviceReset, CommandRefused (a link is down, say).
        """
        launch = self.launch(repeat)
        launch.result(timeout_s)
        return launch

    def timeline(self) -> list[Span]:
        """What the model expects of one launch: a span of each node, microseconds standing for
        cycles; for :mod:`accelvisor.timeline`.
        """
        from accelvisor.timeline.spans import Span

        plan = self.plan or build(self._ops(), latency=LATENCY)
        return [
            Span(
                lane=f"chip {s.chip}", queue=s.type.name.lower(),
                label=self.nodes[s.op].program.name, start_ns=s.start * 1000, end_ns=s.end * 1000,
                node=s.op, cycles=s.end - s.start, cycle_start=s.start,
            )
            for s in plan.spans
        ]  # fmt: skip

    @property
    def bytes_in_use(self) -> int:
        """Device memory that the graph itself owns: mailboxes, and what stands for temporaries."""
        return sum(t.nbytes for t in self._owned)

    def close(self) -> None:
        """Unload it, and free what it owns. Safe to call twice."""
        self._unload()
        owned, self._owned = self._owned, []
        for tensor in owned:
            tensor.close()

    def _unload(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.release()
            if self.function.stale(loaded.generation) is None:
                self.function.unload_graph(loaded.handle)

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise ConflictError(
                "the graph is not built, or closed", code="graph-not-built", where=self.name,
                hint="end its with block, or call build()",
            )  # fmt: skip
        return self._loaded

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.build()
        else:
            self.close()

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.nodes)} nodes>"


class Loaded(Bound):
    """An uploaded graph: launched as a bound program is."""

    def __init__(self, graph: Graph, handle: int) -> None:
        keep = list(dict.fromkeys(t for n in graph.nodes for t in n.bound))
        super().__init__(graph.function, handle, (), None, keep)
        self.handle = handle
        self.generation = graph.function.generation
        self.last: Launch | None = None

    def entry(self, repeat: int, flags: Flag | int) -> bytes:
        """The command."""
        return graph_launch(0, self.handle, repeat, flags)


def _nodes(after: After, graph: Graph | None = None) -> list[Recorded]:
    """The nodes that ``after`` names; with ``graph``, all must be its own."""
    given: Iterable[Any] = (after,) if isinstance(after, (Recorded, Event)) else after
    found: list[Recorded] = []
    for item in given:
        node = item.node if isinstance(item, Event) else item
        if not isinstance(node, Recorded) or (graph is not None and node.graph is not graph):
            raise UsageError(
                f"{node!r} is no node of this graph", code="node-foreign", where="graph",
                hint="after= takes nodes and recorded events of the same graph",
            )  # fmt: skip
        found.append(node)
    return found


__all__ = ["Event", "Graph", "Loaded", "ProgramError", "Recorded", "Stream"]
