"""Building, checking, uploading and launching programs."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable

import numpy as np
import pytest

from accelvisor.abi import programs
from accelvisor.abi.programs import Role
from accelvisor.errors import ConflictError, ProgramError, UsageError
from accelvisor.guest.errors import CommandTimeout, DeviceFault, DeviceReset
from accelvisor.guest.function import Function
from accelvisor.guest.program import Program

from .fake_device import FakeDevice

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(12, dtype=np.float32).reshape(3, 4) - 5


def layer(fn: Function) -> Program:
    with fn.program("layer") as p:
        x, w = p.input((2, 3), name="x"), p.input((3, 4), name="w")
        p.output(p.relu(p.matmul(x, w)))
    return p


def test_a_program_computes(fn: Function) -> None:
    p = layer(fn)
    y = p(fn.tensor(A), fn.tensor(B))
    assert np.array_equal(y.numpy(), np.maximum(A @ B, 0))


def test_arrays_may_be_given_and_leave_nothing_behind(device: FakeDevice, fn: Function) -> None:
    p = layer(fn)
    y = p(A, w=B)
    assert np.array_equal(y.numpy(), np.maximum(A @ B, 0))
    y.close()
    assert device.tensors == {}


def test_results_may_go_into_given_tensors(fn: Function) -> None:
    out = fn.zeros((2, 4))
    assert layer(fn)(A, B, out=out) is out
    assert np.array_equal(out.numpy(), np.maximum(A @ B, 0))


def test_a_parameter_is_updated_in_place(fn: Function) -> None:
    with fn.program() as p:
        w, g = p.parameter((2, 2), name="w"), p.input((2, 2), name="g")
        p.sgd(w, g, rate=0.5, out=w)
    w_, g_ = fn.ones((2, 2)), fn.ones((2, 2))
    assert p(w_, g_) is None
    assert w_.numpy().tolist() == [[0.5, 0.5], [0.5, 0.5]]
    p(w_, g_, repeat=3)
    assert w_.numpy().tolist() == [[-1, -1], [-1, -1]]


def test_a_parameter_may_be_a_result_as_well(fn: Function) -> None:
    with fn.program() as p:
        w = p.parameter((2,))
        p.output(p.add(w, w, out=w), w)
    tensor = fn.ones((2,))
    assert p(tensor) is tensor
    assert tensor.numpy().tolist() == [2, 2]


def test_several_results_come_in_the_order_of_output(fn: Function) -> None:
    with fn.program() as p:
        x = p.input((2,))
        first, second = p.add(x, x), p.mul(x, x)
        p.output(second, first)
    second_, first_ = p([3.0, 4.0])
    assert (second_.numpy().tolist(), first_.numpy().tolist()) == ([9, 16], [6, 8])


def test_operators_and_numbers(fn: Function) -> None:
    with fn.program() as p:
        x = p.input((2,))
        p.output(1 - (2 * x + x) * 0.5)
    assert p([2.0, 4.0]).numpy().tolist() == [-2, -5]


def test_the_methods_are_the_devices_instructions(fn: Function) -> None:
    p = fn.program()
    assert {"matmul", "relu", "fill"} <= set(dir(p))
    assert str(inspect.signature(p.sgd)) == (
        "(w, g, /, *, rate=0.1, out=None, shape=None, dtype=None)"
    )
    assert "<- a: (m k) float32" in (p.matmul.__doc__ or "")
    with pytest.raises(AttributeError, match="it has matmul"):
        _ = p.matmull


def test_a_program_reads_like_what_it_does(fn: Function) -> None:
    assert str(layer(fn)).splitlines() == [
        "program layer(x, w)",
        "    t2: float32[2, 4] = matmul(x, w)",
        "    t3: float32[2, 4] = relu(t2)",
        "    return t3",
    ]


def test_the_bytes_are_canonical_and_uploaded_once(device: FakeDevice, fn: Function) -> None:
    first, second = layer(fn), layer(fn)
    assert first.data == second.data
    assert device.uploads == 1
    decoded = programs.decode(first.data)
    assert [s.role for s in decoded.slots] == [
        Role.INPUT, Role.INPUT, Role.TEMPORARY, Role.OUTPUT,
    ]  # fmt: skip


def test_closing_unloads(device: FakeDevice, fn: Function) -> None:
    p = layer(fn)
    p.close()
    p.close()
    assert device.programs == {}
    with pytest.raises(ConflictError):
        p(A, B)


def test_a_program_is_uploaded_again_after_a_restart(device: FakeDevice, fn: Function) -> None:
    p = layer(fn)
    fn.restart()
    assert np.array_equal(p(A, B).numpy(), np.maximum(A @ B, 0))


def test_shapes_are_checked_while_building(fn: Function) -> None:
    p = fn.program()
    x, w = p.input((2, 3)), p.input((4, 4))
    with pytest.raises(ProgramError) as caught:
        p.matmul(x, w)
    assert caught.value.where == "matmul.b"


def test_dtypes_are_checked_while_building(fn: Function) -> None:
    p = fn.program()
    with pytest.raises(ProgramError) as caught:
        p.add(p.input((2,)), p.input((2,), "int32"))
    assert caught.value.where == "add.b"
    with pytest.raises(ProgramError):
        p.relu(p.input((2,), "int8"))


def test_attributes_are_checked_while_building(fn: Function) -> None:
    p = fn.program()
    x = p.parameter((2,))
    with pytest.raises(ProgramError) as caught:
        p.sgd(x, x, speed=1.0)
    assert "rate" in caught.value.hint
    with pytest.raises(ProgramError):
        p.sgd(x, x, rate=float("nan"))


def test_inputs_are_not_written(fn: Function) -> None:
    p = fn.program()
    x = p.input((2,))
    with pytest.raises(ProgramError):
        p.add(x, x, out=x)
    with pytest.raises(ProgramError):
        p.output(x)


def test_values_of_another_program_are_refused(fn: Function) -> None:
    p, q = fn.program(), fn.program()
    with pytest.raises(UsageError) as caught:
        p.relu(q.input((2,)))
    assert caught.value.code == "value-foreign"
    with pytest.raises(UsageError):
        p.relu(fn.ones((2,)))


def test_the_number_of_tensors_is_checked(fn: Function) -> None:
    p = fn.program()
    x = p.input((2,))
    with pytest.raises(UsageError, match="takes 2 tensors, got 1"):
        p.add(x)
    with pytest.raises(UsageError):
        p.add(x, x, out=(x, x))


def test_a_built_program_is_closed_to_changes(fn: Function) -> None:
    p = layer(fn)
    with pytest.raises(ConflictError):
        p.input((1,))
    with pytest.raises(ConflictError):
        p.relu(p.results[0])


def test_a_failing_block_uploads_nothing(device: FakeDevice, fn: Function) -> None:
    p = fn.program()
    with pytest.raises(ZeroDivisionError), p:
        1 / p.input((0,)).shape[0]
    assert device.uploads == 0
    with pytest.raises(ConflictError) as caught:
        p([1.0])
    assert caught.value.code == "program-not-built"


@pytest.mark.parametrize(
    ("args", "named"),
    [((A,), {}), ((A, B, B), {}), ((A,), {"x": A}), ((A,), {"v": B}), ((A, A), {})],
)
def test_arguments_are_matched_like_a_functions(
    fn: Function, args: tuple[np.ndarray, ...], named: dict[str, np.ndarray]
) -> None:
    with pytest.raises(UsageError):
        layer(fn)(*args, **named)


def test_a_parameter_must_be_a_tensor(fn: Function) -> None:
    with fn.program() as p:
        w = p.parameter((2,))
        p.add(w, w, out=w)
    with pytest.raises(UsageError):
        p([1.0, 2.0])


def test_tensors_of_another_function_are_refused(
    fn: Function, open_function: Callable[..., Function]
) -> None:
    other = open_function(FakeDevice())
    with pytest.raises(UsageError):
        layer(fn)(other.tensor(A), other.tensor(B))


def test_a_launch_may_be_waited_for_later(device: FakeDevice, fn: Function) -> None:
    device.late_ticks = 3
    p = layer(fn)
    x, w = fn.tensor(A), fn.tensor(B)
    launch = p(x, w, wait=False)
    assert not launch.done()
    assert np.array_equal(launch.result().numpy(), np.maximum(A @ B, 0))
    assert launch.done()
    assert launch.cycles == 7


def test_a_bound_program_submits_one_command_a_launch(device: FakeDevice, fn: Function) -> None:
    bound = layer(fn).bind(fn.tensor(A), fn.tensor(B))
    before = len(device.log)
    for _ in range(4):
        bound()
    assert device.log[before:] == ["launch"] * 4
    assert np.array_equal(bound.result.numpy(), np.maximum(A @ B, 0))


def test_bindings_give_their_staging_back(fn: Function) -> None:
    p = layer(fn)
    x, w, y = fn.tensor(A), fn.tensor(B), fn.zeros((2, 4))
    free = fn.staging.spans.largest
    with p.bind(x, w, out=y) as bound:
        bound()
        assert fn.staging.spans.largest < free
    assert fn.staging.spans.largest == free
    with pytest.raises(UsageError):
        bound()


def test_bindings_stay_until_the_last_launch_is_done(device: FakeDevice, fn: Function) -> None:
    p = layer(fn)
    x, w, y = fn.tensor(A), fn.tensor(B), fn.zeros((2, 4))
    free = fn.staging.spans.largest
    bound = p.bind(x, w, out=y)
    device.late_ticks = 10
    launches = [bound.launch() for _ in range(3)]
    bound.release()
    fn.queue.poll()
    assert fn.staging.spans.largest < free
    for launch in launches:
        launch.result()
    fn.queue.call(b"\0" * 64)
    assert fn.staging.spans.largest == free


def test_forgotten_launches_and_bindings_leave_nothing_taken(
    device: FakeDevice, fn: Function
) -> None:
    p = layer(fn)
    x, w, y = fn.tensor(A), fn.tensor(B), fn.zeros((2, 4))
    free = fn.staging.spans.largest
    device.late_ticks = 5
    for _ in range(10):
        p.bind(x, w, out=y).launch()
    gc.collect()
    for _ in range(3):
        fn.queue.call(b"\0" * 64)
    assert fn.staging.spans.largest == free
    assert fn.queue.in_flight == 0
    assert not fn.queue._done


def test_a_timed_out_launch_may_be_waited_for_again(device: FakeDevice, fn: Function) -> None:
    p = layer(fn)
    bound = p.bind(fn.tensor(A), fn.tensor(B))
    device.late_ticks = 1 << 30
    launch = bound.launch()
    with pytest.raises(CommandTimeout):
        launch.result(timeout_s=0.2)
    device._late = [(0, *late[1:]) for late in device._late]
    device.late_ticks = 0
    assert np.array_equal(launch.result().numpy(), np.maximum(A @ B, 0))


def test_a_faulting_launch_is_typed(device: FakeDevice, fn: Function) -> None:
    p = layer(fn)
    x, w = fn.tensor(A), fn.tensor(B)
    device.statuses[0x30] = 0x103
    device.detail = "instruction 1 (gather_rows): index 99 of 5"
    with pytest.raises(DeviceFault, match="index 99 of 5"):
        p(x, w)


def test_a_binding_of_a_context_that_is_gone_says_so(fn: Function) -> None:
    bound = layer(fn).bind(fn.tensor(A), fn.tensor(B))
    fn.restart()
    with pytest.raises(DeviceReset):
        bound()


def test_long_launches_ask_for_an_interrupt_short_ones_do_not(
    device: FakeDevice, fn: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = layer(fn).bind(fn.tensor(A), fn.tensor(B))
    bound()
    bound._expected_s = 0.0
    bound()
    assert device.cause == 0
    bound._expected_s = 1.0
    bound()
    assert device.cause == 1


def test_repeat_is_checked(fn: Function) -> None:
    with pytest.raises(UsageError):
        layer(fn)(A, B, repeat=0)


def test_a_program_without_arguments(fn: Function) -> None:
    with fn.program() as p:
        p.output(p.fill(shape=(2, 2), value=3.0))
    assert p().numpy().tolist() == [[3, 3], [3, 3]]
