"""Varlink interface definitions: a parser and a validator (varlink.org, "Interface Definition").

The server checks the parameters of every call against the same text that clients get from
``GetInterfaceDescription``, and the tests check its replies and errors with it too. Sans-IO,
standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelvisor.errors import DataError

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)|(?P<comment>#[^\n]*)|(?P<arrow>->)|(?P<array>\[\])|(?P<map>\[string\])"
    r"|(?P<interface>[A-Za-z](?:-*[A-Za-z0-9])*(?:\.[A-Za-z0-9](?:-*[A-Za-z0-9])*)+)"
    r"|(?P<name>[A-Za-z](?:_?[A-Za-z0-9])*)|(?P<mark>[():,?])"
)
_BASIC = ("bool", "int", "float", "string", "object")
_INT64 = range(-(2**63), 2**63)


class DefinitionError(DataError):
    """The text is no interface definition; ``where`` holds the line."""

    code = "interface-definition"


class MismatchError(DataError):
    """A value does not fit a definition; ``parameter`` is the path of the first that does not."""

    code = "parameter-invalid"

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}" if parameter else message, where="admin")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class Type:
    """One type expression.

    ``kind``: a basic type, ``struct``, ``enum``, ``named``, ``array``, ``map`` or ``maybe``.
    """

    kind: str
    name: str = ""
    element: Type | None = None
    fields: Mapping[str, Type] = field(default_factory=dict)
    values: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    doc: str
    input: Type
    output: Type


@dataclass(frozen=True, slots=True)
class Interface:
    """A parsed definition. ``text`` is the source, as GetInterfaceDescription returns it."""

    name: str
    doc: str
    text: str
    types: Mapping[str, Type]
    methods: Mapping[str, Method]
    errors: Mapping[str, Type]

    def check_call(self, method: str, parameters: Mapping[str, Any]) -> None:
        """Raises MismatchError."""
        self._check(self.methods[method].input, parameters, "")

    def check_reply(self, method: str, parameters: Mapping[str, Any]) -> None:
        """Raises MismatchError."""
        self._check(self.methods[method].output, parameters, "")

    def check_error(self, name: str, parameters: Mapping[str, Any]) -> None:
        """``name`` without the interface's. Raises MismatchError."""
        if name not in self.errors:
            raise MismatchError("", f'error "{name}" is not declared')
        self._check(self.errors[name], parameters, "")

    def _check(self, kind: Type, value: Any, path: str) -> None:
        match kind.kind:
            case "maybe" | "array" | "map":
                self._check_container(kind, value, path)
            case "named":
                self._check(self.types[kind.name], value, path)
            case "struct":
                self._check_struct(kind, value, path)
            case "enum":
                if not isinstance(value, str) or value not in kind.values:
                    raise MismatchError(path, f"expected one of {', '.join(kind.values)}")
            case basic:
                if not _is_basic(basic, value):
                    raise MismatchError(path, f"expected {basic}")

    def _check_container(self, kind: Type, value: Any, path: str) -> None:
        element = kind.element
        if element is None:
            raise MismatchError(path, "a container type without an element")
        if kind.kind == "maybe":
            if value is not None:
                self._check(element, value, path)
        elif kind.kind == "array":
            if not isinstance(value, list):
                raise MismatchError(path, "expected an array")
            for index, item in enumerate(value):
                self._check(element, item, f"{path}[{index}]")
        else:
            if not isinstance(value, dict):
                raise MismatchError(path, "expected an object")
            for key, item in value.items():
                self._check(element, item, f"{path}.{key}")

    def _check_struct(self, kind: Type, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise MismatchError(path, "expected an object")
        for name, wanted in kind.fields.items():
            inner = f"{path}.{name}" if path else name
            if name in value:
                self._check(wanted, value[name], inner)
            elif wanted.kind != "maybe":
                raise MismatchError(inner, "is missing")
        for name in value:
            if name not in kind.fields:
                raise MismatchError(f"{path}.{name}" if path else name, "is not known")


def _is_basic(kind: str, value: Any) -> bool:
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool) and value in _INT64
        case "float":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return number and math.isfinite(value)
        case "string":
            return isinstance(value, str)
        case _:
            return isinstance(value, dict)  # "object": any JSON object


def parse(text: str) -> Interface:
    """Raises DefinitionError."""
    return _Parser(text).interface()


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    line: int
    doc: str


class _Parser:
    """Recursive descent over the grammar of varlink.org. The text is ours, so its nesting is."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = 0

    def interface(self) -> Interface:
        doc = self._peek().doc
        self._expect("interface")
        name = self._take("interface").text
        types: dict[str, Type] = {}
        methods: dict[str, Method] = {}
        errors: dict[str, Type] = {}
        while self._peek().kind != "end":
            keyword = self._take("name")
            member = self._take("name")
            if not member.text[0].isupper():
                raise self._wrong(member, "a name in capitals")
            if member.text in (*types, *methods, *errors):
                raise self._wrong(member, "a name that is not taken yet")
            if keyword.text == "type":
                types[member.text] = self._type()
            elif keyword.text == "error":
                errors[member.text] = self._struct()
            elif keyword.text == "method":
                given = self._struct()
                self._take("arrow")
                methods[member.text] = Method(member.text, keyword.doc, given, self._struct())
            else:
                raise self._wrong(keyword, "type, method or error")
        found = Interface(name, doc, self._text, types, methods, errors)
        self._resolve(found)
        return found

    def _resolve(self, interface: Interface) -> None:
        def visit(kind: Type) -> None:
            if kind.kind == "named" and kind.name not in interface.types:
                raise DefinitionError(f'type "{kind.name}" is not defined', where=interface.name)
            if kind.element is not None:
                visit(kind.element)
            for inner in kind.fields.values():
                visit(inner)

        for kind in (*interface.types.values(), *interface.errors.values()):
            visit(kind)
        for method in interface.methods.values():
            visit(method.input)
            visit(method.output)

    def _type(self) -> Type:
        token = self._peek()
        if token.text == "?":
            self._at += 1
            if self._peek().text == "?":
                raise self._wrong(self._peek(), "a type behind one question mark")
            return Type("maybe", element=self._type())
        if token.kind in ("array", "map"):
            self._at += 1
            return Type(token.kind, element=self._type())
        if token.text == "(":
            return self._struct_or_enum()
        name = self._take("name").text
        return Type(name) if name in _BASIC else Type("named", name)

    def _struct(self) -> Type:
        token = self._peek()
        found = self._struct_or_enum()
        if found.kind != "struct":
            raise self._wrong(token, "fields with types")
        return found

    def _struct_or_enum(self) -> Type:
        self._expect("(")
        fields: dict[str, Type] = {}
        values: list[str] = []
        while self._peek().text != ")":
            name = self._take("name")
            if name.text in fields or name.text in values:
                raise self._wrong(name, "a name that is not taken yet")
            if self._peek().text == ":":
                self._at += 1
                fields[name.text] = self._type()
            else:
                values.append(name.text)
            if fields and values:
                raise self._wrong(name, "either fields or values")
            if self._peek().text != ")":
                self._expect(",")
        self._expect(")")
        return Type("enum", values=values) if values else Type("struct", fields=fields)

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, kind: str) -> _Token:
        token = self._peek()
        if token.kind != kind:
            raise self._wrong(token, kind)
        self._at += 1
        return token

    def _expect(self, text: str) -> None:
        if self._peek().text != text:
            raise self._wrong(self._peek(), f'"{text}"')
        self._at += 1

    def _wrong(self, token: _Token, wanted: str) -> DefinitionError:
        got = f'"{token.text}"' if token.text else "the end"
        return DefinitionError(f"expected {wanted}, got {got}", where=f"line {token.line}")


def _tokens(text: str) -> Iterator[_Token]:
    at, line, comments = 0, 1, list[str]()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise DefinitionError(f"unexpected character {text[at]!r}", where=f"line {line}")
        kind, found = match.lastgroup, match[0]
        if kind == "comment":
            comments.append(found[1:].strip())
        elif kind == "space":
            if found.count("\n") > 1:  # a blank line ends a comment's claim on what follows
                comments.clear()
        else:
            yield _Token(kind, found, line, "\n".join(comments))
            comments.clear()
        line += found.count("\n")
        at = match.end()
    yield _Token("end", "", line, "")
