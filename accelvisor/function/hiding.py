"""What every process of a function does at its start: hide from others of its user, have a name,
and give back what starting took.

Apart from :mod:`accelvisor.function.sandbox`, which is the worker's: the holder imports as little
as it can, since each function has one, and what it imports is memory of its own.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15

_libc = ctypes.CDLL(None)


def conceal() -> None:
    """No other process of this user may trace this one or its children, read their memory, or see
    their files: functions share a user. For the holder before it forks; an exec would undo it.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def rename(name: str) -> None:
    """What ps and top show."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def slim() -> None:
    """Give memory back to the host that imports needed only in between: a tenth of a function's."""
    gc.collect()
    with suppress(AttributeError):  # not the GNU C library
        _libc.malloc_trim(0)
