"""Flits on a fabric's links, cycle by cycle: what links promise, carried out with real bytes.

A transfer is a message from one end of a link to the other. Its sender keeps the bytes until they
are delivered. When the link is deactivated the flits that left arrive, and the rest waits; when it
fails those under way are lost, and the sender begins again with the first that did not arrive. As
soon as the link is up again, with the owner that it had, the transfer goes on; if it was given to
somebody else in between, the transfer is over and what arrived of it is thrown away. So a transfer
is complete, or waits, or never was.

Sans-IO and slow: this is what tests run. ``timing`` only counts cycles.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from accelvisor.errors import PermissionDenied, UsageError
from accelvisor.fabric.fabric import Fabric
from accelvisor.fabric.grid import WIRES
from accelvisor.fabric.links import FLIT_BYTES, LinkState


@dataclass(slots=True)
class Transfer:
    """One message.

    Attributes:
        received: what has arrived, in order.
        dropped: the link changed hands before all had arrived; ``received`` is empty.
    """

    link: int
    source: int
    owner: str
    payload: bytes
    sent: int = 0  # bytes that left, and were not lost
    received: bytearray = field(default_factory=bytearray)
    complete: bool = False
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Flit:
    """One that arrived: on which link, with which number, of which transfer."""

    link: int
    sequence: int
    transfer: Transfer
    left: int
    arrived: int
    data: bytes


@dataclass(slots=True)
class _Lane:
    """What happens on one link; the earliest comes first in each queue."""

    waiting: deque[Transfer] = field(default_factory=deque)
    flying: deque[Flit] = field(default_factory=deque)
    credits: deque[int] = field(default_factory=deque)  # when each is back
    free: int = 0  # when the next flit can leave


class Traffic:
    """Moves transfers over a fabric. ``now`` is its model clock; ``log`` all flits that arrived."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.now = 0
        self.log: list[Flit] = []
        self._lanes = [_Lane() for _ in fabric.grid.links]
        self._wires = [WIRES[link.kind] for link in fabric.grid.links]

    def begin(self, number: int, source: int, owner: str, payload: bytes) -> Transfer:
        """Send ``payload`` from the end ``source``; it waits while the link is not up.

        Raises:
            NotFoundError: ``link-not-found``.
            PermissionDenied: ``link-not-yours``.
            UsageError: the link does not end at ``source``.
        """
        if self.fabric.link_owner(number) != owner:
            raise PermissionDenied(
                f"link {number} is not {owner or 'nobody'}'s", code="link-not-yours",
                where="fabric",
            )  # fmt: skip
        if source not in self.fabric.grid.links[number].ends:
            raise UsageError(f"link {number} does not end at chip {source}", where="fabric")
        transfer = Transfer(number, source, owner, bytes(payload))
        self._lanes[number].waiting.append(transfer)
        return transfer

    def fail(self, number: int) -> None:
        """A link breaks. Raises NotFoundError: ``link-not-found``."""
        broken = self.fabric.fail(number)
        lane = self._lanes[number]
        lost = list(lane.flying)
        if [flit.sequence for flit in lost] != list(range(broken.delivered + 1, broken.sent + 1)):
            raise UsageError("flits were sent on the link by others", where="fabric")
        for flit in reversed(lost):
            flit.transfer.sent -= len(flit.data)
            if not lane.waiting or lane.waiting[0] is not flit.transfer:
                lane.waiting.appendleft(flit.transfer)
        lane.flying.clear()
        lane.credits.clear()

    def run(self, cycles: int) -> None:
        """Let so many cycles go by."""
        for _ in range(cycles):
            self.now += 1
            self.fabric.advance(self.now)
            for number in range(len(self._lanes)):
                self._cycle(number)

    def settle(self, most: int = 100_000) -> int:
        """Run until nothing more moves, at most so long; returns the cycles that it took."""
        start = self.now
        while self.now - start < most and any(map(self._moves, range(len(self._lanes)))):
            self.run(1)
        return self.now - start

    def _moves(self, number: int) -> bool:
        link, lane = self.fabric.link(number), self._lanes[number]
        if link.state in (LinkState.TRAINING, LinkState.DRAINING):
            return True
        return link.state is LinkState.UP and bool(lane.waiting or lane.flying or lane.credits)

    def _cycle(self, number: int) -> None:
        link, lane = self.fabric.link(number), self._lanes[number]
        while lane.flying and lane.flying[0].arrived <= self.now:
            self._arrive(lane.flying.popleft(), lane)
        while lane.credits and lane.credits[0] <= self.now:
            lane.credits.popleft()
            link.release(self.now)
        owner = self.fabric.link_owner(number)
        while lane.waiting and lane.waiting[0].owner != owner:
            gone = lane.waiting.popleft()
            gone.dropped = True
            gone.received.clear()
        if link.state is LinkState.UP and lane.waiting and lane.free <= self.now:
            self._leave(number)

    def _leave(self, number: int) -> None:
        lane, wire = self._lanes[number], self._wires[number]
        transfer = lane.waiting[0]
        data = transfer.payload[transfer.sent : transfer.sent + FLIT_BYTES]
        sequence = self.fabric.link(number).send(len(data))
        if sequence is None:
            return
        lane.free = self.now + max(1, -(-len(data) // wire.bytes_per_cycle))
        there = lane.free + wire.latency
        lane.flying.append(Flit(number, sequence, transfer, self.now, there, data))
        transfer.sent += len(data)
        if transfer.sent == len(transfer.payload):
            lane.waiting.popleft()

    def _arrive(self, flit: Flit, lane: _Lane) -> None:
        self.fabric.link(flit.link).deliver(flit.sequence)
        lane.credits.append(self.now + self._wires[flit.link].latency)
        self.log.append(flit)
        transfer = flit.transfer
        transfer.received += flit.data
        transfer.complete = len(transfer.received) == len(transfer.payload)
