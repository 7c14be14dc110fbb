"""What one link does: its states as a table, and credits, sequence numbers and training.

Sans-IO: the time is an argument, in model cycles. A link carries numbers of flits, never their
bytes: those stay with their sender until they are delivered. So a link is seven integers that fit
its 64-byte record, and whoever reads them knows what arrived.

Both directions share one window and one row of sequence numbers, which begin at 1. Numbers at most
``delivered`` have arrived, each once and in order; those up to ``sent`` are under way; nothing else
ever left. A link that fails forgets what was under way and says where that begins; when it is up
again the same numbers are sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, TypeAlias

from accelvisor.errors import ConflictError, StateError, UsageError

#: Of a link's training, from the moment it is activated.
TRAINING_CYCLES = 1000
#: Flits that may have left without their credit being back.
WINDOW = 8
#: Payload of one flit, at most.
FLIT_BYTES = 256
#: Integers of a link's record.
WORDS = 7
_MOST = (1 << 64) - 1


class LinkState(IntEnum):
    """The numbers are those in a function's state."""

    DOWN = 0
    TRAINING = 1
    UP = 2
    DRAINING = 3
    ERROR = 4


class LinkEvent(StrEnum):
    """What can happen to a link."""

    ACTIVATE = "activate"
    TRAINED = "trained"
    SEND = "send"
    DELIVER = "deliver"
    RELEASE = "release"
    DEACTIVATE = "deactivate"
    DRAINED = "drained"
    FAIL = "fail"
    CLEAR = "clear"


class Refusal(StrEnum):
    """Why a link does not do it: the code of the error."""

    BUSY = "link-busy"
    NOT_UP = "link-not-up"
    FAILED = "link-failed"
    OUT_OF_TURN = "link-out-of-turn"


LinkTable: TypeAlias = Mapping[tuple[LinkState, LinkEvent], LinkState | Refusal]


def _table() -> LinkTable:
    down, training, up, draining, error = LinkState
    busy, not_up, failed, turn = Refusal
    columns = tuple(LinkEvent)
    rows: Mapping[LinkState, tuple[LinkState | Refusal, ...]] = {
        #          activate  trained send    deliver   release   deactivate drained fail   clear
        down:     (training, turn,   not_up, turn,     turn,     not_up,    turn,   error, turn),
        training: (busy,     up,     not_up, turn,     turn,     down,      turn,   error, turn),
        up:       (busy,     turn,   up,     up,       up,       draining,  turn,   error, turn),
        draining: (busy,     turn,   not_up, draining, draining, busy,      down,   error, turn),
        error:    (failed,   turn,   failed, failed,   failed,   failed,    turn,   error, down),
    }  # fmt: skip
    return {
        (state, event): move
        for state, moves in rows.items()
        for event, move in zip(columns, moves, strict=True)
    }


#: Of each state and event, the next state or why not.
LINK_TABLE: LinkTable = _table()


class ChipState(StrEnum):
    """What a chip takes part in."""

    DISABLED = "disabled"  # nothing: its links are down
    ENABLED = "enabled"
    PASS_THROUGH = "pass-through"  # rings lead over it, and it computes nothing


class ChipEvent(StrEnum):
    ENABLE = "enable"
    DISABLE = "disable"
    PASS = "pass"


#: A chip does whatever it is told; that its links are down before is the fabric's rule.
CHIP_TABLE: Mapping[tuple[ChipState, ChipEvent], ChipState] = {
    (state, event): target
    for state in ChipState
    for event, target in (
        (ChipEvent.ENABLE, ChipState.ENABLED),
        (ChipEvent.DISABLE, ChipState.DISABLED),
        (ChipEvent.PASS, ChipState.PASS_THROUGH),
    )
}


class Broken(NamedTuple):
    """What a failed link says: numbers up to ``delivered`` arrived, those after it and up to
    ``sent`` did not and never will.
    """

    delivered: int
    sent: int


@dataclass(slots=True)
class Link:
    """One link. A fresh one is down.

    Attributes:
        due: the cycle at which training ends; 0 while it does not train.
        sent, delivered: sequence numbers, see the module.
        credits: flits that may leave; :data:`WINDOW` when nothing is under way, credits included.
        bytes: payload that left, repeated flits included.
        errors: how often it failed.
    """

    state: LinkState = LinkState.DOWN
    due: int = 0
    sent: int = 0
    delivered: int = 0
    credits: int = WINDOW
    bytes: int = 0
    errors: int = 0

    def activate(self, now: int) -> None:
        """Begin to train. Raises ConflictError: ``link-busy``, ``link-failed``."""
        self._move(LinkEvent.ACTIVATE)
        self.due = now + TRAINING_CYCLES

    def advance(self, now: int) -> None:
        """Do what is due by now: end the training, or drop a link that has drained."""
        if self.state is LinkState.TRAINING and now >= self.due:
            self._move(LinkEvent.TRAINED)
            self.due = 0
        if self.state is LinkState.DRAINING and self.credits == WINDOW:
            self._move(LinkEvent.DRAINED)

    def send(self, nbytes: int) -> int | None:
        """A flit of ``nbytes`` leaves: its sequence number. None: no credit; nothing happened.

        Raises:
            ConflictError: ``link-not-up``, ``link-failed``.
            UsageError: more than :data:`FLIT_BYTES`, or fewer than none.
        """
        if not 0 <= nbytes <= FLIT_BYTES:
            raise UsageError(f"a flit of {nbytes} bytes", where="fabric")
        self._move(LinkEvent.SEND)
        if self.credits == 0:
            return None
        self.credits -= 1
        self.sent += 1
        self.bytes += nbytes
        return self.sent

    def deliver(self, sequence: int) -> None:
        """A flit arrives.

        Raises:
            ConflictError: ``link-failed``, or ``link-out-of-turn``: it is not the one that is next.
        """
        self._move(LinkEvent.DELIVER)
        if sequence != self.delivered + 1 or sequence > self.sent:
            raise ConflictError(
                f"flit {sequence} arrives after {self.delivered} of {self.sent}",
                code=Refusal.OUT_OF_TURN.value, where="fabric",
            )  # fmt: skip
        self.delivered = sequence

    def release(self, now: int) -> None:
        """The receiver took a flit out of its buffer, and the credit is back.

        Raises:
            ConflictError: ``link-failed``, or ``link-out-of-turn``: no credit is out.
        """
        self._move(LinkEvent.RELEASE)
        if self.credits + self.sent - self.delivered >= WINDOW:
            raise ConflictError(
                "a credit is back that is not out", code=Refusal.OUT_OF_TURN.value, where="fabric"
            )
        self.credits += 1
        self.advance(now)

    def deactivate(self, now: int) -> None:
        """Take no more; down when what is under way has arrived, and at once when nothing is.

        Raises:
            ConflictError: ``link-not-up``: it is down; ``link-busy``: it drains already;
                ``link-failed``.
        """
        self._move(LinkEvent.DEACTIVATE)
        self.due = 0
        self.advance(now)

    def fail(self) -> Broken:
        """It broke; what was under way is lost, and the answer says what that is."""
        self._move(LinkEvent.FAIL)
        broken = Broken(self.delivered, self.sent)
        self.errors += 1
        self.due = 0
        self.sent = self.delivered
        self.credits = WINDOW
        return broken

    def clear(self) -> None:
        """A failed link is down, and can be activated. Raises ConflictError: it did not fail."""
        self._move(LinkEvent.CLEAR)

    def _move(self, event: LinkEvent) -> None:
        move = LINK_TABLE[self.state, event]
        if isinstance(move, Refusal):
            raise ConflictError(
                f"a link that is {self.state.name.lower()} does not {event.value}",
                code=move.value, where="fabric", hint=_HINTS[move],
            )  # fmt: skip
        self.state = move

    # --- its record -------------------------------------------------------------------------------

    def pack(self) -> tuple[int, ...]:
        """The :data:`WORDS` integers of its record, each of 64 bits without sign."""
        return (
            int(self.state), self.due, self.sent, self.delivered, self.credits, self.bytes,
            self.errors,
        )  # fmt: skip

    @classmethod
    def unpack(cls, words: Sequence[int]) -> Link:
        """The link of a record.

        Raises:
            StateError: no link can have come to this.
        """
        if len(words) != WORDS or not all(0 <= word <= _MOST for word in words):
            raise StateError(f"a link's record is {WORDS} numbers of 64 bits", where="fabric")
        if words[0] not in list(LinkState):
            raise StateError(f"a link's record has state {words[0]}", where="fabric")
        link = cls(LinkState(words[0]), *words[1:])
        quiet = link.credits == WINDOW and link.sent == link.delivered
        if (
            not 0 <= link.sent - link.delivered <= WINDOW - link.credits <= WINDOW
            or (link.due != 0 and link.state is not LinkState.TRAINING)
            or (quiet is (link.state is LinkState.DRAINING) and link.state is not LinkState.UP)
        ):
            raise StateError(f"a link's record contradicts itself: {link}", where="fabric")
        return link


_HINTS = {
    Refusal.BUSY: "deactivate it, and wait until it is down",
    Refusal.NOT_UP: "activate it, and wait until it is up",
    Refusal.FAILED: "clear it, then activate it",
    Refusal.OUT_OF_TURN: "",
}
