"""A simulation that drives the scheduler on the model clock, and the workload that its gain is
stated for. Shared by tests and benchmarks.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from accelvisor.abi.commands import ANY_CHIP
from accelvisor.function.scheduler import COMPUTE, Command, Scheduler, Step


@dataclass(frozen=True, slots=True)
class Order:
    """One command of a queue's program: its id as a SYNC, what it depends on, cycles."""

    own: int
    on: int
    cost: int


@dataclass(slots=True)
class Trace:
    """When each command of each queue began and ended, in cycles, and what came to a wrong end."""

    begins: list[dict[int, int]]
    ends: list[dict[int, int]]
    refused: list[tuple[int, int]] = field(default_factory=list)
    makespan: int = 0


def workload(seed: int, count: int = 2000) -> list[Order]:
    """10 % SYNC of 20 times the cost, 30 % conditional (70 % of them on the latest SYNC)."""
    random = Random(seed)
    orders: list[Order] = []
    syncs: list[int] = []
    for number in range(1, count + 1):
        draw = random.random()
        if draw < 0.1:
            orders.append(Order(number, 0, 20 * 100))
            syncs.append(number)
        elif draw < 0.4 and syncs:
            recent = syncs[-8:]
            on = syncs[-1] if random.random() < 0.7 else random.choice(recent)
            orders.append(Order(0, on, 100))
        else:
            orders.append(Order(0, 0, 100))
    return orders


def run(programs: Sequence[Sequence[Order]], engines: int = 4) -> Trace:
    """Each program in a queue of its own, on ``engines`` alike engines."""
    scheduler = Scheduler(len(programs), engines)
    rings = [deque(enumerate(program)) for program in programs]
    trace = Trace([{} for _ in programs], [{} for _ in programs])
    due: list[tuple[int, int, Command]] = []
    now = serial = 0

    def begin(command: Command) -> None:
        nonlocal serial
        scheduler.started(command)
        trace.begins[command.lane][command.slot] = now
        serial += 1
        heapq.heappush(due, (now + command.cost, serial, command))

    def serve(lane: int) -> bool:
        """The next command of a queue; False when it has to stay where it is."""
        if lane in scheduler.heads:
            return False
        if scheduler.lanes[lane].ready:
            scheduler.propose(scheduler.lanes[lane].ready[0])
            return False
        if not rings[lane]:
            return False
        number, order = rings[lane][0]
        command = Command(lane, number, order.own, order.on, ANY_CHIP, COMPUTE, order.cost)
        step = scheduler.consider(command)
        if step is Step.GO:
            scheduler.propose(command)
        if step in (Step.GO, Step.STAY):
            return False
        rings[lane].popleft()
        if step is Step.WAIT:
            scheduler.taken(command)
            scheduler.parked(command)
        else:
            trace.refused.append((lane, number))
        return True

    while True:
        progress = True
        while progress:
            progress = False
            for lane in range(len(programs)):
                while serve(lane):
                    progress = True
            while (command := scheduler.select()) is not None:
                ready = scheduler.lanes[command.lane].ready
                if ready and ready[0] is command:
                    ready.popleft()
                else:
                    rings[command.lane].popleft()
                    scheduler.taken(command)
                begin(command)
                progress = True
                while serve(command.lane):
                    pass
        if not due:
            break
        now, _, command = heapq.heappop(due)
        trace.ends[command.lane][command.slot] = now
        scheduler.stopped(command)
        scheduler.ended(command, well=True)
    trace.makespan = now
    return trace


def in_order(program: Sequence[Order], engines: int = 4) -> int:
    """The makespan of a scheduler that stops at each command which cannot go on."""
    free = [0] * engines
    ended: dict[int, int] = {}
    now = 0
    for order in program:
        now = max(now, ended.get(order.on, 0), free[0])
        heapq.heapreplace(free, now + order.cost)
        if order.own:
            ended[order.own] = now + order.cost
    return max(free)
