"""Commands that are not ordered: on a device with four chips, as its guest sees them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import ANY_CHIP, Flag, Query, scheduled
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.abi.registers import QueueReg, QueueStatus
from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as s
from accelvisor.function.reshape import Reshaping
from accelvisor.function.shape import Shape
from accelvisor.isolation.segments import Segment
from accelvisor.limits import LIMITS, MIB
from tests.function.harness import Local, Ring, operation, wait_for

F32 = DType.FLOAT32
PLAIN, SYNC, COND = Flag.PLAIN, Flag.SYNC, Flag.CONDITIONAL


@pytest.fixture
def local() -> Iterator[Local]:
    with Local(chips=4, cores=4) as device:
        yield device


def accumulate(n: int) -> Program:
    """y += x."""
    slots = (Slot(F32, (n,), Role.INPUT), Slot(F32, (n,), Role.OUTPUT))
    return Program(slots, (operation("add", 1, 0, 1),))


class Bench:
    """A ring with a program that adds x to y, and a long one."""

    def __init__(self, local: Local, n: int = 1000, index: int = 0) -> None:
        self.local = local
        self.ring = local.ring(index)
        self.ring.open()
        self.n = n
        self.x = self.ring.tensor(np.ones(n, np.float32))
        self.y = [self.ring.tensor(np.zeros(n, np.float32)) for _ in range(6)]
        self.program = self.ring.load(accumulate(n))
        self.cookies: list[int] = []

    def launch(
        self, y: int, flags: Flag, repeat: int = 1, chip: int = ANY_CHIP, own: int = 0, on: int = 0
    ) -> int:
        """Post x added to tensor ``y``; its cookie."""
        raw = abi.BINDING.pack(self.x, 0) + abi.BINDING.pack(self.y[y], 0)
        memory = self.local.buffer(raw).whole(32)
        cookie = self.ring.next_cookie()
        entry = abi.launch(cookie, self.program, 2, memory, repeat)
        self.ring.post(scheduled(entry, flags, chip, own, on) if flags else entry)
        return cookie

    def nop(self, flags: Flag, own: int = 0, on: int = 0) -> int:
        cookie = self.ring.next_cookie()
        self.ring.post(scheduled(abi.nop(cookie), flags, own=own, on=on))
        return cookie

    def finish(self, count: int) -> list[abi.Completion]:
        """Submit what was posted; the completions of ``count`` commands, as they came."""
        self.ring.submit()
        self.local.wait(lambda: self.ring.ready() >= count)
        return [self.ring.take() for _ in range(count)]

    def value(self, y: int) -> float:
        values = self.ring.read(self.y[y], "float32", (self.n,))
        assert (values == values[0]).all()
        return float(values[0])


def test_what_depends_on_nothing_overtakes_what_is_slow(local: Local) -> None:
    bench = Bench(local, 100_000)
    slow = bench.launch(0, SYNC, repeat=3000, own=1)
    last = bench.launch(1, COND, on=1)
    quick = [bench.launch(2, PLAIN, chip=1), bench.nop(PLAIN), bench.nop(PLAIN)]
    done = bench.finish(5)
    assert [c.status for c in done] == [0] * 5
    order = [c.cookie for c in done]
    assert set(order[:3]) == set(quick)
    assert order[3:] == [slow, last]
    assert (bench.value(0), bench.value(1), bench.value(2)) == (3000, 1, 1)


def test_those_that_wait_for_one_keep_their_order(local: Local) -> None:
    bench = Bench(local)
    bench.launch(0, SYNC, repeat=2000, own=7)
    waiting = [bench.launch(1, COND, chip=2, on=7) for _ in range(20)]
    order = [c.cookie for c in bench.finish(21)]
    assert order[1:] == waiting
    assert bench.value(1) == 20


def test_a_chain_of_conditional_syncs_runs_link_by_link(local: Local) -> None:
    bench = Bench(local)
    cookies = [bench.launch(0, SYNC, repeat=500, own=1)]
    cookies += [bench.launch(0, SYNC | COND, own=n, on=n - 1) for n in range(2, 12)]
    done = bench.finish(11)
    assert [c.cookie for c in done] == cookies
    assert bench.value(0) == 510


def test_ordered_commands_are_a_barrier_on_both_sides(local: Local) -> None:
    bench = Bench(local, 50_000)
    first = bench.launch(0, PLAIN, repeat=50)
    fence = bench.ring.next_cookie()
    bench.ring.post(abi.fence(fence))
    after = bench.nop(PLAIN)
    ordered = bench.launch(0, Flag(0))
    assert [c.cookie for c in bench.finish(4)] == [first, fence, after, ordered]


def test_who_waited_for_a_command_that_was_refused_is_aborted(local: Local) -> None:
    bench = Bench(local)
    bench.launch(0, SYNC, repeat=3000, own=1)
    cookie = bench.ring.next_cookie()
    bad = abi.launch(cookie, 0x1234_0000_0007, 0, abi.Memory(0, 0, 0, 0, 0))
    bench.ring.post(scheduled(bad, SYNC | COND, own=2, on=1))
    chained = [bench.launch(1, SYNC | COND, own=3, on=2), bench.launch(1, COND, on=3)]
    done = {c.cookie: c.status for c in bench.finish(4)}
    assert done[cookie] == CommandStatus.BAD_HANDLE
    assert [done[c] for c in chained] == [CommandStatus.ABORTED] * 2
    assert bench.value(1) == 0
    assert bench.ring.register(QueueReg.STATUS) == QueueStatus.ENABLED


def test_a_dependency_that_nobody_knows_is_refused(local: Local) -> None:
    bench = Bench(local)
    bench.nop(COND, on=5)
    assert bench.finish(1)[0].status == CommandStatus.BAD_DEPENDENCY
    assert bench.ring.fault()["text"].startswith("depends on 5")
    bench.nop(SYNC, own=5)
    bench.nop(COND, on=5)
    assert [c.status for c in bench.finish(2)] == [0, 0]


def test_the_last_256_ids_are_known_as_complete(local: Local) -> None:
    bench = Bench(local)
    for first in range(1, LIMITS.completed_ids + 2, 32):
        for own in range(first, min(first + 32, LIMITS.completed_ids + 2)):
            bench.nop(SYNC, own=own)
        count = min(32, LIMITS.completed_ids + 2 - first)
        assert {c.status for c in bench.finish(count)} == {0}
    bench.nop(COND, on=1)
    bench.nop(COND, on=2)
    assert [c.status for c in bench.finish(2)] == [CommandStatus.BAD_DEPENDENCY, 0]


@pytest.mark.parametrize(
    ("flags", "own", "on", "chip"),
    [(PLAIN, 1, 0, 0), (SYNC, 0, 0, 0), (COND, 0, 0, 0), (SYNC | COND, 1, 0, 0),
     (PLAIN, 0, 1, 0), (PLAIN | SYNC, 1, 0, 0), (PLAIN, 0, 0, 4)],
)  # fmt: skip
def test_flags_and_ids_that_do_not_go_together_are_refused(
    local: Local, flags: Flag, own: int, on: int, chip: int
) -> None:
    bench = Bench(local)
    cookie = bench.ring.next_cookie()
    bench.ring.post(scheduled(abi.nop(cookie), flags, chip, own, on))
    assert bench.finish(1)[0].status == CommandStatus.BAD_DESCRIPTOR


def test_what_changes_objects_can_only_be_ordered(local: Local) -> None:
    bench = Bench(local)
    entry = abi.tensor_destroy(bench.ring.next_cookie(), bench.y[0])
    bench.ring.post(scheduled(entry, PLAIN))
    assert bench.finish(1)[0].status == CommandStatus.BAD_DESCRIPTOR
    assert bench.value(0) == 0


def test_the_id_of_a_command_that_runs_cannot_be_taken_again(local: Local) -> None:
    bench = Bench(local)
    slow = bench.launch(0, SYNC, repeat=3000, own=1)
    second = bench.nop(SYNC, own=1)
    after = bench.launch(1, COND, on=1)
    done = {c.cookie: c.status for c in bench.finish(3)}
    assert done == {slow: 0, second: CommandStatus.BAD_DESCRIPTOR, after: 0}


def test_a_full_waiting_queue_stops_its_ring_and_no_other(local: Local) -> None:
    bench, other = Bench(local, 20_000), Bench(local, index=1)
    count = min(LIMITS.waiting_commands, bench.ring.entries - 10) + 3
    bench.launch(0, SYNC, repeat=20_000, own=1)
    for _ in range(count):
        bench.nop(COND, on=1)
    bench.ring.submit()
    ready = local.device.frontend.unordered.scheduler.lanes[0]
    wait_for(lambda: len(ready.waiting.get(1, ())) or bench.ring.ready(), "waiters")
    other.launch(0, PLAIN, chip=3)
    assert [c.status for c in other.finish(1)] == [0]
    assert not bench.ring.ready()
    assert {c.status for c in bench.finish(count + 1)} == {0}


def test_a_fault_stops_the_context_and_lets_no_other_begin(local: Local) -> None:
    bench = Bench(local)
    rows = bench.ring.tensor(np.array([5], np.int64))
    table = bench.ring.tensor(np.zeros((2, 4), np.float32))
    out = bench.ring.tensor(np.zeros((1, 4), np.float32))
    slots = (Slot(F32, (2, 4), Role.INPUT), Slot(DType.INT64, (1,), Role.INPUT),
             Slot(F32, (1, 4), Role.OUTPUT))  # fmt: skip
    gather = bench.ring.load(Program(slots, (operation("gather_rows", 0, 1, 2),)))
    raw = b"".join(abi.BINDING.pack(handle, 0) for handle in (table, rows, out))
    cookie = bench.ring.next_cookie()
    entry = abi.launch(cookie, gather, 3, local.buffer(raw).whole(48))
    bench.ring.post(scheduled(entry, SYNC, own=1))
    waits = bench.launch(0, COND, on=1)
    later = bench.ring.next_cookie()
    bench.ring.post(abi.fence(later))
    done = {c.cookie: c.status for c in bench.finish(3)}
    assert done[cookie] == CommandStatus.NUMERIC
    assert done[waits] in (CommandStatus.ABORTED, CommandStatus.CONTEXT_STOPPED)
    assert done[later] == CommandStatus.CONTEXT_STOPPED
    assert bench.ring.register(QueueReg.STATUS) == QueueStatus.FAULTED


def busy(bench: Bench) -> None:
    """Something on engines, something that waits, something in the front list and in the ring."""
    bench.launch(0, SYNC, repeat=1_000_000, chip=0, own=1)
    bench.launch(1, PLAIN, repeat=1_000_000, chip=1)
    bench.launch(2, SYNC | COND, own=2, on=1)
    bench.launch(3, COND, on=2)
    bench.launch(4, PLAIN, chip=0)
    bench.ring.submit()
    lane = bench.local.device.frontend.unordered.scheduler.lanes[bench.ring.index]
    wait_for(lambda: lane.outstanding == 4 and len(lane.pending) == 2, "commands on engines")


def test_disabling_the_queue_forgets_all_of_it(local: Local) -> None:
    bench = Bench(local, 100_000)
    before = local.device.memory.used
    busy(bench)
    Ring(local, 0)  # disables, then enables
    state = local.state
    assert bytes(state.u8[s.COMMANDS_AT : s.DIGEST_END]).strip(b"\0") == b""
    assert local.device.memory.used < before
    again = local.ring()
    again.open()
    assert again.do(abi.nop).status == 0


def test_a_reset_forgets_all_of_it(local: Local) -> None:
    bench = Bench(local, 100_000)
    busy(bench)
    local.device.function_reset()
    assert bytes(local.state.u8[s.COMMANDS_AT : s.DIGEST_END]).strip(b"\0") == b""
    again = Bench(local)
    again.launch(0, PLAIN)
    assert again.finish(1)[0].status == 0


def test_a_revoked_function_completes_all_of_it(local: Local) -> None:
    bench = Bench(local, 100_000)
    busy(bench)
    Reshaping(local.device).reshape(Shape(2, 0, ()).to_dict())
    local.wait(lambda: bench.ring.ready() >= 4)
    found = {bench.ring.take().status for _ in range(4)}
    assert found <= {CommandStatus.REVOKED, CommandStatus.ABORTED}
    bench.nop(SYNC, own=9)
    left = bench.finish(bench.ring.tail - bench.ring.head)
    assert {c.status for c in left} == {CommandStatus.REVOKED}


def test_a_new_shape_goes_on_with_all_of_it(local: Local) -> None:
    bench = Bench(local, 100_000)
    bench.launch(0, SYNC, repeat=300, chip=0, own=1)
    bench.launch(1, COND, on=1)
    bench.ring.submit()
    wide = (Segment(0, 16 * MIB, 0, 0), Segment(16 * MIB, 8 * MIB, 1, 0))
    Reshaping(local.device).reshape(Shape(2, 2, wide).to_dict())
    assert [c.status for c in bench.finish(2)] == [0, 0]
    assert (bench.value(0), bench.value(1)) == (300, 1)


def test_the_next_worker_goes_on_with_all_of_it(local: Local) -> None:
    """Engines stop at a tile, and everything else is in the state."""
    bench = Bench(local, 60_000)
    bench.launch(0, SYNC, repeat=5000, chip=0, own=1)
    bench.launch(1, PLAIN, repeat=5000, chip=1)
    bench.launch(2, SYNC | COND, repeat=3, own=2, on=1)
    bench.launch(3, COND, on=2)
    bench.ring.submit()
    lane = local.device.frontend.unordered.scheduler.lanes[0]
    wait_for(lambda: lane.outstanding == 4, "all of them to be taken")
    for turns in (1, 10, 40):  # what comes no further from worker to worker is given up
        words = [(s.run_word(engine) + s.C_POSITION64) // 2 for engine in (0, 2)]
        wait_for(
            lambda turns=turns, words=words: all(
                local.state.u64[word] >> 32 >= turns for word in words
            ),
            "both to come further",
        )
        local.restart()
    bench.ring.words = local.window.cast("I")
    local._rings.append(bench.ring)
    done = bench.finish(4)
    assert {c.status for c in done} == {0}
    assert [bench.value(n) for n in range(4)] == [5000, 5000, 3, 1]


def test_the_clock_counts_each_command_once(local: Local) -> None:
    bench = Bench(local)
    costs = []
    for _ in range(2):
        before = local.device.registers.model_clock()
        for n in range(5):
            bench.launch(n, PLAIN, repeat=n + 1)
        done = bench.finish(5)
        costs.append(sum(c.cycles for c in done))
        assert local.device.registers.model_clock() - before == costs[-1]
    assert costs[0] == costs[1] > 0


def test_chips_compute_at_the_same_time(local: Local) -> None:
    """Each on an engine of its own, as the trace says."""
    bench = Bench(local, 200_000)
    for chip in range(2):
        bench.launch(chip, PLAIN, repeat=40, chip=chip)
    assert {c.status for c in bench.finish(2)} == {0}
    spans = [span for span in bench.ring.query(Query.TRACE)["spans"] if span["chip"] < 2][-2:]
    assert {span["chip"] for span in spans} == {0, 1}
    assert max(span["start_ns"] for span in spans) < min(span["end_ns"] for span in spans)
