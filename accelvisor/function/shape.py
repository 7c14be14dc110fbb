"""The function's shape: which part of the card it has, under which epoch. Two records in the state
memfd, of which a generation word says which one counts: a change is written beside and then made
true by one store, so a worker that dies in between leaves the one or the other.

The holder writes the first, from the specification; the worker the later ones, when the daemon asks
it to. Standard library only.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelvisor.errors import StateError, UsageError
from accelvisor.function.spec import Spec
from accelvisor.function.state import SHAPE_AT, SHAPE_RECORD_BYTES
from accelvisor.isolation.segments import Segment, checked
from accelvisor.limits import LIMITS

_GENERATION = struct.Struct("<Q")
#: epoch, cores, segments
_HEAD = struct.Struct("<QII")
#: base, bytes, start, bank
_SEGMENT = struct.Struct("<QQQI4x")
_FIRST_AT = SHAPE_AT + 64
_EPOCHS = 2**32


@dataclass(frozen=True, slots=True)
class Shape:
    """``cores`` 0 and no segments: the function was revoked."""

    epoch: int
    cores: int
    segments: tuple[Segment, ...]

    @property
    def memory_bytes(self) -> int:
        return self.segments[-1].end if self.segments else 0

    @property
    def revoked(self) -> bool:
        return not self.segments

    def to_dict(self) -> dict[str, Any]:
        """As the control socket speaks of it; :func:`parse` takes it apart."""
        return {
            "epoch": self.epoch,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "segments": [[i.base, i.nbytes, i.bank, i.start] for i in self.segments],
        }


def parse(fields: Mapping[str, Any]) -> Shape:
    """A shape that somebody asks for.

    Raises:
        UsageError: something is missing, of another type, or out of range.
        ConfigError: the segments are no table.
    """
    if set(fields) - {"memory_bytes"} != {"epoch", "cores", "segments"}:
        raise UsageError("a shape is epoch, cores and segments", where="shape")
    epoch, cores, rows = fields["epoch"], fields["cores"], fields["segments"]
    if type(epoch) is not int or not 0 < epoch < _EPOCHS:
        raise UsageError(f"an epoch is 1 to 2^32-1, not {epoch!r}", where="shape")
    if type(cores) is not int or not 0 <= cores <= LIMITS.cores:
        raise UsageError(f"{cores!r} cores, it must be 0 to {LIMITS.cores}", where="shape")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 4 and all(type(n) is int for n in row) for row in rows
    ):
        raise UsageError("segments are [base, bytes, bank, start]", where="shape")
    shape = Shape(epoch, cores, checked([Segment(*row) for row in rows], "shape"))
    if bool(cores) != bool(shape.segments):
        raise UsageError("cores without memory, or memory without cores", where="shape")
    return shape


def of(spec: Spec) -> Shape:
    """What a function begins with."""
    whole = (Segment(0, spec.memory_bytes, 0, 0),) if spec.memory_bytes else ()
    return Shape(spec.epoch, spec.cores, spec.segments or whole)


def begin(fd: int, shape: Shape) -> None:
    """Write the first record into a fresh state memfd."""
    os.pwrite(fd, _pack(shape), _FIRST_AT + SHAPE_RECORD_BYTES)
    os.pwrite(fd, _GENERATION.pack(1), SHAPE_AT)


def current(u8: memoryview, spec: Spec) -> Shape:
    """The record that counts; in a state that has none yet, the specification's becomes it."""
    if not _GENERATION.unpack_from(u8, SHAPE_AT)[0]:
        install(u8, of(spec))
    return load(u8)


def load(u8: memoryview) -> Shape:
    """The record that counts.

    Raises:
        StateError: there is none, or it is damaged.
    """
    (generation,) = _GENERATION.unpack_from(u8, SHAPE_AT)
    at = _FIRST_AT + generation % 2 * SHAPE_RECORD_BYTES
    epoch, cores, count = _HEAD.unpack_from(u8, at)
    if not generation or count > LIMITS.segments:
        raise StateError("the state has no shape", where="function-state")
    at += _HEAD.size
    rows = [_SEGMENT.unpack_from(u8, at + n * _SEGMENT.size) for n in range(count)]
    return Shape(epoch, cores, tuple(Segment(b, n, bank, start) for b, n, start, bank in rows))


def install(u8: memoryview, shape: Shape) -> None:
    """Make another record the one that counts."""
    (generation,) = _GENERATION.unpack_from(u8, SHAPE_AT)
    raw = _pack(shape)
    at = _FIRST_AT + (generation + 1) % 2 * SHAPE_RECORD_BYTES
    u8[at : at + len(raw)] = raw
    u8[SHAPE_AT : SHAPE_AT + 8].cast("Q")[0] = generation + 1


def _pack(shape: Shape) -> bytes:
    return _HEAD.pack(shape.epoch, shape.cores, len(shape.segments)) + b"".join(
        _SEGMENT.pack(i.base, i.nbytes, i.start, i.bank) for i in shape.segments
    )
