"""A function of four chips on two boards: a network trained on all of them, moved in the middle of
its sums.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accelvisor.embedded.host import EmbeddedHost
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.guest import nn
from accelvisor.guest.function import Function
from accelvisor.guest.links import links, switch
from accelvisor.guest.parallel import DataParallel

from .moving import RAM, Vcpu, two_hosts, wait_for

#: Two boards of two chips each, cabled to a ring; as many as there are functions at a time.
PODS = "".join(
    f"""
[cards.pod{n}]
boards = 2
rows = 1
columns = 2
memory = "64MiB"
"""
    for n in range(5)
)
QUAD = """
[profiles.quad]
cores = 4
chips = 4
memory = "32MiB"
window = "1MiB"
queues = 2
ring_entries = 64
links = "ring"
"""
NETWORK = nn.Sequential((48, 64, 48, 10))
SAMPLES, BATCH = 1024, 32


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[EmbeddedHost, EmbeddedHost]]:
    with two_hosts(PODS + QUAD) as pair:
        yield pair


class Trainer:
    """Trains in a thread of its own, with the VM's CPU, until it is told that it was enough.

    Args:
        most: epochs, if that is known beforehand.
    """

    def __init__(
        self, transport: Any, cpu: threading.RLock, compress: bool, most: int = 1_000_000
    ) -> None:
        self.cpu = cpu
        self.vcpu = Vcpu(transport, cpu)
        self.compress = compress
        self.epochs = 0
        self.most = most
        self.bytes: list[list[bytes]] = []
        self.carried: list[tuple[int, int]] = []
        self.kinds: set[str] = set()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def wait(self, epochs: int) -> None:
        """Until so many epochs are done, and the next one is at work on the device."""
        wait_for(lambda: self.epochs >= epochs or self.error, "an epoch")
        ticks = self.vcpu.ticks
        wait_for(lambda: self.vcpu.ticks > ticks + 2 or self.error, "the next one")
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with self.cpu:
                self.train()
        except BaseException as error:
            self.error = error

    def train(self) -> None:
        random = np.random.RandomState(7)
        x = random.standard_normal((SAMPLES, 48)).astype(np.float32)
        labels = random.randint(0, 10, SAMPLES)
        with Function(self.vcpu, sleep=self.vcpu.nap, timeout_s=120.0) as fn:
            switch(fn, True)
            with DataParallel(
                fn, NETWORK, x, labels, NETWORK.initial(3), chips=4, batch=BATCH, rate=0.05,
                compress=self.compress,
            ) as job:  # fmt: skip
                while self.epochs < self.most:
                    job.epoch(nn.order(SAMPLES, BATCH, self.epochs, seed=1))
                    self.epochs += 1
                self.bytes = [[w.tobytes() for w in job.parameters(chip)] for chip in range(4)]
                self.kinds = {link.kind for link in links(fn) if link.transfers}
                self.carried = [(link.bytes, link.transfers) for link in links(fn)]


def trained(host: EmbeddedHost, compress: bool, epochs: int) -> Trainer:
    """On a function that stays where it is."""
    made = host.create("quad")
    cpu = threading.RLock()
    trainer = Trainer(host.connect(made, ram_bytes=RAM), cpu, compress, epochs)
    with cpu:
        trainer.train()
    host.delete(made["uuid"])
    return trainer


@pytest.mark.parametrize("compress", [False, True])
def test_a_network_on_four_chips_is_moved_in_the_middle_of_its_sums(
    hosts: tuple[EmbeddedHost, EmbeddedHost], compress: bool
) -> None:
    first, second = hosts
    function = first.create("quad")["uuid"]
    vm = EmbeddedVm(first, [function], ram_bytes=RAM)
    try:
        trainer = Trainer(vm.transport(), vm.cpu, compress)
        trainer.thread.start()
        for epochs, target in ((1, second), (2, first)):
            trainer.wait(epochs)
            vm.migrate(target)
        trainer.most = trainer.epochs + 1
        trainer.thread.join(120)
        if trainer.error is not None:
            raise trainer.error
    finally:
        vm.close()
    expected = trained(first, compress, trainer.epochs)
    assert trainer.bytes == expected.bytes
    assert all(chip == trainer.bytes[0] for chip in trainer.bytes)
    assert trainer.carried == expected.carried, "a message was lost, or came twice"
    assert sum(transfers for _, transfers in trainer.carried) > 1000
    assert trainer.kinds == {"inter-chip", "inter-card"}


def test_streams_on_chips_go_on_elsewhere(hosts: tuple[EmbeddedHost, EmbeddedHost]) -> None:
    """Commands that are not ordered: running, waiting for others, and in the ring."""
    first, second = hosts
    function = first.create("quad")["uuid"]
    vm = EmbeddedVm(first, [function], ram_bytes=RAM)
    try:
        with vm.cpu:
            vcpu = Vcpu(vm.transport(), vm.cpu)
            fn = Function(vcpu, sleep=vcpu.nap, timeout_s=120.0)
            n = 20_000
            with fn.program("add") as p:
                x, y = p.input((n,)), p.parameter((n,))
                p.call("add", y, x, out=y)
            one = fn.ones((n,))
            sums = [fn.zeros((n,)) for _ in range(4)]
            launches = []
            for chip, total in enumerate(sums):
                stream = fn.stream(chip)
                for repeat in (400, 3, 200, 5):
                    launches.append(stream.run(p, one, total, repeat=repeat))
        vm.migrate(second)
        vm.migrate(first)
        with vm.cpu:
            for launch in launches:
                launch.result()
            assert [float(total.numpy()[0]) for total in sums] == [608.0] * 4
            assert fn.queue.in_flight == 0
            fn.close()
    finally:
        vm.close()
