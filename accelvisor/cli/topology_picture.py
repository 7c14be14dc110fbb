"""A card's chips and links as an SVG picture: complete, without references to anything outside.
Values in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from accelvisor.cli.topology_text import Joints, Names, headline

_CHIP = (92, 58)
_STEP = (150, 124)
_MARGIN = 44
_HEAD = 40
_LINE = 20
_BOARD_GAP = 26
#: Okabe and Ito's colours, which people tell apart whatever colours they see; then again, from the
#: first on.
_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f5539",
)  # fmt: skip
_FREE = "#9aa0a6"


class _Sheet:
    """What is drawn of one card, with where its chips are."""

    def __init__(self, card: Mapping[str, Any], top: float) -> None:
        self.card = card
        self.names = Names(card)
        self.joints = Joints(card)
        self.top = top
        self._colour = {
            uuid: _COLOURS[n % len(_COLOURS)] for n, uuid in enumerate(self.names.names)
        }
        lines = card["boards"] * card["rows"]
        self.width = 2 * _MARGIN + card["columns"] * _STEP[0] - (_STEP[0] - _CHIP[0])
        self.grid_height = lines * _STEP[1] + card["boards"] * _BOARD_GAP
        self.height = _HEAD + self.grid_height + _LINE * (len(self.names.names) + 2)

    def corner(self, chip: int) -> tuple[float, float]:
        """Of a chip's box, the upper left."""
        line, column = divmod(chip, self.card["columns"])
        board = line // self.card["rows"]
        y = self.top + _HEAD + _BOARD_GAP + 26 + line * _STEP[1] + board * _BOARD_GAP
        return _MARGIN + column * _STEP[0], y

    def colour(self, function: str) -> str:
        return self._colour[function]

    def draw(self) -> list[str]:
        """Boards, then links, then chips, then the legend."""
        parts = [_text(_MARGIN - 20, self.top + 26, headline(self.card), 15, bold=True)]
        parts += [self._board(board) for board in range(self.card["boards"])]
        parts += [self._link(item) for item in self.card["links"]]
        for chip in self.card["chips"]:
            parts += self._chip(chip)
        return parts + self._legend()

    def _board(self, board: int) -> str:
        first = board * self.card["rows"] * self.card["columns"]
        y = self.corner(first)[1] - 34
        height = (self.card["rows"] - 1) * _STEP[1] + _CHIP[1] + 52
        width = self.width - 2 * _MARGIN + 56
        frame = (
            f'<rect x="{_MARGIN - 28}" y="{y:g}" width="{width}" height="{height}" rx="12" '
            'fill="#f6f7f8" stroke="#c4c8cc"/>'
        )
        name = f"board {board}" if self.card["boards"] > 1 else ""
        return frame + _text(self.width - _MARGIN - 18, y + 12, name, 10, "#5f6368")

    def _link(self, item: Mapping[str, Any]) -> str:
        one, other = sorted((item["link"]["one"], item["link"]["other"]))
        owner, state = item["function"], item["state"]
        usable = self.joints.usable(item)
        stroke = _FREE if owner is None else self.colour(owner)
        style = f'stroke="{stroke}" stroke-width="{1.5 if owner is None else 4}" fill="none"'
        if not usable or (owner is not None and state not in (None, "up")):
            style += ' stroke-dasharray="3 5"'
        kind = item["link"]["kind"].replace("_", "-")
        words = [f"link {item['link']['number']}: chips {one} and {other}, {kind}"]
        words.append("free" if owner is None else str(item["name"]))
        words += [str(state)] if state else []
        words += [f"{item['bytes']} bytes"] if item["bytes"] is not None else []
        title = f"<title>{escape(', '.join(words))}</title>"
        return f'<path d="{self._way(one, other)}" {style}>{title}</path>'

    def _way(self, one: int, other: int) -> str:
        """Straight between neighbours; what closes a ring goes over its row, or beside its column.
        """
        (x1, y1), (x2, y2) = self.corner(one), self.corner(other)
        wide, high = _CHIP
        columns = self.card["columns"]
        if one // columns == other // columns:
            if other - one == 1:
                return f"M{x1 + wide:g} {y1 + high / 2:g}H{x2:g}"
            y = y1 - 16
            return (
                f"M{x1 + 14:g} {y1:g}Q{x1 + 14:g} {y:g} {x1 + 30:g} {y:g}H{x2 + wide - 30:g}"
                f"Q{x2 + wide - 14:g} {y:g} {x2 + wide - 14:g} {y2:g}"
            )
        if other - one == columns:
            return f"M{x1 + wide / 2:g} {y1 + high:g}V{y2:g}"
        x = x1 - 16
        return (
            f"M{x1:g} {y1 + 14:g}Q{x:g} {y1 + 14:g} {x:g} {y1 + 30:g}V{y2 + high - 30:g}"
            f"Q{x:g} {y2 + high - 14:g} {x2:g} {y2 + high - 14:g}"
        )

    def _chip(self, chip: Mapping[str, Any]) -> list[str]:
        x, y = self.corner(chip["chip"])
        wide, high = _CHIP
        off = chip["mode"] == "disabled"
        fill = "#e3e5e8" if off else "#ffffff"
        words = [f"{item['name']}: cores {item['cores']}" for item in chip["holders"]]
        title = escape("; ".join([f"chip {chip['chip']}", *words]))
        dashes = "" if chip["mode"] == "enabled" else ' stroke-dasharray="4 3"'
        parts = [
            f'<rect x="{x:g}" y="{y:g}" width="{wide}" height="{high}" rx="6" fill="{fill}" '
            f'stroke="#3c4043"{dashes}><title>{title}</title></rect>',
            _text(x + 8, y + 17, str(chip["chip"]), 12, bold=True),
        ]
        state = f"{chip['cores_free']} of {chip['cores']} free"
        if chip["mode"] != "enabled":
            state = "switched off" if off else "passes only"
        parts.append(_text(x + 8, y + 32, state, 10, "#5f6368"))
        return parts + self._cores(chip, x, y)

    def _cores(self, chip: Mapping[str, Any], x: float, y: float) -> list[str]:
        """A bar of the chip's cores, each in the colour of its function."""
        width = (_CHIP[0] - 16) / max(1, chip["cores"])
        owner = {core: item["function"] for item in chip["holders"] for core in item["cores"]}
        return [
            f'<rect x="{x + 8 + core * width:.2f}" y="{y + 40:g}" width="{width - 1:.2f}" '
            f'height="9" fill="{self.colour(owner[core]) if core in owner else "#dfe1e5"}"/>'
            for core in range(chip["cores"] if chip["mode"] == "enabled" else 0)
        ]

    def _legend(self) -> list[str]:
        y = self.top + _HEAD + self.grid_height + _LINE
        parts = []
        for uuid, name in self.names.names.items():
            links = [item for item in self.card["links"] if item["function"] == uuid]
            count = f"{len(links)} link{'' if len(links) == 1 else 's'}"
            colour = self.colour(uuid)
            parts.append(
                f'<rect x="{_MARGIN}" y="{y - 10:g}" width="14" height="12" fill="{colour}"/>'
            )
            parts.append(_text(_MARGIN + 22, y, f"{name}, {count}", 12))
            y += _LINE
        if not parts:
            parts.append(_text(_MARGIN, y, "no function is on it", 12, "#5f6368"))
        return parts


def svg(cards: Sequence[Mapping[str, Any]]) -> str:
    """The cards of the reply to Topology, one below the other."""
    sheets: list[_Sheet] = []
    top = 0.0
    for card in cards:
        sheets.append(_Sheet(card, top))
        top += sheets[-1].height
    width = max([sheet.width for sheet in sheets] + [480])
    height = max(top, 60)
    body = "\n".join(part for sheet in sheets for part in sheet.draw())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="DejaVu Sans, sans-serif">\n'
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _text(
    x: float, y: float, words: str, size: int, fill: str = "#202124", *, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{weight}>'
        f"{escape(words)}</text>"
    )
