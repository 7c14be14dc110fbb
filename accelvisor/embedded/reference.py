"""What a device must give, computed on the host without a device.

The guest library builds the same program from the same instruction table, and the interpreter of
``accelvisor.kernels`` runs it. ``python3 -m accelvisor.embedded.reference run|train FILE`` prints
the digests that ``accelguest run|train FILE --json`` must print too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from accelvisor.abi.programs import decode
from accelvisor.errors import AccelvisorError
from accelvisor.guest import models, nn
from accelvisor.guest.instructions import instructions_from
from accelvisor.guest.program import Program
from accelvisor.kernels import interpreter, registry

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

Array = npt.NDArray[Any]
Twin = Literal["fast", "reference"]


class Offline:
    """As much of a :class:`~accelvisor.guest.function.Function` as building a program needs."""

    def __init__(self) -> None:
        self.instructions = instructions_from(registry.describe())

    def program(self, name: str = "program") -> Program:
        """A program that is built and never uploaded."""
        return Program(cast("Function", self), name)

    def load(self, data: bytes) -> int:
        """Nothing to upload to."""
        return 0


def logits(model: models.Model, *, twin: Twin = "fast") -> Array:
    """The network's outputs for its test set, (samples, classes) float32."""
    program = nn.inference(cast("Function", Offline()), model.network, len(model.test.x), "logits")
    out = np.empty((len(model.test.x), model.network.sizes[-1]), np.float32)
    interpreter.execute(decode(program.data), [model.test.x, *model.parameters, out], twin=twin)
    return out


def train(
    samples: models.Samples,
    network: nn.Sequential,
    *,
    epochs: int,
    batch: int,
    rate: float,
    seed: int,
    twin: Twin = "fast",
) -> tuple[list[Array], list[float]]:
    """Weights and the mean loss of each epoch after training as ``nn.train`` does."""
    count = len(samples.x)
    step = nn.training_step(cast("Function", Offline()), network, batch, count, rate)
    program = decode(step.data)
    weights = network.initial(seed)
    losses = []
    for epoch in range(epochs):
        rows = nn.order(count, batch, epoch, seed)
        loss = np.empty(len(rows), np.float32)
        for i, chosen in enumerate(rows):
            one = np.empty((), np.float32)
            interpreter.execute(
                program, [samples.x, samples.labels, chosen, *weights, one], twin=twin
            )
            loss[i] = one
        losses.append(float(loss.mean(dtype=np.float64)))
    return weights, losses


def run_figures(path: Path) -> dict[str, Any]:
    """The figures of ``accelguest run`` that must be equal, and the plain twin's distance."""
    model = models.load_model(path)
    fast, plain = logits(model), logits(model, twin="reference")
    return {
        "logits_sha256": hashlib.sha256(fast.tobytes()).hexdigest(),
        "correct": int((fast.argmax(axis=1) == model.test.labels).sum()),
        "same_classes_as_plain_twin": bool((fast.argmax(1) == plain.argmax(1)).all()),
        "largest_difference_to_plain_twin": float(np.abs(fast - plain).max(initial=0)),
    }


def train_figures(
    path: Path, hidden: tuple[int, ...], epochs: int, batch: int, rate: float, seed: int
) -> dict[str, Any]:
    """The figures of ``accelguest train`` that must be equal."""
    samples, test = models.load_data(path)
    classes = int(max(samples.labels.max(), test.labels.max())) + 1
    network = nn.Sequential((samples.x.shape[1], *hidden, classes))
    weights, losses = train(samples, network, epochs=epochs, batch=batch, rate=rate, seed=seed)
    return {"weights_sha256": models.digest(weights), "losses": losses}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 printed, 1 the file is no good."""
    parser = argparse.ArgumentParser(
        prog="python3 -m accelvisor.embedded.reference", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="a network file")
    run.add_argument("file", type=Path)
    train_ = commands.add_parser("train", help="a data file")
    train_.add_argument("file", type=Path)
    train_.add_argument("--hidden", type=int, nargs="*", default=[64])
    train_.add_argument("--epochs", type=int, default=10)
    train_.add_argument("--batch", type=int, default=32)
    train_.add_argument("--rate", type=float, default=0.15)
    train_.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        if options.command == "run":
            figures = run_figures(options.file)
        else:
            figures = train_figures(
                options.file, tuple(options.hidden), options.epochs, options.batch,
                options.rate, options.seed,
            )  # fmt: skip
    except AccelvisorError as error:
        print(f"{error.message} [{error.code}]", file=sys.stderr)
        return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
