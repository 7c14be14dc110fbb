"""Group ``migration``, moves of a busy function between two daemons on this machine: what is left
to be copied when the VM stands still, and for how long it does.

All of 256 MiB of device memory is in use, and the guest writes 5 % of it over and over. The peer is
a stop-and-copy of the same state by the same daemons: the VM stops before anything was copied.
There is no QEMU here, whose own share is in the group ``migration-lab``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np

from accelvisor.embedded.host import EmbeddedHost, free_port, join
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.errors import AccelvisorError
from accelvisor.guest.function import Function
from accelvisor.guest.tensor import Tensor
from accelvisor.limits import MIB
from benchmarks.record import Goal, Record, Sample, compare

GROUP = "migration"
SIZE = 256 * MIB
#: Of the memory, at most so much may be copied while the VM stands still.
LEFT = 0.10
_PIECE = MIB
_PROFILE = f"""
[profiles.bench]
memory = "{SIZE // MIB}MiB"
window = "1MiB"
queues = 2
ring_entries = 64
"""


def run(quick: bool) -> Iterator[Record]:
    moves = 3 if quick else 10
    left, still = _measure("first_pass_s = 15", moves)
    _, copied = _measure("first_pass_s = 0", moves)
    name = f"{SIZE // MIB} MiB of device memory, 5 % written"
    yield compare(
        GROUP, f"copied while the VM stands still: {name}", left.map(lambda n: n / MIB), "MiB",
        threads=2, against=("all of it", Sample((SIZE / MIB,))), goal=Goal(at_most=LEFT),
    )  # fmt: skip
    yield compare(
        GROUP, f"downtime of a move: {name}", still.map(_ms), "ms",
        threads=2, against=("stop-and-copy of the same", copied.map(_ms)),
    )  # fmt: skip


def _ms(seconds: float) -> float:
    return seconds * 1e3


def _measure(migration: str, moves: int) -> tuple[Sample, Sample]:
    """(bytes sent while the VM stood still, seconds that it did) of moves there and back."""
    with _busy(migration) as (hosts, vm):
        sent, still = [], []
        for turn in range(moves):
            source, there = hosts[turn % 2], hosts[1 - turn % 2]
            still.append(vm.migrate(there).downtime_s)
            with source.admin() as admin:
                told = admin.call("ListMigrations")["migrations"][0]
            sent.append(float(told["numbers"]["last_round_bytes"]))
        return Sample(tuple(sent)), Sample(tuple(still))


@contextmanager
def _busy(migration: str) -> Iterator[tuple[list[EmbeddedHost], EmbeddedVm]]:
    """Two hosts, and a VM on the first one whose guest computes until the end."""
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(
                EmbeddedHost(_config(name, migration), listen=f"127.0.0.1:{free_port()}")
            )
            for name in "ab"
        ]
        join(*hosts)
        vm = EmbeddedVm(hosts[0], [hosts[0].create("bench")["uuid"]])
        stack.callback(vm.close)
        ended = threading.Event()
        with vm.cpu:
            function = Function(vm.transport())
            tensors = _fill(function)
        guest = threading.Thread(target=_write, args=(vm, function, tensors, ended))
        guest.start()
        try:
            yield hosts, vm
            if not guest.is_alive():
                raise RuntimeError("the guest does not compute any more")
        finally:
            ended.set()
            guest.join()


def _config(name: str, migration: str) -> str:
    return f'{migration}\n[libvirt]\nuri = ""\n[host]\nname = "{name}"\n{_PROFILE}'


def _fill(function: Function) -> list[Tensor]:
    dice = np.random.default_rng(1)
    tensors = []
    with suppress(AccelvisorError):  # until it is full
        while True:
            numbers = dice.standard_normal(_PIECE // 4, np.float32)
            tensors.append(function.tensor(numbers))
    tensors.pop().close()  # programs need room too
    return tensors


def _write(
    vm: EmbeddedVm, function: Function, tensors: list[Tensor], ended: threading.Event
) -> None:
    first, written = tensors[0], tensors[1 : 1 + SIZE // 20 // _PIECE]
    while not ended.is_set():
        for tensor in written:
            with vm.cpu:
                function.ops.mul(first, first, out=tensor)
