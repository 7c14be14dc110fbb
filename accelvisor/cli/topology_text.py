"""A card's chips and links in characters: plain text that looks the same in a terminal, a pipe and
a log. Values in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from accelvisor.cli import render
from accelvisor.fabric.former import NoRing, Torus, form
from accelvisor.fabric.grid import Grid

#: Chips drawn beside each other; longer rows go on below.
_ACROSS = 8
_INSIDE = 7
_GAP = 5
_LEGEND = (
    "══A══ a link that A has, ╌╌A╌╌ one of its that is not up, ───── a free one,\n"
    "  ·   one that cannot be used, since a chip is off"
)


class Names:
    """A letter for each function of a card, in the order in which they appear."""

    def __init__(self, card: Mapping[str, Any]) -> None:
        holders = [holder for chip in card["chips"] for holder in chip["holders"]]
        links = [item for item in card["links"] if item["function"] is not None]
        pairs = [(item["function"], item["name"]) for item in (*holders, *links)]
        self.names: dict[str, str] = dict(pairs)
        self._letters = {uuid: _letter(n) for n, uuid in enumerate(self.names)}

    def letter(self, function: str) -> str:
        return self._letters[function]


def _letter(number: int) -> str:
    high, low = divmod(number, len(ascii_uppercase))
    return (_letter(high - 1) if high else "") + ascii_uppercase[low]


class Joints:
    """The links of a card by the chips that they join."""

    def __init__(self, card: Mapping[str, Any]) -> None:
        self._columns = card["columns"]
        self._lines = card["boards"] * card["rows"]
        self._chips = card["chips"]
        self._links = {
            frozenset((item["link"]["one"], item["link"]["other"])): item for item in card["links"]
        }

    def right(self, chip: int) -> Mapping[str, Any] | None:
        """The link to the next chip of the row; of the last one, to the first, if they close it."""
        line, at = divmod(chip, self._columns)
        if at + 1 == self._columns and self._columns < 3:
            return None
        return self._links.get(frozenset((chip, line * self._columns + (at + 1) % self._columns)))

    def left(self, chip: int) -> Mapping[str, Any] | None:
        line, at = divmod(chip, self._columns)
        before = line * self._columns + (at - 1) % self._columns
        return self.right(before)

    def below(self, chip: int) -> Mapping[str, Any] | None:
        """The link to the chip below; of the last line, to the first."""
        line, at = divmod(chip, self._columns)
        if line + 1 == self._lines and self._lines < 3:
            return None
        return self._links.get(frozenset((chip, (line + 1) % self._lines * self._columns + at)))

    def above(self, chip: int) -> Mapping[str, Any] | None:
        line, at = divmod(chip, self._columns)
        return self.below((line - 1) % self._lines * self._columns + at)

    def usable(self, item: Mapping[str, Any]) -> bool:
        """Neither end is switched off."""
        ends = (item["link"]["one"], item["link"]["other"])
        return all(self._chips[end]["mode"] != "disabled" for end in ends)


def draw(card: Mapping[str, Any]) -> str:
    """One card of the reply to Topology, with a legend."""
    names, joints = Names(card), Joints(card)
    columns, rows = card["columns"], card["rows"]
    lines = [headline(card)]
    for line in range(card["boards"] * rows):
        board, row = divmod(line, rows)
        if row == 0:
            lines += ["", f"board {board}"] if card["boards"] > 1 else [""]
        for first in range(0, columns, _ACROSS):
            chips = range(line * columns + first, line * columns + min(first + _ACROSS, columns))
            lines += _row(card, names, joints, chips, top=line == 0)
    return "\n".join([*lines, "", *_owners(card, names), "", _LEGEND])


def headline(card: Mapping[str, Any]) -> str:
    joints = Joints(card)
    free = sum(item["function"] is None and joints.usable(item) for item in card["links"])
    grid = f"{card['rows']} x {card['columns']} chips"
    place = grid if card["boards"] == 1 else f"{card['boards']} boards of {grid}"
    return f"card {card['card']}: {place}, {free} of {len(card['links'])} links free"


def _row(
    card: Mapping[str, Any], names: Names, joints: Joints, chips: Sequence[int], *, top: bool
) -> list[str]:
    """Four lines of boxes with what joins them, and below these what joins them to the next row."""
    edge = " " * _GAP
    number, free = [_across(joints, names, joints.left(chips[0]))], [edge]
    for chip in chips:
        item = card["chips"][chip]
        number += [f"│{_title(item, names)}│", _across(joints, names, joints.right(chip))]
        free += [f"│{_state(item):^{_INSIDE}}│", edge]
    lid = (edge + edge.join(f"┌{'─' * _INSIDE}┐" for _ in chips)).rstrip()
    floor = lid.translate(str.maketrans("┌┐", "└┘"))
    lines = [lid, "".join(number).rstrip(), "".join(free).rstrip(), floor]
    if top and any(joints.above(chip) for chip in chips):
        lines.insert(0, _down(joints, names, [joints.above(chip) for chip in chips]))
    under = [joints.below(chip) for chip in chips]
    return [*lines, _down(joints, names, under)] if any(under) else lines


def _title(chip: Mapping[str, Any], names: Names) -> str:
    letters = ",".join(names.letter(item["function"]) for item in chip["holders"])
    room = _INSIDE - 4
    if len(letters) > room:
        letters = letters[: room - 1] + "+"
    return f"{chip['chip']:>3} {letters:<{room}}"


def _state(chip: Mapping[str, Any]) -> str:
    if chip["mode"] == "disabled":
        return "off"
    return "passes" if chip["mode"] == "pass_through" else f"{chip['cores_free']} free"


def _across(joints: Joints, names: Names, item: Mapping[str, Any] | None) -> str:
    if item is None:
        return " " * _GAP
    if not joints.usable(item):
        return f"{'·':^{_GAP}}"
    if item["function"] is None:
        return "─" * _GAP
    line = "═" if item["state"] in (None, "up") else "╌"
    return f"{names.letter(item['function']):{line}^{_GAP}}"


def _down(joints: Joints, names: Names, items: Sequence[Mapping[str, Any] | None]) -> str:
    cells = []
    for item in items:
        text = ""
        if item is not None and not joints.usable(item):
            text = "·"
        elif item is not None and item["function"] is None:
            text = "│"
        elif item is not None:
            line = "║" if item["state"] in (None, "up") else "╎"
            text = line + names.letter(item["function"])
        # The line itself is below the middle of the box.
        cells.append(" " * (_GAP + 1 + _INSIDE // 2) + f"{text:<{_INSIDE - _INSIDE // 2 + 1}}")
    return "".join(cells).rstrip()


def _owners(card: Mapping[str, Any], names: Names) -> list[str]:
    rows = []
    for uuid, name in names.names.items():
        links = [item for item in card["links"] if item["function"] == uuid]
        chips = [
            chip["chip"]
            for chip in card["chips"]
            if any(holder["function"] == uuid for holder in chip["holders"])
        ]
        states = {item["state"] for item in links if item["state"] is not None}
        carried = [item["bytes"] for item in links if item["bytes"] is not None]
        rows.append(
            {
                "": names.letter(uuid),
                "FUNCTION": name,
                "ON CHIPS": render.numbers(chips) or "-",
                "LINKS": render.numbers([item["link"]["number"] for item in links]) or "-",
                "MAKES": _makes(card, chips, [item["link"]["number"] for item in links]),
                "STATE": ", ".join(sorted(states)) or "-",
                "CARRIED": render.size(sum(carried)) if carried else "-",
            }
        )
    return render.table(rows, "no function is on it").split("\n")


def _makes(card: Mapping[str, Any], chips: Sequence[int], links: Sequence[int]) -> str:
    """What a function's links make of its chips: a ring, rows x columns of rings, or nothing."""
    if len(chips) < 2:
        return "-"
    grid = Grid(card["boards"], card["rows"], card["columns"])
    found = form(grid, chips, links, range(len(card["chips"])))
    if isinstance(found, NoRing):
        return "no ring"
    if isinstance(found, Torus) and min(len(found.rows), len(found.columns)) > 1:
        return f"{len(found.rows)} x {len(found.columns)} rings"
    return "a ring"
