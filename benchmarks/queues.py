"""Group ``fabric``, queues: what two queues with events gain over one, on the model clock.

Back-propagation over 20 layers and 4
units: each layer is computed on every unit, then its gradients are exchanged on the transfer queue,
for which that layer must be done on all units. One queue per unit does the same work in the same
order of importance. Cycles of the model clock are exact, so there is no spread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from accelvisor.abi.graphs import QueueType
from accelvisor.guest.graphs.builder import Op, build
from benchmarks.record import Goal, Record, Sample, compare

GROUP = "fabric"
LAYERS, UNITS, COMPUTE = 20, 4, 1000


def run(quick: bool) -> Iterator[Record]:
    for share, least in ((0.5, 1.4), (1.0, 1.8)):
        yield _overlap(share, least)
    yield _waits()
    yield _building(3 if quick else 9)


def backpropagation(layers: int, units: int, compute: int, transfer: int) -> list[Op]:
    """The task graph: ids are layer by layer and unit by unit, computing first."""
    ops = []
    for n in range(layers * units):
        before = (n - units,) if n >= units else ()
        ops.append(Op(n, n % units, QueueType.COMPUTE, compute, before))
    for n in range(layers * units):
        first = n - n % units
        needs = tuple(range(first, first + units))
        ops.append(Op(layers * units + n, n % units, QueueType.TRANSFER, transfer, needs))
    return ops


def _overlap(share: float, least: float) -> Record:
    ops = backpropagation(LAYERS, UNITS, COMPUTE, int(share * COMPUTE))
    two, one = build(ops), build(ops, one_queue=True)
    return Record(
        GROUP, f"back-propagation, exchange = {share:g} x compute: gain of two queues",
        one.makespan / two.makespan, "x", 1, 0.0,
        against="no schedule is shorter", against_value=one.makespan / two.lower,
        goal=Goal(at_least=least),
        note=f"{two.makespan} cycles against {one.makespan}",
    )  # fmt: skip


def _waits() -> Record:
    plan = build(backpropagation(LAYERS, UNITS, COMPUTE, COMPUTE // 2))
    return Record(
        GROUP, "back-propagation: WAITs", plan.waits, "", 1, 0.0,
        against="dependencies", against_value=plan.dependencies,
        ratio=plan.waits / plan.dependencies, goal=Goal(at_most=320 / 396),
        note=f"{plan.signals} SIGNALs of {2 * UNITS} queues",
    )  # fmt: skip


def _building(rounds: int) -> Record:
    ops = backpropagation(80, 8, COMPUTE, COMPUTE)
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        build(ops)
        taken.append((time.perf_counter() - started) * 1e3)
    return compare(
        GROUP, f"build queues of {len(ops)} operations on 8 units", Sample(tuple(taken)), "ms",
        threads=1, note="wall time, once for each graph",
    )  # fmt: skip
