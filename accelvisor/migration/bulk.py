"""What goes over bulk connections: chunks in rounds, over several connections at once.

Each message is 40 bytes, ``<B3x36s``: a type, and what it says; a chunk's payload follows it.

* The sender sends CHUNKs over any of the connections. Chunks of one round do not overlap, so their
  order does not matter, and each is applied as it comes.
* ROUND ends a round on each connection; the receiver answers ACK on each when it has them all.
* STATE is the receiver's first message on each connection: which round it is in, and which chunks
  of it are there. After a broken connection the sender sends the others.
* KEEP says that there is nothing to send just now.

The bytes are read straight into the place where they belong and hashed while they are in the cache.
Nothing looks into them: what they are worth says the signed root, later.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from accelvisor.errors import ProtocolError
from accelvisor.limits import KIB, LIMITS
from accelvisor.migration.channel import Channel

MESSAGE = struct.Struct("<B3x36s")
_ROUND = struct.Struct("<QQQ12x")
_STATE = struct.Struct("<QQI16x")
_RANGE = struct.Struct("<QQ")
#: A piece of this size is copied, hashed and sealed within the second-level cache, and what Python
#: does for each (about 50 us) is little beside that.
PIECE_BYTES = 256 * KIB
#: Zeros are looked for in pages, and so is what a fresh memfd has already.
PAGE_BYTES = 4096
#: A shorter run of zero pages is sent as it is: one more chunk costs more.
_RUN_PAGES = 4
_WORDS = PAGE_BYTES // 8


class Type(IntEnum):
    CHUNK = 1
    ROUND = 2
    ACK = 3
    STATE = 4
    KEEP = 5


@dataclass(frozen=True, slots=True)
class Round:
    """The chunks of round ``number`` have indices from ``first`` up to but not ``end``."""

    number: int
    first: int
    end: int

    def pack(self, kind: Type) -> bytes:
        return MESSAGE.pack(kind, _ROUND.pack(self.number, self.first, self.end))

    @classmethod
    def unpack(cls, body: bytes) -> Round:
        return cls(*_ROUND.unpack(body))


@dataclass(frozen=True, slots=True)
class State:
    """What a receiver has: it waits for ``round``, whose first index is ``first``.

    Args:
        ranges: (first, end) of the indices that are there already, in order.
    """

    round: int
    first: int
    ranges: tuple[tuple[int, int], ...] = ()

    def pack(self) -> bytes:
        body = _STATE.pack(self.round, self.first, len(self.ranges))
        return MESSAGE.pack(Type.STATE, body) + b"".join(_RANGE.pack(*r) for r in self.ranges)

    @classmethod
    def read(cls, channel: Channel) -> State:
        """Raises ProtocolError ``bulk-message``, and as :meth:`Channel.read`."""
        kind, body = MESSAGE.unpack(channel.read(MESSAGE.size))
        if kind != Type.STATE:
            raise bad(f"message {kind} came where the receiver's state was expected")
        number, first, count = _STATE.unpack(body)
        if count > LIMITS.bulk_ranges:
            raise bad(f"a state of {count} ranges")
        ranges = tuple(_RANGE.iter_unpack(channel.read(count * _RANGE.size)))
        flat = [end for pair in ranges for end in pair]
        if flat != sorted(flat):
            raise bad("the receiver's ranges are out of order")
        return cls(number, first, ranges)


KEEP = MESSAGE.pack(Type.KEEP, b"")


def ranges_of(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted (first, end) that together hold exactly ``indices``."""
    out: list[tuple[int, int]] = []
    for index in sorted(indices):
        if out and out[-1][1] == index:
            out[-1] = (out[-1][0], index + 1)
        else:
            out.append((index, index + 1))
    return out


def runs(data: npt.NDArray[np.uint8]) -> Sequence[tuple[int, int, bool]]:
    """(start, length, all zero) of parts that cover ``data``; only runs of whole pages are zero."""
    whole = len(data) // PAGE_BYTES
    pages = data[: whole * PAGE_BYTES].view(np.uint64).reshape(whole, _WORDS)
    # Most pages with data show it in their first word: look further only into the others.
    maybe = np.flatnonzero(pages[:, 0] == 0)
    if not len(maybe):
        return [(0, len(data), False)]
    zero = np.zeros(whole + 2, np.int8)
    if len(maybe) == whole:
        zero[1:-1] = ~pages.any(axis=1)
    else:
        zero[1 + maybe] = ~pages[maybe].any(axis=1)
    edges = np.flatnonzero(np.diff(zero)).reshape(-1, 2)
    out: list[tuple[int, int, bool]] = []
    at = 0
    for begin, end in edges.tolist():
        if end - begin < min(_RUN_PAGES, whole):
            continue
        start, stop = begin * PAGE_BYTES, end * PAGE_BYTES
        if start > at:
            out.append((at, start - at, False))
        out.append((start, stop - start, True))
        at = stop
    if at < len(data):
        out.append((at, len(data) - at, False))
    return out


def bad(why: str) -> ProtocolError:
    return ProtocolError(why, code="bulk-message", where="peer")
