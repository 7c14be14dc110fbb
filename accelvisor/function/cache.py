"""A least-recently-used cache that is bounded by what its entries weigh, not by their number alone:
entries follow from what guests upload, and their memory is the host's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(Generic[K, V]):
    """At most ``weight`` together, but always room for the newest entry."""

    def __init__(self, weight: int) -> None:
        self._most = weight
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.weight = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: K) -> V | None:
        """The entry, which becomes the newest."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, weight: int) -> None:
        """Add an entry, and drop the oldest until the rest fits."""
        old = self._held.pop(key, None)
        self.weight += weight - (old[1] if old is not None else 0)
        self._held[key] = value, weight
        while self.weight > self._most and len(self._held) > 1:
            _, (_, gone) = self._held.popitem(last=False)
            self.weight -= gone

    def clear(self) -> None:
        """Drop everything."""
        self._held.clear()
        self.weight = 0
