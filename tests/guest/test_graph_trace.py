"""Links, and ``accelguest trace``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from accelvisor.errors import ProtocolError, UsageError
from accelvisor.guest import cli, links
from accelvisor.guest.errors import CommandRefused
from accelvisor.guest.function import Function

from .graph_device import GraphDevice


@pytest.fixture
def device() -> GraphDevice:
    return GraphDevice(real_kernels=True, window_bytes=1 << 20, entries=64)


@pytest.fixture
def fn(
    device: GraphDevice, open_function: Callable[..., Function], monkeypatch: pytest.MonkeyPatch
) -> Function:
    """A function that ``accelguest`` opens as well."""
    monkeypatch.setattr(
        Function, "open", lambda *_, **options: open_function(device, name=options.get("name"))
    )
    return open_function(device)


def test_links_are_told_and_switched(fn: Function) -> None:
    assert [(k.number, k.ends, k.state) for k in links.links(fn)] == [
        (0, (0, 1), "up"), (1, (1, 2), "up"), (2, (2, 3), "up"), (3, (3, 0), "up"),
    ]  # fmt: skip
    links.switch(fn, False, 2)
    assert [k.state for k in links.links(fn)] == ["up", "up", "down", "up"]
    links.switch(fn, True)
    assert {k.state for k in links.links(fn)} == {"up"}
    with pytest.raises(CommandRefused):
        links.switch(fn, True, 4)
    with pytest.raises(UsageError):
        links.switch(fn, True, -1)


def test_an_answer_about_links_that_is_none_is_refused(
    fn: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ({}, {"links": [{}]}, {"links": [{"link": 0, "ends": [1]}]}, {"links": 3}):
        monkeypatch.setattr(fn, "fabric", lambda wrong=wrong: wrong)
        with pytest.raises(ProtocolError):
            links.links(fn)


def grid(rows: int, columns: int) -> list[dict[str, Any]]:
    chips = range(rows * columns)
    pairs = [(n, n + 1) for n in chips if (n + 1) % columns]
    pairs += [(n, n + columns) for n in chips if n + columns in chips]
    return [
        {"link": n, "ends": ends, "kind": "inter-chip", "state": "up", "bytes": 0, "transfers": 0}
        for n, ends in enumerate(pairs)
    ]


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 2), (4, 4), (3, 3), (1, 4), (3, 4)])
def test_a_ring_is_a_simple_cycle_where_there_is_one(
    rows: int, columns: int, fn: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = grid(rows, columns)
    monkeypatch.setattr(fn, "fabric", lambda: {"links": told})
    found = links.ring(fn, range(rows * columns))
    # A grid has one exactly when a side is even and none is 1, but for two chips.
    possible = rows * columns == 2 or (min(rows, columns) > 1 and rows * columns % 2 == 0)
    assert (found is not None) == possible
    if found is not None:
        assert sorted(found) == list(range(rows * columns))
        ends = {frozenset(row["ends"]) for row in told}
        assert all(
            frozenset((a, b)) in ends
            for a, b in zip(found, [*found[1:], found[0]], strict=True)
        )


def test_a_ring_of_one_chip_and_of_none(fn: Function) -> None:
    assert links.ring(fn, [3]) == [3]
    assert links.ring(fn, []) is None


@pytest.mark.parametrize("what", ["demo", "train"])
def test_a_trace_of_a_run_in_three_forms(
    what: str, fn: Function, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {form: tmp_path / f"a.{form}" for form in ("json", "svg", "png")}
    options = [word for form, path in names.items() for word in (f"--{form}", str(path))]
    assert cli.main(["trace", "--run", what, *options]) == 0
    out = capsys.readouterr().out
    for chip in range(4):
        assert f"chip {chip} compute" in out
        assert f"chip {chip} transfer" in out
    events = json.loads(names["json"].read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} >= {"chip 0"}
    assert ElementTree.parse(names["svg"]).getroot().tag.endswith("svg")
    assert names["png"].read_bytes()[:4] == b"\x89PNG"


def test_without_a_file_the_devices_own_spans_are_printed(
    fn: Function, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clock"] == "monotonic"
    assert len(told["spans"]) > 20


def test_links_that_are_all_down_are_brought_up(fn: Function, device: GraphDevice) -> None:
    links.switch(fn, False)
    assert cli.main(["trace"]) == 0
    assert {s["chip"] for s in device.spans} == {0, 1, 2, 3}


def test_a_function_of_one_chip_copies(
    open_function: Callable[..., Function], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    device = GraphDevice(real_kernels=True, window_bytes=1 << 20, entries=64, chips=1)
    monkeypatch.setattr(Function, "open", lambda *_, **__: open_function(device))
    assert cli.main(["trace"]) == 0
    assert "chip 0 transfer" in capsys.readouterr().out
    assert cli.main(["trace", "--run", "train"]) == 0


def test_a_file_that_cannot_be_written_is_an_error_for_people(
    fn: Function, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", "--svg", str(tmp_path / "no" / "a.svg")]) == cli.EXIT_USAGE
    assert "accelguest: cannot write" in capsys.readouterr().err
