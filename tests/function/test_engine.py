"""The engine: sleeping and waking, freezing at tiles, sharing time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.abi.registers import NEED_WAKEUP, QueueReg, QueueStatus, Reg
from accelvisor.errors import DeadlineError
from accelvisor.function import engine
from accelvisor.function import state as s
from accelvisor.function.engine import Engine
from accelvisor.kernels.programs import PlannedOperation
from tests.function.harness import Local, Ring, operation, wait_for

F32 = DType.FLOAT32
N = 300_000


def busy(ring: Ring, repeat: int = 1 << 30) -> None:
    """Start a program that runs until it is stopped."""
    if not ring.register(QueueReg.CONTEXT):
        ring.open()
    slots = (Slot(F32, (N,), Role.INPUT), Slot(F32, (N,), Role.OUTPUT))
    program = ring.load(Program(slots, (operation("relu", 0, 1),)))
    x = ring.ok(abi.tensor_create, F32, (N,))
    y = ring.ok(abi.tensor_create, F32, (N,))
    buffer = ring.guest.buffer(abi.BINDING.pack(x, 0) + abi.BINDING.pack(y, 0))
    ring.post(abi.launch(ring.next_cookie(), program, 2, buffer.whole(32), repeat=repeat))
    ring.submit()


def position(local: Local, queue: int) -> int:
    return local.state.u64[(s.cursor_word(queue) + s.C_POSITION64) // 2]


def asleep(local: Local, ring: Ring) -> bool:
    return ring.words[(ring.control + NEED_WAKEUP) // 4] == 1


def test_an_idle_engine_says_that_it_sleeps_and_wakes_by_the_doorbell(local: Local) -> None:
    ring = local.ring()
    for n in range(50):
        wait_for(lambda: asleep(local, ring), "the engine to sleep")
        assert ring.run(abi.nop(n)).cookie == n
    assert local.state.u64[s.K["doorbells"]] >= 50


def test_an_idle_engine_does_not_wake(local: Local) -> None:
    ring = local.ring()
    wait_for(lambda: asleep(local, ring), "the engine to sleep")
    time.sleep(0.002)
    sleeps = local.state.u64[s.K["sleeps"]]
    time.sleep(0.2)
    assert local.state.u64[s.K["sleeps"]] == sleeps


def test_commands_posted_while_it_falls_asleep_are_never_lost(local: Local) -> None:
    """The race of NEED_WAKEUP against SQ_TAIL, many times at about the right moment."""
    ring = local.ring()
    for n in range(1500):
        pause = time.perf_counter() + n % 60 * 1e-6
        while time.perf_counter() < pause:
            pass
        assert ring.run(abi.nop(n), timeout_s=20).cookie == n


def test_a_freeze_waits_for_the_tile_and_not_for_the_program(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, finished = threading.Event(), []

    def slow(self: PlannedOperation, arrays: object, tile: int) -> None:
        inside.set()
        time.sleep(0.05)
        finished.append(tile)

    monkeypatch.setattr(PlannedOperation, "run_tile", slow)
    busy(local.ring())
    assert inside.wait(30)
    local.device.engine.freeze(s.FREEZE_CONTROL, 10)
    count, where = len(finished), position(local, 0)
    time.sleep(0.15)
    assert (len(finished), position(local, 0)) == (count, where)
    local.device.engine.thaw(s.FREEZE_CONTROL)
    wait_for(lambda: position(local, 0) > where, "the program to go on")


def test_a_freeze_that_takes_too_long_is_called_off(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(PlannedOperation, "run_tile", lambda *_: release.wait(30))
    ring = local.ring()
    busy(ring, repeat=1)
    wait_for(lambda: local.state.u32[s.cursor_word(0) + s.C_PHASE], "the program to begin")
    with pytest.raises(DeadlineError):
        local.device.engine.freeze(s.FREEZE_CONTROL, 0.1)
    release.set()
    local.wait(ring.ready)
    assert not local.read32(Reg.STATUS) & 4


def test_one_freeze_ends_when_every_reason_is_gone(local: Local) -> None:
    ring = local.ring()
    engine = local.device.engine
    engine.freeze(s.FREEZE_CONTROL, 10)
    engine.freeze(s.FREEZE_MIGRATION, 10)
    ring.post(abi.nop(1))
    ring.submit()
    engine.thaw(s.FREEZE_CONTROL)
    time.sleep(0.05)
    assert not ring.ready()
    engine.thaw(s.FREEZE_MIGRATION)
    local.wait(ring.ready)


def test_two_long_programs_share_the_engine(local: Local) -> None:
    rings = [local.ring(n) for n in range(2)]
    for ring in rings:
        ring.open()
    for ring in rings:
        busy(ring)
    turns: Callable[[int], int] = lambda queue: position(local, queue) >> 32  # noqa: E731
    wait_for(lambda: min(turns(0), turns(1)) > 200, "both to progress")
    a, b = turns(0), turns(1)
    wait_for(lambda: max(turns(0) - a, turns(1) - b) > 1000, "a while to pass")
    first, second = turns(0) - a, turns(1) - b
    assert 0.3 < first / second < 3, (first, second)


def test_nobody_interrupts_a_long_program_for_a_queue_that_is_empty(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopping at the end of a quantum leaves cores idle until the last tile has ended."""
    asked: list[bool] = []
    attention = Engine.attention

    def watched(self: Engine) -> bool:
        asked.append(attention(self))
        return asked[-1]

    monkeypatch.setattr(engine, "QUANTUM_S", 0.0)
    monkeypatch.setattr(engine, "_RIVALS_S", 0.0)
    local.device.commands.running._attention = lambda: watched(local.device.engine)
    first, second = local.ring(0), local.ring(1)
    second.open()
    busy(first)
    wait_for(lambda: len(asked) > 50, "the program to run")
    asked.clear()
    wait_for(lambda: len(asked) > 50, "the program to go on")
    assert not any(asked)
    second.run(abi.nop(1))
    assert any(asked)


def test_a_frozen_function_still_closes_queues_and_resets(local: Local) -> None:
    ring = local.ring()
    ring.open()
    ring.tensor(np.ones(4, np.float32))
    local.device.engine.freeze(s.FREEZE_CONTROL, 10)
    ring.set(0, QueueStatus.DISABLED)
    assert local.device.memory.used == 0
    local.write32(Reg.CONTROL, 1)
    assert local.read32(Reg.RESET_COUNT) == 1
    assert local.read32(Reg.STATUS) & 4


def test_a_disable_aborts_a_long_program_and_its_launch_leaves_nothing(local: Local) -> None:
    ring = local.ring()
    ring.open()
    busy(ring)
    wait_for(lambda: position(local, 0), "the program to begin")
    ring.set(0, QueueStatus.DISABLED)
    assert local.device.memory.used == 0
    cursor = s.CURSORS_AT
    assert not any(local.state.u8[cursor : cursor + s.CURSOR_BYTES])
    again = local.ring()
    assert again.do(abi.nop).status == 0


def test_work_goes_on_where_a_worker_stopped(local: Local) -> None:
    ring = local.ring()
    ring.open()
    busy(ring, repeat=400)
    wait_for(lambda: position(local, 0) >> 32 > 3, "some turns")
    ring.words.release()
    local.restart()
    ring.words = local.window.cast("I")
    local.wait(ring.ready)
    assert ring.take().status == 0


def test_a_throttled_engine_lets_the_rest_of_the_time_pass(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 25 percent three times as long as it served, however long that was."""
    served, held, one_at_a_time = [], [], threading.Lock()

    def slow(self: PlannedOperation, arrays: object, tile: int) -> None:
        with one_at_a_time:
            began = time.perf_counter()
            time.sleep(0.002)
            served.append(time.perf_counter() - began)

    monkeypatch.setattr(PlannedOperation, "run_tile", slow)
    monkeypatch.setattr(
        Engine, "_hold_back", lambda self, seconds: held.append((seconds, sum(served)))
    )
    ring = local.ring()
    ring.open()
    local.device.engine.throttle(25)
    busy(ring)
    wait_for(lambda: served and len(held) > 50, "a while to pass")
    local.device.engine.throttle(100)
    before = next((total for _, total in held if total), 0.0)
    passed = sum(seconds for seconds, _ in held)
    assert passed >= 3 * (max(total for _, total in held) - before)
    count = len(held)
    turns = position(local, 0)
    wait_for(lambda: position(local, 0) > turns + (4 << 32), "it to go on unthrottled")
    assert len(held) <= count + 1


def test_whoever_freezes_a_throttled_engine_does_not_wait_for_it(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = threading.Event()

    def slow(self: PlannedOperation, arrays: object, tile: int) -> None:
        time.sleep(0.2)  # at one percent it is held back for 20 s after that
        inside.set()

    monkeypatch.setattr(PlannedOperation, "run_tile", slow)
    ring = local.ring()
    ring.open()
    local.device.engine.throttle(1)
    busy(ring)
    assert inside.wait(60)
    local.device.engine.freeze(s.FREEZE_CONTROL, 10)
