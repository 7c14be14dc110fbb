"""What ranks say to each other: one fixed header, then a payload of as many bytes as it says.

Every header carries the whole *call* (which collective, of what, how), so that the first message of
a rank that calls something else shows it. All numbers little-endian, 128 bytes:

    4s magic "AVC1" | u8 kind | u8 form | u8 collective | u8 op | u8 dtype | u8 order
    u16 size | u16 sender | u16 root | u16 rows | u16 columns | u8 rank of the shape | u8 0
    u32 step | u32 part | u32 sequence | u32 0 | u64 chunk elements | u64 payload bytes
    8 x u64 dims | 10 bytes 0

``kind`` DATA carries a part of a block; REPORT says, without a payload, how far its sender came:
``form`` is then the reason, ``step`` the step that it waits in, ``part`` whom it waits for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from accelvisor.collectives.kinds import BY_CODE, Op
from accelvisor.errors import DataError, UsageError
from accelvisor.limits import LIMITS

Payload: TypeAlias = Any  # whatever gives its bytes

MAGIC = b"AVC1"
_HEADER = struct.Struct("<4s6B5H2B4I2Q8Q10x")
HEADER_BYTES = _HEADER.size
NOBODY = 0xFFFF_FFFF


class Collective(IntEnum):
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    REDUCE = 5
    ALL_REDUCE_2D = 6


class Order(IntEnum):
    """In which order a value's summands are added; docs/collectives.md has what each costs."""

    RING = 0
    RANK = 1


class Form(IntEnum):
    """How a payload holds its values."""

    DENSE = 0
    PACKED = 1


class Reason(IntEnum):
    """Why a rank reports."""

    LATE = 0  # waited longer than its deadline
    TOLD = 1  # another rank reported while it waited
    SLOW = 2  # another rank reported, and what this one waits for is there: it keeps others waiting
    DIFFERENT = 3  # a message of another call
    DAMAGED = 4  # a message that is none


class Kind(IntEnum):
    DATA = 0
    REPORT = 1


@dataclass(frozen=True, slots=True)
class Call:
    """What all ranks of one collective must agree on.

    ``chunk`` counts elements, 0 for whole blocks; ``root``, ``rows`` and ``columns`` are 0 where
    the collective has none.
    """

    collective: Collective
    shape: tuple[int, ...]
    dtype: int
    op: Op
    order: Order
    size: int
    root: int = 0
    rows: int = 0
    columns: int = 0
    chunk: int = 0

    def describe(self, field: str) -> str:
        """A field's value as people read it."""
        value = getattr(self, field)
        if field == "dtype":
            return BY_CODE[value].name
        return value.name.lower() if isinstance(value, IntEnum) else str(value)

    def differences(self, other: Call) -> list[str]:
        """Names of the fields in which two calls differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


class Head(NamedTuple):
    """A decoded header."""

    kind: Kind
    form: int
    call: Call
    sender: int
    step: int
    part: int
    sequence: int
    payload: int


def encode(head: Head) -> bytes:
    """The 128 bytes. Raises UsageError: the shape has more dims than a tensor may have."""
    call = head.call
    if len(call.shape) > LIMITS.tensor_rank:
        raise UsageError(
            f"an array of rank {len(call.shape)}", where="collectives",
            hint=f"at most {LIMITS.tensor_rank}: reshape it",
        )  # fmt: skip
    dims = (*call.shape, *(0 for _ in range(LIMITS.tensor_rank - len(call.shape))))
    return _HEADER.pack(
        MAGIC, head.kind, head.form, call.collective, call.op, call.dtype, call.order,
        call.size, head.sender, call.root, call.rows, call.columns, len(call.shape), 0,
        head.step, head.part, head.sequence, 0, call.chunk, head.payload, *dims,
    )  # fmt: skip


def decode(raw: Payload) -> Head:
    """The header in 128 bytes. Raises DataError (``collective-message``) when it is none."""
    try:
        (
            magic, kind, form, collective, op, dtype, order, size, sender, root, rows, columns,
            dims, _, step, part, sequence, _, chunk, payload, *shape,
        ) = _HEADER.unpack(raw)  # fmt: skip
        if magic != MAGIC or dims > LIMITS.tensor_rank or dtype not in BY_CODE or sender >= size:
            raise ValueError
        call = Call(
            Collective(collective), tuple(shape[:dims]), dtype, Op(op), Order(order), size,
            root, rows, columns, chunk,
        )  # fmt: skip
        reason = Reason(form) if kind == Kind.REPORT else Form(form)
        return Head(Kind(kind), reason, call, sender, step, part, sequence, payload)
    except (ValueError, struct.error):
        raise damaged("the header of a message is none") from None


def damaged(message: str) -> DataError:
    """A message is not what its collective has there."""
    return DataError(
        message, code="collective-message", where="collectives",
        hint="all ranks must run the same release, and nothing else may send on its tags",
    )  # fmt: skip
