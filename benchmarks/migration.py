"""Group ``migration``: moving state between two hosts.

The verified state rate: bytes of device memory a second that leave one process and are in another's
staging memory, hashed on both sides and sealed on the way, over loopback TCP. One process for each
host, each held to one core.

**The limit.** In the same run, just before and just after each transfer, each of the two processes
measures SHA-256 (hashlib), AES-256-GCM (cryptography) and memcpy on its own core, both at the same
time and over the same memory in the same pieces. The limit is the slowest of the three, the slower
core's figure. It is a hard one: each side must hash *and* encrypt *and* copy each byte on its one
core, so nothing that does these one after the other can come closer to it than
1 / (1/SHA-256 + 1/AES-256-GCM + 1/memcpy), which is shown beside it.

Staging memory has its pages already, as it has after a reservation. The 90 % of zero pages lie in
runs of 64 KiB (a heap that is mostly untouched) or at random, page by page.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from uuid import UUID

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from accelvisor.frames.chunks import Kind
from accelvisor.frames.identity import Identity, certificate
from accelvisor.limits import GIB, MIB
from accelvisor.migration.bulk import PIECE_BYTES
from accelvisor.migration.channel import Channel
from accelvisor.migration.receiver import Receiver
from accelvisor.migration.records import RECORD_BYTES
from accelvisor.migration.sender import Sender
from accelvisor.migration.tls import Credentials, Pin, Pins
from benchmarks.record import Goal, Record, Sample, compare

GROUP = "migration"
SIZE = 256 * MIB
_YEARS_NS = 200 * 365 * 86_400 * 10**9
_LONG_S = 120.0


@dataclass(frozen=True)
class Limits:
    """GiB/s on one core."""

    sha256: float
    aes_gcm: float
    memcpy: float

    @property
    def slowest(self) -> float:
        return min(self.sha256, self.aes_gcm, self.memcpy)

    @property
    def bound(self) -> float:
        return 1 / (1 / self.sha256 + 1 / self.aes_gcm + 1 / self.memcpy)


def run(quick: bool) -> Iterator[Record]:
    repeats = 3 if quick else 9
    rng = np.random.default_rng(1)
    random = np.frombuffer(bytearray(os.urandom(SIZE)), np.uint8)
    runs = random.copy()
    runs.reshape(-1, 16, mmap.PAGESIZE)[rng.random(SIZE // mmap.PAGESIZE // 16) < 0.9] = 0
    pages = random.copy()
    pages.reshape(-1, mmap.PAGESIZE)[rng.random(SIZE // mmap.PAGESIZE) < 0.9] = 0
    yield from rates("256 MiB of random data", random, repeats, Goal(at_least=0.8))
    yield from rates("90 % zero pages in runs", runs, repeats, Goal(at_least=0.8))
    yield from rates("90 % zero pages at random", pages, repeats, Goal(at_least=0.8))


def rates(name: str, data: npt.NDArray[np.uint8], repeats: int, goal: Goal) -> Iterator[Record]:
    """Two records: against the slowest, and against what one core can do of all three."""
    moved, slowest, bounds = _measure(data, repeats)
    yield compare(
        GROUP, f"verified state rate, {name}", moved, "GiB/s", threads=1,
        against=("slowest of SHA-256, AES-GCM, memcpy", slowest), goal=goal,
    )  # fmt: skip
    yield compare(
        GROUP, f"the same, {name}", moved, "GiB/s", threads=1,
        against=("SHA-256, then AES-GCM, then memcpy", bounds),
    )  # fmt: skip


def _measure(data: npt.NDArray[np.uint8], repeats: int) -> tuple[Sample, Sample, Sample]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    near, far = _credentials()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = context.Process(target=_destination, args=(theirs, listener, far, repeats + 1))
        process.start()
        before = os.sched_getaffinity(0)
        _pin(0)
        try:
            sock = socket.create_connection(listener.getsockname())
            sender = Sender()
            sender.attach([Channel(sock, near, server=False, clock=time.monotonic)])
            _turn(ours, sender, data)  # once to warm up
            turns = [_turn(ours, sender, data) for _ in range(repeats)]
            sender.close()
        finally:
            os.sched_setaffinity(0, before)
            ours.close()
            process.join()
    return tuple(Sample(values) for values in zip(*turns, strict=True))  # type: ignore[return-value]


def _pin(number: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _turn(
    pipe: Connection, sender: Sender, data: npt.NDArray[np.uint8]
) -> tuple[float, float, float]:
    """Limits, a round of the whole state, limits again: GiB/s moved, of the slowest, of all three.

    Of the two cores the slower one counts, and of before and after the mean.
    """
    limits = [_limits_of_both(pipe, data)]
    began = time.perf_counter()
    sender.send(Kind.MEMORY, 0, memoryview(data), frozen=True)
    leaves = sender.end_round()
    took = time.perf_counter() - began
    limits.append(_limits_of_both(pipe, data))
    if hashlib.sha256(b"".join(leaves)).digest() != pipe.recv():
        raise RuntimeError("the two sides have other leaves")
    slowest = sum(min(each.slowest for each in pair) for pair in limits) / 2
    bound = sum(min(each.bound for each in pair) for pair in limits) / 2
    return SIZE / took / GIB, slowest, bound


def _destination(pipe: Connection, listener: socket.socket, far: Credentials, turns: int) -> None:
    _pin(1)
    memory = mmap.mmap(-1, SIZE)
    staging = np.frombuffer(memory, np.uint8)
    staging[:] = 1  # has its pages
    staging[:] = 0
    sock, _ = listener.accept()
    receiver = Receiver({Kind.MEMORY: memoryview(memory)})
    receiver.attach([Channel(sock, far, server=True, clock=time.monotonic)])
    for _ in range(turns):
        for after in (False, True):
            pipe.recv()
            pipe.send(measure_limits(staging))
            if not after:
                leaves = receiver.wait_round(_LONG_S).leaves
        pipe.send(hashlib.sha256(b"".join(leaves)).digest())
    receiver.close()


def _limits_of_both(pipe: Connection, data: npt.NDArray[np.uint8]) -> tuple[Limits, Limits]:
    pipe.send("limits")
    mine = measure_limits(data)
    return mine, pipe.recv()


def measure_limits(data: npt.NDArray[np.uint8]) -> Limits:
    """Of this process's core, over 64 MiB of ``data``."""
    view = memoryview(data)[: 64 * MIB]
    pieces = [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]
    records = [view[at : at + RECORD_BYTES] for at in range(0, len(view), RECORD_BYTES)]
    cipher, nonce = AESGCM(bytes(32)), bytes(12)
    sealed = memoryview(bytearray(RECORD_BYTES + 16))
    copied = np.empty(len(view), np.uint8)
    copied[:] = 0

    def sha256() -> None:
        for piece in pieces:
            hashlib.sha256(piece).digest()

    def aes_gcm() -> None:
        into = getattr(cipher, "encrypt_into", None)
        for record in records:
            if into is None:
                cipher.encrypt(nonce, record, None)
            else:
                into(nonce, record, None, sealed)

    def memcpy() -> None:
        np.copyto(copied, np.frombuffer(view, np.uint8))

    figures = []
    for each in (sha256, aes_gcm, memcpy):
        began = time.perf_counter()
        each()
        figures.append(len(view) / (time.perf_counter() - began) / GIB)
    return Limits(*figures)


def _credentials() -> tuple[Credentials, Credentials]:
    hosts = [(UUID(int=number), Identity.generate(os.urandom)) for number in (1, 2)]
    pins = Pins(Pin(uuid, identity.public) for uuid, identity in hosts)
    near, far = (
        Credentials(
            uuid,
            identity,
            certificate(identity, uuid, serial=1, not_before_ns=0, not_after_ns=_YEARS_NS),
            pins,
        )
        for uuid, identity in hosts
    )
    return near, far
