"""What an all-reduce costs over a fabric, on the model clock: one ring, or rows and columns.

Chips do not wait for each other but for messages: each sends a step's message when it has the one
of the step before. A message goes in flits of 256 bytes; each takes
ceil(bytes / bytes per cycle) cycles of the link's direction, then the latency; a ninth flit waits
until the first one's credit is back, a latency after it arrived. A chip that only passes on sends
each flit on as it comes.

A ring of N chips: reduce-scatter and all-gather of N blocks (P. Patarasuk, X. Yuan: Bandwidth
optimal all-reduce algorithms for clusters of workstations, JPDC 69, 2009), 2(N - 1) steps. Rows
and columns (US 11,615,295; two-dimensional rings): reduce-scatter along the row, all-reduce of that
block along the column, all-gather along the row, 2(C - 1) + 2(R - 1) steps. Both send
2n(N - 1)/N of n bytes from each chip.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from accelvisor.errors import UsageError
from accelvisor.fabric.former import Ring, Torus
from accelvisor.fabric.grid import WIRES, Grid, LinkKind, Wire
from accelvisor.fabric.links import FLIT_BYTES, WINDOW

#: Of each kind of link.
Wires: TypeAlias = Mapping[LinkKind, Wire]


@dataclass(frozen=True, slots=True)
class Timing:
    """What one collective took.

    Attributes:
        cycles: from its begin until the last chip has everything.
        steps: messages one after the other that each chip sends.
        sent: bytes that each chip sent as its own; what it passed on for others is not in it.
        floor: no schedule of these steps and bytes takes less: the larger of steps times latency
            and bytes by bandwidth, of the fastest link and the chip that sent most.
    """

    cycles: int
    steps: int
    sent: Mapping[int, int]
    floor: int

    @property
    def bytes_per_chip(self) -> int:
        """Of the chip that sent most."""
        return max(self.sent.values(), default=0)


def ring_all_reduce(grid: Grid, ring: Ring, nbytes: int, wires: Wires = WIRES) -> Timing:
    """All-reduce of ``nbytes`` on each chip of a ring.

    Raises:
        UsageError: fewer than no bytes.
    """
    sim = _Sim(grid, wires, nbytes)
    count = len(ring.chips)
    done = _reduce_scatter(sim, ring, nbytes, [0] * count)
    done = _all_gather(sim, ring, nbytes, done)
    return sim.timing(max(done), 2 * (count - 1))


def torus_all_reduce(grid: Grid, torus: Torus, nbytes: int, wires: Wires = WIRES) -> Timing:
    """All-reduce of ``nbytes`` on each chip of rows and columns. Raises as :func:`ring_all_reduce`.
    """
    sim = _Sim(grid, wires, nbytes)
    high, wide = len(torus.rows), len(torus.columns)
    ready = [_reduce_scatter(sim, row, nbytes, [0] * wide) for row in torus.rows]
    for at, column in enumerate(torus.columns):
        block = _blocks(nbytes, wide)[(at + 1) % wide]
        done = _reduce_scatter(sim, column, block, [line[at] for line in ready])
        done = _all_gather(sim, column, block, done)
        for line, when in zip(ready, done, strict=True):
            line[at] = when
    ends = [
        _all_gather(sim, row, nbytes, line) for row, line in zip(torus.rows, ready, strict=True)
    ]
    return sim.timing(max(map(max, ends)), 2 * (wide - 1) + 2 * (high - 1))


def message_cycles(wire: Wire, nbytes: int) -> int:
    """Of one message over one link on which nothing else is: the formula that a simulation has to
    agree with. Whole flits but the last; eight of them between two credits.
    """
    flits = max(1, -(-nbytes // FLIT_BYTES))
    full = max(1, -(-FLIT_BYTES // wire.bytes_per_cycle))
    last = max(1, -(-(nbytes - (flits - 1) * FLIT_BYTES) // wire.bytes_per_cycle))
    rounds, place = divmod(flits - 1, WINDOW)
    round_cycles = max(WINDOW * full, full + 2 * wire.latency)
    return rounds * round_cycles + place * full + last + wire.latency


def _blocks(nbytes: int, count: int) -> list[int]:
    """Sizes of ``count`` blocks, the first ones a byte longer where it does not come out even."""
    each, more = divmod(nbytes, count)
    return [each + (block < more) for block in range(count)]


def _reduce_scatter(sim: _Sim, ring: Ring, nbytes: int, ready: Sequence[int]) -> list[int]:
    """When each chip has its block, which is the one after its own place."""
    return _around(sim, ring, nbytes, ready, 0)


def _all_gather(sim: _Sim, ring: Ring, nbytes: int, ready: Sequence[int]) -> list[int]:
    """When each chip has all blocks, beginning with the one after its own place."""
    return _around(sim, ring, nbytes, ready, 1)


def _around(sim: _Sim, ring: Ring, nbytes: int, ready: Sequence[int], first: int) -> list[int]:
    """N - 1 steps, in which each chip sends one block of ``nbytes`` to the next: at first the one
    ``first`` after its own place. Returns when the last one has come to each chip.
    """
    sizes = _blocks(nbytes, len(ring.chips))
    has = list(ready)
    for step in range(len(ring.chips) - 1):
        came = [
            sim.message(chip, way, sizes[(rank + first - step) % len(sizes)], start)
            for rank, (chip, way, start) in enumerate(zip(ring.chips, ring.ways, has, strict=True))
        ]
        has = [max(pair) for pair in zip(has, [came[-1], *came[:-1]], strict=True)]
    return has


@dataclass(slots=True)
class _Lane:
    """One direction of a link: when it is free, and when each credit that is out will be back."""

    wire: Wire
    free: int = 0
    credits: deque[int] = field(default_factory=deque)

    def flit(self, nbytes: int, start: int) -> int:
        """When a flit is there that may leave from ``start`` on."""
        if len(self.credits) == WINDOW:
            start = max(start, self.credits.popleft())
        self.free = max(start, self.free) + max(1, -(-nbytes // self.wire.bytes_per_cycle))
        there = self.free + self.wire.latency
        self.credits.append(there + self.wire.latency)
        return there


class _Sim:
    """The lanes that were used, by link and the chip at their begin; what each chip has sent."""

    def __init__(self, grid: Grid, wires: Wires, nbytes: int) -> None:
        if nbytes < 0:
            raise UsageError(f"a collective of {nbytes} bytes", where="fabric")
        self._grid = grid
        self._wires = wires
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._sent: Counter[int] = Counter()

    def message(self, chip: int, way: Sequence[int], nbytes: int, start: int) -> int:
        """When the whole message has come to the way's end."""
        self._sent[chip] += nbytes
        lanes = []
        for number in way:
            link = self._grid.links[number]
            lane = self._lanes.get((number, chip)) or _Lane(self._wires[link.kind])
            self._lanes[number, chip] = lane
            lanes.append(lane)
            chip = link.other(chip)
        there = start
        for offset in range(0, max(1, nbytes), FLIT_BYTES):
            there = start
            for lane in lanes:
                there = lane.flit(min(FLIT_BYTES, nbytes - offset), there)
        return there

    def timing(self, cycles: int, steps: int) -> Timing:
        wires = [lane.wire for lane in self._lanes.values()]
        latency = min((wire.latency for wire in wires), default=0)
        fastest = max((wire.bytes_per_cycle for wire in wires), default=1)
        most = max(self._sent.values(), default=0)
        return Timing(cycles, steps, dict(self._sent), max(steps * latency, -(-most // fastest)))
