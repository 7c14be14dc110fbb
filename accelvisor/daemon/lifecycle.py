"""The life of a function as a table: state x event -> next state, or a named refusal.

``creating`` and ``deleting`` are journal states: a daemon that finds one at its start was killed in
the middle. It rolls a creation back (nobody was told that it succeeded) and a deletion forward.

======== ================================================================================
creating resources are taken and the process is being started
ready    the process runs; no domain has the function
attached a domain's definition has it; that domain does not run
running  a running domain has it
failed   the process is gone or gave up; ``reason`` says why
deleting the process is being stopped and its files are being removed
======== ================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from accelvisor.errors import ConflictError


class State(StrEnum):
    CREATING = "creating"
    READY = "ready"
    ATTACHED = "attached"
    RUNNING = "running"
    FAILED = "failed"
    DELETING = "deleting"


#: In which it has a process that can be asked.
ALIVE = (State.READY, State.ATTACHED, State.RUNNING)


class Event(StrEnum):
    PROCESS_READY = "process-ready"  # it answers and says ready
    PROCESS_LOST = "process-lost"  # it ended, or gave up
    TAKEN = "taken"  # a domain that does not run has it in its definition
    STARTED = "started"  # a running domain has it
    RELEASED = "released"  # no domain has it any more
    RESET = "reset"  # somebody asks for a reset
    DELETE = "delete"  # somebody asks for its end
    MOVED = "moved"  # it goes on at another host, or never came from there: it ends here


@dataclass(frozen=True, slots=True)
class Refused:
    """Why an event is refused in a state: a stable code, a sentence, a hint."""

    code: str
    message: str
    hint: str = ""


_BUSY = Refused("function-busy", "it is being created", "wait until it is ready")
_GOING = Refused("function-deleting", "it is being deleted")
_IN_USE = Refused("function-in-use", "a domain has it", "detach it first, or use --force")
_LOST = Refused(
    "function-failed", "its process is not running", "accelctl function reset restarts it"
)

TABLE: Mapping[tuple[State, Event], State | Refused] = {
    (State.CREATING, Event.PROCESS_READY): State.READY,
    (State.CREATING, Event.PROCESS_LOST): State.DELETING,
    (State.CREATING, Event.TAKEN): _BUSY,
    (State.CREATING, Event.STARTED): _BUSY,
    (State.CREATING, Event.RELEASED): _BUSY,
    (State.CREATING, Event.RESET): _BUSY,
    (State.CREATING, Event.DELETE): State.DELETING,
    (State.CREATING, Event.MOVED): State.DELETING,
    (State.READY, Event.PROCESS_READY): State.READY,
    (State.READY, Event.PROCESS_LOST): State.FAILED,
    (State.READY, Event.TAKEN): State.ATTACHED,
    (State.READY, Event.STARTED): State.RUNNING,
    (State.READY, Event.RELEASED): State.READY,
    (State.READY, Event.RESET): State.READY,
    (State.READY, Event.DELETE): State.DELETING,
    (State.READY, Event.MOVED): State.DELETING,
    (State.ATTACHED, Event.PROCESS_READY): State.ATTACHED,
    (State.ATTACHED, Event.PROCESS_LOST): State.FAILED,
    (State.ATTACHED, Event.TAKEN): State.ATTACHED,
    (State.ATTACHED, Event.STARTED): State.RUNNING,
    (State.ATTACHED, Event.RELEASED): State.READY,
    (State.ATTACHED, Event.RESET): State.ATTACHED,
    (State.ATTACHED, Event.DELETE): _IN_USE,
    (State.ATTACHED, Event.MOVED): State.DELETING,
    (State.RUNNING, Event.PROCESS_READY): State.RUNNING,
    (State.RUNNING, Event.PROCESS_LOST): State.FAILED,
    (State.RUNNING, Event.TAKEN): State.ATTACHED,
    (State.RUNNING, Event.STARTED): State.RUNNING,
    (State.RUNNING, Event.RELEASED): State.READY,
    (State.RUNNING, Event.RESET): State.RUNNING,
    (State.RUNNING, Event.DELETE): _IN_USE,
    (State.RUNNING, Event.MOVED): State.DELETING,
    (State.FAILED, Event.PROCESS_READY): State.READY,
    (State.FAILED, Event.PROCESS_LOST): State.FAILED,
    (State.FAILED, Event.TAKEN): _LOST,
    (State.FAILED, Event.STARTED): _LOST,
    (State.FAILED, Event.RELEASED): State.FAILED,
    (State.FAILED, Event.RESET): State.FAILED,
    (State.FAILED, Event.DELETE): State.DELETING,
    (State.FAILED, Event.MOVED): State.DELETING,
    (State.DELETING, Event.PROCESS_READY): _GOING,
    (State.DELETING, Event.PROCESS_LOST): State.DELETING,
    (State.DELETING, Event.TAKEN): _GOING,
    (State.DELETING, Event.STARTED): _GOING,
    (State.DELETING, Event.RELEASED): State.DELETING,
    (State.DELETING, Event.RESET): _GOING,
    (State.DELETING, Event.DELETE): State.DELETING,
    (State.DELETING, Event.MOVED): State.DELETING,
}


def move(state: State, event: Event, name: str) -> State:
    """The next state.

    Raises:
        ConflictError: with the refusal's code; ``name`` is the function's, for the message.
    """
    answer = TABLE[state, event]
    if isinstance(answer, Refused):
        raise ConflictError(
            f'function "{name}": {answer.message}',
            code=answer.code,
            where=f"function:{name}",
            hint=answer.hint,
        )
    return answer
