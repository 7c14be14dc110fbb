"""Validation and planning: nothing out of range reaches a kernel."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Operation, Program, Role, Slot, decode, encode
from accelvisor.errors import NumericError, ProgramError
from accelvisor.kernels.interpreter import execute
from accelvisor.kernels.programs import prepare, validate
from accelvisor.kernels.registry import BY_NAME, INSTRUCTIONS

from .build import Builder
from .generate import cases

F32 = DType.FLOAT32


def program(*operations: Operation, shape: tuple[int, ...] = (4, 4)) -> Program:
    """Slot 0 an input, 1 an output, 2 a temporary, 3 an output: all float32 of one shape."""
    roles = (Role.INPUT, Role.OUTPUT, Role.TEMPORARY, Role.OUTPUT)
    return Program(tuple(Slot(F32, shape, role) for role in roles), operations)


def op(name: str, *slots: int, raw: tuple[int, ...] = ()) -> Operation:
    return Operation(BY_NAME[name].opcode, slots, raw)


def refuse(bad: Program, match: str, where: str = "instruction 0") -> None:
    with pytest.raises(ProgramError, match=match) as caught:
        validate(bad)
    assert caught.value.where.startswith(where)
    assert caught.value.hint


def test_an_unknown_opcode_is_refused() -> None:
    refuse(program(Operation(0xFFFF, (0, 1))), "unknown opcode 0xffff")


def test_a_wrong_number_of_operands_is_refused() -> None:
    refuse(program(op("relu", 0)), "1 operands, takes 2")
    refuse(program(op("relu", 0, 1, 3)), "3 operands, takes 2")


def test_a_slot_that_does_not_exist_is_refused() -> None:
    refuse(program(op("relu", 0, 4)), "names slot 4")
    refuse(program(op("relu", -1, 1)), "names slot -1")


def test_a_wrong_number_of_attributes_is_refused() -> None:
    refuse(program(op("relu", 0, 1, raw=(0,))), "1 attributes, must be 0")
    refuse(program(op("sgd", 0, 1, 3, raw=(0,))), "1 attributes, must be 2")


def test_an_attribute_that_is_nan_is_refused() -> None:
    nan = struct.unpack("<Q", struct.pack("<d", float("nan")))[0]
    refuse(program(op("fill", 1, raw=(nan,))), "value is nan")


def test_writing_an_input_is_refused() -> None:
    refuse(program(op("relu", 1, 0)), "writes input slot 0")


def test_writing_one_slot_twice_is_refused() -> None:
    builder = Builder()
    w, g, v, out = builder.input(4), builder.input(4), builder.input(4), builder.output(4)
    builder.run("sgd_momentum", w, g, v, out=(out, out))
    refuse(builder.program(), "writes the same slot twice")


def test_reading_a_temporary_that_nothing_wrote_is_refused() -> None:
    """Its memory may hold another context's data."""
    refuse(program(op("relu", 2, 1)), "reads temporary slot 2 before anything wrote it")
    refuse(
        program(op("relu", 0, 1), op("add", 0, 2, 1)),
        "reads temporary slot 2",
        "instruction 1 (add)",
    )
    refuse(program(op("relu", 2, 2)), "reads temporary slot 2")
    validate(program(op("relu", 0, 2), op("relu", 2, 1)))


def test_wrong_dtypes_are_refused_by_operand() -> None:
    slots = (Slot(DType.INT8, (4,), Role.INPUT), Slot(F32, (4,), Role.OUTPUT))
    refuse(Program(slots, (op("relu", 0, 1),)), r"relu\.x: is int8, can be float32, float64")
    slots = (Slot(DType.FLOAT64, (4,), Role.INPUT), Slot(F32, (4,), Role.OUTPUT))
    refuse(Program(slots, (op("relu", 0, 1),)), "must be float64 like x")


def test_shapes_that_do_not_fit_are_refused_by_operand() -> None:
    slots = (
        Slot(F32, (4, 5), Role.INPUT),
        Slot(F32, (6, 3), Role.INPUT),
        Slot(F32, (4, 3), Role.OUTPUT),
    )
    refuse(Program(slots, (op("matmul", 0, 1, 2),)), r"matmul\.b.*k is 5")


def test_a_requirement_that_fails_is_refused() -> None:
    slots = (Slot(F32, (0, 3), Role.INPUT), Slot(F32, (3,), Role.OUTPUT))
    refuse(Program(slots, (op("max_rows", 0, 1),)), "needs m >= 1")


def test_limits_that_bound_a_tile_hold() -> None:
    slots = (Slot(F32, (1, 2**22 + 1), Role.INPUT), Slot(F32, (1,), Role.OUTPUT))
    refuse(Program(slots, (op("sum_last", 0, 1),)), "needs n <= 4194304")


def test_the_plan_names_what_is_read_and_written_in_place() -> None:
    (plan,) = prepare(program(op("sgd", 1, 0, 1, raw=(0, 0))))
    assert (plan.reads, plan.writes, plan.aliased) == ((0, 1), (2,), (0,))
    assert plan.operands == (1, 0, 1)
    (plan,) = prepare(program(op("sgd", 0, 1, 3, raw=(0, 0))))
    assert plan.aliased == ()


def test_the_plan_has_values_tiles_and_cost() -> None:
    builder = Builder()
    x, out = builder.input(1 << 18, 3), builder.output(1 << 18, 3)
    builder.run("mul_scalar", x, out=(out,), b=0.5)
    (plan,) = prepare(builder.program())
    assert plan.attributes == (0.5,)
    assert plan.tiles == 3
    assert plan.cost.bytes_read == plan.cost.bytes_written == 3 * 4 << 18
    assert plan.cost == plan.instruction.cost([(1 << 18, 3)] * 2, (0.5,))


def test_empty_outputs_have_no_tiles() -> None:
    builder = Builder()
    builder.run("relu", builder.input(0, 7), out=(builder.output(0, 7),))
    (plan,) = prepare(builder.program())
    assert plan.tiles == 0


def test_model_cycles_do_not_depend_on_data_or_repetition() -> None:
    source = program(op("add", 0, 0, 1), op("add", 0, 0, 1))
    first, second = prepare(source)
    assert first.cost == second.cost
    assert [p.cost for p in prepare(source)] == [first.cost, second.cost]


def test_a_program_of_four_thousand_instructions_is_planned() -> None:
    plans = prepare(program(*[op("add", 0, 1, 3)] * 4096))
    assert [p.index for p in plans] == list(range(4096))


def mutate(base: Program, rng: random.Random) -> Program:
    """Change a few bytes of the encoded program, as a hostile guest would."""
    data = bytearray(encode(base))
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return decode(bytes(data))


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(BY_NAME)), seed=st.integers(0, 2**32))
def test_a_hostile_program_is_refused_or_runs_within_its_arrays(name: str, seed: int) -> None:
    """What passes validation runs on guarded arrays and changes nothing but its outputs."""
    rng = random.Random(seed)
    (case,) = cases(BY_NAME[name], 1, seed=seed % 50)
    builder = Builder()
    for i, array in enumerate(case.arrays):
        role = Role.OUTPUT if i in case.instruction.writes else Role.INPUT
        builder.slot(role, array.shape, array.dtype.name)
    slots = range(len(case.arrays))
    builder.run(
        name,
        *[s for s in slots if s in case.instruction.reads],
        out=case.instruction.writes,
        **case.named,
    )
    try:
        hostile = mutate(builder.program(), rng)
        validate(hostile)
    except ProgramError:
        return
    wanted = [hostile.slots[i] for i in hostile.arguments()]
    if sum(slot.nbytes for slot in wanted) > 1 << 20:
        return
    guards, arrays = [], []
    for slot in wanted:
        room = np.full(slot.nbytes + 128, 0xA5, np.uint8)
        guards.append(room)
        arrays.append(room[64 : 64 + slot.nbytes].view(slot.dtype.label).reshape(slot.shape))
    try:
        execute(hostile, arrays)
    except NumericError:
        pass
    for slot, room in zip(wanted, guards, strict=True):
        edge = np.concatenate([room[:64], room[64 + slot.nbytes :]])
        assert (edge == 0xA5).all()
        if slot.role is Role.INPUT:
            assert (room == 0xA5).all()


def test_every_instruction_can_stand_in_a_program() -> None:
    for instruction in INSTRUCTIONS.values():
        (case,) = cases(instruction, 1, seed=99)
        builder = Builder()
        for i, array in enumerate(case.arrays):
            role = Role.OUTPUT if i in instruction.writes else Role.INPUT
            builder.slot(role, array.shape, array.dtype.name)
        builder.run(
            instruction.name,
            *instruction.reads,
            out=instruction.writes,
            **case.named,
        )
        arrays = case.fresh(writable=True)
        execute(builder.program(), arrays)


def test_equal_shapes_do_not_mix_up_attributes() -> None:
    builder = Builder()
    x = builder.input(2)
    for b in (0.5, 2.0, 0.5):
        builder.run("mul_scalar", x, out=(builder.output(2),), b=b)
    plans = prepare(builder.program())
    assert [p.attributes for p in plans] == [(0.5,), (2.0,), (0.5,)]
    arrays = [np.ones(2, np.float32) for _ in range(4)]
    execute(builder.program(), arrays)
    assert [a[0] for a in arrays] == [1, 0.5, 2, 0.5]
