"""Group ``isolation``: what one function costs another, and what keeping them apart costs itself.

Noisy neighbour: a fixed command on one function, again and again, first alone and then beside a
neighbour that computes and copies with all it has. The function is *guaranteed*: it has a host CPU
of its own, and so has its client (a VM's vCPU shares that CPU with it, as with a pinned VM). The
model clock must not differ by a cycle; the 99th percentile of the wall time by at most 15 %.

Everything runs under the embedded host, so without units: what systemd adds is a floor under the
weights, not over these figures.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from accelvisor.abi.registers import Reg
from accelvisor.embedded.host import EmbeddedHost
from accelvisor.errors import AccelvisorError
from accelvisor.guest.function import Function
from accelvisor.isolation.segments import Segment, SegmentTable
from accelvisor.limits import MIB
from benchmarks.record import Goal, Record, Sample, compare

GROUP = "isolation"
_CONFIG = """
[libvirt]
uri = ""
[cards.card0]
chips = 16
cores_per_chip = 8
memory = "8GiB"
[profiles.sure]
memory = "64MiB"
window = "1MiB"
queues = 2
policy = "guaranteed"
[profiles.noisy]
memory = "256MiB"
window = "1MiB"
queues = 4
cores = 4
[profiles.tiny]
memory = "8MiB"
window = "1MiB"
queues = 2
ring_entries = 16
"""
_RAM = 32 * MIB


def run(quick: bool) -> Iterator[Record]:
    with EmbeddedHost(_CONFIG) as host:
        yield from _noisy(host, 3 if quick else 9)
        yield from _shapes(host, 5 if quick else 30)
        yield from _idle(host, 8 if quick else 64)
    yield _gate(5 if quick else 15)


# --- noisy neighbour ------------------------------------------------------------------------------


def _noisy(host: EmbeddedHost, rounds: int) -> Iterator[Record]:
    made = host.create("sure")
    with host.admin() as admin:
        card = admin.call("GetCard", {"card": "card0"})["card"]
    (cpu,) = card["shares"][0]["cpus"]
    before = os.sched_getaffinity(0)
    others = before - {cpu}
    os.sched_setaffinity(0, {cpu})
    try:
        alone, beside, clocks = [], [], set()
        with _opened(host, made) as (fn, transport):
            work = _command(fn)
            _p99(work)
            for _ in range(rounds):
                clocks.add(_cycles(transport, work))
                alone.append(_p99(work))
                with _neighbour(host, others):
                    clocks.add(_cycles(transport, work))
                    beside.append(_p99(work))
    finally:
        os.sched_setaffinity(0, before)
    host.delete(made["uuid"])
    yield compare(
        GROUP, "p99 of a fixed command beside a neighbour at full load",
        Sample(tuple(beside)).map(_us), "us", threads=1,
        against=("the same alone", Sample(tuple(alone)).map(_us)), goal=Goal(at_most=1.15),
        note="guaranteed function, its client on the same host CPU, the neighbour on the others",
    )  # fmt: skip
    yield Record(
        GROUP, "model clock: different cycle counts of the same work", len(clocks) - 1, "", 1, 0.0,
        goal=Goal(at_most=0),
    )  # fmt: skip


@contextmanager
def _opened(host: EmbeddedHost, made: dict[str, Any]) -> Iterator[tuple[Function, Any]]:
    transport = host.connect(made, ram_bytes=_RAM)
    with Function(transport, timeout_s=60.0) as fn:
        yield fn, transport


def _command(fn: Function) -> Callable[[], None]:
    """A program of some hundred microseconds, launched once."""
    with fn.program("fixed") as program:
        x = program.input((160, 160))
        program.output(program.call("tanh", program.call("matmul", x, x)))
    a, b = fn.ones((160, 160)), fn.empty((160, 160))
    bound = program.bind(a, out=b)
    return lambda: bound() and None


def _p99(work: Callable[[], None], count: int = 400) -> float:
    """Seconds."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.quantiles(took, n=100)[98]


def _cycles(transport: Any, work: Callable[[], None]) -> int:
    before = transport.read64(Reg.MODEL_CLOCK_64)
    for _ in range(20):
        work()
    return int(transport.read64(Reg.MODEL_CLOCK_64)) - before


@contextmanager
def _neighbour(host: EmbeddedHost, cpus: set[int]) -> Iterator[None]:
    """One function at full load: programs, copies, and register accesses without end."""
    made = host.create("noisy")
    stop = threading.Event()
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, cpus or os.sched_getaffinity(0))
        try:
            _load(host, made)
        finally:
            os._exit(0)
    try:
        path = Path(made["socket"]).parent / "control.sock"
        _until(lambda: _statistics(path)["commands"] > 50)
        yield
    finally:
        stop.set()
        os.kill(child, 9)
        os.waitpid(child, 0)
        host.delete(made["uuid"])


def _load(host: EmbeddedHost, made: dict[str, Any]) -> None:
    with _opened(host, made) as (fn, transport):
        x = fn.ones((512, 512))
        big = fn.empty((4 * MIB,), "uint8")
        near = np.zeros(4 * MIB, np.uint8)
        while True:
            fn.ops.matmul(x, x)
            big.copy_(near)
            for _ in range(100):
                transport.read32(Reg.STATUS)


def _statistics(path: Path) -> dict[str, Any]:
    import asyncio

    from accelvisor.daemon import function_link

    return asyncio.run(function_link.call(path, "statistics"))


def _until(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it does not come to that")
        meanwhile()
        time.sleep(0.01)


# --- shapes ---------------------------------------------------------------------------------------


def _shapes(host: EmbeddedHost, repeats: int) -> Iterator[Record]:
    """A function of 256 MiB, all of it written before, loses and gets back 192 of them while it
    computes; what its guest sees of that is how long no command completes.
    """
    made = host.create("noisy")
    gaps, memsets = [], []
    zeros = np.ones(192 * MIB, np.uint8)
    ones = np.ones(192 * MIB, np.uint8)
    with _opened(host, made) as (fn, _):
        work = _command(fn)
        for _ in range(repeats):
            # Filled from here: a program that did it would stay, above what it had filled.
            filled = fn.empty((192 * MIB,), "uint8")
            filled.copy_(ones)
            filled.close()
            work()  # what was closed goes with the next commands
            _until(lambda: fn.info()["memory_used_bytes"] < 32 * MIB, work)
            gaps.append(_gap(host, made["uuid"], work, 64 * MIB))
            began = time.perf_counter()
            zeros[:] = 0
            memsets.append(time.perf_counter() - began)
            _gap(host, made["uuid"], work, 256 * MIB)
    host.delete(made["uuid"])
    yield compare(
        GROUP, "longest wait for a command while 192 MiB are taken away",
        Sample(tuple(gaps)).map(_ms), "ms", threads=1,
        against=("zeroing 192 MiB once", Sample(tuple(memsets)).map(_ms)), goal=Goal(at_most=1.0),
        note="quiesce, scrub, read back, another table, resume; seen by the guest",
    )  # fmt: skip


def _gap(host: EmbeddedHost, uuid: str, work: Callable[[], None], memory: int) -> float:
    """Resize while commands run one after the other; the longest of them (seconds)."""
    done = threading.Event()
    wrong: list[AccelvisorError] = []

    def change() -> None:
        try:
            with host.admin() as admin:
                admin.call("ResizeFunction", {"function": uuid, "memory_bytes": memory})
        except AccelvisorError as error:
            wrong.append(error)
        done.set()

    thread = threading.Thread(target=change)
    thread.start()
    longest = 0.0
    while not done.is_set():
        began = time.perf_counter()
        work()
        longest = max(longest, time.perf_counter() - began)
    thread.join()
    if wrong:
        raise wrong[0]
    return longest


# --- idle functions -------------------------------------------------------------------------------


def _idle(host: EmbeddedHost, count: int) -> Iterator[Record]:
    made = [host.create("tiny")["uuid"] for _ in range(count)]
    pids = _processes(str(host.run))
    private = sum(map(_private, pids)) / count
    before = {pid: _switches(pid) for pid in pids}
    time.sleep(2.0)
    woken = sum(_switches(pid) - before[pid] for pid in pids)
    for uuid in made:
        host.delete(uuid)
    yield Record(
        GROUP, f"private memory of an idle function ({count} of them)", private / MIB, "MB", 1, 0.0,
        goal=Goal(at_most=15.0), note="holder, zygote and worker together",
    )  # fmt: skip
    yield Record(
        GROUP, f"wake-ups of {count} idle functions", woken / 2.0, "1/s", 1, 0.0,
        goal=Goal(at_most=0),
    )  # fmt: skip


def _processes(marker: str) -> list[int]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if marker in command and "accelvisor.function" in command:
            found.append(int(pid))
    return found


def _private(pid: int) -> int:
    """Bytes that are this process's alone."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean", "Private_Dirty")):
            total += int(line.split()[1]) * 1024
    return total


def _switches(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        text = (task / "status").read_text()
        total += sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)
    return total


# --- the gate -------------------------------------------------------------------------------------


def _gate(repeats: int) -> Record:
    """The check that stands before each access, beside the copy of 4 KiB that it lets through."""
    peer = "copying 4 KiB in the same interpreter"
    table = SegmentTable(tuple(Segment(i * MIB, MIB, i, 0) for i in range(16)), 1)
    memory = memoryview(bytearray(16 * MIB))
    target = memoryview(bytearray(4096))
    checks, copies = [], []
    for _ in range(repeats):
        checks.append(_each(lambda: table.check(9 * MIB, 4096, 1)))
        copies.append(_each(lambda: target.__setitem__(slice(None), memory[9 * MIB :][:4096])))
    return compare(
        GROUP, "segment check of one access, 16 segments", Sample(tuple(checks)).map(_us), "us",
        threads=1, against=(peer, Sample(tuple(copies)).map(_us)), goal=Goal(at_most=1.0),
    )  # fmt: skip


def _each(call: Callable[[], object], count: int = 20_000) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def _us(seconds: float) -> float:
    return seconds * 1e6


def _ms(seconds: float) -> float:
    return seconds * 1e3
