"""The plain twins: packing and arithmetic one value at a time, in Python's own numbers.

Nothing here is shared with the fast paths but the element types' constants: the format is written
from its description in ``zvc``, bits by bits, and a sum is Python's exact integer or float64, then
rounded once by ``struct`` (or by integer arithmetic for bfloat16). float64 has more than twice the
bits of float32, float16 and bfloat16 and two more, so rounding twice is rounding once (S. Figueroa,
"When is double rounding innocuous?", 1995).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from accelvisor.collectives.kinds import BFLOAT16_CODE, Array, Kind, Op

_FORMS = {2: ("<e", "<H"), 4: ("<f", "<I"), 8: ("<d", "<Q")}


def number(kind: Kind, bits: int) -> Any:
    """The value of a bit pattern: a float or an int."""
    if kind.code == BFLOAT16_CODE:
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    if kind.is_float:
        form, word = _FORMS[kind.width]
        return struct.unpack(form, struct.pack(word, bits))[0]
    if kind.storage.kind == "i" and bits >> (8 * kind.width - 1):
        return bits - (1 << 8 * kind.width)
    return bits


def pattern(kind: Kind, value: Any) -> int:
    """The bit pattern of a value, rounded to nearest even; canonical (no -0.0, one NaN)."""
    if not kind.is_float:
        return int(value) & kind.keep
    if value != value:
        return kind.nan
    if value == 0:
        return 0
    if kind.code == BFLOAT16_CODE:
        return _bfloat16(value)
    form, word = _FORMS[kind.width]
    try:
        bits = struct.unpack(word, struct.pack(form, value))[0]
    except OverflowError:
        bits = kind.infinity | (0 if value > 0 else 1 << (8 * kind.width - 1))
    return 0 if bits & kind.keep == 0 else int(bits)


def _bfloat16(value: float) -> int:
    """From float64's bits by integer arithmetic."""
    sign = 0x8000 if value < 0 else 0
    if value in (float("inf"), float("-inf")):
        return sign | 0x7F80
    mantissa, exponent = abs(value).as_integer_ratio()
    # In units of 2**-133, the least subnormal, so that every result is a whole number of units.
    numerator, denominator = mantissa << 133, exponent
    size = (numerator // denominator).bit_length()
    shift = max(0, size - 8)
    quotient, rest = divmod(numerator, denominator << shift)
    if 2 * rest > denominator << shift or (2 * rest == denominator << shift and quotient & 1):
        quotient += 1
    if quotient.bit_length() > 8:
        quotient, shift = quotient >> 1, shift + 1
    bits = quotient if quotient < 0x80 else ((shift + 1) << 7) + (quotient - 0x80)
    bits = min(bits, 0x7F80)
    return sign | bits if bits else 0


def combine_one(kind: Kind, op: Op, a: int, b: int) -> int:
    """a op b on bit patterns, canonical."""
    x, y = number(kind, a), number(kind, b)
    if x != x or y != y:
        return kind.nan
    if op is Op.SUM:
        return pattern(kind, x + y)
    if op is Op.ABSMAX:
        x, y = magnitude(kind, x), magnitude(kind, y)
    return pattern(kind, min(x, y) if op is Op.MIN else max(x, y))


def magnitude(kind: Kind, value: Any) -> Any:
    """|value|; what a signed integer cannot hold is its highest value."""
    size = abs(value)
    if kind.storage.kind == "i":
        return min(size, (1 << (8 * kind.width - 1)) - 1)
    return size


def finish_one(kind: Kind, op: Op, bits: int) -> int:
    """A value as a result."""
    value = number(kind, bits)
    return pattern(kind, magnitude(kind, value) if op is Op.ABSMAX else value)


def combine(kind: Kind, op: Op, a: Array, b: Array) -> Array:
    """a op b, finished; 1-D arrays of ``kind.storage``. A new array."""
    pairs = zip(a.view(kind.bits).tolist(), b.view(kind.bits).tolist(), strict=True)
    return _array(kind, [combine_one(kind, op, x, y) for x, y in pairs])


def finish(kind: Kind, op: Op, a: Array) -> Array:
    """``a`` as a result. A new array."""
    return _array(kind, [finish_one(kind, op, x) for x in a.view(kind.bits).tolist()])


def _array(kind: Kind, bits: Sequence[int]) -> Array:
    return np.array(bits, kind.bits).view(kind.storage)


def reduce_in_order(kind: Kind, op: Op, inputs: Sequence[Array]) -> Array:
    """((inputs[0] op inputs[1]) op inputs[2]) ..., finished."""
    result = finish(kind, op, inputs[0])
    for array in inputs[1:]:
        result = combine(kind, op, result, array)
    return result


def pack(x: Array, kind: Kind) -> bytes:
    """The packed form of a 1-D array of ``kind.storage``, as ``zvc.pack`` writes it."""
    patterns = [finish_one(kind, Op.SUM, bits) for bits in x.view(kind.bits).tolist()]
    values = [bits for bits in patterns if bits]
    mask = bytearray(8 * -(-len(patterns) // 64))
    for i, bits in enumerate(patterns):
        if bits:
            mask[i // 8] |= 1 << (i % 8)
    body = bytes(mask) + b"".join(v.to_bytes(kind.width, "little") for v in values)
    flags, count = 0, len(values)
    raw = b"".join(v.to_bytes(kind.width, "little") for v in patterns)
    if len(raw) < len(body):
        body, flags, count = raw, 1, len(patterns)
    head = struct.pack("<4B2I", 1, kind.code, flags, 0, len(patterns), count)
    return head + struct.pack("<I", zlib.crc32(head + body)) + body


def unpack(packed: bytes, kind: Kind) -> Array:
    """The array of a good packed form; for a bad one use ``zvc.open_packed``, which says why."""
    flags = packed[2]
    n, count = struct.unpack_from("<2I", packed, 4)
    start = 16 + (0 if flags else 8 * -(-n // 64))
    values = [
        int.from_bytes(packed[start + i * kind.width :][: kind.width], "little")
        for i in range(count)
    ]
    if flags:
        return _array(kind, values)
    given = iter(values)
    return _array(kind, [next(given) if packed[16 + i // 8] >> i % 8 & 1 else 0 for i in range(n)])
