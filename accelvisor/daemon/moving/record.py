"""What both sides of a move have: the other host, and a line in the journal."""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

import msgspec

from accelvisor.migration import destination, source
from accelvisor.migration import messages as wire

#: States in which a move is over for everybody who does not name it.
SOURCE_OVER = frozenset(
    (source.State.DONE, source.State.RETURNED, source.State.REFUSED, source.State.ABORTED)
)
DESTINATION_OVER = frozenset(
    (destination.State.RUNNING, destination.State.CLOSED, destination.State.DISCARDED)
)
#: States of rows that nothing is to be done about any more, of either side.
ENDED = frozenset(
    state.value
    for state in (
        source.State.DONE, source.State.RETURNED, source.State.REFUSED,
        destination.State.RUNNING, destination.State.CLOSED,
    )
)  # fmt: skip
#: States in which a destination's move is nothing but a record.
DESTINATION_ENDED = frozenset((destination.State.RUNNING, destination.State.CLOSED))


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
    #: Of a destination: whether functions here of these UUIDs can only be of this move.
    brought: bool = False
    #: Of a source: what accelctl shows when it has ended, and why it was given up.
    numbers: dict[str, float] = {}
    reason: str = ""
