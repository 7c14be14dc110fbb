"""A picture of who ran when: a lane for each queue of each chip, time to the right.

Spans of one queue cannot overlap; where a trace shows such (two clocks in one picture), the lane
has rows, and nothing is drawn over anything. Colours stand for labels; those that took least share
one grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelvisor.errors import UsageError
from accelvisor.timeline.drawing import CHARACTER, Box, Drawing, Text, to_png, to_svg
from accelvisor.timeline.spans import QUEUES, Span

# Paul Tol's "muted" and "bright" schemes without their greys: told apart by colour-blind readers.
_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#332288", "#ddaa77",
    "#44aa99", "#882255", "#999933",
)  # fmt: skip
_OTHERS, _INK, _QUIET, _RULE, _BAND = "#b0b0b0", "#202020", "#606060", "#e0e0e0", "#f5f6f8"
_ROW, _GAP, _GROUP, _HEAD, _MARGIN = 16, 4, 8, 46, 14
_BASE = 11.5  # of the text in a row
#: Pixels of the narrowest and the widest picture; characters of the longest name.
_NARROWEST, _WIDEST = 400, 8000
_LABEL = 34


@dataclass(frozen=True, slots=True)
class _Lane:
    name: str
    queue: str
    rows: Sequence[Sequence[Span]]

    @property
    def height(self) -> int:
        return len(self.rows) * _ROW


def svg(spans: Sequence[Span], title: str = "", *, width: int = 1200, model: bool = False) -> str:
    """An SVG picture of ``spans``.

    Args:
        width: pixels, 400 to 8000.
        model: the spans' times are those of ``Graph.timeline``: a microsecond is a model cycle.

    Raises:
        UsageError: ``width`` is out of range.
    """
    return to_svg(draw(spans, title, width=width, model=model))


def png(spans: Sequence[Span], title: str = "", *, width: int = 1200, model: bool = False) -> bytes:
    """The same as PNG bytes, with twice as many pixels each way. Arguments as :func:`svg`."""
    return to_png(draw(spans, title, width=width, model=model))


def draw(
    spans: Sequence[Span], title: str = "", *, width: int = 1200, model: bool = False
) -> Drawing:
    """The picture as a drawing."""
    if not _NARROWEST <= width <= _WIDEST:
        raise UsageError(f"a picture {width} pixels wide", where="picture", hint="400 to 8000")
    most = min(_LABEL, width // (3 * CHARACTER) - 11)
    lanes = _lanes(spans)
    colours = _colours(spans)
    longest = max((len(_shown(lane.name, most)) for lane in lanes), default=0)
    left = _MARGIN + (longest + 11) * CHARACTER
    right = width - _MARGIN - 6 * CHARACTER
    zero = min((s.start_ns for s in spans), default=0)
    last = max((s.end_ns for s in spans), default=0)
    scale = (right - left) / max(last - zero, 1)
    entries = _legend(colours, left, right)
    top = _HEAD + max((row for *_, row in entries), default=0) * 14
    summary = _summary(spans, last - zero, model)
    room = (width - 2 * _MARGIN) // CHARACTER - len(summary) - 2
    items: list[Box | Text] = [
        Text(_MARGIN, 20, _shown(title or "who ran when", room), _INK, bold=True),
        Text(width - _MARGIN, 20, summary, _QUIET, "end"),
    ]
    for x, label, colour, row in entries:
        items.append(Box(x, 28 + row * 14, 9, 9, colour))
        items.append(Text(x + 14, 36 + row * 14, label, _QUIET))
    bottom = top + sum(lane.height + _GAP for lane in lanes) + _GROUP * _groups(lanes)
    ticks = _ticks(last - zero, right - left, model)
    items += [Box(left + at * scale, top, 1, bottom - top, _RULE) for at, _ in ticks]
    y = top + _GROUP / 2
    for n, lane in enumerate(lanes):
        fresh = n == 0 or lane.name != lanes[n - 1].name
        if n and fresh:
            y += _GROUP
        if fresh:
            items.append(Text(_MARGIN, y + _BASE, _shown(lane.name, most), _INK, bold=True))
        items += _row(lane, y, (left, right), (zero, last), colours, model)
        y += lane.height + _GAP
    items.append(Box(left, bottom, right - left, 1, _QUIET))
    items += [Text(left + at * scale, bottom + 14, text, _QUIET, "middle") for at, text in ticks]
    return Drawing(width, round(bottom) + 26, items)


def _row(
    lane: _Lane, y: float, across: tuple[float, float], time: tuple[int, int],
    colours: dict[str, str], model: bool,
) -> list[Box | Text]:  # fmt: skip
    """One lane: its band, how much of the time it was busy, its spans."""
    (left, right), (zero, last) = across, time
    scale = (right - left) / max(last - zero, 1)
    items: list[Box | Text] = [Box(left, y, right - left, lane.height, _BAND)]
    items.append(Text(left - 6, y + _BASE, lane.queue, _QUIET, "end"))
    busy = sum(s.end_ns - s.start_ns for row in lane.rows for s in row)
    items.append(Text(right + 6, y + _BASE, f"{100 * busy / max(last - zero, 1):.0f} %", _QUIET))
    for n, row in enumerate(lane.rows):
        edge, colour_at_edge = -1.0, ""
        for span in row:
            x, end = left + (span.start_ns - zero) * scale, left + (span.end_ns - zero) * scale
            colour = colours.get(span.label, _OTHERS)
            if end <= edge and colour == colour_at_edge:
                continue  # within a pixel that has this colour already
            # A hair of the background between neighbours, and never nothing at all.
            size = max(end - x - (0.5 if end - x > 2 else 0), 0.5)
            items.append(Box(x, y + n * _ROW, size, _ROW - 1, colour, _told(span, zero, model)))
            edge, colour_at_edge = x + max(size, 0.5), colour
            if (len(span.label) + 1) * CHARACTER <= size:
                middle = x + size / 2
                ink = _ink(colour)
                items.append(Text(middle, y + _BASE + n * _ROW, _ascii(span.label), ink, "middle"))
    return items


def _lanes(spans: Sequence[Span]) -> list[_Lane]:
    """One for each queue, those of one chip beside each other, in natural order of names."""
    found: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        found.setdefault((span.lane, span.queue), []).append(span)
    keys = sorted(found, key=lambda k: (_natural(k[0]), QUEUES.index(k[1])))
    return [_Lane(*key, _rows(found[key])) for key in keys]


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        for row in rows:
            if row[-1].end_ns <= span.start_ns:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """``chip 10`` comes after ``chip 9``."""
    return tuple((int(w), "") if w.isdecimal() else (-1, w) for w in name.split())


def _groups(lanes: Sequence[_Lane]) -> int:
    return len({lane.name for lane in lanes}) or 1


def _colours(spans: Sequence[Span]) -> dict[str, str]:
    """Label -> colour, those that took longest first."""
    took: dict[str, int] = {}
    for span in spans:
        took[span.label] = took.get(span.label, 0) + span.end_ns - span.start_ns
    order = sorted(took, key=lambda label: (-took[label], label))
    shown = order if len(order) <= len(_COLOURS) else order[: len(_COLOURS) - 1]
    return {
        label: _COLOURS[n] if label in shown else _OTHERS for n, label in enumerate(order)
    }


def _legend(
    colours: dict[str, str], left: float, right: float
) -> list[tuple[float, str, str, int]]:
    """(x, text, colour, row) of each entry; all labels without a colour of their own are one."""
    rest = sum(colour == _OTHERS for colour in colours.values())
    entries = [(_shown(k), c) for k, c in colours.items() if c != _OTHERS]
    if rest:
        entries.append((f"{rest} others", _OTHERS))
    placed, x, row = [], left, 0
    for text, colour in entries:
        needs = 14 + (len(text) + 2) * CHARACTER
        if x > left and x + needs > right:
            x, row = left, row + 1
        placed.append((x, text, colour, row))
        x += needs
    return placed


def _summary(spans: Sequence[Span], whole: int, model: bool) -> str:
    return f"{len(spans)} span{'' if len(spans) == 1 else 's'}, {_time(whole, model)}"


def _ticks(whole: int, pixels: float, model: bool) -> list[tuple[int, str]]:
    """(nanoseconds, text) at 1, 2 or 5 times a power of ten, some 100 pixels apart; in one unit,
    with as many places as tell them apart.
    """
    least = whole * 100 / max(pixels, 1)
    step = 1
    while step < least:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    ticks = range(0, whole + 1, step)
    if model:
        return [(at, f"{at // 1000:,}") for at in ticks]
    unit, size = next((u for u in _UNITS if ticks[-1] >= u[1]), _UNITS[-1])
    places = next(n for n in range(10) if step * 10**n % size == 0)
    return [(at, f"{at / size:.{places}f} {unit}") for at in ticks]


_UNITS = (("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1))


def _time(ns: int, model: bool) -> str:
    """A length of time, for people."""
    if model:
        return f"{ns / 1000:,.0f} cycles"
    unit, size = next((u for u in _UNITS if ns >= u[1]), _UNITS[-1])
    return f"{ns / size:.{3 if size > 1 else 0}f} {unit}"


def _told(span: Span, zero: int, model: bool) -> str:
    start, length = _time(span.start_ns - zero, model), _time(span.end_ns - span.start_ns, model)
    parts = [f"{span.label}: {length} from {start}"]
    if span.node >= 0:
        parts.append(f"node {span.node}")
    if span.cycles and not model:
        parts.append(f"{span.cycles:,} cycles")
    if span.client:
        parts.append(span.client)
    return _ascii(", ".join(parts))


def _shown(text: str, most: int = _LABEL) -> str:
    text = _ascii(text)
    return text if len(text) <= most else text[: max(most - 3, 0)] + "..."


def _ascii(text: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def _ink(colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else _INK
