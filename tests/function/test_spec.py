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
