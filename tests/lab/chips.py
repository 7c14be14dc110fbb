"""Trains data-parallel on all chips of a function.

``chips.py TAG BDF`` in a guest: until the epoch in which /root/TAG.go vanishes; what it ended with
is in /root/TAG.json then: a digest of each chip's weights, and what each link carried.
``chips.py EPOCHS SOCKET`` on a host: the same on a function that no VM has; prints it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelvisor.guest import models, nn
from accelvisor.guest.discovery import discover, select
from accelvisor.guest.function import Function
from accelvisor.guest.links import links, switch
from accelvisor.guest.parallel import DataParallel

DATA = Path("/root/digits.npz")
HIDDEN, SAMPLES, BATCH, RATE, SEED = 48, 512, 32, 0.1, 3


def lap(fn: Function, more: Callable[[int], bool]) -> dict[str, Any]:
    """Train while there is ``more`` to do after so many epochs."""
    samples, _ = models.load_data(DATA)
    network = nn.Sequential((samples.x.shape[1], HIDDEN, int(samples.labels.max()) + 1))
    switch(fn, True)
    epochs = 0
    with DataParallel(
        fn, network, samples.x[:SAMPLES], samples.labels[:SAMPLES], network.initial(SEED),
        chips=fn.identity.chips, batch=BATCH, rate=RATE,
    ) as job:  # fmt: skip
        while more(epochs):
            job.epoch(nn.order(SAMPLES, BATCH, epochs, SEED))
            epochs += 1
        digests = [
            hashlib.sha256(b"".join(w.tobytes() for w in job.parameters(chip))).hexdigest()
            for chip in job.chips
        ]
    carried = [[link.transfers, link.bytes] for link in links(fn)]
    return {"epochs": epochs, "digests": digests, "carried": carried}


def in_a_guest(tag: str, bdf: str) -> None:
    go, told = Path(f"/root/{tag}.go"), Path(f"/root/{tag}.epochs")

    def more(epochs: int) -> bool:
        told.write_text(str(epochs))
        return go.exists()

    with Function(discover(select(bdf).bdf), name="chips") as fn:
        found = lap(fn, more)
    new = Path(f"/root/{tag}.new")
    new.write_text(json.dumps(found))
    os.rename(new, f"/root/{tag}.json")


def on_a_host(most: int, path: str) -> None:
    from accelvisor.vfio_user.client import Client
    from accelvisor.vfio_user.transport import ClientTransport

    with Function(ClientTransport(Client(path), ram_bytes=1 << 25), name="chips") as fn:
        print(json.dumps(lap(fn, lambda epochs: epochs < most)))


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        on_a_host(int(sys.argv[1]), sys.argv[2])
    else:
        in_a_guest(sys.argv[1], sys.argv[2])
