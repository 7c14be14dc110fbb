"""The asking side of a connection: message ids, replies matched to requests, transfers cut up.

Both ends ask: the client all the time, the server for DMA. No IO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from accelvisor.errors import ProtocolError
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import FLAG_ERROR
from accelvisor.vfio_user.wire import Message, broken, close_fds, command_name, encode_command

_IDS = 1 << 16


class Completion(NamedTuple):
    """A reply to one of our requests. ``errno`` is 0 on success; descriptors are the caller's."""

    id: int
    command: int
    errno: int
    body: memoryview
    fds: Sequence[int]

    def result(self) -> memoryview:
        """The body.

        Raises:
            Refusal: the peer answered with an errno.
        """
        if self.errno:
            close_fds(self.fds)
            raise Refusal(self.errno, f"the peer refused {command_name(self.command)}")
        return self.body


class Requests:
    """Requests in flight on one connection."""

    __slots__ = ("_next", "_pending")

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._pending: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def begin(
        self, command: int, body: bytes = b"", *, no_reply: bool = False
    ) -> tuple[int, bytes]:
        """Id and bytes of a new request; with ``no_reply`` nothing is awaited.

        Raises:
            ProtocolError: every id is in flight, so the peer has stopped answering.
        """
        if len(self._pending) >= _IDS:
            raise broken("65536 requests without a reply", "the peer has stopped answering")
        ident = self._next
        while ident in self._pending:
            ident = (ident + 1) % _IDS
        self._next = (ident + 1) % _IDS
        if not no_reply:
            self._pending[ident] = command
        return ident, encode_command(ident, command, body, no_reply=no_reply)

    def finish(self, message: Message) -> Completion:
        """Match a reply. Takes the message's descriptors.

        Raises:
            ProtocolError: the reply answers nothing that was asked.
        """
        command = self._pending.pop(message.id, None)
        if command is None or command != message.command:
            asked = "nothing" if command is None else command_name(command)
            message.close()
            raise broken(f"a reply that was not asked for ({asked} was): {message!r}")
        number = (message.errno or _UNSPECIFIED) if message.flags & FLAG_ERROR else 0
        return Completion(message.id, command, number, message.body, message.take_fds())


#: The error bit without an errno: "may be zero even if the Error bit is set". EIO says as much.
_UNSPECIFIED = 5


def chunks(
    address: int, size: int, agreed: int, most: int = LIMITS.vfio_dma_chunk_bytes
) -> Iterator[tuple[int, int]]:
    """Cut a DMA transfer into (address, bytes) that one message may carry.

    ``agreed`` is the peer's max_data_xfer_size. QEMU hangs on a DMA_READ of 256 KiB, so a chunk
    stays far below that whatever was agreed.

    Raises:
        ProtocolError: the peer agreed to transfers of nothing.
    """
    step = min(agreed, most)
    if step <= 0:
        raise ProtocolError(
            "the peer agreed to transfers of 0 bytes", where="vfio-user", hint="map the memory"
        )
    for at in range(0, size, step):
        yield address + at, min(step, size - at)
