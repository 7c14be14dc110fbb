"""Device states of VFIO migration v2 and how a device walks between them.

The table is the specification: :data:`ARCS` lists the legal arcs of <linux/vfio.h>, and
:data:`NEXT_HOP` says for each pair of states which arc comes first on the shortest legal path. A
path may start or end in a state of the saving group (STOP_COPY, PRE_COPY, PRE_COPY_P2P) but not
pass through one, for their arcs open and close data sessions; only a path from saving state to
saving state stays inside. With that rule no ties are left (the tests derive the table by search).

What the states mean. RUNNING computes; RUNNING_P2P still receives peer traffic and starts none;
STOP changes nothing; PRE_COPY and PRE_COPY_P2P are their running twins with a data session open;
STOP_COPY is STOP with the session open; RESUMING is STOP while state is loaded; ERROR is left by
reset alone. Reset is an event from every state and leads to RUNNING.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from types import MappingProxyType

from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import MigState

log = logging.getLogger(__name__)

_E, _S, _R, _SC = MigState.ERROR, MigState.STOP, MigState.RUNNING, MigState.STOP_COPY
_RE, _RP, _PC = MigState.RESUMING, MigState.RUNNING_P2P, MigState.PRE_COPY
_PP = MigState.PRE_COPY_P2P

SAVING = frozenset({_SC, _PC, _PP})

#: (from, to): every arc that a device performs in one step.
ARCS = frozenset(
    {
        (_R, _RP), (_RP, _R), (_RP, _S), (_S, _RP),
        (_S, _SC), (_SC, _S), (_S, _RE), (_RE, _S),
        (_R, _PC), (_PC, _R), (_RP, _PP), (_PP, _RP),
        (_PC, _PP), (_PP, _PC), (_PP, _SC),
    }
)  # fmt: skip

#: NEXT_HOP[state][target]: the first step towards target; None where there is no legal way.
#: ERROR can neither be asked for nor be walked out of. STOP_COPY cannot go back to pre-copy.
#: Columns: ERROR STOP RUNNING STOP_COPY RESUMING RUNNING_P2P PRE_COPY PRE_COPY_P2P
NEXT_HOP: MappingProxyType[MigState, tuple[MigState | None, ...]] = MappingProxyType(
    {
        _E:  (None, None, None, None, None, None, None, None),
        _S:  (None, _S,   _RP,  _SC,  _RE,  _RP,  _RP,  _RP),
        _R:  (None, _RP,  _R,   _RP,  _RP,  _RP,  _PC,  _RP),
        _SC: (None, _S,   _S,   _SC,  _S,   _S,   None, None),
        _RE: (None, _S,   _S,   _S,   _RE,  _S,   _S,   _S),
        _RP: (None, _S,   _R,   _S,   _S,   _RP,  _R,   _PP),
        _PC: (None, _R,   _R,   _PP,  _R,   _R,   _PC,  _PP),
        _PP: (None, _RP,  _RP,  _SC,  _RP,  _RP,  _PC,  _PP),
    }
)  # fmt: skip

Arc = Callable[[MigState, MigState], None]


def path(state: MigState, target: MigState) -> tuple[MigState, ...]:
    """The states that a request for ``target`` walks through, ``target`` last; empty when there.

    Raises:
        Refusal: EINVAL, there is no legal way.
    """
    steps: list[MigState] = []
    while state != target:
        hop = NEXT_HOP[state][target]
        if hop is None:
            raise Refusal(errno.EINVAL, f"no way from {state.name} to {target.name}")
        steps.append(hop)
        state = hop
    if state is _E:
        raise Refusal(errno.EINVAL, "ERROR cannot be asked for")
    return tuple(steps)


class MigrationMachine:
    """Walks a device through its states by calling ``arc(from, to)`` for each step.

    An arc that raises leaves the device in the state it was in before that arc: the machine asks
    ``rollback(to, from)`` to undo what was begun. When that raises too, the device is in ERROR.

    Args:
        arc: performs one legal arc; raising (Refusal or any exception) means it did not happen.
        rollback: undoes a failed arc's beginning; None where a failing arc changes nothing.
        state: RUNNING at first connect; a restarted worker passes what it had.
    """

    def __init__(
        self, arc: Arc, rollback: Arc | None = None, state: MigState = MigState.RUNNING
    ) -> None:
        self._arc = arc
        self._rollback = rollback
        self._state = state

    @property
    def state(self) -> MigState:
        return self._state

    def request(self, target: MigState) -> None:
        """Walk to ``target``; on failure stay at the last state that was reached.

        Raises:
            Refusal: EINVAL for an illegal request (nothing changed), the arc's own errno, or EIO
                when an arc failed in another way.
        """
        for step in path(self._state, target):
            self._step(step)

    def reset(self) -> None:
        """A device reset: RUNNING from every state, ERROR included. The device resets itself."""
        self._state = MigState.RUNNING

    def fail(self) -> None:
        """The device found itself broken: only :meth:`reset` leads on."""
        self._state = MigState.ERROR

    def _step(self, step: MigState) -> None:
        before = self._state
        try:
            self._arc(before, step)
        except Exception as error:
            self._undo(step, before)
            if isinstance(error, Refusal):
                raise
            log.exception("migration arc %s to %s failed", before.name, step.name)
            raise Refusal(errno.EIO, f"arc {before.name} to {step.name} failed") from error
        self._state = step

    def _undo(self, step: MigState, before: MigState) -> None:
        if self._rollback is None:
            return
        try:
            self._rollback(step, before)
        except Exception:
            log.exception("rolling back %s to %s failed", step.name, before.name)
            self._state = MigState.ERROR
