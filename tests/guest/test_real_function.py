"""The whole runtime against a real function process, bit for bit."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accelvisor.abi import commands, programs
from accelvisor.guest import models, nn, selftest
from accelvisor.guest.errors import DeviceFault, DeviceReset, ProgramRefused
from accelvisor.guest.function import Function
from accelvisor.kernels.interpreter import execute

from .real import Process

DIGITS = Path(__file__).parents[2] / "fixtures" / "digits"


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with tempfile.TemporaryDirectory(prefix="guest-") as folder:
        process = Process(Path(folder))
        yield process
        process.stop()


@pytest.fixture
def fn(process: Process) -> Iterator[Function]:
    with process.open(name="test") as fn:
        yield fn


def test_every_check_of_the_selftest_passes(fn: Function) -> None:
    outcomes = list(selftest.run(fn))
    assert [(o.name, o.state, o.detail) for o in outcomes if o.state != "ok"] == []
    assert len(outcomes) == len(selftest.CHECKS)
    assert "no formula" not in next(o.detail for o in outcomes if o.name == "instructions")


def test_digits_are_classified_with_the_bits_of_the_reference(fn: Function) -> None:
    model = models.load_model(DIGITS / "mlp.npz")
    told = models.run_model(fn, model, singles=10)
    assert told["correct"] == 346
    program = programs.decode(nn.inference(fn, model.network, 360, "logits").data)
    logits = np.empty((360, 10), np.float32)
    execute(program, [model.test.x, *model.parameters, logits])
    assert np.array_equal(logits, told["outputs"])


def test_training_gives_the_bits_of_the_interpreter(fn: Function) -> None:
    train, _ = models.load_data(DIGITS / "digits.npz")
    network = nn.Sequential((64, 32, 10))
    x, labels = train.x[:320], train.labels[:320]
    done = nn.train(fn, network, x, labels, epochs=3, batch=32, rate=0.2, decay=1e-3, seed=5)
    program = programs.decode(nn.training_step(fn, network, 32, 320, 0.2, 1e-3).data)
    weights = network.initial(5)
    losses = []
    for epoch in range(3):
        epoch_losses = np.empty(10, np.float32)
        for i, rows in enumerate(nn.order(320, 32, epoch, 5)):
            loss = epoch_losses[i : i + 1].reshape(())
            execute(program, [x, labels, rows, *weights, loss])
        losses.append(float(epoch_losses.mean(dtype=np.float64)))
    assert done.losses == losses
    assert all(np.array_equal(a, b) for a, b in zip(done.parameters, weights, strict=True))
    assert losses[2] < losses[0]


def test_training_survives_the_death_of_the_worker(process: Process, fn: Function) -> None:
    train, _ = models.load_data(DIGITS / "digits.npz")
    network = nn.Sequential((64, 64, 10))
    calm = nn.train(fn, network, train.x, train.labels, epochs=3, seed=1)
    stop = threading.Event()

    def kill() -> None:
        # On a machine that is busy a new worker may come to nothing within the pause: not for ever.
        for _ in range(25):
            if stop.wait(0.05):
                break
            process.kill_worker()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        shaken = nn.train(fn, network, train.x, train.labels, epochs=3, seed=1)
    finally:
        stop.set()
        killer.join(30)
    assert shaken.losses == calm.losses
    assert models.digest(shaken.parameters) == models.digest(calm.parameters)


def test_a_label_out_of_range_is_a_typed_fault_with_the_devices_words(fn: Function) -> None:
    x = fn.tensor(np.zeros((2, 3), np.float32))
    bad = fn.tensor(np.array([0, 7], np.int64))
    with pytest.raises(DeviceFault) as caught:
        fn.ops.softmax_cross_entropy(x, bad)
    assert caught.value.code == "device-numeric"
    assert caught.value.message != "the device answered numeric"
    fn.restart()
    assert fn.tensor([1.0]).item() == 1.0


def test_a_program_that_the_builder_would_not_make_is_refused_with_its_place(fn: Function) -> None:
    slot = programs.Slot(programs.DType.FLOAT32, (2,), programs.Role.INPUT)
    relu = fn.instructions["relu"].opcode
    data = programs.encode(programs.Program((slot,), (programs.Operation(relu, (0, 0)),)))
    with pytest.raises(ProgramRefused, match="instruction 0"):
        fn.load(data)


def test_a_reset_function_is_noticed_and_used_again(fn: Function) -> None:
    tensor = fn.tensor([1.0])
    fn.reset()
    with pytest.raises(DeviceReset):
        tensor.numpy()
    assert fn.tensor([2.0]).item() == 2.0


def test_a_full_device_memory_is_refused_and_comes_back(fn: Function) -> None:
    from accelvisor.guest.errors import DeviceFull

    with pytest.raises(DeviceFull):
        fn.empty((1 << 30,), "uint8")
    with fn.empty((32 << 20,), "uint8") as large:
        assert large.nbytes == 32 << 20
    with fn.empty((32 << 20,), "uint8"):
        pass


def test_long_programs_are_waited_for_by_interrupt(fn: Function) -> None:
    with fn.program() as p:
        a, b = p.input((512, 512)), p.input((512, 512))
        p.output(p.matmul(a, b))
    bound = p.bind(fn.zeros((512, 512)), fn.zeros((512, 512)))
    bound()
    bound._expected_s = 1.0
    before = fn.statistics()["interrupts"]
    bound(repeat=20)
    assert fn.statistics()["interrupts"] > before


def test_the_device_says_whose_context_it_is(fn: Function) -> None:
    fn.tensor([1.0, 2.0])
    kept = fn.tensor([3.0])
    objects = fn.objects()
    assert {"tensor"} == {o["kind"] for o in objects}
    assert kept.shape == (1,)


def test_a_command_costs_this_side_little(fn: Function) -> None:
    """The guest's own part of a pipelined no-op: no more than a few dozen calls of functions."""
    submit, wait, entry = fn.queue.submit, fn.queue.wait, commands.nop(0)
    best = peer = float("inf")
    for _ in range(10):
        began = time.thread_time()
        for _ in range(2000):
            _ten_calls()
        peer = min(peer, (time.thread_time() - began) / 2000)
        cookies = deque(submit(entry) for _ in range(32))
        began = time.thread_time()
        for _ in range(2000):
            wait(cookies.popleft())
            cookies.append(submit(entry))
        best = min(best, (time.thread_time() - began) / 2000)
        while cookies:
            wait(cookies.popleft())
    assert best < 50 * peer  # about 3 when it is quiet


def _ten_calls() -> None:
    for _ in range(10):
        _one_call()


def _one_call() -> None:
    pass
