"""What both sides of a move have: the other host, and a line in the journal."""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

import msgspec

from accelvisor.migration import messages as wire


class Peer(Protocol):
    """The other host, however often its connection breaks."""

    @property
    def host(self) -> UUID: ...

    def send(self, message: wire.Message) -> None:
        """Lost when the link is down."""
        ...


class Record(msgspec.Struct, array_like=True):
    """What the journal keeps of a move, of either side."""

    peer: str
    functions: list[str]
    epochs: list[int]
    digests: list[bytes]
    arbiter: str
    domain_name: str = ""
    #: of a destination: whether functions here of these UUIDs can only be of this move
    brought: bool = False

    #: Of a source: what accelctl shows when it has ended, and why it was given up.
    numbers: dict[str, float] = {}
    reason: str = ""
