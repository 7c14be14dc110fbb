"""Who owns which function: the ledger as moves use it, with this host's signature on what it says.
"""

from __future__ import annotations

from collections.abc import Callable
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


#: Makes one for a host.
Make = Callable[[], Owners]
