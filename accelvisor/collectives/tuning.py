"""Whether packing pays here: measured, since it depends on the link as much as on the data.

On a link as fast as memory the time that packing takes may exceed the time that it saves. So a
communicator tries both ways on the first calls of a kind (what is called, how many bytes, about how
many of them zero), keeps the faster, and looks again now and then. No result depends on it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

#: Calls of a kind each way before one is preferred; the very first may have compiled something.
TRIALS = 3
#: After so many calls the other way is tried once more.
AGAIN = 64
#: Of a new time in what is remembered, so that one slow call is forgotten.
_WEIGHT = 0.3


@dataclass(slots=True)
class _Kind:
    """What is known of one kind of call: calls so far, and seconds dense and packed."""

    calls: int = 0
    tried: list[int] = field(default_factory=lambda: [0, 0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])


class Tuner:
    """Of one communicator."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def packs(self, key: Hashable) -> bool:
        """Whether the next call of this kind should pack."""
        kind = self._kinds.setdefault(key, _Kind())
        kind.calls += 1
        dense, packed = kind.tried
        if min(dense, packed) < TRIALS:
            return packed <= dense
        faster = kind.seconds[True] <= kind.seconds[False]
        return not faster if kind.calls % AGAIN == 0 else faster

    def took(self, key: Hashable, packed: bool, seconds: float) -> None:
        """How long it took. The first call of each way is not counted."""
        kind = self._kinds.setdefault(key, _Kind())
        kind.tried[packed] += 1
        if kind.tried[packed] == 2:
            kind.seconds[packed] = seconds
        elif kind.tried[packed] > 2:
            known = kind.seconds[packed]
            kind.seconds[packed] = min(seconds, known + _WEIGHT * (seconds - known))


def bucket(nbytes: int, density: float) -> tuple[int, int]:
    """Sizes and densities that are alike: within a factor of two."""
    return nbytes.bit_length(), -int(-density * 64).bit_length()
