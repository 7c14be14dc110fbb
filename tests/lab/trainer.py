"""Runs in a guest: trains a network until it is told to end, and keeps every loss of every step.

``trainer.py TAG [BDF]``. What it says of itself is in /root/TAG.json after each epoch; it ends with
the epoch in which /root/TAG.stop appears, its losses and weights in /root/TAG.npz. A thread
reads the identity register meanwhile. Interrupts are trusted for a minute: a lost one is a gap that
nobody overlooks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from accelvisor.abi.registers import MAGIC, Reg
from accelvisor.guest import models, nn
from accelvisor.guest.discovery import discover
from accelvisor.guest.function import Function
from accelvisor.guest.waiting import WaitPolicy

DATA = Path("/root/digits.npz")
HIDDEN, BATCH, RATE, SEED = 64, 32, 0.15, 0
PATIENCE_S = 60.0


class Trainer:
    """One training. ``said`` is what the host may read of it."""

    def __init__(self, tag: str, bdf: str | None) -> None:
        self.path = Path(f"/root/{tag}.json")
        self.stop = Path(f"/root/{tag}.stop")
        self.result = Path(f"/root/{tag}.npz")
        self.function = Function(
            discover(bdf), name="trainer", policy=WaitPolicy(spin_s=0.0, interrupt_s=PATIENCE_S)
        )
        self.said: dict[str, Any] = {"epochs": 0, "launches": 0, "reads": 0, "bad": 0, "gap_s": 0.0}
        self.last = time.monotonic()

    def run(self) -> None:
        threading.Thread(target=self.look, daemon=True).start()
        samples, _ = models.load_data(DATA)
        network = nn.Sequential((samples.x.shape[1], HIDDEN, int(samples.labels.max()) + 1))
        count = len(samples.x)
        with ExitStack() as held:
            make = self.function.tensor
            step = nn.training_step(self.function, network, BATCH, count, RATE)
            data, wanted = make(samples.x), make(samples.labels)
            weights = [make(w) for w in network.initial(SEED)]
            rows = self.function.empty((count // BATCH, BATCH), "int64")
            losses = self.function.empty((count // BATCH,))
            runs = [
                held.enter_context(step.bind(data, wanted, rows[i], *weights, out=losses[i]))
                for i in range(count // BATCH)
            ]
            every = []
            self.last = time.monotonic()
            while not self.stop.exists():
                rows.copy_(nn.order(count, BATCH, self.said["epochs"], SEED))
                for one in runs:
                    one.launch().result()
                    self.completed()
                every.append(losses.numpy().copy())
                self.said["epochs"] += 1
                self.tell()
            np.savez(
                self.result,
                losses=np.concatenate(every),
                **{f"p{i}": w.numpy() for i, w in enumerate(weights)},
            )
        self.said["done"] = True
        self.tell()
        self.function.close()

    def completed(self) -> None:
        now = time.monotonic()
        self.said["launches"] += 1
        self.said["gap_s"] = max(self.said["gap_s"], now - self.last)
        self.last = now

    def tell(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.said))
        os.rename(new, self.path)

    def look(self) -> None:
        """Each read leaves the VM and is answered by the function: zeros or ones are no answer."""
        read = self.function.transport.read32
        while True:
            self.said["bad"] += read(Reg.MAGIC) != MAGIC
            self.said["reads"] += 1
            time.sleep(0.003)


if __name__ == "__main__":
    Trainer(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None).run()
