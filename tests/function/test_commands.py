"""Commands as a guest sees them, on a device in this process."""

from __future__ import annotations

import os
import struct
from itertools import pairwise

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import Flag, Memory, Opcode, Query, Space, Transfer
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot, encode
from accelvisor.abi.registers import (
    CQ_HEAD,
    SQ_TAIL,
    Control,
    Interrupt,
    QueueControl,
    QueueReg,
    QueueStatus,
    Reg,
)
from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as words
from accelvisor.limits import LIMITS, MIB
from tests.function.harness import Local, Ring, operation, wait_for

F32 = DType.FLOAT32


@pytest.fixture
def ring(local: Local) -> Ring:
    opened = local.ring(0)
    opened.open()
    return opened


def status(ring: Ring, build: object, *arguments: object, **options: object) -> CommandStatus:
    return CommandStatus(ring.do(build, *arguments, **options).status)  # type: ignore[arg-type]


def double(n: int = 4) -> Program:
    """out = x + x."""
    slots = (Slot(F32, (n,), Role.INPUT), Slot(F32, (n,), Role.OUTPUT))
    return Program(slots, (operation("add", 0, 0, 1),))


# --- life -----------------------------------------------------------------------------------------


def test_commands_complete_in_order_with_their_cookies(local: Local) -> None:
    ring = local.ring()
    for n in range(40):
        ring.post(abi.nop(1000 + n))
    ring.submit()
    local.wait(lambda: ring.ready() == 40)
    assert [ring.take().cookie for _ in range(40)] == list(range(1000, 1040))


def test_the_ring_wraps_many_times(local: Local) -> None:
    ring = local.ring()
    for n in range(5 * ring.entries):
        assert ring.run(abi.nop(n)).cookie == n


def test_no_completion_overtakes_a_guest_that_does_not_read(local: Local) -> None:
    ring = local.ring()
    for n in range(ring.entries):
        ring.post(abi.nop(n))
    ring.submit()
    local.wait(lambda: ring.ready() == ring.entries)
    ring.post(abi.nop(999))
    ring.submit()
    assert ring.take().cookie == 0  # moves CQ_HEAD: now there is room for one
    ring.submit()
    local.write32(Reg.DOORBELL, 1)
    local.wait(lambda: ring.ready() == ring.entries)
    for n in range(1, ring.entries):
        assert ring.take().cookie == n
    assert ring.take().cookie == 999


def test_a_context_belongs_to_its_queue(local: Local) -> None:
    a, b = local.ring(0), local.ring(1)
    assert a.open("one") == 0
    assert b.open("two") == 1
    assert a.register(QueueReg.CONTEXT) == 1
    handle = a.tensor(np.arange(4, dtype=np.float32))
    buffer = local.buffer(bytes(16))
    assert status(b, abi.copy_out, handle, 0, buffer.whole(16)) is CommandStatus.BAD_HANDLE
    assert status(b, abi.tensor_destroy, handle) is CommandStatus.BAD_HANDLE
    a.ok(abi.context_close)
    assert a.register(QueueReg.CONTEXT) == 0
    assert a.open() == 0


def test_closing_a_context_takes_its_objects_and_zeroes_their_memory(
    local: Local, ring: Ring
) -> None:
    ring.tensor(np.full(10_000, 7, np.float32))
    assert any(os.pread(local.fds[2], 40_000, 0))
    ring.ok(abi.context_close)
    assert not any(os.pread(local.fds[2], local.spec.memory_bytes, 0))
    assert local.device.memory.used == 0


def test_disabling_a_queue_closes_its_context(local: Local, ring: Ring) -> None:
    ring.tensor(np.ones(5, np.float32))
    ring.set(QueueControl.DISABLE, QueueStatus.DISABLED)
    assert local.device.memory.used == 0
    assert ring.register(QueueReg.CONTEXT) == 0
    again = local.ring(0)
    assert again.open() == 0


def test_a_reset_leaves_nothing(local: Local, ring: Ring) -> None:
    ring.tensor(np.ones(5, np.float32))
    local.write32(Reg.SCRATCH, 5)
    with Local() as clean:
        digest = clean.state.digest()
    local.write32(Reg.CONTROL, Control.RESET)
    assert local.read32(Reg.RESET_COUNT) == 1
    assert ring.register(QueueReg.STATUS) == QueueStatus.DISABLED
    assert not any(os.pread(local.fds[2], local.spec.memory_bytes, 0))
    state = local.state
    state.u32[words.R_RESETS] = 0
    state.zero(words.OBJECTS_AT, words.BINDINGS_AT - words.OBJECTS_AT)  # generations move
    assert state.digest() == digest


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        abi.tensor_create(1, F32, (4,)),
        abi.tensor_destroy(1, 1 << 32),
        abi.program_load(1, Memory(0, 0, 0, 32, 0)),
        abi.copy_in(1, 1 << 32, 0, Memory(0, 0, 0, 4, 0)),
        abi.launch(1, 1 << 32, 0, Memory(0, 0, 0, 0, 0)),
        abi.context_close(1),
        abi.query(1, Query.OBJECTS, Memory(0, 0, 0, 4096, 0)),
    ],
    ids=["create", "destroy", "load", "copy", "launch", "close", "query"],
)
def test_without_a_context_nothing_is_done(local: Local, entry: bytes) -> None:
    assert local.ring().run(entry).status == CommandStatus.NO_CONTEXT


def test_a_second_context_on_a_queue_is_refused(ring: Ring) -> None:
    assert status(ring, abi.context_open, 1, "again") is CommandStatus.CONTEXT_EXISTS


@pytest.mark.parametrize("opcode", [0x02 + 1, 0x7F, 0x100, 0xFFFF])
def test_unknown_commands_are_refused(ring: Ring, opcode: int) -> None:
    done = ring.run(struct.pack("<HHI", opcode, 0, 9).ljust(64, b"\xff"))
    assert (done.status, done.opcode, done.cookie) == (CommandStatus.UNKNOWN_COMMAND, opcode, 9)


def test_the_reason_of_a_refusal_can_be_read(ring: Ring) -> None:
    assert status(ring, abi.tensor_create, F32, (1 << 30, 64)) is CommandStatus.LIMIT
    fault = ring.query(Query.FAULT)
    assert fault["name"] == "LIMIT"
    assert not fault["fault"]
    assert "limit" in fault["text"]
    assert ring.register(QueueReg.STATUS) == QueueStatus.ENABLED


def test_memory_runs_out_by_a_refusal(ring: Ring) -> None:
    assert status(ring, abi.tensor_create, DType.UINT8, (17 * MIB,)) is CommandStatus.OUT_OF_MEMORY
    assert status(ring, abi.tensor_create, DType.UINT8, (16 * MIB,)) is CommandStatus.OK


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (Memory(2, 0, 0, 16, 0), CommandStatus.BAD_DESCRIPTOR),
        (Memory(0, 2, 0, 16, 0), CommandStatus.BAD_DESCRIPTOR),
        (Memory(0, 0, 0, 16, 1), CommandStatus.BAD_DESCRIPTOR),
        (Memory(0, 0, 0, 17, 0), CommandStatus.BUFFER_TOO_SMALL),
        (Memory(0, 1, Local.RAM, 16, 0), CommandStatus.LIMIT),
        (Memory(0, 1, Local.RAM, 16, LIMITS.scatter_segments + 1), CommandStatus.LIMIT),
    ],
)
def test_impossible_memory_operands_are_refused(
    ring: Ring, memory: Memory, expected: CommandStatus
) -> None:
    handle = ring.tensor(np.ones(4, np.float32))
    assert status(ring, abi.copy_in, handle, 0, memory) is expected


def test_a_copy_past_the_end_of_a_tensor_is_refused(ring: Ring) -> None:
    handle = ring.tensor(np.ones(4, np.float32))
    for offset, length in ((16, 1), (0, 17), (1 << 63, 8), ((1 << 64) - 8, 16)):
        memory = Memory(0, 0, Local.RAM, length, 0)
        assert status(ring, abi.copy_out, handle, offset, memory) is CommandStatus.BUFFER_TOO_SMALL


# --- copies ---------------------------------------------------------------------------------------


def test_scattered_copies_arrive_in_order(local: Local, ring: Ring) -> None:
    data = np.random.default_rng(1).integers(0, 256, 50_000, dtype=np.uint8)
    handle = ring.ok(abi.tensor_create, DType.UINT8, (50_000,))
    cuts = [0, 1, 4096, 4097, 20_000, 49_999, 50_000]
    parts = [data[a:b] for a, b in pairwise(cuts)]
    buffers = [local.buffer(part.tobytes()) for part in parts]
    segments = [(b.address, len(p)) for b, p in zip(buffers, parts, strict=True)]
    segments.insert(3, (0xDEAD_0000, 0))  # an empty segment covers no byte
    table = local.buffer(b"".join(abi.SEGMENT.pack(*one) for one in segments))
    where = Memory(Space.GUEST, Transfer.SCATTER, table.address, 50_000, len(segments))
    ring.ok(abi.copy_in, handle, 0, where)
    assert np.array_equal(ring.read(handle, "uint8", (50_000,)), data)
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.view[: len(part)] = bytes(len(part))
    ring.ok(abi.copy_out, handle, 0, where)
    for buffer, part in zip(buffers, parts, strict=True):
        assert bytes(buffer.view[: len(part)]) == part.tobytes()


def test_a_scatter_list_must_add_up(local: Local, ring: Ring) -> None:
    handle = ring.tensor(np.ones(4, np.float32))
    first, second = (local.RAM, 8), (local.RAM, (1 << 64) - 8)
    table = local.buffer(abi.SEGMENT.pack(*first) + abi.SEGMENT.pack(*second))
    for length in (16, 0, 8):
        where = Memory(0, Transfer.SCATTER, table.address, length, 2)
        assert status(ring, abi.copy_in, handle, 0, where) is CommandStatus.BAD_DESCRIPTOR


def test_a_bad_segment_moves_no_byte(local: Local, ring: Ring) -> None:
    handle = ring.tensor(np.ones(4, np.float32))
    target = local.buffer(bytes(8))
    table = local.buffer(abi.SEGMENT.pack(target.address, 8) + abi.SEGMENT.pack(0x10, 8))
    where = Memory(0, Transfer.SCATTER, table.address, 16, 2)
    assert status(ring, abi.copy_out, handle, 0, where) is CommandStatus.BAD_ADDRESS
    assert not any(target.view[:8])


def test_copies_through_the_window_stay_in_the_staging_area(local: Local, ring: Ring) -> None:
    staging = local.spec.layout.staging
    handle = ring.tensor(np.zeros(4, np.float32))
    local.window[staging : staging + 16] = np.arange(4, dtype=np.float32).tobytes()
    ring.ok(abi.copy_in, handle, 0, Memory(Space.WINDOW, 0, staging, 16, 0))
    assert ring.read(handle, "float32", (4,)).tolist() == [0, 1, 2, 3]
    end = local.spec.window_bytes
    ring.ok(abi.copy_out, handle, 0, Memory(Space.WINDOW, 0, end - 16, 16, 0))
    assert bytes(local.window[end - 16 :]) == np.arange(4, dtype=np.float32).tobytes()


@pytest.mark.parametrize("address", [0, -1, None, 1 << 63])
def test_a_copy_into_the_rings_is_a_fault(local: Local, ring: Ring, address: int | None) -> None:
    handle = ring.tensor(np.zeros(4, np.float32))
    staging = local.spec.layout.staging
    at = {0: 0, -1: staging - 1, None: local.spec.window_bytes - 15}.get(address, address)
    where = Memory(Space.WINDOW, 0, at, 16, 0)
    assert status(ring, abi.copy_out, handle, 0, where) is CommandStatus.BAD_ADDRESS


# --- faults ---------------------------------------------------------------------------------------


def test_a_fault_stops_its_context_alone(local: Local, ring: Ring) -> None:
    other = local.ring(1)
    other.open("bystander")
    handle = ring.tensor(np.ones(4, np.float32))
    bad = Memory(0, 0, 0x10, 16, 0)
    done = ring.do(abi.copy_in, handle, 0, bad)
    assert done.status == CommandStatus.BAD_ADDRESS
    assert ring.register(QueueReg.STATUS) == QueueStatus.FAULTED
    assert ring.register(QueueReg.FAULT) == CommandStatus.BAD_ADDRESS
    assert ring.register(QueueReg.FAULT_COMMAND) == done.cookie
    assert local.read32(Reg.FAULTS) == 1
    assert local.read32(Reg.STATUS) & 2
    assert local.read32(Reg.INTERRUPT_CAUSE) & Interrupt.FAULT
    for entry in (abi.nop(1), abi.fence(2), abi.tensor_create(3, F32, (4,)), abi.context_close(4)):
        assert ring.run(entry).status == CommandStatus.CONTEXT_STOPPED
    fault = ring.query(Query.FAULT)
    assert (fault["name"], fault["cookie"], fault["fault"]) == ("BAD_ADDRESS", done.cookie, True)
    assert "0x10" in fault["text"]
    assert other.register(QueueReg.STATUS) == QueueStatus.ENABLED
    other.tensor(np.ones(4, np.float32))
    ring.set(QueueControl.DISABLE, QueueStatus.DISABLED)
    again = local.ring(0)
    again.open()
    assert again.ok(abi.nop) == 0


def test_bus_master_off_is_its_own_fault(local: Local, ring: Ring) -> None:
    handle = ring.tensor(np.ones(4, np.float32))
    buffer = local.buffer(bytes(16))
    local.device.config.write(0x04, b"\x02\x00")
    assert status(ring, abi.copy_out, handle, 0, buffer.whole(16)) is CommandStatus.BUS_MASTER_OFF


def test_a_read_only_map_denies_writes(local: Local, ring: Ring) -> None:
    local.device.dma_unmap(local.RAM, len(local.ram), 0)
    local.map(local.RAM, len(local.ram), local.ram_fd, flags=1)
    handle = ring.tensor(np.ones(4, np.float32))
    buffer = local.buffer(bytes(16))
    assert status(ring, abi.copy_out, handle, 0, buffer.whole(16)) is CommandStatus.DMA_DENIED


def test_a_tail_beyond_the_ring_stops_the_queue(local: Local, ring: Ring) -> None:
    ring.words[(ring.control + SQ_TAIL) // 4] = ring.tail + ring.entries + 1
    local.write32(Reg.DOORBELL, 1)
    wait_for(lambda: ring.register(QueueReg.STATUS) == QueueStatus.FAULTED, "the queue to stop")
    assert ring.register(QueueReg.FAULT) == CommandStatus.BAD_ADDRESS


def test_a_lying_completion_head_hurts_only_its_queue(local: Local, ring: Ring) -> None:
    other = local.ring(1)
    ring.words[(ring.control + CQ_HEAD) // 4] = 0x8000_0000
    ring.post(abi.nop(1))
    ring.submit()
    for n in range(100):
        assert other.run(abi.nop(n)).status == 0
    ring.set(QueueControl.DISABLE, QueueStatus.DISABLED)


def test_an_interrupt_comes_only_when_asked_for(local: Local, ring: Ring) -> None:
    ring.run(abi.nop(1))
    assert local.read32(Reg.INTERRUPT_CAUSE) == 0
    ring.run(abi.nop(2, flags=Flag.INTERRUPT))
    wait_for(lambda: local.read32(Reg.INTERRUPT_CAUSE) == Interrupt.COMPLETION, "the cause")
    local.write32(Reg.INTERRUPT_CAUSE, Interrupt.COMPLETION)
    ring.do(abi.tensor_create, F32, (1,), flags=Flag.INTERRUPT)
    wait_for(lambda: local.read32(Reg.INTERRUPT_CAUSE) == Interrupt.COMPLETION, "the cause")


# --- programs -------------------------------------------------------------------------------------


def test_a_program_computes(ring: Ring) -> None:
    x = ring.tensor(np.array([1, 2, 3, 4], np.float32))
    out = ring.tensor(np.zeros(4, np.float32))
    done = ring.launch(ring.load(double()), x, out)
    assert done.status == 0
    assert done.cycles > 0
    assert ring.read(out, "float32", (4,)).tolist() == [2, 4, 6, 8]
    assert ring.guest.read32(Reg.MODEL_CLOCK_64) >= done.cycles


def test_an_invalid_program_is_refused_with_the_place(local: Local, ring: Ring) -> None:
    slots = (Slot(F32, (4,), Role.INPUT), Slot(F32, (4,), Role.OUTPUT))
    for program, place in (
        (Program(slots, (operation("add", 0, 0, 0),)), "instruction 0"),
        (Program(slots, (operation("matmul", 0, 0, 1),)), "instruction 0"),
    ):
        buffer = local.buffer(encode(program))
        memory = buffer.whole(len(encode(program)))
        assert status(ring, abi.program_load, memory) is CommandStatus.PROGRAM_INVALID
        assert place in ring.query(Query.FAULT)["text"]
    assert local.device.memory.used == 0


def test_a_huge_program_is_refused_before_it_is_read(ring: Ring) -> None:
    memory = Memory(0, 0, 0x10, LIMITS.program_bytes + 1, 0)
    assert status(ring, abi.program_load, memory) is CommandStatus.LIMIT


@pytest.mark.parametrize(
    ("count", "offset", "expected"),
    [
        (1, 0, CommandStatus.BINDING_MISMATCH),
        (3, 0, CommandStatus.BINDING_MISMATCH),
        (2, 2, CommandStatus.BINDING_MISMATCH),
        (2, 4, CommandStatus.BINDING_MISMATCH),
        (2, (1 << 64) - 4, CommandStatus.BINDING_MISMATCH),
    ],
)
def test_bindings_that_do_not_fit_are_refused(
    ring: Ring, count: int, offset: int, expected: CommandStatus
) -> None:
    x = ring.tensor(np.ones(4, np.float32))
    out = ring.tensor(np.ones(4, np.float32))
    pairs = [(x, 0), (out, offset), (out, 0)][:count]
    assert ring.launch(ring.load(double()), *pairs).status == expected
    assert ring.read(out, "float32", (4,)).tolist() == [1, 1, 1, 1]


def test_a_binding_of_another_type_or_kind_is_refused(ring: Ring) -> None:
    program = ring.load(double())
    x = ring.tensor(np.ones(4, np.float32))
    ints = ring.tensor(np.ones(4, np.int32))
    assert ring.launch(program, x, ints).status == CommandStatus.BINDING_MISMATCH
    assert ring.launch(program, x, program).status == CommandStatus.BAD_HANDLE
    assert ring.launch(x, x, x).status == CommandStatus.BAD_HANDLE
    assert ring.launch(program, x, 0).status == CommandStatus.BAD_HANDLE


def test_a_repeat_of_zero_is_refused(ring: Ring) -> None:
    x = ring.tensor(np.ones(4, np.float32))
    assert ring.launch(ring.load(double()), x, x, repeat=0).status == CommandStatus.BAD_DESCRIPTOR


def test_bindings_with_offsets_name_parts_of_a_tensor(ring: Ring) -> None:
    both = ring.tensor(np.arange(8, dtype=np.float32))
    assert ring.launch(ring.load(double()), (both, 0), (both, 16)).status == 0
    assert ring.read(both, "float32", (8,)).tolist() == [0, 1, 2, 3, 0, 2, 4, 6]


def test_overlapping_operands_are_computed_from_what_was_there(ring: Ring) -> None:
    """Aliased bindings: the read operand is copied before the first write."""
    both = ring.tensor(np.arange(8, dtype=np.float32))
    assert ring.launch(ring.load(double()), (both, 0), (both, 8)).status == 0
    assert ring.read(both, "float32", (8,)).tolist() == [0, 1, 0, 2, 4, 6, 6, 7]
    assert ring.guest.device.memory.extents()[-1][1] == 4096  # type: ignore[union-attr]


def test_two_outputs_in_the_same_memory_are_refused(ring: Ring) -> None:
    slot = Slot(F32, (2, 3), Role.INPUT)
    slots = (slot, Slot(DType.INT64, (2,), Role.INPUT), Slot(F32, (2,), Role.OUTPUT),
             Slot(F32, (2, 3), Role.OUTPUT))  # fmt: skip
    program = ring.load(Program(slots, (operation("softmax_cross_entropy", 0, 1, 2, 3),)))
    logits = ring.tensor(np.zeros((2, 3), np.float32))
    labels = ring.tensor(np.zeros(2, np.int64))
    out = ring.tensor(np.zeros(8, np.float32))
    assert ring.launch(program, logits, labels, out, (out, 4)).status == (
        CommandStatus.BINDING_MISMATCH
    )
    assert ring.launch(program, logits, labels, out, (out, 8)).status == 0


def test_data_that_no_kernel_can_use_is_a_numeric_fault(ring: Ring) -> None:
    slots = (Slot(DType.INT64, (2,), Role.INPUT), Slot(F32, (2, 3), Role.OUTPUT))
    program = ring.load(Program(slots, (operation("one_hot", 0, 1, classes=3),)))
    labels = ring.tensor(np.array([0, 3], np.int64))
    out = ring.tensor(np.zeros((2, 3), np.float32))
    assert ring.launch(program, labels, out).status == CommandStatus.NUMERIC
    assert ring.query(Query.FAULT)["name"] == "NUMERIC"


def test_scalar_and_empty_tensors_go_through(ring: Ring) -> None:
    slots = (Slot(F32, (0, 5), Role.INPUT), Slot(F32, (0, 5), Role.OUTPUT))
    program = ring.load(Program(slots, (operation("relu", 0, 1),)))
    empty = ring.ok(abi.tensor_create, F32, (0, 5))
    assert ring.launch(program, empty, empty).status == 0


def test_an_unloaded_program_is_gone(local: Local, ring: Ring) -> None:
    program = ring.load(double())
    ring.ok(abi.program_unload, program)
    assert local.device.memory.used == 0
    x = ring.tensor(np.ones(4, np.float32))
    assert ring.launch(program, x, x).status == CommandStatus.BAD_HANDLE


def test_changing_a_program_after_the_upload_changes_nothing(local: Local, ring: Ring) -> None:
    """Time of check to time of use: what was validated is what runs."""
    raw = encode(double())
    buffer = local.buffer(raw)
    program = ring.ok(abi.program_load, buffer.whole(len(raw)))
    buffer.view[: len(raw)] = b"\xff" * len(raw)
    x, out = ring.tensor(np.ones(4, np.float32)), ring.tensor(np.zeros(4, np.float32))
    assert ring.launch(program, x, out).status == 0
    assert ring.read(out, "float32", (4,)).tolist() == [2, 2, 2, 2]


# --- queries --------------------------------------------------------------------------------------


def test_queries_answer(local: Local, ring: Ring) -> None:
    ring.tensor(np.ones((2, 3), np.float32))
    info = ring.query(Query.INFO)
    assert info["uuid"] == local.spec.uuid
    assert info["memory_used_bytes"] == 4096
    names = {one["name"] for one in ring.query(Query.INSTRUCTIONS)}
    assert {"matmul", "relu", "conv2d"} <= names
    assert ring.query(Query.STATISTICS)["commands"] > 0
    (tensor,) = ring.query(Query.OBJECTS)
    assert (tensor["kind"], tensor["dtype"], tensor["shape"]) == ("tensor", "float32", [2, 3])
    assert status(ring, abi.query, 99, Memory(0, 0, local.RAM, 8, 0)) is (
        CommandStatus.BAD_DESCRIPTOR
    )


def test_a_query_that_does_not_fit_says_how_much_it_needs(local: Local, ring: Ring) -> None:
    buffer = local.buffer(bytes(16))
    done = ring.do(abi.query, Query.INFO, buffer.whole(16))
    assert done.status == CommandStatus.BUFFER_TOO_SMALL
    assert done.value > 16
    assert not any(buffer.view[:16])
    assert Opcode(done.opcode) is Opcode.QUERY
