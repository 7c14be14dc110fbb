"""Waiting for a command: spinning, sleeping, interrupts, deadlines."""

from __future__ import annotations

import pytest

from accelvisor.abi import commands
from accelvisor.abi.registers import Status
from accelvisor.guest.errors import CommandTimeout
from accelvisor.guest.waiting import Pauses, Spinning, WaitPolicy

from .fake_device import FakeDevice
from .test_queue import NOP, make


def test_a_late_completion_is_waited_for_without_spinning_through_it(device: FakeDevice) -> None:
    device.late_ticks = 40
    queue = make(device)
    assert queue.wait(queue.submit(NOP), timeout_s=5).status == 0
    assert device.clock.slept > 0


def spun(device: FakeDevice, waits: int) -> int:
    """Of so many waits, how many were for the long spin."""
    queue = make(device)
    picked: list[bool] = []
    pick = queue._spinning.pick

    def noted() -> bool:
        picked.append(pick())
        return picked[-1]

    queue._spinning.pick = noted  # type: ignore[method-assign]
    for _ in range(waits):
        queue.call(NOP)
    return sum(picked)


def test_quick_commands_are_spun_for(device: FakeDevice) -> None:
    assert spun(device, 320) >= 300


def test_long_commands_are_not_spun_for_but_now_and_then(device: FakeDevice) -> None:
    device.late_ticks = 30
    assert 5 <= spun(device, 320) <= 40


def learned(spinning: Spinning, long_s: float, brief_s: float, waits: int = 320) -> int:
    """Waits that take so long each way; of the last half, how many were for the long spin."""
    picked = []
    for _ in range(waits):
        picked.append(spinning.pick())
        spinning.learn(picked[-1], long_s if picked[-1] else brief_s)
    return sum(picked[waits // 2 :])


def test_a_spin_that_starves_the_device_is_given_up() -> None:
    assert learned(Spinning(WaitPolicy()), long_s=480e-6, brief_s=100e-6) <= 10


def test_spinning_comes_back_when_it_pays_again() -> None:
    spinning = Spinning(WaitPolicy())
    learned(spinning, long_s=480e-6, brief_s=100e-6)
    assert learned(spinning, long_s=10e-6, brief_s=100e-6, waits=640) >= 300


def test_one_long_program_does_not_end_spinning() -> None:
    spinning = Spinning(WaitPolicy())
    learned(spinning, long_s=10e-6, brief_s=100e-6)
    spinning.learn(spinning.pick(), 5.0)
    assert learned(spinning, long_s=10e-6, brief_s=100e-6, waits=128) >= 56


class Patient:
    """What is waited for, by the book: what the waiter does, and when."""

    index = 0

    def __init__(self) -> None:
        self.policy = WaitPolicy()
        self.clock = 100.0
        self.did: list[tuple[str, float]] = []

    def now(self) -> float:
        return self.clock

    def nap(self, seconds: float) -> None:
        self.did.append(("nap", seconds))
        self.clock += seconds

    def wait_interrupt(self, timeout_s: float) -> None:
        self.did.append(("interrupt", timeout_s))
        self.clock += timeout_s

    def look(self, *, locked: bool) -> Status:
        self.did.append(("look", 0.0))
        return Status(0)


@pytest.mark.parametrize("interrupt", [False, True])
def test_half_of_what_is_expected_is_slept_through_in_one_nap(interrupt: bool) -> None:
    """Whatever the guest does at the beginning of a long program costs the device a core."""
    queue = Patient()
    pause = Pauses(queue, queue.now(), 30.0, interrupt, expected_s=0.016)
    pause.once(locked=False)
    assert queue.did == [("nap", pytest.approx(0.008))]
    pause.once(locked=False)
    assert queue.did[1][0] == ("interrupt" if interrupt else "nap")


def test_a_long_expectation_hides_no_dead_device_and_passes_no_deadline() -> None:
    queue = Patient()
    pause = Pauses(queue, queue.now(), 0.25, expected_s=100.0)
    while queue.clock < 100.25:
        pause.once(locked=False)
    with pytest.raises(CommandTimeout):
        pause.once(locked=False)
    assert queue.clock == pytest.approx(100.25)
    assert [what for what, _ in queue.did].count("look") == 3


def test_what_is_expected_to_take_long_is_not_spun_for(device: FakeDevice) -> None:
    device.late_ticks = 40
    queue = make(device)
    queue._spin = None  # type: ignore[assignment, method-assign]
    assert queue.wait(queue.submit(NOP), timeout_s=5, expected_s=0.016).status == 0


def test_an_interrupt_ends_the_sleep(device: FakeDevice) -> None:
    queue = make(device)
    device.late_ticks = 1
    cookie = queue.submit(commands.nop(0, commands.Flag.INTERRUPT))
    queue.wait(cookie, interrupt=True)
    assert device.waits >= 1


def test_an_old_cause_does_not_keep_the_next_interrupt_away(device: FakeDevice) -> None:
    queue = make(device)
    flagged = commands.nop(0, commands.Flag.INTERRUPT)
    queue.wait(queue.submit(flagged), interrupt=True)  # done before anybody slept: cause stays set
    assert device.cause
    device.late_ticks = 1
    for _ in range(3):
        queue.wait(queue.submit(flagged), interrupt=True)
    assert device.interrupts_raised == 4


def test_an_old_fault_does_not_turn_waiting_into_a_storm(device: FakeDevice) -> None:
    queue = make(device)
    device.cause = 2  # a fault that nobody acknowledged
    device.late_ticks = 5
    queue.wait(queue.submit(commands.nop(0, commands.Flag.INTERRUPT)), interrupt=True)
    assert device.interrupts_raised == 1


def test_a_lost_interrupt_costs_one_slice_not_the_command(device: FakeDevice) -> None:
    device.lose_interrupts = True
    device.late_ticks = 1
    queue = make(device)
    before = device.clock.now
    cookie = queue.submit(commands.nop(0, commands.Flag.INTERRUPT))
    assert queue.wait(cookie, interrupt=True).status == 0
    assert device.clock.now - before < 2 * queue.policy.interrupt_s


def test_a_command_that_never_completes_times_out_by_name(device: FakeDevice) -> None:
    device.late_ticks = 1 << 30
    queue = make(device)
    cookie = queue.submit(NOP)
    with pytest.raises(CommandTimeout) as caught:
        queue.wait(cookie, timeout_s=2)
    assert caught.value.code == "command-timeout"
    assert caught.value.where == "queue:0"


def test_a_timed_out_command_may_be_waited_for_again(device: FakeDevice) -> None:
    device.late_ticks = 1 << 30
    queue = make(device)
    cookie = queue.submit(NOP)
    with pytest.raises(CommandTimeout):
        queue.wait(cookie, timeout_s=0.1)
    device._late = [(0, *late[1:]) for late in device._late]
    assert queue.wait(cookie, timeout_s=1).cookie == cookie


def test_a_frozen_function_is_waited_for_past_the_deadline(device: FakeDevice) -> None:
    queue = make(device)
    device.frozen = True
    cookie = queue.submit(NOP)
    thaw_at = device.clock.now + 5

    def sleep(seconds: float) -> None:
        device.clock.now += seconds
        if device.frozen and device.clock.now > thaw_at:
            device.frozen = False
        device.tick()

    queue._sleep = sleep
    assert queue.wait(cookie, timeout_s=1).status == 0  # and the doorbell was rung again
