"""Group ``fabric``, the front end: what commands that are not ordered gain, and how many a worker
schedules.

The gain is on the model clock: the worker's own scheduler, driven by a simulation of engines, on
the workload that it is stated for, against one that stops at each command which cannot go on. Tests
drive the same simulation. The rate is wall time of a real function process whose client only moves
the ring's tail.
"""

from __future__ import annotations

import heapq
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import ANY_CHIP, Flag, Memory, scheduled
from accelvisor.abi.registers import CQ_HEAD, CQ_TAIL, NEED_WAKEUP, SQ_TAIL, Reg
from accelvisor.embedded.host import EmbeddedHost
from accelvisor.function.scheduler import COMPUTE, Command, Scheduler, Step
from accelvisor.guest.function import Function
from accelvisor.limits import MIB
from benchmarks.record import Goal, Record, Sample, compare

GROUP = "fabric"
_CONFIG = """
[libvirt]
uri = ""
[profiles.pair]
cores = 2
chips = 2
memory = "16MiB"
window = "1MiB"
queues = 4
"""
_RAM = 4 * MIB


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


def simulate(programs: Sequence[Sequence[Order]], engines: int = 4) -> Trace:
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


# --- the figures ----------------------------------------------------------------------------------


def run(quick: bool) -> Iterator[Record]:
    yield from _gain()
    with EmbeddedHost(_CONFIG) as host:
        made = host.create("pair")
        with Function(host.connect(made, ram_bytes=_RAM)) as fn:
            yield from _rates(fn, 0.3 if quick else 2.0, 3 if quick else 7)
        host.delete(made["uuid"])


def _gain() -> Iterator[Record]:
    programs = [workload(seed) for seed in range(30)]
    gains = [in_order(program) / simulate([program]).makespan for program in programs]
    yield Record(
        GROUP, "scheduler: gain over an in-order one, mean of 30 seeds",
        statistics.mean(gains), "x", 1, 0.0, goal=Goal(at_least=1.9),
        note=f"worst {min(gains):.2f}; model clock, 4 engines",
    )  # fmt: skip
    free = [Order(0, 0, 100 + n % 7) for n in range(2000)]
    chain = [Order(n, n - 1, 50) for n in range(1, 2001)]
    for name, program in (("nothing depends", free), ("each depends on the last", chain)):
        yield Record(
            GROUP, f"scheduler: gain where {name}",
            in_order(program) / simulate([program]).makespan, "x", 1, 0.0,
            goal=Goal(at_least=1.0, at_most=1.0), note="model clock",
        )  # fmt: skip


def _rates(fn: Function, seconds: float, repeats: int) -> Iterator[Record]:
    empty = fn.load(_no_program())
    launch = abi.launch(0, empty, 0, Memory(0, 0, 0, 0, 0))
    kinds: list[tuple[str, bytes, Goal | None]] = [
        ("no-op", scheduled(abi.nop(0), Flag.PLAIN), Goal(at_least=200_000)),
        ("no-op on a named chip (each a record of the state)",
         scheduled(abi.nop(0), Flag.PLAIN, 0), None),
        ("launch of an empty program (an engine each)", scheduled(launch, Flag.PLAIN), None),
    ]  # fmt: skip
    for name, entry, goal in kinds:
        rates = [_rate(fn, entry, seconds) for _ in range(repeats)]
        yield compare(
            GROUP, f"front end: plain commands a second, {name}", Sample(tuple(rates)), "/s",
            threads=1, goal=goal,
        )  # fmt: skip


def _no_program() -> bytes:
    from accelvisor.abi.programs import Program, encode

    return encode(Program((), ()))


def _rate(fn: Function, entry: bytes, seconds: float) -> float:
    """Commands that the worker completed a second while its ring was never empty."""
    layout, index = fn.identity.layout, fn.queue.index
    window, words = fn.transport.window, fn.transport.window.cast("I")
    fence = threading.Lock()
    at, control = layout.submission(index), layout.control(index)
    window[at : at + layout.entries * 64] = entry * layout.entries
    tail, done, head, asleep = (
        (control + n) // 4 for n in (SQ_TAIL, CQ_TAIL, CQ_HEAD, NEED_WAKEUP)
    )
    first = last = words[done]
    began = now = time.perf_counter()
    while now - began < seconds:
        last = words[done]
        words[head] = last
        words[tail] = last + layout.entries & 0xFFFF_FFFF
        with fence:
            pass  # what NEED_WAKEUP says is of after the tail
        if words[asleep]:
            fn.transport.write32(Reg.DOORBELL + 4 * index, 1)
        time.sleep(0.00005)
        now = time.perf_counter()
    rate = (last - first & 0xFFFF_FFFF) / (now - began)
    _until(lambda: words[done] == words[tail])
    words[head] = words[done]
    fn.restart()  # its own bookkeeping begins anew
    words.release()
    return rate


def _until(condition: Callable[[], bool], patience_s: float = 30.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the worker does not come to the end of its ring")
        time.sleep(0.001)
