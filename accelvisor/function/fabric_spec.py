"""The part of ``spec.json`` that says which chips a function has and which links join them.

Standard library only, because the holder imports it. A chip's number within the function is its
place in ``chips``; a link names its ends by these numbers, and is named by its number on the card,
which is what an operator sees. Several links between the same two ends are the hops of one way that
leads over chips which only pass on what comes: it is up when each hop is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from accelvisor.limits import LIMITS

#: What a link can be: between chips of one board, or a cable between two.
KINDS = ("inter-chip", "inter-card")
#: Of boards, chips and links of one card: more than any configuration gives.
_MOST_NUMBER = 1 << 16


class ChipSpec(NamedTuple):
    """One chip: its board, its number on the card, and how many of its cores are the function's
    when it begins; what it has now is its shape's, the same on each chip.
    """

    board: int
    number: int
    cores: int


class LinkSpec(NamedTuple):
    """One link: its number on the card, the function's chips that it joins, and one of
    :data:`KINDS`.
    """

    number: int
    one: int
    other: int
    kind: str


@dataclass(frozen=True, slots=True)
class FabricSpec:
    """The chips in the function's order, and the links that are its own."""

    chips: tuple[ChipSpec, ...] = ()
    links: tuple[LinkSpec, ...] = ()


def plain(chips: int, cores: int) -> FabricSpec:
    """What a specification means that does not say: ``chips`` chips of one board, no link."""
    each, more = divmod(cores, chips)
    return FabricSpec(tuple(ChipSpec(0, chip, each + (chip < more)) for chip in range(chips)))


def parse(fields: object, chips: int, cores: int, bad: Callable[[str], Exception]) -> FabricSpec:
    """Check the decoded field.

    Args:
        fields: {"chips": [[board, number, cores], ...], "links": [[number, one, other, kind], ...]}
        chips, cores: of the function, which the chips have to make up.
        bad: makes the error that is raised, from a sentence.
    """

    def refuse(text: str) -> NoReturn:
        raise bad(f"field 'fabric': {text}")

    if not isinstance(fields, dict) or set(fields) != {"chips", "links"}:
        refuse("it is an object of chips and links")
    rows = [_row(row, (int, int, int), refuse) for row in _list(fields["chips"], refuse)]
    found = tuple(ChipSpec(*row) for row in rows)
    if len(found) != chips or sum(item.cores for item in found) != cores:
        refuse(f"its chips are not the function's {chips} with {cores} cores")
    if len({item.number for item in found}) != chips:
        refuse("a chip is there twice")
    if any(not 0 <= n < _MOST_NUMBER for item in found for n in item):
        refuse("a number is out of range")
    links = [_row(row, (int, int, int, str), refuse) for row in _list(fields["links"], refuse)]
    made = tuple(LinkSpec(*row) for row in links)
    for link in made:
        if not 0 <= link.number < _MOST_NUMBER or link.kind not in KINDS:
            refuse(f"link {link.number} has an impossible number or kind {link.kind!r}")
        if not (0 <= link.one < chips and 0 <= link.other < chips and link.one != link.other):
            refuse(f"link {link.number} joins {link.one} and {link.other} of {chips} chips")
    if len({item.number for item in made}) != len(made):
        refuse("a link is there twice")
    return FabricSpec(found, made)


def _list(value: object, refuse: Callable[[str], NoReturn]) -> Sequence[object]:
    if not isinstance(value, list | tuple) or len(value) > LIMITS.function_links:
        refuse(f"chips and links are lists of at most {LIMITS.function_links}")
    return value


def _row(
    value: object, kinds: tuple[type, ...], refuse: Callable[[str], NoReturn]
) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or tuple(map(type, value)) != kinds:
        refuse(f"{value!r} is not [{', '.join(kind.__name__ for kind in kinds)}]")
    return tuple(value)
