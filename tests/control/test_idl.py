from __future__ import annotations

from typing import Any

import pytest

from accelvisor.control import admin, idl
from accelvisor.control.dispatch import varlink_interface

TEXT = """# What it is about
interface org.example.test

# A pair.
type Pair (one: int, two: ?string)
type Colour (red, green)

# Does it.
# In two lines.
method Do(pair: Pair, colours: []Colour, map: [string]float, any: object, flag: bool) -> (
  nested: ?[](x: int)   # a comment
)

method Nothing() -> ()
error Broken (why: string)
"""

GOOD: dict[str, Any] = {
    "pair": {"one": 1},
    "colours": ["red"],
    "map": {"a": 1.5, "b": 2},
    "any": {"x": [1]},
    "flag": True,
}


def test_what_is_parsed() -> None:
    found = idl.parse(TEXT)
    assert found.name == "org.example.test"
    assert found.doc == "What it is about"
    assert found.methods["Do"].doc == "Does it.\nIn two lines."
    assert list(found.methods) == ["Do", "Nothing"]
    assert found.types["Colour"] == idl.Type("enum", values=["red", "green"])
    assert found.text == TEXT


def test_values_that_fit() -> None:
    found = idl.parse(TEXT)
    found.check_call("Do", GOOD)
    found.check_call("Do", {**GOOD, "pair": {"one": 1, "two": None}})
    found.check_reply("Do", {"nested": [{"x": 1}]})
    found.check_reply("Do", {})
    found.check_error("Broken", {"why": "so"})


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"pair": {}}, "pair.one"),
        ({"pair": {"one": "1"}}, "pair.one"),
        ({"pair": {"one": True}}, "pair.one"),
        ({"pair": {"one": 2**63}}, "pair.one"),
        ({"pair": {"one": 1.0}}, "pair.one"),
        ({"pair": {"one": 1, "three": 3}}, "pair.three"),
        ({"pair": []}, "pair"),
        ({"colours": "red"}, "colours"),
        ({"colours": ["red", "blue"]}, "colours[1]"),
        ({"map": {"a": "x"}}, "map.a"),
        ({"map": {"a": float("inf")}}, "map.a"),
        ({"map": []}, "map"),
        ({"any": 3}, "any"),
        ({"flag": 1}, "flag"),
        ({"flag": None}, "flag"),
        ({"more": 1}, "more"),
    ],
)
def test_values_that_do_not_fit_are_named(change: dict[str, Any], parameter: str) -> None:
    with pytest.raises(idl.MismatchError) as caught:
        idl.parse(TEXT).check_call("Do", {**GOOD, **change})
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("interface x", 1),
        ("interface a.b\nmethod do() -> ()", 2),
        ("interface a.b\nmethod Do() ()", 2),
        ("interface a.b\nmethod Do(x: int -> ()", 2),
        ("interface a.b\nmethod Do(x, y) -> ()", 2),
        ("interface a.b\nmethod Do(x: int, y) -> ()", 2),
        ("interface a.b\nmethod Do(x: int, x: int) -> ()", 2),
        ("interface a.b\nmethod Do(x: ??int) -> ()", 2),
        ("interface a.b\ntype A (x: int)\ntype A (y: int)", 3),
        ("interface a.b\nthing A ()", 2),
        ("interface a.b\n\n\n$", 4),
    ],
)
def test_what_is_no_definition(text: str, line: int) -> None:
    with pytest.raises(idl.DefinitionError) as caught:
        idl.parse(text)
    assert caught.value.where == f"line {line}"


def test_an_unknown_type_is_found_at_once() -> None:
    with pytest.raises(idl.DefinitionError, match='"B" is not defined'):
        idl.parse("interface a.b\nmethod Do(x: ?[]B) -> ()")


def test_an_undeclared_error_is_found() -> None:
    with pytest.raises(idl.MismatchError):
        idl.parse(TEXT).check_error("Other", {})


def test_our_interfaces_are_documented() -> None:
    """Each method says its level and what it does, since the definition is the documentation."""
    found = admin.interface()
    assert found.name == admin.INTERFACE
    for name, method in found.methods.items():
        assert method.doc.startswith(admin.LEVELS[name].name.lower()), name
    assert set(admin.LEVELS) == set(found.methods)
    assert set(admin.ERRORS) == set(found.errors)
    assert list(varlink_interface().methods) == ["GetInfo", "GetInterfaceDescription"]


def test_the_error_tree_has_a_wire_name_for_every_class() -> None:
    """A17: errors cannot be told apart. The name on the wire is that of the nearest class."""
    from accelvisor import errors

    def below(kind: type[errors.AccelvisorError]) -> set[type[errors.AccelvisorError]]:
        return {kind}.union(*(below(inner) for inner in kind.__subclasses__()))

    for kind in below(errors.AccelvisorError):
        if kind.__module__ != "accelvisor.errors":
            continue
        name = admin.error_name(kind.__new__(kind)).rsplit(".", 1)[1]
        assert issubclass(kind, admin.ERRORS[name]) or name == "System"
