"""Group ``fabric``: the zero-compressed ring against the dense one and against Open MPI's own.

Ranks are processes that mpirun starts on this machine, over TCP on loopback: as fast as it is, and
(as root, in a network namespace of their own) shaped to 10 Gbit/s, which all ranks share. Zeros are
either in other places on each rank, so that sums fill up, or in the same places on all, as dead
inputs and frozen rows give them. Bytes are compared with the formula before anything is timed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from accelvisor.collectives import fast, zvc
from accelvisor.collectives.communicator import Options, begin
from accelvisor.collectives.kinds import BY_NAME, Array
from accelvisor.collectives.local import Simulation
from accelvisor.collectives.messages import HEADER_BYTES, Collective
from accelvisor.collectives.tuning import TRIALS
from accelvisor.limits import MIB
from benchmarks.record import Goal, Record, Sample, compare

GROUP = "fabric"
ROOT = Path(__file__).parents[1]
F32 = BY_NAME["float32"]
ELEMENTS = MIB  # 4 MiB of float32 on each rank
CASES = ((0, "same"), (50, "own"), (90, "own"), (90, "same"), (99, "own"), (99, "same"))
_PLACES = {"same": "the same zeros on all ranks", "own": "zeros of each rank's own"}
_SHAPE = (
    "ip link set lo up && "
    "tc qdisc add dev lo root tbf rate 10gbit burst 1mb latency 50ms && exec \"$@\""
)


def run(quick: bool) -> Iterator[Record]:
    repeats = 3 if quick else 9
    yield from packing(repeats)
    yield from gradients(8)
    for ranks in (4,) if quick else (2, 4):
        yield from rings(ranks, repeats, shaped=False)
        if _can_shape():
            yield from rings(ranks, repeats, shaped=True)


# --- one core ------------------------------------------------------------------------------------


def packing(repeats: int) -> Iterator[Record]:
    """GB/s of float32 that one core packs and unpacks again, at 90 % zeros."""
    x = made(0, 90, "own")
    room, out = np.empty(zvc.room(x.size, F32.width), np.uint8), np.empty_like(x)

    def once() -> float:
        began = time.perf_counter()
        packed = zvc.open_packed(zvc.pack(x, F32, room))
        zvc.unpack(packed, out)
        return x.nbytes / (time.perf_counter() - began) / 1e9

    for engine, goal in (("numba", Goal(at_least=1.5)), ("numpy", None)):
        fast.cool()
        if engine == "numba" and not fast.warm((4,)):
            continue
        once()
        yield compare(
            GROUP, f"pack and unpack at 90 % zeros, {engine}",
            Sample(tuple(once() for _ in range(3 * repeats))), "GB/s", threads=1, goal=goal,
            note="checksums of both sides included",
        )  # fmt: skip
    fast.cool()


# --- real gradients ------------------------------------------------------------------------------


def gradients(ranks: int) -> Iterator[Record]:
    """All gradients of the digit network, one batch cut into ``ranks``: what there is to gain."""
    inputs = digit_gradients(ranks)
    started = [
        begin(Collective.ALL_REDUCE, x, r, ranks, Options(compress="always"))
        for r, x in enumerate(inputs)
    ]
    Simulation([steps for _, steps in started]).run()
    stats = [hops.stats for hops, _ in started]
    dense, sent = sum(s.dense_bytes for s in stats), sum(s.sent_bytes for s in stats)
    steps = sorted(stats[0].densities)
    by_step = [np.mean([d for s in stats for d in s.densities[step]]) for step in steps]
    yield compare(
        GROUP, f"gradients of the digit network, {ranks} ranks: dense bytes by packed",
        Sample((dense / sent,)), "x", threads=1,
        note="density by step: " + " ".join(f"{d:.3f}" for d in by_step),
    )  # fmt: skip


def digit_gradients(ranks: int) -> list[Array]:
    """Of each rank: the gradient of fixtures/digits/mlp.npz on its 32 training images, flat."""
    with np.load(ROOT / "fixtures/digits/mlp.npz") as model:
        w0, b0, w1, b1 = (model[name].astype(np.float64) for name in ("w0", "b0", "w1", "b1"))
    with np.load(ROOT / "fixtures/digits/digits.npz") as data:
        images, labels = data["x_train"] * float(data["scale"]), data["y_train"]
    found = []
    for rank in range(ranks):
        part = slice(32 * rank, 32 * (rank + 1))
        x, y = images[part], labels[part]
        h = np.maximum(x @ w0 + b0, 0)
        logits = h @ w1 + b1
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        d = p / len(y)
        dh = (d @ w1.T) * (h > 0)
        flat = [g.reshape(-1) for g in (x.T @ dh, dh.sum(axis=0), h.T @ d, d.sum(axis=0))]
        found.append(np.concatenate(flat).astype(np.float32))
    return found


# --- rings ---------------------------------------------------------------------------------------


def made(rank: int, zeros: int, places: str) -> Array:
    """4 MiB of float32, of which ``zeros`` per cent are zero."""
    numbers = np.random.default_rng(rank).standard_normal(ELEMENTS).astype(np.float32)
    where = np.random.default_rng(1000 + (rank if places == "own" else 0))
    numbers[where.random(ELEMENTS) < zeros / 100] = 0
    return numbers


def formula(inputs: list[Array], chunk: int) -> int:
    """Bytes of a packed all-reduce: each partial sum travels once, each finished N - 1 times."""
    ranks, total = len(inputs), 0
    length = -(-ELEMENTS // ranks)
    for block in range(ranks):
        for start in range(block * length, min((block + 1) * length, ELEMENTS), chunk):
            at = slice(start, min(start + chunk, (block + 1) * length, ELEMENTS))
            partial = inputs[block][at].copy()
            for i in range(1, ranks + 1):
                nnz = int(np.count_nonzero(partial))
                message = HEADER_BYTES + zvc.packed_bytes(partial.size, nnz, F32.width)
                total += message * (1 if i < ranks else ranks - 1)
                partial += inputs[(block + i) % ranks][at] if i < ranks else 0
    return total


def rings(ranks: int, repeats: int, shaped: bool) -> Iterator[Record]:
    """Bytes and wall time of an all-reduce of 4 MiB on each of ``ranks``."""
    link = "10 Gbit/s" if shaped else "loopback"
    for case in _mpirun(ranks, repeats, shaped):
        zeros, places = case["zeros"], case["places"]
        name = f"{zeros} % zeros, {ranks} ranks" + (f", {places}" if zeros else "")
        ratio = case["dense_bytes"] / case["packed_bytes"]
        if not shaped:
            # Of zeros in other places no ring of four can keep so much: 1 - 0.9**4 are not zero.
            goal = Goal(at_least=4) if (zeros, places) == (90, "same") else None
            yield compare(
                GROUP, f"all-reduce bytes, dense by packed: {name}", Sample((ratio,)), "x",
                threads=1, goal=goal, note=f"{_PLACES[places]}; as the formula says, to the byte",
            )  # fmt: skip
        helps = zeros >= 90
        goal = None
        if not helps:
            goal = Goal(at_most=1.05)
        elif shaped and places == "same":
            goal = Goal(at_most=1.0)
        yield compare(
            GROUP, f"all-reduce over {link}: {name}", Sample(tuple(case["auto"])), "ms",
            threads=ranks, against=("dense ring", Sample(tuple(case["never"]))), goal=goal,
            note=f"Open MPI's Allreduce {np.median(case['mpi']):.1f} ms, "
            f"always packed {np.median(case['always']):.1f} ms",
        )  # fmt: skip


def _can_shape() -> bool:
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("unshare", "ip", "tc"))


def _mpirun(ranks: int, repeats: int, shaped: bool) -> list[dict[str, Any]]:
    command = [
        "mpirun", "--oversubscribe", "--mca", "btl", "self,tcp",
        "--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo",
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += ["-n", str(ranks), sys.executable, "-m", "benchmarks.collectives", str(repeats)]
    if shaped:
        command = ["unshare", "-n", "sh", "-c", _SHAPE, "sh", *command]
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **one}, stdout=subprocess.PIPE, text=True, check=True
    )
    cases: list[dict[str, Any]] = json.loads(done.stdout)
    return cases


def _rank(repeats: int) -> None:
    """What each rank of :func:`_mpirun` does; the first prints."""
    from accelvisor.collectives.mpi import MpiCommunicator

    mine = MpiCommunicator(None, Options(deadline_s=120), accelerate=True)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    cases = []
    for zeros, places in CASES:
        x = made(mine.rank, zeros, places)
        out = np.empty_like(x)
        ways: dict[str, Callable[[], Any]] = {
            way: lambda x=x, way=way: mine.all_reduce(x, compress=way)
            for way in ("never", "auto", "always")
        }
        ways["mpi"] = lambda x=x, out=out: world.Allreduce(x, out)
        case: dict[str, Any] = {"zeros": zeros, "places": places}
        for way, call in ways.items():
            for _ in range(2 * TRIALS + 1 if way == "auto" else 1):  # until it knows what pays
                result = call()
            if way == "never":
                wanted = result.tobytes()
            elif way != "mpi" and result.tobytes() != wanted:
                raise RuntimeError(f"{way} has other bits than the dense ring")
            if way == "always":
                sent = world.allreduce(mine.stats.sent_bytes)
                case["packed_bytes"] = sent
                case["dense_bytes"] = world.allreduce(mine.stats.dense_bytes)
        if mine.rank == 0:
            inputs = [made(r, zeros, places) for r in range(mine.size)]
            if formula(inputs, mine.options.chunk_bytes // F32.width) != case["packed_bytes"]:
                raise RuntimeError("the bytes that were sent are not the formula's")
        for way in ways:
            case[way] = []
        for _ in range(repeats):
            for way, call in ways.items():
                world.Barrier()
                began = time.perf_counter()
                call()
                world.Barrier()
                case[way].append(1000 * (time.perf_counter() - began))
        cases.append(case)
    if mine.rank == 0:
        print(json.dumps(cases))


if __name__ == "__main__":
    _rank(int(sys.argv[1]))
