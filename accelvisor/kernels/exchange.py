"""Exchange between chips: what one step of a ring does with the message of its neighbour.

A message lies in memory of its function, in a *mailbox* tensor: one in flight is state, and moves
with it. ``source`` and ``target`` are numbers of chips of the function, -1 for no link; the device
checks that the link is there and counts its bytes, a kernel has no use for them.

A packed tensor holds zero-value compressed blocks (``accelvisor.collectives.zvc``). Each block of
``block`` elements is packed for itself and has a region of its own, as long as the worst case: 16
elements for the header, then as many as the block has, and zeros where it took less. So a packed
tensor of n elements has n + 16 ceil(n / block) elements of the same dtype, whatever is in it; its
dtype is the data's, so that no program can mistake one for another. How many bytes of it a link
carries is in the data: :func:`link_bytes`.

Results are canonical, packed or not: no -0.0, one NaN (``accelvisor.collectives.kinds``). A packed
block that is none is a NumericError; memory that a guest changes meanwhile is never an index.
"""

from __future__ import annotations

from math import prod

import numpy as np

from accelvisor.abi.attributes import Attribute
from accelvisor.abi.dtypes import DType
from accelvisor.collectives import reference, zvc
from accelvisor.collectives.kinds import BFLOAT16_CODE, BY_CODE, Array, Kind, Op, combine, finish
from accelvisor.errors import DataError, NumericError
from accelvisor.kernels.declare import (
    ALL,
    Arrays,
    Instruction,
    Operand,
    Queue,
    Shapes,
    Tiling,
    Values,
    elementwise_work,
    flat,
    integer,
    read,
    rows,
    spans,
    write,
)
from accelvisor.kernels.move import _copy, _reference_copy
from accelvisor.limits import LIMITS

EXCHANGED = tuple(d for d in DType if d is not DType.BOOL)
"""What can be reduced; uint16 also as bfloat16."""

HEADER_ELEMENTS = 16
"""Of each block's region: 16 bytes of header fit whatever the dtype."""

BLOCK = 1 << 16
"""Elements of a block by default: of float32, 256 KiB, which a core's cache holds."""

_LINK = (
    integer("source", -1, -1, LIMITS.chips - 1),
    integer("target", -1, -1, LIMITS.chips - 1),
)
_OP = integer("op", 0, 0, len(Op) - 1)
_BFLOAT16 = integer("bfloat16", 0, 0, 1)
_BLOCK = integer("block", BLOCK, 1, 1 << 18)

_SIZE = "n + 16 * ((n + block - 1) // block)"


def packed_elements(n: int, block: int = BLOCK) -> int:
    """Elements of a packed tensor of ``n`` elements."""
    return n + HEADER_ELEMENTS * -(-n // block)


def _kind(array: Array, bfloat16: int) -> Kind:
    if bfloat16 and array.dtype == np.uint16:
        return BY_CODE[BFLOAT16_CODE]
    return BY_CODE[DType[array.dtype.name.upper()]]


# --- dense ---------------------------------------------------------------------------------------


def _ring_hop(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    op, bfloat16 = Op(values[2]), values[3]
    incoming, own, outgoing = (a.reshape(-1) for a in spans(arrays, start, stop))
    kind = _kind(own, bfloat16)
    combine(kind, op, incoming, own, outgoing)
    finish(kind, op, outgoing)


def _reference_ring_hop(arrays: Arrays, values: Values) -> None:
    incoming, own, outgoing = arrays
    kind = _kind(own, values[3])
    result = reference.combine(kind, Op(values[2]), incoming.reshape(-1), own.reshape(-1))
    outgoing[...] = result.reshape(outgoing.shape)


# --- packed --------------------------------------------------------------------------------------


def _block_tiling(n: int, block: int) -> Tiling:
    return Tiling(-(-n // block), rows(block))


def _region(packed: Array, index: int, block: int) -> Array:
    """The bytes of one block's region."""
    size = block + HEADER_ELEMENTS
    return packed[index * size : (index + 1) * size].view(np.uint8)


def _open(packed: Array, index: int, block: int, kind: Kind, n: int) -> zvc.Packed:
    try:
        return zvc.open_packed(_region(packed, index, block), kind, min(block, n - index * block))
    except DataError as e:
        raise NumericError(
            f"block {index} of a packed tensor: {e.message}",
            where="packed",
            hint="pack it with zvc_pack or zvc_hop, with the same block and dtype",
        ) from None


def _close(region: Array, written: int) -> None:
    """Zeros after what was written: a region's bytes follow from its values alone."""
    region[written:] = 0


def _pack(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    x, packed = arrays
    block, kind = values[3], _kind(x, values[2])
    for index in range(start, stop):
        region = _region(packed, index, block)
        _close(region, zvc.pack(x[index * block : (index + 1) * block], kind, region).size)


def _reference_pack(arrays: Arrays, values: Values) -> None:
    x, packed = arrays
    block, kind = values[3], _kind(x, values[2])
    whole = packed.view(np.uint8)
    at = 0
    for first in range(0, x.size, block):
        part = x[first : first + block]
        data = reference.pack(part, kind)
        size = (part.size + HEADER_ELEMENTS) * x.itemsize
        whole[at : at + size] = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
        at += size


def _hop(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    incoming, own, outgoing = arrays
    op, kind, block = Op(values[2]), _kind(own, values[3]), values[4]
    for index in range(start, stop):
        packed = _open(incoming, index, block, kind, own.size)
        region = _region(outgoing, index, block)
        part = own[index * block : (index + 1) * block]
        _close(region, zvc.merge_dense(packed, part, op, region).size)


def _reference_hop(arrays: Arrays, values: Values) -> None:
    incoming, own, outgoing = arrays
    op, bfloat16, block = Op(values[2]), values[3], values[4]
    dense = _reference_dense(incoming, own.size, block, _kind(own, bfloat16))
    merged = reference.combine(_kind(own, bfloat16), op, dense, own)
    _reference_pack([merged, outgoing], (-1, -1, bfloat16, block))


def _reference_dense(packed: Array, n: int, block: int, kind: Kind) -> Array:
    parts = []
    for index in range(-(-n // block)):
        _open(packed, index, block, kind, n)
        parts.append(reference.unpack(_region(packed, index, block).tobytes(), kind))
    return np.concatenate(parts) if parts else np.empty(0, kind.storage)


def _unpack(arrays: Arrays, values: Values, start: int, stop: int) -> None:
    packed, y = arrays
    block, kind = values[3], _kind(y, values[2])
    for index in range(start, stop):
        part = y[index * block : (index + 1) * block]
        zvc.unpack(_open(packed, index, block, kind, y.size), part)


def _reference_unpack(arrays: Arrays, values: Values) -> None:
    packed, y = arrays
    y[...] = _reference_dense(packed, y.size, values[3], _kind(y, values[2]))


def link_bytes(packed: Array, n: int, block: int = BLOCK) -> int:
    """Bytes that a link carries of a packed tensor of ``n`` elements: headers, masks and values.

    ``packed``: 1-D, as its instruction wrote it; of one that is damaged, at most all of its bytes.
    """
    total = 0
    for index in range(-(-n // block)):
        region = _region(packed, index, block)
        _, _, flags, count, nnz, _ = zvc.HEADER.unpack(region[: zvc.HEADER.size].tobytes())
        size = zvc.HEADER.size + nnz * packed.itemsize
        total += min(region.size, size if flags & zvc.RAW else size + zvc.mask_bytes(count))
    return total


def _packed_crossing(arrays: Arrays, values: Values) -> int:
    """Of an instruction whose last operand is packed and the one before is as long as its data."""
    return link_bytes(arrays[-1], arrays[-2].size, values[-1])


def _by_first(shapes: Shapes, values: Values) -> Tiling:
    return _block_tiling(prod(shapes[0]), values[-1])


def _by_second(shapes: Shapes, values: Values) -> Tiling:
    return _block_tiling(prod(shapes[1]), values[-1])


def _packed(name: str, like: str = "") -> Operand:
    return read(name, "p", EXCHANGED, like=like)


_SHAPED = (f"p == {_SIZE}",)
_CODED: tuple[Attribute, ...] = (*_LINK, _BFLOAT16, _BLOCK)

INSTRUCTIONS: tuple[Instruction, ...] = (
    Instruction(
        "link_copy",
        0x0500,
        "y = x: a message as it is, over the link from source to target",
        (read("x", "*s", ALL), write("y", "*s", ALL, like="x")),
        _reference_copy,
        _copy,
        flat,
        attributes=_LINK,
        queue=Queue.TRANSFER,
    ),
    Instruction(
        "ring_hop",
        0x0501,
        "outgoing = incoming op own, canonical; op is 0 sum, 1 min, 2 max, 3 absmax; with bfloat16 "
        "= 1 uint16 holds bfloat16",
        (
            read("incoming", "*s", EXCHANGED),
            read("own", "*s", EXCHANGED, like="incoming"),
            write("outgoing", "*s", EXCHANGED, like="incoming"),
        ),
        _reference_ring_hop,
        _ring_hop,
        flat,
        attributes=(*_LINK, _OP, _BFLOAT16),
        queue=Queue.TRANSFER,
    ),
    Instruction(
        "zvc_pack",
        0x0502,
        "packed = x without its zeros, block by block",
        (read("x", "n", EXCHANGED), write("packed", f"({_SIZE})", EXCHANGED, like="x")),
        _reference_pack,
        _pack,
        _by_first,
        attributes=_CODED,
        queue=Queue.TRANSFER,
        crossing=_packed_crossing,
        work=elementwise_work(2),
    ),
    Instruction(
        "zvc_hop",
        0x0503,
        "outgoing = incoming op own, added while packed; a block that is not packed is a fault",
        (
            _packed("incoming"),
            read("own", "n", EXCHANGED, like="incoming"),
            write("outgoing", "p", EXCHANGED, like="incoming"),
        ),
        _reference_hop,
        _hop,
        _by_second,
        attributes=(*_LINK, _OP, _BFLOAT16, _BLOCK),
        queue=Queue.TRANSFER,
        crossing=_packed_crossing,
        work=elementwise_work(4),
        requires=_SHAPED,
    ),
    Instruction(
        "zvc_unpack",
        0x0504,
        "y = what packed holds, its zeros put back; a block that is not packed is a fault",
        (_packed("packed"), write("y", "n", EXCHANGED, like="packed")),
        _reference_unpack,
        _unpack,
        _by_second,
        attributes=_CODED,
        queue=Queue.TRANSFER,
        work=elementwise_work(2),
        requires=_SHAPED,
    ),
)
