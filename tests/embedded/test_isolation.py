"""A VM whose function changes under it, with real processes: same bits, named ends, no neighbour
that notices.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accelvisor.abi.registers import Reg
from accelvisor.embedded.host import EmbeddedHost
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.errors import AccelvisorError
from accelvisor.guest.errors import DeviceRevoked
from accelvisor.guest.function import Function
from accelvisor.limits import MIB

from .moving import RAM, Guest, config, two_hosts, unmoved


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[EmbeddedHost, EmbeddedHost]]:
    with two_hosts() as pair:
        yield pair


def resize(host: EmbeddedHost, function: str, **size: Any) -> dict[str, Any]:
    with host.admin() as admin:
        return dict(admin.call("ResizeFunction", {"function": function, **size}))


def test_a_computation_that_is_resized_and_moved_has_the_bits_of_one_that_was_not(
    hosts: tuple[EmbeddedHost, EmbeddedHost],
) -> None:
    first, second = hosts
    function = first.create("tiny")["uuid"]
    vm = EmbeddedVm(first, [function], ram_bytes=RAM)
    try:
        guest = Guest(vm)
        guest.go.set()
        epochs = [0]
        for cores, memory in ((2, 16 * MIB), (1, 6 * MIB), (4, 64 * MIB)):
            guest.wait_rounds(1)
            changed = resize(first, function, cores=cores, memory_bytes=memory)["function"]
            assert (changed["cores"], changed["memory_bytes"]) == (cores, memory)
            epochs.append(changed["epoch"])
        vm.migrate(second)
        guest.wait_rounds(1)
        for cores in (1, 3):
            changed = resize(second, function, cores=cores)["function"]
            epochs.append(changed["epoch"])
            guest.wait_rounds(1)
        vm.migrate(first)
        guest.wait_rounds(1)
        digests = guest.finish()
        assert epochs == sorted(set(epochs)), "an epoch only grows, also from host to host"
        with vm.cpu:
            assert guest.work.counts() == (len(digests), 0)
    finally:
        vm.close()
    assert digests == unmoved(first, len(digests))


def test_resizing_one_changes_nothing_of_another(
    hosts: tuple[EmbeddedHost, EmbeddedHost],
) -> None:
    """Outputs and model clock of the neighbour, cycle by cycle."""
    host = hosts[0]
    quiet = _clock(host, lambda: None)
    busy = host.create("tiny")["uuid"]
    stop = threading.Event()

    def again_and_again() -> None:
        cores = 1
        while not stop.is_set():
            cores = cores % 4 + 1
            resize(host, busy, cores=cores, memory_bytes=cores * 8 * MIB)

    thread = threading.Thread(target=again_and_again)
    thread.start()
    try:
        assert _clock(host, lambda: None) == quiet
    finally:
        stop.set()
        thread.join()
        host.delete(busy)


def _clock(host: EmbeddedHost, meanwhile: Any) -> tuple[int, bytes]:
    """Model clock and result of a fixed piece of work on a function of its own."""
    made = host.create("tiny")
    transport = host.connect(made, ram_bytes=RAM)
    with Function(transport, timeout_s=60.0) as fn:
        x = fn.tensor(np.random.RandomState(3).standard_normal((128, 128)).astype(np.float32))
        y = x
        for _ in range(20):
            y = fn.ops.matmul(y, x)
            y = fn.ops.tanh(y)
        meanwhile()
        result = y.numpy().tobytes()
        clock = transport.read64(Reg.MODEL_CLOCK_64)
    host.delete(made["uuid"])
    return clock, result


def test_a_revoked_function_says_so_to_its_guest(
    hosts: tuple[EmbeddedHost, EmbeddedHost],
) -> None:
    host = hosts[0]
    with host.admin() as admin:
        before = admin.call("GetCard", {"card": "card0"})["card"]
    function = host.create("tiny")["uuid"]
    vm = EmbeddedVm(host, [function], ram_bytes=RAM)
    try:
        guest = Guest(vm)
        guest.go.set()
        guest.wait_rounds(1)
        with host.admin() as admin:
            admin.call("RevokeFunction", {"function": function})
            card = admin.call("GetCard", {"card": "card0"})["card"]
        assert (card["cores_free"], card["memory_free"]) == (
            before["cores_free"], before["memory_free"],
        )  # fmt: skip
        with pytest.raises(DeviceRevoked):
            guest.wait_rounds(10)
        with pytest.raises(AccelvisorError) as caught:
            resize(host, function, cores=1)
        assert caught.value.code == "function-revoked"
        with pytest.raises(AccelvisorError) as caught:
            vm.migrate(hosts[1])
        assert caught.value.code == "function-revoked"
    finally:
        vm.close()


def test_memory_that_the_guest_uses_is_not_taken_from_it(
    hosts: tuple[EmbeddedHost, EmbeddedHost],
) -> None:
    host = hosts[0]
    made = host.create("tiny")
    with host.open(made, ram_bytes=RAM) as fn:
        kept = fn.zeros((5 * MIB // 4,))
        with pytest.raises(AccelvisorError) as caught:
            resize(host, made["uuid"], memory_bytes=4 * MIB)
        assert caught.value.code == "memory-in-use"
        kept.copy_(np.ones(kept.shape, np.float32))
        assert kept.numpy().all()
    host.delete(made["uuid"])


def test_the_configuration_decides_who_gets_cpus_of_its_own() -> None:
    more = '[profiles.sure]\nmemory = "8MiB"\nwindow = "1MiB"\nqueues = 2\npolicy = "guaranteed"\n'
    with EmbeddedHost(config("c", more)) as host:
        with host.admin() as admin:
            profiles = {p["name"]: p for p in admin.call("ListProfiles")["profiles"]}
        sure = profiles["sure"]
        assert sure["limited_by"] in (["cpus"], ["cores"])
        if sure["fits"]:
            made = host.create("sure")
            with host.admin() as admin:
                card = admin.call("GetCard", {"card": "card0"})["card"]
            assert len(card["shares"][0]["cpus"]) == 1
            host.delete(made["uuid"])
