"""A guest that attacks its own device: whatever it writes into its rings, lists, programs and
registers, and whenever, the worker goes on, says what was wrong, and touches nothing but its own.

Every test ends with the same question (``unharmed``): the same worker still computes, correctly.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import Space, Transfer
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot, encode
from accelvisor.abi.registers import (
    BAR0_BYTES,
    CQ_HEAD,
    SQ_TAIL,
    Control,
    Interrupt,
    QueueControl,
    QueueReg,
    QueueStatus,
    Reg,
    Status,
)
from accelvisor.abi.status import CommandStatus
from accelvisor.limits import LIMITS, MIB
from tests.function.harness import Guest, Process, operation, running, wait_for

U64 = 2**64
#: How long a storm lasts (seconds): thousands of accesses.
STORM_S = 0.6


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with running(queues=4, memory_bytes=16 * MIB) as started:
        yield started


@pytest.fixture
def guest(process: Process) -> Iterator[Guest]:
    restarts = process.holder("status")["worker_restarts"]
    with Guest(process) as connected:
        yield connected
        unharmed(connected)
    assert process.holder("status")["worker_restarts"] == restarts, "a worker died"


def unharmed(guest: Guest) -> None:
    """After a reset the same worker computes what it should."""
    guest.write32(Reg.CONTROL, int(Control.RESET))
    guest.client.region_write(7, 0x04, b"\x06\x00")  # a reset of the device switched DMA off
    ring = guest.ring(3)
    ring.open("check")
    x = np.arange(1000, dtype=np.float32)
    handle = ring.tensor(x)
    program = ring.load(doubled(1000))
    assert ring.launch(program, handle, handle).status == 0
    assert np.array_equal(ring.read(handle, "float32", (1000,)), x + x)


def doubled(n: int) -> Program:
    slots = (Slot(DType.FLOAT32, (n,), Role.INPUT), Slot(DType.FLOAT32, (n,), Role.OUTPUT))
    return Program(slots, (operation("add", 0, 0, 1),))


@contextmanager
def meanwhile(attack: Callable[[], None]) -> Iterator[None]:
    """``attack`` again and again beside what is tested, as another vCPU would."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                attack()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed


# --- numbers that do not fit ----------------------------------------------------------------------

#: 2**32 is where the guest's memory begins.
HUGE = (0, 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**63, U64 - 4096, U64 - 1)


@pytest.mark.parametrize("length", [1, 4096, 2**32, 2**63, U64 - 1])
def test_addresses_that_wrap_around_reach_nothing(guest: Guest, length: int) -> None:
    for address in HUGE:
        guest.write32(Reg.CONTROL, int(Control.RESET))  # faults in a row would do so in the middle
        for space in (Space.GUEST, Space.WINDOW):
            ring = guest.ring()
            ring.open()
            handle = ring.ok(abi.tensor_create, DType.UINT8, (4096,))
            for build in (abi.copy_in, abi.copy_out):
                done = ring.do(build, handle, 0, abi.Memory(space, 0, address, length, 0))
                assert done.status, (space, hex(address), length)


def test_offsets_that_wrap_around_stay_in_the_tensor(guest: Guest) -> None:
    ring = guest.ring()
    ring.open()
    first = ring.tensor(np.full(4096, 7, np.uint8))
    handle = ring.ok(abi.tensor_create, DType.UINT8, (4096,))
    near = guest.buffer(b"\xff" * 8192)
    for offset in HUGE[1:]:
        for length in (1, 4095, 4096, 8192):
            where = near.whole(length)
            done = ring.do(abi.copy_in, handle, offset, where)
            if offset + length > 4096:
                assert done.status == CommandStatus.BUFFER_TOO_SMALL
    assert np.array_equal(ring.read(first, "uint8", (4096,)), np.full(4096, 7, np.uint8))


@pytest.mark.parametrize(
    "dims",
    [(2**31, 2**31, 2**31), (2**32 - 1,) * 8, (0, 2**32 - 1), (2**32 - 1, 0), (2**20,) * 4],
)
def test_shapes_whose_size_wraps_around_are_no_small_tensors(
    guest: Guest, dims: tuple[int, ...]
) -> None:
    ring = guest.ring()
    ring.open()
    done = ring.do(abi.tensor_create, DType.FLOAT64, dims)
    if 0 in dims:
        assert done.status == 0, "it is empty, whatever the other dimension"
    else:
        assert done.status in (CommandStatus.LIMIT, CommandStatus.OUT_OF_MEMORY)


# --- lists and programs ---------------------------------------------------------------------------


def scattered(guest: Guest, segments: list[tuple[int, int]], total: int) -> abi.Memory:
    raw = b"".join(abi.SEGMENT.pack(*segment) for segment in segments)
    table = guest.buffer(raw)
    return abi.Memory(Space.GUEST, Transfer.SCATTER, table.address, total, len(segments))


def test_a_scatter_list_may_overlap_itself(guest: Guest) -> None:
    """In order, as its segments say; the last write counts."""
    ring = guest.ring()
    ring.open()
    data = np.arange(8192, dtype=np.int64).astype(np.uint8)
    handle = ring.tensor(data)
    near = guest.buffer(bytes(8192))
    where = scattered(
        guest, [(near.address, 4096), (near.address + 100, 2048), (near.address, 2048)], 8192
    )
    ring.ok(abi.copy_out, handle, 0, where)
    want = np.zeros(8192, np.uint8)
    want[:4096] = data[:4096]
    want[100:2148] = data[4096:6144]
    want[:2048] = data[6144:]
    assert bytes(near.view) == want.tobytes()


def test_a_scatter_list_that_lies_over_the_memory_it_fills(guest: Guest) -> None:
    """What is copied may be the list itself: it was fetched before, once."""
    ring = guest.ring()
    ring.open()
    handle = ring.tensor(np.full(4096, 0xFF, np.uint8))
    table = guest.buffer(bytes(4096))
    table.view[:16] = abi.SEGMENT.pack(table.address, 4096)
    where = abi.Memory(Space.GUEST, Transfer.SCATTER, table.address, 4096, 1)
    ring.ok(abi.copy_out, handle, 0, where)
    assert bytes(table.view) == b"\xff" * 4096


def test_descriptors_that_change_while_they_are_checked(guest: Guest) -> None:
    """Time of check, time of use: another vCPU rewrites ring, list and bindings all the time. What
    is carried out is one of the versions, and the neighbour tensor keeps its bytes.
    """
    dice = random.Random(1)
    ring = guest.ring()
    ring.open()
    canary = ring.tensor(np.full(4096, 7, np.uint8))
    handle = ring.ok(abi.tensor_create, DType.UINT8, (4096,))
    good = guest.buffer(bytes(4096))
    table = guest.buffer(bytes(4096))
    evil = [
        abi.SEGMENT.pack(good.address, 4096), abi.SEGMENT.pack(U64 - 8, 4096),
        abi.SEGMENT.pack(0, 2**63), abi.SEGMENT.pack(good.address, 2**32 + 4096),
    ]  # fmt: skip
    slot = ring.sq

    def attack() -> None:
        table.view[:16] = dice.choice(evil)
        at = slot + dice.randrange(ring.entries * 64 // 8) * 8
        guest.window[at : at + 8] = dice.randbytes(8)

    statuses = set()
    with meanwhile(attack):
        for _ in range(300):
            where = abi.Memory(Space.GUEST, Transfer.SCATTER, table.address, 4096, 1)
            ring.post(abi.copy_in(ring.next_cookie(), handle, 0, where))
            ring.submit()
            guest.wait(ring.ready)
            statuses.add(ring.take().status)
            if ring.register(0) != 1:  # a fault stopped it: what a driver does then
                ring = guest.ring()
                ring.open()
                canary = ring.tensor(np.full(4096, 7, np.uint8))
                handle = ring.ok(abi.tensor_create, DType.UINT8, (4096,))
    assert statuses
    fresh = guest.ring()
    fresh.open()
    again = fresh.tensor(np.full(4096, 7, np.uint8))
    assert canary
    assert np.array_equal(fresh.read(again, "uint8", (4096,)), np.full(4096, 7, np.uint8))


def test_a_program_that_changes_while_it_is_read(guest: Guest) -> None:
    """What is validated is what runs: the upload is copied first."""
    ring = guest.ring()
    ring.open()
    raw = encode(doubled(1000))
    near = guest.buffer(raw)
    dice = random.Random(2)

    def attack() -> None:
        at = dice.randrange(len(raw))
        near.view[at] = dice.randrange(256)
        near.view[: len(raw)] = raw

    loaded = 0
    with meanwhile(attack):
        for _ in range(200):
            done = ring.do(abi.program_load, near.whole(len(raw)))
            loaded += done.status == 0
            assert done.status in (0, CommandStatus.PROGRAM_INVALID)
            if done.status == 0:
                ring.ok(abi.program_unload, done.value)
    assert loaded


@pytest.mark.parametrize("seed", range(4))
def test_programs_of_garbage_are_refused_with_a_reason(guest: Guest, seed: int) -> None:
    dice = random.Random(seed)
    ring = guest.ring()
    ring.open()
    raw = bytearray(encode(doubled(1000)))
    for _ in range(150):
        bad = bytearray(raw)
        for _ in range(dice.randrange(1, 6)):
            at = dice.randrange(len(bad) // 4) * 4
            struct.pack_into("<I", bad, at, dice.choice((0, 1, 2**31, 2**32 - 1, 0x10001)))
        near = guest.buffer(bytes(bad))
        done = ring.do(abi.program_load, near.whole(len(bad)))
        near.release()
        assert done.status in (0, CommandStatus.PROGRAM_INVALID, CommandStatus.OUT_OF_MEMORY)
        if done.status == 0:
            ring.ok(abi.program_unload, done.value)


# --- its own device as DMA memory -----------------------------------------------------------------


def test_dma_to_its_own_registers_is_a_fault(guest: Guest) -> None:
    """Where a BAR would lie: no map has it, and the device does not talk to itself."""
    for address in (0xFE00_0000, 0xC000_0000, 0xFFFF_F000):
        ring = guest.ring()
        ring.open()
        handle = ring.tensor(np.zeros(64, np.uint8))
        done = ring.do(abi.copy_out, handle, 0, abi.Memory(Space.GUEST, 0, address, 64, 0))
        assert done.status == CommandStatus.BAD_ADDRESS


def test_its_own_window_as_guest_memory_hurts_only_its_own_rings(guest: Guest) -> None:
    """A client that maps the window's own file as RAM: DMA into its own rings and back."""
    fd = guest.client.region_info(2).fd
    assert fd is not None
    size = guest.spec.window_bytes
    guest.client.dma_map(0x7_0000_0000, size, fd=fd)
    os.close(fd)
    ring = guest.ring()
    ring.open()
    handle = ring.tensor(np.full(4096, 0xEE, np.uint8))
    layout = guest.spec.layout
    at = 0x7_0000_0000 + layout.control(1)
    ring.ok(abi.copy_out, handle, 0, abi.Memory(Space.GUEST, 0, at, 4096, 0))
    assert ring.read(handle, "uint8", (4096,)).tobytes() == b"\xee" * 4096
    guest.client.dma_unmap(0x7_0000_0000, size)


# --- storms ---------------------------------------------------------------------------------------


def _resets(guest: Guest) -> bool:
    """Whether the queue is gone, and its completions with it."""
    return guest.read32(Reg.QUEUE + QueueReg.STATUS) == QueueStatus.DISABLED


def until(seconds: float) -> Iterator[int]:
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        yield count
        count += 1


def test_a_storm_of_register_writes_disturbs_no_command(guest: Guest) -> None:
    """Everything but the registers that reset or stop things by design, at full speed."""
    ring = guest.ring()
    ring.open()
    x = np.arange(1000, dtype=np.float32)
    handle = ring.tensor(x)
    out = ring.ok(abi.tensor_create, DType.FLOAT32, (1000,))
    program = ring.load(doubled(1000))
    dice = random.Random(3)
    harmful = {int(Reg.CONTROL)}
    queues = range(int(Reg.QUEUE), int(Reg.QUEUE) + 0x40 * guest.spec.queues)

    for _ in until(STORM_S):
        for _ in range(50):
            offset = dice.randrange(BAR0_BYTES // 4) * 4
            if offset not in harmful and offset not in queues:
                guest.write32(offset, dice.getrandbits(32))
            guest.read32(dice.randrange(BAR0_BYTES // 4) * 4)
        assert ring.launch(program, handle, out).status == 0
    assert np.array_equal(ring.read(out, "float32", (1000,)), x + x)


def test_a_storm_of_resets_ends_with_a_clean_device(guest: Guest) -> None:
    before = guest.read32(Reg.RESET_COUNT)
    for count in until(STORM_S):
        if count % 3 == 0:
            guest.ring(count % 3).open()
        guest.write32(Reg.CONTROL, int(Control.RESET))
        if count % 5 == 0:
            guest.client.reset()
    assert guest.read32(Reg.RESET_COUNT) > before + 10
    assert guest.read32(Reg.FAULTS) == 0


def test_a_storm_of_enabling_and_disabling_leaves_queues_usable(guest: Guest) -> None:
    for count in until(STORM_S):
        at = Reg.QUEUE + 0x40 * (count % guest.spec.queues)
        guest.write32(at, int(QueueControl.ENABLE if count % 2 else QueueControl.DISABLE))
    for index in range(guest.spec.queues):
        guest.ring(index).open()


def test_a_storm_of_interrupts_costs_the_guest_its_own_time(guest: Guest) -> None:
    """Every command asks for one, and nobody acknowledges any."""
    ring = guest.ring()
    ring.open()
    for _ in range(4000 // ring.entries):
        for _ in range(ring.entries):
            ring.post(abi.nop(ring.next_cookie(), abi.Flag.INTERRUPT))
        ring.submit()
        guest.wait(lambda: ring.ready() == ring.entries)
        for _ in range(ring.entries):
            ring.take()
    assert guest.read32(Reg.INTERRUPT_CAUSE) & Interrupt.COMPLETION


def test_a_storm_of_tails_and_doorbells_completes_nothing_twice(guest: Guest) -> None:
    dice = random.Random(4)
    ring = guest.ring()
    for _ in until(STORM_S):
        ring.words[(ring.control + SQ_TAIL) // 4] = dice.getrandbits(32)
        ring.words[(ring.control + CQ_HEAD) // 4] = dice.getrandbits(32)
        guest.write32(Reg.DOORBELL, 1)
    again = guest.ring()
    again.open()
    assert again.ok(abi.nop) == 0


def test_a_storm_of_faults_ends_in_quarantine_and_harms_no_neighbour() -> None:
    """Contexts that fault and nothing else: resets first, then the function stands still."""
    nowhere = abi.Memory(Space.GUEST, 0, 0x10, 16, 0)
    with running(queues=2) as hostile, running(queues=2) as neighbour:
        with Guest(hostile) as guest, Guest(neighbour) as other:
            quiet = other.ring()
            quiet.open()
            handle = quiet.tensor(np.full(1000, 3, np.float32))
            faults = 0
            while not guest.read32(Reg.STATUS) & Status.QUARANTINED:
                assert faults < 100, "it faults for ever"
                ring = guest.ring()
                ring.post(abi.context_open(1, 1, "x"))
                ring.post(abi.program_load(2, nowhere))
                ring.submit()
                wait_for(lambda r=ring: r.ready() == 2 or _resets(guest), "two completions")
                faults += 1
            assert faults == LIMITS.fault_row * (LIMITS.fault_resets_per_minute + 1)
            assert hostile.holder("status")["quarantined"]
            assert np.array_equal(
                quiet.read(handle, "float32", (1000,)), np.full(1000, 3, np.float32)
            )
        assert neighbour.holder("status")["worker_restarts"] == 0
