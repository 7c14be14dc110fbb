"""The shape language: how an instruction's declaration relates the shapes of its operands.

    pattern     dims separated by spaces; "" is a scalar (rank 0)
    dim         7            must be that number
                n            binds on first use, afterwards must be equal
                *s           binds any number of dims (at most one in a pattern)
                (expr)       integer expression over what is bound
    expr        + - * //, unary -, parentheses, integer literals, names of dims and of integer
                attributes, ``#s``: the number of elements of what ``*s`` bound
    requirement expr OP expr with OP one of == != <= >= < >

Names share one space: integer attributes are bound before the first operand, then operands bind
from left to right. ``//`` floors, as in Python. Guest and function infer with this same code, so a
program that the guest's library accepts is one that the function accepts.

Everything is bounded: patterns by length and nesting, values by 63 bits, shapes by the limits of a
tensor; nothing here evaluates text as code. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from accelvisor.errors import ProgramError
from accelvisor.limits import LIMITS

Shape: TypeAlias = tuple[int, ...]
Env: TypeAlias = dict[str, int]
"""Numbers by name; ``*s`` puts its product under ``"#s"``."""

PATTERN_CHARS = 256
DEPTH = 16
MAX_DIM = 2**32 - 1
_BOUND = 2**63
_GIVE = "give that operand's shape explicitly"

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(#[A-Za-z_]\w*)|(//|==|!=|<=|>=|[-+*()<>]))")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")

# An expression is a nested tuple: ("int", 3), ("name", "n"), (operator, left, right), ("neg", e).
Expr: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a pattern. ``kind``: ``int``, ``name``, ``star`` or ``expr``."""

    kind: str
    text: str
    value: int = 0
    expr: Expr = ()


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern. ``star`` is the index of its ``*name`` dim, -1 without one."""

    text: str
    dims: tuple[Dim, ...]
    star: int


class Bindings:
    """What matching has bound so far: numbers by name, dim tuples by star name."""

    __slots__ = ("numbers", "stars")

    def __init__(self, numbers: Mapping[str, int] | None = None) -> None:
        self.numbers: Env = dict(numbers or {})
        self.stars: dict[str, Shape] = {}


def _bad(where: str, message: str, hint: str = "") -> ProgramError:
    return ProgramError(message, where=where, hint=hint)


# --- parsing -------------------------------------------------------------------------------------


class _Parser:
    """Recursive descent over one expression's tokens. Bounded by PATTERN_CHARS and DEPTH."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def fail(self) -> ProgramError:
        return _bad("shape", f"cannot read {self.text!r} near {self.peek() or 'its end'!r}")

    def whole(self) -> Expr:
        expr = self.sum(0)
        if self.peek():
            raise self.fail()
        return expr

    def sum(self, depth: int) -> Expr:
        left = self.product(depth)
        while self.peek() in ("+", "-"):
            left = (self.take(), left, self.product(depth))
        return left

    def product(self, depth: int) -> Expr:
        left = self.atom(depth)
        while self.peek() in ("*", "//"):
            left = (self.take(), left, self.atom(depth))
        return left

    def atom(self, depth: int) -> Expr:
        if depth > DEPTH:
            raise _bad("shape", f"{self.text!r} is nested deeper than {DEPTH}")
        token = self.take()
        if token == "-":
            return ("neg", self.atom(depth + 1))
        if token == "(":
            expr = self.sum(depth + 1)
            if self.take() != ")":
                raise self.fail()
            return expr
        if token.isdigit():
            return ("int", _bounded(int(token), self.text))
        if token[:1] == "#" or _NAME.match(token):
            return ("name", token)
        self.at -= 1
        raise self.fail()


def _tokens(text: str) -> list[str]:
    if len(text) > PATTERN_CHARS or not text.isascii():
        raise _bad("shape", f"longer than {PATTERN_CHARS} characters or not ASCII")
    tokens, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise _bad("shape", f"cannot read {text!r} at character {at}")
        tokens.append(match.group().strip())
        at = match.end()
    return tokens


def _split(text: str) -> list[str]:
    """Split at spaces that are outside parentheses."""
    words, depth, word = [], 0, ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == " " and depth <= 0:
            words.append(word)
            word = ""
        else:
            word += char
    return [w for w in (*words, word) if w]


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Parse one operand's pattern. Raises ProgramError when it is not one."""
    if len(text) > PATTERN_CHARS or not text.isascii():
        raise _bad("shape", f"longer than {PATTERN_CHARS} characters or not ASCII")
    dims, star = [], -1
    for index, word in enumerate(_split(text)):
        if word.isdigit():
            dims.append(Dim("int", word, _bounded(int(word), text)))
        elif _NAME.match(word):
            dims.append(Dim("name", word))
        elif word[0] == "*" and _NAME.match(word[1:]):
            if star >= 0:
                raise _bad("shape", f"{text!r} has more than one '*'")
            star = index
            dims.append(Dim("star", word[1:]))
        elif word[0] == "(" and word[-1] == ")":
            dims.append(Dim("expr", word, 0, _Parser(word).whole()))
        else:
            raise _bad("shape", f"cannot read {word!r} in {text!r}")
    return Pattern(text, tuple(dims), star)


_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}


@lru_cache(maxsize=1024)
def parse_requirement(text: str) -> tuple[str, Expr, Expr]:
    """Parse ``expr OP expr`` to (OP, left, right). Raises ProgramError when it is not one."""
    parser = _Parser(text)
    left = parser.sum(0)
    operator = parser.take()
    if operator not in _COMPARE:
        parser.at -= 1
        raise parser.fail()
    return operator, left, parser.whole()


# --- evaluating ----------------------------------------------------------------------------------


def _bounded(value: int, where: str) -> int:
    if -_BOUND < value < _BOUND:
        return value
    raise _bad(where, "a number of the shape does not fit 63 bits")


def evaluate(expr: Expr, bindings: Bindings, where: str = "shape") -> int:
    """The value of an expression. Raises ProgramError: unbound name, division by zero, overflow."""
    kind = expr[0]
    if kind == "int":
        return int(expr[1])
    if kind == "name":
        value = bindings.numbers.get(expr[1])
        if value is None:
            raise _bad(where, f"{expr[1]!r} is not known", _GIVE)
        return value
    if kind == "neg":
        return -evaluate(expr[1], bindings, where)
    left = evaluate(expr[1], bindings, where)
    right = evaluate(expr[2], bindings, where)
    if kind == "+":
        return _bounded(left + right, where)
    if kind == "-":
        return _bounded(left - right, where)
    if kind == "*":
        return _bounded(left * right, where)
    if right == 0:
        raise _bad(where, "the shape divides by zero")
    return _bounded(left // right, where)


def unify(pattern: Pattern, shape: Sequence[int], bindings: Bindings, where: str) -> None:
    """Match ``shape`` against ``pattern``, binding names into ``bindings``.

    Raises:
        ProgramError: they do not match; ``where`` names the operand.
    """
    dims = pattern.dims
    extra = len(shape) - len(dims)
    if (extra != 0) if pattern.star < 0 else (extra < -1):
        raise _mismatch(pattern, shape, where)
    at = 0
    for dim in dims:
        if dim.kind == "star":
            _unify_star(dim.text, tuple(shape[at : at + extra + 1]), bindings, where)
            at += extra + 1
            continue
        size = shape[at]
        at += 1
        if dim.kind == "name":
            if bindings.numbers.setdefault(dim.text, size) != size:
                raise _mismatch(
                    pattern, shape, where, f"{dim.text} is {bindings.numbers[dim.text]}"
                )
        elif dim.kind == "int":
            if dim.value != size:
                raise _mismatch(pattern, shape, where)
        elif (wanted := evaluate(dim.expr, bindings, where)) != size:
            raise _mismatch(pattern, shape, where, f"{dim.text} is {wanted}")


def _unify_star(name: str, dims: Shape, bindings: Bindings, where: str) -> None:
    if bindings.stars.setdefault(name, dims) != dims:
        raise _bad(where, f"has {dims} where *{name} is {bindings.stars[name]}")
    size = 1
    for dim in dims:
        size *= dim
    bindings.numbers["#" + name] = _bounded(size, where)


def _mismatch(pattern: Pattern, shape: Sequence[int], where: str, detail: str = "") -> ProgramError:
    wanted = pattern.text or "a scalar"
    return _bad(
        where, f"shape {tuple(shape)} is not {wanted!r}" + (f": {detail}" if detail else "")
    )


def build(pattern: Pattern, bindings: Bindings, where: str) -> Shape:
    """The shape that ``pattern`` describes once everything in it is bound.

    Raises:
        ProgramError: a name is not bound (the shape must be given), a dim is negative, or the shape
            exceeds the limits of a tensor.
    """
    shape: list[int] = []
    for dim in pattern.dims:
        if dim.kind == "int":
            shape.append(dim.value)
        elif dim.kind == "star":
            if dim.text not in bindings.stars:
                raise _bad(where, f"*{dim.text} is not known", _GIVE)
            shape.extend(bindings.stars[dim.text])
        else:
            expr = dim.expr if dim.kind == "expr" else ("name", dim.text)
            shape.append(evaluate(expr, bindings, where))
    if len(shape) > LIMITS.tensor_rank:
        raise _bad(where, f"rank {len(shape)}, the limit is {LIMITS.tensor_rank}")
    elements = 1
    for size in shape:
        if not 0 <= size <= MAX_DIM:
            raise _bad(
                where, f"{pattern.text!r} gives {tuple(shape)}", "check sizes and attributes"
            )
        elements *= size
    if elements > LIMITS.tensor_bytes:
        raise _bad(where, f"{tuple(shape)} exceeds the size of a tensor")
    return tuple(shape)


def check_requirements(requires: Sequence[str], bindings: Bindings, where: str) -> None:
    """Raise ProgramError for the first requirement that does not hold."""
    for text in requires:
        operator, left, right = parse_requirement(text)
        a, b = evaluate(left, bindings, where), evaluate(right, bindings, where)
        if not _COMPARE[operator](a, b):
            raise _bad(where, f"needs {text}, has {a} and {b}")


# --- declarations --------------------------------------------------------------------------------


def integer_attributes(
    declaration: Mapping[str, Any], attributes: Mapping[str, int | float]
) -> dict[str, int]:
    """The attributes that shapes may name: integers, with defaults filled in."""
    return {
        a["name"]: int(attributes.get(a["name"], a["default"]))
        for a in declaration["attributes"]
        if a["type"] == "int"
    }


def bind_shapes(
    declaration: Mapping[str, Any],
    shapes: Sequence[Sequence[int] | None],
    attributes: Mapping[str, int | float],
) -> list[Shape]:
    """Check the shapes that are given and infer those that are ``None``, for all operands in order.

    Args:
        declaration: one entry of Query.INSTRUCTIONS (``name``, ``operands``, ``attributes``,
            ``requires``).
        shapes: one entry for each operand; ``None`` asks for it to be inferred.
        attributes: by name; missing ones take their defaults.

    Raises:
        ProgramError: ``where`` names the instruction and operand.
    """
    name, operands = declaration["name"], declaration["operands"]
    if len(shapes) != len(operands):
        raise _bad(name, f"takes {len(operands)} operands, not {len(shapes)}")
    bindings = Bindings(integer_attributes(declaration, attributes))
    for operand, shape in zip(operands, shapes, strict=True):
        if shape is not None:
            unify(parse(operand["shape"]), shape, bindings, f"{name}.{operand['name']}")
    result: list[Shape] = []
    for operand, shape in zip(operands, shapes, strict=True):
        if shape is None:
            shape = build(parse(operand["shape"]), bindings, f"{name}.{operand['name']}")
        result.append(tuple(shape))
    check_requirements(declaration.get("requires", ()), bindings, name)
    return result


def infer_outputs(
    declaration: Mapping[str, Any],
    input_shapes: Sequence[Sequence[int]],
    attributes: Mapping[str, int | float],
) -> list[Shape]:
    """Shapes of the operands that are written, from those that are read (both in declared order).

    Raises:
        ProgramError: the inputs do not fit the declaration, or an output's shape does not follow
        from
            them (fill, reshape: use :func:`bind_shapes` with the output given).
    """
    written = [operand["access"] != "read" for operand in declaration["operands"]]
    if len(input_shapes) != written.count(False):
        raise _bad(
            declaration["name"], f"reads {written.count(False)} tensors, not {len(input_shapes)}"
        )
    given = iter(input_shapes)
    shapes = bind_shapes(declaration, [None if w else next(given) for w in written], attributes)
    return [shape for shape, w in zip(shapes, written, strict=True) if w]


def infer_dtypes(declaration: Mapping[str, Any], dtypes: Sequence[str | None]) -> list[str]:
    """Check the dtype labels that are given and infer those that are ``None``, in operand order.

    An operand with ``like`` takes the dtype of the operand that it names; else its first dtype is
    the default.

    Raises:
        ProgramError: a dtype is not among the operand's, or differs from the one it must be like.
    """
    name, operands = declaration["name"], declaration["operands"]
    if len(dtypes) != len(operands):
        raise _bad(name, f"takes {len(operands)} operands, not {len(dtypes)}")
    known: dict[str, str] = {}
    for operand, dtype in zip(operands, dtypes, strict=True):
        where = f"{name}.{operand['name']}"
        like = known[operand["like"]] if operand.get("like") else None
        dtype = dtype or like or operand["dtypes"][0]
        if like is not None and dtype != like:
            raise _bad(where, f"is {dtype}, must be {like} like {operand['like']}")
        if dtype not in operand["dtypes"]:
            raise _bad(where, f"is {dtype}, can be {', '.join(operand['dtypes'])}")
        known[operand["name"]] = dtype
    return [known[operand["name"]] for operand in operands]
