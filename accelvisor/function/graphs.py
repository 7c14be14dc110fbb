"""GRAPH_LAUNCH: the queues of a graph on the engines of the function's chips.

A graph's progress is two words for each queue: how many entries are done in which turn, and the
tile of the node in progress. Events are derived from the former, so that a replaced worker goes on
with exactly what was signalled. A node's end is one store, before the signal that follows it: what
has been signalled is never done again, and what is done again has not been seen by anybody.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from accelvisor.abi import graphs as abi
from accelvisor.abi.graphs import Graph, Kind
from accelvisor.function import state as s
from accelvisor.function.chips import Attention, Engines, Job
from accelvisor.function.launch import Kept, Launch, Launcher, Progress
from accelvisor.function.pauses import Pauses
from accelvisor.function.pool import Pool
from accelvisor.function.state import State
from accelvisor.function.trace import Trace

#: Model cycles that a signal takes to a queue of another chip.
SIGNAL_CYCLES = 64


@dataclass(frozen=True, slots=True)
class Bound:
    """One node on concrete memory. ``kept`` is set out once scratch is there."""

    launch: Launch
    kept: Mapping[int, Kept]


@dataclass(frozen=True, slots=True)
class Times:
    """When each node begins and ends on the model clock, from the graph's start; how long it takes
    in all.
    """

    spans: tuple[tuple[int, int], ...]
    cycles: int


def simulate(graph: Graph, costs: Sequence[int]) -> Times:
    """The graph on the model clock: queues side by side, each entry as soon as it can be. A WAIT
    passes with the signal that makes it so, or :data:`SIGNAL_CYCLES` later where that came from
    another chip. Gone through in order of time, and of queues among equal times.

    Args:
        costs: cycles of each node.
    """
    keys, rows = list(graph.queues), list(graph.queues.values())
    at = [0] * len(rows)
    signals: dict[int, list[tuple[int, int]]] = {}
    waiting: dict[int, list[tuple[int, int]]] = {}
    spans = [(0, 0)] * len(graph.nodes)
    due = [(0, n) for n in range(len(rows))]
    end = 0
    while due:
        now, n = heapq.heappop(due)
        end = max(end, now)
        while at[n] < len(rows[n]):
            entry, chip = rows[n][at[n]], keys[n][0]
            if entry.kind is Kind.RUN:
                spans[entry.value] = (now, now + costs[entry.value])
                at[n] += 1
                heapq.heappush(due, (now + costs[entry.value], n))
                break
            given = signals.setdefault(entry.event, [])
            if entry.kind is Kind.SIGNAL:
                given.append((now, chip))
                for other, since in waiting.pop(entry.event, ()):
                    heapq.heappush(due, (max(since, now), other))
            elif len(given) < entry.value:
                waiting.setdefault(entry.event, []).append((n, now))
                break
            elif entry.value:
                when, where = given[entry.value - 1]
                passes = when + (SIGNAL_CYCLES if where != chip else 0)
                if passes > now:
                    heapq.heappush(due, (passes, n))
                    at[n] += 1
                    break
            at[n] += 1
    return Times(tuple(spans), end)


class Pace:
    """How long the nodes of a graph took lately: whether handing them to threads is worth it.

    To wake a thread costs more than a small node takes. So a graph of small ones is carried out by
    one thread, queue by queue as far as each can go; a graph of larger ones by its engines.
    """

    #: Nanoseconds that a node takes on average where threads begin to gain.
    WORTH_NS = 200_000

    def __init__(self) -> None:
        self._node_ns = self.WORTH_NS  # nobody knows: they are tried first

    @property
    def alone(self) -> bool:
        """Whether one thread should do it."""
        return self._node_ns < self.WORTH_NS

    def took(self, spent_ns: int, nodes: int) -> None:
        """The nodes of one turn took so long together."""
        if nodes:
            self._node_ns = (self._node_ns + spent_ns // nodes) // 2


class _Event:
    """What a queue waits for."""

    writes = False

    def __init__(self, counters: list[int], event: int, value: int) -> None:
        self._counters = counters
        self._event = event
        self._value = value

    def ready(self) -> bool:
        """Whether it was signalled often enough."""
        return self._counters[self._event] >= self._value


class Run:
    """One launch of a graph, from what its record says to its end."""

    def __init__(
        self,
        state: State,
        engines: Engines,
        launcher: Launcher,
        trace: Trace,
        graph: Graph,
        nodes: Sequence[Bound],
        record: int,
        note: Callable[[int, int, int, int], None],
        pace: Pace,
        attention: Attention,
    ) -> None:
        """``record``: number of the progress record. ``note``: told (engine, node, when it began,
        when it ended) of each node, in nanoseconds. ``attention`` is that of the caller's thread,
        for a graph that it carries out alone.
        """
        self._pace = pace
        self._attention = attention
        self._spent = 0
        self._u64 = state.u64
        self._engines = engines
        self._launcher = launcher
        self._trace = trace
        self._graph = graph
        self._nodes = nodes
        self._word = s.graph_word(record)
        self._note = note
        self._keys = list(graph.queues)
        events = [entry.event for row in graph.queues.values() for entry in row]
        self._counters = [0] * (max(events, default=0) + 1)

    def go(self, repeat: int) -> Pauses[None]:
        """Carry it out ``repeat`` times. Raises what a node raises."""
        u64, rows = self._u64, list(self._graph.queues.values())
        words = [self._word + 4 * n + s.G_POSITION for n in range(len(rows))]
        turn = max((u64[word] >> 32 for word in words), default=0)
        while turn < repeat:
            for word in words:
                if u64[word] >> 32 != turn:
                    u64[word] = turn << 32
            self._recount(words, rows)
            self._spent = 0
            if self._pace.alone:
                yield from self._alone(turn)
            else:
                jobs = [
                    Job(2 * key[0] + key[1], self._maker(n, turn))
                    for n, key in enumerate(self._keys)
                ]
                yield from self._engines.carry(jobs)
            self._pace.took(self._spent, len(self._nodes))
            turn += 1
            if turn < repeat:
                for word in words:
                    u64[word] = turn << 32

    def _alone(self, turn: int) -> Pauses[None]:
        """A turn on the caller's thread: by turns, each queue as far as it can go. One of them
        always can, or the graph would have been refused.
        """
        attention = self._attention
        left = deque(
            self._queue(n, turn, attention, self._engines.alone) for n in range(len(self._keys))
        )
        try:
            while left:
                steps = left[0]
                try:
                    next(steps)
                except StopIteration:
                    left.popleft()
                    continue
                left.rotate(-1)
                if attention():
                    yield None
        finally:
            for steps in left:
                steps.close()

    def _recount(self, words: Sequence[int], rows: Sequence[Sequence[abi.Entry]]) -> None:
        """The events of this turn, from what is done of each queue."""
        for event in range(len(self._counters)):
            self._counters[event] = 0
        for word, row in zip(words, rows, strict=True):
            for entry in row[: self._u64[word] & 0xFFFF_FFFF]:
                if entry.kind is Kind.SIGNAL:
                    self._counters[entry.event] += 1

    def _maker(self, n: int, turn: int) -> Callable[[Attention, Pool], Pauses[None]]:
        return lambda attention, pool: self._queue(n, turn, attention, pool)

    def _queue(self, n: int, turn: int, attention: Attention, pool: Pool) -> Pauses[None]:
        """One queue, on its engine's thread."""
        u64 = self._u64
        word = self._word + 4 * n
        row = self._graph.queues[self._keys[n]]
        at = u64[word + s.G_POSITION] & 0xFFFF_FFFF
        while at < len(row):
            entry = row[at]
            if entry.kind is Kind.WAIT:
                event = _Event(self._counters, entry.event, entry.value)
                while not event.ready():
                    yield event
            elif entry.kind is Kind.RUN:
                yield from self._node(n, turn << 32 | at, entry.value, attention, pool)
            at += 1
            u64[word + s.G_POSITION] = turn << 32 | at
            if entry.kind is Kind.SIGNAL:
                self._signal(entry.event)

    def _signal(self, event: int) -> None:
        with self._engines.events:
            self._counters[event] += 1
        self._engines.poke()

    def _node(
        self, n: int, position: int, node: int, attention: Attention, pool: Pool
    ) -> Pauses[None]:
        u64, word = self._u64, self._word + 4 * n
        if u64[word + s.G_NODE] != position + 1:
            # What the words say is of an earlier node; until the last store, so is this.
            u64[word + s.G_TILE] = 0
            u64[word + s.G_SNAPSHOT] = 0
            u64[word + s.G_NODE] = position + 1
        bound = self._nodes[node]
        progress = Progress(word + s.G_TILE, word + s.G_SNAPSHOT)
        # What the node itself costs: beside others its thread also waits for the interpreter.
        worked = time.thread_time_ns()
        began = self._trace.clock()
        yield from self._launcher.run(bound.launch, bound.kept, progress, 1, attention, pool)
        key, ended = self._keys[n], self._trace.clock()
        self._spent += time.thread_time_ns() - worked
        self._note(2 * key[0] + key[1], node, began, ended)
