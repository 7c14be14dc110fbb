"""Who owns which function: the ledger as moves use it, with this host's signature on what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Decided:
    """What the arbiter said of one function's move.

    Attributes:
        committed: it belongs to the destination; False: to the source, as before.
        envelope: the signed record.
    """

    committed: bool
    envelope: bytes


class Owners(Protocol):
    """The ledger. ``arbiter`` is "source" or "etcd": who decides about a move of this host's.

    Everything may raise UnavailableError (``ledger-unreachable``): nothing was decided.
    """

    arbiter: str

    async def owned(self, function: str) -> int:
        """The epoch at which this host owns a function; a new function is claimed at epoch 1.

        Raises:
            ConflictError: ``ledger-conflict``: another host owns it.
        """
        ...

    async def floor(self, function: str) -> int:
        """The lowest epoch that may come from another host."""
        ...

    async def prepare(
        self, function: str, epoch: int, migration: bytes, peer: str, digest: bytes
    ) -> None:
        """The move of a function that this host owns is sealed. ConflictError."""
        ...

    async def commit(self, function: str, epoch: int, migration: bytes) -> Decided:
        """Give it to the destination, unless that was refused before."""
        ...

    async def abort(self, function: str, epoch: int, migration: bytes) -> Decided:
        """Keep it, unless it was given away before."""
        ...

    async def received(self, envelope: bytes, source: str, function: str, migration: bytes) -> None:
        """The source's signed record says that it is ours: on disk when this returns. DataError."""
        ...

    async def release(self, function: str) -> None:
        """The function is deleted: nobody owns it."""
        ...


class Interim:
    """In memory, until the ledger is there."""

    arbiter = "source"

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._moves: dict[tuple[str, bytes], str] = {}

    async def owned(self, function: str) -> int:
        return self._epochs.setdefault(function, 1)

    async def floor(self, function: str) -> int:
        return self._epochs.get(function, 0)

    async def prepare(
        self, function: str, epoch: int, migration: bytes, peer: str, digest: bytes
    ) -> None:
        self._moves.setdefault((function, migration), "prepared")

    async def commit(self, function: str, epoch: int, migration: bytes) -> Decided:
        state = self._moves.get((function, migration))
        if state == "prepared":
            self._moves[function, migration] = "committed"
        return Decided(state in ("prepared", "committed"), b"record")

    async def abort(self, function: str, epoch: int, migration: bytes) -> Decided:
        state = self._moves.get((function, migration))
        if state != "committed":
            self._moves[function, migration] = "aborted"
        return Decided(state == "committed", b"record")

    async def received(self, envelope: bytes, source: str, function: str, migration: bytes) -> None:
        self._epochs[function] = self._epochs.get(function, 1) + 1

    async def release(self, function: str) -> None:
        self._epochs.pop(function, None)


def make(keys: object) -> Owners:
    return Interim()
