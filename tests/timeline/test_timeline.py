"""Traces as JSON and pictures: read back by other means than they were written."""

from __future__ import annotations

import json
import random
import struct
import zlib
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import DataError, UsageError
from accelvisor.timeline import Span, chrome, png, read, svg
from accelvisor.timeline.drawing import CHARACTER, Box, Drawing, Text, to_png
from accelvisor.timeline.picture import draw

SVG = "{http://www.w3.org/2000/svg}"


def row(**changes: Any) -> dict[str, Any]:
    return {
        "context": 0, "name": "python3", "chip": 0, "queue": "compute", "label": "matmul",
        "command": 7, "node": -1, "start_ns": 1_000_000, "end_ns": 1_500_000, "cycles": 400,
        "cycle_start": 90, **changes,
    }  # fmt: skip


def busy(chips: int, count: int, seed: int = 0, labels: int = 5) -> list[Span]:
    r = random.Random(seed)
    found = []
    for chip in range(chips):
        for queue in ("compute", "transfer"):
            t = 5_000_000_000
            for n in range(count):
                t += r.choice((0, 100, 30_000))
                end = t + r.choice((50, 2000, 60_000))
                label = f"program {r.randrange(labels)}"
                found.append(Span(f"chip {chip}", queue, label, t, end, node=n))
                t = end
    return found


# --- reading -------------------------------------------------------------------------------------


def test_a_devices_trace_is_read_in_order_of_time() -> None:
    late = row(start_ns=2_000_000, end_ns=2_000_000, chip=3, queue="transfer", node=5)
    trace = read({"clock": "monotonic", "spans": [late, row()], "dropped": 4})
    assert trace.dropped == 4
    first, second = trace.spans
    assert first == Span(
        "chip 0", "compute", "matmul", 1_000_000, 1_500_000, "python3", 7, -1, 400, 90
    )
    assert (second.lane, second.queue, second.node) == ("chip 3", "transfer", 5)


def test_several_functions_have_lanes_of_their_own() -> None:
    (span,) = read({"spans": [row(chip=2)]}, "vm-a").spans
    assert span.lane == "vm-a chip 2"


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"spans": 5},
        {"spans": [7]},
        {"spans": [{}]},
        {"spans": [row(end_ns=0)]},
        {"spans": [row(queue="third")]},
        {"spans": [row(start_ns=-1)]},
        {"spans": [row(start_ns="0")]},
        {"spans": [row(start_ns=True)]},
        {"spans": [row(end_ns=2**63)]},
        {"spans": [row(node=-2)]},
        {"spans": [row(label=None)]},
        {"spans": [], "dropped": -1},
        [],
    ],
)
def test_what_is_no_trace_is_refused(document: Any) -> None:
    with pytest.raises(DataError) as caught:
        read(document)
    assert caught.value.code == "trace-invalid"


def test_a_guests_text_is_made_printable_and_short() -> None:
    (span,) = read({"spans": [row(label="a\n\x1b[31m" + "x" * 200, name="")]}).spans
    assert span.label.startswith("a??[31mx")
    assert len(span.label) == 80
    assert read({"spans": [row(label="")]}).spans[0].label == "unnamed"


# --- Chrome's format -----------------------------------------------------------------------------


def test_a_chrome_trace_names_lanes_and_counts_microseconds() -> None:
    told = read(
        {"spans": [row(), row(chip=1, queue="transfer", start_ns=1_200_500, end_ns=1_201_000,
                              node=3, name="", cycles=0)]}
    ).spans  # fmt: skip
    document = json.loads(json.dumps(chrome(told, dropped=2)))
    assert document["otherData"] == {"start_ns": 1_000_000, "dropped": 2}
    events = document["traceEvents"]
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"
    }
    assert names == {
        ("process_name", 1, 0): "chip 0", ("thread_name", 1, 1): "compute",
        ("process_name", 2, 0): "chip 1", ("thread_name", 2, 2): "transfer",
        ("process_name", 3, 0): "model clock, python3",
        ("thread_name", 3, 3): "chip 0 compute",
    }  # fmt: skip
    first, second, model = (e for e in events if e["ph"] == "X")
    assert (first["ts"], first["dur"], first["pid"], first["tid"]) == (0.0, 500.0, 1, 1)
    assert (second["ts"], second["dur"], second["args"]["node"]) == (200.5, 0.5, 3)
    assert (model["ts"], model["dur"]) == (90.0, 400.0)


def test_nothing_is_a_trace_too() -> None:
    assert chrome([])["traceEvents"] == []
    assert ElementTree.fromstring(svg([])).tag == f"{SVG}svg"
    assert png([])[:4] == b"\x89PNG"


# --- pictures ------------------------------------------------------------------------------------


def boxes(drawing: Drawing) -> list[Box]:
    """The spans' boxes: those that say what they are."""
    return [item for item in drawing.items if isinstance(item, Box) and item.title]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 60), st.integers(400, 3000))
def test_no_box_lies_on_another_and_all_are_within(
    seed: int, chips: int, count: int, width: int
) -> None:
    drawing = draw(busy(chips, count, seed), "title", width=width)
    rows: dict[float, list[Box]] = {}
    for box in boxes(drawing):
        assert 0 <= box.x <= box.x + box.width <= width
        assert 0 <= box.y <= box.y + box.height <= drawing.height
        rows.setdefault(box.y, []).append(box)
    assert len(rows) == 2 * chips
    for mine in rows.values():
        for a, b in pairwise(sorted(mine, key=lambda b: b.x)):
            # what is shorter than a pixel is drawn half a pixel wide all the same
            assert b.x - (a.x + a.width) > -0.51
    for a, b in pairwise(sorted(rows)):
        assert b - a >= max(box.height for box in rows[a])


def test_spans_that_overlap_in_time_get_rows_of_their_own() -> None:
    spans = [Span("chip 0", "compute", "a", 0, 100), Span("chip 0", "compute", "b", 50, 150)]
    first, second = boxes(draw(spans))
    assert second.y >= first.y + first.height


def extent(text: Text) -> tuple[float, float]:
    width = len(text.text) * CHARACTER
    start = text.x - {"start": 0, "middle": width / 2, "end": width}[text.anchor]
    return start, start + width


@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize("scale", [1, 37, 10**4, 10**7])
def test_no_text_lies_on_another(scale: int, model: bool) -> None:
    spans = [
        Span(f"a function of some name chip {n}", "transfer", "p" * n, at * scale, (at + 5) * scale)
        for n, at in enumerate(range(0, 210, 7))
    ]
    for width in (400, 600, 1200):
        lines: dict[float, list[tuple[float, float]]] = {}
        for item in draw(spans, "x" * 40, width=width, model=model).items:
            if isinstance(item, Text):
                lines.setdefault(item.y, []).append(extent(item))
        for mine in lines.values():
            for a, b in pairwise(sorted(mine)):
                assert a[1] <= b[0] + 0.01


@given(st.integers(1, 10**13), st.booleans())
def test_ticks_are_told_apart_and_say_where_they_are(whole: int, model: bool) -> None:
    drawing = draw([Span("chip 0", "compute", "a", 7, 7 + whole)], model=model)
    base = max(t.y for t in drawing.items if isinstance(t, Text))
    ticks = [t for t in drawing.items if isinstance(t, Text) and t.y == base]
    texts = [t.text for t in ticks]
    (box,) = boxes(drawing)
    if not model or whole > 10**6:
        assert len(set(texts)) == len(texts)
    assert 1 < len(ticks) <= 13 or whole < 13
    units = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
    for tick in ticks:
        number, unit = (tick.text.replace(",", ""), "us") if model else tick.text.split()
        at = float(number) * units[unit] / whole * (box.width + 0.5)
        if not model or whole > 10**6:
            assert abs(box.x + at - tick.x) < 1


def test_labels_lie_within_their_boxes() -> None:
    drawing = draw(busy(2, 12))
    labels = [t for t in drawing.items if isinstance(t, Text) and t.text.startswith("program")]
    inside = 0
    for text in labels:
        start, end = extent(text)
        holders = [b for b in boxes(drawing) if b.y < text.y < b.y + b.height]
        inside += any(b.x <= start and end <= b.x + b.width for b in holders)
    legend = 5
    assert inside == len(labels) - legend


def test_colours_stand_for_labels_and_the_least_share_one() -> None:
    drawing = draw(busy(2, 200, labels=30), width=8000)
    by_label: dict[str, set[str]] = {}
    for box in boxes(drawing):
        by_label.setdefault(box.title.split(":")[0], set()).add(box.fill)
    assert len(by_label) == 30
    assert all(len(fills) == 1 for fills in by_label.values())
    assert len({fill for fills in by_label.values() for fill in fills}) == 11
    assert any(isinstance(t, Text) and t.text == "20 others" for t in drawing.items)


def test_chips_come_in_the_order_of_their_numbers() -> None:
    spans = [Span(f"chip {n}", "compute", "a", 0, 10) for n in (10, 2, 1)]
    names = [t for t in draw(spans).items if isinstance(t, Text) and t.text.startswith("chip")]
    assert [t.text for t in sorted(names, key=lambda t: t.y)] == ["chip 1", "chip 2", "chip 10"]


def test_an_svg_is_xml_whatever_the_text() -> None:
    span = Span("<&\"'>", "compute", "]]><b>\u00e9\x00", 0, 10**6, client="\x01\ud800")
    root = ElementTree.fromstring(svg([span], "a<b"))
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert "a<b" in texts
    assert "<&\"'>" in texts
    assert "]]><b>??" in texts


def test_a_width_out_of_range_is_refused() -> None:
    for width in (399, 8001):
        with pytest.raises(UsageError):
            svg([], width=width)


def test_a_picture_of_thousands_of_spans_stays_small() -> None:
    assert len(svg(busy(8, 2000, labels=2))) < 4_000_000


# --- PNG -----------------------------------------------------------------------------------------


def decoded(data: bytes) -> np.ndarray:
    """A PNG of 8-bit RGB without filters, as (height, width, 3)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (crc,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert crc == zlib.crc32(kind + body)
        parts[kind] = body
        at += 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    assert (depth, colour) == (8, 2)
    raw = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not raw[:, 0].any()
    return raw[:, 1:].reshape(height, width, 3)


def test_a_png_shows_the_boxes_where_the_svg_has_them() -> None:
    spans = busy(2, 5)
    drawing = draw(spans)
    image = decoded(png(spans))
    assert image.shape == (2 * drawing.height, 2 * drawing.width, 3)
    checked = 0
    for box in boxes(drawing):
        if box.width > 2:
            corner = image[round(2 * box.y) + 1, round(2 * box.x) + 1]
            assert tuple(corner) == tuple(bytes.fromhex(box.fill[1:]))
            checked += 1
    assert checked > 5


def test_letters_are_where_they_should_be() -> None:
    items = [Text(10, 20, "L", "#ff0000"), Text(40, 20, "L", "#ff0000", "end")]
    image = decoded(to_png(Drawing(50, 30, items)))
    red = (image == (255, 0, 0)).all(axis=2)
    rows, columns = np.flatnonzero(red.any(axis=1)), np.flatnonzero(red.any(axis=0))
    assert (rows[0], rows[-1]) == (2 * 13, 2 * 20 - 1)  # seven dots above the base line
    assert red[26:40, 20:22].all()  # the upright of the first
    assert red[38:40, 20:30].all()  # its foot
    assert columns[-1] == 2 * (40 - 1) - 1  # the other ends a dot before its anchor
