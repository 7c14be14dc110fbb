"""Opening, closing, faults, resets, forks and questions."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accelvisor.abi import commands
from accelvisor.errors import ConflictError, ProtocolError, UsageError
from accelvisor.guest.errors import (
    CommandRefused,
    CommandTimeout,
    DeviceFault,
    DeviceFull,
    DeviceReset,
)
from accelvisor.guest.function import Function

from .fake_device import FakeDevice


def test_a_context_carries_the_programs_name(
    device: FakeDevice, open_function: Callable[..., Function]
) -> None:
    open_function(device, name="trainer")
    assert device.context == {0: "trainer"}


def test_the_process_names_itself(device: FakeDevice, fn: Function) -> None:
    assert device.context[0] == Path("/proc/self/comm").read_text().strip()


def test_closing_closes_the_context_and_the_transport(device: FakeDevice, fn: Function) -> None:
    fn.close()
    fn.close()
    assert device.context == {}
    assert device.closed == 1
    with pytest.raises(ConflictError) as caught:
        fn.call(commands.nop(0))
    assert caught.value.code == "function-closed"


def test_a_with_block_closes(device: FakeDevice) -> None:
    with Function(device, clock=device.clock, sleep=device.clock.sleep) as fn:
        assert not fn.closed
    assert fn.closed


def test_a_failing_open_lets_go_of_everything(device: FakeDevice, tmp_path: Path) -> None:
    device.statuses[0x01] = 0x004  # CONTEXT_OPEN: too many contexts
    for _ in range(2):
        with pytest.raises(DeviceFull):
            Function(
                device, lock_name="x", locks=tmp_path, clock=device.clock, sleep=device.clock.sleep
            )
    assert device.closed == 2


def test_two_processes_get_two_queues(device: FakeDevice, tmp_path: Path) -> None:
    def make() -> Function:
        return Function(
            device, lock_name="x", locks=tmp_path, clock=device.clock, sleep=device.clock.sleep
        )

    first, second = make(), make()
    assert (first.queue.index, second.queue.index) == (0, 1)
    with pytest.raises(ConflictError) as caught:
        make()
    assert caught.value.code == "queue-busy"
    first.close()
    assert make().queue.index == 0


def test_the_devices_own_words_are_in_the_error(device: FakeDevice, fn: Function) -> None:
    device.detail = "instruction 3: operand b is int8"
    device.statuses[0x11] = 0x007
    with pytest.raises(CommandRefused, match="instruction 3: operand b is int8") as caught:
        fn.call(commands.tensor_destroy(0, 99))
    assert caught.value.code == "device-bad-handle"
    assert caught.value.status == 0x007


def test_a_fault_stops_the_context_and_restart_begins_again(
    device: FakeDevice, fn: Function
) -> None:
    tensor = fn.tensor([1.0, 2.0])
    device.statuses[0x00] = 0x103
    with pytest.raises(DeviceFault) as caught:
        fn.call(commands.nop(0))
    assert caught.value.code == "device-numeric"
    device.statuses.clear()
    with pytest.raises(DeviceFault):
        fn.call(commands.nop(0))
    fn.restart()
    with pytest.raises(DeviceReset) as gone:
        tensor.numpy()
    assert gone.value.code == "object-gone"
    tensor.close()  # quietly: there is nothing to free
    assert fn.tensor([3.0]).item() == 3.0


def test_tensors_of_a_context_that_is_gone_are_not_destroyed_in_the_next(
    device: FakeDevice, fn: Function
) -> None:
    tensor = fn.tensor([1.0])
    fn.restart()
    kept = fn.tensor([2.0])
    del tensor
    gc.collect()
    fn.call(commands.nop(0))
    assert kept.item() == 2.0


def test_a_reset_by_somebody_else_is_a_typed_error(device: FakeDevice, fn: Function) -> None:
    fn.tensor([1.0])
    device.reset()
    with pytest.raises(DeviceReset):
        fn.tensor([1.0])
    fn.restart()
    assert fn.tensor([4.0]).item() == 4.0


def test_reset_of_the_whole_function(device: FakeDevice, fn: Function) -> None:
    fn.reset()
    assert device.reset_count == 1
    assert fn.tensor([4.0]).item() == 4.0


def test_garbage_collected_tensors_are_freed_on_the_device(
    device: FakeDevice, fn: Function
) -> None:
    for _ in range(5):
        fn.empty((8,))
    gc.collect()
    fn.call(commands.nop(0))
    assert device.tensors == {}


def test_a_full_device_frees_what_nobody_can_reach(
    device: FakeDevice, open_function: Callable[..., Function]
) -> None:
    device.memory_limit = 4096
    fn = open_function(device)
    loop: list[object] = [fn.empty((4096,), "uint8")]
    loop.append(loop)
    del loop
    assert fn.empty((4096,), "uint8").size == 4096


def test_a_full_device_says_so(device: FakeDevice, fn: Function) -> None:
    kept = fn.empty((16 << 20,), "uint8")
    with pytest.raises(DeviceFull) as caught:
        fn.empty((1,))
    assert caught.value.code == "device-out-of-memory"
    assert kept.size == 16 << 20


@pytest.mark.parametrize("shape", [(1,) * 9, (-1,), (1 << 32,)])
def test_shapes_that_no_tensor_has_are_refused_here(fn: Function, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        fn.empty(shape)


def test_questions_are_answered_with_what_the_device_says(
    device: FakeDevice, fn: Function
) -> None:
    assert fn.info()["memory_used_bytes"] == 0
    assert fn.statistics()["commands"] > 0
    assert fn.objects() == []
    assert fn.state.reset_count == 0


def test_an_answer_larger_than_asked_for_is_asked_for_again(
    device: FakeDevice, fn: Function
) -> None:
    assert len(fn.instructions) == 7
    assert device.log.count("query") >= 1
    assert "matmul" in fn.instructions


def test_an_instruction_table_that_is_none_is_a_protocol_error(
    device: FakeDevice, fn: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_table", lambda: [{"name": "half"}])
    with pytest.raises(ProtocolError) as caught:
        _ = fn.instructions
    assert caught.value.code == "instruction-table"


def test_a_forked_child_cannot_use_the_parents_function(device: FakeDevice, fn: Function) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fn.queue.submit(commands.nop(0))
            answer = b"used it"
        except ConflictError as error:
            answer = error.code.encode()
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"forked"
    os.close(read)
    os.waitpid(child, 0)
    assert fn.tensor([1.0]).item() == 1.0  # the parent goes on


def test_an_absent_device_does_not_disturb_running_copies(
    device: FakeDevice, fn: Function
) -> None:
    tensor = fn.tensor(np.arange(100, dtype=np.float32))
    for reads in (1, 5, 17):
        device.vanish(reads=reads)
        assert np.array_equal(tensor.numpy(), np.arange(100, dtype=np.float32))


def test_two_threads_that_bury_the_same_dead_do_not_disturb_each_other(fn: Function) -> None:
    class Emptied(deque[tuple[int, int]]):
        """Another thread takes the last one between the look and the taking."""

        def __bool__(self) -> bool:
            return True

    fn.graveyard = Emptied()
    fn.bury()


def test_a_function_that_cannot_be_stopped_keeps_the_memory_that_the_device_may_use(
    device: FakeDevice, fn: Function
) -> None:
    idle = fn.dma.take(4096)
    fn.dma.give(idle)
    pinned = fn.pinned((10,))
    buffer = pinned.buffer._buffer
    device.vanish(reads=1 << 30)
    fn.close()
    assert (idle.released, buffer.released) == (0, 0)  # type: ignore[attr-defined]
    assert device.closed == 1


def test_closing_gives_back_what_timed_out_commands_held(
    device: FakeDevice, open_function: Callable[..., Function]
) -> None:
    fn = open_function(device, timeout_s=0.5)
    tensor = fn.empty((10,))
    pinned = fn.pinned((10,))
    buffer = pinned.buffer._buffer
    device.late_ticks = 1 << 30
    with pytest.raises(CommandTimeout):
        tensor.copy_(pinned.array)
    fn.close()
    assert buffer.released == 1  # type: ignore[attr-defined]


def test_a_forked_child_lets_go_of_the_window_and_says_why(
    device: FakeDevice, fn: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(device, "forked", lambda: told.append("transport"), raising=False)
    span = fn.staging.take(100)
    fn.forked()  # what the child's handler calls
    assert told == ["transport"]
    assert fn.staging.taken == set()
    span.release()
    for use in (fn.queue.poll, lambda: fn.queue.is_done(1), lambda: fn.queue.wait(1)):
        with pytest.raises(ConflictError) as caught:
            use()
        assert caught.value.code == "forked"
    fn.close()
    assert device.closed == 0
