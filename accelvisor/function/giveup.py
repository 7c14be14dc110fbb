"""What a client hears from a function that has given up: the device is gone, politely.

Reads give all-ones and writes vanish, as on a bus whose device was pulled. Maps, unmaps,
interrupts and resets are acknowledged without effect, since QEMU aborts its VM when a map fails
after start. All else, a new client's greeting included, is refused with ENODEV.
"""

from __future__ import annotations

import errno
import select
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
    """Answers one connection after the last worker is gone, its unanswered message included.

    Never waits: the holder has other work. What the client does not take is kept, and no further
    message is read before it has. There is no successor to leave a journal to.
    """

    def __init__(self, state_fd: int, connection: socket.socket, pipe: tuple[int, int]) -> None:
        self._socket = connection
        self._wire = Wire(State(state_fd), connection, pipe, _drop, lambda _: state_fd)
        self._out = b""

    def resume(self) -> bool:
        """Finish what the last worker left. False when the client is gone."""
        try:
            self._out = self._wire.unsent()
            self._reply(self._wire.resume())
        except (Disconnected, DataError):
            return self._end()
        return self.answer()

    @property
    def events(self) -> int:
        """What to poll the connection for."""
        return select.POLLOUT if self._out else select.POLLIN

    def answer(self) -> bool:
        """Send what is left, else answer the next message. False when the client is gone."""
        try:
            if not self._out:
                self._reply(self._wire.receive())
            if self._out:
                self._out = self._out[self._socket.send(self._out, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except (OSError, Disconnected, DataError):
            return self._end()
        return True

    def _reply(self, message: bytes | None) -> None:
        if message is not None:
            self._out += reply_to(message) or b""
            self._wire.answer(None)

    def _end(self) -> bool:
        self._wire.discard()
        return False


def _drop(fd: int) -> int:
    close_fds((fd,))
    return 0
