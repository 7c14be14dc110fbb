"""A worker may die at any store while commands run out of order, or a graph's queues side by side:
the next one ends in the same bytes (as test_crash.py, whose machine this is).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import Binding, Flag, Memory, scheduled
from accelvisor.abi.dtypes import DType
from accelvisor.abi.graphs import Entry, Graph, Kind, Node, QueueType
from accelvisor.abi.graphs import encode as encode_graph
from accelvisor.abi.programs import Program, Role, Slot, encode
from accelvisor.abi.status import CommandStatus
from accelvisor.function import blame
from accelvisor.function import state as s
from accelvisor.function.chips import Engines, Job
from accelvisor.function.graphs import Pace
from accelvisor.function.pauses import Pauses
from accelvisor.limits import MIB
from tests.amount import by_night
from tests.function.harness import operation
from tests.function.test_crash import RAM, Died, Life, Machine

F32 = DType.FLOAT32
N = 300_000  # elements: two tiles
PLAIN, SYNC, COND = Flag.PLAIN, Flag.SYNC, Flag.CONDITIONAL


class Inline(Engines):
    """Engines without threads, so that a death hits all of them at a store: a step of each job by
    turns.
    """

    def carry(self, jobs: Sequence[Job]) -> Pauses[None]:
        waiting = deque(job.make(lambda: True, self.alone) for job in jobs)
        idle = 0
        while waiting:
            steps = waiting.popleft()
            try:
                pause = next(steps)
            except StopIteration:
                idle = 0
                continue
            waiting.append(steps)
            idle = idle + 1 if pause is not None and not pause.ready() else 0
            assert idle <= 4 * len(jobs), "every queue waits"
            yield None


class Chips(Machine):
    """A machine whose engines are inline."""

    def live(self, life: Life, most: int = 100_000) -> int:
        device = None
        try:
            device = self.worker(life)
            device.engine.engines.__class__ = Inline
            device.engine._attend = True  # pause at every boundary
            frontend = device.frontend
            frontend.recover()
            lane = frontend.lanes[0]
            for _ in range(most):
                progress = frontend.unordered.advance()
                progress |= frontend.serve(lane)
                progress |= frontend.unordered.dispatch()
                if not progress:
                    return life.left
            raise AssertionError("the worker does not come to rest")
        finally:
            if device is not None:
                self.forget(device)


def handle(slot: int) -> int:
    return 1 << 32 | slot


def memory(at: int, length: int) -> Memory:
    return Memory(0, 0, RAM + at, length, 0)


class Script:
    """Commands and the RAM that they read."""

    def __init__(self) -> None:
        self.ram = bytearray(4 * MIB)
        self.at = 2 * MIB
        self.commands: list[bytes] = []
        self.ram[: N * 4] = np.arange(N, dtype=np.float32).tobytes()
        pair = (Slot(F32, (N,), Role.OUTPUT), Slot(F32, (N,), Role.INPUT))
        # In place, so that it has a snapshot and scratch.
        add = encode(Program(pair, (operation("add", 0, 1, 0),)))
        move = encode(Program((pair[1], pair[0]), (operation("copy", 0, 1),)))
        self.post(abi.context_open(0, 1, "crash"))
        for _ in range(2):
            self.post(abi.tensor_create(0, F32, (N,)))
        self.post(abi.copy_in(0, handle(0), 0, memory(0, N * 4)))
        self.post(abi.copy_in(0, handle(1), 0, memory(0, N * 4)))
        self.post(abi.program_load(0, self.put(add)))  # slot 2
        self.post(abi.program_load(0, self.put(move)))  # slot 3

    def put(self, raw: bytes) -> Memory:
        at, self.at = self.at, self.at + (len(raw) + 63) // 64 * 64
        self.ram[at : at + len(raw)] = raw
        return memory(at, len(raw))

    def post(self, entry: bytes) -> None:
        cookie = (len(self.commands) + 1).to_bytes(4, "little")
        self.commands.append(entry[:4] + cookie + entry[8:])

    def launch(self, into: int, what: int, *schedule: Any, repeat: int = 1) -> None:
        bindings = abi.BINDING.pack(handle(into), 0) + abi.BINDING.pack(handle(what), 0)
        entry = abi.launch(0, handle(2), 2, self.put(bindings), repeat)
        self.post(scheduled(entry, *schedule))

    def out(self) -> None:
        for n in range(2):
            self.post(abi.copy_out(0, handle(n), 0, memory(2 * MIB + MIB // 2 + n * N * 2, N * 2)))


@cache
def unordered() -> Script:
    """Chains, waiters, a failed one with what depended on it, copies on a transfer engine."""
    script = Script()
    script.launch(0, 1, SYNC, 0, 1, repeat=2)
    script.post(scheduled(abi.nop(0), SYNC | COND, 0xFF, 2, 1))
    script.launch(0, 1, COND, 1, 0, 2)
    script.post(scheduled(abi.nop(0), PLAIN))
    script.post(scheduled(abi.launch(0, handle(77), 0, memory(0, 0)), SYNC | COND, 0, 3, 1))
    script.post(scheduled(abi.nop(0), SYNC | COND, 0xFF, 4, 3))
    script.post(scheduled(abi.nop(0), COND, 0xFF, 0, 4))
    script.post(scheduled(abi.nop(0), COND, 0xFF, 0, 99))
    script.post(abi.fence(0))
    script.post(scheduled(abi.copy_out(0, handle(0), 0, memory(3 * MIB, 4096)), PLAIN, 0))
    script.post(abi.tensor_destroy(0, handle(1)))
    return script


@cache
def graph() -> Script:
    """Both queues of two chips, with a snapshot on each, three times."""
    script = Script()
    run, give, take = (
        lambda node: Entry(Kind.RUN, 0, node),
        lambda event: Entry(Kind.SIGNAL, event),
        lambda event, value: Entry(Kind.WAIT, event, value),
    )
    queues = {
        (0, QueueType.COMPUTE): (run(0), give(0), take(1, 1), run(3)),
        (1, QueueType.TRANSFER): (take(0, 1), run(1), give(2)),
        (1, QueueType.COMPUTE): (take(2, 1), run(2), give(1)),
    }
    first, second = Binding(handle(0), 0), Binding(handle(1), 0)
    nodes = (
        Node(handle(2), (first, second)),  # 0 += 1
        Node(handle(3), (first, second)),  # 1 := 0
        Node(handle(2), (second, first)),  # 1 += 0
        Node(handle(2), (first, second)),  # 0 += 1
    )
    script.post(abi.graph_load(0, script.put(encode_graph(Graph(2, queues, nodes)))))  # slot 4
    script.post(abi.graph_launch(0, handle(4), 3))
    script.post(scheduled(abi.graph_launch(0, handle(4), 1), PLAIN, 1))
    script.post(abi.graph_unload(0, handle(4)))
    return script


SCRIPTS = {"unordered": unordered, "graph": graph, "alone": graph}
#: Nanoseconds below which one thread carries a graph out: from its second turn on, or never.
WORTH_NS = {"unordered": 0, "graph": 0, "alone": 1 << 60}


def machine(name: str) -> Chips:
    script = SCRIPTS[name]()
    return Chips(list(script.commands), bytes(script.ram), chips=2)


def told(outcome: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on when anybody died: completions may come in another order."""
    done = outcome["completions"]
    return {**outcome, "completions": sorted(done)}


@pytest.fixture(scope="module", params=sorted(SCRIPTS))
def unkilled(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any], int]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pace, "WORTH_NS", WORTH_NS[request.param])
        there = machine(request.param)
        stores = 1_000_000
        left = there.live(Life(stores))
        yield request.param, there.outcome(), stores - left
        there.close()


def test_the_script_does_what_it_says(unkilled: tuple[str, dict[str, Any], int]) -> None:
    name, outcome, stores = unkilled
    found = {cookie: status for cookie, status, *_ in outcome["completions"]}
    assert sorted(found) == list(range(1, len(SCRIPTS[name]().commands) + 1))
    wrong = {status: sum(1 for s in found.values() if s == status) for status in found.values()}
    wrong.pop(0)
    x = np.arange(N, dtype=np.float32)
    memory = np.frombuffer(outcome["memory"], np.float32)
    if name == "unordered":
        assert wrong == {
            CommandStatus.BAD_HANDLE: 1,
            CommandStatus.ABORTED: 2,
            CommandStatus.BAD_DEPENDENCY: 1,
        }
        assert np.array_equal(memory[:N], x + x + x + x)
    else:
        first, second = x.copy(), x.copy()
        for _ in range(4):
            first = first + second
            second = first + first
            first = first + second
        assert not wrong
        assert np.array_equal(memory[:N], first)
    assert stores > 200
    assert not outcome["bindings"].strip(b"\0") or name == "unordered"


def test_one_death_anywhere_changes_nothing(unkilled: tuple[str, dict[str, Any], int]) -> None:
    name, outcome, stores = unkilled
    expected = told(outcome)
    for at in range(1, stores + 1, by_night(1, 4)):
        there = machine(name)
        with pytest.raises(Died):
            there.live(Life(at))
        there.live(Life(-1))
        got = told(there.outcome())
        for key, value in expected.items():
            assert got[key] == value, f"{key} differs: killed at store {at} of {stores}"
        there.close()


@pytest.mark.parametrize("stride", [1, 3])
def test_death_after_death_ends_the_same(
    unkilled: tuple[str, dict[str, Any], int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "MOST", 1 << 30)
    name, outcome, _ = unkilled
    there, life, deaths = machine(name), 1, 0
    while True:
        try:
            there.live(Life(life))
            break
        except Died:
            deaths += 1
            life = life + stride if life < 120 else 60
    assert deaths > 5
    got = told(there.outcome())
    for key, value in told(outcome).items():
        assert got[key] == value, f"{key} differs after {deaths} deaths"
    there.close()


def test_what_ran_out_of_order_leaves_nothing_in_the_state(
    unkilled: tuple[str, dict[str, Any], int]
) -> None:
    _, outcome, _ = unkilled
    base = s.BINDINGS_AT
    for low, high in (
        (s.BINDINGS_AT, s.COMPLETED_AT), (s.GRAPHS_AT, s.DIGEST_END)
    ):  # fmt: skip
        assert not outcome["bindings"][low - base : high - base].strip(b"\0")
