from __future__ import annotations

import pytest

from accelvisor.cli import render


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (4 << 30, "4 GiB"),
        ((4 << 30) - (448 << 20), "3.6 GiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert render.size(count) == text


def test_columns_are_aligned_and_numbers_to_the_right() -> None:
    rows = [{"NAME": "a", "CORES": "1", "VM": "-"}, {"NAME": "longer", "CORES": "16", "VM": "x"}]
    assert render.table(rows, "none").splitlines() == [
        "NAME    CORES  VM",
        "a           1  -",
        "longer     16  x",
    ]
    assert render.table([], "none") == "none"


def test_runs_of_cores() -> None:
    assert render.numbers([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert render.numbers([]) == ""


def test_a_tree_of_anything() -> None:
    value = {"a": 1, "b": {"c": [1, 2], "d": {}}, "e": []}
    assert render.tree(value) == "a: 1\nb:\n  c: 1, 2\n  d: {}\ne: -"


def test_lines_have_no_trailing_blanks() -> None:
    assert render.fields([("a", ""), ("longer", "x")]) == "a:\nlonger: x"


def test_further_lines_of_a_value_stay_in_its_column() -> None:
    assert render.fields([("ab", "x\ny"), ("c", "z")]) == "ab: x\n    y\nc:  z"
