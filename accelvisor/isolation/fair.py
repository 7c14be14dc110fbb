"""Sharing by weight what cannot be cut into pieces of one's own: the host port, and links.

Three tools, all in whole numbers and without a clock of their own:

* :func:`max_min` divides a capacity: weighted max-min fairness, exact to the byte.
* :class:`DeficitRoundRobin` decides whose packet goes next on a shared link.
* :class:`TokenBucket` holds one sender to the rate that it was given.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from accelvisor.errors import ConflictError, NotFoundError, UsageError

_WHERE = "fair"
_NS = 1_000_000_000


class Demand(NamedTuple):
    """What one flow may be given at most (``wanted``; None: as much as there is), by its weight."""

    weight: int
    wanted: int | None


def max_min(capacity: int, demands: Mapping[str, Demand]) -> dict[str, int]:
    """Weighted max-min fair shares (Bertsekas and Gallager, Data Networks, 6.5.2) in whole numbers.

    Defined unit by unit: the next one goes to the flow below its demand that would then have least
    for its weight, and of equals to the one whose name comes first. So shares add up exactly, and
    no share shrinks when the capacity grows; rounding each flow's exact share can promise neither.
    Filling up to the common level at once leaves fewer units than flows to be given singly:
    O(n log n), whatever the capacity.

    Returns:
        by name, and the sum is the capacity, or all demands together where that is less.

    Raises:
        UsageError: a negative capacity or demand, or a weight below 1.
    """
    if capacity < 0:
        raise UsageError(f"a capacity of {capacity}", where=_WHERE)
    for name, (weight, wanted) in demands.items():
        if weight < 1 or (wanted is not None and wanted < 0):
            raise UsageError(f"{name}: weight {weight}, demand {wanted}", where=_WHERE)
    shares: dict[str, int] = {}
    left, weights = capacity, sum(demand.weight for demand in demands.values())
    bounded = [
        (Fraction(wanted, weight), name, weight, wanted)
        for name, (weight, wanted) in demands.items()
        if wanted is not None
    ]
    for _, name, weight, wanted in sorted(bounded):
        if wanted * weights > left * weight:
            break  # those with more for their weight cannot be satisfied either
        shares[name] = wanted
        left -= wanted
        weights -= weight
    open_flows = {name: demand for name, demand in demands.items() if name not in shares}
    for name, (weight, _) in open_flows.items():
        shares[name] = left * weight // weights
    _singly(left - sum(shares[name] for name in open_flows), open_flows, shares)
    return shares


def _singly(units: int, flows: Mapping[str, Demand], shares: dict[str, int]) -> None:
    """Give out the last few units by the definition of :func:`max_min`."""
    queue = [
        (Fraction(shares[name] + 1, weight), name)
        for name, (weight, wanted) in flows.items()
        if wanted is None or shares[name] < wanted
    ]
    heapq.heapify(queue)
    while units and queue:
        _, name = heapq.heappop(queue)
        shares[name] += 1
        units -= 1
        weight, wanted = flows[name]
        if wanted is None or shares[name] < wanted:
            heapq.heappush(queue, (Fraction(shares[name] + 1, weight), name))


class _Flow:
    """One flow's packets, and how many bytes it may still send in this round."""

    __slots__ = ("deficit", "packets", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.deficit = 0
        self.packets: deque[int] = deque()


class DeficitRoundRobin:
    """Whose packet goes next on a shared link (Shreedhar and Varghese, Efficient Fair Queuing Using
    Deficit Round Robin, IEEE/ACM Transactions on Networking 4(3), 1996).

    In each round a flow may send its quantum, ``weight * scale`` bytes, and keeps what it could not
    use for a packet that was too long. ``scale`` is such that the least quantum is that of the
    longest packet: every visit sends one, so a packet costs O(1).

    Of two flows that both have packets waiting all the time, the bytes for their weights differ
    over any interval by at most ``scale + longest / weight + longest / weight``: one visit more,
    and what each can have carried over (their theorem on fairness, in bytes for a weight).

    Args:
        longest: bytes of the longest packet.
    """

    def __init__(self, longest: int) -> None:
        if longest < 1:
            raise UsageError(f"packets of {longest} bytes at most", where=_WHERE)
        self._longest = longest
        self._flows: dict[str, _Flow] = {}
        self._active: deque[str] = deque()
        #: whether the first active flow has had its quantum of this round
        self._granted = False
        self._waiting = 0
        self.scale = 0

    def __len__(self) -> int:
        """How many packets wait."""
        return self._waiting

    def add(self, flow: str, weight: int) -> None:
        """A new flow; O(flows).

        Raises:
            UsageError: a weight below 1.
            ConflictError: there is a flow of that name.
        """
        if weight < 1:
            raise UsageError(f"{flow}: weight {weight}", where=_WHERE)
        if flow in self._flows:
            raise ConflictError(f"flow {flow} is there already", where=_WHERE)
        self._flows[flow] = _Flow(weight)
        self._rescale()

    def remove(self, flow: str) -> list[int]:
        """End a flow; the packets that it leaves unsent. O(flows). Raises NotFoundError."""
        gone = self._flow(flow)
        del self._flows[flow]
        if gone.packets:
            if self._active[0] == flow:
                self._granted = False
            self._active.remove(flow)
            self._waiting -= len(gone.packets)
        self._rescale()
        return list(gone.packets)

    def push(self, flow: str, nbytes: int) -> None:
        """A packet arrives. Raises NotFoundError, and UsageError for an impossible size."""
        if not 1 <= nbytes <= self._longest:
            raise UsageError(f"a packet of {nbytes} bytes", where=_WHERE)
        known = self._flow(flow)
        if not known.packets:
            known.deficit = 0  # credit is not saved up while nothing waits
            self._active.append(flow)
        known.packets.append(nbytes)
        self._waiting += 1

    def pop(self) -> tuple[str, int] | None:
        """(flow, bytes) of the packet that goes next; None when none waits."""
        while self._active:
            name = self._active[0]
            flow = self._flows[name]
            if not self._granted:
                flow.deficit += flow.weight * self.scale
                self._granted = True
            if flow.packets[0] > flow.deficit:
                self._active.rotate(-1)
                self._granted = False
                continue
            nbytes = flow.packets.popleft()
            flow.deficit -= nbytes
            self._waiting -= 1
            if not flow.packets:
                self._active.popleft()
                self._granted = False
            return name, nbytes
        return None

    def _flow(self, name: str) -> _Flow:
        try:
            return self._flows[name]
        except KeyError:
            raise NotFoundError(f"there is no flow {name}", where=_WHERE) from None

    def _rescale(self) -> None:
        least = min((flow.weight for flow in self._flows.values()), default=1)
        self.scale = -(-self._longest // least)


class TokenBucket:
    """Holds one sender to ``rate`` bytes a second, of which ``burst`` may go at once after a rest.

    Bytes are taken in advance, in the order in which they ask: whoever takes more than there is
    waits until the debt is paid, so that nobody starves behind those who want less. Counted in
    billionths of a byte on a clock of whole nanoseconds: over any time no more than
    ``burst + rate * seconds`` may go, and nothing is lost to rounding.

    Args:
        rate: bytes a second; 0: unlimited.
        burst: bytes.
        now: of any clock, in seconds. One that goes back grants nothing for that, and takes nothing
            away: from there on it counts anew.
    """

    def __init__(self, rate: int, burst: int, now: float = 0.0) -> None:
        self._check(rate, burst)
        self._rate = rate
        self._burst = burst * _NS
        self._level = self._burst  # below 0: debt
        self._at = _ns(now)
        #: Bytes that were ever taken. After a ``take``, the ticket that ``left`` asks for.
        self.taken = 0

    @property
    def rate(self) -> int:
        """Bytes a second; 0: unlimited."""
        return self._rate

    def set_rate(self, rate: int, burst: int, now: float) -> None:
        """Another rate from now on; debts are kept, and paid at the new rate. A bucket that was
        unlimited begins empty: what just went is not known.
        """
        self._check(rate, burst)
        self._advance(now)
        if not self._rate:
            self._level = 0
        self._rate = rate
        self._burst = burst * _NS
        self._level = min(self._level, self._burst)

    def holds(self, nbytes: int, now: float) -> bool:
        """Whether so many bytes could be taken without a wait."""
        self._advance(now)
        return not self._rate or self._level >= nbytes * _NS

    def take(self, nbytes: int, now: float) -> float:
        """Take bytes; the seconds until they may go, never negative."""
        self._advance(now)
        self.taken += nbytes
        if self._rate:
            self._level -= nbytes * _NS
        return self._wait(self._level)

    def left(self, ticket: int, now: float) -> float:
        """Seconds until the bytes of that take may go, at the rate that counts now."""
        self._advance(now)
        return self._wait(self._level + (self.taken - ticket) * _NS)

    def _wait(self, level: int) -> float:
        if level >= 0 or not self._rate:
            return 0.0
        return -(level // self._rate) / _NS

    def _advance(self, now: float) -> None:
        at = _ns(now)
        elapsed, self._at = at - self._at, at
        if elapsed > 0 and self._rate:
            self._level = min(self._burst, self._level + elapsed * self._rate)

    @staticmethod
    def _check(rate: int, burst: int) -> None:
        if rate < 0 or burst < 0:
            raise UsageError(f"a rate of {rate}, a burst of {burst}", where=_WHERE)


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
