"""The instruction reference, docs/instructions.md, written from the declarations.

``python -m accelvisor.kernels.document > docs/instructions.md`` renews it; a test compares the two.
"""

from __future__ import annotations

from accelvisor.abi.attributes import Attribute
from accelvisor.abi.dtypes import DType
from accelvisor.kernels.declare import ALL, FLOATS, INDEX, NUMBERS, Access, Instruction, Operand
from accelvisor.kernels.registry import INSTRUCTIONS

_HEAD = """# Instructions

Written from the declarations in `accelvisor/kernels`; do not edit, run
`python -m accelvisor.kernels.document > docs/instructions.md`.

An instruction reads some tensors and writes others; every element of a written tensor is written.
To update in place, bind one slot to an operand that is read and to one that is written. Shapes are
in the language of `accelvisor/abi/shapes.py`: a name binds a dim or must be equal, `*s` binds any
number of dims, `#s` is their product. *Error* is how far the device's fast kernel may be from the
plain reference: `same bits`, a number of eps, or eps times the number of terms, against the sum of
their magnitudes. Types in brackets are alternatives; `= x` is the type of operand x. Attributes are
`name: type = default [minimum, maximum]`.
"""

_GROUPS = {
    ALL: "any",
    NUMBERS: "float32, float64, int32, int64",
    FLOATS: "float32, float64",
    INDEX: "int64, int32",
}


def _types(operand: Operand) -> str:
    if operand.like:
        return f"= {operand.like}"
    group: tuple[DType, ...] = operand.dtypes
    return _GROUPS.get(group) or ", ".join(d.label for d in group)


def _operand(operand: Operand) -> str:
    below = f", values below {operand.below}" if operand.below else ""
    return f"`{operand.name}: {operand.shape or 'scalar'}` ({_types(operand)}{below})"


def _attribute(attribute: Attribute) -> str:
    low = "" if attribute.minimum is None else attribute.minimum
    high = "" if attribute.maximum is None else attribute.maximum
    limits = f" [{low}, {high}]" if low != "" or high != "" else ""
    return f"`{attribute.name}: {attribute.type} = {attribute.default}{limits}`"


def _section(instruction: Instruction) -> list[str]:
    reads = [_operand(o) for o in instruction.operands if o.access is Access.READ]
    writes = [_operand(o) for o in instruction.operands if o.access is Access.WRITE]
    lines = [
        f"## {instruction.name}",
        "",
        f"{instruction.doc}.",
        "",
        f"* opcode `{instruction.opcode:#06x}`, {instruction.queue.value} queue, "
        f"error: {instruction.bound.text()}",
    ]
    if reads:
        lines.append(f"* reads {'; '.join(reads)}")
    lines.append(f"* writes {'; '.join(writes)}")
    if instruction.attributes:
        lines.append(f"* attributes {'; '.join(_attribute(a) for a in instruction.attributes)}")
    if instruction.requires:
        lines.append(f"* requires {'; '.join(f'`{r}`' for r in instruction.requires)}")
    return [*lines, ""]


def render() -> str:
    """The whole of docs/instructions.md."""
    lines = [_HEAD]
    for instruction in INSTRUCTIONS.values():
        lines += _section(instruction)
    return "\n".join(lines)


if __name__ == "__main__":
    print(render(), end="")
