"""A small builder of programs for tests."""

from __future__ import annotations

from accelvisor.abi.attributes import pack
from accelvisor.abi.dtypes import by_label
from accelvisor.abi.programs import Operation, Program, Role, Slot
from accelvisor.abi.shapes import infer_dtypes, infer_outputs
from accelvisor.kernels.registry import BY_NAME


class Builder:
    """Slots and operations; outputs are inferred from the declarations, as a guest does."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.operations: list[Operation] = []

    def slot(self, role: Role, shape: tuple[int, ...], dtype: str = "float32") -> int:
        self.slots.append(Slot(by_label(dtype), shape, role))
        return len(self.slots) - 1

    def input(self, *shape: int, dtype: str = "float32") -> int:
        return self.slot(Role.INPUT, shape, dtype)

    def output(self, *shape: int, dtype: str = "float32") -> int:
        return self.slot(Role.OUTPUT, shape, dtype)

    def run(
        self, name: str, *inputs: int, out: tuple[int, ...] = (), **attributes: float
    ) -> tuple[int, ...]:
        """Add an operation; returns its output slots, temporaries unless ``out`` names them."""
        instruction = BY_NAME[name]
        given = iter(inputs)
        operands: list[int | None] = [
            next(given) if i in instruction.reads else None
            for i in range(len(instruction.operands))
        ]
        outputs = out
        if not outputs:
            shapes = infer_outputs(
                instruction.declaration, [self.slots[s].shape for s in inputs], attributes
            )
            labels: list[str | None] = [
                None if s is None else self.slots[s].dtype.label for s in operands
            ]
            dtypes = infer_dtypes(instruction.declaration, labels)
            outputs = tuple(
                self.slot(Role.TEMPORARY, shape, dtypes[position])
                for position, shape in zip(instruction.writes, shapes, strict=True)
            )
        results = iter(outputs)
        slots = tuple(next(results) if s is None else s for s in operands)
        raw = pack(instruction.attributes, attributes, name)
        self.operations.append(Operation(instruction.opcode, slots, raw))
        return outputs

    def one(self, name: str, *inputs: int, out: int | None = None, **attributes: float) -> int:
        """:meth:`run` for an instruction of one output."""
        (slot,) = self.run(name, *inputs, out=() if out is None else (out,), **attributes)
        return slot

    def program(self) -> Program:
        return Program(tuple(self.slots), tuple(self.operations))
