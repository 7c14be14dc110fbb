"""The one error tree of accelvisor.

Three roots answer one question: who can mend it?

    AccelvisorError
    ├── CallerError        the caller did wrong: fix the request and try again
    │   ├── UsageError         a malformed request, option or argument
    │   ├── ConfigError        a configuration file is wrong
    │   ├── NotFoundError      the named thing does not exist
    │   ├── ConflictError      it exists already, or is in a state that forbids this
    │   └── PermissionDenied   the caller may not do this
    ├── DataError          what came in from a guest, peer or file is wrong: do not trust it
    │   ├── ProtocolError      bytes that break a protocol (vfio-user, admin, control)
    │   ├── ProgramError       an uploaded program or command fails validation
    │   ├── NumericError       a kernel met data that it cannot compute with (a label out of range)
    │   ├── StateError         saved state that is damaged or of another version
    │   └── FrameRefused       a checkpoint that a step of its verification refused
    └── HostError          this host refused or cannot: look at the machine
        ├── CapacityError      not enough of a resource is free
        ├── UnavailableError   a service is not reachable (daemon, libvirt, function process)
        ├── DeadlineError      it did not finish in time
        └── SystemFailure      the operating system or a child process failed

Every error carries a stable ``code`` (kebab-case, never reused for another meaning), ``where``
(which part met it) and a ``hint`` (what the reader can do). Codes are documented in docs/errors.md;
a test compares the two. This module is shared with the guest, so it imports nothing.
"""

from __future__ import annotations


class AccelvisorError(Exception):
    """Base of every error that accelvisor raises on purpose.

    Args:
        message: what happened, one sentence, no trailing stop.
        code: stable kebab-case identifier; defaults to the class's own.
        where: the part that met it, ``vfio-user`` or ``config:/etc/accelvisor/accelvisor.toml``.
        hint: what the reader can do about it; empty when there is nothing to do.
    """

    code = "error"

    def __init__(
        self, message: str, *, code: str | None = None, where: str = "", hint: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, str]:
        """The wire form: the same four fields in the admin API, ``--json``, control socket."""
        return {
            "code": self.code,
            "message": self.message,
            "where": self.where,
            "hint": self.hint,
        }


class CallerError(AccelvisorError):
    """The caller did wrong: fix the request and try again."""

    code = "caller-error"


class UsageError(CallerError):
    """A malformed request, option or argument."""

    code = "usage"


class ConfigError(CallerError):
    """A configuration file is wrong."""

    code = "config-invalid"


class NotFoundError(CallerError):
    """The named thing does not exist."""

    code = "not-found"


class ConflictError(CallerError):
    """It exists already, or is in a state that forbids this."""

    code = "conflict"


class PermissionDenied(CallerError):  # noqa: N818 - reads as the condition it reports
    """The caller may not do this."""

    code = "permission-denied"


class DataError(AccelvisorError):
    """What came in from a guest, a peer or a file is wrong: do not trust it."""

    code = "data-error"


class ProtocolError(DataError):
    """Bytes that break a protocol."""

    code = "protocol"


class ProgramError(DataError):
    """An uploaded program or a command fails validation."""

    code = "program-invalid"


class NumericError(DataError):
    """A kernel met data that it cannot compute with, e.g. a row index out of range."""

    code = "numeric"


class StateError(DataError):
    """Saved state that is damaged or of another version."""

    code = "state-damaged"


class FrameRefused(DataError):  # noqa: N818 - reads as the condition it reports
    """A checkpoint, or a part of it, did not pass verification.

    Args:
        message: as in :class:`AccelvisorError`, and so are ``code``, ``where`` and ``hint``.
        step: the step that refused, 1 to 7 (accelvisor.frames.steps); 0 where there is none.
    """

    code = "frame-refused"

    def __init__(
        self,
        message: str,
        *,
        step: int = 0,
        code: str | None = None,
        where: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(message, code=code, where=where, hint=hint)
        self.step = step


class HostError(AccelvisorError):
    """This host refused or cannot: look at the machine."""

    code = "host-error"


class CapacityError(HostError):
    """Not enough of a resource is free."""

    code = "capacity"


class UnavailableError(HostError):
    """A service is not reachable."""

    code = "unavailable"


class DeadlineError(HostError):
    """It did not finish in time."""

    code = "deadline"


class SystemFailure(HostError):  # noqa: N818 - reads as the condition it reports
    """The operating system or a child process failed."""

    code = "system-failure"
