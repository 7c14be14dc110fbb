"""What the two machines of a migration answer with: moves, refusals, and actions as plain values.

A machine decides, an executor acts. The executor performs the actions of one move strictly in
their order and one after the other: a :class:`Journal` is on disk before the next action begins,
and a Freeze has ended (or was given up) before a later Thaw begins. An action that takes time ends
in an event (named in its docstring); a late event of an action that no longer matters is refused
as stale, so the executor never has to take one back.

A message is named by its type, and the executor fills it from the move's record: what was sent
once is kept, so that a repeated request gets the first answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from accelvisor.migration.messages import Message

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class Decision(StrEnum):
    """What a side asks the arbiter for. The answer may be the other one: whoever came first."""

    COMMIT = "commit"
    ABORT = "abort"


class Deadline(StrEnum):
    """Which limit the one timer of a machine is set to (:func:`seconds`)."""

    RESERVE = "reserve"  # the hook waits for an offer
    PROGRESS = "progress"  # a reservation without any progress; each round renews it
    LINK = "link"  # a broken link may come back this long before the pre-copy is given up
    QUIESCE = "quiesce"  # QEMU waits in ListQueuedOwners, the VM is stopped
    LOAD = "load"  # QEMU waits in Load, or is about to
    RETRY = "retry"  # the arbiter could not be asked
    SCRUB = "scrub"  # the destination never said that it runs


class Outcome(StrEnum):
    """What an operator is told at the end."""

    MOVED = "moved"  # it computes at the destination
    RETURNED = "returned"  # it computes at the source, as before
    FENCED = "fenced"  # a VM runs here whose function belongs to the other host


@dataclass(frozen=True, slots=True)
class Send:
    """A control message to the peer; lost when the link is down."""

    message: type[Message]


@dataclass(frozen=True, slots=True)
class Journal:
    """Write this state with the move's record to disk. A restart begins here."""

    state: StrEnum


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Start the machine's one timer anew; it ends in ``deadline``."""

    which: Deadline


@dataclass(frozen=True, slots=True)
class ClearDeadline:
    """Stop the timer."""


@dataclass(frozen=True, slots=True)
class AskArbiter:
    """Ask for a decision; ends in ``arbiter-committed``, ``-aborted`` or ``-unreachable``.

    With the source's ledger as the arbiter, the source writes its own ledger and the destination
    sends a Commit message, whose answers are these events. With etcd both compare and swap there.
    """

    decision: Decision


@dataclass(frozen=True, slots=True)
class Inspect:
    """Source: are the functions here, owned, and is that peer trusted? Ends in ``inspected`` or
    ``failed``."""


@dataclass(frozen=True, slots=True)
class StartRounds:
    """Source: the device goes to PRE_COPY, the first round (everything) begins. May ``fail``."""


@dataclass(frozen=True, slots=True)
class NextRound:
    """Source: a round was received; the convergence rules say what follows it."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """Source: go on sending at the chunk that the peer's Resume names."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Source: all functions of the VM to the P2P states, then to STOP_COPY (:data:`FREEZE_WALK`).
    Ends in ``frozen`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class ShipLast:
    """Source: the last round, from the frozen device. Ends in ``shipped`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Source: prepare the next epoch in the ledger and sign the manifests. Ends in ``sealed`` or
    ``failed``."""


@dataclass(frozen=True, slots=True)
class AnswerOwners:
    """Source: QEMU's ListQueuedOwners; False (an empty list) makes QEMU roll back."""

    yes: bool


@dataclass(frozen=True, slots=True)
class AnswerSave:
    """Source: QEMU's Save; the token, or an error that makes QEMU roll back."""

    yes: bool


@dataclass(frozen=True, slots=True)
class Thaw:
    """All functions to RUNNING_P2P, then to RUNNING (:data:`THAW_WALK`). Ends in ``thawed`` or
    ``failed``. Nothing to do for a device that runs already."""


@dataclass(frozen=True, slots=True)
class Scrub:
    """Source: zero and free what was moved away. Ends in ``scrubbed`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Destination: check the offer, make functions and staging. Ends in ``reserved``/``failed``."""


@dataclass(frozen=True, slots=True)
class AnswerHook:
    """Destination: the hook of ``migrate begin``; False aborts the migration with the reason."""

    yes: bool


@dataclass(frozen=True, slots=True)
class Verify:
    """Destination: the seal against what was received. Ends in ``verified`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class Load:
    """Destination: write the verified state to the device, read it back, validate. Ends in
    ``loaded`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class AnswerLoad:
    """Destination: QEMU's Load; an error makes both QEMUs roll back."""

    yes: bool


@dataclass(frozen=True, slots=True)
class Discard:
    """Destination: zero and free what this move brought here; a device that a QEMU still holds
    answers as one that gave up. Ends in ``discarded`` or ``failed``. Repeatable."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the operator (event, log, the waiting call of accelctl)."""

    outcome: Outcome


Action = (
    Send | Journal | SetDeadline | ClearDeadline | AskArbiter | Inspect | StartRounds | NextRound
    | Rewind | Freeze | ShipLast | Seal | AnswerOwners | AnswerSave | Thaw | Scrub | Prepare
    | AnswerHook | Verify | Load | AnswerLoad | Discard | Report
)  # fmt: skip

#: Device states that every function of the VM reaches before any goes on to the next: in the P2P
#: states a device still receives what its peers sent and starts nothing, so no message is lost.
FREEZE_WALK = ("PRE_COPY_P2P", "STOP_COPY")
THAW_WALK = ("RUNNING_P2P", "RUNNING")


@dataclass(frozen=True, slots=True)
class Move(Generic[S]):
    """The next state, and what to do on the way there."""

    next: S
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing happens. ``hint`` says what the reader can do, where there is something."""

    code: str
    message: str
    hint: str = ""


STALE = Refused(code="migration-stale", message="it comes too late: the migration has gone on")
ORDER = Refused(
    code="migration-out-of-order", message="the migration is not at the step that this belongs to"
)
NO_RETURN = Refused(
    code="migration-no-return",
    message="QEMU has handed the VM over: the migration ends by itself, here or there",
    hint="wait; virsh domjobabort still works while QEMU itself may turn back",
)
OVER = Refused(code="migration-over", message="the migration has ended")


Row = Mapping[E, Move[S] | Refused]
Table = Mapping[S, Row[E, S]]


def row(moves: Mapping[E, Move[S]], *refusals: tuple[Refused, str]) -> dict[E, Move[S] | Refused]:
    """One state's row: moves, and for each refusal the names of the events that get it.

    Raises:
        ValueError: an event is named twice (a slip of whoever wrote the table).
    """
    made: dict[E, Move[S] | Refused] = dict(moves)
    names = {event.name: event for kind in {type(event) for event in moves} for event in kind}
    for refusal, events in refusals:
        for name in events.split():
            if names[name] in made:
                raise ValueError(f"{name} is in a row twice")
            made[names[name]] = refusal
    return made
