"""Graphs: two queues for each of four chips, on a device in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import Binding, Flag, Query, scheduled
from accelvisor.abi.dtypes import DType
from accelvisor.abi.graphs import Entry, Graph, Kind, Node, QueueType, encode
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.abi.registers import QueueReg, QueueStatus
from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as s
from accelvisor.function.graphs import SIGNAL_CYCLES, Pace, simulate
from tests.function.harness import Local, Ring, operation, wait_for

F32 = DType.FLOAT32
COMPUTE, TRANSFER = QueueType.COMPUTE, QueueType.TRANSFER
Queues = dict[tuple[int, QueueType], tuple[Entry, ...]]


def run(node: int) -> Entry:
    return Entry(Kind.RUN, 0, node)


def signal(event: int) -> Entry:
    return Entry(Kind.SIGNAL, event)


def wait(event: int, value: int = 1) -> Entry:
    return Entry(Kind.WAIT, event, value)


@pytest.fixture
def local() -> Iterator[Local]:
    with Local(chips=4, cores=4) as device:
        yield device


class Bench:
    """Tensors, a program that adds one to another in place, and one that moves."""

    def __init__(self, local: Local, n: int = 1000) -> None:
        self.local = local
        self.n = n
        self.ring: Ring = local.ring()
        self.ring.open("graph")
        self.one = self.ring.tensor(np.ones(n, np.float32))
        self.tensors = [self.ring.tensor(np.zeros(n, np.float32)) for _ in range(6)]
        pair = (Slot(F32, (n,), Role.INPUT), Slot(F32, (n,), Role.OUTPUT))
        self.adds = self.ring.load(Program(pair, (operation("add", 1, 0, 1),)))
        self.moves = self.ring.load(Program(pair, (operation("copy", 0, 1),)))

    def add(self, into: int, what: int | None = None) -> Node:
        source = self.one if what is None else self.tensors[what]
        return Node(self.adds, (Binding(source, 0), Binding(self.tensors[into], 0)))

    def move(self, source: int, target: int) -> Node:
        return Node(
            self.moves, (Binding(self.tensors[source], 0), Binding(self.tensors[target], 0))
        )

    def load(self, queues: Queues, nodes: Sequence[Node], chips: int = 4) -> abi.Completion:
        raw = encode(Graph(chips, queues, tuple(nodes)))
        source = self.local.buffer(raw)
        return self.ring.do(abi.graph_load, source.whole(len(raw)))

    def launch(self, queues: Queues, nodes: Sequence[Node], repeat: int = 1) -> abi.Completion:
        loaded = self.load(queues, nodes)
        assert loaded.status == 0, self.ring.fault()
        return self.ring.do(abi.graph_launch, loaded.value, repeat)

    def value(self, tensor: int) -> float:
        values = self.ring.read(self.tensors[tensor], "float32", (self.n,))
        assert (values == values[0]).all()
        return float(values[0])


def pipeline(bench: Bench) -> tuple[Queues, list[Node]]:
    """0 := 0 + 1 on chip 0; moved to 1 by its transfer queue; 2 := 2 + 1 on chip 1."""
    queues: Queues = {
        (0, COMPUTE): (run(0), signal(0)),
        (0, TRANSFER): (wait(0), run(1), signal(1)),
        (1, COMPUTE): (wait(1), run(2)),
    }
    return queues, [bench.add(0), bench.move(0, 1), bench.add(2, 1)]


def test_queues_wait_for_each_other_and_no_more(local: Local) -> None:
    bench = Bench(local)
    done = bench.launch(*pipeline(bench))
    assert done.status == 0
    assert [bench.value(n) for n in range(3)] == [1, 1, 1]


def test_a_graph_is_repeated_turn_after_turn(local: Local) -> None:
    bench = Bench(local)
    queues, nodes = pipeline(bench)
    once = bench.launch(queues, nodes)
    more = bench.launch(queues, nodes, repeat=9)
    assert [bench.value(n) for n in range(3)] == [10, 10, sum(range(11))]
    assert more.cycles == 9 * once.cycles


def test_the_clock_of_a_graph_is_that_of_its_longest_way(local: Local) -> None:
    bench = Bench(local)
    alone = bench.launch({(0, COMPUTE): (run(0),)}, [bench.add(0)]).cycles
    side = bench.launch(
        {(chip, COMPUTE): (run(chip),) for chip in range(4)}, [bench.add(n) for n in range(4)]
    )
    row = bench.launch(
        {(0, COMPUTE): tuple(run(n) for n in range(4))}, [bench.add(n) for n in range(4)]
    )
    assert (side.cycles, row.cycles) == (alone, 4 * alone)
    crossing = bench.launch(
        {(0, COMPUTE): (run(0), signal(3)), (1, COMPUTE): (wait(3), run(1))},
        [bench.add(0), bench.add(0)],
    )
    assert crossing.cycles == 2 * alone + SIGNAL_CYCLES


@pytest.mark.parametrize(
    ("queues", "nodes", "says"),
    [
        ({(0, COMPUTE): (wait(0), run(0), signal(1)), (1, COMPUTE): (wait(1), signal(0))}, 1,
         "wait for ever"),
        ({(0, COMPUTE): (run(0), wait(0, 2), signal(0))}, 1, "wait for ever"),
        ({(0, COMPUTE): (run(0), run(0))}, 1, "run twice"),
        ({(0, COMPUTE): (run(0),)}, 2, "run by no queue"),
    ],
)  # fmt: skip
def test_a_graph_that_cannot_end_is_refused(
    local: Local, queues: Queues, nodes: int, says: str
) -> None:
    bench = Bench(local)
    done = bench.load(queues, [bench.add(n) for n in range(nodes)])
    assert done.status == CommandStatus.PROGRAM_INVALID
    assert says in bench.ring.fault()["text"]


def test_a_graph_is_held_against_the_function_when_it_is_launched(local: Local) -> None:
    bench = Bench(local)
    wrong = {
        "computes, and is on the transfer queue": ({(0, TRANSFER): (run(0),)}, [bench.add(0)]),
        "bindings": ({(0, COMPUTE): (run(0),)}, [Node(bench.adds, ())]),
        "names no object": ({(0, COMPUTE): (run(0),)}, [Node(0x77_0000_0001, ())]),
        "names no program": ({(0, COMPUTE): (run(0),)}, [Node(bench.one, ())]),
    }
    for says, (queues, nodes) in wrong.items():
        assert bench.launch(queues, nodes).status != 0  # type: ignore[arg-type]
        assert says in bench.ring.fault()["text"]
    many = bench.load({(7, COMPUTE): (run(0),)}, [bench.add(0)], chips=8)
    assert bench.ring.do(abi.graph_launch, many.value).status == CommandStatus.BAD_DESCRIPTOR
    assert bench.ring.do(abi.graph_launch, bench.one).status == CommandStatus.BAD_HANDLE
    assert bench.value(0) == 0


def test_a_node_that_fails_stops_the_others(local: Local) -> None:
    bench = Bench(local, 100_000)
    slots = (Slot(F32, (2, 4), Role.INPUT), Slot(DType.INT64, (1,), Role.INPUT),
             Slot(F32, (1, 4), Role.OUTPUT))  # fmt: skip
    gather = bench.ring.load(Program(slots, (operation("gather_rows", 0, 1, 2),)))
    handles = (
        bench.ring.tensor(np.zeros((2, 4), np.float32)),
        bench.ring.tensor(np.array([7], np.int64)),
        bench.ring.tensor(np.zeros((1, 4), np.float32)),
    )
    bad = Node(gather, tuple(Binding(handle, 0) for handle in handles))
    done = bench.launch(
        {(0, COMPUTE): (run(0),), (1, COMPUTE): (run(1),) }, [bad, bench.add(0)], repeat=1_000_000
    )
    assert done.status == CommandStatus.NUMERIC
    assert bench.ring.register(QueueReg.STATUS) == QueueStatus.FAULTED


def test_small_nodes_are_carried_out_by_one_thread_and_large_ones_by_their_engines() -> None:
    pace = Pace()
    assert not pace.alone, "nobody knows yet"
    for _ in range(3):
        pace.took(10 * 20_000, 10)
    assert pace.alone
    pace.took(0, 0)
    assert pace.alone
    for _ in range(3):
        pace.took(10 * 2_000_000, 10)
    assert not pace.alone


def test_a_graph_can_be_unloaded_and_its_handle_is_stale(local: Local) -> None:
    bench = Bench(local)
    handle = bench.load(*pipeline(bench)).value
    assert {o["kind"] for o in bench.ring.query(Query.OBJECTS)} == {"tensor", "program", "graph"}
    assert bench.ring.do(abi.graph_unload, handle).status == 0
    assert bench.ring.do(abi.graph_launch, handle).status == CommandStatus.BAD_HANDLE


def test_a_graph_need_not_be_ordered(local: Local) -> None:
    bench = Bench(local, 50_000)
    handle = bench.load(*pipeline(bench)).value
    graph = bench.ring.next_cookie()
    bench.ring.post(scheduled(abi.graph_launch(graph, handle, 2000), Flag.SYNC, 0, 1))
    after = bench.ring.next_cookie()
    bench.ring.post(scheduled(abi.nop(after), Flag.CONDITIONAL, on=1))
    plain = bench.ring.next_cookie()
    bench.ring.post(scheduled(abi.nop(plain), Flag.PLAIN))
    bench.ring.submit()
    local.wait(lambda: bench.ring.ready() == 3)
    done = [bench.ring.take() for _ in range(3)]
    assert [(c.cookie, c.status) for c in done] == [(plain, 0), (graph, 0), (after, 0)]
    assert bench.value(0) == 2000


def test_the_next_worker_goes_on_in_the_middle_of_a_graph(local: Local) -> None:
    bench = Bench(local, 30_000)
    handle = bench.load(*pipeline(bench)).value
    bench.ring.post(abi.graph_launch(bench.ring.next_cookie(), handle, 4000))
    bench.ring.submit()
    word = s.graph_word(0)
    for turn in (5, 50, 120):
        wait_for(lambda turn=turn: local.state.u64[word] >> 32 >= turn, "turns to pass")
        local.restart()
        bench.ring.words = local.window.cast("I")
        local._rings.append(bench.ring)
    local.wait(bench.ring.ready)
    assert bench.ring.take().status == 0
    assert [bench.value(n) for n in range(3)] == [4000, 4000, sum(range(4001))]
    assert not bytes(local.state.u8[s.GRAPHS_AT : s.LINKS_AT]).strip(b"\0")


def test_a_graph_stands_still_while_the_function_is_frozen(local: Local) -> None:
    bench = Bench(local, 30_000)
    handle = bench.load(*pipeline(bench)).value
    bench.ring.post(abi.graph_launch(bench.ring.next_cookie(), handle, 8000))
    bench.ring.submit()
    wait_for(lambda: local.state.u64[s.graph_word(0)] >> 32 > 3, "turns to pass")
    local.device.engine.freeze(s.FREEZE_CONTROL, 5)
    before = local.state.digest(), bytes(local.device.memory.view)
    assert not local.device.engine.engines._at_work
    assert (local.state.digest(), bytes(local.device.memory.view)) == before
    local.device.engine.thaw(s.FREEZE_CONTROL)
    local.wait(bench.ring.ready)
    assert bench.ring.take().status == 0
    assert bench.value(0) == 8000


def test_who_ran_when_is_told_by_node(local: Local) -> None:
    bench = Bench(local)
    done = bench.launch(*pipeline(bench))
    told = bench.ring.query(Query.TRACE)
    spans = {span["node"]: span for span in told["spans"] if span["node"] >= 0}
    assert told["dropped"] == 0
    assert [(spans[n]["chip"], spans[n]["queue"]) for n in range(3)] == [
        (0, "compute"), (0, "transfer"), (1, "compute"),
    ]  # fmt: skip
    assert [spans[n]["label"] for n in range(3)] == ["add", "copy", "add"]
    for n in (1, 2):
        assert spans[n]["start_ns"] >= spans[n - 1]["end_ns"]
        assert spans[n]["cycle_start"] >= spans[n - 1]["cycle_start"] + spans[n - 1]["cycles"]
    last = spans[2]["cycle_start"] + spans[2]["cycles"] - spans[0]["cycle_start"]
    assert last == done.cycles
    assert {span["name"] for span in spans.values()} == {"graph"}


# --- the model clock against a plainer derivation -------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, list[int]]:
    """A random order of things, dealt to queues: so it can run."""
    keys = [(chip, kind) for chip in range(3) for kind in QueueType]
    rows: dict[tuple[int, QueueType], list[Entry]] = {key: [] for key in keys}
    given_events: dict[int, int] = {}
    costs = []
    for _ in range(draw(st.integers(1, 25))):
        key = draw(st.sampled_from(keys))
        what = draw(st.integers(0, 3))
        event = draw(st.integers(0, 3))
        if what < 2:
            rows[key].append(run(len(costs)))
            costs.append(draw(st.integers(0, 300)))
        elif what == 2:
            rows[key].append(signal(event))
            given_events[event] = given_events.get(event, 0) + 1
        else:
            rows[key].append(wait(event, draw(st.integers(0, given_events.get(event, 0)))))
    queues = {key: tuple(row) for key, row in rows.items() if row}
    return Graph(3, queues, tuple(Node(n + 1) for n in range(len(costs)))), costs


def tick_by_tick(graph: Graph, costs: list[int]) -> tuple[list[int], int]:
    """Cycle after cycle: what every queue does in it. Slow, and nothing to get wrong."""
    keys = list(graph.queues)
    at, busy_until = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
    given: dict[int, list[tuple[int, int]]] = {}
    starts = [0] * len(costs)
    now = last = 0
    while any(at[key] < len(graph.queues[key]) for key in keys):
        moved = True
        while moved:
            moved = False
            for key in keys:
                row = graph.queues[key]
                while at[key] < len(row) and busy_until[key] <= now:
                    entry = row[at[key]]
                    if entry.kind is Kind.RUN:
                        starts[entry.value] = now
                        busy_until[key] = now + costs[entry.value]
                        last = max(last, busy_until[key])
                    elif entry.kind is Kind.SIGNAL:
                        given.setdefault(entry.event, []).append((now, key[0]))
                    elif entry.value:
                        signals = given.get(entry.event, [])
                        if len(signals) < entry.value:
                            break
                        when, chip = signals[entry.value - 1]
                        if now < when + (SIGNAL_CYCLES if chip != key[0] else 0):
                            break
                    last = max(last, now)
                    at[key] += 1
                    moved = True
        now += 1
    return starts, last


@settings(max_examples=100)
@given(graphs())
def test_the_model_clock_is_that_of_queues_watched_cycle_by_cycle(
    case: tuple[Graph, list[int]]
) -> None:
    graph, costs = case
    events = [e.event for row in graph.queues.values() for e in row if e.kind is Kind.SIGNAL]
    if len({(e, key) for key, row in graph.queues.items() for e in
            (x.event for x in row if x.kind is Kind.SIGNAL)}) != len(set(events)):  # fmt: skip
        return  # several queues give one event: at equal times their order is the clock's own
    times = simulate(graph, costs)
    starts, last = tick_by_tick(graph, costs)
    assert [first for first, _ in times.spans] == starts
    assert times.cycles == last
