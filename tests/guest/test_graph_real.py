"""Graphs, streams and data-parallel training on a real function process of four chips."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from accelvisor.function.fabric_spec import ChipSpec, FabricSpec, LinkSpec
from accelvisor.guest import nn
from accelvisor.guest.errors import CommandRefused, DeviceFault
from accelvisor.guest.function import Function
from accelvisor.guest.links import links, ring, switch
from accelvisor.guest.parallel import train_parallel
from accelvisor.timeline import read

from .real import Process
from .test_parallel import NETWORK, in_rank_order, parts, plain, problem


def ring_of(chips: int) -> FabricSpec:
    """Chips of one core each, and the links of a ring; of two chips there is one."""
    joints = [(chip, (chip + 1) % chips) for chip in range(chips if chips > 2 else 1)]
    return FabricSpec(
        tuple(ChipSpec(0, chip, 1) for chip in range(chips)),
        tuple(LinkSpec(number, *pair, "inter-chip") for number, pair in enumerate(joints)),
    )


FABRIC = ring_of(4)


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with tempfile.TemporaryDirectory(prefix="graph-") as folder:
        process = Process(Path(folder), cores=4, chips=4, fabric=FABRIC)
        yield process
        process.stop()


@pytest.fixture
def fresh() -> Iterator[Function]:
    """A function that has run nothing yet: its trace is short."""
    with tempfile.TemporaryDirectory(prefix="graph-") as folder:
        process = Process(Path(folder), cores=4, chips=4, fabric=FABRIC)
        try:
            with process.open(name="test") as fn:
                switch(fn, True)
                yield fn
        finally:
            process.stop()


@pytest.fixture
def fn(process: Process) -> Iterator[Function]:
    with process.open(name="test") as fn:
        switch(fn, True)
        yield fn


def test_two_streams_that_meet(fn: Function) -> None:
    with fn.program("add") as add:
        add.output(add.call("add", add.input((64,)), add.input((64,))))
    with fn.program("twice") as twice:
        x = twice.input((64,))
        twice.output(twice.call("add", twice.call("mul", x, x), x))
    a = fn.tensor(np.arange(64, dtype=np.float32))
    with fn.graph() as g:
        s, t = g.stream(chip=0), g.stream(chip=3)
        x = s.run(add, a, a)
        t.wait(s.record())
        y = t.run(twice, x)
        z = s.run(twice, a)
    assert g(repeat=5).cycles > 0
    n = np.arange(64, dtype=np.float32)
    assert np.array_equal(y.numpy(), 4 * n * n + 2 * n)
    assert np.array_equal(z.numpy(), n * n + n)
    g.close()


def test_an_index_out_of_range_in_a_graph_is_a_typed_fault(process: Process) -> None:
    with process.open(name="test") as fn:
        with fn.program("pick") as p:
            p.output(p.call("gather_rows", p.input((4, 2)), p.input((1,), "int64")))
        with fn.graph() as g:
            g.run(p, fn.ones((4, 2)), fn.tensor(np.array([9])), chip=2)
        with pytest.raises(DeviceFault) as caught:
            g()
        assert caught.value.code == "device-numeric"


@pytest.mark.parametrize("compress", [False, True])
def test_an_all_reduce_has_the_bits_of_the_sum_in_order_of_ranks(
    fn: Function, compress: bool
) -> None:
    values = parts(4, 10_000, zeros=0.5)
    tensors = [fn.tensor(v) for v in values]
    before = sum(link.bytes for link in links(fn))
    with fn.graph() as g:
        g.all_reduce(tensors, compress=compress)
    g()
    wanted = in_rank_order(values).tobytes()
    assert {t.numpy().tobytes() for t in tensors} == {wanted}
    moved = sum(link.bytes for link in links(fn)) - before
    assert compress or moved == 6 * 40_000
    g.close()


def test_a_link_that_is_down_refuses_and_changes_nothing(fn: Function) -> None:
    values = parts(4, 100)
    tensors = [fn.tensor(v) for v in values]
    with fn.graph() as g:
        g.all_reduce(tensors)
    assert ring(fn) in ([0, 1, 2, 3], [0, 3, 2, 1])
    switch(fn, False, 1)
    assert ring(fn) is None
    with pytest.raises(CommandRefused) as caught:
        g()
    assert caught.value.code == "device-link-down"
    switch(fn, True)


def test_training_has_the_bits_of_plain_numpy(fn: Function) -> None:
    x, labels = problem()
    options = {"chips": 4, "epochs": 2, "batch": 16, "rate": 0.3, "decay": 0.01, "seed": 3}
    wanted = plain(x, labels, **options)  # type: ignore[arg-type]
    for compress in (False, True):
        found = train_parallel(fn, NETWORK, x, labels, compress=compress, **options)  # type: ignore[arg-type]
        for mine, theirs in zip(found.parameters, wanted, strict=True):
            assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("chips", [2, 8])
def test_two_and_eight_chips_train_with_the_bits_of_plain_numpy(chips: int) -> None:
    x, labels = problem()
    options = {"chips": chips, "epochs": 2, "batch": 16, "rate": 0.3, "decay": 0.01, "seed": 3}
    wanted = plain(x, labels, **options)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="graph-") as folder:
        process = Process(Path(folder), cores=chips, chips=chips, fabric=ring_of(chips))
        try:
            with process.open(name="test") as fn:
                switch(fn, True)
                found = train_parallel(fn, NETWORK, x, labels, **options)  # type: ignore[arg-type]
        finally:
            process.stop()
    for mine, theirs in zip(found.parameters, wanted, strict=True):
        assert mine.tobytes() == theirs.tobytes()


def test_training_goes_on_after_a_kill_with_the_same_bits(process: Process) -> None:
    net = nn.Sequential((16, 64, 64, 4))
    random = np.random.RandomState(0)
    x, labels = random.standard_normal((256, 16)), random.randint(0, 4, 256)

    def trained(kill: bool) -> bytes:
        with process.open(name="test") as fn:
            switch(fn, True)
            done = train_parallel(
                fn, net, x, labels, epochs=3, batch=32,
                progress=lambda *_: process.kill_worker() if kill else None,
            )  # fmt: skip
            return b"".join(w.tobytes() for w in done.parameters)

    assert trained(kill=True) == trained(kill=False)


def test_a_graph_whose_worker_is_killed_in_the_middle_ends_with_the_same_bits(
    process: Process, fn: Function
) -> None:
    with fn.program("step") as p:
        x, y = p.parameter((96, 96)), p.input((96, 96))
        p.call("tanh", p.call("add", p.call("matmul", x, y), y), out=x)
    random = np.random.RandomState(0)
    start = [random.standard_normal((96, 96)).astype(np.float32) for _ in range(4)]
    tensors = [fn.tensor(v) for v in start]
    with fn.graph() as g:
        for chip in range(4):
            g.run(p, tensors[chip], tensors[(chip + 1) % 4], chip=chip)
        g.all_reduce(tensors, compress=True)

    def run(kills: int) -> list[bytes]:
        for tensor, value in zip(tensors, start, strict=True):
            tensor.copy_(value)
        launch = g.launch(repeat=60)
        while kills and not launch.done():
            process.kill_worker()
            kills -= 1
        launch.result()
        return [t.numpy().tobytes() for t in tensors]

    assert run(kills=2) == run(kills=0)
    g.close()


def test_guest_and_device_reckon_alike_and_no_two_nodes_of_a_queue_overlap(
    fresh: Function,
) -> None:
    fn = fresh
    with fn.program("product") as p:
        x = p.input((200, 200))
        p.output(p.call("matmul", x, x))
    a = fn.ones((200, 200))
    with fn.graph() as g:
        g.all_reduce([g.run(p, a, chip=chip) for chip in range(4)], compress=True)
    g()
    spans = [s for s in read(fn.trace()).spans if s.node >= 0]
    assert sorted(s.node for s in spans) == list(range(len(g.nodes)))
    for s in spans:
        node = g.nodes[s.node]
        assert (s.lane, s.queue) == (f"chip {node.chip}", node.profile.type.name.lower())
    for lane in {(s.lane, s.queue) for s in spans}:
        mine = [s for s in spans if (s.lane, s.queue) == lane]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(mine))
        assert all(a.cycle_start + a.cycles <= b.cycle_start for a, b in pairwise(mine))
    g.calibrate()
    assert g.plan is not None
    assert g().cycles == g.plan.makespan


def test_streams_outside_of_a_graph(fn: Function) -> None:
    with fn.program("add") as add:
        x, y = add.input((64,)), add.parameter((64,))
        add.call("add", x, y, out=y)
    one, sums = fn.ones(64), [fn.zeros(64) for _ in range(4)]
    streams = [fn.stream(chip) for chip in range(4)]
    for _ in range(100):  # more than the device remembers, all streams together
        for stream, total in zip(streams, sums, strict=True):
            stream.run(add, one, total)
    s, t = streams[0], streams[1]
    t.wait(s.record())
    t.run(add, sums[0], sums[1])
    for stream in streams:
        stream.synchronize()
    assert [float(v.numpy()[0]) for v in sums] == [100.0, 200.0, 100.0, 100.0]
