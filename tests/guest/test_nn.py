"""Networks built from instruction names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from accelvisor.errors import UsageError
from accelvisor.guest import nn
from accelvisor.guest.errors import DeviceFault
from accelvisor.guest.function import Function

from .fake_device import FakeDevice


@pytest.fixture
def fn(open_function: Callable[..., Function]) -> Function:
    return open_function(FakeDevice(real_kernels=True, window_bytes=1 << 20, entries=64))


def reference(parameters: list[np.ndarray], x: np.ndarray, activation: str) -> np.ndarray:
    functions = {
        "relu": lambda v: np.maximum(v, 0),
        "tanh": np.tanh,
        "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    }
    x = x.astype(np.float64)
    for i in range(0, len(parameters), 2):
        x = x @ parameters[i] + parameters[i + 1]
        if i + 2 < len(parameters):
            x = functions[activation](x)
    return x


@pytest.mark.parametrize("activation", nn.ACTIVATIONS)
@pytest.mark.parametrize("sizes", [(5, 3), (5, 7, 3), (5, 7, 6, 3)])
def test_inference_is_numpys(fn: Function, sizes: tuple[int, ...], activation: str) -> None:
    network = nn.Sequential(sizes, activation)
    parameters = network.initial(1)
    x = np.random.RandomState(0).standard_normal((4, 5)).astype(np.float32)
    logits = reference(parameters, x, activation)
    assert np.allclose(nn.inference(fn, network, 4, "logits")(x, *parameters), logits, atol=1e-4)
    p = np.asarray(nn.inference(fn, network, 4, "probabilities")(x, *parameters))
    assert np.allclose(p.sum(axis=1), 1, atol=1e-5)
    assert nn.classify(fn, network, parameters, x).tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("activation", nn.ACTIVATIONS)
def test_a_training_step_follows_the_numeric_gradient(fn: Function, activation: str) -> None:
    network = nn.Sequential((4, 5, 3), activation)
    parameters = network.initial(2)
    random = np.random.RandomState(3)
    x = random.standard_normal((6, 4)).astype(np.float32)
    labels = random.randint(0, 3, 6)
    rows = np.array([5, 0, 3], np.int64)
    rate = 0.5

    def loss(weights: list[np.ndarray]) -> float:
        z = reference(weights, x[rows], activation)
        z = z - z.max(axis=1, keepdims=True)
        picked = z[np.arange(3), labels[rows]] - np.log(np.exp(z).sum(axis=1))
        return float(-picked.mean())

    step = nn.training_step(fn, network, 3, 6, rate)
    tensors = [fn.tensor(w) for w in parameters]
    found = step(x, labels, rows, *tensors).item()
    assert found == pytest.approx(loss(parameters), abs=1e-5)
    for i, before in enumerate(parameters):
        gradient = (before - tensors[i].numpy()) / rate
        for index in np.ndindex(*before.shape):
            wide = [w.astype(np.float64) for w in parameters]
            wide[i][index] += 1e-5
            above = loss(wide)
            wide[i][index] -= 2e-5
            numeric = (above - loss(wide)) / 2e-5
            assert gradient[index] == pytest.approx(numeric, abs=2e-3)


def test_training_learns_and_repeats_itself(fn: Function) -> None:
    random = np.random.RandomState(0)
    labels = random.randint(0, 3, 120)
    x = (np.eye(3)[labels] + 0.1 * random.standard_normal((120, 3))).astype(np.float32)
    network = nn.Sequential((3, 8, 3))
    seen: list[tuple[int, float]] = []
    first = nn.train(
        fn, network, x, labels, epochs=6, batch=16, rate=0.5, seed=4,
        progress=lambda epoch, loss: seen.append((epoch, loss)),
    )  # fmt: skip
    again = nn.train(fn, network, x, labels, epochs=6, batch=16, rate=0.5, seed=4)
    other = nn.train(fn, network, x, labels, epochs=6, batch=16, rate=0.5, seed=5)
    assert first.losses == again.losses
    assert first.losses != other.losses
    assert seen == list(enumerate(first.losses, 1))
    assert first.steps == 6 * 7
    assert first.losses[-1] < 0.2
    found = nn.classify(fn, network, first.parameters, x, batch=50)
    assert (found == labels).mean() > 0.95


def test_training_leaves_nothing_on_the_device(fn: Function) -> None:
    x, labels = np.zeros((8, 3), np.float32), np.zeros(8, np.int64)
    nn.train(fn, nn.Sequential((3, 2)), x, labels, epochs=1, batch=4)
    assert fn.transport.tensors == {}  # type: ignore[attr-defined]


def test_a_wrong_label_is_the_devices_typed_fault(fn: Function) -> None:
    x, labels = np.zeros((8, 3), np.float32), np.full(8, 9)
    with pytest.raises(DeviceFault) as caught:
        nn.train(fn, nn.Sequential((3, 2)), x, labels, epochs=1, batch=4)
    assert caught.value.code == "device-numeric"


def test_minibatches_cover_each_sample_once() -> None:
    rows = nn.order(20, 6, epoch=3, seed=1)
    assert rows.shape == (3, 6)
    assert len(set(rows.ravel().tolist())) == 18
    assert not np.array_equal(rows, nn.order(20, 6, epoch=4, seed=1))
    assert np.array_equal(rows, nn.order(20, 6, epoch=3, seed=1))


@pytest.mark.parametrize(
    ("sizes", "activation"), [((5,), "relu"), ((5, 0), "relu"), ((5, 3), "step")]
)
def test_forms_that_are_no_network_are_refused(sizes: tuple[int, ...], activation: str) -> None:
    with pytest.raises(UsageError):
        nn.Sequential(sizes, activation)


def test_parameters_must_chain() -> None:
    w, b = np.zeros((4, 3)), np.zeros(3)
    assert nn.form_of([w, b]).sizes == (4, 3)
    for wrong in ([w], [w, np.zeros(4)], [w, b, w, b], [], [b, b]):
        with pytest.raises(UsageError):
            nn.form_of(wrong)


@pytest.mark.parametrize(("samples", "labels", "batch"), [(4, 4, 5), (4, 3, 2), (4, 4, 0)])
def test_samples_labels_and_minibatch_must_fit(
    fn: Function, samples: int, labels: int, batch: int
) -> None:
    with pytest.raises(UsageError):
        nn.train(
            fn, nn.Sequential((2, 2)), np.zeros((samples, 2)), np.zeros(labels, int), batch=batch
        )


def test_an_unknown_result_is_refused(fn: Function) -> None:
    with pytest.raises(UsageError):
        nn.inference(fn, nn.Sequential((2, 2)), 1, "odds")
