"""The program container: what a guest uploads and a function validates.

    header   32 B  magic "XPRG" | version u16 | flags u16 | slots u32 | instructions u32 | 16 B zero
    slots    48 B  dtype u8 | rank u8 | role u8 | 0 | 8 x dim u32 | 12 B zero
    instr.   96 B  opcode u16 | operands u8 | attributes u8 | 4 B zero | 8 x slot u16 | 8 x u64 bits
             (8 B zero at the end)

A program is immutable and named by the SHA-256 of its bytes, so the encoding is canonical: unused
dims, operands, attributes and reserved bytes are zero, and a decoder refuses anything else.
Attributes travel as 64-bit patterns; the instruction's declaration says whether they are a float64
or an int64. What an opcode means, which shapes fit, and whether a slot may be written is *not*
checked here: that is derived from the instruction declarations (accelvisor.kernels).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from accelvisor.abi.dtypes import DType
from accelvisor.errors import ProgramError
from accelvisor.limits import LIMITS

MAGIC = b"XPRG"
VERSION = 1
MAX_OPERANDS = 8
MAX_ATTRIBUTES = 8

_HEADER = struct.Struct("<4sHHII16s")
_SLOT = struct.Struct("<BBBB8I12s")
_INSTRUCTION = struct.Struct("<HBBI8H8Q8s")
_DTYPES = frozenset(int(d) for d in DType)


class Role(IntEnum):
    """What a slot is to the program."""

    INPUT = 0  # bound at launch, only read
    OUTPUT = 1  # bound at launch, may be read and written
    TEMPORARY = 2  # allocated with the program, contents undefined at the start of a launch


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor that the program names. ``shape`` in elements, C order, contiguous."""

    dtype: DType
    shape: tuple[int, ...]
    role: Role

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for dim in self.shape:
            n *= dim
        return n


@dataclass(frozen=True, slots=True)
class Operation:
    """One instruction of a program: operand slots in declared order, attributes as raw 64 bits."""

    opcode: int
    operands: tuple[int, ...]
    attributes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    slots: tuple[Slot, ...]
    operations: tuple[Operation, ...]

    def arguments(self) -> tuple[int, ...]:
        """The slots bound at launch, in binding order."""
        return tuple(i for i, s in enumerate(self.slots) if s.role is not Role.TEMPORARY)


def encode(program: Program) -> bytes:
    """Canonical bytes of ``program``; the inverse of :func:`decode`."""
    parts = [
        _HEADER.pack(MAGIC, VERSION, 0, len(program.slots), len(program.operations), bytes(16))
    ]
    for slot in program.slots:
        dims = slot.shape + (0,) * (8 - len(slot.shape))
        parts.append(_SLOT.pack(slot.dtype, len(slot.shape), slot.role, 0, *dims, bytes(12)))
    for op in program.operations:
        operands = op.operands + (0,) * (MAX_OPERANDS - len(op.operands))
        attributes = op.attributes + (0,) * (MAX_ATTRIBUTES - len(op.attributes))
        parts.append(
            _INSTRUCTION.pack(
                op.opcode, len(op.operands), len(op.attributes), 0, *operands, *attributes, bytes(8)
            )
        )
    return b"".join(parts)


def decode(data: bytes) -> Program:
    """Parse untrusted bytes.

    Raises:
        ProgramError: the bytes are not a canonical program within the limits. ``where`` names the
            slot or instruction.
    """
    if len(data) > LIMITS.program_bytes:
        raise _bad("program", f"{len(data)} bytes, the limit is {LIMITS.program_bytes}")
    if len(data) < _HEADER.size:
        raise _bad("header", f"{len(data)} bytes, a header has {_HEADER.size}")
    magic, version, flags, slots, count, zero = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise _bad("header", "wrong magic")
    if version != VERSION or flags or any(zero):
        raise _bad("header", f"version {version} or reserved bits are not supported")
    if not slots <= LIMITS.program_slots or not count <= LIMITS.program_instructions:
        raise _bad("header", f"{slots} slots and {count} instructions exceed the limits")
    if len(data) != _HEADER.size + slots * _SLOT.size + count * _INSTRUCTION.size:
        raise _bad("header", f"{len(data)} bytes do not hold {slots} slots, {count} instructions")
    at = _HEADER.size
    parsed_slots = tuple(_slot(data, at + i * _SLOT.size, i) for i in range(slots))
    at += slots * _SLOT.size
    operations = tuple(
        _operation(data, at + i * _INSTRUCTION.size, i, slots) for i in range(count)
    )
    return Program(parsed_slots, operations)


def _slot(data: bytes, at: int, index: int) -> Slot:
    where = f"slot {index}"
    dtype, rank, role, pad, *rest = _SLOT.unpack_from(data, at)
    dims, zero = rest[:8], rest[8]
    if dtype not in _DTYPES:
        raise _bad(where, f"unknown dtype {dtype}")
    if rank > LIMITS.tensor_rank:
        raise _bad(where, f"rank {rank}, the limit is {LIMITS.tensor_rank}")
    if role > Role.TEMPORARY:
        raise _bad(where, f"unknown role {role}")
    if pad or any(zero) or any(dims[rank:]):
        raise _bad(where, "reserved bytes are not zero")
    slot = Slot(DType(dtype), tuple(dims[:rank]), Role(role))
    if slot.nbytes > LIMITS.tensor_bytes:
        raise _bad(where, f"{slot.nbytes} bytes, the limit is {LIMITS.tensor_bytes}")
    return slot


def _operation(data: bytes, at: int, index: int, slots: int) -> Operation:
    where = f"instruction {index}"
    opcode, n_operands, n_attributes, pad, *rest = _INSTRUCTION.unpack_from(data, at)
    operands, attributes, zero = rest[:8], rest[8:16], rest[16]
    if n_operands > MAX_OPERANDS or n_attributes > MAX_ATTRIBUTES:
        raise _bad(where, f"{n_operands} operands and {n_attributes} attributes exceed the limits")
    if pad or any(zero) or any(operands[n_operands:]) or any(attributes[n_attributes:]):
        raise _bad(where, "reserved bytes are not zero")
    for operand in operands[:n_operands]:
        if operand >= slots:
            raise _bad(where, f"names slot {operand}, the program has {slots}")
    return Operation(opcode, tuple(operands[:n_operands]), tuple(attributes[:n_attributes]))


def _bad(where: str, message: str) -> ProgramError:
    return ProgramError(
        message, where=where, hint="build programs with accelvisor.guest.Program, which checks them"
    )
