"""Cards as pictures: :func:`svg` here, :func:`terminal` in characters. Values in, text out.

The SVG is complete, with nothing outside that it refers to. A label is as wide as the widest thing
that it can say, and lies where no line and no other label can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from accelvisor.fabric.fabric import NOBODY
from accelvisor.fabric.grid import Axis, GridLink, LinkKind
from accelvisor.fabric.links import ChipState, LinkState
from accelvisor.fabric.terminal import headline, letter, owner_lines, terminal
from accelvisor.fabric.view import CardView, LinkView, View, amount

__all__ = ["svg", "terminal"]

_WIDE, _HIGH = 84, 52
_STEP_X, _STEP_Y = 156, 116
#: Left of the first chip and above it: room for what closes rings, with its label.
_LEFT, _OVER = 72, 54
_HEAD, _LINE, _BOARD_GAP = 44, 20, 22
#: Okabe and Ito's colours, which people tell apart whatever colours they see; then from the first.
_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f5539",
)  # fmt: skip
_FREE, _INK, _FAINT, _RED = "#9aa0a6", "#202124", "#5f6368", "#c5221f"


def svg(view: View) -> str:
    """The cards one below the other, each with its owners, and a legend at the end."""
    sheets: list[_Sheet] = []
    top = 0.0
    for card in view.cards:
        sheets.append(_Sheet(card, top))
        top += sheets[-1].height
    width = max([sheet.width for sheet in sheets] + [930])
    parts = [part for sheet in sheets for part in sheet.draw()] + _legend(top)
    height = top + 60
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="DejaVu Sans, sans-serif">\n'
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


class _Sheet:
    """One card, with where its chips are."""

    def __init__(self, card: CardView, top: float) -> None:
        self.card = card
        self.grid = card.grid
        self.top = top
        head = 40 + 11 * len(headline(card))
        self.width = max(head, _LEFT + (self.grid.columns - 1) * _STEP_X + _WIDE + 48)
        gaps = (self.grid.boards - 1) * _BOARD_GAP
        self.grid_height = _OVER + (self.grid.lines - 1) * _STEP_Y + _HIGH + 28 + gaps
        self.height = _HEAD + self.grid_height + _LINE * (max(1, len(card.owners)) + 1)

    def corner(self, chip: int) -> tuple[float, float]:
        """Of a chip's box, the upper left."""
        line = self.grid.line(chip)
        y = self.top + _HEAD + _OVER + line * _STEP_Y + self.grid.board(chip) * _BOARD_GAP
        return _LEFT + self.grid.column(chip) * _STEP_X, y

    def colour(self, owner: str) -> str:
        if owner == NOBODY:
            return _FREE
        return _COLOURS[self.card.owners.index(owner) % len(_COLOURS)]

    def draw(self) -> list[str]:
        parts = [_text(20, self.top + 28, headline(self.card), 15, bold=True)]
        parts += [self._board(board) for board in range(self.grid.boards)]
        pairs = list(zip(self.grid.links, self.card.links, strict=True))
        # What is in use lies above what is not.
        pairs.sort(key=lambda pair: pair[1].state is not LinkState.DOWN)
        for link, view in pairs:
            parts += self._link(link, view)
        for chip in range(self.grid.chips):
            parts += self._chip(chip)
        return parts + self._owners()

    def _board(self, board: int) -> str:
        first = board * self.grid.rows * self.grid.columns
        x, y = self.corner(first)
        high = (self.grid.rows - 1) * _STEP_Y + _HIGH + 54
        wide = (self.grid.columns - 1) * _STEP_X + _WIDE + 84
        frame = (
            f'<rect x="{x - 58:g}" y="{y - 40:g}" width="{wide:g}" height="{high:g}" rx="10" '
            'fill="#f6f7f8" stroke="#c4c8cc"/>'
        )
        if self.grid.boards == 1:
            return frame
        return frame + _text(x + wide - 68, y - 26, f"board {board}", 10, _FAINT, anchor="end")

    # --- links ------------------------------------------------------------------------------------

    def _link(self, link: GridLink, view: LinkView) -> list[str]:
        path, (x, y), (label_x, label_y, anchor) = self._way(link)
        failed, down = view.state is LinkState.ERROR, view.state is LinkState.DOWN
        stroke = _RED if failed else self.colour(view.owner)
        width = {LinkState.DOWN: 1.5, LinkState.UP: 4.0}.get(view.state, 2.5)
        dashes = ' stroke-dasharray="9 5"' if link.kind is LinkKind.INTER_CARD else ""
        words = (
            f"link {link.number}: chips {link.ends[0]} and {link.ends[1]}, {link.kind}, "
            f"{view.owner or 'free'}, {view.state.name.lower()}, {view.bytes} bytes"
        )
        line = (
            f'<path d="{path}" stroke="{stroke if not down else _FREE}" stroke-width="{width:g}" '
            f'fill="none"{dashes}><title>{escape(words)}</title></path>'
        )
        label = amount(view.bytes) if view.bytes else ""
        return [line, _mark(view.state, x, y, stroke), _text(
            label_x, label_y, label, 9, _FAINT, anchor=anchor
        )]  # fmt: skip

    def _way(self, link: GridLink) -> tuple[str, tuple[float, float], tuple[float, float, str]]:
        """A link's path, the place of its mark, and of its label.

        Between neighbours it is straight; what closes a ring goes over its row, or left of its
        column.
        """
        one, other = sorted(link.ends)
        (x1, y1), (x2, y2) = self.corner(one), self.corner(other)
        if link.axis is Axis.ROW:
            if other - one == 1:
                x, y = (x1 + _WIDE + x2) / 2, y1 + _HIGH / 2
                return f"M{x1 + _WIDE:g} {y:g}H{x2:g}", (x, y), (x, y - 9, "middle")
            y, end = y1 - 18, x2 + _WIDE
            path = (
                f"M{x1 + 16:g} {y1:g}Q{x1 + 16:g} {y:g} {x1 + 34:g} {y:g}H{end - 34:g}"
                f"Q{end - 16:g} {y:g} {end - 16:g} {y2:g}"
            )
            x = x1 + (_WIDE + _STEP_X) / 2
            return path, (x, y), (x, y - 9, "middle")
        if other - one == self.grid.columns:
            cable = self.grid.board(one) != self.grid.board(other)
            x, y = x1 + _WIDE / 2, y1 + _HIGH + (30 if cable else 20)
            return f"M{x:g} {y1 + _HIGH:g}V{y2:g}", (x, y), (x + 10, y + 3, "start")
        x, end = x1 - 18, y2 + _HIGH
        path = (
            f"M{x1:g} {y1 + 12:g}Q{x:g} {y1 + 12:g} {x:g} {y1 + 28:g}V{end - 28:g}"
            f"Q{x:g} {end - 12:g} {x2:g} {end - 12:g}"
        )
        y = y1 + _HIGH + 20
        return path, (x, y), (x - 9, y + 3, "end")

    # --- chips ------------------------------------------------------------------------------------

    def _chip(self, chip: int) -> list[str]:
        view = self.card.chips[chip]
        x, y = self.corner(chip)
        off, passes = view.state is ChipState.DISABLED, view.state is ChipState.PASS_THROUGH
        state = {ChipState.DISABLED: "off", ChipState.PASS_THROUGH: "passes on"}.get(
            view.state, f"{view.held} of {view.total}" if view.total else ""
        )
        words = f"chip {chip}: {view.state}, {view.owner or 'free'}, cores {view.held}/{view.total}"
        dashes = ' stroke-dasharray="4 3"' if passes else ""
        fill = "#e3e5e8" if off else "#ffffff"
        edge = f'stroke="#3c4043"{dashes}'
        parts = [
            f'<rect x="{x:g}" y="{y:g}" width="{_WIDE}" height="{_HIGH}" rx="6" fill="{fill}" '
            f"{edge}><title>{escape(words)}</title></rect>",
            _text(x + 8, y + 18, str(chip), 12, bold=True),
            _text(x + 8, y + 33, state, 10, _FAINT),
        ]
        if view.owner != NOBODY:
            name = letter(self.card, view.owner)
            parts.append(
                f'<rect x="{x + _WIDE - 31:g}" y="{y + 6:g}" width="24" height="16" rx="3" '
                f'fill="{self.colour(view.owner)}"/>'
            )
            parts.append(
                _text(x + _WIDE - 19, y + 18, name, 11, "#ffffff", bold=True, anchor="middle")
            )
        return parts if off else [*parts, *self._cores(chip, x + 8, y + 40)]

    def _cores(self, chip: int, x: float, y: float) -> list[str]:
        view = self.card.chips[chip]
        if not view.total:
            return []
        full = _WIDE - 16
        part = full * min(view.held, view.total) / view.total
        bar = f'<rect x="{x:g}" y="{y:g}" width="{{:g}}" height="5" rx="2" fill="{{}}"/>'
        return [bar.format(full, "#dfe1e5"), bar.format(part, self.colour(view.owner))]

    def _owners(self) -> list[str]:
        y = self.top + _HEAD + self.grid_height + 8
        parts: list[str] = []
        swatches = self.card.owners or (NOBODY,)
        for owner, line in zip(swatches, owner_lines(self.card), strict=True):
            if owner != NOBODY:
                parts.append(
                    f'<rect x="20" y="{y - 11:g}" width="14" height="14" rx="2" '
                    f'fill="{self.colour(owner)}"/>'
                )
            parts.append(_text(42 if owner else 20, y, line, 12))
            y += _LINE
        return parts


def _mark(state: LinkState, x: float, y: float, colour: str) -> str:
    """What a link has in its middle that is neither down nor up."""
    if state is LinkState.TRAINING:
        edge = f'fill="#ffffff" stroke="{colour}" stroke-width="2"'
        return f'<circle cx="{x:g}" cy="{y:g}" r="5" {edge}/>'
    if state is LinkState.DRAINING:
        return f'<circle cx="{x:g}" cy="{y:g}" r="5.5" fill="{colour}"/>'
    if state is LinkState.ERROR:
        return (
            f'<path d="M{x - 5:g} {y - 5:g}l10 10m0 -10l-10 10" stroke="{_RED}" '
            'stroke-width="3" fill="none"/>'
        )
    return ""


def _legend(top: float) -> list[str]:
    """The states and kinds of links, in one line."""
    y = top + 26
    parts = [f'<path d="M20 {y - 22:g}H910" stroke="#dfe1e5"/>']
    samples: Sequence[tuple[str, LinkState, str]] = (
        ("up", LinkState.UP, ""), ("training", LinkState.TRAINING, ""),
        ("draining", LinkState.DRAINING, ""), ("broken", LinkState.ERROR, ""),
        ("down", LinkState.DOWN, ""), ("between cards", LinkState.UP, ' stroke-dasharray="9 5"'),
    )  # fmt: skip
    x = 20.0
    for words, state, dashes in samples:
        colour = {LinkState.ERROR: _RED, LinkState.DOWN: _FREE}.get(state, _INK)
        width = {LinkState.DOWN: 1.5, LinkState.UP: 4.0}.get(state, 2.5)
        parts.append(
            f'<path d="M{x:g} {y:g}h38" stroke="{colour}" stroke-width="{width:g}"{dashes}/>'
        )
        parts += [_mark(state, x + 19, y, colour), _text(x + 46, y + 4, words, 11, _FAINT)]
        x += 58 + 7.2 * len(words) + 16
    parts.append(_text(x, y + 4, "numbers: bytes carried", 11, _FAINT))
    return parts


def _text(
    x: float, y: float, words: str, size: int, fill: str = _INK, *,
    bold: bool = False, anchor: str = "start",
) -> str:  # fmt: skip
    if not words:
        return ""
    weight = ' font-weight="bold"' if bold else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{weight}{place}>'
        f"{escape(words)}</text>"
    )
