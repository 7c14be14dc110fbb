"""The client's side of one connection, without IO.

Makes requests, matches replies, and answers what the server asks (DMA_READ, DMA_WRITE) from the
memory that the client has mapped for it: an access outside the map, or in a direction that the map
forbids, is answered with an errno and touches nothing.
"""

from __future__ import annotations

import errno
import logging
from typing import NamedTuple

from accelvisor.vfio_user.dma import DmaTable
from accelvisor.vfio_user.messages import (
    DMA_ACCESS,
    PayloadError,
    RegionWrite,
    bad,
    pack_write_multi,
    parse_access,
    parse_dma_access,
)
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.negotiate import (
    Agreement,
    Capabilities,
    accept_version,
    own_capabilities,
    pack_version,
)
from accelvisor.vfio_user.protocol import VERSION_MAJOR, VERSION_MINOR, Command, DmaFlag
from accelvisor.vfio_user.requests import Completion, Requests
from accelvisor.vfio_user.wire import Message, encode_error, encode_reply

log = logging.getLogger(__name__)


class Outbound(NamedTuple):
    """Bytes to send to the server; empty when it asked for no reply."""

    data: bytes


class ClientSession:
    """What a client knows of its connection.

    Args:
        memory: the ranges mapped for the server; an item is the memory itself, or None where the
            range cannot be reached by messages.
    """

    def __init__(
        self,
        memory: DmaTable[memoryview | None] | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.memory: DmaTable[memoryview | None] = DmaTable() if memory is None else memory
        self.agreement: Agreement | None = None
        self._capabilities = capabilities or own_capabilities()
        self._requests = Requests()

    @property
    def in_flight(self) -> int:
        """Requests without a reply so far."""
        return len(self._requests)

    def command(
        self, command: int, body: bytes = b"", *, no_reply: bool = False
    ) -> tuple[int, bytes]:
        """Id and bytes of a request."""
        return self._requests.begin(command, body, no_reply=no_reply)

    def version(self) -> tuple[int, bytes]:
        """The first request of a connection."""
        body = pack_version(VERSION_MAJOR, VERSION_MINOR, self._capabilities)
        return self._requests.begin(Command.VERSION, body)

    def negotiated(self, completion: Completion) -> int | None:
        """Take the server's answer to VERSION; the index of a twin socket's descriptor, if any.

        Raises:
            Refusal: the server refused.
            PayloadError: its answer breaks the rules.
        """
        body = completion.result()
        self.agreement, twin = accept_version(body, self._capabilities, len(completion.fds))
        return twin

    def receive(self, message: Message) -> Completion | Outbound:
        """Sort a message of the server: a reply to us, or a request with our answer to it.

        Raises:
            ProtocolError: a reply that was not asked for.
        """
        if message.is_reply:
            return self._requests.finish(message)
        try:
            data = self._answer(message)
        finally:
            message.close()
        return Outbound(data if message.wants_reply else b"")

    def check_transfer(self, count: int) -> None:
        """Raises PayloadError when one message may not carry ``count`` bytes."""
        agreed = self.agreement.peer_max_transfer if self.agreement else 0
        if count > agreed:
            raise bad("transfer", f"{count} bytes, {agreed} were agreed")

    def region_write_multi(self, writes: list[RegionWrite]) -> bytes:
        """The body of REGION_WRITE_MULTI. Raises Refusal when it was not negotiated."""
        if self.agreement is None or not self.agreement.write_multiple:
            raise Refusal(errno.EOPNOTSUPP, "the server takes no REGION_WRITE_MULTI")
        return pack_write_multi(writes)

    def _answer(self, message: Message) -> bytes:
        try:
            if message.command == Command.DMA_READ:
                body = self._dma_read(message.body)
            elif message.command == Command.DMA_WRITE:
                body = self._dma_write(message.body)
            else:
                raise Refusal(errno.EOPNOTSUPP, f"{message!r} is not for a client")
        except Refusal as refusal:
            log.debug("%s", refusal)
            return encode_error(message.id, message.command, refusal.errno)
        except PayloadError as error:
            log.debug("%s", error)
            return encode_error(message.id, message.command, errno.EINVAL)
        return encode_reply(message.id, message.command, body)

    def _dma_read(self, body: memoryview) -> bytes:
        address, count, _ = parse_dma_access(body, "DMA_READ")
        self._check_own(count)
        parts = [DMA_ACCESS.pack(address, count)]
        for view, offset, size in self._pieces(address, count, DmaFlag.READ):
            parts.append(bytes(view[offset : offset + size]))
        return b"".join(parts)

    def _dma_write(self, body: memoryview) -> bytes:
        address, count, data = parse_dma_access(body, "DMA_WRITE")
        self._check_own(count)
        if len(data) != count:
            raise bad("DMA_WRITE", f"{count} bytes announced, {len(data)} sent")
        at = 0
        for view, offset, size in self._pieces(address, count, DmaFlag.WRITE):
            view[offset : offset + size] = data[at : at + size]
            at += size
        return DMA_ACCESS.pack(address, count)

    def _check_own(self, count: int) -> None:
        agreed = self.agreement.own_max_transfer if self.agreement else 0
        if count > agreed:
            raise bad("DMA", f"{count} bytes, {agreed} were agreed")

    def _pieces(self, address: int, count: int, need: int) -> list[tuple[memoryview, int, int]]:
        """Memory, offset and bytes of each part; all of it checked before any is touched."""
        found: list[tuple[memoryview, int, int]] = []
        for piece in self.memory.pieces(address, count, need):
            if piece.range.item is None:
                raise Refusal(errno.EFAULT, f"{address:#x} is mapped without memory")
            found.append((piece.range.item, piece.offset, piece.size))
        return found


def check_read_reply(body: memoryview, offset: int, region: int, count: int) -> memoryview:
    """The data of a REGION_READ reply.

    Raises:
        PayloadError: it answers another access or has another size.
    """
    got_offset, got_region, got, data = parse_access(body, "REGION_READ")
    if (got_offset, got_region) != (offset, region) or got != count or len(data) != count:
        raise bad("REGION_READ", f"{len(data)} bytes at {got_offset:#x} of region {got_region}")
    return data
