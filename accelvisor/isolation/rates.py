"""What rate each function gets of its card's host port, decided from what it lately took.

Weighted max-min over demands: a function that used its rate up could take anything, one that did
not is expected to take half as much again as it took at most in its last few periods, and one that
rests keeps a little, so that it is seen when it begins. So a function that wants it has its
weighted share after one period, and what others leave goes to those that work.

Pure: accelvisor.daemon.port observes and sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from accelvisor.isolation.fair import Demand, max_min
from accelvisor.limits import KIB

#: Part of its weighted share that a function keeps while it rests.
RESTING = 20
#: Bytes a second that the least weight gets, beside the shares: a command must not wait for days.
LEAST = KIB
#: Percent of its rate from which on a function is taken to want more.
_USED_UP = 90
#: Percent of what it took that a function may take next.
_ROOM = 150
#: Percent by which a rate must change for it to be worth waking functions.
_WORTH = 10


class Observation(NamedTuple):
    """One function as it was seen last.

    Attributes:
        card: whose host port it uses.
        weight: its own among those of the card.
        rate: bytes a second that it may take now; 0: any.
        used: bytes a second, the most of its last few periods.
        hungry: bytes of it had to wait in the last period.
    """

    card: str
    weight: int
    rate: int
    used: int
    hungry: bool

    @property
    def active(self) -> bool:
        """Whether it took anything lately."""
        return self.hungry or self.used > 0

    @property
    def insatiable(self) -> bool:
        """Whether its rate, or none, was all that it could have taken."""
        return self.hungry or self.used * 100 > self.rate * _USED_UP


def decide(
    observations: Mapping[str, Observation], capacities: Mapping[str, int]
) -> dict[str, int]:
    """Rates in bytes a second by function; 0, any, on a card whose port has no limit.

    On a card with a limit they add up to no more than that (and ``LEAST`` for each function that
    would have less), and to all of it when any function is active.
    """
    rates: dict[str, int] = {}
    for card, members in _by_card(observations):
        capacity = capacities.get(card, 0)
        rates |= _share(members, capacity) if capacity else dict.fromkeys(members, 0)
    return rates


def orders(
    observations: Mapping[str, Observation], rates: Mapping[str, int]
) -> list[tuple[str, int]]:
    """(function, rate) to be sent, those that lose first: all of a card's that differ as soon as
    one differs by much, so that old and new rates never add up to more than the card has.
    """
    wanted: list[tuple[str, int]] = []
    for _, members in _by_card(observations):
        if any(_differs(seen.rate, rates[name]) for name, seen in members.items()):
            wanted += [(name, rates[name]) for name, seen in members.items()
                       if rates[name] != seen.rate]  # fmt: skip
    return sorted(wanted, key=lambda order: _rises(observations[order[0]].rate, order[1]))


def _by_card(
    observations: Mapping[str, Observation],
) -> Iterator[tuple[str, dict[str, Observation]]]:
    cards: dict[str, dict[str, Observation]] = {}
    for name, seen in observations.items():
        cards.setdefault(seen.card, {})[name] = seen
    yield from cards.items()


def _share(members: Mapping[str, Observation], capacity: int) -> dict[str, int]:
    shares = max_min(capacity, {n: Demand(seen.weight, None) for n, seen in members.items()})
    demands = {
        name: Demand(seen.weight, _demand(seen, shares[name] // RESTING))
        for name, seen in members.items()
    }
    rates = max_min(capacity, demands)
    working = {n: Demand(seen.weight, None) for n, seen in members.items() if seen.active}
    for name, more in max_min(capacity - sum(rates.values()), working).items():
        rates[name] += more
    return {name: max(LEAST, rate) for name, rate in rates.items()}


def _demand(seen: Observation, resting: int) -> int | None:
    if seen.active and seen.insatiable:
        return None
    return max(resting, seen.used * _ROOM // 100)


def _differs(old: int, new: int) -> bool:
    if not old or not new:
        return old != new
    return abs(new - old) * 100 > old * _WORTH


def _rises(old: int, new: int) -> bool:
    return bool(old) and (not new or new > old)
