"""Zero-value compression: a mask of what is not zero, then only that; added while it is packed.

After the format of US patent 11,544,067 (a bitmask section and a section of packed non-zero
values) and the compressing DMA engine of M. Rhu et al. (HPCA 2018). All numbers little-endian:

    u8 version = 1 | u8 dtype | u8 flags | u8 0 | u32 n | u32 nnz | u32 crc32
    mask: ceil(n / 64) words of 8 bytes; bit i % 8 of byte i // 8 is element i; none beyond n
    nnz values, in order

``flags`` bit 0, RAW: no mask, n values (nnz = n). It is set exactly when that is shorter, that is
beyond a density of 1 - 1/(8 w), w the bytes of a value. The crc32 (ISO-HDLC) is over the first 12
bytes and all that follows the header. What :func:`pack` and the merges write is canonical: no zero
among the values (a sum that cancels clears its bit), no -0.0, one NaN. A reader takes any mask.

Whatever is read is copied or counted before it is used as an index, so a buffer that another party
changes meanwhile gives wrong numbers and never a read or write out of range.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from accelvisor.collectives import fast
from accelvisor.collectives.kinds import BY_CODE, PIECE, Array, Kind, Op, combine, finish
from accelvisor.errors import DataError, UsageError

Buffer: TypeAlias = Any  # whatever gives its bytes: bytes, memoryview, a uint8 array

HEADER = struct.Struct("<BBBxIII")
VERSION = 1
RAW = 1
_SUMMED = HEADER.size - 4
MAX_ELEMENTS = 2**32 - 1

SAMPLE = 1024
"""Elements that are looked at to guess a density."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A checked packed array: ``n`` elements, of which ``nnz`` are in ``values`` (``kind.bits``).

    ``mask`` is None for a raw one, else a private copy.
    """

    kind: Kind
    n: int
    nnz: int
    mask: Array | None
    values: Array


def mask_bytes(n: int) -> int:
    """Bytes of the mask of ``n`` elements."""
    return 8 * -(-n // 64)


def packed_bytes(n: int, nnz: int, width: int) -> int:
    """The formula: bytes of ``n`` elements of ``width`` bytes, ``nnz`` of them not zero."""
    return HEADER.size + min(n * width, mask_bytes(n) + nnz * width)


def room(n: int, width: int) -> int:
    """The most bytes that ``n`` elements can take: a raw array and a header."""
    return HEADER.size + n * width


def open_packed(buffer: Buffer, kind: Kind | None = None, n: int | None = None) -> Packed:
    """Read a header and check everything that a reader relies on.

    Args:
        buffer: begins with a packed array; what follows it is not looked at.
        kind, n: what it must hold, where that is known.

    Raises:
        DataError: it is none (code ``zvc-invalid``).
    """
    raw = np.frombuffer(buffer, np.uint8)
    if raw.size < HEADER.size:
        raise _bad(f"{raw.size} bytes are no header")
    head = raw[: HEADER.size].tobytes()
    version, code, flags, count, nnz, crc = HEADER.unpack(head)
    if version != VERSION or head[3] or flags & ~RAW:
        raise _bad("version or flags are not known")
    found = BY_CODE.get(code)
    if found is None or (kind is not None and found is not kind):
        raise _bad(f"holds dtype {found.name if found else code}")
    if n is not None and count != n:
        raise _bad(f"holds {count} elements, not {n}")
    if nnz > count or (flags and nnz != count):
        raise _bad(f"{nnz} values of {count} elements")
    words = 0 if flags else mask_bytes(count)
    end = HEADER.size + words + nnz * found.width
    if end > raw.size:
        raise _bad(f"{raw.size} bytes where the header says {end}")
    mask = None if flags else raw[HEADER.size : HEADER.size + words].copy()
    payload = raw[HEADER.size + words : end]
    if _checksum(head, mask, payload) != crc:
        raise _bad("the checksum differs")
    if mask is not None:
        _check_mask(mask.view(np.uint64), count, nnz)
    values = _values(payload, found)
    return Packed(found, count, nnz, None if mask is None else mask.view(np.uint64), values)


def _values(payload: Array, kind: Kind) -> Array:
    """The values in place, or a copy where a message did not align them."""
    if payload.ctypes.data % kind.width:
        payload = payload.copy()
    return payload.view(kind.bits)


def _checksum(head: bytes, mask: Array | None, payload: Array) -> int:
    crc = zlib.crc32(head[:_SUMMED])
    if mask is not None:
        crc = zlib.crc32(mask.data, crc)
    return zlib.crc32(payload.data, crc)


def _check_mask(mask: Array, n: int, nnz: int) -> None:
    if n % 64 and int(mask[-1]) >> (n % 64):
        raise _bad("the mask has bits beyond the last element")
    if fast.count_bits(mask) != nnz:
        raise _bad("the mask does not have as many bits as there are values")


def _bad(message: str) -> DataError:
    return DataError(
        f"no packed array: {message}", code="zvc-invalid", where="collectives",
        hint="what sent it is not this library, or it was damaged on its way",
    )  # fmt: skip


# --- writing -------------------------------------------------------------------------------------


class _Writer:
    """Packs pieces in order into one buffer. ``put`` says False once raw would be shorter."""

    def __init__(self, kind: Kind, n: int, out: Array | None) -> None:
        size = room(n, kind.width)
        if n > MAX_ELEMENTS:
            raise UsageError(f"{n} elements in one packed array", where="collectives")
        self.kind, self.n = kind, n
        self.out = np.empty(size, np.uint8) if out is None else out
        if self.out.size < size:
            raise UsageError(
                f"{self.out.size} bytes for a packed array that may take {size}",
                where="collectives",
            )
        words = mask_bytes(n)
        self.limit = (n * kind.width - words) // kind.width
        self.mask = np.empty(words // 8, np.uint64)
        begin = HEADER.size + words
        self.values = _aligned(self.out, begin, max(0, self.limit), kind)
        self.at = self.count = 0

    def put(self, piece: Array) -> bool:
        """The next elements (``kind.bits``); all pieces but the last are multiples of 64."""
        words = slice(self.at // 64, -(-(self.at + piece.size) // 64))
        if self.limit < 0:
            return False
        found = fast.pack_words(self.kind, piece, self.mask[words], self.values[self.count :])
        if found < 0:
            return False
        self.at += piece.size
        self.count += found
        return True

    def close(self) -> Array:
        words = self.mask.nbytes
        end = HEADER.size + words + self.count * self.kind.width
        payload = self.out[HEADER.size + words : end]
        if not np.shares_memory(self.values, self.out):
            payload[:] = self.values[: self.count].view(np.uint8)
        mask = self.mask.view(np.uint8)
        self.out[HEADER.size : HEADER.size + words] = mask
        return self._head(0, self.count, mask, end)

    def raw(self) -> Array:
        """Where n raw values go; :meth:`close_raw` makes a packed array of them."""
        return _aligned(self.out, HEADER.size, self.n, self.kind)

    def close_raw(self, values: Array) -> Array:
        end = room(self.n, self.kind.width)
        if not np.shares_memory(values, self.out):
            self.out[HEADER.size : end] = values.view(np.uint8)
        return self._head(RAW, self.n, None, end)

    def _head(self, flags: int, nnz: int, mask: Array | None, end: int) -> Array:
        head = HEADER.pack(VERSION, self.kind.code, flags, self.n, nnz, 0)
        begin = HEADER.size + (0 if mask is None else mask.size)
        crc = _checksum(head, mask, self.out[begin:end])
        head = HEADER.pack(VERSION, self.kind.code, flags, self.n, nnz, crc)
        self.out[: HEADER.size] = np.frombuffer(head, np.uint8)
        return self.out[:end]


def _aligned(out: Array, begin: int, count: int, kind: Kind) -> Array:
    part = out[begin : begin + count * kind.width]
    if part.ctypes.data % kind.width:
        return np.empty(count, kind.bits)
    return part.view(kind.bits)


def pack(x: Array, kind: Kind, out: Array | None = None) -> Array:
    """Pack a 1-D contiguous array of ``kind.storage``.

    Args:
        out: uint8, at least :func:`room` bytes; a new one if None.

    Returns:
        The part of ``out`` that was written: :func:`packed_bytes` of it.
    """
    words = x.view(kind.bits)
    writer = _Writer(kind, words.size, out)
    if _put_all(writer, words):
        return writer.close()
    target = writer.raw()
    np.copyto(target, words)
    finish(kind, Op.SUM, target.view(kind.storage))
    return writer.close_raw(target)


def _put_all(writer: _Writer, words: Array) -> bool:
    if not words.size:
        return writer.put(words)
    return all(writer.put(words[i : i + PIECE]) for i in range(0, words.size, PIECE))


# --- reading -------------------------------------------------------------------------------------


class _Reader:
    """Gives a packed array piece by piece, in order."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.used = 0

    def take(self, start: int, out: Array) -> None:
        """Elements [start, start + out.size); ``out`` is of ``kind.bits``."""
        packed = self.packed
        if packed.mask is None:
            np.copyto(out, packed.values[start : start + out.size])
            return
        words = packed.mask[start // 64 : -(-(start + out.size) // 64)]
        self.used += fast.unpack_words(packed.kind, words, packed.values[self.used :], out)


def unpack(packed: Packed, out: Array) -> None:
    """Write every element of ``out``, a 1-D contiguous array of ``kind.storage``.

    Raises:
        UsageError: ``out`` has another length.
    """
    _same_length(packed, out.size)
    _Reader(packed).take(0, out.view(packed.kind.bits))


def _same_length(packed: Packed, n: int) -> None:
    if packed.n != n:
        raise UsageError(f"{n} elements for a packed array of {packed.n}", where="collectives")


class _Merge:
    """a op b piece by piece, a packed, b packed or dense. Absent elements are zeros to every op."""

    def __init__(self, a: Packed, b: Packed | Array, op: Op) -> None:
        if isinstance(b, Packed) and b.kind is not a.kind:
            raise UsageError("two packed arrays differ in their dtype", where="collectives")
        _same_length(a, b.n if isinstance(b, Packed) else b.size)
        self.kind, self.op, self.n = a.kind, op, a.n
        self.a = _Reader(a)
        self.b = _Reader(b) if isinstance(b, Packed) else b
        self.other = np.empty(min(PIECE, a.n), a.kind.storage)

    def take(self, start: int, out: Array) -> None:
        """Elements [start, start + out.size) of the result into ``out`` (``kind.storage``)."""
        bits = self.kind.bits
        self.a.take(start, out.view(bits))
        if isinstance(self.b, _Reader):
            other = self.other[: out.size]
            self.b.take(start, other.view(bits))
        else:
            other = self.b[start : start + out.size]
        combine(self.kind, self.op, out, other, out)


def merge(a: Packed, b: Packed, op: Op, out: Array | None = None) -> Array:
    """a op b, both packed; the result packed and canonical. Neither is ever unpacked as a whole.

    Raises:
        UsageError: they differ in dtype or length.
    """
    return _merge(a, b, op, out)


def merge_dense(a: Packed, b: Array, op: Op, out: Array | None = None) -> Array:
    """a op b, b a 1-D contiguous array of a's storage; the result packed and canonical."""
    return _merge(a, b, op, out)


def _merge(a: Packed, b: Packed | Array, op: Op, out: Array | None) -> Array:
    writer = _Writer(a.kind, a.n, out)
    pieces = _Merge(a, b, op)
    piece = np.empty(min(PIECE, a.n), a.kind.storage)
    for start in range(0, a.n, PIECE):
        part = piece[: min(PIECE, a.n - start)]
        pieces.take(start, part)
        if not writer.put(part.view(a.kind.bits)):
            break
    else:
        if a.n or writer.put(piece.view(a.kind.bits)):
            return writer.close()
    target = writer.raw()
    fold(a, b, op, target.view(a.kind.storage))
    finish(a.kind, op, target.view(a.kind.storage))
    return writer.close_raw(target)


def fold(a: Packed, b: Packed | Array, op: Op, out: Array) -> None:
    """out = a op b, dense: 1-D, contiguous, of a's storage. Not finished (``kinds.finish``)."""
    pieces = _Merge(a, b, op)
    for start in range(0, a.n, PIECE):
        pieces.take(start, out[start : start + PIECE])


def density(x: Array, kind: Kind) -> float:
    """A guess at which part of ``x`` (1-D) is not zero, from at most 1024 elements; 0 if empty."""
    if not x.size:
        return 0.0
    # An odd stride, so that a matrix's columns of zeros are not always or never hit.
    some = x.view(kind.bits)[:: (x.size // SAMPLE) | 1][: 2 * SAMPLE]
    return float(np.count_nonzero(some & kind.bits.type(kind.keep))) / some.size
