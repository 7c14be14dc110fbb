"""accelctl: the command. Exit codes: 0 done, 1 refused or failed, 2 usage, 3 daemon not reachable,
4 permission, 5 a migration would not converge, 6 a verification failed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from accelvisor.cli import parser
from accelvisor.cli.commands import COMMANDS, Session
from accelvisor.control import admin
from accelvisor.errors import AccelvisorError, PermissionDenied, UsageError

DONE, FAILED, USAGE, UNREACHABLE, DENIED, UNCONVERGED, UNVERIFIED = 0, 1, 2, 3, 4, 5, 6
_UNREACHABLE_CODES = ("daemon-unreachable", "daemon-deadline")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, explain."""
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser.build(words[0] if words else None).parse_args(words)
    run_dir = os.environ.get("ACCELVISOR_RUN_DIR") or "/run/accelvisor"
    session = Session(options, options.socket or os.path.join(run_dir, "admin"))
    try:
        code = COMMANDS[options.command, getattr(options, "verb", None)](session)
        sys.stdout.flush()
        return code
    except AccelvisorError as error:
        return explain(error, as_json=options.json)
    except BrokenPipeError:
        # The reader of a pipe has seen enough; keep the interpreter's own flush from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE
    except KeyboardInterrupt:
        return 130
    finally:
        session.close()


def explain(error: AccelvisorError, *, as_json: bool) -> int:
    """The error for people on stderr, with ``--json`` its wire form on stdout; the exit code."""
    sys.stderr.write(f"accelctl: {error.message} [{error.code}]\n")
    if error.hint:
        sys.stderr.write(f"hint: {error.hint}\n")
    if as_json:
        print(
            json.dumps({"error": admin.error_name(error), "parameters": error.to_dict()}, indent=2)
        )
    return exit_code(error)


def exit_code(error: AccelvisorError) -> int:
    """Which exit code an error has."""
    if error.code in _UNREACHABLE_CODES:
        return UNREACHABLE
    if error.code == "migration-convergence":
        return UNCONVERGED
    if error.code.startswith(("frame-", "status-")):
        return UNVERIFIED
    if isinstance(error, PermissionDenied):
        return DENIED
    return USAGE if isinstance(error, UsageError) else FAILED


if __name__ == "__main__":
    sys.exit(main())
