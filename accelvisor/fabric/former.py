"""Makes a ring, or a grid of rings, of a group's chips out of the links that there are.

In this order:

1. whole rows and columns: each row of the group closes to a ring along its row, each column along
   its column. Then collectives go in two dimensions (US 11,615,295; steps in ``timing``);
2. a rectangle with an even number of chips: one ring that winds through it like a snake;
3. any simple cycle over all chips, found by backtracking, of the next chips first that with the
   fewest ways on (H. C. von Warnsdorff, 1823), within a limit of steps;
4. a rectangle with an odd number of chips, which has no cycle of its own (each step changes the
   colour of the board's field): a snake over all chips but one corner. That leaf hangs on its
   neighbour, which passes on what the leaf sends: one hop of the ring is two links long.

Else there is none, and the answer says why. One chip is a ring without links; two are one with a
single link, each direction of which is a hop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise, product
from typing import NamedTuple, TypeAlias

from accelvisor.fabric.grid import Axis, Grid
from accelvisor.limits import LIMITS

#: From each chip to the chips that an available link joins with it, and that link's number.
Joints: TypeAlias = Mapping[int, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Ring:
    """Chips in order, the last joined to the first.

    Attributes:
        ways: ``ways[i]`` are the links from chip i to the next, in the order of travel; more than
            one where a chip between them only passes on. No way for a ring of one chip.
    """

    chips: tuple[int, ...]
    ways: tuple[tuple[int, ...], ...]

    @property
    def links(self) -> tuple[int, ...]:
        """All links in the order of travel."""
        return tuple(number for way in self.ways for number in way)

    @property
    def hops(self) -> tuple[int, ...]:
        """How many links each way has."""
        return tuple(map(len, self.ways))


@dataclass(frozen=True, slots=True)
class Torus:
    """R rows and C columns of rings: chip c of row r is chip r of column c."""

    rows: tuple[Ring, ...]
    columns: tuple[Ring, ...]

    @property
    def chips(self) -> tuple[int, ...]:
        """Row by row."""
        return tuple(chip for row in self.rows for chip in row.chips)


class Reason(StrEnum):
    """Why there is no ring."""

    EMPTY = "empty"  # no chips
    SPLIT = "split"  # they do not hang together
    LEAF = "leaf"  # a chip has fewer than two links
    PARITY = "parity"  # as on a chessboard: a cycle has as many black chips as white ones
    NONE = "none"  # all was tried
    LIMIT = "limit"  # not all could be tried


@dataclass(frozen=True, slots=True)
class NoRing:
    """There is no ring, or for :attr:`Reason.LIMIT` none was found."""

    reason: Reason
    text: str


def form(
    grid: Grid, chips: Iterable[int], links: Iterable[int], passing: Iterable[int] = ()
) -> Ring | Torus | NoRing:
    """The best that a group's chips make.

    Args:
        chips: of the group, in any order.
        links: numbers of the links that may be used; others are as if they were not there.
        passing: chips that are not of the group, and over which a ring may lead.

    Raises:
        IndexError: the grid has no such chip or link.
    """
    members = _members(grid, chips)
    over = set(passing) - set(members)
    joints = joints_of(grid, links)
    if len(members) > 2:
        torus = form_torus(grid, members, joints)
        if torus is not None:
            return torus
    return _one(grid, members, over, joints)


def form_ring(
    grid: Grid, chips: Iterable[int], links: Iterable[int], passing: Iterable[int] = ()
) -> Ring | NoRing:
    """As :func:`form`, but one ring in any case, also where rows and columns are whole.

    Raises:
        IndexError: the grid has no such chip or link.
    """
    members = _members(grid, chips)
    return _one(grid, members, set(passing) - set(members), joints_of(grid, links))


def _one(grid: Grid, members: Sequence[int], over: set[int], joints: Joints) -> Ring | NoRing:
    if not members:
        return NoRing(Reason.EMPTY, "the group has no chips")
    if len(members) < 3:
        return _small(joints, members, over)
    snake = _snake(grid, members, joints)
    if snake is not None:
        return snake
    found = find_cycle(joints, members, over)
    return (_leafed(grid, members, joints) or found) if isinstance(found, NoRing) else found


def _members(grid: Grid, chips: Iterable[int]) -> list[int]:
    members = sorted(set(chips))
    for chip in members:
        grid.place(chip)  # raises
    return members


def joints_of(grid: Grid, links: Iterable[int]) -> Joints:
    """What some of a grid's links join. Raises IndexError: there is no such link."""
    joints: dict[int, dict[int, int]] = {chip: {} for chip in range(grid.chips)}
    for number in sorted(set(links)):
        if number < 0:
            raise IndexError(f"no link {number}")
        one, other = grid.links[number].ends
        joints[one][other] = joints[other][one] = number
    return joints


def _small(joints: Joints, members: Sequence[int], over: set[int]) -> Ring | NoRing:
    """A ring of one or two chips."""
    if len(members) == 1:
        return Ring((members[0],), ())
    way = _shortest(joints, members[0], members[1], over)
    if way is None:
        text = f"no way joins the chips {members[0]} and {members[1]}"
        return NoRing(Reason.SPLIT, text)
    return Ring(tuple(members), (way, way[::-1]))


def _shortest(joints: Joints, start: int, end: int, over: set[int]) -> tuple[int, ...] | None:
    """Links of a shortest way that leads over ``over`` only."""
    ways: dict[int, tuple[int, ...]] = {start: ()}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        if at == end:
            return ways[at]
        for chip, number in joints[at].items():
            if chip not in ways and (chip in over or chip == end):
                ways[chip] = (*ways[at], number)
                queue.append(chip)
    return None


def _close(joints: Joints, cycle: Sequence[int]) -> Ring | None:
    """The ring of chips in this order; None where a link is missing."""
    hops = list(pairwise([*cycle, cycle[0]]))
    if any(other not in joints[one] for one, other in hops):
        return None
    return Ring(tuple(cycle), tuple((joints[one][other],) for one, other in hops))


# --- rows and columns -----------------------------------------------------------------------------


def form_torus(grid: Grid, members: Sequence[int], joints: Joints) -> Torus | None:
    """Rule 1; None when rows or columns are not whole. One row or column is no torus."""
    lines, columns = _spread(grid, members)
    if min(len(lines), len(columns)) < 2 or len(lines) * len(columns) != len(members):
        return None
    along = {
        axis: {
            one: {o: n for o, n in near.items() if grid.links[n].axis is axis}
            for one, near in joints.items()
        }
        for axis in Axis
    }
    across = [
        _close(along[Axis.ROW], [line * grid.columns + at for at in columns]) for line in lines
    ]
    down = [
        _close(along[Axis.COLUMN], [line * grid.columns + at for line in lines]) for at in columns
    ]
    rows = tuple(ring for ring in across if ring is not None)
    cols = tuple(ring for ring in down if ring is not None)
    return Torus(rows, cols) if (len(rows), len(cols)) == (len(lines), len(columns)) else None


def _spread(grid: Grid, members: Iterable[int]) -> tuple[list[int], list[int]]:
    """The lines and columns that chips are in, so turned that they begin after a gap."""
    lines = _turn({grid.line(chip) for chip in members}, grid.lines)
    return lines, _turn({grid.column(chip) for chip in members}, grid.columns)


def _turn(numbers: set[int], modulus: int) -> list[int]:
    after_gap = [n for n in sorted(numbers) if (n - 1) % modulus not in numbers]
    first = after_gap[0] if after_gap else min(numbers)
    return sorted(numbers, key=lambda n: (n - first) % modulus)


# --- snakes ---------------------------------------------------------------------------------------

class _View(NamedTuple):
    """A rectangle with two lines and columns at least, as seen from a corner along a side."""

    grid: Grid
    lines: Sequence[int]
    columns: Sequence[int]
    turned: bool

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        high, wide = len(self.lines), len(self.columns)
        return (wide, high) if self.turned else (high, wide)

    def chip(self, line: int, column: int) -> int:
        if self.turned:
            line, column = column, line
        return self.lines[line] * self.grid.columns + self.columns[column]

    def winding(self, last: int) -> list[int]:
        """Along the first line, and through those before ``last`` but for their first chips."""
        wide = self.size[1]
        chips = [self.chip(0, at) for at in range(wide)]
        for line in range(1, last):
            across = range(1, wide)
            chips += [self.chip(line, at) for at in (reversed(across) if line % 2 else across)]
        return chips

    def home(self) -> list[int]:
        """Up the first column."""
        return [self.chip(line, 0) for line in range(self.size[0] - 1, 0, -1)]


def _views(grid: Grid, members: Sequence[int]) -> Iterator[_View]:
    """All views of the rectangle that chips make, which may lead over the grid's edge."""
    lines, columns = _spread(grid, members)
    if min(len(lines), len(columns)) < 2 or len(lines) * len(columns) != len(members):
        return
    both = ((lines, lines[::-1]), (columns, columns[::-1]))
    for rows, cols, turned in product(*both, (False, True)):
        yield _View(grid, rows, cols, turned)


def _snake(grid: Grid, members: Sequence[int], joints: Joints) -> Ring | None:
    """Rule 2: there along the first line, back by winding through the others, and up the first
    column, which the winding leaves out. Needs an even number of lines.
    """
    for view in _views(grid, members):
        high = view.size[0]
        ring = _close(joints, [*view.winding(high), *view.home()]) if high % 2 == 0 else None
        if ring is not None:
            return ring
    return None


def _leafed(grid: Grid, members: Sequence[int], joints: Joints) -> Ring | None:
    """Rule 4: a snake, but the last two lines are wound through together, from side to side, which
    leaves out their last corner.
    """
    if len(members) % 2 == 0:
        return None
    for view in _views(grid, members):
        high, wide = view.size
        host, leaf = view.chip(high - 2, wide - 1), view.chip(high - 1, wide - 1)
        chips = [*view.winding(high - 2), host]
        for at in range(wide - 2, 0, -1):
            pair = [view.chip(high - 2, at), view.chip(high - 1, at)]
            chips += pair if at % 2 else pair[::-1]
        ring = _close(joints, [*chips, *view.home()])
        if ring is not None and host in joints[leaf]:
            return _hang(ring, host, leaf, joints[leaf][host])
    return None


def _hang(ring: Ring, host: int, leaf: int, link: int) -> Ring:
    """After ``host`` comes ``leaf``, whose way to the next chip leads back over ``host``."""
    at = ring.chips.index(host) + 1
    return Ring(
        (*ring.chips[:at], leaf, *ring.chips[at:]),
        (*ring.ways[: at - 1], (link,), (link, *ring.ways[at - 1]), *ring.ways[at:]),
    )


# --- any cycle ------------------------------------------------------------------------------------


def find_cycle(
    joints: Joints, members: Sequence[int], over: Iterable[int] = (), most: int = LIMITS.cycle_steps
) -> Ring | NoRing:
    """Rule 3: a simple cycle over all ``members`` (three or more), and over chips of ``over``.

    Args:
        most: steps of the search.
    """
    among = set(members) | set(over)
    near: dict[int, list[int]] = {
        chip: [other for other in joints[chip] if other in among] for chip in sorted(among)
    }
    reason = _hopeless(near, members)
    if reason is not None:
        return reason
    search = _Search(near, frozenset(members), most)
    cycle = search.run(min(members, key=lambda chip: (len(near[chip]), chip)))
    if cycle is not None:
        return _over(joints, cycle, set(members))
    if search.left <= 0:
        return NoRing(Reason.LIMIT, f"no ring was found within {most} steps")
    return NoRing(Reason.NONE, f"no simple cycle leads over all {len(members)} chips")


def _over(joints: Joints, cycle: Sequence[int], members: set[int]) -> Ring:
    """The ring of a cycle that also leads over others than members; it begins with a member."""
    chips: list[int] = []
    ways: list[list[int]] = []
    for one, other in pairwise([*cycle, cycle[0]]):
        if one in members:
            chips.append(one)
            ways.append([])
        ways[-1].append(joints[one][other])
    return Ring(tuple(chips), tuple(map(tuple, ways)))


def _hopeless(near: Mapping[int, Sequence[int]], members: Sequence[int]) -> NoRing | None:
    """What tells at a glance that there is no cycle."""
    for chip in members:
        if len(near[chip]) < 2:
            text = f"chip {chip} has {len(near[chip])} of 2 links that it needs"
            return NoRing(Reason.LEAF, text)
    colour = {members[0]: 0}
    queue = deque([members[0]])
    mixed = False
    while queue:
        at = queue.popleft()
        for chip in near[at]:
            if chip not in colour:
                colour[chip] = 1 - colour[at]
                queue.append(chip)
            mixed |= colour[chip] == colour[at]
    lost = [chip for chip in members if chip not in colour]
    if lost:
        return NoRing(Reason.SPLIT, f"no way leads from chip {members[0]} to chip {lost[0]}")
    odd = sum(colour[chip] for chip in members)
    if len(near) == len(members) and not mixed and 2 * odd != len(members):
        text = f"every cycle alternates, and {odd} of {len(members)} chips are of one kind"
        return NoRing(Reason.PARITY, text)
    return None


class _Search:
    """Depth first, with a stack of its own: a group may have more chips than Python has frames.

    ``near`` has the chips that the cycle may lead over, of which it has to have ``members``.
    """

    def __init__(
        self, near: Mapping[int, Sequence[int]], members: frozenset[int], most: int
    ) -> None:
        self._near = near
        self._members = members
        self.left = most

    def run(self, start: int) -> list[int] | None:
        """A cycle that begins with ``start``; None: there is none, or ``left`` is used up."""
        path, on = [start], {start}
        missing = len(self._members) - 1
        stack = [self._ways(path, on)]
        while stack:
            chip = next(stack[-1], None)
            if chip is None:
                stack.pop()
                gone = path.pop()
                on.discard(gone)
                missing += gone in self._members
                continue
            self.left -= 1
            if self.left <= 0:
                return None
            path.append(chip)
            on.add(chip)
            missing -= chip in self._members
            if missing == 0 and len(path) > 2 and start in self._near[chip]:
                return path
            stack.append(self._ways(path, on))
        return None

    def _ways(self, path: Sequence[int], on: set[int]) -> Iterator[int]:
        """Where to go on, the chip with the fewest ways on first; nowhere if a member that the path
        just went by can no more be entered and left.
        """
        at, start = path[-1], path[0]
        if len(path) > 2:
            for chip in self._near[path[-2]]:
                if chip in self._members and chip not in on:
                    doors = sum(c not in on or c in (at, start) for c in self._near[chip])
                    if doors < 2:
                        return iter(())
        on_ways = [chip for chip in self._near[at] if chip not in on]
        free = {chip: sum(c not in on for c in self._near[chip]) for chip in on_ways}
        return iter(sorted(on_ways, key=lambda c: (c not in self._members, free[c], c)))
