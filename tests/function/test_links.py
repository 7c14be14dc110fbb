"""The links between a function's chips: switched while transfers use them, and counted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import ALL_LINKS, Binding, Query
from accelvisor.abi.dtypes import DType
from accelvisor.abi.graphs import Entry, Graph, Kind, Node, QueueType, encode
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.abi.status import CommandStatus
from accelvisor.fabric.links import FLIT_BYTES, TRAINING_CYCLES, LinkState
from accelvisor.function import state as s
from accelvisor.function.fabric_spec import ChipSpec, FabricSpec, LinkSpec
from tests.function.harness import Local, Ring, operation, wait_for

F32 = DType.FLOAT32
N = 600_000  # elements: three tiles
FABRIC = FabricSpec(
    tuple(ChipSpec(0, chip, 1) for chip in range(3)),
    (
        LinkSpec(7, 0, 1, "inter-chip"),
        # Two hops between 1 and 2, over a chip that lets pass.
        LinkSpec(8, 1, 2, "inter-chip"),
        LinkSpec(9, 1, 2, "inter-card"),
    ),
)


@pytest.fixture
def local() -> Iterator[Local]:
    with Local(chips=3, cores=3, fabric=FABRIC) as device:
        yield device


class Bench:
    """A graph that copies x to y over the link from one chip to another."""

    def __init__(self, local: Local, source: int, target: int) -> None:
        self.local = local
        self.ring: Ring = local.ring(0)
        self.ring.open()
        self.x = self.ring.tensor(np.arange(N, dtype=np.float32))
        self.y = self.ring.tensor(np.zeros(N, np.float32))
        slots = (Slot(F32, (N,), Role.INPUT), Slot(F32, (N,), Role.OUTPUT))
        copy = operation("link_copy", 0, 1, source=source, target=target)
        program = self.ring.load(Program(slots, (copy,)))
        queues = {(source, QueueType.TRANSFER): (Entry(Kind.RUN, 0, 0),)}
        node = Node(program, (Binding(self.x, 0), Binding(self.y, 0)))
        raw = encode(Graph(3, queues, (node,)))
        self.graph = self.ring.ok(abi.graph_load, local.buffer(raw).whole(len(raw)))

    def launch(self, repeat: int = 1) -> int:
        return self.ring.do(abi.graph_launch, self.graph, repeat).status

    def switch(self, on: bool, link: int = ALL_LINKS) -> abi.Completion:
        return self.ring.do(abi.link_switch, link, on)

    def links(self) -> list[dict[str, object]]:
        return list(self.ring.query(Query.FABRIC)["links"])


def test_links_are_down_until_they_were_switched_on_and_after_a_reset(local: Local) -> None:
    bench = Bench(local, 0, 1)
    assert bench.launch() == CommandStatus.LINK_DOWN
    assert "is down" in bench.ring.fault()["text"]
    assert bench.switch(True).cycles == TRAINING_CYCLES
    assert bench.switch(True).cycles == 0
    assert bench.launch() == 0
    local.device.function_reset()
    assert Bench(local, 0, 1).launch() == CommandStatus.LINK_DOWN


def test_chips_that_no_link_joins_exchange_nothing(local: Local) -> None:
    bench = Bench(local, 0, 2)
    bench.switch(True)
    assert bench.launch() == CommandStatus.LINK_DOWN
    assert bench.switch(True, link=3).status == CommandStatus.BAD_DESCRIPTOR


def test_a_way_of_two_hops_is_up_when_both_are_and_both_count(local: Local) -> None:
    bench = Bench(local, 1, 2)
    bench.switch(True, link=1)
    assert bench.launch() == CommandStatus.LINK_DOWN
    bench.switch(True, link=2)
    assert bench.launch(repeat=3) == 0
    told = bench.links()
    assert [link["number"] for link in told] == [7, 8, 9]
    assert [link["transfers"] for link in told] == [0, 3, 3]
    assert [link["bytes"] for link in told] == [0, 12 * N, 12 * N]
    assert [link["flits"] for link in told] == [0, *2 * [3 * -(-4 * N // FLIT_BYTES)]]


def test_a_link_that_is_switched_off_in_the_middle_drains_and_the_rest_is_tried_again(
    local: Local,
) -> None:
    bench, other = Bench(local, 0, 1), local.ring(1)
    other.open()
    bench.switch(True)
    bench.ring.post(abi.graph_launch(bench.ring.next_cookie(), bench.graph, 1_000_000))
    bench.ring.submit()
    wait_for(lambda: local.state.u64[s.graph_word(0)] >> 32 > 2, "transfers")
    assert other.do(abi.link_switch, ALL_LINKS, False).status == 0
    local.wait(bench.ring.ready)
    assert bench.ring.take().status == CommandStatus.LINK_DOWN
    told = bench.links()[0]
    assert told["state"] == "down"
    # What counts is whole: no transfer ended after the link was down, and none was cut.
    assert told["bytes"] == 4 * N * int(str(told["transfers"]))
    bench.ring.write(bench.y, np.zeros(N, np.float32))
    bench.switch(True)
    assert bench.launch() == 0
    got = bench.ring.read(bench.y, "float32", (N,))
    assert np.array_equal(got, np.arange(N, dtype=np.float32))


def test_a_link_that_was_left_draining_can_be_switched_on(local: Local) -> None:
    """Whoever switched it off had its queue disabled before the link was down."""
    bench = Bench(local, 0, 1)
    bench.switch(True)
    local.state.u64[s.link_word(0)] = int(LinkState.DRAINING)
    assert bench.launch() == CommandStatus.LINK_DOWN
    assert bench.switch(True).status == 0
    assert bench.launch() == 0


def test_links_and_what_they_carried_outlive_a_worker(local: Local) -> None:
    bench = Bench(local, 0, 1)
    bench.switch(True)
    assert bench.launch() == 0
    before = bench.links()
    local.restart()
    bench.ring.words = local.window.cast("I")
    local._rings.append(bench.ring)
    assert bench.links() == before
    assert bench.launch() == 0
    assert bench.links()[0]["transfers"] == 2
