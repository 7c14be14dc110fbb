"""Run a whole program on numpy arrays, without a device: the oracle that devices are held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from accelvisor.abi.programs import Program, Role
from accelvisor.errors import UsageError
from accelvisor.kernels.declare import Array
from accelvisor.kernels.programs import PlannedOperation, prepare


def execute(
    program: Program,
    arguments: Sequence[Array],
    *,
    repeat: int = 1,
    twin: Literal["fast", "reference"] = "fast",
) -> None:
    """Run ``program`` ``repeat`` times, in place on its output arguments.

    With the fast twin, tile by tile in order: the same bits as a function on the same machine
    gives.

    Args:
        arguments: one C-contiguous array for each argument slot, in binding order; dtype and shape
            as the slot's. Outputs may be the same array as inputs.

    Raises:
        ProgramError: the program is not valid.
        UsageError: the arguments do not fit it.
        NumericError: an index in data is out of range.
    """
    operations = prepare(program)
    arrays = _bind(program, arguments)
    for _ in range(repeat):
        for operation in operations:
            _run(operation, arrays, twin)


def _bind(program: Program, arguments: Sequence[Array]) -> list[Array]:
    """An array for every slot; temporaries are allocated."""
    wanted = program.arguments()
    if len(arguments) != len(wanted):
        raise UsageError(f"{len(arguments)} arguments, the program takes {len(wanted)}")
    given = iter(arguments)
    arrays = []
    for index, slot in enumerate(program.slots):
        dtype: np.dtype[Any] = np.dtype(slot.dtype.label)
        if slot.role is Role.TEMPORARY:
            arrays.append(np.zeros(slot.shape, dtype))
            continue
        array = next(given)
        if array.dtype != dtype or array.shape != slot.shape or not array.flags.c_contiguous:
            raise UsageError(
                f"slot {index} takes a contiguous {dtype} of shape {slot.shape}, "
                f"not {array.dtype} of {array.shape}"
            )
        if slot.role is Role.OUTPUT and not array.flags.writeable:
            raise UsageError(f"slot {index} is written, its array is read-only")
        arrays.append(array)
    return arrays


def _run(operation: PlannedOperation, slots: list[Array], twin: str) -> None:
    arrays = [slots[slot] for slot in operation.operands]
    outputs = [arrays[p] for p in operation.writes]
    for i, out in enumerate(outputs):
        if any(np.may_share_memory(out, other) for other in outputs[:i]):
            raise UsageError(f"instruction {operation.index} writes the same memory twice")
    for position in operation.reads:
        # as the engine does: a tile must find its inputs unchanged when it runs again
        if any(np.may_share_memory(arrays[position], out) for out in outputs):
            arrays[position] = arrays[position].copy()
    if twin == "reference":
        operation.run_reference(arrays)
    else:
        for tile in range(operation.tiles):
            operation.run_tile(arrays, tile)
