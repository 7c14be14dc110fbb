"""The host port: bytes wait for their turn, and nobody else does."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import Memory, Query, Space, Transfer
from accelvisor.abi.dtypes import DType
from accelvisor.abi.registers import QueueControl, QueueReg, QueueStatus
from accelvisor.errors import UsageError
from accelvisor.function import state as s
from accelvisor.function.port import Port
from accelvisor.limits import KIB, LIMITS, MIB
from tests.function.harness import Guest, Local, Process, Ring, call, sgd, wait_for
from tests.function.test_steps import REMOTE, Client, begin_copy, two

#: So slow that whatever waits for it waits for the length of the test.
SLOW = 1 * KIB


def counter(local: Local, name: str) -> int:
    return local.state.u64[s.K[name]]


def opened(local: Local, index: int = 0) -> Ring:
    ring = local.ring(index)
    ring.open()
    return ring


def pending_copy(local: Local, ring: Ring, nbytes: int = MIB) -> None:
    """A copy that waits at its port."""
    tensor = ring.ok(abi.tensor_create, DType.UINT8, (nbytes,))
    ring.post(abi.copy_in(ring.next_cookie(), tensor, 0, local.buffer(bytes(nbytes)).whole(nbytes)))
    ring.submit()
    wait_for(lambda: local.device.frontend.lanes[ring.index].blocked, "the copy to wait")


# --- how fast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["guest", "window", "scattered", "by message"])
@pytest.mark.parametrize("out", [False, True])
def test_every_way_of_a_copy_keeps_to_the_rate(local: Local, space: str, out: bool) -> None:
    ring, nbytes = opened(local), 512 * KIB
    tensor = ring.ok(abi.tensor_create, DType.UINT8, (nbytes,))
    where = {
        "guest": Memory(Space.GUEST, 0, Local.RAM, nbytes, 0),
        "window": Memory(Space.WINDOW, 0, local.spec.layout.staging, nbytes, 0),
    }
    if space == "scattered":
        parts = [(Local.RAM + n * 64 * KIB, 32 * KIB) for n in range(nbytes // (32 * KIB))]
        listed = local.buffer(b"".join(abi.SEGMENT.pack(*part) for part in parts))
        where[space] = Memory(Space.GUEST, Transfer.SCATTER, listed.address, nbytes, len(parts))
    if space == "by message":
        client = Client(local)
        where[space] = Memory(Space.GUEST, 0, REMOTE, nbytes, 0)
    rate = 2 * MIB
    local.device.port.set_rate(rate)
    began, passed = time.monotonic(), counter(local, "port_bytes")
    build = abi.copy_out if out else abi.copy_in
    ring.post(build(ring.next_cookie(), tensor, 0, where[space]))
    ring.submit()
    if space == "by message":
        for number in range(-(-nbytes // local.device.port.step)):
            client.answer(number)
    local.wait(ring.ready)
    assert ring.take().status == 0
    seconds, listed_bytes = time.monotonic() - began, 256 if space == "scattered" else 0
    assert counter(local, "port_bytes") - passed == nbytes + listed_bytes
    # The last step goes when what came before is paid, less what may go without a sleep.
    assert seconds >= (nbytes - 2 * 0.021 * rate) / rate
    assert seconds < 5.0  # at the rate: a quarter of a second
    assert counter(local, "port_waits") > 0
    assert 0 < counter(local, "port_wait_us") <= seconds * 1e6


def test_many_small_copies_get_the_rate_and_no_more(local: Local) -> None:
    """Short waits are not slept one by one: that would cost more time than it saves."""
    ring, rate, each, batches = opened(local), 1 * MIB, 256, 64
    tensor = ring.ok(abi.tensor_create, DType.UINT8, (each,))
    buffer = local.buffer(bytes(each))
    local.device.port.set_rate(rate)
    began = time.monotonic()
    for _ in range(batches):
        for _ in range(32):
            ring.post(abi.copy_in(ring.next_cookie(), tensor, 0, buffer.whole(each)))
        ring.submit()
        local.wait(lambda: ring.ready() == 32)
        assert not any(ring.take().status for _ in range(32))
    measured = batches * 32 * each / (time.monotonic() - began)
    assert 0.3 * rate < measured < 1.1 * rate
    assert 0 < counter(local, "port_waits") < batches * 32 / 3


def test_programs_bindings_and_answers_pass_the_port(local: Local) -> None:
    ring = opened(local)
    x, y = (ring.tensor(np.ones(64, np.float32)) for _ in range(2))
    local.device.port.set_rate(64 * MIB)
    for act in (
        lambda: ring.load(sgd(64)),
        lambda: ring.launch(ring.load(sgd(64)), x, y),
        lambda: ring.query(Query.INFO),
    ):
        before = counter(local, "port_bytes")
        act()
        assert counter(local, "port_bytes") > before


def test_without_a_limit_nothing_waits(local: Local) -> None:
    ring = opened(local)
    ring.write(ring.tensor(np.zeros(MIB, np.uint8)), np.ones(MIB, np.uint8))
    assert counter(local, "port_bytes") == 2 * MIB
    assert counter(local, "port_waits") == counter(local, "port_wait_us") == 0


# --- what it does not change ----------------------------------------------------------------------


def test_results_and_model_clock_do_not_depend_on_the_rate() -> None:
    def run(rate: int) -> tuple[bytes, int, str]:
        with Local() as local:
            ring = opened(local)
            local.device.port.set_rate(rate)
            rng = np.random.default_rng(3)
            weights = ring.tensor(rng.random(50_000, np.float32))
            step = ring.tensor(rng.random(50_000, np.float32))
            program = ring.load(sgd(50_000))
            assert ring.launch(program, weights, step, repeat=5).status == 0
            result = ring.read(weights, "float32", (50_000,)).tobytes()
            return result, local.device.registers.model_clock(), local.state.digest()

    assert run(0) == run(1 * MIB)


# --- who does not wait ----------------------------------------------------------------------------


def test_other_queues_freezes_and_resets_do_not_wait_for_the_port(local: Local) -> None:
    stuck, other = two(local)
    local.device.port.set_rate(SLOW)
    pending_copy(local, stuck)
    began = time.monotonic()
    for n in range(100):
        assert other.run(abi.nop(n)).cookie == n
    local.device.engine.freeze(s.FREEZE_CONTROL, 5.0)
    local.device.engine.thaw(s.FREEZE_CONTROL)
    assert not stuck.ready()
    local.device.function_reset()
    assert time.monotonic() - began < 1.0


def test_a_queue_is_disabled_while_its_copy_waits(local: Local) -> None:
    ring = opened(local)
    local.device.port.set_rate(SLOW)
    pending_copy(local, ring)
    began = time.monotonic()
    ring.set(QueueControl.DISABLE, QueueStatus.DISABLED)
    assert time.monotonic() - began < 1.0


def test_what_is_aborted_leaves_only_a_short_debt(local: Local) -> None:
    """A program's bytes move together, but a queue that is closed owes one step of them at most."""
    ring, rate = opened(local), 256 * KIB
    local.device.port.set_rate(rate)
    ring.post(abi.program_load(1, local.buffer(bytes(MIB)).whole(MIB)))
    ring.submit()
    wait_for(lambda: local.device.frontend.lanes[0].blocked, "the program to wait")
    ring.set(QueueControl.DISABLE, QueueStatus.DISABLED)
    port = local.device.port
    assert port.left(port.bucket.taken) <= 2 * port.step / rate


def test_a_sleep_ends_when_the_bytes_may_go(local: Local) -> None:
    """Not at the next of the looks that the engine takes at whatever else is waited for."""
    ring, rate = opened(local), 1 * MIB
    tensor = ring.ok(abi.tensor_create, DType.UINT8, (8 * KIB,))
    buffer = local.buffer(bytes(8 * KIB))
    local.device.port.set_rate(rate)
    ends = []
    for _ in range(40):
        ring.ok(abi.copy_in, tensor, 0, buffer.whole(8 * KIB))
        ends.append(time.monotonic())
    pauses = sorted(b - a for a, b in pairwise(ends[5:]))
    assert pauses[len(pauses) // 2] < 0.045


def test_one_that_waits_for_its_client_does_not_delay_the_port(local: Local) -> None:
    far, near = two(local)
    client = Client(local)
    begin_copy(far, 64 * KIB)
    wait_for(lambda: client.asked, "a DMA request")
    local.device.port.set_rate(1 * MIB)
    began = time.monotonic()
    near.write(near.tensor(np.zeros(64 * KIB, np.uint8)), np.ones(64 * KIB, np.uint8))
    assert time.monotonic() - began < 1.0
    client.answer(0)
    local.wait(far.ready)


# --- the rate changes -----------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0, 64 * MIB])
def test_what_waits_goes_on_when_the_rate_rises(local: Local, rate: int) -> None:
    ring = opened(local)
    local.device.port.set_rate(SLOW)
    pending_copy(local, ring)
    local.device.port.set_rate(rate)
    local.wait(ring.ready, 5.0)
    assert ring.take().status == 0


def test_a_successor_begins_with_the_same_rate(local: Local) -> None:
    ring = opened(local)
    local.device.port.set_rate(SLOW)
    pending_copy(local, ring)
    local.restart()
    assert local.device.port.limited
    assert local.device.port.bucket.rate == SLOW
    wait_for(lambda: local.device.frontend.lanes[0].blocked, "the copy to wait again")
    local.device.port.set_rate(0)
    local.wait(ring.ready)
    assert ring.take().status == 0


def test_a_rate_out_of_this_world_is_refused(local: Local) -> None:
    for rate in (-1, LIMITS.port_rate_bytes + 1):
        with pytest.raises(UsageError):
            local.device.port.set_rate(rate)
    assert local.state.u64[s.W_PORT_RATE] == 0
    local.state.u64[s.W_PORT_RATE] = 1 << 63
    assert Port(local.state).bucket.rate == LIMITS.port_rate_bytes


def test_the_daemon_reads_in_the_state_who_has_used_up_its_rate(local: Local) -> None:
    ring = opened(local)
    assert local.state.u64[s.W_PORT_UNTIL] == 0
    local.device.port.set_rate(SLOW)
    pending_copy(local, ring)
    assert local.state.u64[s.W_PORT_UNTIL] > time.monotonic_ns()


def test_the_control_method_sets_the_rate(process: Process, guest: Guest) -> None:
    ring = guest.ring()
    ring.open()
    assert call(process.spec.control_socket, "port", {"rate": 4 * MIB}) == {"rate": 4 * MIB}
    try:
        began = time.monotonic()
        ring.tensor(np.zeros(MIB, np.uint8))
        assert time.monotonic() - began > 0.15
        told = process.control("statistics")
        assert told["port_bytes"] >= MIB
        assert told["port_waits"] > 0
        assert ring.register(QueueReg.STATUS) == QueueStatus.ENABLED
    finally:
        call(process.spec.control_socket, "port", {"rate": 0})
    for rate in (-1, 1 << 70, 1.5, "fast"):
        with pytest.raises(AssertionError, match="usage"):
            call(process.spec.control_socket, "port", {"rate": rate})
