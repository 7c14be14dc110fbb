"""Faults in a row: a reset, and when resets do not help the function stands still with a reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.registers import Interrupt, QueueReg, QueueStatus, Reg, Status
from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as s
from accelvisor.limits import LIMITS
from tests.function.harness import Local, Ring, call, running, wait_for
from tests.function.test_moving import accumulate


@pytest.fixture
def local() -> Iterator[Local]:
    with Local(queues=2) as made:
        yield made


NOWHERE = abi.Memory(0, 0, 0x10, 16, 0)


def fault(local: Local, index: int = 0) -> None:
    """One context that faults."""
    ring = local.ring(index)
    ring.open("bad")
    done = ring.do(abi.program_load, NOWHERE)
    assert done.status == CommandStatus.BAD_ADDRESS


def faults_in_a_row(local: Local, count: int = LIMITS.fault_row) -> None:
    """Contexts on two queues by turns, each of which is opened and faults. The last one is not
    waited for: a reset may take its completion away.
    """
    for number in range(count - 1):
        fault(local, number % local.spec.queues)
    ring = local.ring(count % local.spec.queues)
    ring.open("bad")
    ring.post(abi.program_load(7, NOWHERE))
    ring.submit()


def work(local: Local) -> None:
    """A program that runs to its end."""
    ring = local.ring(1)
    ring.open("good")
    y = ring.tensor(np.zeros(100, np.float32))
    assert ring.launch(ring.load(accumulate(100)), y, y).status == 0


def test_sixteen_in_a_row_reset_the_function(local: Local) -> None:
    faults_in_a_row(local)
    local.wait(lambda: local.read32(Reg.RESET_COUNT) == 1)
    assert local.read32(Reg.FAULTS) == 0
    assert local.state.u32[s.R_ROW] == 0
    assert local.state.u64[s.W_FAULT_RESETS] == 1
    ring = local.ring()
    assert ring.register(QueueReg.STATUS) == QueueStatus.ENABLED
    ring.open("good")


def test_fifteen_do_not(local: Local) -> None:
    faults_in_a_row(local, LIMITS.fault_row - 1)
    local.wait(lambda: local.read32(Reg.FAULTS) == LIMITS.fault_row - 1)
    local.ring(1).open("good")  # the engine has passed the boundary at which it would reset
    assert local.read32(Reg.RESET_COUNT) == 0


def test_a_program_that_runs_begins_the_count_anew(local: Local) -> None:
    faults_in_a_row(local, LIMITS.fault_row - 1)
    local.wait(lambda: local.state.u32[s.R_ROW] == LIMITS.fault_row - 1)
    work(local)
    assert local.state.u32[s.R_ROW] == 0
    faults_in_a_row(local, LIMITS.fault_row - 1)
    local.wait(lambda: local.state.u32[s.R_ROW] == LIMITS.fault_row - 1)
    assert local.read32(Reg.RESET_COUNT) == 0


def quarantined(local: Local) -> Ring:
    for _ in range(LIMITS.fault_resets_per_minute):
        resets = local.read32(Reg.RESET_COUNT)
        faults_in_a_row(local)
        local.wait(lambda before=resets: local.read32(Reg.RESET_COUNT) > before)
    faults_in_a_row(local)
    local.wait(lambda: bool(local.read32(Reg.STATUS) & Status.QUARANTINED))
    return local._rings[-1]


def test_resets_that_do_not_help_end_in_quarantine(local: Local) -> None:
    ring = quarantined(local)
    assert local.read32(Reg.STATUS) & Status.FROZEN
    assert local.read32(Reg.INTERRUPT_CAUSE) & Interrupt.FAULT
    done = ring.ready()
    ring.post(abi.context_open(9, 1, "more"))
    ring.submit()
    assert ring.ready() == done, "nothing is computed any more"
    assert local.device.queries.info()["quarantined"]


def test_quarantine_ends_when_somebody_has_looked(local: Local) -> None:
    quarantined(local)
    local.device.function_reset()
    assert local.read32(Reg.STATUS) & Status.QUARANTINED, "the guest's own reset is not enough"
    local.device.absolve()
    local.ring().open("again")
    faults_in_a_row(local)
    local.wait(lambda: local.state.u64[s.W_FAULT_RESETS] == LIMITS.fault_resets_per_minute + 1)


def test_the_next_worker_stands_still_too(local: Local) -> None:
    quarantined(local)
    local.restart()
    assert local.read32(Reg.STATUS) & Status.QUARANTINED


def test_the_holder_says_so_without_asking_the_worker() -> None:
    with running() as process:
        assert process.holder("status")["quarantined"] is False
        with process.client():
            pass
        state = process.control("status")
        assert state["quarantined"] is False


def test_who_waits_for_trouble_is_told_at_once_and_nobody_is_woken_before() -> None:
    with running() as process:
        told: list[object] = []
        known = {"gave_up": "", "quarantined": False}
        waiter = threading.Thread(
            target=lambda: told.append(call(process.spec.holder_socket, "wait", known))
        )
        waiter.start()
        wait_for(lambda: process.holder("status")["open_descriptors"], "an answer meanwhile")
        pid = process.holder("status")["holder_pid"]
        wait_for(lambda: _sleeps(pid), "half a second in which an idle holder sleeps")
        assert not told
        process.holder("give-up")
        waiter.join(5)
        assert told == [{"gave_up": "asked to", "quarantined": False}]
        assert call(process.spec.holder_socket, "wait", known) == told[0]


def _sleeps(pid: int) -> bool:
    before = switches(pid)
    time.sleep(0.5)
    return switches(pid) == before


def switches(pid: int) -> int:
    """How often a process has been put on a processor."""
    text = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)
