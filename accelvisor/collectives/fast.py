"""Packing and unpacking of one run of words: by numpy, or by numba once it was asked for.

The same bits from both. numba is an accelerator that a machine may lack (guests do) and that takes
seconds to compile, so nothing here imports it before :func:`warm`: a worker whose tile must end
within milliseconds calls it before it serves, or goes on with numpy.

Words are 64 elements; masks are uint64, bit j of word i is element 64 i + j (least significant bit
first, so that the mask's bytes in memory are the format's on a little-endian machine). Arrays of
values are unsigned integers: what a value means is in three constants (``kinds.Kind``).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from accelvisor.collectives.kinds import Array, Kind

#: numpy 2 has an instruction for it.
_count: Any = getattr(np, "bitwise_count", None)
_COUNTS = np.array([i.bit_count() for i in range(256)], np.uint8)

_lock = threading.Lock()
#: (pack, unpack) compiled for a width in bytes.
_compiled: dict[int, tuple[Callable[..., int], Callable[..., int]]] = {}


def count_bits(mask: Array) -> int:
    """Set bits of a uint64 mask."""
    if _count is not None:
        return int(_count(mask).sum(dtype=np.int64))
    return int(_COUNTS[mask.view(np.uint8)].sum(dtype=np.int64))


def pack_words(kind: Kind, x: Array, mask: Array, values: Array) -> int:
    """Write the mask and the non-zero values of ``x``; how many, or -1 if ``values`` is too short.

    Args:
        x: (n,) of ``kind.bits``. mask: (ceil(n / 64),) uint64, written whole.
        values: (room,) of ``kind.bits``; what follows the values is not touched.
    """
    compiled = _compiled.get(kind.width)
    if compiled is not None:
        word = kind.bits.type
        constants = word(kind.keep), word(kind.infinity), word(kind.nan)
        return int(compiled[0](x, *constants, mask, values))
    return _pack(kind, x, mask, values)


def unpack_words(kind: Kind, mask: Array, values: Array, out: Array) -> int:
    """Write every element of ``out`` from a mask and its values; how many of those were used.

    The mask has no bit beyond ``out`` and no more bits than there are values: who calls has counted
    them in memory that nobody else writes.
    """
    compiled = _compiled.get(kind.width)
    if compiled is not None:
        return int(compiled[1](mask, values, out))
    return _unpack(mask, values, out)


def _pack(kind: Kind, x: Array, mask: Array, values: Array) -> int:
    word = kind.bits.type
    some = (x & word(kind.keep)) != 0 if kind.is_float else x != 0
    found = np.flatnonzero(some)
    if found.size > values.size:
        return -1
    packed = np.packbits(some, bitorder="little")
    raw = mask.view(np.uint8)
    raw[: packed.size] = packed
    raw[packed.size :] = 0
    taken = values[: found.size]
    np.take(x, found, out=taken, mode="clip")
    if kind.is_float:
        strange = (taken & word(kind.keep)) > word(kind.infinity)
        if strange.any():
            np.copyto(taken, word(kind.nan), where=strange)
    return int(found.size)


def _unpack(mask: Array, values: Array, out: Array) -> int:
    bits = np.unpackbits(mask.view(np.uint8), count=out.size, bitorder="little")
    found = np.flatnonzero(bits.view(np.bool_))
    out.fill(0)
    out[found] = values[: found.size]
    return int(found.size)


def warm(widths: tuple[int, ...] = (4,)) -> bool:
    """Compile for values of these widths (bytes: 1, 2, 4, 8), if numba is there; whether it is.

    The first call of a process takes about three seconds. Nothing is cached on disk.
    """
    with _lock:
        try:
            for width in widths:
                if width not in _compiled:
                    _compiled[width] = _compile(width)
        except Exception:  # whatever a machine's numba fails with, numpy serves
            return False
        return True


def cool() -> None:
    """Forget what was compiled: numpy from here on. For tests and comparisons."""
    with _lock:
        _compiled.clear()


def _compile(width: int) -> tuple[Callable[..., int], Callable[..., int]]:
    pack, unpack = _kernels()
    bits = np.dtype(f"u{width}")
    x, mask, values = np.zeros(65, bits), np.zeros(2, np.uint64), np.zeros(65, bits)
    one = bits.type(1)
    pack(x, one, one, one, mask, values)
    # A payload may lie anywhere in a message, and one that arrives is not to be written.
    for source in (values, _frozen(values)):
        unpack(mask, source, x)
    frozen = _frozen(x)
    pack(frozen, one, one, one, mask, values)
    return pack, unpack


def _frozen(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


_made: list[tuple[Callable[..., int], Callable[..., int]]] = []


def _kernels() -> tuple[Callable[..., int], Callable[..., int]]:
    """The two loops, for every width; numba compiles one for each that it meets."""
    if _made:
        return _made[0]
    numba: Any = importlib.import_module("numba")
    lowest = _lowest_bit()
    u64 = np.uint64

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
    def pack(x: Any, keep: Any, infinity: Any, nan: Any, mask: Any, values: Any) -> Any:
        n, room, k = x.shape[0], values.shape[0], 0
        for w in range((n + 63) >> 6):
            base = w << 6
            bits = u64(0)
            if base + 64 <= n:
                for j in range(64):  # of constant length: this one is vectorised
                    bits |= u64((x[base + j] & keep) != 0) << u64(j)
            else:
                for j in range(n - base):
                    bits |= u64((x[base + j] & keep) != 0) << u64(j)
            mask[w] = bits
            while bits:
                if k >= room:
                    return -1
                v = x[base + np.int64(lowest(bits))]
                if (v & keep) > infinity:
                    v = nan
                values[k] = v
                k += 1
                bits &= bits - u64(1)
        return k

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
    def unpack(mask: Any, values: Any, out: Any) -> Any:
        n, k = out.shape[0], 0
        for w in range((n + 63) >> 6):
            base = w << 6
            if base + 64 <= n:
                for j in range(64):
                    out[base + j] = 0
            else:
                for j in range(n - base):
                    out[base + j] = 0
            bits = mask[w]
            while bits:
                out[base + np.int64(lowest(bits))] = values[k]
                k += 1
                bits &= bits - u64(1)
        return k

    _made.append((pack, unpack))
    return _made[0]


def _lowest_bit() -> Any:
    """The place of the lowest set bit of a uint64, one machine instruction: numba has no name for
    it, LLVM has (``cttz``)."""
    extending: Any = importlib.import_module("numba.extending")
    types: Any = importlib.import_module("numba.core.types")
    ir: Any = importlib.import_module("llvmlite.ir")

    @extending.intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def lowest(context: Any, x: Any) -> Any:
        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

        return types.uint64(types.uint64), generate

    return lowest
