"""Queues made of task graphs: against a serial run, bounds, and the figures that are asked for."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from accelvisor.abi.graphs import Graph, Kind, Node, QueueType, decode, encode, order
from accelvisor.errors import ProgramError
from accelvisor.guest.graphs.builder import Op, Plan, build

C, T = QueueType.COMPUTE, QueueType.TRANSFER
PRIME = 1_000_003


def random_graph(seed: int) -> list[Op]:
    r = random.Random(seed)
    n, units = r.randint(1, 40), r.randint(1, 4)
    density = r.choice((0.02, 0.1, 0.3))
    ops = []
    for i in range(n):
        deps = tuple(d for d in range(i) if r.random() < density)
        ops.append(Op(i, r.randrange(units), r.choice((C, T)), r.randint(0, 30), deps))
    return ops


def backpropagation(layers: int, units: int, compute: int, transfer: int) -> list[Op]:
    """Layer by layer on each unit; a layer's exchange needs that layer of every unit."""
    ops = []
    for layer in range(layers):
        for unit in range(units):
            before = ((layer - 1) * units + unit,) if layer else ()
            ops.append(Op(layer * units + unit, unit, C, compute, before))
    for layer in range(layers):
        needs = tuple(layer * units + u for u in range(units))
        for unit in range(units):
            ops.append(Op((layers + layer) * units + unit, unit, T, transfer, needs))
    return ops


def value(op: Op, values: dict[int, int]) -> int:
    """Depends on the values of all that it needs, and on nothing else."""
    return (op.id * 7919 + sum(values[d] * (i + 2) for i, d in enumerate(op.deps))) % PRIME


def run_queues(plan: Plan, ops: list[Op], seed: int) -> tuple[dict[int, int], list[int]]:
    """Carry out the entries, an arbitrary queue each time; a needed value that is missing fails."""
    r = random.Random(seed)
    at = dict.fromkeys(plan.queues, 0)
    counters: dict[int, int] = {}
    values: dict[int, int] = {}
    ran: list[int] = []
    while any(at[key] < len(row) for key, row in plan.queues.items()):
        able = []
        for key, row in plan.queues.items():
            if at[key] < len(row):
                entry = row[at[key]]
                if entry.kind is not Kind.WAIT or counters.get(entry.event, 0) >= entry.value:
                    able.append(key)
        assert able, "the queues wait for ever"
        key = r.choice(able)
        entry = plan.queues[key][at[key]]
        at[key] += 1
        if entry.kind is Kind.SIGNAL:
            counters[entry.event] = counters.get(entry.event, 0) + 1
        elif entry.kind is Kind.RUN:
            op = ops[entry.value]
            assert (op.chip, op.type) == key
            values[op.id] = value(op, values)
            ran.append(op.id)
    return values, ran


def test_a_thousand_graphs_give_what_a_serial_run_gives() -> None:
    for seed in range(1000):
        ops = random_graph(seed)
        latency = (0, 0, 5)[seed % 3]
        plan = build(ops, latency=latency)
        wanted: dict[int, int] = {}
        for op in ops:  # ids are in topological order
            wanted[op.id] = value(op, wanted)
        values, ran = run_queues(plan, ops, seed)
        assert values == wanted
        assert sorted(ran) == [op.id for op in ops]  # each once
        assert plan.lower <= plan.makespan <= plan.serial
        nodes = [Node(1)] * len(ops)
        assert sorted(order(plan.graph(nodes))) == list(range(len(ops)))
        if latency == 0:
            assert plan.serial == sum(op.cost for op in ops)


def test_the_simulated_run_keeps_dependencies_and_each_queue_does_one_thing_at_a_time() -> None:
    for seed in range(200):
        ops = random_graph(seed)
        plan = build(ops, latency=3)
        spans = {s.op: s for s in plan.spans}
        for op in ops:
            for d in op.deps:
                late = 3 if ops[d].chip != op.chip else 0
                assert spans[op.id].start >= spans[d].end + late
        for key in plan.queues:
            mine = sorted((s.start, s.end) for s in plan.spans if (s.chip, s.type) == key)
            assert all(a[1] <= b[0] for a, b in pairwise(mine))


def reachable(plan: Plan, without: tuple[object, int] | None = None) -> set[tuple[int, int]]:
    """Which operations certainly come before which, by the entries alone."""
    edges: dict[int, set[int]] = {}
    signals: dict[int, list[int]] = {}
    for row in plan.queues.values():
        last = None
        for entry in row:
            if entry.kind is Kind.RUN:
                edges.setdefault(entry.value, set())
                if last is not None:
                    edges[entry.value].add(last)
                last = entry.value
            elif entry.kind is Kind.SIGNAL:
                assert last is not None
                signals.setdefault(entry.event, []).append(last)
    for key, row in plan.queues.items():
        wanted = []
        for n, entry in enumerate(row):
            if entry.kind is Kind.WAIT and (key, n) != without:
                wanted.append(signals[entry.event][entry.value - 1])
            elif entry.kind is Kind.RUN:
                edges[entry.value].update(wanted)
                wanted = []
    found: set[tuple[int, int]] = set()
    for start in edges:
        todo, seen = [start], set()
        while todo:
            for d in edges[todo.pop()] - seen:
                seen.add(d)
                todo.append(d)
        found |= {(d, start) for d in seen}
    return found


def test_no_wait_can_be_left_out() -> None:
    waits = 0
    for seed in range(60):
        ops = random_graph(seed)
        plan = build(ops)
        needed = {(d, op.id) for op in ops for d in op.deps}
        assert needed <= reachable(plan)
        for key, row in plan.queues.items():
            for n, entry in enumerate(row):
                if entry.kind is Kind.WAIT:
                    waits += 1
                    assert not needed <= reachable(plan, (key, n))
    assert waits > 300


@pytest.mark.parametrize(("transfer", "least"), [(50, 1.4), (100, 1.8)])
def test_back_propagation_overlaps_its_exchange(transfer: int, least: float) -> None:
    ops = backpropagation(20, 4, 100, transfer)
    two, one = build(ops), build(ops, one_queue=True)
    assert one.makespan / two.makespan >= least
    assert (two.dependencies, two.waits) == (396, 320)
    assert one.makespan == 20 * (100 + transfer)


def test_an_event_counts_for_all_waits_on_its_queue() -> None:
    ops = [Op(0, 0, C, 1), Op(1, 0, C, 1), Op(2, 0, T, 1, (0,)), Op(3, 1, T, 1, (0, 1))]
    plan = build(ops)
    assert plan.signals == 2
    assert plan.waits == 2  # operation 3 hears of 0 with 1
    assert {e.event for row in plan.queues.values() for e in row} == {0}


def test_what_is_ready_goes_before_what_is_only_important() -> None:
    # the important one, 3, waits for a long transfer; 1 must not wait behind it
    ops = [Op(0, 0, T, 50), Op(1, 0, C, 10), Op(3, 0, C, 100, (0,))]
    spans = {s.op: s for s in build(ops).spans}
    assert spans[1].start == 0
    assert spans[3].start == 50


def test_ties_go_to_the_lowest_id() -> None:
    plan = build([Op(i, 0, C, 5) for i in (3, 1, 2)])
    assert [e.value for e in plan.queues[0, C]] == [1, 2, 0]


def test_a_circle_is_refused_with_its_names() -> None:
    ops = [Op(1, 0, C, 1, (7,)), Op(5, 0, T, 1, (1,)), Op(7, 1, C, 1, (5,)), Op(9, 0, C, 1, (7,))]
    with pytest.raises(ProgramError) as e:
        build(ops)
    assert e.value.code == "graph-cycle"
    path = [int(word) for word in e.value.message.split(": ")[1].split(" -> ")]
    assert path in ([1, 5, 7, 1], [5, 7, 1, 5], [7, 1, 5, 7])


@pytest.mark.parametrize(
    "ops",
    [
        [Op(0, 0, C, 1, (1,))],
        [Op(0, 0, C, 1), Op(0, 0, T, 1)],
        [Op(0, 0, C, -1)],
    ],
)
def test_what_is_no_task_graph_is_refused(ops: list[Op]) -> None:
    with pytest.raises(ProgramError) as e:
        build(ops)
    assert e.value.code == "graph-dependency"


def test_a_graph_over_the_limit_is_refused_and_a_large_one_is_not() -> None:
    large = build([Op(i, i % 16, C, 1, (i - 1,) if i % 3 else ()) for i in range(5000)])
    assert len(large.spans) == 5000
    with pytest.raises(ProgramError) as e:
        build([Op(i, 0, C, 1) for i in range(16385)])
    assert e.value.code == "graph-size"


def test_nothing_makes_an_empty_plan() -> None:
    plan = build([])
    assert (plan.makespan, plan.lower, plan.serial, plan.queues) == (0, 0, 0, {})


def test_the_container_survives_its_encoding() -> None:
    plan = build(random_graph(4))
    graph = plan.graph([Node(i + 1) for i in range(len(plan.spans))])
    assert decode(encode(graph)) == Graph(graph.chips, graph.queues, graph.nodes)
