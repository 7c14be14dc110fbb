"""A function that changes its memory faster than it can be sent: slowed down, moved, at full speed
again; nothing of what it computed is lost.
"""

from __future__ import annotations

import threading

import numpy as np

from accelvisor.embedded.host import EmbeddedHost, free_port, join
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.guest.function import Function
from accelvisor.limits import MIB

from .moving import config, two_hosts, wait_for

#: Each pass over them rewrites 2 MiB.
N = 512 * 1024
TINY_BYTES = 8 * MIB
SLOW = 'rate = "5MiB"\nstreams = 1\nfirst_pass_s = 0\n'


class Writer(threading.Thread):
    """Rewrites the same tensor of ``count`` numbers without a pause."""

    def __init__(self, vm: EmbeddedVm, count: int = N) -> None:
        super().__init__(daemon=True)
        self._vm = vm
        with vm.cpu:
            self.function = Function(vm.transport())
            numbers = np.random.default_rng(1).standard_normal(count).astype(np.float32)
            self.x = self.function.tensor(numbers)
            self.y = self.function.empty((count,))
        self.passes = 0
        self.ended = threading.Event()

    def run(self) -> None:
        """The values change with each pass, and are of a size that never ends."""
        while not self.ended.is_set():
            with self._vm.cpu:
                self.function.ops.mul(self.x, self.x, out=self.y)
                self.function.ops.sub(self.y, self.x, out=self.y)
                self.passes += 1


def test_a_function_that_outruns_the_link_is_slowed_down_and_moves() -> None:
    hosts = [
        EmbeddedHost(SLOW + config(name), listen=f"127.0.0.1:{free_port()}") for name in "ab"
    ]
    with hosts[0] as a, hosts[1] as b:
        join(a, b)
        vm = EmbeddedVm(a, [a.create("tiny")["uuid"]])
        writer = Writer(vm)
        before = writer.x.numpy()
        writer.start()
        vm.migrate(
            b, before_stop=lambda: wait_for(lambda: "get 50 %" in a.log(), "it to be throttled")
        )
        passes = writer.passes
        wait_for(lambda: writer.passes > passes + 10, "it to go on at the other host")
        writer.ended.set()
        writer.join(30)
        with vm.cpu:
            assert (writer.y.numpy() == before * before - before).all()
        with a.admin() as admin:
            wait_for(lambda: admin.call("ListMigrations")["migrations"][0]["over"], "its end")
            (moved,) = admin.call("ListMigrations")["migrations"]
        assert moved["outcome"] == "moved"
        assert moved["numbers"]["throttle"] < 100
        assert moved["numbers"]["downtime"] is not None
        vm.close()


def test_only_what_was_written_is_copied_while_the_vm_stands_still() -> None:
    """5 % of the memory is written all the time: at most 10 % of it is left for the end."""
    with two_hosts() as (a, b):
        vm = EmbeddedVm(a, [a.create("tiny")["uuid"]])
        writer = Writer(vm, TINY_BYTES // 20 // 4)
        with vm.cpu:
            kept = [writer.function.tensor(writer.x.numpy()) for _ in range(12)]
        writer.start()
        vm.migrate(b)
        writer.ended.set()
        writer.join(30)
        with a.admin() as admin:
            (moved,) = admin.call("ListMigrations")["migrations"]
        sent = moved["numbers"]["last_round_bytes"]
        assert TINY_BYTES // 20 <= sent <= TINY_BYTES // 10
        assert moved["numbers"]["sent_bytes"] > len(kept) * TINY_BYTES // 20
        vm.close()
