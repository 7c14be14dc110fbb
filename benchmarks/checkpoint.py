"""Group ``migration``, checkpoints at rest: how long a function stands still for one, and how long
it takes from a file to a function that computes.

**Restore.** What cannot be avoided is the verification: its time is measured in the same run, in
turn with the restore and over the same file, as reading it and hashing each chunk into the tree.
The rest (placing the bytes, loading, reading the device back, the audit trail, what is kept so that
the old state can come back) has 100 ms. The file is in the page cache both times. It ends when the
function computes; that its old memory is given back then holds nobody up.

**Standing still.** A function computes on all its tensors, with 5 % of its memory written all the
time; a checkpoint that copies everything while it stands still is what it is compared with.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import numpy as np

from accelvisor.daemon.moving.capture import Taker
from accelvisor.daemon.store import Function
from accelvisor.frames.container import Readable, verify
from accelvisor.frames.verify import Expected
from accelvisor.limits import MIB
from benchmarks.record import Goal, Record, Sample, compare
from tests.daemon.moving.resting import Host, Vm, function, host
from tests.function.harness import Guest, Process

GROUP = "migration"
#: What a restore may take beside its verification (ms).
BESIDE_MS = 100.0
_PIECE = 4 * MIB


def run(quick: bool) -> Iterator[Record]:
    repeats = 5 if quick else 15
    yield from restores(64 * MIB, repeats)
    yield from stands(256 * MIB, repeats)


@contextmanager
def setting(state: int) -> Iterator[tuple[Host, Process, Function, Vm]]:
    """A host with one function, ``state`` bytes of whose memory hold random tensors."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        here = stack.enter_context(host(root / "h"))
        process, found = stack.enter_context(function(here, memory_bytes=2 * state))
        guest = stack.enter_context(Guest(process, ram_bytes=64 * MIB))
        vm = Vm(guest)
        dice = np.random.default_rng(1)
        for _ in range(state // _PIECE):
            vm.ring.tensor(np.frombuffer(dice.bytes(_PIECE), np.uint8))
        yield here, process, found, vm


class _Nowhere:
    def write(self, header: object, payload: object) -> None:
        pass


def restores(state: int, repeats: int) -> Iterator[Record]:
    """From a file to a function that computes."""
    totals, verified = [], []
    with setting(state) as (here, _, found, _vm):
        entry = asyncio.run(here.points.create(found.uuid))
        for _ in range(repeats + 1):
            began = time.perf_counter()
            with here.shelf.open(entry.name) as file:
                verifier = here.points.library.verifier(Expected(function=found.uuid))
                verify(cast(Readable, file), verifier, _Nowhere())
            between = time.perf_counter()
            ready = _ready_at(here)
            asyncio.run(here.points.restore(entry.name))
            verified.append((between - began) * 1e3)
            totals.append((ready[0] - between) * 1e3)
    totals, verified = totals[1:], verified[1:]
    beside = Sample(tuple(t - v for t, v in zip(totals, verified, strict=True)))
    name = f"{state // MIB} MiB checkpoint to ready function"
    yield compare(
        GROUP, name, Sample(tuple(totals)), "ms", threads=1,
        against=("verification of the same file", Sample(tuple(verified))),
    )  # fmt: skip
    yield compare(
        GROUP, f"{name}, beside its verification", beside, "ms", threads=1,
        goal=Goal(at_most=BESIDE_MS),
    )  # fmt: skip


def _ready_at(here: Host) -> list[float]:
    """When the function that is restored next begins to compute."""
    found: list[float] = []

    def step(name: str) -> None:
        if name == "restore:going":
            found.append(time.perf_counter())

    here.on_step = step
    return found


def stands(state: int, repeats: int) -> Iterator[Record]:
    """How long a function stands still that writes 5 % of its memory all the time."""
    tracked, copied, sizes = [], [], []
    with setting(state) as (here, _, found, vm):
        some = [vm.ring.tensor(np.zeros(_PIECE, np.uint8)) for _ in range(state // 20 // _PIECE)]
        stop = threading.Event()
        busy = threading.Thread(target=_write, args=(vm, some, stop))
        busy.start()
        try:
            for turn in range(repeats):
                tracked.append(_stood(here, found, f"a{turn}"))
                sizes.append(here.shelf.list()[-1].size)
                copied.append(_stop_and_copy(here, found))
                here.shelf.delete(here.shelf.list()[-1].name)
        finally:
            stop.set()
            busy.join()
    yield compare(
        GROUP, f"function stands still for a checkpoint of {state // MIB} MiB, 5 % written",
        Sample(tuple(tracked)), "ms", threads=1,
        against=("copying all of it while it stands still", Sample(tuple(copied))),
        note=f"the file has {np.median(sizes) / MIB:.0f} MiB",
    )  # fmt: skip


def _write(vm: Vm, tensors: list[int], stop: threading.Event) -> None:
    turn = 0
    while not stop.is_set():
        turn += 1
        for handle in tensors:
            vm.ring.write(handle, np.full(_PIECE, turn % 251, np.uint8))


def _stood(here: Host, found: Function, label: str) -> float:
    asyncio.run(here.points.create(found.uuid, label=label))
    words = here.events[-1][2]
    return float(words.rsplit("still ", 1)[1].removesuffix(" ms"))


def _stop_and_copy(here: Host, found: Function) -> float:
    taker = Taker(found, here.functions.world.function(found.uuid), 1)
    taker.begin()
    began = time.perf_counter()
    taker.link.freeze()
    taker.stopped(whole=True, extents=False)
    taker.link.thaw()
    took = time.perf_counter() - began
    taker.drop()
    return took * 1e3
