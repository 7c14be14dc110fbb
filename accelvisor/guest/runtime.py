"""The guest's runtime in one place: what a program imports.

    from accelvisor.guest import Function

    with Function.open() as fn:
        a = fn.tensor([[1.0, 2.0], [3.0, 4.0]])
        print((a @ a).numpy())
"""

from __future__ import annotations

from accelvisor.guest.discovery import Device, discover, find
from accelvisor.guest.function import Function
from accelvisor.guest.instructions import Instruction, InstructionSet
from accelvisor.guest.launch import Bound, Launch
from accelvisor.guest.program import Program, Value
from accelvisor.guest.tensor import PinnedArray, Tensor

__all__ = [
    "Bound",
    "Device",
    "Function",
    "Instruction",
    "InstructionSet",
    "Launch",
    "PinnedArray",
    "Program",
    "Tensor",
    "Value",
    "discover",
    "find",
]
