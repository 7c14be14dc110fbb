"""Data-parallel training: every chip has the whole network and a part of each minibatch.

One graph is one step. Each chip goes forward through its part and backward layer by layer; as soon
as a layer's gradients are there, they are summed over the chips on the transfer queues, while the
compute queues go on with the layer before (what PyTorch's DistributedDataParallel does: S. Li et
al., "PyTorch Distributed", VLDB 13(12), 2020); then each chip updates its own copy of that layer.

The data goes to the device once, the row numbers once for each epoch. A counter on the device says
which step it is, so that one command runs a whole epoch. Gradients are added in the order of chips,
so the same arguments give the same bits however messages are cut and whether they are compressed,
and all chips end with the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from accelvisor.errors import UsageError
from accelvisor.guest.closing import Closing
from accelvisor.guest.nn import Array, Sequential, Training, _forward, order
from accelvisor.guest.program import Program
from accelvisor.guest.tensor import Tensor

if TYPE_CHECKING:
    from accelvisor.guest.function import Function
    from accelvisor.guest.graphs.graph import Graph


class DataParallel(Closing):
    """One network on several chips, and the graph of one step. Free it with :meth:`close`.

    Args:
        x: (samples, inputs), converted to float32. labels: (samples,) integers.
        parameters: to begin with, ``[w0, b0, ...]``.
        chips: how many; they are 0, 1, ... of the function. batch: a multiple of it, all together.
        reduction, chunks, compress: as ``order``, ``chunks``, ``compress`` of
            :func:`accelvisor.guest.graphs.collectives.all_reduce`.

    Raises:
        UsageError: the batch does not divide, or there are not so many chips.
    """

    def __init__(
        self,
        function: Function,
        network: Sequential,
        x: Array,
        labels: Array,
        parameters: Sequence[Array],
        *,
        chips: int = 4,
        batch: int = 32,
        rate: float = 0.1,
        decay: float = 0.0,
        reduction: str = "rank",
        chunks: int = 4,
        compress: bool = False,
    ) -> None:
        samples = len(x)
        if not 1 <= batch <= samples or len(labels) != samples:
            raise UsageError(
                f"{samples} samples, {len(labels)} labels, minibatches of {batch}", where="parallel"
            )
        if not 1 <= chips <= function.identity.chips or batch % chips:
            raise UsageError(
                f"a minibatch of {batch} on {chips} of {function.identity.chips} chips",
                where="parallel", hint="the minibatch is cut into equal parts, one for each chip",
            )  # fmt: skip
        self.function = function
        self.network = network
        self.chips = range(chips)
        self.share = batch // chips
        self.steps = samples // batch
        self._held = ExitStack()
        self._batch, self._rate, self._decay = batch, rate, decay
        try:
            self._data(np.asarray(x, np.float32), np.asarray(labels, np.int64), parameters)
            self._record(reduction, chunks, compress)
        except BaseException:
            self._held.close()
            raise

    def epoch(self, rows: Array) -> tuple[float, int]:
        """Train on minibatches.

        Args:
            rows: (steps, batch) int64, each row a minibatch's samples; chip c takes the c-th part.

        Returns:
            The mean loss, and the model cycles that it took.

        Raises:
            DeviceFault: a label or row is out of range. CommandRefused: a link is down.
        """
        if rows.shape != (self.steps, self._batch):
            raise UsageError(
                f"rows {rows.shape}, the graph takes {(self.steps, self._batch)}", where="parallel"
            )
        for chip in self.chips:
            part = rows[:, chip * self.share : (chip + 1) * self.share]
            self._rows[chip].copy_(np.ascontiguousarray(part))
            self._counter[chip].copy_(0)
            self._loss[chip].copy_(0)
        launch = self.graph(self.steps)
        losses = [float(loss.item()) for loss in self._loss]
        return sum(losses) / len(losses) / self.steps, launch.cycles

    def parameters(self, chip: int = 0) -> list[Array]:
        """The parameters as a chip has them: ``[w0, b0, ...]``."""
        return [w.numpy() for w in self.weights[chip]]

    def close(self) -> None:
        """Free everything on the device. Safe to call twice."""
        self._held.close()

    # --- inside ----------------------------------------------------------------------------------

    def _keep(self, tensor: Tensor) -> Tensor:
        return self._held.enter_context(tensor)

    def _data(self, x: Array, labels: Array, parameters: Sequence[Array]) -> None:
        """What stays on the device: data, and for each chip its rows, counters and parameters."""
        fn, keep = self.function, self._keep
        self._x, self._labels = keep(fn.tensor(x)), keep(fn.tensor(labels))
        self._one = keep(fn.tensor(np.ones(1, np.int64)))
        self._rows = [keep(fn.empty((self.steps, self.share), "int64")) for _ in self.chips]
        self._counter = [keep(fn.tensor(np.zeros(1, np.int64))) for _ in self.chips]
        self._loss = [keep(fn.tensor(np.zeros((), np.float32))) for _ in self.chips]
        self.weights = [
            [keep(fn.tensor(np.asarray(w, np.float32))) for w in parameters] for _ in self.chips
        ]

    def _record(self, reduction: str, chunks: int, compress: bool) -> None:
        fn, net = self.function, self.network
        with fn.graph(name="train-step") as g:
            self._held.callback(g.close)
            forward = self._forward()
            ahead = []  # of each chip: its layers' inputs, and the gradient of its logits
            for c in self.chips:
                mine = (self._x, self._labels, self._rows[c], self._one, self._counter[c])
                *inputs, gradient = g.run(
                    forward, *mine, self._loss[c], *self.weights[c], chip=c
                )
                ahead.append((inputs, gradient))
                for tensor in (*inputs, gradient):
                    g.own(tensor)
            gradients = [gradient for _, gradient in ahead]
            for i in reversed(range(net.layers)):
                flat = self._backward(g, i, [inputs[i] for inputs, _ in ahead], gradients)
                g.all_reduce(flat, order=reduction, chunks=chunks, compress=compress)
                self._update(g, i, flat)
        self.graph = g

    def _forward(self) -> Program:
        """``x, labels, rows, one, counter, loss, w0, ... -> inputs of each layer, gradient``."""
        net = self.network
        with self.function.program("forward") as p:
            x = p.input(self._x.shape, name="x")
            labels = p.input(self._labels.shape, "int64", name="labels")
            rows = p.input((self.steps, self.share), "int64", name="rows")
            one = p.input((1,), "int64", name="one")
            counter = p.parameter((1,), "int64", name="counter")
            loss = p.parameter((), name="loss")
            weights = [p.input(shape) for shape in net.shapes()]
            picked = p.call("gather_rows", rows, counter)
            picked = p.call("reshape", picked, shape=(self.share,))
            p.call("add", counter, one, out=counter)
            outputs = _forward(p, p.call("gather_rows", x, picked), net, weights)
            wanted = p.call("gather_rows", labels, picked)
            # Of the whole minibatch, so that the sum over chips is the gradient of its mean loss.
            losses, gradient = p.call(
                "softmax_cross_entropy", outputs[-1], wanted, scale=1.0 / self._batch
            )
            p.call("add", loss, p.call("mean_all", losses), out=loss)
            p.output(*outputs[:-1], gradient)
        return p

    def _backward(
        self, g: Graph, i: int, inputs: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Layer ``i`` on every chip; each chip's gradients of its weights and biases in one piece.
        ``gradients`` become those of the layer before.
        """
        net, n = self.network, self.network.sizes[i + 1]
        with self.function.program(f"backward {i}") as p:
            x, gradient = p.input((self.share, net.sizes[i])), p.input((self.share, n))
            w = p.input((net.sizes[i], n)) if i else None
            results = [p.call("matmul_tn", x, gradient), p.call("sum_rows", gradient)]
            if w is not None:
                dx = p.call("matmul_nt", gradient, w)
                results.append(p.call(f"{net.activation}_backward", dx, x))
            p.output(*results)
        found = []
        for c in self.chips:
            flat = g.own(self.function.empty(net.sizes[i] * n + n))
            out = list(self._parts(i, flat))
            if i:
                out.append(g.own(self.function.empty((self.share, net.sizes[i]))))
            g.run(p, inputs[c], gradients[c], *self.weights[c][2 * i : 2 * i + (i > 0)],
                  chip=c, out=out)  # fmt: skip
            gradients[c] = out[-1]
            found.append(flat)
        return found

    def _update(self, g: Graph, i: int, flat: list[Tensor]) -> None:
        """Each chip's own copy of layer ``i``."""
        with self.function.program(f"update {i}") as p:
            w, b = (p.parameter(shape) for shape in self.network.shapes()[2 * i : 2 * i + 2])
            dw, db = (p.input(shape) for shape in self.network.shapes()[2 * i : 2 * i + 2])
            p.call("sgd", w, dw, out=w, rate=self._rate, decay=self._decay)
            p.call("sgd", b, db, out=b, rate=self._rate)
        for c in self.chips:
            g.run(p, *self.weights[c][2 * i : 2 * i + 2], *self._parts(i, flat[c]), chip=c)

    def _parts(self, i: int, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The views of one layer's gradients: of its weights, of its biases."""
        shape = (self.network.sizes[i], self.network.sizes[i + 1])
        return flat[: prod(shape)].reshape(*shape), flat[prod(shape) :]


def train_parallel(
    function: Function,
    network: Sequential,
    x: Array,
    labels: Array,
    *,
    chips: int = 4,
    epochs: int = 10,
    batch: int = 32,
    rate: float = 0.1,
    decay: float = 0.0,
    seed: int = 0,
    parameters: Sequence[Array] | None = None,
    first_epoch: int = 0,
    reduction: str = "rank",
    chunks: int = 4,
    compress: bool = False,
    progress: Callable[[int, float], None] | None = None,
) -> Training:
    """Train on several chips, as :func:`accelvisor.guest.nn.train` does on one.

    A run that ended after epoch n goes on with ``parameters`` from there and ``first_epoch=n``, and
    ends with the bits of one that was never interrupted. Bits depend on ``chips``: sums are made of
    other parts.

    Args:
        x: (samples, inputs), converted to float32.
        labels: (samples,) integers below ``network.sizes[-1]``.
        batch: samples of a minibatch, all chips together: a multiple of ``chips``.
        parameters: to begin with; ``network.initial(seed)`` when None.
        first_epoch: epochs that were done before; ``epochs`` counts from there.
        reduction, chunks, compress: how gradients are summed; see :class:`DataParallel`.
        progress: called after each epoch with its number (from 1) and mean loss.

    Raises:
        UsageError: the arguments do not fit. DeviceFault: e.g. a label out of range.
        CommandRefused: a link between the chips is down.
    """
    start = network.initial(seed) if parameters is None else parameters
    done = Training(network, [])
    with DataParallel(
        function, network, x, labels, start, chips=chips, batch=batch, rate=rate, decay=decay,
        reduction=reduction, chunks=chunks, compress=compress,
    ) as job:  # fmt: skip
        for epoch in range(first_epoch, first_epoch + epochs):
            loss, cycles = job.epoch(order(len(x), batch, epoch, seed))
            done.losses.append(loss)
            done.steps += job.steps
            done.cycles += cycles
            if progress is not None:
                progress(epoch + 1, loss)
        done.parameters = job.parameters()
    return done
