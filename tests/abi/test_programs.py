"""The program container: canonical bytes, hostile bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.abi.dtypes import DType, by_label
from accelvisor.abi.programs import Operation, Program, Role, Slot, decode, encode
from accelvisor.errors import ProgramError
from accelvisor.limits import LIMITS

SLOTS = st.builds(
    Slot,
    st.sampled_from(list(DType)),
    st.lists(st.integers(0, 40), max_size=5).map(tuple),
    st.sampled_from(list(Role)),
)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    slots = tuple(draw(st.lists(SLOTS, min_size=1, max_size=6)))
    operations = st.builds(
        Operation,
        st.integers(0, 0xFFFF),
        st.lists(st.integers(0, len(slots) - 1), max_size=8).map(tuple),
        st.lists(U64, max_size=8).map(tuple),
    )
    return Program(slots, tuple(draw(st.lists(operations, max_size=4))))


SMALL = Program(
    (Slot(DType.FLOAT32, (2, 3), Role.INPUT), Slot(DType.FLOAT32, (2, 3), Role.OUTPUT)),
    (Operation(0x0102, (0, 1)), Operation(0x0150, (0, 1), (0x3FF0000000000000,))),
)


@given(program=programs())
def test_a_program_survives_its_bytes(program: Program) -> None:
    assert decode(encode(program)) == program


@given(data=st.binary(max_size=400))
def test_any_bytes_are_a_program_or_a_program_error(data: bytes) -> None:
    try:
        program = decode(data)
    except ProgramError:
        return
    assert encode(program) == data


@given(
    program=programs(), at=st.integers(0, 2**31), flip=st.integers(1, 255), cut=st.integers(0, 3)
)
def test_damaged_bytes_are_refused_or_still_canonical(
    program: Program, at: int, flip: int, cut: int
) -> None:
    data = bytearray(encode(program))
    data[at % len(data)] ^= flip
    damaged = bytes(data[: len(data) - cut])
    try:
        parsed = decode(damaged)
    except ProgramError:
        return
    assert encode(parsed) == damaged


def reserved() -> list[int]:
    """Offsets in SMALL's bytes that the format reserves."""
    slot, first = 32, 32 + 2 * 48
    return [
        *range(16, 32),  # header
        *range(slot + 12, slot + 48),  # dims past the rank, padding
        *range(first + 4, first + 8),
        *range(first + 12, first + 24),  # operands past the second
        *range(first + 24, first + 96),  # attributes past the none, padding
    ]


def test_every_reserved_byte_must_be_zero() -> None:
    data = encode(SMALL)
    for at in reserved():
        changed = bytearray(data)
        changed[at] = 1
        with pytest.raises(ProgramError, match=r"reserved|zero"):
            decode(bytes(changed))


@pytest.mark.parametrize(
    ("offset", "value", "where"),
    [
        (0, 0x59, "header"),
        (4, 2, "header"),
        (6, 1, "header"),
        (32, 0xEE, "slot 0"),
        (33, 9, "slot 0"),
        (34, 3, "slot 0"),
        (35, 1, "slot 0"),
        (32 + 96 + 2, 9, "instruction 0"),
        (32 + 96 + 3, 9, "instruction 0"),
        (32 + 96 + 8, 2, "instruction 0"),
    ],
)
def test_a_wrong_field_is_refused_by_name(offset: int, value: int, where: str) -> None:
    data = bytearray(encode(SMALL))
    data[offset] = value
    with pytest.raises(ProgramError) as caught:
        decode(bytes(data))
    assert caught.value.where == where


def test_a_slot_larger_than_a_tensor_is_refused() -> None:
    huge = Program((Slot(DType.FLOAT64, (2**32 - 1,) * 8, Role.INPUT),), ())
    with pytest.raises(ProgramError, match="the limit is"):
        decode(encode(huge))


def test_counts_and_bytes_beyond_the_limits_are_refused() -> None:
    slot = Slot(DType.UINT8, (), Role.INPUT)
    with pytest.raises(ProgramError, match="exceed the limits"):
        decode(encode(Program((slot,) * (LIMITS.program_slots + 1), ())))
    with pytest.raises(ProgramError, match="bytes, the limit"):
        decode(bytes(LIMITS.program_bytes + 1))


def test_the_largest_program_fits_its_byte_limit() -> None:
    size = 32 + 48 * LIMITS.program_slots + 96 * LIMITS.program_instructions
    assert size <= LIMITS.program_bytes


def test_arguments_are_the_slots_that_are_not_temporary() -> None:
    roles = [Role.INPUT, Role.TEMPORARY, Role.OUTPUT]
    program = Program(tuple(Slot(DType.INT8, (), r) for r in roles), ())
    assert program.arguments() == (0, 2)


def test_labels_are_numpys_names() -> None:
    for dtype in DType:
        assert np.dtype(dtype.label).itemsize == dtype.itemsize
        assert by_label(dtype.label) is dtype
