"""The source's machine: state x event -> (next state, actions) or a named refusal. Sans-IO.

=========== ========== ==========================================================================
state       device     meaning
=========== ========== ==========================================================================
start       RUNNING    nothing yet
inspecting  RUNNING    a destination asked; we look whether we can and may
offered     RUNNING    it has our offer                                              (journalled)
precopy     PRE_COPY   rounds are being sent
freezing    PRE_COPY   QEMU stopped the VM and waits in ListQueuedOwners
shipping    STOP_COPY  the last round is being sent
sealing     STOP_COPY  the ledger prepares the next epoch, the manifests are signed
sealed      STOP_COPY  the seal is on its way: from here the arbiter decides         (journalled)
confirmed   STOP_COPY  the destination verified it, QEMU may go on
handed      STOP_COPY  QEMU has the token: the point of no return of a cancel
committing  STOP_COPY  the destination asked to commit; the arbiter was asked
aborting    STOP_COPY  QEMU turned back, or somebody cancelled; the arbiter was asked
committed   STOP_COPY  the function can never run here again at this epoch           (journalled)
done        -          and was scrubbed                                              (journalled)
aborted     STOP_COPY  it is ours; it is being thawed                                (journalled)
returned    RUNNING    and runs                                                      (journalled)
refused     RUNNING    we made no offer                                              (journalled)
=========== ========== ==========================================================================

Before *sealed* nobody else can know the state that was frozen, so the source aborts on its own,
without asking anyone. From *sealed* on it thaws only after the arbiter said *aborted*. That a QEMU
is gone decides nothing: libvirt may have ended it because the destination runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from accelvisor.migration import messages as wire
from accelvisor.migration.actions import (
    NO_RETURN,
    ORDER,
    OVER,
    STALE,
    Action,
    AnswerOwners,
    AnswerSave,
    AskArbiter,
    ClearDeadline,
    Deadline,
    Decision,
    Freeze,
    Inspect,
    Journal,
    Move,
    NextRound,
    Outcome,
    Refused,
    Report,
    Rewind,
    Row,
    Scrub,
    Seal,
    Send,
    SetDeadline,
    ShipLast,
    StartRounds,
    Thaw,
    row,
)


class State(StrEnum):
    START = "start"
    INSPECTING = "inspecting"
    OFFERED = "offered"
    PRECOPY = "precopy"
    FREEZING = "freezing"
    SHIPPING = "shipping"
    SEALING = "sealing"
    SEALED = "sealed"
    CONFIRMED = "confirmed"
    HANDED = "handed"
    COMMITTING = "committing"
    ABORTING = "aborting"
    COMMITTED = "committed"
    DONE = "done"
    ABORTED = "aborted"
    RETURNED = "returned"
    REFUSED = "refused"


class Event(StrEnum):
    # Messages of the destination.
    RESERVE = "reserve"
    ACCEPT = "accept"
    ACK = "ack"
    RESUME = "resume"
    VERIFIED = "verified"
    REFUSE = "refuse"
    COMMIT = "commit"
    DISCARDED = "discarded"
    RUNNING = "running"
    # What QEMU asks and says here.
    QUIESCE = "quiesce"  # ListQueuedOwners while it saves; the VM is stopped
    SAVE = "save"
    QEMU_RESUMED = "qemu-resumed"  # the VM runs (again)
    QEMU_FAILED = "qemu-failed"  # its migration failed or was cancelled
    QEMU_GONE = "qemu-gone"
    # The operator, the timer, the link, the daemon's start (with what QEMU is doing then).
    CANCEL = "cancel"
    DEADLINE = "deadline"
    LINK_LOST = "link-lost"
    LINK_BACK = "link-back"
    RESTARTED_RUNNING = "restarted-running"
    RESTARTED_PAUSED = "restarted-paused"
    RESTARTED_GONE = "restarted-gone"
    # How actions ended.
    INSPECTED = "inspected"
    FROZEN = "frozen"
    SHIPPED = "shipped"
    SEALED = "sealed"
    THAWED = "thawed"
    SCRUBBED = "scrubbed"
    FAILED = "failed"
    ARBITER_COMMITTED = "arbiter-committed"
    ARBITER_ABORTED = "arbiter-aborted"
    ARBITER_UNREACHABLE = "arbiter-unreachable"


_S, _E = State, Event

#: The VFIO state that each function of the VM is in or on its way to; None: it is gone.
DEVICE: Mapping[State, str | None] = MappingProxyType(
    {
        _S.START: "RUNNING", _S.INSPECTING: "RUNNING", _S.OFFERED: "RUNNING",
        _S.PRECOPY: "PRE_COPY", _S.FREEZING: "STOP_COPY", _S.SHIPPING: "STOP_COPY",
        _S.SEALING: "STOP_COPY", _S.SEALED: "STOP_COPY", _S.CONFIRMED: "STOP_COPY",
        _S.HANDED: "STOP_COPY", _S.COMMITTING: "STOP_COPY", _S.ABORTING: "STOP_COPY",
        _S.COMMITTED: "STOP_COPY", _S.DONE: None, _S.ABORTED: "RUNNING",
        _S.RETURNED: "RUNNING", _S.REFUSED: "RUNNING",
    }
)  # fmt: skip

#: States that a restart can begin in.
JOURNALLED = frozenset(
    {_S.OFFERED, _S.SEALED, _S.COMMITTED, _S.DONE, _S.ABORTED, _S.RETURNED, _S.REFUSED}
)
#: From here a cancel is refused.
POINT_OF_NO_RETURN = _S.HANDED

_Row = Row[Event, State]


def _to(state: State, events: str, *actions: Action) -> dict[Event, Move[State]]:
    return {Event[name]: Move(state, actions) for name in events.split()}


def _own_abort(events: str, *actions: Action) -> dict[Event, Move[State]]:
    """Give up where nobody else can decide: the seal has not left."""
    # A timer that fired later would close the epoch which the next attempt uses by then.
    ours = (ClearDeadline(), Journal(_S.ABORTED), Thaw(), *actions, Send(wire.Abort))
    return _to(_S.ABORTED, events, *ours)


def _ask_abort(events: str, *actions: Action) -> dict[Event, Move[State]]:
    return _to(_S.ABORTING, events, *actions, AskArbiter(Decision.ABORT))


_NO_OWNERS = AnswerOwners(False)
_RETURNED = (Report(Outcome.RETURNED),)
_GIVEN_AWAY = (
    Journal(_S.COMMITTED),
    Send(wire.Committed),
    SetDeadline(Deadline.SCRUB),
)
# On disk, so that a repeated Reserve does not get an offer after all.
_REFUSE = (Journal(_S.REFUSED), Send(wire.Refuse))
_RESTARTS = "RESTARTED_RUNNING RESTARTED_PAUSED RESTARTED_GONE"
_ARBITER = "ARBITER_COMMITTED ARBITER_ABORTED ARBITER_UNREACHABLE"
_RESULTS = "INSPECTED FROZEN SHIPPED SEALED THAWED SCRUBBED"
_STOPPED_AGAIN = "QEMU_RESUMED QEMU_FAILED"

_START: _Row = row(
    {
        _E.RESERVE: Move(_S.INSPECTING, (Inspect(),)),
        **_to(_S.START, "QUIESCE", _NO_OWNERS),
        **_to(_S.START, "SAVE", AnswerSave(False)),
        **_to(_S.START, f"LINK_LOST LINK_BACK QEMU_GONE {_STOPPED_AGAIN}"),
    },
    (ORDER, "ACCEPT ACK RESUME VERIFIED REFUSE COMMIT DISCARDED RUNNING CANCEL"),
    (STALE, f"DEADLINE {_RESULTS} FAILED {_ARBITER} {_RESTARTS}"),
)

_INSPECTING: _Row = row(
    {
        _E.INSPECTED: Move(
            _S.OFFERED,
            (Journal(_S.OFFERED), Send(wire.Offer), SetDeadline(Deadline.PROGRESS)),
        ),
        **_to(_S.REFUSED, "FAILED CANCEL QEMU_GONE QEMU_FAILED", *_REFUSE),
        **_to(_S.REFUSED, "QUIESCE", _NO_OWNERS, *_REFUSE),
        **_to(_S.REFUSED, "LINK_LOST REFUSE DISCARDED", Journal(_S.REFUSED)),
        **_to(_S.INSPECTING, "RESERVE LINK_BACK QEMU_RESUMED"),
        **_to(_S.INSPECTING, "SAVE", AnswerSave(False)),
    },
    (ORDER, "ACCEPT ACK RESUME VERIFIED COMMIT RUNNING"),
    (STALE, f"DEADLINE FROZEN SHIPPED SEALED THAWED SCRUBBED {_ARBITER} {_RESTARTS}"),
)

_OFFERED: _Row = row(
    {
        _E.ACCEPT: Move(_S.PRECOPY, (StartRounds(), SetDeadline(Deadline.PROGRESS))),
        **_to(_S.OFFERED, "RESERVE LINK_BACK", Send(wire.Offer)),
        **_to(_S.OFFERED, "LINK_LOST QEMU_RESUMED"),
        **_to(_S.OFFERED, "SAVE", AnswerSave(False)),
        **_own_abort("REFUSE DISCARDED CANCEL DEADLINE FAILED QEMU_FAILED QEMU_GONE", *_RETURNED),
        **_own_abort("QUIESCE", _NO_OWNERS, *_RETURNED),
        # The device may have come as far as *sealing* before the daemon ended: the seal has not
        # left, but the ledger may have been prepared.
        **_own_abort(_RESTARTS, *_RETURNED, AskArbiter(Decision.ABORT)),
    },
    (ORDER, "ACK RESUME VERIFIED COMMIT RUNNING"),
    (STALE, f"{_RESULTS} {_ARBITER}"),
)

_PRECOPY: _Row = row(
    {
        _E.ACK: Move(_S.PRECOPY, (NextRound(), SetDeadline(Deadline.PROGRESS))),
        _E.RESUME: Move(_S.PRECOPY, (Rewind(), SetDeadline(Deadline.PROGRESS))),
        _E.LINK_LOST: Move(_S.PRECOPY, (SetDeadline(Deadline.LINK),)),
        _E.QUIESCE: Move(_S.FREEZING, (Freeze(), SetDeadline(Deadline.QUIESCE))),
        **_to(_S.PRECOPY, "RESERVE", Send(wire.Offer)),
        # A VM may be suspended and resumed while its memory is copied.
        **_to(_S.PRECOPY, "ACCEPT LINK_BACK QEMU_RESUMED"),
        **_to(_S.PRECOPY, "SAVE", AnswerSave(False)),
        **_own_abort("REFUSE DISCARDED CANCEL DEADLINE FAILED QEMU_FAILED QEMU_GONE", *_RETURNED),
    },
    (ORDER, "VERIFIED COMMIT RUNNING"),
    (STALE, f"{_RESULTS} {_ARBITER} {_RESTARTS}"),
)


def _stopped(state: State, going_on: Mapping[Event, Move[State]], *undo: Action) -> _Row:
    """QEMU waits in ListQueuedOwners and the seal has not left."""
    back = (_NO_OWNERS, *undo, *_RETURNED)
    every = {
        **_to(state, "ACCEPT ACK LINK_LOST LINK_BACK QUIESCE"),
        **_to(state, "SAVE", AnswerSave(False)),
        **_own_abort(
            "REFUSE DISCARDED CANCEL DEADLINE FAILED QEMU_RESUMED QEMU_FAILED QEMU_GONE", *back
        ),
        Event.RESUME: Move(state, (Rewind(),)),
        **going_on,
    }
    done = " ".join(name for name in _RESULTS.split() if _E[name] not in going_on)
    return row(
        every,
        (ORDER, "RESERVE VERIFIED COMMIT RUNNING"),
        (STALE, f"{done} {_ARBITER} {_RESTARTS}"),
    )


_FREEZING = _stopped(_S.FREEZING, {_E.FROZEN: Move(_S.SHIPPING, (ShipLast(),))})
_SHIPPING = _stopped(_S.SHIPPING, {_E.SHIPPED: Move(_S.SEALING, (Seal(),))})
_SEALING = _stopped(
    _S.SEALING,
    {_E.SEALED: Move(_S.SEALED, (Journal(_S.SEALED), Send(wire.Sealed)))},
    AskArbiter(Decision.ABORT),
)

_SEALED: _Row = row(
    {
        _E.VERIFIED: Move(_S.CONFIRMED, (AnswerOwners(True), ClearDeadline())),
        **_to(_S.SEALED, "LINK_BACK RESUME", Send(wire.Sealed)),
        **_to(_S.SEALED, "ACK LINK_LOST QUIESCE"),
        **_to(_S.SEALED, "SAVE", AnswerSave(False)),
        **_ask_abort(
            f"REFUSE DISCARDED CANCEL DEADLINE FAILED QEMU_GONE {_STOPPED_AGAIN}", _NO_OWNERS
        ),
        # After a restart nobody knows how far QEMU came: it may have the token.
        **_to(_S.HANDED, "RESTARTED_PAUSED RESTARTED_GONE"),
        **_ask_abort("RESTARTED_RUNNING"),
    },
    (ORDER, "RESERVE ACCEPT COMMIT RUNNING"),
    (STALE, f"{_RESULTS} {_ARBITER}"),
)

_CONFIRMED: _Row = row(
    {
        _E.SAVE: Move(_S.HANDED, (AnswerSave(True),)),
        **_to(_S.CONFIRMED, "QUIESCE", AnswerOwners(True)),
        **_to(_S.CONFIRMED, "VERIFIED ACK RESUME LINK_LOST LINK_BACK"),
        **_ask_abort(f"REFUSE DISCARDED CANCEL FAILED QEMU_GONE {_STOPPED_AGAIN}"),
    },
    # It cannot have the token: a destination that asks now is not to be trusted.
    (ORDER, "RESERVE ACCEPT COMMIT RUNNING"),
    (STALE, f"DEADLINE {_RESULTS} {_ARBITER} {_RESTARTS}"),
)

_HANDED: _Row = row(
    {
        # Where etcd is the arbiter, a destination may have committed before we hear of it.
        **_to(_S.COMMITTING, "COMMIT RUNNING", AskArbiter(Decision.COMMIT)),
        **_to(_S.HANDED, "SAVE", AnswerSave(True)),
        **_to(_S.HANDED, "QUIESCE", _NO_OWNERS),
        **_to(_S.HANDED, "VERIFIED ACK RESUME LINK_LOST LINK_BACK QEMU_GONE"),
        **_ask_abort(f"REFUSE DISCARDED {_STOPPED_AGAIN}"),
    },
    (NO_RETURN, "CANCEL"),
    (ORDER, "RESERVE ACCEPT"),
    (STALE, f"DEADLINE FAILED {_RESULTS} {_ARBITER} {_RESTARTS}"),
)

_COMMITTING: _Row = row(
    {
        _E.ARBITER_COMMITTED: Move(_S.COMMITTED, _GIVEN_AWAY),
        _E.ARBITER_ABORTED: Move(
            _S.ABORTED, (Journal(_S.ABORTED), Thaw(), *_RETURNED, Send(wire.Aborted))
        ),
        # The destination asks again.
        _E.ARBITER_UNREACHABLE: Move(_S.HANDED),
        **_to(_S.COMMITTING, "QUIESCE", _NO_OWNERS),
        **_to(_S.COMMITTING, "SAVE", AnswerSave(False)),
        **_to(
            _S.COMMITTING, "COMMIT RUNNING VERIFIED ACK RESUME LINK_LOST LINK_BACK QEMU_GONE"
        ),
        **_ask_abort(f"REFUSE DISCARDED {_STOPPED_AGAIN}"),
    },
    (NO_RETURN, "CANCEL"),
    (ORDER, "RESERVE ACCEPT"),
    (STALE, f"DEADLINE FAILED {_RESULTS} {_RESTARTS}"),
)

_ABORTING: _Row = row(
    {
        _E.ARBITER_ABORTED: Move(
            _S.ABORTED, (Journal(_S.ABORTED), Thaw(), *_RETURNED, Send(wire.Abort))
        ),
        _E.ARBITER_COMMITTED: Move(_S.COMMITTED, _GIVEN_AWAY),
        _E.ARBITER_UNREACHABLE: Move(_S.ABORTING, (SetDeadline(Deadline.RETRY),)),
        _E.DEADLINE: Move(_S.ABORTING, (AskArbiter(Decision.ABORT),)),
        **_to(_S.ABORTING, "QUIESCE", _NO_OWNERS),
        **_to(_S.ABORTING, "SAVE", AnswerSave(False)),
        **_to(
            _S.ABORTING,
            "COMMIT RUNNING VERIFIED ACK RESUME REFUSE DISCARDED LINK_LOST LINK_BACK CANCEL"
            f" QEMU_GONE {_STOPPED_AGAIN}",
        ),
    },
    (ORDER, "RESERVE ACCEPT"),
    (STALE, f"FAILED {_RESULTS} {_RESTARTS}"),
)

_COMMITTED: _Row = row(
    {
        **_to(_S.COMMITTED, "COMMIT LINK_BACK", Send(wire.Committed)),
        # It has the function, or had it and its VM ended: nobody will ask for it again.
        **_to(_S.COMMITTED, "RUNNING DISCARDED DEADLINE", Scrub()),
        **_to(_S.COMMITTED, f"FAILED {_RESTARTS}", SetDeadline(Deadline.SCRUB)),
        **_to(_S.COMMITTED, "QUIESCE", _NO_OWNERS),
        **_to(_S.COMMITTED, "SAVE", AnswerSave(False)),
        **_to(_S.COMMITTED, "VERIFIED ACK RESUME LINK_LOST QEMU_GONE QEMU_FAILED"),
        **_to(_S.COMMITTED, "QEMU_RESUMED", Report(Outcome.FENCED)),
        _E.SCRUBBED: Move(_S.DONE, (Journal(_S.DONE), Report(Outcome.MOVED))),
    },
    (NO_RETURN, "CANCEL"),
    (ORDER, "RESERVE ACCEPT REFUSE"),
    (STALE, f"INSPECTED FROZEN SHIPPED SEALED THAWED {_ARBITER}"),
)

_DONE: _Row = row(
    {
        **_to(_S.DONE, "COMMIT LINK_BACK", Send(wire.Committed)),
        **_to(_S.DONE, "QUIESCE", _NO_OWNERS),
        **_to(_S.DONE, "SAVE", AnswerSave(False)),
        **_to(
            _S.DONE,
            f"RUNNING DISCARDED VERIFIED ACK RESUME LINK_LOST QEMU_GONE QEMU_FAILED {_RESTARTS}",
        ),
        **_to(_S.DONE, "QEMU_RESUMED", Report(Outcome.FENCED)),
    },
    (OVER, "CANCEL RESERVE ACCEPT REFUSE"),
    (STALE, f"DEADLINE {_RESULTS} FAILED {_ARBITER}"),
)

# A ledger that says *committed* although the seal never left: the destination took what it was
# not given. The ledger decides, so that no third host sees two owners.
_ROBBED = Move(_S.COMMITTED, (Journal(_S.COMMITTED), Freeze(), Report(Outcome.FENCED)))


def _ours(state: State, further: Mapping[Event, Move[State]], stale: str) -> _Row:
    return row(
        {
            **_to(state, "COMMIT", Send(wire.Aborted)),
            **_to(state, "LINK_BACK ACCEPT RESUME VERIFIED ACK", Send(wire.Abort)),
            **_to(state, "QUIESCE", _NO_OWNERS),
            **_to(state, "SAVE", AnswerSave(False)),
            # The ledger learns of it when it can; until then the epoch stays unused.
            **_to(state, "ARBITER_UNREACHABLE", SetDeadline(Deadline.RETRY)),
            **_to(
                state, f"REFUSE DISCARDED LINK_LOST QEMU_GONE ARBITER_ABORTED {_STOPPED_AGAIN}"
            ),
            _E.ARBITER_COMMITTED: _ROBBED,
            **further,
        },
        (OVER, "CANCEL RESERVE RUNNING"),
        (STALE, stale),
    )


_ABORTED = _ours(
    _S.ABORTED,
    {
        _E.THAWED: Move(_S.RETURNED, (Journal(_S.RETURNED),)),
        **_to(_S.ABORTED, "FAILED", SetDeadline(Deadline.RETRY)),
        **_to(_S.ABORTED, f"DEADLINE {_RESTARTS}", Thaw(), AskArbiter(Decision.ABORT)),
    },
    "INSPECTED FROZEN SHIPPED SEALED SCRUBBED",
)
_RETURNED_ROW = _ours(
    _S.RETURNED,
    # Asking again harms nothing and closes an epoch that a restart left prepared.
    _to(_S.RETURNED, f"DEADLINE {_RESTARTS}", AskArbiter(Decision.ABORT)),
    f"{_RESULTS} FAILED",
)

_REFUSED: _Row = row(
    {
        **_to(_S.REFUSED, "RESERVE ACCEPT", Send(wire.Refuse)),
        **_to(_S.REFUSED, "QUIESCE", _NO_OWNERS),
        **_to(_S.REFUSED, "SAVE", AnswerSave(False)),
        **_to(
            _S.REFUSED,
            f"DISCARDED REFUSE LINK_LOST LINK_BACK QEMU_GONE {_STOPPED_AGAIN} {_RESTARTS}",
        ),
    },
    (OVER, "ACK RESUME VERIFIED COMMIT RUNNING CANCEL"),
    (STALE, f"DEADLINE {_RESULTS} FAILED {_ARBITER}"),
)

TABLE: Mapping[State, _Row] = MappingProxyType(
    {
        _S.START: _START, _S.INSPECTING: _INSPECTING, _S.OFFERED: _OFFERED,
        _S.PRECOPY: _PRECOPY, _S.FREEZING: _FREEZING, _S.SHIPPING: _SHIPPING,
        _S.SEALING: _SEALING, _S.SEALED: _SEALED, _S.CONFIRMED: _CONFIRMED, _S.HANDED: _HANDED,
        _S.COMMITTING: _COMMITTING, _S.ABORTING: _ABORTING, _S.COMMITTED: _COMMITTED,
        _S.DONE: _DONE, _S.ABORTED: _ABORTED, _S.RETURNED: _RETURNED_ROW, _S.REFUSED: _REFUSED,
    }
)  # fmt: skip


def answer(state: State, event: Event) -> Move[State] | Refused:
    """What to do. A refusal changes nothing and is told to whoever caused the event."""
    return TABLE[state][event]

