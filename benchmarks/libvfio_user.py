"""The same trapped register read against a C server built on libvfio-user.

libvfio-user is not packaged, so this needs a build of it: LIBVFIO_USER_SAMPLES names the directory
with its sample programs. Without it there are no such records. The client is ours both times, so
the difference is the servers'.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from accelvisor.abi.registers import Reg
from accelvisor.errors import UnavailableError
from accelvisor.guest.function import Function
from accelvisor.vfio_user.client import Client
from benchmarks.record import Record, Sample, compare

_BAR2 = 2
_READS = 2000


def run(group: str, fn: Function, repeats: int) -> Iterator[Record]:
    samples = os.environ.get("LIBVFIO_USER_SAMPLES")
    if not samples:
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "gpio"
        server = subprocess.Popen(
            [Path(samples) / "gpio-pci-idio-16", path],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            with _connect(path) as client:
                pairs = [(_ours(fn), _theirs(client)) for _ in range(repeats)]
        finally:
            server.kill()
            server.wait()
    yield compare(
        group, "trapped register read", Sample(tuple(a for a, _ in pairs)), "µs", threads=1,
        against=("libvfio-user's gpio sample (C)", Sample(tuple(b for _, b in pairs))),
    )  # fmt: skip


def _connect(path: Path) -> Client:
    deadline = time.monotonic() + 10
    while True:
        try:
            return Client(path)
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _ours(fn: Function) -> float:
    read = fn.transport.read32
    return _median(lambda: read(Reg.MAGIC))


def _theirs(client: Client) -> float:
    return _median(lambda: client.region_read(_BAR2, 0, 1))


def _median(action: Callable[[], object]) -> float:
    clock = time.perf_counter
    times = []
    for _ in range(_READS):
        began = clock()
        action()
        times.append(clock() - began)
    return statistics.median(times) * 1e6
