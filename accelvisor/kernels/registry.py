"""The instruction set: every declaration by opcode, and what is derived from all of them.

A topic file that is new is named in ``_TOPICS``; an instruction in an existing topic file needs
nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from accelvisor.abi.programs import MAX_ATTRIBUTES, MAX_OPERANDS
from accelvisor.abi.shapes import parse, parse_requirement
from accelvisor.kernels import conv, elementwise, exchange, linear, move, nn, pool, reduce
from accelvisor.kernels.declare import Instruction

_TOPICS: tuple[ModuleType, ...] = (move, elementwise, reduce, linear, conv, pool, nn, exchange)


def _collect() -> dict[int, Instruction]:
    """All declarations, checked so that a mistake in one shows at import and not in a guest."""
    found: dict[int, Instruction] = {}
    names: set[str] = set()
    for topic in _TOPICS:
        for instruction in topic.INSTRUCTIONS:
            if instruction.opcode in found or instruction.name in names:
                raise ValueError(f"{instruction.name} or its opcode is declared twice")
            if not instruction.writes or len(instruction.operands) > MAX_OPERANDS:
                raise ValueError(f"{instruction.name} writes nothing or has too many operands")
            if len(instruction.attributes) > MAX_ATTRIBUTES or not instruction.doc:
                raise ValueError(f"{instruction.name} has too many attributes or no doc")
            for operand in instruction.operands:
                parse(operand.shape)
            for requirement in instruction.requires:
                parse_requirement(requirement)
            found[instruction.opcode] = instruction
            names.add(instruction.name)
    return dict(sorted(found.items()))


INSTRUCTIONS: Mapping[int, Instruction] = MappingProxyType(_collect())
"""Every instruction by opcode, in order of opcode."""

BY_NAME: Mapping[str, Instruction] = MappingProxyType({i.name: i for i in INSTRUCTIONS.values()})
"""Every instruction by name."""


def describe() -> list[dict[str, Any]]:
    """The instruction set as JSON-able data: the answer to Query.INSTRUCTIONS."""
    return [instruction.declaration for instruction in INSTRUCTIONS.values()]
