"""What was verified and what was refused: records that are only ever added, each with the digest of
the one before. Whoever knows a later head can tell that one was changed, left out or cut off.

A record is one canonical document; how they lie in a file is :func:`pack` and :func:`unpack` (its
length, then it). The digest of a record is SHA-256 of its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from accelvisor.errors import DataError
from accelvisor.frames import canonical
from accelvisor.frames.manifest import Count, Hash
from accelvisor.limits import LIMITS

#: What the first record names as the one before it.
START = bytes(32)

_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a verification.

    Args:
        time_ns: since 1970.
        step: 1 to 7; 0 for what is no step (a new trust document).
        code: ``passed``, or the code of the refusal.
        subject: what was verified: the digest of a manifest or offer, in hex; empty when it could
            not be read.
        detail: a sentence for people.
    """

    time_ns: int
    step: int
    code: str
    subject: str
    detail: str = ""


class Sink(Protocol):
    """Where events go. An event is recorded before its refusal is raised."""

    def record(self, event: Event) -> None: ...


class Record(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An event in its chain."""

    index: Count
    previous: Hash
    time_ns: Count
    step: Count
    code: str
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a chain: how many records, and the digest of the last."""

    count: int = 0
    digest: bytes = START

    def append(self, event: Event) -> tuple[bytes, Head]:
        """The next record's bytes, and the head after it."""
        limit = LIMITS.audit_text_chars
        record = Record(
            index=self.count,
            previous=self.digest,
            time_ns=event.time_ns,
            step=event.step,
            code=event.code[:limit],
            subject=event.subject[:limit],
            detail=event.detail[:limit],
        )
        data = _encode(record)
        return data, Head(self.count + 1, hashlib.sha256(data).digest())


def verify(records: Iterable[bytes], expected: Head | None = None) -> tuple[list[Record], Head]:
    """The records of a chain and its head.

    Args:
        expected: a head that is known from elsewhere (it was signed, or printed): the chain must
            have reached it.

    Raises:
        DataError: ``audit-damaged``: a record cannot be read; ``audit-broken``: one was changed,
            left out or moved; ``audit-truncated``: the end that is known is not there.
    """
    found: list[Record] = []
    head = Head()
    reached = expected is None or expected == head
    for data in records:
        record = _decode(data)
        if record.index != head.count or record.previous != head.digest:
            raise _refused("audit-broken", f"record {head.count} does not follow the one before it")
        found.append(record)
        head = Head(head.count + 1, hashlib.sha256(data).digest())
        reached = reached or head == expected
        if expected is not None and head.count == expected.count and not reached:
            raise _refused("audit-broken", f"record {record.index} is not the one that is known")
    if not reached:
        raise _refused("audit-truncated", f"it ends after {head.count} records")
    return found, head


def pack(record: bytes) -> bytes:
    """How a record lies in a file: its length in 4 bytes, little-endian, then it."""
    return len(record).to_bytes(_LENGTH_BYTES, "little") + record


def unpack(data: bytes) -> Iterator[bytes]:
    """The records of a file. The last may be cut: a crash while it was written.

    Raises:
        DataError: ``audit-damaged``: a length is impossible.
    """
    at = 0
    while len(data) - at >= _LENGTH_BYTES:
        size = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        if not 1 <= size <= LIMITS.audit_record_bytes:
            raise _refused("audit-damaged", f"a record of {size} bytes at byte {at}")
        if len(data) - at - _LENGTH_BYTES < size:
            return
        yield data[at + _LENGTH_BYTES : at + _LENGTH_BYTES + size]
        at += _LENGTH_BYTES + size


def _encode(record: Record) -> bytes:
    return canonical.encode(msgspec.to_builtins(record, builtin_types=(bytes,)))


def _decode(data: bytes) -> Record:
    try:
        value: Any = canonical.decode(data, max_bytes=LIMITS.audit_record_bytes)
        return msgspec.convert(value, Record, builtin_types=(bytes,))
    except (DataError, msgspec.ValidationError, OverflowError) as error:
        raise _refused("audit-damaged", str(error)) from error


def _refused(code: str, why: str) -> DataError:
    return DataError(
        f"the audit records are not what was written: {why}",
        code=code,
        where="audit",
        hint="somebody changed them, or the disk did: compare with a copy kept elsewhere",
    )
