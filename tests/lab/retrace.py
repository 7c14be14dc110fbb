"""Runs on a host: what tests/lab/trainer.py must have computed, without a device.

``retrace.py DATA EPOCHS RESULT`` prints whether every loss and every weight in RESULT has the bits
of the reference, and how many losses were compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

import numpy as np
from trainer import BATCH, HIDDEN, RATE, SEED

from accelvisor.abi.programs import decode
from accelvisor.embedded.reference import Offline
from accelvisor.guest import models, nn
from accelvisor.guest.function import Function
from accelvisor.kernels import interpreter


def main(data: str, epochs: int, result: str) -> None:
    samples, _ = models.load_data(Path(data))
    network = nn.Sequential((samples.x.shape[1], HIDDEN, int(samples.labels.max()) + 1))
    count = len(samples.x)
    step = nn.training_step(cast("Function", Offline()), network, BATCH, count, RATE)
    program = decode(step.data)
    weights = network.initial(SEED)
    losses = []
    for epoch in range(epochs):
        for rows in nn.order(count, BATCH, epoch, SEED):
            loss = np.empty((), np.float32)
            interpreter.execute(program, [samples.x, samples.labels, rows, *weights, loss])
            losses.append(loss)
    found = np.load(result)
    wanted = np.array(losses, np.float32)
    same = {
        "losses": found["losses"].tobytes() == wanted.tobytes(),
        "weights": all(found[f"p{i}"].tobytes() == w.tobytes() for i, w in enumerate(weights)),
        "compared": len(wanted),
    }
    print(json.dumps(same))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
