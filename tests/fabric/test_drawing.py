"""Pictures: one by heart, and what has to be so of all of them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.errors import UsageError
from accelvisor.fabric.drawing import svg, terminal
from accelvisor.fabric.fabric import NOBODY, Fabric
from accelvisor.fabric.grid import Grid
from accelvisor.fabric.links import TRAINING_CYCLES, LinkState
from accelvisor.fabric.terminal import letter
from accelvisor.fabric.view import CardView, ChipView, LinkView, View, amount, card_view

GOLDEN = """\
card a0: 2 boards of 1 x 4 chips, 4 of 12 links up
board 0
   ┌──────┐    ┌──────┐    ┌──────┐    ┌──────┐
───│  0 A │═A══│  1 A │────│  2 B │╌B╌╌│  3 B │───
   │ 4/8  │    │ 4/8  │    │ 8/8  │    │passes│
   └──────┘    └──────┘    └──────┘    └──────┘
       ║A          ║A          ┆B          xB
board 1
   ┌──────┐    ┌──────┐    ┌──────┐    ┌──────┐
───│  4 A │─A──│  5 A │────│  6 B │═B══│  7 B │───
   │ 4/8  │    │ 4/8  │    │ 8/8  │    │ 8/8  │
   └──────┘    └──────┘    └──────┘    └──────┘

A  anna: 4 chips, 3 of 4 links up, 200 bytes
B  ben: 4 chips, 1 of 4 links up, 256 bytes

links: ═ ║ up, ┄ ┆ training, ╌ ╎ draining, x error, ─ │ down; A: whose it is;
what leaves at an edge comes in at the other; between boards they are cables"""


def busy() -> CardView:
    fabric = Fabric(Grid(2, 1, 4), ["anna", "anna", "ben", "ben"] * 2)
    for number, by in ((0, "anna"), (8, "anna"), (9, "anna"), (2, "ben"), (6, "ben")):
        fabric.activate(number, by, 0)
    fabric.advance(TRAINING_CYCLES)
    fabric.activate(10, "ben", TRAINING_CYCLES)
    fabric.link(0).send(200)
    fabric.link(2).send(256)
    fabric.deactivate(2, "ben", TRAINING_CYCLES)
    fabric.fail(11)
    fabric.pass_through(3)
    return card_view("a0", fabric, [4, 4, 8, 8] * 2, 8)


def test_a_card_in_characters() -> None:
    assert terminal(View([busy()])) == GOLDEN


def test_a_card_with_long_rows_is_a_table() -> None:
    text = terminal(View([card_view("big", Fabric(Grid(1, 2, 9)))]))
    assert "┌" not in text
    lines = text.splitlines()
    assert lines[2].split() == ["chip", "board", "row", "column", "state", "owner", "cores"]
    assert lines[-1].split() == ["26", "8-17", "inter-chip", "down", "-", "0"]


OWNERS = st.sampled_from([NOBODY, "anna", "<b>&'\"", "x" * 64, "job 7"])


@st.composite
def cards(draw: st.DrawFn) -> CardView:
    grid = Grid(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9)))
    states = st.sampled_from(LinkState)
    sizes = st.sampled_from([0, 1, 999, 1023 * 1024, 10**12, (1 << 64) - 1])
    fabric = Fabric(grid, [draw(OWNERS) for _ in range(grid.chips)])
    chips = []
    for chip in range(grid.chips):
        total = draw(st.sampled_from([0, 8, 256]))
        mode = draw(st.sampled_from([fabric.enable, fabric.disable, fabric.pass_through]))
        mode(chip)
        chips.append(ChipView(fabric.chip(chip), fabric.owner(chip), total // 2, total))
    links = [LinkView(draw(states), draw(OWNERS), draw(sizes)) for _ in grid.links]
    return CardView(draw(st.sampled_from(["a0", "c" * 64])), grid, chips, links)


@settings(max_examples=60, deadline=None)
@given(st.lists(cards(), max_size=2))
def test_characters_fit_a_terminal(drawn: list[CardView]) -> None:
    for line in terminal(View(drawn)).splitlines():
        assert len(line) <= 100
        assert line == line.rstrip()


Box = tuple[float, float, float, float, str]


def boxes(picture: ET.Element) -> list[Box]:
    """Where texts are; a character is at most 0.65 of the font's size wide on average."""
    found: list[Box] = []
    for item in picture.iter("{http://www.w3.org/2000/svg}text"):
        words, size = item.text or "", float(item.get("font-size", "0"))
        x, y = float(item.get("x", "0")), float(item.get("y", "0"))
        wide = len(words) * size * (0.72 if item.get("font-weight") else 0.65)
        x -= {"middle": wide / 2, "end": wide}.get(item.get("text-anchor", ""), 0.0)
        found.append((x, y - 0.8 * size, x + wide, y + 0.2 * size, words))
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(cards(), max_size=2))
def test_no_label_of_a_picture_lies_on_another(drawn: list[CardView]) -> None:
    picture = ET.fromstring(svg(View(drawn)))
    width, height = float(picture.get("width", "0")), float(picture.get("height", "0"))
    every = boxes(picture)
    for left, top, right, bottom, words in every:
        assert left >= 0, words
        assert top >= 0, words
        assert bottom <= height, words
        assert right <= width, words
    for one, other in combinations(every, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)


def test_a_picture_refers_to_nothing_outside() -> None:
    text = svg(View([busy()]))
    assert "href" not in text
    assert text.count("http") == 1  # the name of its language
    assert "stroke-dasharray" in text
    titles = [t.text or "" for t in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}title")]
    assert "link 2: chips 2 and 3, inter-chip, ben, draining, 256 bytes" in titles
    assert "chip 3: pass-through, ben, cores 8/8" in titles


def test_owners_have_letters() -> None:
    names = [f"job-{n}" for n in range(60)]
    grid = Grid(1, 10, 6)
    chips = [ChipView(owner=name) for name in names]
    card = CardView("a", grid, chips, [LinkView()] * len(grid.links))
    assert [letter(card, names[n]) for n in (0, 25, 26, 51, 52)] == ["A", "Z", "AA", "AZ", "BA"]


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0"), (999, "999"), (1000, "1.0K"), (10 * 1024, "10K"), (1023 * 1024, "1.0M"),
     (356_515_840, "340M"), ((1 << 64) - 1, "16E")],
)  # fmt: skip
def test_an_amount_is_short(nbytes: int, words: str) -> None:
    assert amount(nbytes) == words


def test_a_view_that_is_not_of_its_grid() -> None:
    with pytest.raises(UsageError, match="4 chips and 0 links"):
        CardView("a", Grid(1, 1, 3), [ChipView()] * 4, [])
