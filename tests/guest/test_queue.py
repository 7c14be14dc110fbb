"""The ring pair: order, depth, doorbells, absence, what is given up."""

from __future__ import annotations

import gc
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.abi import commands
from accelvisor.abi.registers import SQ_TAIL, WindowLayout
from accelvisor.errors import ConflictError, ProtocolError, UsageError
from accelvisor.guest.errors import (
    CommandTimeout,
    DeviceBroken,
    DeviceInTransition,
    DeviceReset,
)
from accelvisor.guest.queue import Queue
from accelvisor.guest.registers import Registers

from .fake_device import FakeDevice

NOP = commands.nop(0)


def make(device: FakeDevice, **options: object) -> Queue:
    registers = Registers(device, clock=device.clock, sleep=device.clock.sleep, transition_s=1.0)
    queue = Queue(
        device,
        0,
        WindowLayout(device.queues, device.entries),
        registers,
        clock=device.clock,
        sleep=device.clock.sleep,
        **options,  # type: ignore[arg-type]
    )
    queue.start()
    return queue


def test_a_command_completes_with_its_own_cookie(device: FakeDevice) -> None:
    queue = make(device)
    cookies = [queue.submit(NOP) for _ in range(5)]
    assert [queue.wait(c).cookie for c in cookies] == cookies
    assert len(set(cookies)) == 5
    assert queue.in_flight == 0


def test_the_same_entry_may_be_submitted_again_while_it_is_in_flight(device: FakeDevice) -> None:
    device.asleep = False
    queue = make(device)
    first, second = queue.submit(NOP), queue.submit(NOP)
    assert first != second
    assert queue.wait(second).cookie == second
    assert queue.wait(first).cookie == first


def test_rings_wrap_many_times(device: FakeDevice) -> None:
    queue = make(device)
    for _ in range(device.entries * 5 + 3):
        assert queue.call(NOP).status == 0


def test_indices_wrap_at_32_bits(device: FakeDevice) -> None:
    queue = make(device)
    start = 0xFFFFFFFE
    page = WindowLayout(device.queues, device.entries).control(0)
    for offset in (0x00, 0x40, 0x80, 0xC0):  # the four indices, all at the same point
        device._words[(page + offset) >> 2] = start
    queue._tail = queue._head = queue._sq_head = start
    for _ in range(8):
        queue.call(NOP)
    assert device._words[(page + SQ_TAIL) >> 2] == (start + 8) & 0xFFFFFFFF


@given(st.permutations(range(6)), st.booleans())
def test_completions_in_any_order_reach_their_waiters(order: list[int], reverse: bool) -> None:
    device = FakeDevice(reverse=reverse, asleep=False)
    queue = make(device)
    cookies = [queue.submit(NOP) for _ in order]
    for i in order:
        assert queue.wait(cookies[i]).cookie == cookies[i]


def test_depth_is_a_limit_not_a_suggestion(device: FakeDevice) -> None:
    device.asleep = False
    queue = make(device, depth=3)
    for _ in range(20):
        queue.submit(NOP)
        assert queue.in_flight <= 3


def test_no_room_is_an_error_after_the_deadline(device: FakeDevice) -> None:
    device.asleep = False
    device.frozen = False
    device.late_ticks = 1 << 30
    queue = make(device, depth=1)
    queue.submit(NOP)
    with pytest.raises(CommandTimeout):
        queue.submit(NOP, timeout_s=0.5)


@pytest.mark.parametrize("depth", [0, 17])
def test_a_depth_that_the_rings_cannot_hold_is_refused(device: FakeDevice, depth: int) -> None:
    with pytest.raises(UsageError):
        make(device, depth=depth)


def test_an_awake_device_is_not_rung(device: FakeDevice) -> None:
    device.asleep = False
    queue = make(device)
    queue.call(NOP)
    assert device.doorbells == 0


def test_a_sleeping_device_is_rung_for_each_command(device: FakeDevice) -> None:
    queue = make(device)
    queue.call(NOP)
    queue.call(NOP)
    assert device.doorbells == 2


def test_a_batch_costs_one_doorbell(device: FakeDevice) -> None:
    queue = make(device)
    with queue.batch():
        cookies = [queue.submit(NOP) for _ in range(10)]
        assert device.doorbells == 0
        assert queue.poll() == 0
    assert device.doorbells == 1
    assert [queue.wait(c).cookie for c in cookies] == cookies


def test_waiting_inside_a_batch_shows_it_to_the_device(device: FakeDevice) -> None:
    queue = make(device)
    with queue.batch():
        cookie = queue.submit(NOP)
        assert queue.wait(cookie, timeout_s=1).cookie == cookie


def test_a_batch_larger_than_the_ring_goes_in_parts(device: FakeDevice) -> None:
    queue = make(device)
    with queue.batch():
        cookies = [queue.submit(NOP) for _ in range(3 * device.entries)]
    assert [queue.wait(c).cookie for c in cookies] == cookies
    assert device.doorbells == 3


def test_a_failing_batch_still_shows_what_it_has(device: FakeDevice) -> None:
    queue = make(device)
    with pytest.raises(ZeroDivisionError), queue.batch():
        1 // (queue.submit(NOP) - 1)
    assert queue.wait(1, timeout_s=1).status == 0


def test_a_lost_doorbell_is_rung_again(device: FakeDevice) -> None:
    queue = make(device)
    device.lost_doorbells = 1
    assert queue.wait(queue.submit(NOP), timeout_s=5).status == 0
    assert device.doorbells == 2


def test_an_abandoned_command_keeps_its_memory_until_it_completes(device: FakeDevice) -> None:
    device.late_ticks = 5
    queue = make(device)
    released: list[str] = []
    cookie = queue.submit(NOP)
    queue.abandon(cookie, lambda: released.append("first"))
    queue.poll()
    assert released == []
    queue.call(NOP)
    assert released == ["first"]
    with pytest.raises(UsageError):
        queue.wait(cookie)


def test_abandoning_what_has_completed_releases_at_the_next_look(device: FakeDevice) -> None:
    queue = make(device)
    cookie = queue.submit(NOP)
    queue.poll()
    released: list[int] = []
    queue.abandon(cookie, lambda: released.append(1))
    queue.call(NOP)
    assert released == [1]


def test_held_memory_is_released_and_the_completion_still_delivered(device: FakeDevice) -> None:
    queue = make(device)
    cookie = queue.submit(NOP)
    released: list[int] = []
    queue.hold(cookie, lambda: released.append(1))
    assert queue.wait(cookie).cookie == cookie
    queue.call(NOP)
    assert released == [1]


def test_waiting_twice_is_the_callers_mistake(device: FakeDevice) -> None:
    queue = make(device)
    cookie = queue.submit(NOP)
    queue.wait(cookie)
    with pytest.raises(UsageError):
        queue.wait(cookie)


@pytest.mark.parametrize("value", [0, 0xFFFFFFFF])
def test_an_absent_window_is_not_taken_for_completions(device: FakeDevice, value: int) -> None:
    device.absent_value = value
    queue = make(device)
    for _ in range(3):
        queue.call(NOP)
    device.late_ticks = 3
    cookie = queue.submit(NOP)
    device.vanish(reads=20)
    assert queue.wait(cookie, timeout_s=5).cookie == cookie
    assert queue.call(NOP).status == 0


@pytest.mark.parametrize("value", [0, 0xFFFFFFFF])
def test_a_command_written_into_an_absent_window_is_written_again(
    device: FakeDevice, value: int
) -> None:
    device.absent_value = value
    queue = make(device)
    queue.call(NOP)
    device.vanish(reads=7)
    cookie = queue.submit(NOP)  # lost: entry, tail and doorbell
    assert queue.wait(cookie, timeout_s=5).cookie == cookie


def test_a_move_is_noticed_and_commands_go_on(device: FakeDevice) -> None:
    queue = make(device)
    device.lost_doorbells = 1
    cookie = queue.submit(NOP)
    device.epoch += 1
    assert queue.wait(cookie, timeout_s=5).cookie == cookie


def test_a_device_that_stays_away_is_an_error_of_its_own(device: FakeDevice) -> None:
    queue = make(device)
    cookie = queue.submit(NOP)
    device.vanish(reads=1 << 30)
    with pytest.raises(DeviceInTransition):
        queue.wait(cookie, timeout_s=60)


def test_a_reset_is_noticed_by_the_waiter_and_everybody_after(device: FakeDevice) -> None:
    queue = make(device)
    for _ in range(3):
        queue.call(NOP)
    device.late_ticks = 1 << 30
    cookie = queue.submit(NOP)
    device.reset()
    for _ in range(2):
        with pytest.raises(DeviceReset):
            queue.wait(cookie, timeout_s=5)
    with pytest.raises(DeviceReset):
        queue.submit(NOP)


def test_a_queue_starts_again_after_a_reset(device: FakeDevice) -> None:
    queue = make(device)
    cookie = queue.submit(NOP)
    queue.wait(cookie)
    device.reset()
    with pytest.raises(DeviceReset):
        queue.call(NOP, timeout_s=5)
    queue.start()
    assert queue.call(NOP).status == 0


def test_a_function_that_gave_up_is_named(device: FakeDevice) -> None:
    queue = make(device)
    device.late_ticks = 1 << 30
    cookie = queue.submit(NOP)
    device.broken = True
    with pytest.raises(DeviceBroken):
        queue.wait(cookie)


def test_a_completion_that_nobody_asked_for_stops_the_queue(device: FakeDevice) -> None:
    queue = make(device)
    device.stray_cookie = 12345
    cookie = queue.submit(NOP)
    with pytest.raises(ProtocolError) as caught:
        queue.wait(cookie, timeout_s=1)
    assert caught.value.code == "completion-unknown"
    with pytest.raises(ProtocolError):
        queue.submit(NOP)


def test_an_index_beyond_what_was_asked_for_stops_the_queue(device: FakeDevice) -> None:
    queue = make(device)
    device.late_ticks = 1 << 30
    cookie = queue.submit(NOP)
    device._words[(WindowLayout(device.queues, device.entries).control(0) + 0xC0) >> 2] = 9
    with pytest.raises(ProtocolError):
        queue.wait(cookie, timeout_s=1)


def test_a_closed_queue_refuses(device: FakeDevice) -> None:
    queue = make(device)
    queue.stop()
    with pytest.raises(ConflictError):
        queue.submit(NOP)


def test_threads_share_a_queue(device: FakeDevice) -> None:
    queue = make(device)
    wrong: list[object] = []

    def work() -> None:
        for _ in range(200):
            cookie = queue.submit(NOP)
            completion = queue.wait(cookie, timeout_s=30)
            if completion.cookie != cookie:
                wrong.append(completion)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert queue.in_flight == 0


def test_garbage_collection_inside_the_queue_does_not_deadlock(device: FakeDevice) -> None:
    queue = make(device)

    class Dropped:
        def __del__(self) -> None:
            queue.abandon(999, None)

    with queue._lock:
        loop = [Dropped()]
        loop.append(loop)  # type: ignore[arg-type]
        del loop
        gc.collect()
    assert queue.call(NOP).status == 0


def test_a_submitter_that_waits_for_room_does_not_keep_others_waiting(device: FakeDevice) -> None:
    queue = make(device, depth=2)
    done = queue.submit(NOP)
    queue.poll()
    device.late_ticks = 1 << 30
    queue.submit(NOP)
    queue.submit(NOP)
    sleeping, woken = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        device.clock.now += seconds
        sleeping.set()
        woken.wait(20)
        device.late_ticks = 0
        device._late = [(0, *late[1:]) for late in device._late]
        device.tick()

    queue._sleep = sleep
    submitter = threading.Thread(target=lambda: queue.submit(NOP))
    submitter.start()
    assert sleeping.wait(20)
    assert queue._lock.acquire(timeout=5), "the sleeper holds the lock"
    queue._lock.release()
    assert queue.wait(done, timeout_s=0.1).cookie == done
    woken.set()
    submitter.join(20)
    assert not submitter.is_alive()


def test_what_timed_out_commands_held_comes_back_when_the_queue_starts_again(
    device: FakeDevice,
) -> None:
    queue = make(device)
    device.late_ticks = 1 << 30
    released: list[int] = []
    for _ in range(3):
        cookie = queue.submit(NOP)
        queue.abandon(cookie, lambda: released.append(1))
    queue.poll()
    with queue._lock:
        queue._adopt()  # one way to be kept; the other is not to be adopted yet
    queue.hold(queue.submit(NOP), lambda: released.append(2))
    assert released == []
    queue.start()
    assert sorted(released) == [1, 1, 1, 2]


def test_a_queue_that_cannot_be_stopped_keeps_what_its_commands_use(device: FakeDevice) -> None:
    queue = make(device)
    device.late_ticks = 1 << 30
    released: list[int] = []
    queue.abandon(queue.submit(NOP), lambda: released.append(1))
    device.vanish(reads=1 << 30)
    with pytest.raises(DeviceInTransition):
        queue.stop()
    assert released == []


class Torn:
    """The queue's words, with the window away between the first look at the index and the next."""

    def __init__(self, queue: Queue, device: FakeDevice) -> None:
        self.words, self.queue, self.device = queue._words, queue, device
        self.looks = 0

    def __getitem__(self, at: int) -> int:
        value = self.words[at]
        if at == self.queue._cq_tail_at and value:
            self.looks += 1
            entry = slice(self.queue._cq + 4, self.queue._cq + 32)
            if self.looks == 2:  # the first was the spinning waiter's
                self.kept = bytes(self.device.window[entry])
                self.device.window[entry] = b"\xff" * 28
            elif self.looks == 3:
                self.device.window[entry] = self.kept
                return 0xFFFFFFFF
        return value

    def __setitem__(self, at: int, value: int) -> None:
        self.words[at] = value


def test_a_completion_read_while_the_window_went_away_is_read_again(device: FakeDevice) -> None:
    queue = make(device)
    cookie = queue.submit(NOP)
    queue._words = Torn(queue, device)  # type: ignore[assignment]
    assert queue.wait(cookie, timeout_s=5).status == 0
