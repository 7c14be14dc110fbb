"""The links between a function's chips: what they are, and switching them.

A transfer over a link that is not up is refused (``device-link-down``). Which chips a function has
and how they are joined is the host's decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelvisor.abi.commands import ALL_LINKS, link_switch
from accelvisor.errors import ProtocolError, UsageError

if TYPE_CHECKING:
    from accelvisor.guest.function import Function


@dataclass(frozen=True, slots=True)
class Link:
    """One link: its number within the function, the chips that it joins, and what it carried.

    Several links between the same two chips are the hops of one way.
    """

    number: int
    ends: tuple[int, int]
    kind: str  # inter-chip or inter-card
    state: str  # down, training, up, draining, error
    bytes: int
    transfers: int


def links(function: Function) -> list[Link]:
    """The function's links as they are now.

    Raises:
        ProtocolError: the device's answer cannot be read.
    """
    told = function.fabric()
    try:
        return [
            Link(
                int(row["link"]), (int(row["ends"][0]), int(row["ends"][1])), str(row["kind"]),
                str(row["state"]), int(row["bytes"]), int(row["transfers"]),
            )
            for row in told["links"]
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ProtocolError(
            f"the device's answer about its links cannot be read: {error!r}", where="query:fabric"
        ) from error


def switch(function: Function, on: bool, link: int | None = None) -> int:
    """Bring a link, or all of them (None), up or down; returns model cycles that it took.

    A link that goes down ends the transfers that use it first.

    Raises:
        CommandRefused: there is no such link.
    """
    number = ALL_LINKS if link is None else link
    if not 0 <= number <= ALL_LINKS:
        raise UsageError(f"link {link}", where="links")
    return function.call(link_switch(0, number, on)).cycles


def ring(function: Function, chips: Iterable[int] | None = None) -> list[int] | None:
    """The chips in an order in which each is joined to the next and the last to the first; two
    chips are a ring with one link. None when there is none, by the links that are up.

    Depth first, from the first chip, neighbours with fewest ways on first (H. C. von Warnsdorff,
    1823): at most 16 chips, and few ways on each.
    """
    wanted = list(range(function.identity.chips) if chips is None else chips)
    joined = {chip: set[int]() for chip in wanted}
    for link in links(function):
        a, b = link.ends
        if link.state == "up" and a in joined and b in joined:
            joined[a].add(b)
            joined[b].add(a)
    if len(wanted) < 2:
        return wanted or None
    path = [wanted[0]]
    tries = [100_000]

    def extend() -> bool:
        tries[0] -= 1
        if len(path) == len(wanted):
            return path[0] in joined[path[-1]]
        on = [c for c in joined[path[-1]] if c not in path]
        for chip in sorted(on, key=lambda c: (len(joined[c] - set(path)), c)):
            path.append(chip)
            if tries[0] > 0 and extend():
                return True
            path.pop()
        return False

    return path if extend() else None
