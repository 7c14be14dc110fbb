"""DMA by message: memory that the client mapped without a file (in QEMU: BARs of other devices).

The engine's thread asks and waits; the connection's thread delivers replies. A wait ends early when
the engine is wanted elsewhere, since the client may not answer before we have answered it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from accelvisor.abi.status import CommandStatus
from accelvisor.function.dma import DmaFault
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.messages import DMA_ACCESS
from accelvisor.vfio_user.protocol import FLAG_ERROR, Command
from accelvisor.vfio_user.wire import Message, encode_command

_LOOK_S = 0.005


class RemoteDma:
    """One request in flight at a time.

    Args:
        check: raises when the engine is wanted elsewhere.
        first: where message ids begin; different for each worker, so that a reply to a
            predecessor's request is not taken for one of ours.
    """

    def __init__(self, check: Callable[[], None], first: int = 0) -> None:
        self._check = check
        self._next = first
        self._send: Callable[[bytes], None] | None = None
        self._changed = threading.Condition()
        self._wanted: tuple[int, int] | None = None
        self._reply: Message | None = None

    def attach(self, send: Callable[[bytes], None] | None) -> None:
        """How to reach the client; None when it is gone."""
        with self._changed:
            self._send = send
            self._changed.notify_all()

    def deliver(self, message: Message) -> None:
        """A reply arrived. One that nobody waits for is dropped: its asker was interrupted."""
        with self._changed:
            if self._wanted == (message.id, message.command):
                self._wanted = None
                self._reply = message
                self._changed.notify_all()

    def read(self, address: int, count: int) -> bytes:
        """At most 64 KiB of the client's memory. Raises DmaFault, Interrupted."""
        body = self._ask(Command.DMA_READ, DMA_ACCESS.pack(address, count))
        data = bytes(body[DMA_ACCESS.size :])
        if len(data) != count:
            raise DmaFault(
                CommandStatus.BAD_ADDRESS, f"the client sent {len(data)} bytes of {count}"
            )
        return data

    def write(self, address: int, data: bytes) -> None:
        """At most 64 KiB into the client's memory. Raises DmaFault, Interrupted."""
        self._ask(Command.DMA_WRITE, DMA_ACCESS.pack(address, len(data)) + data)

    def _ask(self, command: Command, body: bytes) -> memoryview:
        deadline = time.monotonic() + LIMITS.vfio_reply_s
        with self._changed:
            self._next = (self._next + 1) & 0xFFFF
            self._wanted = (self._next, int(command))
            self._reply = None
            send = self._send
        if send is None:
            raise DmaFault(CommandStatus.BAD_ADDRESS, "no client is connected")
        try:
            send(encode_command(self._next, command, body))
        except Exception as error:
            raise DmaFault(CommandStatus.BAD_ADDRESS, f"the client is gone: {error}") from error
        with self._changed:
            while self._reply is None:
                self._check()
                if self._send is None or time.monotonic() > deadline:
                    raise DmaFault(CommandStatus.BAD_ADDRESS, "the client does not answer DMA")
                self._changed.wait(_LOOK_S)
            reply = self._reply
        if reply.flags & FLAG_ERROR:
            raise DmaFault(CommandStatus.BAD_ADDRESS, f"the client refused DMA ({reply.errno})")
        return reply.body
