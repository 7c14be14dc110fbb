"""Messages between holder, zygote and worker: one datagram each, descriptors beside it.

Standard library only: the holder imports it.
"""

from __future__ import annotations

import struct

_MESSAGE = struct.Struct("<II")
MESSAGE_BYTES = _MESSAGE.size

# worker to holder
KEEP = 1  # argument: slot; brings the descriptor
DROP = 2  # argument: slot
GONE = 3  # argument: number of the connection that ended
HERE = 8  # argument: the worker's pid, before it does anything
READY = 4  # it serves
MEMORY = 10  # brings another file, which is the device's memory from here on
TROUBLE = 11  # the function was quarantined, or computes again: who waits for that is told

# holder to worker
CONNECT = 5  # argument: number of the connection; brings the socket

# holder to zygote
FORK = 6  # argument: number of the live connection or 0; brings everything a worker needs
SPEC = 9  # followed by the specification's JSON; before the first FORK
# zygote to holder
WARM = 7  # ready to fork


def pack(kind: int, argument: int = 0) -> bytes:
    """One message."""
    return _MESSAGE.pack(kind, argument)


def unpack(data: bytes) -> tuple[int, int]:
    """(kind, argument); (0, 0) for anything else than one message."""
    if len(data) != MESSAGE_BYTES:
        return 0, 0
    kind, argument = _MESSAGE.unpack(data)
    return kind, argument
