"""BAR0: access sizes, masks, write-1-to-clear, and that no interrupt is lost."""

from __future__ import annotations

import os
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.abi import ABI_VERSION
from accelvisor.abi.registers import BAR0_BYTES, MAGIC, Interrupt, QueueReg, Reg
from accelvisor.function.interrupts import Interrupts
from accelvisor.function.registers import Registers
from accelvisor.function.state import STATE_BYTES, State
from accelvisor.vfio_user.model import Refusal
from tests.function.harness import Path, make_spec, memfd


class Recorder:
    """Actions that only remember."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def doorbell(self, queue: int) -> None:
        self.calls.append(("doorbell", queue, 0))

    def queue_control(self, queue: int, value: int) -> None:
        self.calls.append(("control", queue, value))

    def function_reset(self) -> None:
        self.calls.append(("reset", 0, 0))


class Bench:
    """A register file with its surroundings."""

    def __init__(self) -> None:
        self.spec = make_spec(Path("/tmp"))
        self.state = State(memfd("state", STATE_BYTES))
        self.sent = 0
        self.interrupts = Interrupts(self.state, self._send)
        self.actions = Recorder()
        self.registers = Registers(self.state, self.spec, self.interrupts, self.actions)

    def _send(self, fd: int) -> None:
        self.sent += 1

    def get(self, offset: int, count: int = 4) -> int:
        return int.from_bytes(self.registers.read(offset, count), "little")

    def put(self, offset: int, value: int, count: int = 4) -> None:
        self.registers.write(offset, value.to_bytes(count, "little"))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_identity(bench: Bench) -> None:
    assert bench.get(Reg.MAGIC) == MAGIC
    assert bench.get(Reg.ABI_VERSION) == ABI_VERSION
    raw = bench.registers.read(Reg.UUID, 16)
    assert str(uuid.UUID(bytes=raw)) == bench.spec.uuid
    assert bench.get(Reg.WINDOW_BYTES_64, 8) == bench.spec.window_bytes
    assert bench.get(Reg.MEMORY_BYTES_64, 8) == bench.spec.memory_bytes
    assert bench.get(Reg.STAGING_OFFSET_64, 8) == bench.spec.layout.staging
    assert bench.get(Reg.STATUS) == 1


@given(offset=st.integers(0, BAR0_BYTES - 8), count=st.integers(1, 8))
def test_any_read_is_the_bytes_of_its_words(offset: int, count: int) -> None:
    registers = Bench().registers
    words = range(offset & ~3, (offset + count + 3) & ~3, 4)
    whole = b"".join(registers.read(at, 4) for at in words)
    assert registers.read(offset, count) == whole[offset & 3 : (offset & 3) + count]


@given(offset=st.integers(0, 7), data=st.binary(min_size=1, max_size=8))
def test_narrow_writes_change_their_lanes_alone(offset: int, data: bytes) -> None:
    bench = Bench()
    bench.put(Reg.SCRATCH, 0x11223344)
    bench.registers.write(Reg.SCRATCH - 4 + offset, data)
    expected = bytearray(bytes(4) + (0x11223344).to_bytes(4, "little") + bytes(4))
    expected[offset : offset + len(data)] = data
    assert bench.registers.read(Reg.SCRATCH, 4) == bytes(expected[4:8])


@pytest.mark.parametrize(
    ("offset", "count"), [(BAR0_BYTES, 4), (BAR0_BYTES - 2, 4), (-4, 4), (BAR0_BYTES - 1, 2)]
)
def test_an_access_outside_the_bar_is_refused(bench: Bench, offset: int, count: int) -> None:
    with pytest.raises(Refusal):
        bench.registers.read(offset, count)
    with pytest.raises(Refusal):
        bench.registers.write(offset, bytes(count))


def test_read_only_registers_ignore_writes(bench: Bench) -> None:
    before = bench.registers.read(0, 0x70)
    for at in (*range(0, 0x14, 4), *range(0x20, 0x70, 4)):
        bench.put(at, 0xFFFF_FFFF)
    assert bench.registers.read(0, 0x70) == before
    assert bench.actions.calls == []


def test_doorbells_and_queue_controls_reach_their_queue(bench: Bench) -> None:
    bench.put(Reg.DOORBELL + 4 * 3, 0)
    bench.put(Reg.QUEUE + 0x40 * 2 + QueueReg.CONTROL, 1)
    bench.put(Reg.CONTROL, 1)
    assert bench.actions.calls == [("doorbell", 3, 0), ("control", 2, 1), ("reset", 0, 0)]


def test_queues_that_do_not_exist_are_silent(bench: Bench) -> None:
    bench.put(Reg.DOORBELL + 4 * 4, 1)
    bench.put(Reg.QUEUE + 0x40 * 4, 1)
    assert bench.actions.calls == []
    assert bench.get(Reg.QUEUE + 0x40 * 4 + QueueReg.STATUS) == 0


def test_acknowledging_clears_only_the_bits_written(bench: Bench) -> None:
    bench.interrupts.set_cause(0b0111)
    bench.put(Reg.INTERRUPT_CAUSE, 0b0010)
    assert bench.get(Reg.INTERRUPT_CAUSE) == 0b0101
    bench.put(Reg.INTERRUPT_CAUSE + 1, 0xFF, 1)  # another byte lane
    assert bench.get(Reg.INTERRUPT_CAUSE) == 0b0101


def test_a_cause_raises_once_until_it_is_acknowledged(bench: Bench) -> None:
    bench.interrupts.attach(0)
    bench.interrupts.set_cause(Interrupt.COMPLETION)
    bench.interrupts.set_cause(Interrupt.COMPLETION)
    assert bench.sent == 1
    bench.put(Reg.INTERRUPT_CAUSE, Interrupt.COMPLETION)
    bench.interrupts.set_cause(Interrupt.COMPLETION)
    assert bench.sent == 2


def test_a_masked_cause_raises_when_it_is_uncovered(bench: Bench) -> None:
    bench.interrupts.attach(0)
    bench.put(Reg.INTERRUPT_MASK, Interrupt.COMPLETION)
    bench.interrupts.set_cause(Interrupt.COMPLETION)
    assert bench.sent == 0
    bench.put(Reg.INTERRUPT_MASK, 0)
    assert bench.sent == 1


def test_acknowledging_one_cause_raises_again_for_the_other(bench: Bench) -> None:
    bench.interrupts.attach(0)
    bench.interrupts.set_cause(Interrupt.COMPLETION)
    bench.interrupts.set_cause(Interrupt.FAULT)
    sent = bench.sent
    bench.put(Reg.INTERRUPT_CAUSE, Interrupt.COMPLETION)
    assert bench.sent == sent + 1


def test_a_cause_that_came_while_msi_was_off_raises_when_it_comes_on(bench: Bench) -> None:
    bench.interrupts.set_cause(Interrupt.FAULT)
    assert bench.sent == 0
    bench.interrupts.attach(0)
    assert bench.sent == 1


def test_a_full_eventfd_does_not_block() -> None:
    state = State(memfd("state", STATE_BYTES))
    interrupts = Interrupts(state)
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    os.eventfd_write(fd, 2**64 - 2)
    interrupts.attach(fd)
    interrupts.set_cause(1)
    os.close(fd)
