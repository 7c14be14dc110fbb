"""What one rank does in tests/collectives/test_mpi.py: ``mpi_ranks SCENARIO DIRECTORY``."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from accelvisor.collectives.communicator import Options
from accelvisor.collectives.kinds import BY_NAME
from accelvisor.collectives.mpi import MpiCommunicator
from accelvisor.errors import AccelvisorError

from .cases import smooth


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def reductions(c: MpiCommunicator) -> dict[str, Any]:
    """Digests of everything, in all ways; tests compare them with the simulation's."""
    found: dict[str, Any] = {}
    for name in ("float32", "float64", "float16", "bfloat16", "int32"):
        kind = BY_NAME[name]
        # Large enough that MPI does not buffer it.
        x = smooth(kind, 100_003, "sparse", c.rank)
        dtype = "bfloat16" if name == "bfloat16" else None
        for compress in ("never", "always", "auto"):
            for order in ("ring", "rank"):
                out = c.all_reduce(x, dtype=dtype, compress=compress, order=order)
                found.setdefault(f"{name}/{order}", []).append(digest(out))
    x = smooth(BY_NAME["float32"], 1000, "half", c.rank)
    found["broadcast"] = [digest(c.broadcast(x, root=c.size - 1))]
    found["all_gather"] = [digest(c.all_gather(x))]
    part = c.reduce_scatter(x)
    found["part"] = [part.block, digest(part.values)]
    root = c.reduce(x, root=1, op="absmax")
    found["reduce"] = [None if root is None else digest(root)]
    if c.size == 4:
        found["grid"] = [digest(c.all_reduce_2d(x, 2, 2))]
    c.close()
    return found


def mismatch(c: MpiCommunicator) -> dict[str, Any]:
    c.all_reduce(np.zeros((10, 2 + (c.rank == 1)), np.float32))
    return {}


def other_root(c: MpiCommunicator) -> dict[str, Any]:
    c.broadcast(np.zeros(10, np.float32), root=int(c.rank == 2))
    return {}


def absent(c: MpiCommunicator) -> dict[str, Any]:
    """Rank 2 is content after one collective, and leaves."""
    c.all_reduce(np.ones(100_000, np.float32))
    if c.rank != 2:
        c.all_reduce(np.ones(100_000, np.float32))
    return {}


def hangs(c: MpiCommunicator) -> dict[str, Any]:
    """Rank 1 never comes back; mpirun has to end it."""
    c.all_reduce(np.ones(10, np.float32))
    if c.rank == 1:
        signal.pause()
    c.all_reduce(np.ones(1_000_000, np.float32))
    return {}


def aborts(c: MpiCommunicator) -> dict[str, Any]:
    if c.rank == 1:
        signal.pause()
    try:
        c.all_reduce(np.ones(10, np.float32))
    except AccelvisorError:
        c.abort(7)
    return {}


def main() -> None:
    scenario, directory = sys.argv[1], Path(sys.argv[2])
    # Long for what should come, short for what must not.
    deadline = 60.0 if scenario in ("reductions", "mismatch", "other_root") else 1.5
    c = MpiCommunicator(None, Options(deadline_s=deadline))
    try:
        result = globals()[scenario](c)
    except AccelvisorError as e:
        result = e.to_dict()
    (directory / f"{c.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
