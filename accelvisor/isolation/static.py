"""Static partitions: a card is cut once into N equal parts, and stays so until it is disabled.

The cut, in this order of numbering, with what does not divide left to the physical function (PF):

* Cores, numbered chip by chip. Where there is a chip for each part, a part is ``chips // N`` whole
  chips; else ``ceil(N / chips)`` parts share a chip, each with an equal number of its cores. So no
  part ever has pieces of two chips.
* Memory, bank after bank: ``memory // N`` in whole pages, one contiguous run that is told as one
  range for each bank it touches.
* Queues ``queues // N``, at most :attr:`Limits.queues`; vectors ``functions // N``.
* Links between chips of one part are that part's; those from part to part are the PF's.

The number of parts is one of :data:`NUMBERS`, may only change while the card is disabled
(PCI Express 5.0, 9.3.3.7: NumVFs), and nothing may use a card while it is enabled or disabled.

========= =================================================================================
disabled  the number can be set; functions may be placed freely
enabling  the table is being made durable and the functions' resources are being set aside
enabled   the table is frozen: nothing in it changes until the card is disabled
disabling every function is gone; what they held is being scrubbed
========= =================================================================================

``enabling`` and ``disabling`` are journal states: who finds one at its start was killed in the
middle, rolls the former back (nobody was told that it succeeded) and the latter forward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from accelvisor.abi.registers import PAGE
from accelvisor.errors import ConflictError, UsageError
from accelvisor.isolation.resources import Card, Placement, Range
from accelvisor.limits import LIMITS

#: How many parts a card can be cut into.
NUMBERS = (1, 2, 4, 8, 16)
#: Of the document. In the first one a card is a row of chips, and links are not named.
FORMAT = 2

Document: TypeAlias = "str | int | Sequence[Document] | Mapping[str, Document]"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """``count`` things from ``first`` on: cores of a chip, queues, vectors."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Part:
    """What one function of a static card has, or what the PF keeps.

    Attributes:
        cores: by chip; a chip with none is not in it.
        ranges: memory, in bank order.
        queues: of the card's queues; ``count`` may be 0 with the PF.
        vectors: of the card's vectors; likewise.
        links: numbers of the card's links.
    """

    cores: Mapping[int, Sequence[Span]]
    ranges: Sequence[Range]
    queues: Span
    vectors: Span
    links: Sequence[int] = ()

    @property
    def core_count(self) -> int:
        return sum(span.count for spans in self.cores.values() for span in spans)

    @property
    def memory_bytes(self) -> int:
        return sum(item.nbytes for item in self.ranges)

    def document(self, version: int = FORMAT) -> Mapping[str, Document]:
        made: Mapping[str, Document] = {
            "cores": [
                [chip, span.first, span.count]
                for chip, spans in sorted(self.cores.items())
                for span in spans
            ],
            "memory": [[item.bank, item.start, item.nbytes] for item in self.ranges],
            "queues": [self.queues.first, self.queues.count],
            "vectors": [self.vectors.first, self.vectors.count],
        }
        return made if version < FORMAT else {**made, "links": list(self.links)}


@dataclass(frozen=True, slots=True)
class Table:
    """The cut of one card into ``number`` equal parts. Frozen while the card is enabled."""

    card: Card
    number: int
    parts: Sequence[Part]
    remainder: Part

    def document(self, version: int = FORMAT) -> Mapping[str, Document]:
        """The table as text, integers, lists and maps: what is signed and shown.

        Args:
            version: of its format. The first one is that of tables which were signed before cards
                were grids; none of a card with several rows of chips is equal to it.
        """
        card = self.card
        lines = card.boards * card.rows
        grid = {"boards": card.boards, "rows": card.rows} if version >= FORMAT or lines > 1 else {}
        return {
            "format": version,
            "card": {
                **grid,
                "name": card.name,
                "chips": card.chips,
                "cores_per_chip": card.cores_per_chip,
                "memory_bytes": card.memory_bytes,
                "banks": card.banks,
                "queues": card.queues,
                "functions": card.functions,
            },
            "number": self.number,
            "parts": [part.document(version) for part in self.parts],
            "remainder": self.remainder.document(version),
        }

    def digest(self, version: int = FORMAT) -> str:
        """SHA-256 over the document as JSON with sorted keys and no blanks, in hexadecimal."""
        text = json.dumps(self.document(version), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def placement(self, index: int) -> Placement:
        """Part ``index``, from 0 on, as the planner's tables have it."""
        part = self.parts[index]
        return Placement(
            self.card.name,
            {
                chip: tuple(core for span in spans for core in range(span.first, span.end))
                for chip, spans in part.cores.items()
            },
            tuple(part.ranges),
            tuple(range(part.queues.first, part.queues.end)),
            part.vectors.first,
            links=tuple(part.links),
        )


def allowed(card: Card) -> Sequence[int]:
    """The numbers of parts that ``card`` can be cut into, in ascending order."""
    return tuple(number for number in NUMBERS if not _short(card, number))


def partition(card: Card, number: int) -> Table:
    """Cut ``card`` into ``number`` equal parts.

    Raises:
        UsageError: ``functions-count``, it cannot be cut into so many.
    """
    why = _short(card, number)
    if why:
        may = ", ".join(map(str, allowed(card)))
        raise UsageError(
            f'card "{card.name}" cannot be cut into {number} functions: {why}',
            code="functions-count",
            where=f"card:{card.name}",
            hint=f"it can be cut into {may}" if may else "it is too small for static functions",
        )
    memory, queues, vectors = _memory(card, number), _queues(card, number), card.functions // number
    total = card.banks * card.bank_bytes
    cores = [_cores(card, number, index) for index in range(number)]
    links = [_among(card, item) for item in cores]
    parts = tuple(
        Part(
            cores[index],
            _ranges(card, index * memory, (index + 1) * memory),
            Span(index * queues, queues),
            Span(index * vectors, vectors),
            links[index],
        )
        for index in range(number)
    )
    remainder = Part(
        _left(card, parts),
        _ranges(card, number * memory, total),
        Span(number * queues, card.queues - number * queues),
        Span(number * vectors, card.functions - number * vectors),
        sorted(set(range(len(card.links))).difference(*links)),
    )
    return Table(card, number, parts, remainder)


def _short(card: Card, number: int) -> str:
    """Why ``card`` cannot be cut into ``number`` parts; empty when it can."""
    if number not in NUMBERS:
        return f"the number is one of {', '.join(map(str, NUMBERS))}"
    off = sorted(card.disabled | card.passing)
    if off:
        return f"its chip {off[0]} is {card.mode(off[0])}"
    if number > card.functions:
        return f"it has {card.functions} in all"
    if number > card.chips * card.cores_per_chip:
        return f"it has {card.cores} cores"
    if not _per_chip(card, number):
        return f"its chips have {card.cores_per_chip} cores each, and none serves two chips"
    if not _memory(card, number):
        return f"it has {card.memory_bytes} bytes of memory"
    if not _queues(card, number):
        return f"it has {card.queues} queues"
    return ""


def _per_chip(card: Card, number: int) -> int:
    """Cores of a part on each chip that it is on."""
    sharers = -(-number // card.chips)
    return card.cores_per_chip // sharers


def _memory(card: Card, number: int) -> int:
    return card.banks * card.bank_bytes // number // PAGE * PAGE


def _queues(card: Card, number: int) -> int:
    return min(card.queues // number, LIMITS.queues)


def _cores(card: Card, number: int, index: int) -> Mapping[int, Sequence[Span]]:
    if number <= card.chips:
        chips = card.chips // number
        whole = (Span(0, card.cores_per_chip),)
        return dict.fromkeys(range(index * chips, (index + 1) * chips), whole)
    sharers, cores = -(-number // card.chips), _per_chip(card, number)
    return {index // sharers: (Span(index % sharers * cores, cores),)}


def _among(card: Card, chips: Collection[int]) -> Sequence[int]:
    """Links with both ends at these chips."""
    return [
        number
        for number, (one, other) in enumerate(card.links)
        if one in chips and other in chips
    ]


def _left(card: Card, parts: Sequence[Part]) -> Mapping[int, Sequence[Span]]:
    """Cores of no part: parts fill a chip from its first core on, so one span a chip."""
    used = dict.fromkeys(range(card.chips), 0)
    for part in parts:
        for chip, spans in part.cores.items():
            used[chip] = max([used[chip], *(span.end for span in spans)])
    return {
        chip: (Span(first, card.cores_per_chip - first),)
        for chip, first in used.items()
        if first < card.cores_per_chip
    }


def _ranges(card: Card, start: int, end: int) -> Sequence[Range]:
    """Bytes ``start`` to ``end`` of all banks laid one after the other."""
    found = []
    while start < end:
        bank, at = divmod(start, card.bank_bytes)
        nbytes = min(end - start, card.bank_bytes - at)
        found.append(Range(bank, at, nbytes))
        start += nbytes
    return tuple(found)


# --- the life of a static card ------------------------------------------------------------------


class State(StrEnum):
    DISABLED = "disabled"
    ENABLING = "enabling"
    ENABLED = "enabled"
    DISABLING = "disabling"


class Event(StrEnum):
    SET_NUMBER = "set-number"  # somebody sets how many functions it is to have
    ENABLE = "enable"  # somebody asks for the cut
    ENABLED = "was-enabled"  # it is done
    FAILED = "failed"  # what was under way did not succeed, or was interrupted
    DISABLE = "disable"  # somebody asks for its end
    DISABLED = "was-disabled"  # it is done


@dataclass(frozen=True, slots=True)
class Refused:
    """Why an event is refused in a state: a stable code, a sentence, a hint."""

    code: str
    message: str
    hint: str = ""


_FROZEN = Refused(
    "card-enabled", "its number of functions is frozen while it is enabled", "disable it first"
)
_RISING = Refused("card-changing", "it is being enabled", "wait until that has ended")
_FALLING = Refused("card-changing", "it is being disabled", "wait until that has ended")
_STILL = Refused("card-not-changing", "nothing is under way that this could be the end of")
IN_USE = Refused(
    "card-in-use", "functions exist on it", "delete them, or move them to another card or host"
)

TABLE: Mapping[tuple[State, Event], State | Refused] = {
    (State.DISABLED, Event.SET_NUMBER): State.DISABLED,
    (State.DISABLED, Event.ENABLE): State.ENABLING,
    (State.DISABLED, Event.ENABLED): _STILL,
    (State.DISABLED, Event.FAILED): _STILL,
    (State.DISABLED, Event.DISABLE): State.DISABLED,
    (State.DISABLED, Event.DISABLED): State.DISABLED,
    (State.ENABLING, Event.SET_NUMBER): _FROZEN,
    (State.ENABLING, Event.ENABLE): State.ENABLING,
    (State.ENABLING, Event.ENABLED): State.ENABLED,
    (State.ENABLING, Event.FAILED): State.DISABLED,
    (State.ENABLING, Event.DISABLE): _RISING,
    (State.ENABLING, Event.DISABLED): _STILL,
    (State.ENABLED, Event.SET_NUMBER): _FROZEN,
    (State.ENABLED, Event.ENABLE): State.ENABLED,
    (State.ENABLED, Event.ENABLED): State.ENABLED,
    (State.ENABLED, Event.FAILED): _STILL,
    (State.ENABLED, Event.DISABLE): State.DISABLING,
    (State.ENABLED, Event.DISABLED): _STILL,
    (State.DISABLING, Event.SET_NUMBER): _FROZEN,
    (State.DISABLING, Event.ENABLE): _FALLING,
    (State.DISABLING, Event.ENABLED): _STILL,
    # Something may be scrubbed already: there is no way back, only another try.
    (State.DISABLING, Event.FAILED): State.DISABLING,
    (State.DISABLING, Event.DISABLE): State.DISABLING,
    (State.DISABLING, Event.DISABLED): State.DISABLED,
}


def move(state: State, event: Event, name: str, functions: int) -> State:
    """The next state.

    Args:
        name: the card's, for the message.
        functions: how many exist on it now, static or not.

    Raises:
        ConflictError: with the refusal's code; ``card-in-use`` where the card would begin to be
            enabled or disabled while functions exist on it.
    """
    answer = TABLE[state, event]
    if functions and event in (Event.ENABLE, Event.DISABLE) and answer is not state:
        # Another refusal says what is wrong whether or not there are functions.
        answer = answer if isinstance(answer, Refused) else IN_USE
    if isinstance(answer, Refused):
        raise ConflictError(
            f'card "{name}": {answer.message}',
            code=answer.code,
            where=f"card:{name}",
            hint=answer.hint,
        )
    return answer
