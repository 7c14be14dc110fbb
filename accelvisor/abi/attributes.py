"""Attributes of an instruction: their declaration and their raw form in a program.

An attribute is an ``int`` (int64) or a ``float`` (float64) and travels as the 64 bits of that type.
Standard library only; the guest packs, the function unpacks and checks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelvisor.errors import ProgramError

INT = "int"
FLOAT = "float"

_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Attribute:
    """A declared attribute. ``minimum`` and ``maximum`` are inclusive; ``None`` leaves that side
    open (for a float that includes the infinity). NaN is never accepted.
    """

    name: str
    type: str
    default: int | float
    minimum: int | float | None = None
    maximum: int | float | None = None

    def check(self, value: int | float, where: str) -> int | float:
        """``value`` in the attribute's own type. Raises ProgramError when it is out of range."""
        if self.type == INT:
            if isinstance(value, float) and not value.is_integer():
                raise self._bad(value, where)
            value = int(value)
            if not -(2**63) <= value < 2**63:
                raise self._bad(value, where)
        else:
            try:
                value = float(value)
            except OverflowError:
                raise self._bad(value, where) from None
            if value != value:
                raise self._bad(value, where)
        if self.minimum is not None and value < self.minimum:
            raise self._bad(value, where)
        if self.maximum is not None and value > self.maximum:
            raise self._bad(value, where)
        return value

    def _bad(self, value: int | float, where: str) -> ProgramError:
        low = "any" if self.minimum is None else self.minimum
        high = "any" if self.maximum is None else self.maximum
        return ProgramError(
            f"attribute {self.name} is {value}, must be {self.type} from {low} to {high}",
            where=where,
            hint=f"the default is {self.default}",
        )

    def describe(self) -> dict[str, Any]:
        """The JSON form in Query.INSTRUCTIONS."""
        return {
            "name": self.name,
            "type": self.type,
            "min": self.minimum,
            "max": self.maximum,
            "default": self.default,
        }


def from_description(entry: Mapping[str, Any]) -> Attribute:
    """The inverse of :meth:`Attribute.describe`."""
    return Attribute(entry["name"], entry["type"], entry["default"], entry["min"], entry["max"])


def pack(
    attributes: Sequence[Attribute], values: Mapping[str, int | float], where: str = ""
) -> tuple[int, ...]:
    """Raw 64-bit patterns in declared order; missing values take their defaults.

    Raises:
        ProgramError: a value is out of range or names no attribute.
    """
    unknown = set(values) - {a.name for a in attributes}
    if unknown:
        raise ProgramError(
            f"no attribute {sorted(unknown)[0]!r}",
            where=where,
            hint=f"it has {', '.join(a.name for a in attributes) or 'none'}",
        )
    raw = []
    for attribute in attributes:
        value = attribute.check(values.get(attribute.name, attribute.default), where)
        packed = _I64.pack(int(value)) if attribute.type == INT else _F64.pack(value)
        raw.append(_U64.unpack(packed)[0])
    return tuple(raw)


def unpack(
    attributes: Sequence[Attribute], raw: Sequence[int], where: str = ""
) -> tuple[int | float, ...]:
    """Values in declared order from raw 64-bit patterns.

    Raises:
        ProgramError: their number is wrong, or a value is out of range or NaN.
    """
    if len(raw) != len(attributes):
        raise ProgramError(
            f"{len(raw)} attributes, must be {len(attributes)}",
            where=where,
            hint="pack all of them, in declared order",
        )
    values = []
    for attribute, bits in zip(attributes, raw, strict=True):
        form = _I64 if attribute.type == INT else _F64
        values.append(attribute.check(form.unpack(_U64.pack(bits))[0], where))
    return tuple(values)
