"""Sockets: send and receive one message with its descriptors. The only place that calls sendmsg.

Receiving uses :class:`wire.FrameReader`, so never a byte past the current message. Every descriptor
that arrives gets close-on-exec and is handed over or closed.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence

from accelvisor.limits import LIMITS
from accelvisor.vfio_user.wire import FrameReader, Message, broken, close_fds

_INT = array.array("i").itemsize
#: Room for more descriptors than a message may bring, so that a surplus is seen and not cut off.
_ANCILLARY = socket.CMSG_SPACE((LIMITS.vfio_message_fds + 1) * _INT)
_FLAGS = socket.MSG_CMSG_CLOEXEC


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _INT])
    return fds.tolist()


def receive(sock: socket.socket, reader: FrameReader) -> Message | None:
    """Wait for one whole message; None at a clean end of the stream.

    Raises:
        ProtocolError: the stream ended inside a message, or is no vfio-user.
        OSError: of the socket (BlockingIOError when its receive timeout passed).
    """
    message = reader.buffered()
    if message is not None:
        return message
    while True:
        count, ancillary, flags, _ = sock.recvmsg_into((reader.space(),), _ANCILLARY, _FLAGS)
        if ancillary:
            fds = _descriptors(ancillary)
            if flags & socket.MSG_CTRUNC:
                close_fds(fds)
                raise broken("more descriptors than a message may carry")
            message = reader.advance(count, fds)
        else:
            message = reader.advance(count) if count else None
        if message is not None:
            return message
        if not count:
            if reader.is_idle:
                return None
            raise broken("the stream ended inside a message", "the peer died or was killed")


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one whole message with descriptors beside its first byte.

    QEMU wants a header in one piece, so header and body leave in one call where the kernel lets
    them. Raises OSError of the socket.
    """
    if not fds:
        sock.sendall(data)
        return
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    sent = sock.sendmsg([data], rights)
    if sent < len(data):
        sock.sendall(memoryview(data)[sent:])
