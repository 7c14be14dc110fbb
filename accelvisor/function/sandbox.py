"""What a worker gives up: most of it first, the system calls once it has everything that it needs.
Best effort, told in ``status``.

The units of a systemd host do most of the confinement; this holds without them as well. What only
they do is a ceiling on memory, processors and threads: no limit of setrlimit(2) fits. RLIMIT_NPROC
counts what all functions have (they share a user), RLIMIT_AS counts what is only reserved, and
RLIMIT_FSIZE also keeps from writing in the middle of a guest's RAM.
"""

from __future__ import annotations

import ctypes
import os
import resource
import site
from contextlib import suppress
from functools import cache
from pathlib import Path

from accelvisor.function import landlock, system_calls
from accelvisor.function.state import FD_SLOTS

# Found once, by the zygote: looking again would be most of what a worker does here.
_libc = ctypes.CDLL(None)

_PR_GET_DUMPABLE = 3
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
#: Slots twice (here and dup'ed for a message), mappings' own duplicates, and the worker's few.
_MAX_FDS = 4 * FD_SLOTS
#: What a worker never uses: locked memory, message queues, realtime priorities, better nice values.
_UNUSED = (
    resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE,
)  # fmt: skip


def prepare() -> None:
    """For the zygote: what all its workers would do again, while a guest waits for them."""
    system_calls.prepare()
    _programs()


def enter() -> dict[str, bool | int]:
    """Apply each measure that this host allows. Before the first thread: those that the process
    starts later have what it has. Returns which are active (Landlock: its version, or 0).
    """
    limited = [_limit(which, 0) for which in _UNUSED]
    return {
        "no_new_privileges": _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0,
        "no_capabilities": _drop_capabilities(),
        "descriptor_limit": _limit(resource.RLIMIT_NOFILE, _MAX_FDS),
        "no_core_dump": _limit(resource.RLIMIT_CORE, 0),
        "resource_limits": all(limited),
        "concealed": _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0,
        "landlock": _restrict(),
    }


def tighten() -> bool:
    """Give up all system calls but those of a worker that serves, in all threads. After everything
    has been opened, and before the guest is listened to.
    """
    calls = system_calls.prepare()
    return calls is not None and calls.load()


def _drop_capabilities() -> bool:
    """Bounding, ambient, then all sets of this process (threads inherit, so this comes early)."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # there is no such capability, or this process may drop none
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    return bool(_libc.capset(header, none) == 0)


def _limit(which: int, value: int) -> bool:
    try:
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))
    except (OSError, ValueError):
        return False
    return True


def _restrict() -> int:
    """Leave the programs' files and what the process says of itself; returns Landlock's version."""
    if not landlock.version():
        return 0
    programs = _programs()
    try:
        # Never closed: the kernel may forget a directory of /proc that nobody has open, and its
        # next appearance would be another one than the rule is about.
        own = [os.open("/proc/self", os.O_PATH | os.O_CLOEXEC)]
    except OSError:
        own = []
    version = landlock.restrict([*programs, *own])
    _programs.cache_clear()
    for fd in programs:
        os.close(fd)
    return version


@cache
def _programs() -> tuple[int, ...]:
    """Opened: what importing a module, loading a library or compiling a kernel reads. Nothing
    secret lies there, and no other function's files.
    """
    opened = []
    for path in (
        str(Path(__file__).parents[1]), os.path.dirname(os.__file__), *site.getsitepackages(),
        "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache",
        "/etc/localtime", "/usr/share/zoneinfo", "/sys/devices/system/cpu",
        "/var/cache/accelvisor",  # compiled kernels, which functions only read
    ):  # fmt: skip
        with suppress(OSError):
            opened.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
    return tuple(opened)
