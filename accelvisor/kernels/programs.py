"""From an uploaded program to operations that can run: validation and planning.

Everything that a kernel relies on is checked here, once, when a program is uploaded; afterwards no
operand out of range can reach a kernel, whatever the guest wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Operation, Program, Role, Slot
from accelvisor.abi.shapes import bind_shapes, infer_dtypes
from accelvisor.errors import ProgramError
from accelvisor.kernels.declare import (
    Arrays,
    Cost,
    Instruction,
    Queue,
    Tiling,
    Values,
    decode_attributes,
)
from accelvisor.kernels.registry import INSTRUCTIONS

__all__ = ["PlannedOperation", "Queue", "prepare", "validate"]


@dataclass(frozen=True, slots=True)
class PlannedOperation:
    """One operation with everything precomputed, so that the engine only loops over tiles.

    Attributes:
        index: its place in the program.
        operands: slot of each operand, in declared order.
        reads, writes: positions in ``operands`` that are read, that are written.
        aliased: positions that are read and whose slot this operation also writes: the engine must
            hand a copy of them to the kernel, or a tile could not run again.
    """

    index: int
    instruction: Instruction
    operands: tuple[int, ...]
    attributes: Values
    tiling: Tiling
    tiles: int
    cost: Cost
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    aliased: tuple[int, ...]
    #: (source, target) chips of the link that it moves data over
    link: tuple[int, int] | None = None

    def crossing(self, arrays: Arrays) -> int:
        """Bytes that went over the link; asked when all tiles are done."""
        measured = self.instruction.crossing
        return measured(arrays, self.attributes) if measured else self.cost.bytes_written

    def run_tile(self, arrays: Arrays, tile: int) -> None:
        """Run tile ``tile`` of the fast twin on ``arrays``, in operand order.

        Raises:
            NumericError: data of an index operand is out of range.
        """
        step = self.tiling.step
        start = tile * step
        with np.errstate(all="ignore"):
            self.instruction.fast(
                arrays, self.attributes, start, min(start + step, self.tiling.extent)
            )

    def run_reference(self, arrays: Arrays) -> None:
        """Run the reference twin on everything."""
        self.instruction.run_reference(arrays, self.attributes)


def validate(program: Program) -> None:
    """Check every rule that kernels rely on.

    Raises:
        ProgramError: ``where`` is ``instruction N (name)`` or ``slot N``.
    """
    prepare(program)


def prepare(program: Program) -> tuple[PlannedOperation, ...]:
    """Validate ``program`` and plan each of its operations.

    Raises:
        ProgramError: as :func:`validate`.
    """
    written = {i for i, slot in enumerate(program.slots) if slot.role is not Role.TEMPORARY}
    kinds: dict[tuple[DType, tuple[int, ...]], int] = {}
    kind = [kinds.setdefault((s.dtype, s.shape), len(kinds)) for s in program.slots]
    known: dict[tuple[object, ...], _Checked] = {}
    planned = []
    for index, operation in enumerate(program.operations):
        instruction = INSTRUCTIONS.get(operation.opcode)
        if instruction is None:
            raise _bad(f"instruction {index}", f"unknown opcode {operation.opcode:#06x}")
        where = f"instruction {index} ({instruction.name})"
        _check_roles(program, instruction, operation, written, where)
        values = decode_attributes(instruction, operation.attributes, where)
        # Shapes, tiles and cost follow from these; a long program repeats few of them.
        integers = tuple(v for v in values if type(v) is int)
        key = (operation.opcode, integers, tuple(kind[s] for s in operation.operands))
        checked = known.get(key)
        if checked is None:
            slots = [program.slots[s] for s in operation.operands]
            checked = known[key] = _check(instruction, slots, values, where)
        planned.append(_plan(index, instruction, operation.operands, values, checked))
    return tuple(planned)


@dataclass(frozen=True, slots=True)
class _Checked:
    """What depends on opcode, integer attributes, shapes and dtypes alone."""

    tiling: Tiling
    cost: Cost


def _plan(
    index: int,
    instruction: Instruction,
    operands: tuple[int, ...],
    values: Values,
    checked: _Checked,
) -> PlannedOperation:
    outputs = [operands[p] for p in instruction.writes]
    return PlannedOperation(
        index,
        instruction,
        operands,
        values,
        checked.tiling,
        checked.tiling.tiles,
        checked.cost,
        instruction.reads,
        instruction.writes,
        tuple(p for p in instruction.reads if operands[p] in outputs),
        _link(instruction, values),
    )


def _link(instruction: Instruction, values: Values) -> tuple[int, int] | None:
    """The chips that an instruction moves data between, by its attributes of these names."""
    named = {a.name: v for a, v in zip(instruction.attributes, values, strict=True)}
    source, target = named.get("source", -1), named.get("target", -1)
    return (source, target) if source >= 0 and target >= 0 and source != target else None


def _check(instruction: Instruction, slots: Sequence[Slot], values: Values, where: str) -> _Checked:
    shapes, dtypes = [s.shape for s in slots], [s.dtype for s in slots]
    named = {a.name: v for a, v in zip(instruction.attributes, values, strict=True)}
    try:
        infer_dtypes(instruction.declaration, [d.label for d in dtypes])
        bind_shapes(instruction.declaration, shapes, named)
    except ProgramError as error:
        raise _bad(where, f"{error.where}: {error.message}", error.hint) from None
    tiling = instruction.tiling(shapes, values)
    return _Checked(tiling, instruction.cost(shapes, values, dtypes))


def _check_roles(
    program: Program, instruction: Instruction, operation: Operation, written: set[int], where: str
) -> None:
    """Slots exist, inputs are not written, outputs are distinct, temporaries are written first."""
    if len(operation.operands) != len(instruction.operands):
        raise _bad(where, f"{len(operation.operands)} operands, takes {len(instruction.operands)}")
    for slot in operation.operands:
        if not 0 <= slot < len(program.slots):
            raise _bad(where, f"names slot {slot}, the program has {len(program.slots)}")
    for position in instruction.reads:
        if operation.operands[position] not in written:
            # Its bytes are whatever lay there before, perhaps of another context.
            raise _bad(
                where,
                f"reads temporary slot {operation.operands[position]} before anything wrote it",
                "fill it first, or make it an output slot",
            )
    outputs = [operation.operands[p] for p in instruction.writes]
    if len(set(outputs)) != len(outputs):
        raise _bad(where, "writes the same slot twice")
    for slot in outputs:
        if program.slots[slot].role is Role.INPUT:
            raise _bad(where, f"writes input slot {slot}", "make it an output slot")
    written.update(outputs)


def _bad(where: str, message: str, hint: str = "") -> ProgramError:
    return ProgramError(
        message, where=where, hint=hint or "build programs with accelvisor.guest.Program"
    )
