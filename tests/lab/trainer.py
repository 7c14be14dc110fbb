"""Runs in a guest: trains a network in laps, and keeps every loss of every step.

``trainer.py TAG [BDF]``. What it says of itself is in /root/TAG.json after each epoch. A lap begins
with the first weights when /root/TAG.go appears, and ends after the epoch in which it vanishes: its
losses and weights are in /root/TAG.npz then. Somebody else reads the identity register all the
lap: a process of its own, or a thread where vfio gives the device to one process only. Interrupts
are trusted for a minute: a lost one is a gap that nobody overlooks.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accelvisor.abi.registers import MAGIC, Reg
from accelvisor.guest import models, nn
from accelvisor.guest.discovery import choose, discover, select
from accelvisor.guest.function import Function
from accelvisor.guest.waiting import WaitPolicy

DATA = Path("/root/digits.npz")
HIDDEN, BATCH, RATE, SEED = 64, 32, 0.15, 0
#: More than what fits into the window: it goes by DMA, out of and into the guest's memory.
BULK = 1 << 18
PATIENCE_S = 60.0


class Looker:
    """Reads a register that always has the same value; each read leaves the VM."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 24)
        # Reads, bad ones, and whether there is a lap: nobody else's VM waits for an idle one.
        self.counts = np.frombuffer(self._shared, np.int64)

    def look(self, read: Callable[[int], int]) -> None:
        while True:
            if not self.counts[2]:
                time.sleep(0.05)
                continue
            self.counts[1] += read(Reg.MAGIC) != MAGIC
            self.counts[0] += 1
            time.sleep(0.003)

    def fork(self, bdf: str) -> None:
        if os.fork() == 0:
            self.look(discover(bdf).read32)

    def thread(self, read: Callable[[int], int]) -> None:
        threading.Thread(target=self.look, args=(read,), daemon=True).start()


class Trainer:
    """``said`` is what the host may read of it."""

    def __init__(self, tag: str, bdf: str | None) -> None:
        self.path = Path(f"/root/{tag}.json")
        self.go = Path(f"/root/{tag}.go")
        self.result = Path(f"/root/{tag}.npz")
        self.said: dict[str, Any] = {"laps": 0, "steps": 0}
        self.looker = Looker()
        device = select(bdf)
        alone = choose(device, None, os.environ) == "vfio"
        if not alone:
            self.looker.fork(device.bdf)
        policy = WaitPolicy(spin_s=0.0, interrupt_s=PATIENCE_S)
        self.function = Function(discover(device.bdf), name="trainer", policy=policy)
        if alone:
            self.looker.thread(self.function.transport.read32)

    def run(self) -> None:
        samples, _ = models.load_data(DATA)
        network = nn.Sequential((samples.x.shape[1], HIDDEN, int(samples.labels.max()) + 1))
        count = len(samples.x)
        make = self.function.tensor
        step = nn.training_step(self.function, network, BATCH, count, RATE)
        data, wanted = make(samples.x), make(samples.labels)
        weights = [make(w) for w in network.initial(SEED)]
        rows = self.function.empty((count // BATCH, BATCH), "int64")
        losses = self.function.empty((count // BATCH,))
        runs = [
            step.bind(data, wanted, rows[i], *weights, out=losses[i]) for i in range(count // BATCH)
        ]
        self.bulk = make(np.zeros(BULK, np.int32))
        while True:
            while not self.go.exists():
                time.sleep(0.05)
            self.looker.counts[2] = 1
            for weight, first in zip(weights, network.initial(SEED), strict=True):
                weight.copy_(first)
            found = self.lap(rows, losses, runs, count)
            self.looker.counts[2] = 0
            named = {f"p{i}": w.numpy() for i, w in enumerate(weights)}
            np.savez(self.result, losses=found, **named)
            self.said["laps"] += 1
            self.said["last"] = {k: v for k, v in self.said.items() if k != "last"}
            self.tell()

    def lap(self, rows: Any, losses: Any, runs: list[Any], count: int) -> Any:
        """Train until told to end; all losses in order."""
        self.said.update(epochs=0, launches=0, torn=0, gap_s=0.0)
        every = []
        last = time.monotonic()
        while not every or self.go.exists():
            rows.copy_(nn.order(count, BATCH, self.said["epochs"], SEED))
            for run in runs:
                run.launch().result()
                now = time.monotonic()
                self.said["launches"] += 1
                self.said["steps"] += 1
                self.said["gap_s"] = max(self.said["gap_s"], now - last)
                last = now
            every.append(losses.numpy().copy())
            sent = np.arange(BULK, dtype=np.int32) * self.said["epochs"]
            self.bulk.copy_(sent)
            self.said["torn"] += not np.array_equal(self.bulk.numpy(), sent)
            self.said["epochs"] += 1
            self.tell()
        return np.concatenate(every)

    def tell(self) -> None:
        self.said["reads"], self.said["bad"] = self.looker.counts[:2].tolist()
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.said))
        os.rename(new, self.path)


if __name__ == "__main__":
    Trainer(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None).run()
