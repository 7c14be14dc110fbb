"""Where a command writes what is not for the screen."""

from __future__ import annotations

import sys

from accelvisor.errors import UsageError


def write(path: str, data: str | bytes) -> None:
    """Into a file; ``-``: standard output.

    Raises:
        UsageError: it cannot be written.
    """
    raw = data.encode() if isinstance(data, str) else data
    if path == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(raw)
        return
    try:
        with open(path, "wb") as stream:
            stream.write(raw)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where="accelctl") from error
