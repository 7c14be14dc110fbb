"""Which chips of a card a function gets when links have to join them, and which links.

A *way* joins two chips: one free link, or several that lead over chips which only let pass. The
chips of a function are chosen so that ways make a ring of them: in a block of rows and columns
where there is one, else wherever there is a simple cycle of that length; else so that they hang
together; else as if there were no links. Searches backtrack, with a bound on their steps; distance
from where a cycle began, and parity (a grid's cycles are even unless they go round it), tell most
dead ends at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from accelvisor.isolation.resources import Card, Placement
from accelvisor.limits import LIMITS


class Way(NamedTuple):
    """Numbers of links, and the chips that lie between them. Of one function at most one way leads
    over a chip: so its links alone tell which belong together.
    """

    links: tuple[int, ...]
    over: tuple[int, ...] = ()

    @property
    def takes(self) -> set[tuple[str, int]]:
        """What no two ways of a function have in common."""
        return {("link", n) for n in self.links} | {("chip", n) for n in self.over}


#: From a chip to the chips that a way leads to.
Ways: TypeAlias = Mapping[int, Mapping[int, Way]]
Taken: TypeAlias = AbstractSet[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Joined:
    """Chips in the function's order, and the links between them that it takes."""

    chips: Sequence[int]
    links: Sequence[int]


@dataclass(slots=True)
class Room:
    """What there is to choose from.

    Attributes:
        free: the free cores of each chip that has enough of them; the fullest are taken first.
        whole: all cores of its chips would be the function's, so nobody else could use a link
            between two of them.
        links: free links.
    """

    card: Card
    free: Mapping[int, int]
    whole: bool
    links: frozenset[int]
    able: Sequence[int] = field(init=False)
    ways: Ways = field(init=False)

    def __post_init__(self) -> None:
        self.able = sorted(self.free, key=lambda chip: (self.free[chip], chip))
        self.ways = _ways(self)


@dataclass(slots=True)
class _Budget:
    left: int = LIMITS.ring_steps

    def spend(self) -> bool:
        self.left -= 1
        return self.left >= 0


def ring(room: Room, count: int) -> Joined | None:
    """``count`` chips in the order of a ring, and that ring: of two chips, the way between them.
    So a function's chip is joined to the next in its own numbers, wherever it is. None: there is
    none, or none was found within :attr:`Limits.ring_steps`.
    """
    budget = _Budget()
    for chips in (*_blocks(room, count), room.able):
        cycle = _cycle(room.ways, chips, count, budget)
        if cycle is not None:
            first = cycle.index(min(cycle))
            chips = [*cycle[first:], *cycle[:first]]
            return _joined(room, chips, _around(room.ways, cycle))
    return None


def connected(room: Room, count: int) -> Joined | None:
    """``count`` chips that hang together, and all free links between them. None: no such chips."""
    for start in room.able:
        chips: list[int] = [start]
        taken: set[tuple[str, int]] = set()
        while len(chips) < count:
            step = next(_steps(room, chips, taken), None)
            if step is None:
                break
            chips.append(step[0])
            taken.update(step[1].takes)
        if len(chips) == count:
            return _joined(room, sorted(chips), _links(taken), every=True)
    return None


def apart(room: Room, count: int) -> Joined:
    """The first ``count`` chips, and the free links that happen to join some of them."""
    return _joined(room, sorted(room.able[:count]), (), every=True)


def shaped(room: Room, count: int, shape: Sequence[tuple[int, int]]) -> Joined | None:
    """``count`` chips in such an order that a way joins each pair of ``shape``, which names them by
    their place in it. None: there are none, or none were found.
    """
    near: dict[int, set[int]] = {chip: set() for chip in range(count)}
    for one, other in shape:
        if one == other or not {one, other} <= near.keys():
            return None
        near[one].add(other)
        near[other].add(one)
    order = _spread(near)
    found = _embed(room, near, order, {}, frozenset(), _Budget())
    if found is None:
        return None
    chips = [found[0][chip] for chip in range(count)]
    return _joined(room, chips, _links(found[1]))


def laid(card: Card, placement: Placement) -> list[tuple[int, int, int]]:
    """The links of a placement as its function knows them: the link's number, and the function's
    chips that it joins; the hops of a way have the ends of the way. What leads nowhere (a card that
    was configured anew, say) is left out.
    """
    local = {chip: at for at, chip in enumerate(placement.cores)}
    hops: dict[int, dict[int, int]] = {}
    for number in placement.links:
        if 0 <= number < len(card.links):
            one, other = card.links[number]
            hops.setdefault(one, {})[number] = other
            hops.setdefault(other, {})[number] = one
    found: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    for start, at in local.items():
        for number in sorted(hops.get(start, {})):
            way, end = [number], hops[start][number]
            while end not in local:
                on = [(link, chip) for link, chip in hops[end].items() if link not in way]
                if len(on) != 1:
                    break
                way.append(on[0][0])
                end = on[0][1]
            if end in local and end != start and seen.isdisjoint(way):
                seen.update(way)
                found += [(link, at, local[end]) for link in way]
    return found


# --- ways -----------------------------------------------------------------------------------------


def _ways(room: Room) -> Ways:
    """By one link where there is one; else by the fewest links over chips that let pass."""
    ends = room.card.links
    step: dict[int, dict[int, int]] = {}
    for number in sorted(room.links):
        one, other = ends[number]
        step.setdefault(one, {})[other] = number
        step.setdefault(other, {})[one] = number
    able = frozenset(room.able)
    passing = room.card.passing
    found: dict[int, dict[int, Way]] = {}
    for start in room.able:
        ways: dict[int, Way] = {}
        queue: deque[tuple[int, Way]] = deque([(start, Way(()))])
        seen = {start}
        while queue:
            at, way = queue.popleft()
            for chip, number in step.get(at, {}).items():
                if chip in seen:
                    continue
                seen.add(chip)
                if chip in able:
                    ways[chip] = Way((*way.links, number), way.over)
                elif chip in passing:
                    queue.append((chip, Way((*way.links, number), (*way.over, chip))))
        found[start] = ways
    return found


def _links(taken: Taken) -> set[int]:
    return {number for what, number in taken if what == "link"}


def _around(ways: Ways, cycle: Sequence[int]) -> set[int]:
    """The links of a closed walk; of two chips there is one way, and no way back."""
    walk = cycle if len(cycle) == 2 else (*cycle, cycle[0])
    return {number for one, other in pairwise(walk) for number in ways[one][other].links}


def _steps(
    room: Room, chips: Sequence[int], taken: Taken
) -> Iterator[tuple[int, Way]]:
    """Further chips beside those chosen, the first to be taken first."""
    for chip in room.able:
        if chip in chips:
            continue
        for one in chips:
            way = room.ways[one].get(chip)
            if way is not None and taken.isdisjoint(way.takes):
                yield chip, way
                break


def _joined(
    room: Room, chips: Sequence[int], links: set[int] | Sequence[int], *, every: bool = False
) -> Joined:
    """With these links, and all that are free between its chips if nobody else could use them, or
    ``every`` is wanted.
    """
    among = frozenset(chips)
    more = {n for n in room.links if among.issuperset(room.card.links[n])}
    taken = more.union(links) if room.whole or every else links
    return Joined(tuple(chips), tuple(sorted(taken)))


# --- cycles ---------------------------------------------------------------------------------------


def _blocks(room: Room, count: int) -> list[list[int]]:
    """Blocks of so many able chips, rows times columns: the fullest first, of equals those that
    more links join.
    """
    card, free = room.card, room.free
    lines, columns = card.boards * card.rows, card.columns
    ends = [card.links[number] for number in room.links]
    found: list[tuple[int, int, list[int]]] = []
    for wide in range(1, min(count, columns) + 1):
        high = count // wide
        if high * wide != count or high > lines:
            continue
        for top in range(lines - high + 1):
            for left in range(columns - wide + 1):
                corner = top * columns + left
                block = [
                    corner + line * columns + at for line in range(high) for at in range(wide)
                ]
                if free.keys() >= (inside := frozenset(block)):
                    joined = sum(one in inside and other in inside for one, other in ends)
                    found.append((sum(free[chip] for chip in block), -joined, block))
    return [block for _, _, block in sorted(found)]


def _cycle(
    ways: Ways, chips: Sequence[int], count: int, budget: _Budget
) -> list[int] | None:
    """A simple cycle of so many of ``chips`` whose ways share no link; those at the front first."""
    if count < 2:
        return list(chips[:count])
    rank = {chip: at for at, chip in enumerate(chips)}
    for start in chips:
        back = _walks(ways, start, rank, count)
        path = _extend(ways, [start], count, rank, back, set(), budget)
        if path is not None or budget.left < 0:
            return path
        del rank[start]  # no cycle has it
    return None


def _extend(
    ways: Ways,
    path: list[int],
    count: int,
    rank: Mapping[int, int],
    back: Mapping[tuple[int, int], int],
    used: Taken,
    budget: _Budget,
) -> list[int] | None:
    """Go on from ``path``; nothing of what its ways take (``used``) is taken twice."""
    at, start = path[-1], path[0]
    if len(path) == count:
        home = ways[at].get(start)
        closed = home is not None and (count == 2 or used.isdisjoint(home.takes))
        return list(path) if closed else None
    left = count - len(path)
    for chip in sorted(ways[at].keys() & rank.keys(), key=rank.__getitem__):
        takes = ways[at][chip].takes
        far = back.get((chip, left % 2), count + 1) > left
        if far or chip in path or not used.isdisjoint(takes):
            continue
        if not budget.spend():
            return None
        found = _extend(ways, [*path, chip], count, rank, back, used | takes, budget)
        if found is not None:
            return found
    return None


def _walks(
    ways: Ways, start: int, chips: Mapping[int, int], most: int
) -> Mapping[tuple[int, int], int]:
    """Length of the shortest walk to ``start``, by chip and whether it is odd; of those up to
    ``most``.
    """
    found = {(start, 0): 0}
    queue = deque([(start, 0)])
    while queue:
        at, odd = queue.popleft()
        if found[at, odd] >= most:
            break
        for chip in ways[at].keys() & chips.keys():
            if (chip, 1 - odd) not in found:
                found[chip, 1 - odd] = found[at, odd] + 1
                queue.append((chip, 1 - odd))
    return found


# --- a given shape --------------------------------------------------------------------------------


def _spread(near: Mapping[int, set[int]]) -> list[int]:
    """All chips, each after one that it is joined with where there is one."""
    order: list[int] = []
    for first in sorted(near, key=lambda chip: (-len(near[chip]), chip)):
        queue = deque([first])
        while queue:
            chip = queue.popleft()
            if chip not in order:
                order.append(chip)
                queue.extend(sorted(near[chip]))
    return order


def _embed(
    room: Room,
    near: Mapping[int, set[int]],
    order: Sequence[int],
    placed: Mapping[int, int],
    used: Taken,
    budget: _Budget,
) -> tuple[Mapping[int, int], Taken] | None:
    """Place the chips of ``order`` that are not placed yet; then where all are, and what their ways
    take.
    """
    if len(placed) == len(order):
        return placed, used
    chip = order[len(placed)]
    partners = [placed[other] for other in near[chip] if other in placed]
    taken = set(placed.values())
    for place in room.able:
        if place in taken:
            continue
        if not budget.spend():
            return None
        ways = [room.ways[place].get(partner) for partner in partners]
        takes = [what for way in ways if way is not None for what in way.takes]
        if None in ways or len(set(takes)) != len(takes) or not used.isdisjoint(takes):
            continue
        found = _embed(room, near, order, {**placed, chip: place}, used | set(takes), budget)
        if found is not None:
            return found
    return None
