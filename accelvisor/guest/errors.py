"""What a guest program can be told, as branches of the one error tree.

    CallerError
    └── CommandRefused     the device refused one command; nothing changed, the context goes on
    DataError
    └── ProgramError
        └── ProgramRefused     an uploaded program, or what it was bound to, failed validation
    HostError
    ├── CapacityError
    │   └── DeviceFull     no device memory, object slot or context is left
    ├── DeadlineError
    │   ├── CommandTimeout     no completion within the deadline
    │   └── DeviceInTransition the device did not come back from a migration or reset in time
    ├── DeviceFault        the context was stopped; open a new one
    │   └── DeviceRevoked  the host took the function's resources away: no command is carried out
    ├── DeviceReset        the function was reset: contexts, tensors and programs are gone
    ├── DeviceBroken       the function's process gave up: no command will complete
    └── DeviceQuarantined  it faulted again and again: commands wait until the host has looked

An error that stems from a completion carries its ``status`` (CommandStatus), and its code is
``device-`` and the status name in kebab case, for example ``device-bad-address``.
"""

from __future__ import annotations

from accelvisor.abi.commands import Completion, Opcode
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import (
    AccelvisorError,
    CallerError,
    CapacityError,
    DeadlineError,
    HostError,
    ProgramError,
    ProtocolError,
)


class CommandRefused(CallerError):  # noqa: N818 - reads as the condition it reports
    """The device refused one command; nothing was changed and the context goes on."""

    code = "device-refused"
    status: int = 0


class ProgramRefused(ProgramError):  # noqa: N818
    """The device found an uploaded program, or the tensors it was bound to, invalid."""

    code = "device-program-invalid"
    status: int = 0


class DeviceFull(CapacityError):  # noqa: N818
    """No device memory, object slot or context is left."""

    code = "device-out-of-memory"
    status: int = 0


class DeviceFault(HostError):  # noqa: N818
    """The context was stopped. Its tensors and programs are gone: ``Function.restart()``."""

    code = "device-fault"
    status: int = 0


class DeviceReset(HostError):  # noqa: N818
    """The function was reset: contexts, tensors and programs of before are gone."""

    code = "device-reset"


class DeviceBroken(HostError):  # noqa: N818
    """The function's process gave up: no command will complete any more."""

    code = "device-broken"


class DeviceRevoked(DeviceFault):
    """The host took the function's cores and memory away: no command is carried out any more."""

    code = "device-revoked"


class DeviceQuarantined(HostError):  # noqa: N818
    """The function faulted again and again, and stands still until somebody resets it from the
    host. What was submitted waits.
    """

    code = "device-quarantined"


class CommandTimeout(DeadlineError):  # noqa: N818
    """No completion came within the deadline; the command may still run."""

    code = "command-timeout"


class DeviceInTransition(DeadlineError):  # noqa: N818
    """The device reads as absent (0 or all-ones) and did not come back within the deadline."""

    code = "device-in-transition"


_FULL = frozenset(
    {
        CommandStatus.OUT_OF_MEMORY,
        CommandStatus.TOO_MANY_OBJECTS,
        CommandStatus.TOO_MANY_CONTEXTS,
        CommandStatus.LIMIT,
    }
)
_PROGRAM = frozenset({CommandStatus.PROGRAM_INVALID, CommandStatus.BINDING_MISMATCH})

_HINTS = {
    CommandStatus.NO_CONTEXT: "open the function again",
    CommandStatus.TOO_MANY_CONTEXTS: "close another process that uses this function",
    CommandStatus.OUT_OF_MEMORY: "close tensors that are no longer needed",
    CommandStatus.TOO_MANY_OBJECTS: "close tensors and programs that are no longer needed",
    CommandStatus.BAD_HANDLE: "the tensor or program was closed, or belongs to another context",
    CommandStatus.BINDING_MISMATCH: "give each argument the dtype and shape the program declares",
    CommandStatus.IN_USE: "wait for the launches that use it, then try again",
    CommandStatus.BAD_DEPENDENCY: "depend on a command that was submitted, and not so long ago",
    CommandStatus.LINK_DOWN: "bring the links up first: accelvisor.guest.links",
    CommandStatus.ABORTED: "a command that it depended on failed: look at that one's error",
    CommandStatus.BUS_MASTER_OFF: "another driver switched bus mastering off: open it again",
    CommandStatus.REVOKED: "the VM's administrator can detach the device and attach another",
    CommandStatus.DEVICE_ERROR: "a bug of the device: report it with the function's log",
}


def error_from(completion: Completion, detail: str = "") -> AccelvisorError:
    """The typed error for a completion whose status is not OK.

    Args:
        completion: what the device answered.
        detail: the device's own text (Query.FAULT), if it could be had.
    """
    where = f"device:{_label(Opcode, completion.opcode)}"
    try:
        status = CommandStatus(completion.status)
    except ValueError:
        return ProtocolError(
            f"the device answered with unknown status {completion.status:#x}",
            code="device-unknown-status",
            where=where,
            hint="the guest package may be older than the device: update it",
        )
    code = "device-" + status.name.lower().replace("_", "-")
    message = detail or f"the device answered {status.name.lower().replace('_', ' ')}"
    hint = _HINTS.get(status, "")
    kind: type[CommandRefused | ProgramRefused | DeviceFull | DeviceFault | DeviceRevoked]
    if status is CommandStatus.REVOKED:
        kind = DeviceRevoked
    elif status.is_fault:
        kind = DeviceFault
        hint = hint or "the context stopped: close it, or call Function.restart()"
    elif status in _FULL:
        kind = DeviceFull
    elif status in _PROGRAM:
        kind = ProgramRefused
    else:
        kind = CommandRefused
    error = kind(message, code=code, where=where, hint=hint)
    error.status = status
    return error


def _label(kind: type[Opcode], value: int) -> str:
    try:
        return kind(value).name.lower()
    except ValueError:
        return f"{value:#x}"
