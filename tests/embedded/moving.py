"""Two hosts that trust each other, and a guest whose work shows whether a move changed anything."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from accelvisor.abi import commands
from accelvisor.abi.commands import Flag
from accelvisor.embedded.host import EmbeddedHost, free_port, join
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.guest import nn
from accelvisor.guest.function import Function
from accelvisor.guest.waiting import WaitPolicy
from accelvisor.limits import MIB

RAM = 4 * MIB
#: Small, so that a move costs little but what it always costs.
TINY = """
[profiles.tiny]
memory = "8MiB"
window = "1MiB"
queues = 2
ring_entries = 64
"""
_PATIENCE_S = 60.0


def config(name: str, more: str = "") -> str:
    return f'[libvirt]\nuri = ""\n[host]\nname = "{name}"\n{more}{TINY}'


@contextmanager
def two_hosts(more: str = "") -> Iterator[tuple[EmbeddedHost, EmbeddedHost]]:
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(
                EmbeddedHost(config(name, more), listen=f"127.0.0.1:{free_port()}")
            )
            for name in "ab"
        )
        join(a, b)
        yield a, b


def wait_for(condition: Callable[[], object], what: str, patience_s: float = _PATIENCE_S) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.0005)


class Vcpu:
    """A transport whose user computes only while it has the VM's CPU, as a guest does: it gives it
    away wherever it waits, so a move may stop it in the middle of anything.
    """

    def __init__(self, transport: Any, cpu: threading.RLock) -> None:
        self._transport = transport
        self._cpu = cpu
        #: How often it has waited.
        self.ticks = 0
        self.raised = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def nap(self, seconds: float) -> None:
        self.ticks += 1
        self._cpu.release()
        try:
            time.sleep(seconds)
        finally:
            self._cpu.acquire()

    def wait_interrupt(self, timeout_s: float) -> bool:
        """Never without one: the guest below waits for none that is not on its way."""
        end = time.monotonic() + timeout_s
        while not self._transport.wait_interrupt(0):
            if time.monotonic() > end:
                raise TimeoutError("an interrupt was lost")
            self.nap(0.0002)
        self.raised += 1
        return True


class Work:
    """Rounds of work on one function; each ends with a digest over all that was read so far.

    A round copies in by DMA, trains a network for a few steps, runs a program that takes longer
    than a tile, calls instructions one by one, counts itself on the device, and copies out by DMA.
    """

    SAMPLES, BATCH, STEPS, N = 256, 32, 3, 320

    def __init__(self, transport: Any, cpu: threading.RLock) -> None:
        self.vcpu = Vcpu(transport, cpu)
        # An interrupt that does not come is never made up for by looking.
        policy = WaitPolicy(spin_s=0.0, interrupt_s=30.0)
        self.function = fn = Function(
            self.vcpu, policy=policy, sleep=self.vcpu.nap, timeout_s=_PATIENCE_S
        )
        self.digests: list[str] = []
        self.doing = "nothing"
        random = np.random.RandomState(5)
        network = nn.Sequential((24, 32, 10))
        step = nn.training_step(fn, network, self.BATCH, self.SAMPLES, 0.05)
        data = fn.tensor(random.standard_normal((self.SAMPLES, 24)).astype(np.float32))
        labels = fn.tensor(random.randint(0, 10, self.SAMPLES).astype(np.int64))
        self.weights = [fn.tensor(w) for w in network.initial(1)]
        self.rows = fn.empty((self.STEPS, self.BATCH), "int64")
        self.losses = fn.empty((self.STEPS,))
        self.runs = [
            step.bind(data, labels, self.rows[i], *self.weights, out=self.losses[i])
            for i in range(self.STEPS)
        ]
        n = self.N
        with fn.program("long") as p:
            x = p.input((n, n))
            y = p.call("matmul", p.call("tanh", p.call("matmul", x, x)), x)
            p.output(p.call("tanh", p.call("matmul", y, x)))
        self.x, self.y = fn.empty((n, n)), fn.empty((n, n))
        self.long = p.bind(self.x, out=self.y)
        self.long()  # so that it is known to take long enough for an interrupt
        self.near = fn.pinned((n, n)).array
        self.counter = fn.zeros((1,))
        self.one = fn.ones((1,))
        self._seen = hashlib.sha256()

    def round(self) -> None:
        """One round; holds the CPU but where it waits."""
        number = len(self.digests)
        near = self.near
        near[:] = np.random.RandomState(number).standard_normal(near.shape) / self.N**0.5
        self.doing = "copy in"
        self.x.copy_(near)
        self.doing = "copies"
        random = np.random.RandomState(1000 + number)
        self.rows.copy_(random.randint(0, self.SAMPLES, (self.STEPS, self.BATCH)))
        self.doing = "kernels"
        with self.function.queue.batch():
            launches = [run.launch() for run in self.runs]
            launches.append(self.long.launch(2))
        self.function.ops.add(self.counter, self.one, out=self.counter)
        cookie = self.function.queue.submit(commands.nop(0, Flag.INTERRUPT))
        self.function.check(self.function.queue.wait(cookie, interrupt=True))
        for launch in launches:
            launch.result()
        self.doing = "copy out"
        self.y.numpy(out=near)
        self._seen.update(near)
        self.doing = "copies"
        for tensor in (self.losses, self.counter, *self.weights):
            self._seen.update(tensor.numpy())
        self.doing = "nothing"
        self.digests.append(self._seen.hexdigest())

    def counts(self) -> tuple[int, int]:
        """Rounds that the device has counted, and completions that nobody waits for: as many as
        there were and none, when nothing was lost and nothing done or told twice.
        """
        return int(self.counter.numpy()[0]), len(self.function.queue._done)


class Guest:
    """Work in a thread of its own, while it is wanted.

    Args:
        function: which of the VM's.
    """

    def __init__(self, vm: EmbeddedVm, function: str | None = None) -> None:
        self.vm = vm
        with vm.cpu:
            self.work = Work(vm.transport(function), vm.cpu)
        self.go = threading.Event()
        self._ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self.go.wait()
                if self._ended:
                    return
                with self.vm.cpu:
                    self.work.round()
        except BaseException as error:
            self.error = error

    @property
    def ticks(self) -> int:
        return self.work.vcpu.ticks

    def wait_ticks(self, count: int) -> None:
        """Until the guest has waited so many times more, wherever that is."""
        wanted = self.ticks + count
        wait_for(lambda: self.ticks >= wanted or self.error, "the guest stands still")

    def wait_rounds(self, count: int = 1) -> None:
        """Until it has done more rounds."""
        wanted = len(self.work.digests) + count
        wait_for(
            lambda: len(self.work.digests) >= wanted or self.error, "the guest stands still"
        )
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def finish(self) -> list[str]:
        """Let the round end, and no other begin; the digests of all."""
        self._ended = True
        self.go.set()
        self._thread.join(_PATIENCE_S)
        self.check()
        return self.work.digests


def unmoved(host: EmbeddedHost, rounds: int) -> list[str]:
    """What so many rounds give on a function that stays."""
    function = host.create("tiny")
    cpu = threading.RLock()
    with cpu:
        work = Work(host.connect(function, ram_bytes=RAM), cpu)
        for _ in range(rounds):
            work.round()
        work.function.close()
    host.delete(function["uuid"])
    return work.digests
