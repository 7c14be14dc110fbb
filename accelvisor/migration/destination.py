"""The destination's machine: state x event -> (next state, actions) or a named refusal. Sans-IO.

========== ======== ============================================================================
state      device   meaning
========== ======== ============================================================================
start      -        nothing yet
reserving  -        the hook asked; the source was asked for an offer                (journalled)
preparing  -        functions and staging are being made
receiving  RESUMING rounds come in                                                   (journalled)
verifying  RESUMING the seal has come and is being checked against them
verified   RESUMING it fits: the source was told                                     (journalled)
loading    RESUMING QEMU waits in Load; the device is written, read back, validated
loaded     STOP     Load was answered: the VM may resume here                        (journalled)
committing STOP     it did; the arbiter was asked
committed  STOP     the function is ours, for good; it is being thawed               (journalled)
running    RUNNING  and computes                                                     (journalled)
discarded  STOP     this move can never end here; what it brought is being dropped   (journalled)
closed     -        and was dropped                                                  (journalled)
fenced     STOP     as discarded, but a VM runs here without its function            (journalled)
========== ======== ============================================================================

Up to *loaded* the destination may give up on its own: it cannot have asked the arbiter yet. From
*committing* on it gives up when the arbiter says so, or when its QEMU is gone. It thaws after the
commit was recorded, never on anybody's word but the arbiter's.
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
    AnswerHook,
    AnswerLoad,
    AskArbiter,
    ClearDeadline,
    Deadline,
    Decision,
    Discard,
    Journal,
    Load,
    Move,
    Outcome,
    Prepare,
    Refused,
    Report,
    Row,
    Send,
    SetDeadline,
    Thaw,
    Verify,
    row,
)


class State(StrEnum):
    START = "start"
    RESERVING = "reserving"
    PREPARING = "preparing"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    VERIFIED = "verified"
    LOADING = "loading"
    LOADED = "loaded"
    COMMITTING = "committing"
    COMMITTED = "committed"
    RUNNING = "running"
    DISCARDED = "discarded"
    CLOSED = "closed"
    FENCED = "fenced"


class Event(StrEnum):
    # Messages of the source. Its Committed and Aborted are the arbiter's answers where its ledger
    # is the arbiter, and only a reason to ask (NUDGE) where etcd is.
    OFFER = "offer"
    REFUSE = "refuse"
    ROUND = "round"
    SEALED = "sealed"
    ABORT = "abort"
    NUDGE = "nudge"
    # What the hook and QEMU ask and say here.
    BEGIN = "begin"
    LOAD = "load"
    BAD_LOAD = "bad-load"  # the token is not the verified seal's
    QEMU_RESUMED = "qemu-resumed"
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
    RESERVED = "reserved"
    VERIFIED = "verified"
    LOADED = "loaded"
    THAWED = "thawed"
    DISCARDED = "discarded"
    FAILED = "failed"
    ARBITER_COMMITTED = "arbiter-committed"
    ARBITER_ABORTED = "arbiter-aborted"
    ARBITER_UNREACHABLE = "arbiter-unreachable"


_S, _E = State, Event

#: The VFIO state that each function of the VM is in or on its way to; None: it is not there.
DEVICE: Mapping[State, str | None] = MappingProxyType(
    {
        _S.START: None, _S.RESERVING: None, _S.PREPARING: None, _S.RECEIVING: "RESUMING",
        _S.VERIFYING: "RESUMING", _S.VERIFIED: "RESUMING", _S.LOADING: "RESUMING",
        _S.LOADED: "STOP", _S.COMMITTING: "STOP", _S.COMMITTED: "RUNNING",
        _S.RUNNING: "RUNNING", _S.DISCARDED: "STOP", _S.CLOSED: None, _S.FENCED: "STOP",
    }
)  # fmt: skip

#: States that a restart can begin in.
JOURNALLED = frozenset(
    {
        _S.RESERVING, _S.RECEIVING, _S.VERIFIED, _S.LOADED, _S.COMMITTED, _S.RUNNING,
        _S.DISCARDED, _S.CLOSED, _S.FENCED,
    }
)  # fmt: skip
#: From here a cancel is refused: QEMU has handed the VM over.
POINT_OF_NO_RETURN = _S.LOADING

_Row = Row[Event, State]


def _to(state: State, events: str, *actions: Action) -> dict[Event, Move[State]]:
    return {Event[name]: Move(state, actions) for name in events.split()}


def _drop(
    events: str, *answers: Action, tell: type[wire.Message] = wire.Discarded
) -> dict[Event, Move[State]]:
    """Give up for good. ``answers``: who waits here, and is told no."""
    return _to(_S.DISCARDED, events, Journal(_S.DISCARDED), *answers, Discard(), Send(tell))


def _fence(events: str) -> dict[Event, Move[State]]:
    """A VM runs here, and its function will not."""
    report = Report(Outcome.FENCED)
    return _to(
        _S.FENCED, events, Journal(_S.FENCED), Discard(), Send(wire.Discarded), report
    )


_NO_HOOK = AnswerHook(False)
_NO_LOAD = AnswerLoad(False)
_RESTARTS = "RESTARTED_RUNNING RESTARTED_PAUSED RESTARTED_GONE"
_ARBITER = "ARBITER_COMMITTED ARBITER_ABORTED ARBITER_UNREACHABLE"
_RESULTS = "RESERVED VERIFIED LOADED THAWED DISCARDED"
_ASK = (AskArbiter(Decision.COMMIT), SetDeadline(Deadline.RETRY))
_OWN = (Journal(_S.COMMITTED), ClearDeadline(), Thaw())

_START: _Row = row(
    {
        _E.BEGIN: Move(
            _S.RESERVING,
            (Journal(_S.RESERVING), Send(wire.Reserve), SetDeadline(Deadline.RESERVE)),
        ),
        **_to(_S.START, "LOAD BAD_LOAD", _NO_LOAD),
        **_to(_S.START, "QEMU_RESUMED QEMU_GONE LINK_LOST LINK_BACK"),
    },
    (ORDER, "OFFER REFUSE ROUND SEALED ABORT NUDGE CANCEL"),
    (STALE, f"DEADLINE FAILED {_RESULTS} {_ARBITER} {_RESTARTS}"),
)

_RESERVING: _Row = row(
    {
        # A function's process starts within its own deadline, which is longer than an offer's.
        _E.OFFER: Move(_S.PREPARING, (SetDeadline(Deadline.PROGRESS), Prepare())),
        **_to(_S.RESERVING, "BEGIN"),
        **_to(_S.RESERVING, "LINK_BACK", Send(wire.Reserve)),
        **_to(_S.RESERVING, "LINK_LOST"),
        # FAILED: no connection could be made.
        **_drop("REFUSE ABORT CANCEL DEADLINE FAILED QEMU_GONE", _NO_HOOK),
        **_drop("LOAD BAD_LOAD", _NO_HOOK, _NO_LOAD),
        **_drop(_RESTARTS),
        **_fence("QEMU_RESUMED"),
    },
    (ORDER, "ROUND SEALED NUDGE"),
    (STALE, f"{_RESULTS} {_ARBITER}"),
)

_PREPARING: _Row = row(
    {
        _E.RESERVED: Move(
            _S.RECEIVING,
            (
                Journal(_S.RECEIVING),
                AnswerHook(True),
                Send(wire.Accept),
                SetDeadline(Deadline.PROGRESS),
            ),
        ),
        **_to(_S.PREPARING, "OFFER BEGIN LINK_LOST LINK_BACK"),
        **_drop("REFUSE ABORT CANCEL DEADLINE QEMU_GONE", _NO_HOOK),
        **_drop("FAILED", _NO_HOOK, tell=wire.Refuse),
        **_drop("LOAD BAD_LOAD", _NO_HOOK, _NO_LOAD),
        **_fence("QEMU_RESUMED"),
    },
    (ORDER, "ROUND SEALED NUDGE"),
    (STALE, f"VERIFIED LOADED THAWED DISCARDED {_ARBITER} {_RESTARTS}"),
)

_RECEIVING: _Row = row(
    {
        _E.ROUND: Move(_S.RECEIVING, (Send(wire.Ack), SetDeadline(Deadline.PROGRESS))),
        _E.SEALED: Move(_S.VERIFYING, (Verify(), SetDeadline(Deadline.LOAD))),
        _E.LINK_LOST: Move(_S.RECEIVING, (SetDeadline(Deadline.LINK),)),
        _E.LINK_BACK: Move(_S.RECEIVING, (Send(wire.Resume), SetDeadline(Deadline.PROGRESS))),
        **_to(_S.RECEIVING, "OFFER", Send(wire.Accept)),
        **_to(_S.RECEIVING, "BEGIN", AnswerHook(True)),
        **_drop(f"REFUSE ABORT CANCEL DEADLINE QEMU_GONE {_RESTARTS}"),
        # A chunk that was not what it said.
        **_drop("FAILED", tell=wire.Refuse),
        **_drop("LOAD BAD_LOAD", _NO_LOAD),
        **_fence("QEMU_RESUMED"),
    },
    (ORDER, "NUDGE"),
    (STALE, f"{_RESULTS} {_ARBITER}"),
)

_VERIFYING: _Row = row(
    {
        _E.VERIFIED: Move(
            _S.VERIFIED,
            (Journal(_S.VERIFIED), Send(wire.Verified), SetDeadline(Deadline.PROGRESS)),
        ),
        **_to(_S.VERIFYING, "SEALED OFFER ROUND LINK_LOST LINK_BACK"),
        **_drop("REFUSE ABORT CANCEL DEADLINE QEMU_GONE"),
        **_drop("FAILED", tell=wire.Refuse),
        **_drop("LOAD BAD_LOAD", _NO_LOAD),
        **_fence("QEMU_RESUMED"),
    },
    (ORDER, "NUDGE BEGIN"),
    (STALE, f"RESERVED LOADED THAWED DISCARDED {_ARBITER} {_RESTARTS}"),
)

_VERIFIED: _Row = row(
    {
        _E.LOAD: Move(_S.LOADING, (Load(), SetDeadline(Deadline.LOAD))),
        **_to(_S.VERIFIED, "SEALED LINK_BACK", Send(wire.Verified)),
        **_to(_S.VERIFIED, "OFFER ROUND LINK_LOST"),
        # What was received lies in the daemon's memory: a restart loses it.
        **_drop(f"REFUSE ABORT CANCEL DEADLINE QEMU_GONE FAILED {_RESTARTS}"),
        **_drop("BAD_LOAD", _NO_LOAD),
        **_fence("QEMU_RESUMED"),
    },
    (ORDER, "NUDGE BEGIN"),
    (STALE, f"{_RESULTS} {_ARBITER}"),
)

_LOADING: _Row = row(
    {
        _E.LOADED: Move(
            _S.LOADED, (Journal(_S.LOADED), ClearDeadline(), AnswerLoad(True))
        ),
        **_to(_S.LOADING, "LOAD SEALED OFFER ROUND LINK_LOST LINK_BACK"),
        **_drop("REFUSE ABORT DEADLINE QEMU_GONE FAILED BAD_LOAD", _NO_LOAD),
        **_fence("QEMU_RESUMED"),
    },
    (NO_RETURN, "CANCEL"),
    (ORDER, "NUDGE BEGIN"),
    (STALE, f"RESERVED VERIFIED THAWED DISCARDED {_ARBITER} {_RESTARTS}"),
)

_LOADED: _Row = row(
    {
        **_to(_S.COMMITTING, "QEMU_RESUMED RESTARTED_RUNNING", *_ASK),
        **_to(_S.LOADED, "LOAD", AnswerLoad(True)),
        **_to(_S.LOADED, "SEALED OFFER ROUND LINK_LOST LINK_BACK NUDGE RESTARTED_PAUSED"),
        # We asked before a restart, and the VM was paused since.
        _E.ARBITER_COMMITTED: Move(_S.COMMITTED, _OWN),
        **_drop("ABORT ARBITER_ABORTED QEMU_GONE RESTARTED_GONE"),
        **_drop("BAD_LOAD", _NO_LOAD),
    },
    (NO_RETURN, "CANCEL"),
    # A source refuses before it sends anything; here it would be a message from long ago.
    (ORDER, "BEGIN REFUSE"),
    (STALE, f"DEADLINE FAILED ARBITER_UNREACHABLE {_RESULTS}"),
)

_COMMITTING: _Row = row(
    {
        _E.ARBITER_COMMITTED: Move(_S.COMMITTED, _OWN),
        # The source's word that it turned back is a reason to ask, not an answer.
        **_to(_S.COMMITTING, "DEADLINE LINK_BACK NUDGE ABORT REFUSE", *_ASK),
        **_to(_S.COMMITTING, "ARBITER_UNREACHABLE", SetDeadline(Deadline.RETRY)),
        **_to(_S.COMMITTING, "QEMU_RESUMED SEALED OFFER ROUND LINK_LOST"),
        **_to(_S.COMMITTING, "LOAD BAD_LOAD", _NO_LOAD),
        **_fence("ARBITER_ABORTED"),
        # The VM ended before it had its function: the source need not wait for it.
        **_drop("QEMU_GONE"),
    },
    (NO_RETURN, "CANCEL"),
    (ORDER, "BEGIN"),
    (STALE, f"FAILED {_RESULTS} {_RESTARTS}"),
)

_COMMITTED: _Row = row(
    {
        _E.THAWED: Move(
            _S.RUNNING, (Journal(_S.RUNNING), Send(wire.Running), Report(Outcome.MOVED))
        ),
        **_to(_S.COMMITTED, "FAILED", SetDeadline(Deadline.RETRY)),
        **_to(_S.COMMITTED, f"DEADLINE {_RESTARTS}", Thaw()),
        **_to(_S.COMMITTED, "LOAD BAD_LOAD", _NO_LOAD),
        **_to(
            _S.COMMITTED,
            "ARBITER_COMMITTED NUDGE QEMU_RESUMED QEMU_GONE SEALED OFFER ROUND"
            " LINK_LOST LINK_BACK",
        ),
    },
    (NO_RETURN, "CANCEL"),
    # A source that aborts what it committed contradicts its own signed record.
    (ORDER, "BEGIN ABORT REFUSE"),
    (STALE, "RESERVED VERIFIED LOADED DISCARDED ARBITER_ABORTED ARBITER_UNREACHABLE"),
)

_RUNNING: _Row = row(
    {
        **_to(
            _S.RUNNING, f"ARBITER_COMMITTED NUDGE LINK_BACK {_RESTARTS}", Send(wire.Running)
        ),
        **_to(_S.RUNNING, "LOAD BAD_LOAD", _NO_LOAD),
        **_to(_S.RUNNING, "QEMU_RESUMED QEMU_GONE SEALED OFFER ROUND LINK_LOST"),
    },
    (OVER, "CANCEL BEGIN"),
    (ORDER, "ABORT REFUSE"),
    (STALE, f"DEADLINE FAILED {_RESULTS} ARBITER_ABORTED ARBITER_UNREACHABLE"),
)


def _dropped(state: State, further: Mapping[Event, Move[State]], stale: str) -> _Row:
    return row(
        {
            **_to(
                state,
                "LINK_BACK OFFER ROUND SEALED NUDGE ARBITER_COMMITTED",
                Send(wire.Discarded),
            ),
            **_to(state, "LOAD BAD_LOAD", _NO_LOAD),
            **_to(state, "BEGIN", _NO_HOOK),
            **_to(state, "ABORT REFUSE LINK_LOST ARBITER_ABORTED ARBITER_UNREACHABLE"),
            **further,
        },
        (OVER, "CANCEL"),
        (STALE, stale),
    )


_DISCARDED = _dropped(
    _S.DISCARDED,
    {
        _E.DISCARDED: Move(_S.CLOSED, (Journal(_S.CLOSED),)),
        **_to(_S.DISCARDED, "FAILED", SetDeadline(Deadline.RETRY)),
        **_to(_S.DISCARDED, "DEADLINE", Discard()),
        **_to(_S.DISCARDED, "RESTARTED_PAUSED RESTARTED_GONE", Discard(), Send(wire.Discarded)),
        **_to(_S.DISCARDED, "QEMU_GONE"),
        **_fence("QEMU_RESUMED RESTARTED_RUNNING"),
    },
    "RESERVED VERIFIED LOADED THAWED",
)
_CLOSED = _dropped(
    _S.CLOSED,
    {
        **_to(_S.CLOSED, "QEMU_GONE RESTARTED_PAUSED RESTARTED_GONE"),
        **_to(
            _S.FENCED,
            "QEMU_RESUMED RESTARTED_RUNNING",
            Journal(_S.FENCED),
            Report(Outcome.FENCED),
        ),
    },
    f"DEADLINE FAILED {_RESULTS}",
)
_FENCED = _dropped(
    _S.FENCED,
    {
        **_to(_S.FENCED, "QEMU_RESUMED DISCARDED"),
        **_to(_S.FENCED, "FAILED", SetDeadline(Deadline.RETRY)),
        **_to(_S.FENCED, "DEADLINE RESTARTED_RUNNING RESTARTED_PAUSED", Discard()),
        **_to(_S.DISCARDED, "QEMU_GONE RESTARTED_GONE", Journal(_S.DISCARDED), Discard()),
    },
    "RESERVED VERIFIED LOADED THAWED",
)

TABLE: Mapping[State, _Row] = MappingProxyType(
    {
        _S.START: _START, _S.RESERVING: _RESERVING, _S.PREPARING: _PREPARING,
        _S.RECEIVING: _RECEIVING, _S.VERIFYING: _VERIFYING, _S.VERIFIED: _VERIFIED,
        _S.LOADING: _LOADING, _S.LOADED: _LOADED, _S.COMMITTING: _COMMITTING,
        _S.COMMITTED: _COMMITTED, _S.RUNNING: _RUNNING, _S.DISCARDED: _DISCARDED,
        _S.CLOSED: _CLOSED, _S.FENCED: _FENCED,
    }
)  # fmt: skip


def answer(state: State, event: Event) -> Move[State] | Refused:
    """What to do. A refusal changes nothing and is told to whoever caused the event."""
    return TABLE[state][event]
