"""A chunk: what it stands for, how its payload is encoded, and the hash that is its leaf.

All chunks in order, applied one after the other, give the state; a later one overwrites an earlier
one. A chunk's payload is looked into only by :func:`expand`, and only after the checkpoint that it
belongs to was verified.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import TypeAlias

from accelvisor.errors import DataError, UnavailableError
from accelvisor.frames.merkle import LEAF_PREFIX
from accelvisor.limits import KIB, LIMITS

try:
    import zstandard as _zstandard

    _zstd: ModuleType | None = _zstandard
except ImportError:
    _zstd = None

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER = struct.Struct("<QIIQQ")
#: A header and the length of the payload that follows: how chunks lie in files and streams.
RECORD = struct.Struct("<QIIQQI")
#: What sealing adds to a payload: AES-GCM's tag.
TAG_BYTES = 16
#: Zeros are looked for in blocks of this size: a shorter run is not worth a chunk of its own.
ZERO_RUN_BYTES = 64 * KIB

_ZERO = bytes(LIMITS.chunk_bytes)
_TOP = 1 << 63


class Kind(IntEnum):
    """What a chunk is a part of; ``name.lower()`` names its section in a manifest."""

    FUNCTION = 1
    STATUS = 2
    STATE = 3
    WINDOW = 4
    MEMORY = 5
    EXTENTS = 6


class Coding(IntEnum):
    """How the payload gives the bytes that a chunk stands for."""

    RAW = 0
    ZEROS = 1
    ZSTD = 2


@dataclass(frozen=True, slots=True)
class Header:
    """A chunk without its payload.

    Args:
        index: of the chunk in its checkpoint, from 0, without gaps.
        kind: a :class:`Kind`, or any number until :meth:`check` was asked.
        coding: a :class:`Coding`, likewise.
        offset: where its bytes begin, within what the kind names.
        length: bytes that it stands for, 1 to ``LIMITS.chunk_bytes``.
    """

    index: int
    kind: int
    coding: int
    offset: int
    length: int

    def pack(self) -> bytes:
        return HEADER.pack(self.index, self.kind, self.coding, self.offset, self.length)

    @classmethod
    def unpack(cls, data: Buffer) -> Header:
        """From exactly 32 bytes. Whatever they say is taken; :meth:`check` judges it."""
        return cls(*HEADER.unpack(data))

    def fault(self, stored: int, sealed: bool = False) -> str | None:
        """Why no chunk can be like this, whatever checkpoint it is in; None when one can.

        Args:
            stored: bytes of its payload.
            sealed: payloads are encrypted.
        """
        if not Kind.FUNCTION <= self.kind <= Kind.EXTENTS:
            return f"kind {self.kind} does not exist"
        if not 1 <= self.length <= LIMITS.chunk_bytes:
            return f"it stands for {self.length} bytes"
        if self.offset + self.length > _TOP:
            return "it ends past 2**63"
        tag = TAG_BYTES if sealed else 0
        if self.coding == Coding.RAW:
            fits = stored == self.length + tag
        elif self.coding == Coding.ZEROS:
            fits = stored == 0
        elif self.coding == Coding.ZSTD:
            # A writer that gains nothing stores raw, so a longer payload is no honest one.
            fits = tag < stored < self.length + tag
        else:
            return f"coding {self.coding} does not exist"
        return None if fits else f"{stored} bytes of payload cannot give {self.length}"


def leaf_hash(header: bytes, payload: Buffer) -> bytes:
    """SHA-256 of 0x00, the 32 header bytes and the payload as it is stored."""
    state = hashlib.sha256(LEAF_PREFIX + header)
    state.update(payload)
    return state.digest()


def expand(header: Header, payload: Buffer) -> Buffer:
    """The ``header.length`` bytes that a chunk stands for, from its (unsealed) payload.

    Raises:
        DataError: ``chunk-damaged``, the payload does not give them.
        UnavailableError: ``zstd-missing``.
    """
    if header.coding == Coding.ZEROS:
        return memoryview(_ZERO)[: header.length]
    if header.coding == Coding.RAW:
        out: Buffer = payload
    else:
        zstd = _require_zstd()
        try:
            # The frame says its own size; that is checked before anything is made of it.
            size = zstd.get_frame_parameters(payload).content_size
            if size != header.length:
                raise _damaged(header)
            out = zstd.ZstdDecompressor().decompress(payload, max_output_size=header.length)
        except zstd.ZstdError as error:
            raise _damaged(header) from error
    if len(out) != header.length:
        raise _damaged(header)
    return out


def compress(payload: Buffer, level: int = 1) -> Buffer | None:
    """``payload`` by zstd, or None where that does not make it shorter.

    Raises:
        UnavailableError: ``zstd-missing``.
    """
    packed: bytes = _require_zstd().ZstdCompressor(level=level).compress(payload)
    return packed if len(packed) < len(payload) else None


def has_zstd() -> bool:
    return _zstd is not None


def cut(
    kind: Kind,
    data: memoryview,
    *,
    index: int,
    offset: int = 0,
    size: int = LIMITS.chunk_bytes // 4,
    zstd: bool = False,
) -> Iterator[tuple[Header, Buffer]]:
    """Chunks for all of ``data``; runs of zeros become chunks without payload.

    Args:
        index: of the first chunk.
        offset: of ``data`` within its section.
        size: the longest payload, a multiple of :data:`ZERO_RUN_BYTES`.
        zstd: try to compress.
    """
    for start, length, zero in _runs(data, size):
        coding = Coding.ZEROS if zero else Coding.RAW
        payload: Buffer = b"" if zero else data[start : start + length]
        packed = compress(payload) if zstd and not zero else None
        if packed is not None:
            coding, payload = Coding.ZSTD, packed
        yield Header(index, kind, coding, offset + start, length), payload
        index += 1


def _runs(data: memoryview, size: int) -> Iterator[tuple[int, int, bool]]:
    """(start, length, all zero) of pieces that cover ``data``."""
    start, last = 0, False
    for at in range(0, len(data), ZERO_RUN_BYTES):
        end = min(at + ZERO_RUN_BYTES, len(data))
        # startswith is one memcmp, which ends at the first difference.
        zero = _ZERO.startswith(data[at:end])
        longest = LIMITS.chunk_bytes if last else size
        if at > start and (zero != last or end - start > longest):
            yield start, at - start, last
            start = at
        last = zero
    if len(data) > start:
        yield start, len(data) - start, last


def _require_zstd() -> ModuleType:
    if _zstd is None:
        raise UnavailableError(
            "compressed checkpoints need Python's zstandard",
            code="zstd-missing",
            where="frames",
            hint="apt install python3-zstandard",
        )
    return _zstd


def _damaged(header: Header) -> DataError:
    return DataError(
        f"chunk {header.index} does not give the {header.length} bytes that it stands for",
        code="chunk-damaged",
        where="frames",
    )
