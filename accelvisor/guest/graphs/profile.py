"""What a graph must know of a program: its queue, what it reads and writes, about how long it runs.

The device's table of instructions has no costs, and a guest has no clock of its own for them. So a
program's length is *estimated* from shapes, by the hardware that the device's model clock has, and
may be taken from the device's trace once it ran (``Graph.calibrate``). An estimate only moves the
order of a queue: results and freedom from deadlock do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from accelvisor.abi import programs
from accelvisor.abi.attributes import unpack
from accelvisor.abi.graphs import QueueType
from accelvisor.abi.programs import Operation, Program, Role, Slot
from accelvisor.abi.shapes import Bindings, parse, unify
from accelvisor.errors import ProgramError
from accelvisor.guest.instructions import Instruction

#: The model clock's hardware: multiply-accumulates, element operations and bytes in one cycle, and
#: what each instruction costs before it does anything.
MACS, LANES, BYTES, ISSUE = 64 * 64, 64, 256, 32


@dataclass(frozen=True, slots=True)
class Profile:
    """Of one program.

    A program's temporaries are one piece of memory, so it cannot run twice at a time. What runs
    beside itself on several queues is therefore the same program with its temporaries as outputs,
    which each queue binds to memory of its own.

    Attributes:
        reads, writes: one flag for each argument of the original, in binding order.
        cycles: the estimate.
        data: the program without temporaries; the original where it had none.
        layout: what is bound to ``data``, in order: argument n of the original, or ``~n`` for
            its temporary n.
        scratch: the temporaries' slots.
    """

    type: QueueType
    reads: tuple[bool, ...]
    writes: tuple[bool, ...]
    cycles: int
    data: bytes
    layout: tuple[int, ...]
    scratch: tuple[Slot, ...]


def profile(data: bytes, table: Mapping[str, Instruction]) -> Profile:
    """The profile of an encoded program.

    Raises:
        ProgramError: it has an instruction that ``table`` has not.
    """
    program = programs.decode(data)
    by_opcode = {row.opcode: row for row in table.values()}
    read: set[int] = set()
    written: set[int] = set()
    kinds: set[str] = set()
    cycles = 0
    for operation in program.operations:
        row = by_opcode.get(operation.opcode)
        if row is None:
            raise ProgramError(f"unknown instruction {operation.opcode:#x}", where="graph")
        for operand, slot in zip(row.operands, operation.operands, strict=True):
            (written if operand.written else read).add(slot)
        kinds.add(str(row.declaration.get("queue", "compute")))
        cycles += estimate(row, operation, program.slots)
    arguments = program.arguments()
    temporaries = [i for i, s in enumerate(program.slots) if s.role is Role.TEMPORARY]
    number = {slot: n for n, slot in enumerate(arguments)}
    number |= {slot: ~n for n, slot in enumerate(temporaries)}
    return Profile(
        QueueType.TRANSFER if kinds == {"transfer"} else QueueType.COMPUTE,
        tuple(slot in read for slot in arguments),
        tuple(slot in written for slot in arguments),
        cycles,
        _bare(program) if temporaries else data,
        tuple(number[slot] for slot in range(len(program.slots))),
        tuple(program.slots[i] for i in temporaries),
    )


def _bare(program: Program) -> bytes:
    """The program with its temporaries as outputs."""
    slots = tuple(
        replace(s, role=Role.OUTPUT) if s.role is Role.TEMPORARY else s for s in program.slots
    )
    return programs.encode(replace(program, slots=slots))


def estimate(row: Instruction, operation: Operation, slots: Sequence[Slot]) -> int:
    """Cycles of one instruction: its arithmetic or its memory, whichever takes longer.

    A dim that two operands read and nobody writes is summed over: then all dims together are the
    multiply-accumulates. Else there is one element operation for each element of the largest
    operand.
    """
    used = [slots[i] for i in operation.operands]
    elements = max((prod(s.shape) for s in used), default=0)
    memory = -(-sum(s.nbytes for s in used) // BYTES)
    sizes = _sizes(row, operation, used)
    inner = _summed(row)
    macs = prod(sizes.get(name, 1) for name in _names(row)) if inner else 0
    return ISSUE + max(-(-macs // MACS) if inner else -(-elements // LANES), memory)


def _sizes(row: Instruction, operation: Operation, used: Sequence[Slot]) -> dict[str, int]:
    """Dims by name, as far as they can be told."""
    values = unpack(row.attributes, operation.attributes, row.name)
    named: dict[str, Any] = dict(zip((a.name for a in row.attributes), values, strict=True))
    bindings = Bindings({k: v for k, v in named.items() if isinstance(v, int)})
    for operand, slot in zip(row.operands, used, strict=True):
        unify(parse(operand.shape), slot.shape, bindings, row.name)
    return bindings.numbers


def _dims(pattern: str) -> set[str]:
    return {d.text for d in parse(pattern).dims if d.kind == "name"}


def _names(row: Instruction) -> set[str]:
    return set().union(*(_dims(o.shape) for o in row.operands if not o.written))


def _summed(row: Instruction) -> set[str]:
    reads = [_dims(o.shape) for o in row.operands if not o.written]
    shared = {n for i, a in enumerate(reads) for b in reads[i + 1 :] for n in a & b}
    return shared - set().union(*(_dims(o.shape) for o in row.operands if o.written))
