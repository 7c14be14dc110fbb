"""Cards in characters, at most :data:`WIDTH` wide; as a table where a row has too many chips."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from accelvisor.fabric.grid import LinkKind, Port
from accelvisor.fabric.links import ChipState, LinkState
from accelvisor.fabric.view import CardView, ChipView, View, amount

WIDTH = 100
_INSIDE = 6
_GAP = 4
_EDGE = 3
#: Chips of one row that fit.
_MOST = (WIDTH - 2 * _EDGE + _GAP) // (_INSIDE + 2 + _GAP)

_ACROSS = {
    LinkState.DOWN: "─",
    LinkState.TRAINING: "┄",
    LinkState.UP: "═",
    LinkState.DRAINING: "╌",
    LinkState.ERROR: "x",
}
_DOWN = {
    LinkState.DOWN: "│",
    LinkState.TRAINING: "┆",
    LinkState.UP: "║",
    LinkState.DRAINING: "╎",
    LinkState.ERROR: "x",
}
_LEGEND = (
    "links: ═ ║ up, ┄ ┆ training, ╌ ╎ draining, x error, ─ │ down; A: whose it is;\n"
    "what leaves at an edge comes in at the other; between boards they are cables"
)


def terminal(view: View) -> str:
    """All cards, one below the other, with a legend; no line ends with a space."""
    cards = [_grid(card) if card.grid.columns <= _MOST else _table(card) for card in view.cards]
    return "\n\n\n".join(cards)


def letter(card: CardView, owner: str) -> str:
    """A, B, ... Z, AA, ... in the order in which owners appear; a space for nobody."""
    if owner not in card.owners:
        return " "
    number, found = card.owners.index(owner), ""
    while number >= 0:
        number, digit = divmod(number, len(ascii_uppercase))
        found, number = ascii_uppercase[digit] + found, number - 1
    return found


def headline(card: CardView) -> str:
    grid = card.grid
    size = f"{grid.rows} x {grid.columns} chips"
    place = size if grid.boards == 1 else f"{grid.boards} boards of {size}"
    up = sum(link.state is LinkState.UP for link in card.links)
    return _fit(f"card {card.name}: {place}, {up} of {len(card.links)} links up")


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def owner_lines(card: CardView) -> list[str]:
    """Who the owners are, and what they have."""
    lines = []
    for owner in card.owners:
        chips = [n for n, chip in enumerate(card.chips) if chip.owner == owner]
        links = card.links_of(owner)
        up = sum(link.state is LinkState.UP for link in links)
        carried = amount(sum(link.bytes for link in links))
        have = f"{_count(len(chips), 'chip')}, {up} of {_count(len(links), 'link')} up"
        lines.append(_fit(f"{letter(card, owner)}  {owner}: {have}, {carried} bytes"))
    return lines or ["nobody has any of it"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _grid(card: CardView) -> str:
    grid = card.grid
    lines = [headline(card)]
    for line in range(grid.lines):
        if line % grid.rows == 0:
            board = line // grid.rows
            lines += [f"board {board}"] if grid.boards > 1 else [""]
        chips = range(line * grid.columns, (line + 1) * grid.columns)
        above = _verticals(card, chips, Port.NORTH)
        if line == 0 and above:
            lines.append(above)
        lines += _boxes(card, chips)
        below = _verticals(card, chips, Port.SOUTH)
        if below:
            lines.append(below)
    return "\n".join([*lines, "", *owner_lines(card), "", _LEGEND])


def _boxes(card: CardView, chips: Sequence[int]) -> list[str]:
    between = " " * _GAP
    lid = " " * _EDGE + between.join(f"┌{'─' * _INSIDE}┐" for _ in chips)
    middle = _link(card, chips[0], Port.WEST, _EDGE)
    under = " " * _EDGE
    for chip in chips:
        view = card.chips[chip]
        last = chip == chips[-1]
        name = f"{chip:>3} {letter(card, view.owner):<{_INSIDE - 4}}"[:_INSIDE]
        middle += f"│{name}│" + _link(card, chip, Port.EAST, _EDGE if last else _GAP)
        under += f"│{_cores(view):^{_INSIDE}}│" + ("" if last else between)
    floor = lid.translate(str.maketrans("┌┐", "└┘"))
    return [lid, middle.rstrip(), under, floor]


def _cores(chip: ChipView) -> str:
    if chip.state is ChipState.DISABLED:
        return "off"
    if chip.state is ChipState.PASS_THROUGH:
        return "passes"
    return f"{chip.held}/{chip.total}"[:_INSIDE] if chip.total else ""


def _link(card: CardView, chip: int, port: Port, width: int) -> str:
    link = card.grid.ports(chip).get(port)
    if link is None:
        return " " * width
    view = card.links[link.number]
    sign = _ACROSS[view.state]
    return f"{letter(card, view.owner).strip():{sign}^{width}}"


def _verticals(card: CardView, chips: Sequence[int], port: Port) -> str:
    cells = []
    for chip in chips:
        link = card.grid.ports(chip).get(port)
        view = None if link is None else card.links[link.number]
        cell = "" if view is None else _DOWN[view.state] + letter(card, view.owner)
        cells.append(f"{'':{_INSIDE // 2 + 1}}{cell:<{_INSIDE // 2 + 1 + _GAP}}")
    return (" " * _EDGE + "".join(cells)).rstrip()


def _table(card: CardView) -> str:
    grid = card.grid
    chips: list[tuple[str, ...]] = [
        ("chip", "board", "row", "column", "state", "owner", "cores")
    ]
    for n, chip in enumerate(card.chips):
        place = grid.place(n)
        cores = f"{chip.held}/{chip.total}"
        chips.append((str(n), *map(str, place), chip.state.value, chip.owner or "-", cores))
    links = [("link", "chips", "kind", "state", "owner", "bytes")]
    for link, view in zip(grid.links, card.links, strict=True):
        ends, state = f"{link.ends[0]}-{link.ends[1]}", view.state.name.lower()
        kind = "cable" if link.kind is LinkKind.INTER_CARD else "inter-chip"
        links.append((str(link.number), ends, kind, state, view.owner or "-", amount(view.bytes)))
    return "\n".join([headline(card), "", *_aligned(chips), "", *_aligned(links)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side; what is too wide for a line is cut, names first."""
    most = WIDTH // len(rows[0]) + 12
    cut = [[cell if len(cell) <= most else cell[: most - 1] + "…" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in cut)
    return [_fit("  ".join(cells).rstrip()) for cells in padded]
