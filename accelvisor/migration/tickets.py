"""One-time tickets: which bulk connection belongs to which transfer.

A ticket is 32 random bytes that one host gets over the control link and shows over TLS, once and
soon. Only its hash is kept. Thread-safe; clock and entropy are arguments.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from uuid import UUID

from accelvisor.errors import CapacityError, PermissionDenied
from accelvisor.limits import LIMITS, Limits

TICKET_BYTES = 32
_WHERE = "peer"
T = TypeVar("T")


class Tickets(Generic[T]):
    """Issues and redeems tickets for whatever ``T`` a connection belongs to."""

    def __init__(self, entropy: Callable[[int], bytes], *, limits: Limits = LIMITS) -> None:
        self._entropy = entropy
        self._limits = limits
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[UUID, float, T]] = {}

    def issue(self, host: UUID, session: T, now: float) -> bytes:
        """A ticket that ``host`` may show once within ``LIMITS.ticket_s``.

        Raises:
            CapacityError: ``peer-tickets``, too many wait.
        """
        ticket = self._entropy(TICKET_BYTES)
        with self._lock:
            self._open = {k: v for k, v in self._open.items() if v[1] > now}
            if len(self._open) >= self._limits.tickets:
                raise CapacityError(
                    f"{len(self._open)} bulk connections are expected already",
                    code="peer-tickets",
                    where=_WHERE,
                )
            until = now + self._limits.ticket_s
            self._open[hashlib.sha256(ticket).digest()] = (host, until, session)
        return ticket

    def waiting(self, now: float) -> int:
        """How many may still be shown."""
        with self._lock:
            return sum(until > now for _, until, _ in self._open.values())

    def redeem(self, ticket: bytes, host: UUID, now: float) -> T:
        """What the ticket was issued for. It is used up, also when another host shows it.

        Raises:
            PermissionDenied: ``peer-ticket``.
        """
        with self._lock:
            found = self._open.pop(hashlib.sha256(ticket).digest(), None)
        if found is None or found[0] != host or found[1] <= now:
            raise refused()
        return found[2]

    def withdraw(self, session: T) -> None:
        """Nobody may come for ``session`` any more."""
        with self._lock:
            self._open = {k: v for k, v in self._open.items() if v[2] is not session}


def refused() -> PermissionDenied:
    return PermissionDenied(
        "the ticket of a bulk connection is unknown, used, too old or another host's",
        code="peer-ticket",
        where=_WHERE,
        hint="ask for a new one over the control link",
    )
