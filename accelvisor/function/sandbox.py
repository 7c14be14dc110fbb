"""What a worker gives up once it has everything that it needs. Best effort, told in ``status``.

The units of a systemd host do most of the confinement; this holds without them as well.
"""

from __future__ import annotations

import ctypes
import resource

from accelvisor.function.state import FD_SLOTS

_PR_GET_DUMPABLE = 3
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
#: Slots twice (here and dup'ed for a message), mappings' own duplicates, and the worker's few.
_MAX_FDS = 4 * FD_SLOTS


def conceal() -> None:
    """No other process of this user may trace this one or its children, read their memory, or see
    their files: functions share a user. For the holder before it forks; an exec would undo it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def rename(name: str) -> None:
    """What ps and top show."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def enter() -> dict[str, bool]:
    """Apply each measure that this host allows. Returns which are active."""
    libc = ctypes.CDLL(None, use_errno=True)
    return {
        "no_new_privileges": libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0,
        "no_capabilities": _drop_capabilities(libc),
        "descriptor_limit": _limit(resource.RLIMIT_NOFILE, _MAX_FDS),
        "no_core_dump": _limit(resource.RLIMIT_CORE, 0),
        "concealed": libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0,
    }


def _drop_capabilities(libc: ctypes.CDLL) -> bool:
    """Bounding, ambient, then all sets of this process (threads inherit, so this comes early)."""
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    return bool(libc.capset(header, none) == 0)


def _limit(which: int, value: int) -> bool:
    try:
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))
    except (OSError, ValueError):
        return False
    return True


