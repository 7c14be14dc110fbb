"""The device's instruction table, as it says itself (Query.INSTRUCTIONS).

The guest has no list of instructions of its own: what a device can do is asked of it, and names,
arguments, documentation, shapes and types of the Python calls follow from its answer. A newer
device brings its new instructions to an older guest.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelvisor.abi.attributes import Attribute, from_description, pack
from accelvisor.abi.programs import MAX_ATTRIBUTES, MAX_OPERANDS
from accelvisor.abi.shapes import bind_shapes, infer_dtypes
from accelvisor.errors import ProgramError, ProtocolError, UsageError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor that an instruction reads or writes."""

    name: str
    written: bool
    shape: str  # in the language of accelvisor.abi.shapes
    dtypes: tuple[str, ...]
    like: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One row of the device's table."""

    name: str
    opcode: int
    doc: str
    operands: tuple[Operand, ...]
    attributes: tuple[Attribute, ...]
    declaration: Mapping[str, Any]

    @property
    def reads(self) -> tuple[int, ...]:
        """Positions of the operands that are read: the call's positional arguments."""
        return tuple(i for i, o in enumerate(self.operands) if not o.written)

    @property
    def writes(self) -> tuple[int, ...]:
        """Positions of the operands that are written: the call's results, or its ``out``."""
        return tuple(i for i, o in enumerate(self.operands) if o.written)

    def infer(
        self,
        shapes: Sequence[Shape | None],
        dtypes: Sequence[str | None],
        attributes: Mapping[str, int | float],
    ) -> tuple[list[Shape], list[str]]:
        """Shapes and dtypes of all operands in order, those that are None from the others.

        Raises:
            ProgramError: they do not fit; ``where`` names the operand.
        """
        return (
            bind_shapes(self.declaration, shapes, attributes),
            infer_dtypes(self.declaration, dtypes),
        )

    def pack(self, attributes: Mapping[str, int | float]) -> tuple[int, ...]:
        """The attributes as a program carries them.

        Raises:
            ProgramError: one is unknown or out of its range.
        """
        known = {a.name for a in self.attributes}
        for name in attributes:
            if name not in known:
                have = ", ".join(sorted(known)) or "none"
                raise ProgramError(
                    f"no attribute {name!r}", where=self.name, hint=f"it has: {have}"
                )
        return pack(self.attributes, attributes, self.name)

    def signature(self) -> inspect.Signature:
        """How the Python call looks."""
        kind = inspect.Parameter
        attributes = {a.name for a in self.attributes}
        # An operand and an attribute may share a name (w: weights, and a width): one is given by
        # position and one by name, so only the shown name must differ.
        reads = [self.operands[i].name for i in self.reads]
        reads = [f"{name}_" if name in attributes else name for name in reads]
        names = attributes.union(reads)
        parameters = [kind(name, kind.POSITIONAL_ONLY) for name in reads]
        parameters += [
            kind(a.name, kind.KEYWORD_ONLY, default=a.default) for a in self.attributes
        ]
        parameters += [
            kind(extra, kind.KEYWORD_ONLY, default=None)
            for extra in ("out", "shape", "dtype")
            if extra not in names
        ]
        return inspect.Signature(parameters)

    def help(self) -> str:
        """Documentation text of the Python call."""
        lines = [self.doc, ""]
        for o in self.operands:
            arrow = "->" if o.written else "<-"
            types = f"like {o.like}" if o.like else ", ".join(o.dtypes)
            lines.append(f"    {arrow} {o.name}: ({o.shape}) {types}")
        for a in self.attributes:
            low = "" if a.minimum is None else f"{a.minimum} <= "
            high = "" if a.maximum is None else f" <= {a.maximum}"
            lines.append(f"    {low}{a.name}{high}: {a.type}, default {a.default}")
        requires = self.declaration.get("requires", ())
        if requires:
            lines.append("    requires " + "; ".join(requires))
        return "\n".join(lines)


class InstructionSet(Mapping[str, Instruction]):
    """All instructions of a device by name."""

    def __init__(self, table: Sequence[Instruction]) -> None:
        self._by_name = {i.name: i for i in table}

    def __getitem__(self, name: str) -> Instruction:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def require(self, name: str) -> Instruction:
        """The instruction of that name.

        Raises:
            UsageError: this device has none.
        """
        found = self._by_name.get(name)
        if found is None:
            import difflib

            close = difflib.get_close_matches(name, self._by_name, 3)
            hint = "it has " + ", ".join(close or sorted(self._by_name))
            raise UsageError(
                f"this device has no instruction {name!r}",
                code="instruction-unknown",
                where="program",
                hint=hint,
            )
        return found


def parse_instructions(data: bytes) -> InstructionSet:
    """The table from the device's JSON.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        return instructions_from(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(
            f"the device's instruction table cannot be read: {error!r}",
            code="instruction-table",
            where="query:instructions",
            hint="the guest package may be older than the device: update it",
        ) from error


def instructions_from(rows: Sequence[Mapping[str, Any]]) -> InstructionSet:
    """The table from parsed JSON. Raises ValueError, KeyError or TypeError when it is none."""
    return InstructionSet([_instruction(row) for row in rows])


def _instruction(row: Mapping[str, Any]) -> Instruction:
    operands = tuple(
        Operand(
            str(o["name"]),
            o["access"] != "read",
            str(o["shape"]),
            tuple(str(d) for d in o["dtypes"]),
            str(o.get("like") or ""),
        )
        for o in row["operands"]
    )
    attributes = tuple(from_description(a) for a in row["attributes"])
    if len(operands) > MAX_OPERANDS or len(attributes) > MAX_ATTRIBUTES:
        raise ValueError(f"{row['name']} has too many operands or attributes")
    return Instruction(
        str(row["name"]), int(row["opcode"]), str(row["doc"]), operands, attributes, row
    )
