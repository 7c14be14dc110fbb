"""From a task graph to queues: which operation runs when on which queue, and who waits for whom.

1 An operation's priority is the longest path from its start to the end of everything.
2 A simulation of list scheduling fixes each queue's order: a queue that is free takes, of what is
  ready, the operation of highest priority; ties go to the lowest id (Graham, "Bounds on
  Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17(2), 1969; priorities as in HLFET: Adam,
  Chandy and Dickson, CACM 17(12), 1974). Priority alone, regardless of readiness, would make a
  queue wait beside work that it could do.
3 A dependency inside one queue is kept by the queue's own order. Any other gets a WAIT at the
  consumer, unless what the consumer's queue has already waited for implies it (vector clocks:
  Fidge, 1988; Mattern, 1989; what is left is the transitive reduction). Each producing queue has
  one event, which counts its SIGNALs; many WAITs share one SIGNAL.

The simulated run is itself a legal one, so the queues cannot deadlock. Times are cycles of the
model clock, integers. A signal to another chip takes ``latency`` cycles, one on its own chip none.
Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from accelvisor.abi.graphs import Entry, Graph, Kind, Node, QueueType, order
from accelvisor.errors import ProgramError
from accelvisor.limits import LIMITS

Key = tuple[int, QueueType]  # a queue: chip and type


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: ``cost`` cycles on the queue of ``type`` of ``chip``, once ``deps`` are done.
    ``id`` is any integer that no other operation of the graph has.
    """

    id: int
    chip: int
    type: QueueType
    cost: int
    deps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """When the simulation ran an operation: [start, end) in cycles."""

    op: int
    chip: int
    type: QueueType
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Queues and what the model says of them.

    Attributes:
        queues: entries by queue; a RUN's value is the operation's index in the given order.
        spans: of every operation, in the given order.
        makespan: cycles from the first start to the last end.
        lower: no schedule is shorter: the busiest queue, or the longest path if that is longer.
        serial: no list schedule is longer: all costs one after the other, and the latencies of
            the path that has most of them.
        dependencies: how many were given, each once.
    """

    queues: Mapping[Key, tuple[Entry, ...]]
    spans: tuple[Span, ...]
    makespan: int
    lower: int
    serial: int
    dependencies: int
    chips: int = 1
    _counts: Mapping[Kind, int] = field(default_factory=dict)

    @property
    def waits(self) -> int:
        """How many WAITs the queues have."""
        return self._counts.get(Kind.WAIT, 0)

    @property
    def signals(self) -> int:
        """How many SIGNALs the queues have."""
        return self._counts.get(Kind.SIGNAL, 0)

    def graph(self, nodes: Sequence[Node]) -> Graph:
        """The container, with the caller's node for each operation, in the given order."""
        return Graph(self.chips, dict(self.queues), tuple(nodes))


def build(ops: Iterable[Op], *, latency: int = 0, one_queue: bool = False) -> Plan:
    """Queues for ``ops``.

    Args:
        latency: cycles that a signal takes to another chip.
        one_queue: put everything of a chip on its compute queue: what two queues are compared
            with, and of no use on a device.

    Raises:
        ProgramError: ``graph-cycle`` (the message names the cycle), ``graph-dependency`` (a
            dependency on nothing, an id twice, a negative cost), ``graph-size``.
    """
    tasks = _Tasks(list(ops), latency, one_queue)
    rows, spans = _simulate(tasks)
    queues = _entries(tasks, rows)
    counts = {k: sum(e.kind is k for row in queues.values() for e in row) for k in Kind}
    if sum(counts.values()) > LIMITS.graph_entries:
        raise ProgramError(
            f"{sum(counts.values())} entries, a graph may have {LIMITS.graph_entries}",
            code="graph-size", where="graph", hint="cut it in two, or make its programs larger",
        )  # fmt: skip
    chips = 1 + max((chip for chip, _ in tasks.keys), default=0)
    plan = Plan(
        queues=queues,
        spans=tuple(spans),
        makespan=max((s.end for s in spans), default=0),
        lower=tasks.lower(),
        serial=sum(tasks.costs) + tasks.latency_of_a_path(),
        dependencies=sum(len(d) for d in tasks.deps),
        chips=chips,
        _counts=counts,
    )
    # By construction it ends; a mistake here would hang a device, so it is looked at again.
    order(Graph(chips, dict(queues), tuple(Node(0) for _ in spans)))
    return plan


class _Tasks:
    """The operations by index, checked: who comes before and after, priorities."""

    def __init__(self, ops: Sequence[Op], latency: int, one_queue: bool) -> None:
        self.ids = [op.id for op in ops]
        self.costs = [op.cost for op in ops]
        self.keys: list[Key] = [
            (op.chip, QueueType.COMPUTE if one_queue else op.type) for op in ops
        ]
        self.latency = latency
        index = {op.id: i for i, op in enumerate(ops)}
        if len(index) != len(ops) or any(op.cost < 0 for op in ops) or latency < 0:
            raise _bad("an id is there twice, or a cost is negative")
        self.deps: list[list[int]] = []
        for op in ops:
            missing = [d for d in op.deps if d not in index]
            if missing:
                raise _bad(f"operation {op.id} depends on {missing[0]}, which is not there")
            self.deps.append(sorted({index[d] for d in op.deps}))
        self.users: list[list[int]] = [[] for _ in ops]
        for i, deps in enumerate(self.deps):
            for d in deps:
                self.users[d].append(i)
        self.sorted = self._topological()
        self.priority = [0] * len(ops)
        for i in reversed(self.sorted):
            after = (self.priority[u] + self.delay(i, u) for u in self.users[i])
            self.priority[i] = self.costs[i] + max(after, default=0)

    def delay(self, producer: int, consumer: int) -> int:
        """Cycles until ``consumer`` hears that ``producer`` is done."""
        return self.latency if self.keys[producer][0] != self.keys[consumer][0] else 0

    def lower(self) -> int:
        """The larger of the busiest queue and the longest path."""
        busy: dict[Key, int] = {}
        for key, cost in zip(self.keys, self.costs, strict=True):
            busy[key] = busy.get(key, 0) + cost
        return max([*busy.values(), *self.priority], default=0)

    def latency_of_a_path(self) -> int:
        """The most latency that one path has: while nothing runs at all, a signal of it is under
        way.
        """
        worst = [0] * len(self.ids)
        for i in reversed(self.sorted):
            worst[i] = max((worst[u] + self.delay(i, u) for u in self.users[i]), default=0)
        return max(worst, default=0)

    def _topological(self) -> list[int]:
        """Kahn's order, lowest index first."""
        left = [len(d) for d in self.deps]
        ready = [i for i, n in enumerate(left) if not n]
        done = []
        while ready:
            i = heapq.heappop(ready)
            done.append(i)
            for u in self.users[i]:
                left[u] -= 1
                if not left[u]:
                    heapq.heappush(ready, u)
        if len(done) < len(left):
            raise _cyclic([self.ids[i] for i in self._cycle(left)])
        return done

    def _cycle(self, left: Sequence[int]) -> list[int]:
        """One cycle among what could not be sorted, in the order in which it runs."""
        at = next(i for i, n in enumerate(left) if n)
        seen: dict[int, int] = {}
        path: list[int] = []
        while at not in seen:  # each of these has a dependency that is one of these
            seen[at] = len(path)
            path.append(at)
            at = next(d for d in self.deps[at] if left[d])
        return path[seen[at] :][::-1]


def _simulate(tasks: _Tasks) -> tuple[dict[Key, list[int]], list[Span]]:
    """List scheduling on the model clock: each queue's order, and each operation's span."""
    left = [len(d) for d in tasks.deps]
    rows: dict[Key, list[int]] = {key: [] for key in sorted(set(tasks.keys))}
    ready: dict[Key, list[tuple[int, int, int]]] = {key: [] for key in rows}
    idle = set(rows)
    spans: list[Span | None] = [None] * len(left)
    # (cycle, 0 = a queue comes free / 1 = an operation hears of a dependency, index)
    events: list[tuple[int, int, int]] = []

    def arrive(i: int) -> None:
        key = tasks.keys[i]
        heapq.heappush(ready[key], (-tasks.priority[i], tasks.ids[i], i))
        touched.add(key)

    touched: set[Key] = set()
    for i, n in enumerate(left):
        if not n:
            arrive(i)
    now = 0
    while True:
        for key in sorted(touched & idle):
            if ready[key]:
                i = heapq.heappop(ready[key])[2]
                end = now + tasks.costs[i]
                spans[i] = Span(tasks.ids[i], key[0], tasks.keys[i][1], now, end)
                rows[key].append(i)
                idle.discard(key)
                heapq.heappush(events, (end, 0, i))
        touched.clear()
        if not events:
            return rows, [s for s in spans if s is not None]
        now = events[0][0]
        while events and events[0][0] == now:
            _, kind, i = heapq.heappop(events)
            if kind == 0:
                idle.add(tasks.keys[i])
                touched.add(tasks.keys[i])
                for u in tasks.users[i]:
                    heapq.heappush(events, (now + tasks.delay(i, u), 1, u))
                continue
            left[i] -= 1
            if not left[i]:
                arrive(i)


def _entries(tasks: _Tasks, rows: Mapping[Key, Sequence[int]]) -> dict[Key, tuple[Entry, ...]]:
    """The queues' entries: runs in order, with the fewest waits that keep every dependency."""
    place = {i: at for row in rows.values() for at, i in enumerate(row)}
    waits = _waits(tasks, rows, place)
    awaited: dict[Key, set[int]] = {}
    for wanted in waits:
        for key, at in wanted:
            awaited.setdefault(key, set()).add(at)
    events = {key: n for n, key in enumerate(sorted(awaited))}
    values = {
        key: {at: n for n, at in enumerate(sorted(places), 1)} for key, places in awaited.items()
    }
    queues = {}
    for key, row in rows.items():
        entries: list[Entry] = []
        for at, i in enumerate(row):
            for other, until in sorted(waits[i]):
                entries.append(Entry(Kind.WAIT, events[other], values[other][until]))
            entries.append(Entry(Kind.RUN, 0, i))
            if at in values.get(key, ()):
                entries.append(Entry(Kind.SIGNAL, events[key], 0))
        queues[key] = tuple(entries)
    return queues


def _waits(
    tasks: _Tasks, rows: Mapping[Key, Sequence[int]], place: Mapping[int, int]
) -> list[list[tuple[Key, int]]]:
    """For each operation the (queue, place) pairs that it must wait for.

    ``clock[i]`` says how far each queue is known to be when ``i`` is done. Operations are visited
    so that whatever comes before one, by dependency or in its queue, has its clock already; of an
    operation's dependencies the latest is taken first, since it may imply the others.
    """
    before = {i: row[at - 1] for row in rows.values() for at, i in enumerate(row) if at}
    visit = _merged(tasks, before)
    rank = {i: n for n, i in enumerate(visit)}
    clocks: dict[int, dict[Key, int]] = {}
    waits: list[list[tuple[Key, int]]] = [[] for _ in tasks.ids]
    for i in visit:
        known = dict(clocks[before[i]]) if i in before else {}
        for d in sorted(tasks.deps[i], key=rank.__getitem__, reverse=True):
            key = tasks.keys[d]
            if known.get(key, -1) >= place[d]:
                continue
            waits[i].append((key, place[d]))
            for other, at in clocks[d].items():
                known[other] = max(known.get(other, -1), at)
        known[tasks.keys[i]] = place[i]
        clocks[i] = known
    return waits


def _merged(tasks: _Tasks, before: Mapping[int, int]) -> list[int]:
    """An order in which neither dependencies nor queues go backwards."""
    after = {first: second for second, first in before.items()}
    left = [len(tasks.deps[i]) + (i in before) for i in range(len(tasks.ids))]
    ready = [i for i, n in enumerate(left) if not n]
    found = []
    while ready:
        i = ready.pop()
        found.append(i)
        for u in [*tasks.users[i], *([after[i]] if i in after else [])]:
            left[u] -= 1
            if not left[u]:
                ready.append(u)
    return found


def _bad(message: str) -> ProgramError:
    return ProgramError(message, code="graph-dependency", where="graph")


def _cyclic(ids: Sequence[int]) -> ProgramError:
    path = " -> ".join(str(i) for i in [*ids[:12], *(["..."] if len(ids) > 12 else []), ids[0]])
    return ProgramError(
        f"operations wait for each other in a circle: {path}",
        code="graph-cycle", where="graph", hint="leave out one of these dependencies",
    )  # fmt: skip
