"""What accelctl topology, card chip and trace show: read back from the text, not compared with a
copy of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.cli import topology_picture, topology_text, trace
from accelvisor.daemon.card_config import CardConfig, ProfileConfig, Size
from accelvisor.errors import UsageError
from accelvisor.isolation.resources import Card
from accelvisor.limits import MIB
from accelvisor.timeline import read
from tests.cli.test_commands import Ctl, ctl, scenario  # noqa: F401
from tests.daemon.harness import Harness

#: A box of a chip: its number, and the letters of its functions.
BOX = re.compile(r"│ *(\d+) ([A-Z,+]*) *│")


def card(
    boards: int = 1,
    rows: int = 1,
    columns: int = 4,
    owners: dict[int, str] | None = None,
    state: str | None = "up",
    off: frozenset[int] = frozenset(),
) -> dict[str, Any]:
    """A card of the reply to Topology; ``owners``: of links, by number."""
    made = Card("card0", boards * rows * columns, 4, MIB, boards=boards, rows=rows)
    links = []
    for number, (one, other) in enumerate(made.links):
        owner = (owners or {}).get(number)
        kind = made.kind(number).replace("-", "_")
        links.append(
            {
                "link": {"number": number, "one": one, "other": other, "kind": kind},
                "function": owner, "name": owner,
                "state": state if owner else None, "bytes": 1 << 20 if owner else None,
            }
        )  # fmt: skip
    chips = []
    for chip in range(made.chips):
        names = sorted(
            {item["name"] for item in links
             if item["name"] and chip in (item["link"]["one"], item["link"]["other"])}
        )  # fmt: skip
        holders = [{"function": n, "name": n, "cores": [at]} for at, n in enumerate(names)]
        chips.append(
            {
                "chip": chip, "board": made.board(chip), "row": 0, "column": chip % columns,
                "mode": "disabled" if chip in off else "enabled",
                "cores": 4, "cores_free": 4 - len(names), "holders": holders,
            }
        )  # fmt: skip
    return {
        "card": "card0", "boards": boards, "rows": rows, "columns": columns,
        "chips": chips, "links": links,
    }  # fmt: skip


GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12))


@given(GRIDS, st.data())
def test_every_chip_and_every_link_is_drawn_once_or_at_both_its_ends(grid, data) -> None:
    made = card(*grid)
    count = len(made["links"])
    owners = data.draw(st.dictionaries(st.integers(0, max(0, count - 1)), st.just("nn0")))
    owners = {number: name for number, name in owners.items() if number < count}
    made = card(*grid, owners=owners)
    text = topology_text.draw(made)
    drawing = text.split("FUNCTION")[0].split("no function")[0]
    boxes = BOX.findall(drawing)
    assert [int(number) for number, _ in boxes] == list(range(len(made["chips"])))
    assert {int(n) for n, letters in boxes if letters} == {
        end for number in owners for end in Card("c", len(boxes), 4, MIB, boards=grid[0],
                                                 rows=grid[1]).links[number]
    }  # fmt: skip
    wide = grid[2]
    marks = drawing.count("═A═") + len(re.findall("║A", drawing))
    expected = 0
    for number in owners:
        one, other = sorted(
            (made["links"][number]["link"]["one"], made["links"][number]["link"]["other"])
        )
        beside = one // wide == other // wide
        # What closes a ring is seen at both its ends, as is what goes on in a further piece.
        ends = other - one != 1 if beside else other - one != wide
        expected += 2 if ends or (beside and one % wide == 7) else 1
    assert marks == expected
    assert all(len(line) <= 120 for line in drawing.splitlines())


def test_links_that_are_not_up_and_chips_that_are_off_look_so() -> None:
    text = topology_text.draw(card(owners={0: "nn0"}, state="training", off=frozenset({3})))
    assert "╌╌A╌╌" in text
    assert "═A═" not in text.split("FUNCTION")[0]
    assert "off" in text
    assert text.count("  ·  ") >= 2
    assert "training" in text
    assert "1 of 4 links free" in text


def test_more_functions_than_fit_into_a_box_are_told_below() -> None:
    made = card(columns=2)
    made["chips"][0]["holders"] = [
        {"function": str(n), "name": f"nn{n}", "cores": [n]} for n in range(30)
    ]
    text = topology_text.draw(made)
    assert "A,+" in text
    assert re.search(r"^AD +nn29 ", text, re.MULTILINE)


@given(GRIDS)
def test_a_picture_is_well_formed_and_has_every_chip_and_link(grid) -> None:
    made = card(*grid, owners={0: '<nn"&0>'} if grid[2] > 1 else {}, off=frozenset({0}))
    root = ElementTree.fromstring(topology_picture.svg([made, card()]))
    name = "{http://www.w3.org/2000/svg}"
    titles = [found.text or "" for found in root.iter(f"{name}title")]
    assert sum(title.startswith("link ") for title in titles) == len(made["links"]) + 4
    assert sum(title.startswith("chip ") for title in titles) == len(made["chips"]) + 4
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter(f"{name}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert 0 <= x <= x + float(box.get("width", 0)) <= width
        assert 0 <= y <= y + float(box.get("height", 0)) <= height
    for text in root.iter(f"{name}text"):
        assert 0 <= float(text.get("y", 0)) <= height


# --- against a daemon -----------------------------------------------------------------------------


def configure(harness: Harness) -> None:
    profile = ProfileConfig(cores=16, chips=4, memory=Size(MIB))
    harness.config = msgspec.structs.replace(
        harness.config,
        cards={"card0": CardConfig(rows=2, columns=4), "other": CardConfig(chips=3)},
        profiles={"ring": profile},
    )


def test_cards_are_drawn_and_chips_switched(
    harness: Harness, ctl: Ctl, tmp_path: Path  # noqa: F811
) -> None:
    configure(harness)

    async def body() -> None:
        code, out, _ = await ctl("card", "chip", "card0", "7", "pass-through")
        assert code == 0
        assert "chip 7: pass-through" in out
        assert "8 with 4 cores each, in 2 rows of 4" in out
        await ctl("function", "create", "ring", "--name", "nn0")
        code, out, err = await ctl("card", "chip", "card0", "0", "disable")
        assert (code, "[chip-in-use]" in err) == (1, True)
        code, out, _ = await ctl("topology")
        assert code == 0
        assert "card card0: 2 x 4 chips, 8 of 12 links free" in out
        assert "card other: 1 x 3 chips, 3 of 3 links free" in out
        assert "passes" in out
        code, out, _ = await ctl("topology", "card0", "--json")
        assert json.loads(out) == await harness.call("Topology", card="card0")
        picture = tmp_path / "cards.svg"
        assert (await ctl("topology", "--svg", str(picture)))[:2] == (0, "")
        assert ">nn0, 4 links<" in picture.read_text()
        code, _, err = await ctl("topology", "--svg", "/nowhere/x.svg")
        assert (code, "cannot write /nowhere/x.svg" in err) == (2, True)
        _, out, _ = await ctl("function", "show", "nn0")
        assert "links:     0-3" in out

    scenario(harness, body)


SPANS: list[dict[str, Any]] = [
    {
        "context": 1, "name": "train", "chip": chip, "queue": queue, "label": label, "command": 7,
        "node": node, "start_ns": start, "end_ns": end, "cycles": end - start, "cycle_start": 0,
    }
    for node, (chip, queue, label, start, end) in enumerate(
        [
            (0, "compute", "gemm", 1_000_000, 3_000_000),
            (0, "compute", "relu", 2_000_000, 4_000_000),
            (0, "transfer", "send", 4_000_000, 5_000_000),
            (10, "compute", "gemm", 1_000_000, 11_000_000),
            (2, "compute", "gemm", 6_000_000, 7_000_000),
        ]
    )
]  # fmt: skip


def test_a_trace_as_table_chrome_trace_and_pictures(
    harness: Harness, ctl: Ctl, tmp_path: Path  # noqa: F811
) -> None:
    async def body() -> None:
        made = await harness.create("nn0")
        code, _, err = await ctl("trace", "nn0")
        assert (code, "[unknown-method]" in err) == (1, True)
        said = {"clock": "monotonic", "spans": SPANS, "dropped": 2}
        harness.paths.function(made["uuid"]).spec.with_suffix(".trace").write_text(json.dumps(said))
        code, out, _ = await ctl("trace", "nn0")
        rows = [line.split() for line in out.splitlines()]
        assert rows[1][:6] == ["0", "compute", "2", "3", "ms", "30"]
        assert [row[:2] for row in rows[1:5]] == [
            ["0", "compute"], ["0", "transfer"], ["2", "compute"], ["10", "compute"],
        ]  # fmt: skip
        assert out.splitlines()[-1] == "5 spans over 10 ms, 2 older ones are gone"
        code, out, _ = await ctl("trace", "nn0", "--json")
        assert json.loads(out) == {"trace": said}
        files = [str(tmp_path / name) for name in ("t.json", "t.svg", "t.png")]
        words = ("--json", files[0], "--svg", files[1], "--png", files[2])
        assert (await ctl("trace", "nn0", *words))[:2] == (0, "")
        events = json.loads(Path(files[0]).read_text())["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) >= len(SPANS)
        assert ElementTree.parse(files[1]).getroot().tag.endswith("svg")
        assert Path(files[2]).read_bytes().startswith(b"\x89PNG")

    scenario(harness, body)


def test_nothing_ran() -> None:
    assert "nothing ran" in trace.table(read({"spans": [], "dropped": 0}))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), max_size=8))
def test_busy_time_counts_each_moment_once(pairs) -> None:
    spans = read(
        {"spans": [{**SPANS[0], "start_ns": a, "end_ns": a + n} for a, n in pairs]}
    ).spans
    moments = {at for a, n in pairs for at in range(a, a + n)}
    assert trace.covered(spans) == len(moments)


def test_a_file_that_cannot_be_written_is_the_callers_mistake() -> None:
    from accelvisor.cli import files

    with pytest.raises(UsageError, match="cannot write"):
        files.write("/nowhere/x", b"")
