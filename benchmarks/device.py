"""Group ``device``: commands, registers, copies, compute and creation of one function.

All through the same daemon, function processes and guest library that a VM uses, with the in-tree
vfio-user client in the VM's place (no hypervisor in the way, so the figures are the device's own).
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from accelvisor.abi import commands
from accelvisor.abi.commands import Completion, Memory, Space
from accelvisor.abi.registers import Reg
from accelvisor.embedded import EmbeddedHost
from accelvisor.guest.function import Function
from accelvisor.kernels import blas
from accelvisor.limits import MIB
from benchmarks import libvfio_user
from benchmarks.record import Goal, Record, Sample, compare

GROUP = "device"
CONFIG = """
[cards.bench]
chips = 1
cores_per_chip = 8
memory = "4GiB"

[profiles.small]
cores = 1
memory = "64MiB"
window = "16MiB"
queues = 8

[profiles.bench]
cores = {cores}
memory = "512MiB"
window = "64MiB"
queues = 4
"""


def run(quick: bool) -> Iterator[Record]:
    repeats = 3 if quick else 9
    cores = min(2, os.cpu_count() or 1)
    with EmbeddedHost(CONFIG.format(cores=cores), spares=1) as host:
        yield from creations(host, repeats)
        function = host.create("bench", "bench")
        with host.open(function, ram_bytes=256 * MIB) as fn:
            yield round_trip(fn, repeats, 300 if quick else 3000)
            yield rate(fn, repeats, 3200 if quick else 64_000)
            yield from copies(fn, repeats, (1 * MIB, 16 * MIB))
            yield from matmuls(fn, repeats, cores)
            yield registers_under_load(fn, repeats, 500 if quick else 3000)
            yield from libvfio_user.run(GROUP, fn, repeats)


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def repeat(turns: int, action: Callable[[], object]) -> None:
    """Call ``action`` ``turns`` times."""
    for _ in range(turns):
        action()


def _samples(repeats: int, action: Callable[[], float]) -> Sample:
    action()  # once to warm up
    return Sample(tuple(action() for _ in range(repeats)))


def _register_read(fn: Function, count: int) -> float:
    """Median seconds of one trapped register read."""
    read = fn.transport.read32
    times = []
    clock = time.perf_counter
    for _ in range(count):
        began = clock()
        read(Reg.MAGIC)
        times.append(clock() - began)
    return statistics.median(times)


#: What a spare imports after it has said that it is there.
_WARM_S = 0.5


def creations(host: EmbeddedHost, repeats: int) -> Iterator[Record]:
    """``accelctl function create``, the command and all, to ready: on a host that has had a moment
    to keep a spare function process, and right after another creation, which has used it up.
    """
    accelctl = [sys.executable, "-m", "accelvisor.cli.main"]
    environment = {**os.environ, **host.environment}

    def create(name: str) -> float:
        began = time.perf_counter()
        subprocess.run(
            [*accelctl, "function", "create", "small", "--name", name],
            check=True, env=environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return (time.perf_counter() - began) * 1000

    def both() -> tuple[float, float]:
        _until_spare(host)
        took = create("timed"), create("next")
        host.delete("timed")
        host.delete("next")
        return took

    both()
    pairs = [both() for _ in range(repeats)]
    for name, place in (("", 0), (", the next at once", 1)):
        yield compare(
            GROUP, f"accelctl function create to ready{name}",
            Sample(tuple(pair[place] for pair in pairs)), "ms", threads=1, goal=Goal(at_most=300),
        )  # fmt: skip


def _until_spare(host: EmbeddedHost) -> None:
    deadline = time.monotonic() + 30
    with host.admin() as admin:
        while not admin.call("GetHost")["host"]["spares"]:
            if time.monotonic() > deadline:
                raise RuntimeError("the host keeps no spare function process")
            time.sleep(0.05)
    time.sleep(_WARM_S)


def round_trip(fn: Function, repeats: int, count: int) -> Record:
    """One command in flight, polled, without a doorbell, against one trapped register read."""

    def command() -> float:
        times = []
        clock = time.perf_counter
        entry = commands.nop(0)
        call = fn.queue.call
        for _ in range(count):
            began = clock()
            call(entry)
            times.append(clock() - began)
        return statistics.median(times) * 1e6

    command()
    pairs = [(command(), _register_read(fn, count) * 1e6) for _ in range(repeats)]
    mine = Sample(tuple(1 / a for a, _ in pairs))
    trap = Sample(tuple(1 / b for _, b in pairs))
    return compare(
        GROUP, "command round trips, one in flight", mine.map(lambda v: v * 1e6), "/s", threads=1,
        against=("trapped register reads", trap.map(lambda v: v * 1e6)), goal=Goal(at_least=3),
        note=f"{statistics.median(a for a, _ in pairs):.1f} µs a command, "
        f"{statistics.median(b for _, b in pairs):.1f} µs a register read",
    )  # fmt: skip


def rate(fn: Function, repeats: int, count: int) -> Record:
    """No-op commands a second with 32 in flight."""
    entry = commands.nop(0)
    queue = fn.queue

    def once() -> float:
        submit, wait = queue.submit, queue.wait
        began = time.perf_counter()
        with queue.batch():
            pending = [submit(entry) for _ in range(32)]
        for _ in range(count // 32 - 1):
            # by halves, so that the device always has some to do
            for half in (slice(0, 16), slice(16, 32)):
                for cookie in pending[half]:
                    wait(cookie)
                with queue.batch():
                    pending[half] = [submit(entry) for _ in range(16)]
        for cookie in pending:
            wait(cookie)
        return count / (time.perf_counter() - began)

    return compare(
        GROUP, "no-op commands at depth 32", _samples(repeats, once), "/s", threads=1,
        goal=Goal(at_least=100_000),
    )  # fmt: skip


#: Each side of a copy walks through so much, more than a last-level cache holds: repeating one
#: buffer would measure how fast a core copies within its cache, which no transfer of data does.
_WALK = 64 * MIB
#: Walks that are timed together: bandwidth is asked for here, not how soon a sleeping device wakes.
_WALKS = 4
#: Copies in flight, as any driver keeps some: the guest prepares one while another runs.
_DEPTH = 4


def copies(fn: Function, repeats: int, sizes: tuple[int, ...]) -> Iterator[Record]:
    """DMA between guest RAM and device memory against memcpy: as many bytes, in pieces of the same
    size, through the same walk over the same guest RAM on the one side and as much memory of the
    same kind (a shared file without huge pages, as a device's memory is) on the other.
    """
    buffer = fn.transport.allocate_dma(_WALK)
    tensor = fn.empty((_WALK,), "uint8")
    guest = np.frombuffer(buffer.view, np.uint8)
    guest[:] = 1
    fd = os.memfd_create("memcpy", os.MFD_CLOEXEC)
    os.ftruncate(fd, _WALK)
    peer = np.frombuffer(mmap.mmap(fd, _WALK), np.uint8)
    os.close(fd)
    peer[:] = 1
    for nbytes in sizes:
        places = range(0, _WALK, nbytes)

        def memcpy(
            target: np.ndarray[Any, Any],
            source: np.ndarray[Any, Any],
            places: range = places,
            nbytes: int = nbytes,
        ) -> float:
            def walk() -> None:
                for _ in range(_WALKS):
                    for at in places:
                        np.copyto(target[at : at + nbytes], source[at : at + nbytes])

            return _WALKS * _WALK / _timed(walk) / 1e9

        def dma(entries: list[bytes]) -> float:
            submit, wait = fn.queue.submit, fn.queue.wait

            def walk() -> None:
                flying: deque[int] = deque()
                for entry in entries * _WALKS:
                    if len(flying) == _DEPTH:
                        _good(wait(flying.popleft()))
                    flying.append(submit(entry))
                while flying:
                    _good(wait(flying.popleft()))

            return _WALKS * _WALK / _timed(walk) / 1e9

        for name, build, ends in (
            ("in", commands.copy_in, (peer, guest)),
            ("out", commands.copy_out, (guest, peer)),
        ):
            entries = [
                build(0, tensor.handle, at, Memory(Space.GUEST, 0, buffer.address + at, nbytes, 0))
                for at in places
            ]
            dma(entries), memcpy(*ends)
            # Twice as often as the rest: both share the memory with whatever else the machine does.
            pairs = [(dma(entries), memcpy(*ends)) for _ in range(2 * repeats)]
            yield compare(
                GROUP, f"DMA copy {name}, {nbytes // MIB} MiB", Sample(tuple(a for a, _ in pairs)),
                "GB/s", threads=1, against=("memcpy", Sample(tuple(b for _, b in pairs))),
                goal=Goal(at_least=0.7),
                note=f"{_DEPTH} in flight; both walk through {_WALK // MIB} MiB on each side",
            )  # fmt: skip
    tensor.close()
    del guest
    buffer.release()


def _good(completion: Completion) -> None:
    """A figure of commands that failed would be worth nothing."""
    if completion.status:
        raise RuntimeError(f"a copy ended with status {completion.status:#x}")


#: A BLAS's threads spin for a while after a product; what is measured next must not share a core
#: with them. Both sides begin after it, since idle cores begin slower than busy ones.
_SETTLE_S = 0.1
#: Products in a row that are timed together.
_PRODUCTS = 3


def matmuls(fn: Function, repeats: int, cores: int) -> Iterator[Record]:
    """float32 1024^3 as a command against numpy with as many threads: with some commands in flight,
    as any driver keeps, and one at a time, where the guest's way there and back counts as well.
    """
    n = 1024
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
    with fn.program("matmul") as p:
        x, y = p.input((n, n), "float32"), p.input((n, n), "float32")
        p.output(p.matmul(x, y))
    left, right, out = fn.tensor(a), fn.tensor(b), fn.empty((n, n), "float32")
    bound = p.bind(left, right, out=out)
    product = np.empty((n, n), "float32")

    def rate(action: Callable[[], object]) -> float:
        time.sleep(_SETTLE_S)
        return _PRODUCTS * 2 * n**3 / _timed(action) / 1e9

    def in_flight() -> None:
        for launch in [bound.launch() for _ in range(_PRODUCTS)]:
            launch.wait()

    def numpy() -> None:
        repeat(_PRODUCTS, lambda: np.matmul(a, b, out=product))

    def round_() -> tuple[float, float, float]:
        mine = rate(in_flight), rate(lambda: repeat(_PRODUCTS, bound))
        with threadpool_limits(cores):
            return *mine, rate(numpy)

    round_()
    rounds = [round_() for _ in range(repeats)]
    peer = "numpy", Sample(tuple(r[2] for r in rounds))
    note = f"{_PRODUCTS} in a row on each side, after {_SETTLE_S:g} s of rest; {blas.fingerprint()}"
    for name, place in ((f"{_PRODUCTS} in flight", 0), ("one at a time", 1)):
        yield compare(
            GROUP, f"matmul 1024^3, {name}", Sample(tuple(r[place] for r in rounds)), "GFLOP/s",
            threads=cores, against=peer, goal=Goal(at_least=0.9), note=note if not place else "",
        )  # fmt: skip


def registers_under_load(fn: Function, repeats: int, count: int) -> Record:
    """99th percentile of a register read while a long program runs."""
    n = 512
    ones = np.ones((n, n), "float32")

    def once() -> float:
        with fn.program("load") as p:
            p.output(p.matmul(p.input((n, n)), p.input((n, n))))
        bound = p.bind(fn.tensor(ones), fn.tensor(ones), out=fn.empty((n, n)))
        bound.launch(repeat=100_000)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            fn.transport.read32(Reg.STATUS)
            times.append(time.perf_counter() - began)
        fn.queue.stop()  # aborts the program
        fn.restart()
        return float(np.percentile(times, 99)) * 1000

    return compare(
        GROUP, "register read p99 while a program runs", _samples(repeats, once), "ms", threads=2,
        goal=Goal(at_most=2),
    )  # fmt: skip
