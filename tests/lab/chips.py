"""Runs in a guest: trains data-parallel on all chips of a function, once while it is moved and then
once more, as often, while it stays.

``chips.py TAG [BDF]``. The first lap ends after the epoch in which /root/TAG.go vanishes; what both
laps ended with is in /root/TAG.json then: a digest of each chip's weights, and what each link
carried in each lap.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from accelvisor.guest import models, nn
from accelvisor.guest.discovery import discover, select
from accelvisor.guest.function import Function
from accelvisor.guest.links import links, switch
from accelvisor.guest.parallel import DataParallel

DATA = Path("/root/digits.npz")
HIDDEN, BATCH, RATE, SEED = 48, 32, 0.1, 3


def carried(fn: Function) -> list[list[int]]:
    return [[link.transfers, link.bytes] for link in links(fn)]


def lap(fn: Function, most: int, go: Path, told: Path) -> dict[str, Any]:
    """Train for ``most`` epochs, or while there is ``go``."""
    samples, _ = models.load_data(DATA)
    network = nn.Sequential((samples.x.shape[1], HIDDEN, int(samples.labels.max()) + 1))
    before, epochs = carried(fn), 0
    with DataParallel(
        fn, network, samples.x, samples.labels, network.initial(SEED),
        chips=fn.identity.chips, batch=BATCH, rate=RATE,
    ) as job:  # fmt: skip
        while epochs < most and (most < 1 << 30 or epochs < 1 or go.exists()):
            job.epoch(nn.order(len(samples.x), BATCH, epochs, SEED))
            epochs += 1
            told.write_text(str(epochs))
        digests = [
            hashlib.sha256(b"".join(w.tobytes() for w in job.parameters(chip))).hexdigest()
            for chip in job.chips
        ]
    after = carried(fn)
    lately = [
        [two - one for one, two in zip(*pair, strict=True)]
        for pair in zip(before, after, strict=True)
    ]
    return {"epochs": epochs, "digests": digests, "carried": lately}


def main(tag: str, bdf: str | None) -> None:
    go, told = Path(f"/root/{tag}.go"), Path(f"/root/{tag}.epochs")
    with Function(discover(select(bdf).bdf), name="chips") as fn:
        switch(fn, True)
        moved = lap(fn, 1 << 30, go, told)
        stayed = lap(fn, moved["epochs"], go, told)
    found = {"chips": len(moved["digests"]), "moved": moved, "stayed": stayed}
    new = Path(f"/root/{tag}.new")
    new.write_text(json.dumps(found))
    os.rename(new, f"/root/{tag}.json")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
