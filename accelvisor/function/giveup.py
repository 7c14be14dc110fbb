"""What a client hears from a function that has given up: the device is gone, politely.

Reads give all-ones and writes vanish, as on a bus whose device was pulled. Maps, unmaps,
interrupts and resets are acknowledged without effect, since QEMU aborts its VM when a map fails
after start. All else, a new client's greeting included, is refused with ENODEV.
"""

from __future__ import annotations

import errno
import socket
import struct

from accelvisor.errors import DataError
from accelvisor.function.state import State
from accelvisor.function.wire import Disconnected, Wire
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.protocol import (
    FLAG_NO_REPLY,
    HEADER,
    HEADER_BYTES,
    TYPE_MASK,
    Command,
)
from accelvisor.vfio_user.wire import close_fds, encode_error, encode_reply

_ACCESS = struct.Struct("<QII")
_UNMAP_BYTES = 24
_QUIET = frozenset((Command.DMA_MAP, Command.DEVICE_SET_IRQS, Command.DEVICE_RESET))


def reply_to(raw: bytes) -> bytes | None:
    """The answer to one whole message; None when it wants none."""
    ident, command, size, flags, _ = HEADER.unpack_from(raw)
    if flags & TYPE_MASK or flags & FLAG_NO_REPLY:
        return None
    body = raw[HEADER_BYTES:size]
    if command in (Command.REGION_READ, Command.REGION_WRITE) and len(body) >= _ACCESS.size:
        _, _, count = _ACCESS.unpack_from(body)
        if count <= LIMITS.vfio_transfer_bytes:
            data = b"\xff" * count if command == Command.REGION_READ else b""
            return encode_reply(ident, command, body[: _ACCESS.size] + data)
    if command in _QUIET:
        return encode_reply(ident, command)
    if command == Command.DMA_UNMAP and len(body) == _UNMAP_BYTES:
        return encode_reply(ident, command, body)
    return encode_error(ident, command, errno.ENODEV)


class Answerer:
    """Answers one connection after the last worker is gone, its unanswered message included."""

    def __init__(self, state_fd: int, connection: socket.socket, pipe: tuple[int, int]) -> None:
        self._wire = Wire(State(state_fd), connection, pipe, _drop, lambda _: state_fd)

    def resume(self) -> bool:
        """Finish what the last worker left. False when the client is gone."""
        try:
            message = self._wire.resume()
            if message is not None:
                self._wire.answer(reply_to(message))
        except (Disconnected, DataError):
            self._wire.discard()
            return False
        return True

    def answer(self) -> bool:
        """Answer the next message. False when the client is gone."""
        try:
            message = self._wire.receive()
            if message is not None:
                self._wire.answer(reply_to(message))
        except (Disconnected, DataError):
            self._wire.discard()
            return False
        return True


def _drop(fd: int) -> int:
    close_fds((fd,))
    return 0
