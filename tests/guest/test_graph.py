"""Graphs recorded through streams and events, against the same programs called one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.abi.commands import Opcode
from accelvisor.abi.graphs import Entry, Kind, QueueType
from accelvisor.errors import ConflictError, ProgramError, UsageError
from accelvisor.guest.errors import DeviceFault, DeviceReset
from accelvisor.guest.function import Function
from accelvisor.guest.graphs.access import Accesses, Range
from accelvisor.guest.graphs.graph import Graph
from accelvisor.guest.graphs.profile import profile
from accelvisor.guest.program import Program

from .graph_device import GraphDevice

C, T = QueueType.COMPUTE, QueueType.TRANSFER


@pytest.fixture
def device() -> GraphDevice:
    return GraphDevice(real_kernels=True, window_bytes=1 << 20, entries=64)


@pytest.fixture
def fn(device: GraphDevice, open_function: Callable[..., Function]) -> Function:
    return open_function(device)


def pair(fn: Function, name: str, n: int = 8) -> Program:
    with fn.program(name) as p:
        p.output(p.call(name, p.input((n,)), p.input((n,))))
    return p


def copying(fn: Function, n: int = 8) -> Program:
    with fn.program("copy") as p:
        p.output(p.call("copy", p.input((n,))))
    return p


def adding(fn: Function, n: int = 8) -> Program:
    """y += x, in place."""
    with fn.program("add-to") as p:
        x, y = p.input((n,)), p.parameter((n,))
        p.call("add", x, y, out=y)
    return p


# --- recording -----------------------------------------------------------------------------------


def test_two_streams_that_meet_by_an_event(fn: Function) -> None:
    add, mul = pair(fn, "add"), pair(fn, "mul")
    a, b = fn.tensor(np.arange(8, dtype=np.float32)), fn.ones(8)
    with fn.graph() as g:
        s, t = g.stream(chip=0), g.stream(chip=1)
        x = s.run(add, a, b)
        t.wait(s.record())
        y = t.run(mul, x, x)
    launch = g()
    assert launch.done()
    assert launch.cycles >= 0
    assert np.array_equal(y.numpy(), (np.arange(8) + 1.0) ** 2)
    assert g.nodes[1].deps == {0}


def test_a_graph_runs_again_with_what_its_tensors_hold_then(fn: Function) -> None:
    x, y = fn.ones(8), fn.zeros(8)
    with fn.graph() as g:
        g.run(adding(fn), x, y)
    g(repeat=3)
    launch = g.launch()
    assert launch.result() is None
    assert y.numpy().tolist() == [4.0] * 8
    x.copy_(np.full(8, 10))
    g()
    assert y.numpy().tolist() == [14.0] * 8


def test_programs_that_only_move_data_run_on_the_transfer_queue(fn: Function) -> None:
    with fn.graph() as g:
        x = g.run(copying(fn), fn.ones(8), chip=2)
        g.run(pair(fn, "add"), x, x, chip=2)
    assert g.plan is not None
    assert set(g.plan.queues) == {(2, T), (2, C)}
    assert g.plan.waits == 1


def test_a_stream_keeps_its_order_without_shared_tensors(fn: Function) -> None:
    add = pair(fn, "add")
    with fn.graph() as g:
        s = g.stream()
        for _ in range(3):
            s.run(add, fn.ones(8), fn.ones(8))
        first = s.last
        s.run(add, fn.ones(8), fn.ones(8))
    assert [sorted(n.deps) for n in g.nodes] == [[], [0], [1], [2]]
    assert first is g.nodes[2]


def test_after_takes_nodes_and_events_of_the_same_graph_only(fn: Function) -> None:
    add, x = pair(fn, "add"), fn.ones(8)
    with fn.graph(automatic=False) as g:
        first = g.node(add, x, x)
        g.run(add, x, x, chip=1, after=first)
        g.run(add, x, x, chip=2, after=[first, g.nodes[1]])
        with fn.graph() as other:
            foreign = other.node(add, x, x)
        for wrong in (foreign, other.event(), g.event(), "node"):
            with pytest.raises(UsageError) as caught:
                g.run(add, x, x, after=[wrong])  # type: ignore[list-item]
            assert caught.value.code == "node-foreign"
    assert [sorted(n.deps) for n in g.nodes] == [[], [0], [0, 1]]


def test_an_event_that_was_never_recorded_is_not_waited_for(fn: Function) -> None:
    with pytest.raises(UsageError) as caught:
        fn.graph().stream().wait(fn.graph().event())
    assert caught.value.code == "event-unrecorded"


def test_a_chip_that_is_not_there_is_refused(fn: Function) -> None:
    for make in (lambda: fn.graph().stream(4), lambda: fn.stream(-1)):
        with pytest.raises(UsageError) as caught:
            make()
        assert caught.value.code == "chip-unknown"


def test_an_empty_graph_is_refused_and_a_built_one_is_closed_to_more(fn: Function) -> None:
    with pytest.raises(UsageError) as empty:
        fn.graph().build()
    assert empty.value.code == "graph-empty"
    add, x = pair(fn, "add"), fn.ones(8)
    with fn.graph() as g:
        with pytest.raises(ConflictError) as early:
            g.launch()
        g.run(add, x, x)
    with pytest.raises(ConflictError) as built:
        g.run(add, x, x)
    g.close()
    g.close()
    with pytest.raises(ConflictError) as closed:
        g()
    assert [e.value.code for e in (early, built, closed)] == [
        "graph-not-built", "graph-built", "graph-not-built",
    ]  # fmt: skip
    assert fn.transport.graphs == {}  # type: ignore[attr-defined]


def test_a_graph_of_a_context_that_is_gone_says_so(fn: Function) -> None:
    with fn.graph() as g:
        g.run(pair(fn, "add"), fn.ones(8), fn.ones(8))
    fn.restart()
    with pytest.raises(DeviceReset) as caught:
        g()
    assert caught.value.code == "object-gone"
    g.close()


def test_an_error_while_recording_leaves_nothing_uploaded(fn: Function) -> None:
    with pytest.raises(UsageError), fn.graph() as g:
        g.run(pair(fn, "add"), fn.ones(8), fn.ones(7))
    assert fn.transport.graphs == {}  # type: ignore[attr-defined]


# --- automatic dependencies ----------------------------------------------------------------------


def ranges(r: random.Random, most: int) -> list[Range]:
    found = []
    for _ in range(r.randint(0, most)):
        start = r.randint(0, 20)
        found.append(Range(r.randint(1, 2), start, start + r.randint(0, 8)))
    return found


def overlap(a: list[Range], b: list[Range]) -> bool:
    return any(
        x.handle == y.handle and max(x.start, y.start) < min(x.end, y.end) for x in a for y in b
    )


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_whoever_may_race_is_ordered_and_nobody_else(seed: int) -> None:
    r = random.Random(seed)
    steps = [(ranges(r, 3), ranges(r, 2)) for _ in range(12)]
    accesses = Accesses()
    before: list[set[int]] = []
    for n, (reads, writes) in enumerate(steps):
        direct = accesses.touch(n, reads, writes)
        assert all(d < n for d in direct)
        for d in direct:  # no dependency without a cause
            assert overlap(writes, steps[d][0] + steps[d][1]) or overlap(reads, steps[d][1])
        before.append(set().union(direct, *(before[d] for d in direct)))
    for n, (reads, writes) in enumerate(steps):
        for d in range(n):
            if overlap(writes, steps[d][0] + steps[d][1]) or overlap(reads, steps[d][1]):
                assert d in before[n]


@pytest.mark.parametrize("seed", range(12))
def test_a_recorded_graph_gives_what_the_same_calls_give(
    seed: int, open_function: Callable[..., Function]
) -> None:
    """Random programs on random views, chips and queues; the device runs queues in any order."""
    r = random.Random(seed)
    device = GraphDevice(real_kernels=True, window_bytes=1 << 20, entries=64, seed=seed)
    fn = open_function(device)
    start = [np.array([r.randint(-3, 3) for _ in range(32)], np.float32) for _ in range(3)]
    steps = []
    for _ in range(30):
        name = r.choice(("add", "sub", "maximum", "copy"))
        views = [(r.randrange(3), 8 * r.randrange(4)) for _ in range(3)]
        steps.append((name, views, r.randrange(4)))

    def play(run: Callable[[Program, int, Any, Any], Any]) -> list[list[float]]:
        tensors = [fn.tensor(a) for a in start]
        for name, views, chip in steps:
            a, b, out = (tensors[t][at : at + 8] for t, at in views)
            program = copying(fn) if name == "copy" else pair(fn, name)
            run(program, chip, (a,) if name == "copy" else (a, b), out)
        return [t.numpy().tolist() for t in tensors]

    wanted = play(lambda program, chip, args, out: program(*args, out=out))
    g = fn.graph()

    def record(program: Program, chip: int, args: Any, out: Any) -> None:
        g.run(program, *args, chip=chip, out=out)

    kept: list[Any] = []
    tensors = [fn.tensor(a) for a in start]
    kept.append(tensors)
    for name, views, chip in steps:
        a, b, out = (tensors[t][at : at + 8] for t, at in views)
        program = copying(fn) if name == "copy" else pair(fn, name)
        record(program, chip, (a,) if name == "copy" else (a, b), out)
    g.build()
    g()
    assert [t.numpy().tolist() for t in tensors] == wanted


def test_readers_of_one_tensor_are_not_ordered(fn: Function) -> None:
    x = fn.ones(8)
    with fn.graph() as g:
        for chip in range(4):
            g.run(pair(fn, "add"), x, x, chip=chip)
    assert all(not n.deps for n in g.nodes)


def test_temporaries_are_each_queues_own(fn: Function, device: GraphDevice) -> None:
    """A program runs on two chips at a time: its temporaries must not be one memory."""
    with fn.program("twice") as p:
        x = p.input((8,))
        t = p.call("add", x, x)
        p.output(p.call("add", t, x))
    a = fn.tensor(np.arange(8, dtype=np.float32))
    with fn.graph() as g:
        results = [g.run(p, a, chip=chip) for chip in (0, 1, 0)]
    (loaded,) = device.graphs.values()
    bound = [{(b.handle, b.offset) for b in n.bindings} for n in loaded.nodes]
    shared = bound[0] & bound[1]
    assert shared == {(a.handle, 0)}
    assert len(bound[0] & bound[2]) == 2  # one queue: one at a time
    g()
    for y in results:
        assert np.array_equal(y.numpy(), 3 * np.arange(8, dtype=np.float32))
    used = g.bytes_in_use
    assert used == 2 * 32
    before = len(device.tensors)
    g.close()
    assert len(device.tensors) == before - 2


# --- hand-written queues -------------------------------------------------------------------------


def two_nodes(fn: Function) -> Graph:
    g = fn.graph(automatic=False)
    x = fn.ones(8)
    for chip in (0, 1):
        g.run(pair(fn, "add"), x, x, chip=chip)
    return g


def test_hand_written_queues_run_as_they_are(fn: Function, device: GraphDevice) -> None:
    g = two_nodes(fn)
    g.queues[1, C] = [Entry(Kind.RUN, 0, 1), Entry(Kind.SIGNAL, 0)]
    g.queues[0, C] = [Entry(Kind.WAIT, 0, 1), Entry(Kind.RUN, 0, 0)]
    g.build()
    g()
    assert [s["node"] for s in device.spans] == [1, 0]


@pytest.mark.parametrize(
    "queues",
    [
        {  # each waits for the other's signal
            (0, C): [Entry(Kind.WAIT, 0, 1), Entry(Kind.RUN, 0, 0), Entry(Kind.SIGNAL, 1)],
            (1, C): [Entry(Kind.WAIT, 1, 1), Entry(Kind.RUN, 0, 1), Entry(Kind.SIGNAL, 0)],
        },
        {(0, C): [Entry(Kind.RUN, 0, 0), Entry(Kind.WAIT, 3, 1), Entry(Kind.RUN, 0, 1)]},
        {(0, C): [Entry(Kind.RUN, 0, 0), Entry(Kind.RUN, 0, 0)]},
        {(0, C): [Entry(Kind.RUN, 0, 0)]},
    ],
)
def test_queues_that_do_not_come_to_their_end_are_refused(fn: Function, queues: Any) -> None:
    g = two_nodes(fn)
    g.queues.update(queues)
    with pytest.raises(ProgramError):
        g.build()
    assert fn.transport.graphs == {}  # type: ignore[attr-defined]


# --- costs and the model's timeline --------------------------------------------------------------


def test_a_product_is_estimated_longer_than_a_sum_of_as_many_bytes(fn: Function) -> None:
    with fn.program() as big:
        big.output(big.call("matmul", big.input((256, 256)), big.input((256, 256))))
    with fn.program() as small:
        small.output(small.call("copy", small.input((256, 256))))
    long, short = (profile(p.data, fn.instructions) for p in (big, small))
    assert (long.type, short.type) == (C, T)
    assert long.cycles == 32 + 256**3 // 4096
    assert short.cycles == 32 + 2 * 256 * 256 * 4 // 256
    assert (long.reads, long.writes) == ((True, True, False), (False, False, True))


def test_measured_costs_replace_estimates(fn: Function, device: GraphDevice) -> None:
    x, y = fn.ones(8), fn.zeros(8)
    with fn.graph() as g:
        g.run(adding(fn), x, y)
        g.run(pair(fn, "mul"), x, x, chip=1)
    estimated = [s.cycles for s in g.timeline()]
    with pytest.raises(ConflictError) as caught:
        g.calibrate()
    assert caught.value.code == "graph-not-run"
    g()
    g.calibrate()
    assert [s.cycles for s in g.timeline()] == [5, 5]  # what the fake device says of any node
    assert estimated != [5, 5]
    g()
    assert y.numpy().tolist() == [2.0] * 8
    assert len(device.graphs) == 1


def test_calibration_may_change_the_order_of_a_queue(fn: Function, device: GraphDevice) -> None:
    """Two programs whose estimates say the opposite of what the device does."""
    with fn.program("long?") as first:
        first.output(first.call("matmul", first.input((256, 256)), first.input((256, 256))))
    with fn.graph() as g:
        a = fn.ones((256, 256))
        short = g.run(pair(fn, "add"), fn.ones(8), fn.ones(8))
        g.run(pair(fn, "mul"), short, short, chip=1)
        long = g.run(first, a, a)
        g.run(first, long, long, chip=2)
    before = g.build()
    g()
    device.spans = [{**s, "cycles": 9000 if s["node"] < 2 else 1} for s in device.spans]
    g.calibrate()
    assert g.build() != before
    g()


def test_the_models_timeline_has_each_node_on_its_lane(fn: Function) -> None:
    with fn.graph() as g:
        x = g.run(copying(fn), fn.ones(8), chip=1)
        g.run(pair(fn, "add"), x, x, chip=3)
    first, second = g.timeline()
    assert (first.lane, first.queue, first.label, first.node) == ("chip 1", "transfer", "copy", 0)
    assert (second.lane, second.queue) == ("chip 3", "compute")
    assert second.cycle_start == first.cycle_start + first.cycles + 64  # the signal's way


# --- streams without a graph ---------------------------------------------------------------------


def test_launches_of_a_stream_depend_on_the_one_before(fn: Function, device: GraphDevice) -> None:
    program, x, y = adding(fn), fn.ones(8), fn.zeros(8)
    s = fn.stream(chip=1)
    device.ids.clear()
    with fn.queue.batch():
        launches = [s.run(program, x, y) for _ in range(4)]
    s.synchronize()
    assert y.numpy().tolist() == [4.0] * 8
    rows = [row for row in device.ids if row[2]]
    assert [row[1] for row in rows] == [1] * 4
    ids = [row[2] for row in rows]
    assert len(set(ids)) == 4
    assert min(ids) >= 1
    assert [row[3] for row in rows] == [0, *ids[:-1]]
    assert all(launch.done() for launch in launches)


def test_what_is_seen_to_be_complete_is_not_named_any_more(
    fn: Function, device: GraphDevice
) -> None:
    device.completed = type(device.completed)(maxlen=2)  # forgets almost at once
    program, x = pair(fn, "add"), fn.ones(8)
    s, t = fn.stream(0), fn.stream(1)
    out = [fn.empty(8) for _ in range(2)]
    s.run(program, x, x, out=out[0])
    event = s.record()
    for _ in range(10):
        t.run(program, x, x, out=out[1])
    s.run(program, x, x, out=out[0])
    t.wait(event)
    t.run(program, x, x, out=out[1])
    for stream in (s, t):
        stream.synchronize()
        assert stream.done()
    event.synchronize()
    assert event.done()


def test_a_join_of_several_that_run_is_a_fence(fn: Function, device: GraphDevice) -> None:
    program, x = pair(fn, "add"), fn.ones(8)
    out = [fn.empty(8) for _ in range(3)]
    s, t = fn.stream(0), fn.stream()
    with fn.queue.batch():  # nothing completes within
        t.run(program, x, x, out=out[0])
        s.run(program, x, x, out=out[1])
        s.wait(t.record())
        device.ids.clear()
        s.run(program, out[0], out[1], out=out[2])
    s.synchronize()
    assert out[2].numpy().tolist() == [4.0] * 8
    ran = [row for row in device.ids if row[0] in (Opcode.LAUNCH, Opcode.FENCE)]
    fence, joined = ran[-2:]
    assert fence[0] == Opcode.FENCE
    assert (joined[0], joined[1], joined[3]) == (Opcode.LAUNCH, 0, 0)


def test_an_event_of_nothing_holds_up_nothing(fn: Function) -> None:
    s = fn.stream()
    s.wait(fn.event())
    event = s.record()
    assert event.done()
    event.synchronize()
    s.synchronize()


def test_streams_do_not_share_temporaries(fn: Function, device: GraphDevice) -> None:
    with fn.program("twice") as p:
        x = p.input((8,))
        p.output(p.call("add", p.call("add", x, x), x))
    a = fn.ones(8)
    s, t = fn.stream(0), fn.stream(1)
    out = [fn.empty(8) for _ in range(2)]
    before = len(device.tensors)
    for _ in range(2):
        s.run(p, a, out=out[0])
        t.run(p, a, out=out[1])
    assert len(device.tensors) == before + 2
    for stream, y in ((s, out[0]), (t, out[1])):
        stream.synchronize()
        assert y.numpy().tolist() == [3.0] * 8
        stream.close()
    assert len(device.tensors) == before


def test_a_failed_launch_is_told_by_the_next_of_its_stream(fn: Function) -> None:
    with fn.program("pick") as p:
        p.output(p.call("gather_rows", p.input((4, 2)), p.input((1,), "int64")))
    x, out = fn.ones((4, 2)), fn.empty((1, 2))
    rows = fn.tensor(np.array([9]))
    s = fn.stream()
    s.run(p, x, rows, out=out)
    with pytest.raises(DeviceFault) as caught:
        s.run(p, x, rows, out=out)
    assert caught.value.code == "device-numeric"


def test_lanes_of_a_trace_do_not_overlap(fn: Function) -> None:
    from accelvisor.timeline import read

    with fn.graph() as g:
        x = fn.ones(8)
        for chip in range(4):
            x = g.run(pair(fn, "add"), x, x, chip=chip)
    g(repeat=2)
    trace = read(fn.trace())
    assert len(trace.spans) == 8
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(trace.spans))
    assert [c["chip"] for c in fn.fabric()["chips"]] == [0, 1, 2, 3]
