"""Group ``fabric``: all-reduce by rows and columns against one ring, on the model clock.

``python -m benchmarks.fabric_model [--json FILE] [--quick]``. Both go over the same links and send
the same bytes from each chip, so what differs is the number of steps; that counts for small
messages, and where a ring that winds over the cables of several boards waits for each of them.
Cycles of the model clock are exact, so there is no spread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from accelvisor.errors import UnavailableError
from accelvisor.fabric.former import Ring, Torus, form, form_ring
from accelvisor.fabric.grid import CCIX, Grid, LinkKind
from accelvisor.fabric.timing import Timing, ring_all_reduce, torus_all_reduce
from benchmarks.record import Goal, Record, Sample, compare, table

GROUP = "fabric"
KIB = 1024
GRIDS = (Grid(1, 2, 2), Grid(1, 4, 4), Grid(2, 2, 4), Grid(2, 4, 8))
SIZES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
#: 1 KiB on 4 x 4 chips; nowhere else is there a goal but not to lose.
GOALS = {(Grid(1, 4, 4), KIB): 2.2}


def run(quick: bool) -> Iterator[Record]:
    for grid in GRIDS:
        for nbytes in SIZES[::5] if quick else SIZES:
            yield _gain(grid, nbytes)
    yield _bound(Grid(1, 4, 4), 1024 * KIB)
    yield _ccix(Grid(1, 4, 4), 1024 * KIB)
    yield _forming(3 if quick else 9)


def shapes(grid: Grid) -> tuple[Ring, Torus]:
    """All chips of a grid as one ring, and as rows and columns."""
    chips, links = range(grid.chips), range(len(grid.links))
    ring, torus = form_ring(grid, chips, links), form(grid, chips, links)
    if not isinstance(ring, Ring) or not isinstance(torus, Torus):
        raise UnavailableError(f"no ring and torus of {grid}", where="benchmarks")
    return ring, torus


def _gain(grid: Grid, nbytes: int) -> Record:
    ring, torus = shapes(grid)
    one, two = ring_all_reduce(grid, ring, nbytes), torus_all_reduce(grid, torus, nbytes)
    return Record(
        GROUP, f"all-reduce of {nbytes // KIB} KiB on {_name(grid)}: gain of rows and columns",
        one.cycles / two.cycles, "x", 1, 0.0,
        against="fewer steps", against_value=one.steps / two.steps,
        goal=Goal(at_least=GOALS.get((grid, nbytes), 1.0)),
        note=f"{two.cycles} cycles in {two.steps} steps against {one.cycles} in {one.steps}",
    )  # fmt: skip


def _bound(grid: Grid, nbytes: int) -> Record:
    took = torus_all_reduce(grid, shapes(grid)[1], nbytes)
    return _against_floor(f"all-reduce of {nbytes // KIB} KiB on {_name(grid)}", took, 1.05)


def _ccix(grid: Grid, nbytes: int) -> Record:
    """Eight flits are too few for a fast link that is long."""
    took = torus_all_reduce(grid, shapes(grid)[1], nbytes, dict.fromkeys(LinkKind, CCIX))
    return _against_floor("the same over CCIX links, whose window is too small", took, None)


def _against_floor(name: str, took: Timing, most: float | None) -> Record:
    return Record(
        GROUP, name, took.cycles, "cycles", 1, 0.0,
        against="bytes by bandwidth, latency by steps", against_value=took.floor,
        ratio=took.cycles / took.floor, goal=None if most is None else Goal(at_most=most),
    )  # fmt: skip


def _forming(rounds: int) -> Record:
    grid = Grid(1, 8, 8)
    chips = sorted({*range(64)} - {9, 20, 42, 53})  # two of each colour: else there is no ring
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        found = form(grid, chips, range(len(grid.links)))
        taken.append((time.perf_counter() - started) * 1e3)
        if not isinstance(found, Ring):
            raise UnavailableError(f"no ring: {found}", where="benchmarks")
    return compare(
        GROUP, f"form a ring of {len(chips)} chips around {64 - len(chips)} that are not there",
        Sample(tuple(taken)), "ms", threads=1, note="wall time, once for each group",
    )  # fmt: skip


def _name(grid: Grid) -> str:
    boards = f"{grid.boards} boards of " if grid.boards > 1 else ""
    return f"{boards}{grid.rows} x {grid.columns}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fabric_model", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the records as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    options = parser.parse_args()
    records = list(run(options.quick))
    print(table(records))
    if options.json:
        document = {"records": [r.to_dict() for r in records]}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(r.holds is not False for r in records) else 1


if __name__ == "__main__":
    sys.exit(main())
