"""Landlock (landlock(7), Linux 5.13): what of the file system, of TCP and of other processes this
process may still reach. By raw system calls, since neither the C library nor Debian has a binding.

Kernels differ in how much they can hold back: their version of the interface says, and what one
does not know is not asked of it.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
#: Version -> how many access rights to files there are, from bit 0 on. The newer ones are moving
#: a file to another directory, truncating it, and ioctl of a device.
_FILE_RIGHTS = ((1, 13), (2, 14), (3, 15), (5, 16))
_BIND_AND_CONNECT_TCP = 0b11  # version 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11  # version 6
#: Bytes of the ruleset's description, by version.
_SIZES = ((1, 8), (4, 16), (6, 24))

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long

_RULESET = struct.Struct("=QQQ")
_BENEATH = struct.Struct("=Qi")


def version() -> int:
    """Of the kernel's Landlock; 0 when it has none, or it is not switched on."""
    return max(0, _call(_CREATE_RULESET, None, 0, _ASK_VERSION))


def restrict(readable: Iterable[int]) -> int:
    """Take from the calling thread and all that it starts from here on every access to files but
    reading below ``readable``, TCP, and signals and abstract sockets to processes outside.

    Descriptors that are open already stay what they are.

    Args:
        readable: open descriptors of files and directories (``O_PATH`` will do).

    Returns:
        The version of Landlock that holds it, 0 if none does.
    """
    known = version()
    if not known:
        return 0
    handled = (1 << _since(_FILE_RIGHTS, known)) - 1
    network = _BIND_AND_CONNECT_TCP if known >= 4 else 0
    scoped = _ABSTRACT_SOCKETS_AND_SIGNALS if known >= 6 else 0
    wanted = _RULESET.pack(handled, network, scoped)[: _since(_SIZES, known)]
    ruleset = _call(_CREATE_RULESET, wanted, len(wanted), 0)
    if ruleset < 0:
        return 0
    try:
        for fd in readable:
            rights = _READ_FILE
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                rights |= _READ_DIR
            if _call(_ADD_RULE, ruleset, _PATH_BENEATH, _BENEATH.pack(rights, fd), 0) != 0:
                return 0
        return known if _call(_RESTRICT_SELF, ruleset, 0) == 0 else 0
    finally:
        os.close(ruleset)


def _since(table: tuple[tuple[int, int], ...], known: int) -> int:
    """The entry of the newest version that is not above ``known``."""
    return next(value for first, value in reversed(table) if first <= known)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """A system call; -1 when it fails."""
    converted = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return int(_syscall(ctypes.c_long(number), *converted))
