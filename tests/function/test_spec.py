"""spec.json: what is refused, and that the refusal names the field."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from accelvisor.errors import ConfigError
from accelvisor.function.spare import obtain
from accelvisor.function.spec import parse
from tests.function.harness import make_spec


def fields(tmp_path: Path) -> dict[str, Any]:
    return asdict(make_spec(tmp_path))


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    path = tmp_path / "spec.json"
    path.write_text(spec.to_json())
    assert obtain(str(path)) == spec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uuid", "not-a-uuid"),
        ("uuid", "A8B1C5F0-0000-4000-8000-000000000000"),
        ("cores", 0),
        ("cores", True),
        ("cores", "2"),
        ("memory_bytes", 5000),
        ("memory_bytes", -4096),
        ("queues", 65),
        ("ring_entries", 48),
        ("window_bytes", 4096),
        ("window_bytes", 3 << 20),
        ("vfio_socket", "relative.sock"),
        ("holder_socket", "/" + "x" * 107),
        ("control_socket", "/tmp/a\0b"),
        ("socket_group", 7),
        ("peer", None),
        ("peer", "libvirt-"),
        ("peer", "../libvirt-0b36e1ad-94f1-4e5c-8a5e-0e5a6a7f1a01"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**fields(tmp_path), field: value})
    assert field in caught.value.message
    assert caught.value.code == "spec-invalid"
    assert caught.value.hint


def test_missing_and_unknown_fields_are_named(tmp_path: Path) -> None:
    some = fields(tmp_path)
    del some["cores"]
    with pytest.raises(ConfigError, match="cores"):
        parse(some)
    with pytest.raises(ConfigError, match="colour"):
        parse({**fields(tmp_path), "colour": "red"})


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, "x" * 70_000])
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        obtain(str(path))
    assert str(path) in caught.value.where


def test_a_missing_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        obtain(str(tmp_path / "none.json"))


@pytest.mark.parametrize("field", ["socket_group", "peer"])
def test_what_not_every_function_has_may_be_left_out(tmp_path: Path, field: str) -> None:
    some = fields(tmp_path)
    del some[field]
    assert getattr(parse(json.loads(json.dumps(some))), field) == ""


def with_fabric(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    """Two chips of two boards, and the cable between them."""
    fabric = {"chips": [[0, 3, 1], [1, 4, 1]], "links": [[9, 0, 1, "inter-card"]]}
    return {**fields(tmp_path), "chips": 2, "fabric": {**fabric, **changed}}


def test_chips_and_links_are_told_in_the_functions_own_numbers(tmp_path: Path) -> None:
    spec = parse(with_fabric(tmp_path))
    assert [(chip.board, chip.number, chip.cores) for chip in spec.fabric.chips] == [
        (0, 3, 1), (1, 4, 1),
    ]  # fmt: skip
    (link,) = spec.fabric.links
    assert (link.number, link.one, link.other, link.kind) == (9, 0, 1, "inter-card")
    assert parse(json.loads(spec.to_json())) == spec


def test_a_specification_that_does_not_say_has_chips_without_links(tmp_path: Path) -> None:
    old = {name: value for name, value in fields(tmp_path).items() if name != "fabric"}
    fabric = parse({**old, "cores": 5, "chips": 2}).fabric
    assert [(chip.number, chip.cores) for chip in fabric.chips] == [(0, 3), (1, 2)]
    assert fabric.links == ()
    revoked = {**old, "cores": 0, "memory_bytes": 0, "chips": 2, "segments": []}
    assert [chip.cores for chip in parse(revoked).fabric.chips] == [0, 0]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"chips": [[0, 0, 2]]}, "are not the function's"),
        ({"chips": [[0, 0, 2], [0, 1, 1]]}, "are not the function's"),
        ({"chips": [[0, 3, 1], [1, 3, 1]]}, "a chip is there twice"),
        ({"chips": [[0, 3, 2], [1, 4, -0.0]]}, "is not [int, int, int]"),
        ({"chips": [[-1, 3, 1], [1, 4, 1]]}, "out of range"),
        ({"chips": 7}, "are lists"),
        ({"links": [[9, 0, 1, "optical"]]}, "kind 'optical'"),
        ({"links": [[-1, 0, 1, "inter-chip"]]}, "impossible number"),
        ({"links": [[9, 0, 2, "inter-chip"]]}, "joins 0 and 2"),
        ({"links": [[9, 1, 1, "inter-chip"]]}, "joins 1 and 1"),
        ({"links": [[9, 0, 1, "inter-chip"], [9, 1, 0, "inter-chip"]]}, "a link is there twice"),
        ({"links": [[9, True, 1, "inter-chip"]]}, "is not [int"),
        ({"links": [[n, 0, 1, "inter-chip"] for n in range(300)]}, "at most 256"),
        ({"rings": []}, "an object of chips and links"),
    ],
)
def test_a_wrong_fabric_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(with_fabric(tmp_path, **changed))
    assert "'fabric'" in caught.value.message
    assert words in caught.value.message
