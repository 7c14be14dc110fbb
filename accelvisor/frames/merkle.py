"""The Merkle tree over a checkpoint's chunks, as in RFC 6962, 2.1 (Certificate Transparency).

A leaf is hashed with a prefix of 0x00 and a node with 0x01, so neither can stand for the other; an
odd node moves up unchanged. :class:`Merkle` takes leaves one by one and keeps O(log n) hashes;
:func:`plain_root` is the definition, and the tests compare the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from accelvisor.errors import DataError

HASH_BYTES = 32
LEAF_PREFIX = b"\x00"
NODE_PREFIX = b"\x01"


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(NODE_PREFIX + left + right).digest()


class Merkle:
    """A root that grows with its leaves.

    Args:
        size: leaves that are in it already.
        peaks: what :attr:`peaks` said at that size: a broken stream goes on from there.
    """

    def __init__(self, size: int = 0, peaks: Sequence[bytes] = ()) -> None:
        if size < 0 or len(peaks) != size.bit_count() or any(len(p) != HASH_BYTES for p in peaks):
            raise DataError(
                f"{len(peaks)} hashes are not the peaks of a tree of {size} leaves",
                code="document-invalid",
                where="frames",
            )
        self._size = size
        self._peaks = list(peaks)

    @property
    def size(self) -> int:
        return self._size

    @property
    def peaks(self) -> tuple[bytes, ...]:
        """Roots of the complete trees that the leaves fill, the largest first: one for each bit
        that is set in :attr:`size`.
        """
        return tuple(self._peaks)

    def add(self, leaf: bytes) -> None:
        """``leaf`` is a leaf's hash, 32 bytes."""
        # As in a binary counter: each trailing 1 of the size is a tree of the same height.
        carry = self._size
        while carry & 1:
            leaf = node_hash(self._peaks.pop(), leaf)
            carry >>= 1
        self._peaks.append(leaf)
        self._size += 1

    def root(self) -> bytes:
        """Of all leaves so far; of none it is SHA-256 of nothing."""
        if not self._peaks:
            return hashlib.sha256().digest()
        *rest, root = self._peaks
        for peak in reversed(rest):
            root = node_hash(peak, root)
        return root


def plain_root(leaves: Sequence[bytes]) -> bytes:
    """RFC 6962's definition, word for word: split at the largest power of two below the size."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return leaves[0]
    split = 1 << ((len(leaves) - 1).bit_length() - 1)
    return node_hash(plain_root(leaves[:split]), plain_root(leaves[split:]))
