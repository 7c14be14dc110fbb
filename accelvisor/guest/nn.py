"""Small networks on the device: programs that infer and train, built from instruction names alone.

A sequential network is dense layers with an activation between them. Its parameters are a list
``[w0, b0, w1, b1, ...]`` (weights ``(inputs, outputs)``, biases ``(outputs,)``, float32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accelvisor.errors import UsageError
from accelvisor.guest.program import Program, Value

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

Array = npt.NDArray[Any]

#: Activations whose derivative the device computes from the activation's own result.
ACTIVATIONS = ("relu", "tanh", "sigmoid")


@dataclass(frozen=True, slots=True)
class Sequential:
    """The form of a network: ``sizes`` (inputs, hidden..., outputs) and its activation."""

    sizes: tuple[int, ...]
    activation: str = "relu"

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise UsageError(f"sizes {self.sizes} are no network", where="nn")
        if self.activation not in ACTIVATIONS:
            raise UsageError(
                f"unknown activation {self.activation!r}",
                where="nn",
                hint="one of " + ", ".join(ACTIVATIONS),
            )

    @property
    def layers(self) -> int:
        """How many dense layers it has."""
        return len(self.sizes) - 1

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of its parameters in order."""
        out: list[tuple[int, ...]] = []
        for n, m in zip(self.sizes[:-1], self.sizes[1:], strict=True):
            out += [(n, m), (m,)]
        return out

    def initial(self, seed: int) -> list[Array]:
        """Parameters to begin with: He's normal weights, zero biases; equal for equal seeds."""
        random = np.random.RandomState(seed)  # a frozen stream, unlike default_rng's
        parameters: list[Array] = []
        for shape in self.shapes():
            if len(shape) == 2:
                scale = np.sqrt(2.0 / shape[0])
                parameters.append((random.standard_normal(shape) * scale).astype(np.float32))
            else:
                parameters.append(np.zeros(shape, np.float32))
        return parameters


def form_of(parameters: Sequence[Array], activation: str = "relu") -> Sequential:
    """The network's form from its parameters.

    Raises:
        UsageError: they do not chain.
    """
    sizes: list[int] = []
    for i in range(0, len(parameters) - 1, 2):
        w, b = parameters[i], parameters[i + 1]
        if w.ndim != 2 or b.shape != (w.shape[1],) or (sizes and sizes[-1] != w.shape[0]):
            raise UsageError(
                f"w{i // 2} {w.shape} and b{i // 2} {b.shape} do not continue the network",
                where="nn",
                hint="weights are (inputs, outputs), biases (outputs,)",
            )
        sizes = [*(sizes or [w.shape[0]]), w.shape[1]]
    if len(parameters) % 2 or not sizes:
        raise UsageError(f"{len(parameters)} arrays are no network", where="nn")
    return Sequential(tuple(sizes), activation)


def _forward(p: Program, x: Value, network: Sequential, parameters: list[Value]) -> list[Value]:
    """Activations of all layers: the input first, the logits last."""
    outputs = [x]
    for i in range(network.layers):
        w, b = parameters[2 * i], parameters[2 * i + 1]
        h = p.call("matmul_bias", outputs[-1], w, b)
        if i + 1 < network.layers:
            h = p.call(network.activation, h)
        outputs.append(h)
    return outputs


def inference(
    function: Function, network: Sequential, batch: int, result: str = "classes"
) -> Program:
    """A program ``(x, w0, b0, ...) -> result`` for ``batch`` rows.

    Args:
        result: ``logits`` (batch, outputs) float32, ``probabilities`` (the same), or ``classes``
            (batch,) int64.
    """
    with function.program(f"infer-{result}") as p:
        x = p.input((batch, network.sizes[0]), name="x")
        parameters = [
            p.input(shape, name=f"{'wb'[i % 2]}{i // 2}")
            for i, shape in enumerate(network.shapes())
        ]
        y = _forward(p, x, network, parameters)[-1]
        if result == "probabilities":
            y = p.call("softmax", y)
        elif result == "classes":
            y = p.call("argmax_last", y)
        elif result != "logits":
            raise UsageError(f"unknown result {result!r}", where="nn")
        p.output(y)
    return p


def training_step(
    function: Function,
    network: Sequential,
    batch: int,
    samples: int,
    rate: float = 0.1,
    decay: float = 0.0,
) -> Program:
    """A program of one step of minibatch gradient descent.

    ``(x (samples, inputs), labels (samples,) int64, rows (batch,) int64, w0, b0, ...) -> loss ()``:
    gathers the rows, goes forward, takes the mean softmax cross entropy, goes backward and updates
    the parameters in place.
    """
    with function.program("train-step") as p:
        x = p.input((samples, network.sizes[0]), name="x")
        labels = p.input((samples,), "int64", name="labels")
        rows = p.input((batch,), "int64", name="rows")
        parameters = [
            p.parameter(shape, name=f"{'wb'[i % 2]}{i // 2}")
            for i, shape in enumerate(network.shapes())
        ]
        outputs = _forward(p, p.call("gather_rows", x, rows), network, parameters)
        wanted = p.call("gather_rows", labels, rows)
        losses, gradient = p.call("softmax_cross_entropy", outputs[-1], wanted, scale=1.0 / batch)
        for i in reversed(range(network.layers)):
            w, b = parameters[2 * i], parameters[2 * i + 1]
            before = outputs[i]
            dw = p.call("matmul_tn", before, gradient)
            db = p.call("sum_rows", gradient)
            if i:
                dx = p.call("matmul_nt", gradient, w)
                gradient = p.call(f"{network.activation}_backward", dx, before)
            p.call("sgd", w, dw, out=w, rate=rate, decay=decay)
            p.call("sgd", b, db, out=b, rate=rate)
        p.output(p.call("mean_all", losses))
    return p


@dataclass
class Training:
    """What :func:`train` returns. ``losses``: mean loss of each epoch."""

    network: Sequential
    parameters: list[Array]
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    cycles: int = 0  # model clock


def order(samples: int, batch: int, epoch: int, seed: int) -> Array:
    """Rows of an epoch's minibatches, (steps, batch) int64: a permutation by seed and epoch, whose
    last incomplete minibatch is left out.
    """
    random = np.random.RandomState((seed * 1_000_003 + epoch) % 2**32)
    steps = samples // batch
    return random.permutation(samples)[: steps * batch].reshape(steps, batch).astype(np.int64)


def train(
    function: Function,
    network: Sequential,
    x: Array,
    labels: Array,
    *,
    epochs: int = 10,
    batch: int = 32,
    rate: float = 0.1,
    decay: float = 0.0,
    seed: int = 0,
    parameters: Sequence[Array] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Training:
    """Train on the device; the data goes there once, and each epoch sends only row numbers.

    The same arguments give the same bits on any function of the same kind.

    Args:
        x: (samples, inputs), converted to float32.
        labels: (samples,) integers below ``network.sizes[-1]``.
        parameters: to begin with; ``network.initial(seed)`` when None.
        progress: called after each epoch with its number (from 1) and mean loss.

    Raises:
        UsageError: fewer samples than one minibatch. DeviceFault: e.g. a label out of range.
    """
    samples = len(x)
    if not 1 <= batch <= samples or len(labels) != samples:
        raise UsageError(
            f"{samples} samples, {len(labels)} labels, minibatches of {batch}", where="nn"
        )
    start = network.initial(seed) if parameters is None else parameters
    step = training_step(function, network, batch, samples, rate, decay)
    data = function.tensor(np.asarray(x, np.float32))
    wanted = function.tensor(np.asarray(labels, np.int64))
    weights = [function.tensor(np.asarray(w, np.float32)) for w in start]
    steps = samples // batch
    rows = function.empty((steps, batch), "int64")
    losses = function.empty((steps,))
    with ExitStack() as held:
        for tensor in (data, wanted, rows, losses, *weights):
            held.enter_context(tensor)
        runs = [
            held.enter_context(step.bind(data, wanted, rows[i], *weights, out=losses[i]))
            for i in range(steps)
        ]
        done = Training(network, [])
        for epoch in range(epochs):
            rows.copy_(order(samples, batch, epoch, seed))
            with function.queue.batch():
                launches = [run.launch() for run in runs]
            for launch in launches:
                launch.result()
            done.cycles += sum(launch.cycles for launch in launches)
            done.losses.append(float(losses.numpy().mean(dtype=np.float64)))
            done.steps += steps
            if progress is not None:
                progress(epoch + 1, done.losses[-1])
        done.parameters = [w.numpy() for w in weights]
        return done


def classify(
    function: Function, network: Sequential, parameters: Sequence[Array], x: Array, batch: int = 0
) -> Array:
    """Classes of the rows of ``x``, (samples,) int64, ``batch`` rows at a time (0: all at once)."""
    samples = len(x)
    batch = min(batch or samples, samples) or 1
    program = inference(function, network, batch)
    weights = [function.tensor(np.asarray(w, np.float32)) for w in parameters]
    part = function.empty((batch, network.sizes[0]))
    classes = function.empty((batch,), "int64")
    found = np.empty(samples, np.int64)
    with program.bind(part, *weights, out=classes) as run:
        for at in range(0, samples, batch):
            rows = np.asarray(x[at : at + batch], np.float32)
            size = len(rows)
            part[:size].copy_(rows)
            run()
            found[at : at + size] = classes[:size].numpy()
    for tensor in (part, classes, *weights):
        tensor.close()
    return found
