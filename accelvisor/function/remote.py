"""DMA by message: memory that the client mapped without a file (in QEMU: BARs of other devices).

The engine's thread asks, and serves other queues until the answer is there: a client that is slow,
or that waits for an answer of ours first, keeps nobody waiting but the command that needs it. The
connection's thread delivers replies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from accelvisor.abi.status import CommandStatus
from accelvisor.function.dma import DmaFault
from accelvisor.function.pauses import Pauses
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.messages import DMA_ACCESS
from accelvisor.vfio_user.protocol import FLAG_ERROR, Command
from accelvisor.vfio_user.wire import Message, encode_command


class Request:
    """One question to the client, and what a paused command waits for."""

    def __init__(self, remote: RemoteDma, command: Command, deadline: float) -> None:
        self.command = command
        self.reply: Message | None = None
        self.lost = False
        self.sent = False
        self._deadline = deadline
        self._remote = remote

    @property
    def writes(self) -> bool:
        """Whether the client may yet write to memory for this request."""
        return self.sent and self.command is Command.DMA_WRITE

    @property
    def late(self) -> bool:
        """Whether nobody need wait for it any longer."""
        return self._remote.clock() > self._deadline

    def ready(self) -> bool:
        """Whether asking again makes sense: there is an answer, none will come, or, before it
        was sent, there is a client to send it to.
        """
        if self.reply is not None or self.lost or self.late:
            return True
        return not self.sent and self._remote.connected


class RemoteDma:
    """Requests in flight, at most one for each command in progress.

    Args:
        wake: tells the engine to look at what its commands wait for.
        first: where message ids begin; different for each worker, so that a reply to a
            predecessor's request is not taken for one of ours.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._wake = wake
        self._next = first
        self._send: Callable[[bytes], None] | None = None
        self._lock = threading.Lock()
        self._flying: dict[int, Request] = {}

    @property
    def connected(self) -> bool:
        """Whether a client can be asked."""
        return self._send is not None

    def attach(self, send: Callable[[bytes], None] | None) -> None:
        """How to reach the client; None when it is gone, and with it every answer."""
        with self._lock:
            self._send = send
            if send is None:
                for request in self._flying.values():
                    request.lost = True
                self._flying.clear()
        self._wake()

    def deliver(self, message: Message) -> None:
        """A reply arrived. One that nobody waits for is dropped: its asker was aborted."""
        with self._lock:
            request = self._flying.get(message.id)
            if request is None or request.command != message.command:
                return
            del self._flying[message.id]
            request.reply = message
        self._wake()

    def read(self, address: int, count: int) -> Pauses[bytes]:
        """At most 64 KiB of the client's memory. Raises DmaFault."""
        body = yield from self._ask(Command.DMA_READ, DMA_ACCESS.pack(address, count))
        data = bytes(body[DMA_ACCESS.size :])
        if len(data) != count:
            raise DmaFault(
                CommandStatus.BAD_ADDRESS, f"the client sent {len(data)} bytes of {count}"
            )
        return data

    def write(self, address: int, data: bytes) -> Pauses[None]:
        """At most 64 KiB into the client's memory. Raises DmaFault."""
        yield from self._ask(Command.DMA_WRITE, DMA_ACCESS.pack(address, len(data)) + data)

    def _ask(self, command: Command, body: bytes) -> Pauses[memoryview]:
        request = Request(self, command, self.clock() + LIMITS.vfio_reply_s)
        # Without a client yet: a worker that takes over is about to be given its predecessor's.
        while (send := self._send) is None:
            if request.late:
                raise DmaFault(CommandStatus.BAD_ADDRESS, "no client is connected")
            yield request
        with self._lock:
            number = self._number()
            self._flying[number] = request
        try:
            request.sent = True
            try:
                send(encode_command(number, command, body))
            except Exception as error:
                request.lost = True
                raise DmaFault(CommandStatus.BAD_ADDRESS, f"the client is gone: {error}") from error
            while request.reply is None:
                if request.lost:
                    raise DmaFault(CommandStatus.BAD_ADDRESS, "the client is gone")
                if request.late:
                    raise DmaFault(CommandStatus.BAD_ADDRESS, "the client does not answer DMA")
                yield request
        finally:
            with self._lock:
                # An aborted command's number stays taken while the client may still write for it.
                over = request.reply is not None or request.lost or request.late
                if over or not request.writes:
                    self._flying.pop(number, None)
        if request.reply.flags & FLAG_ERROR:
            raise DmaFault(
                CommandStatus.BAD_ADDRESS, f"the client refused DMA ({request.reply.errno})"
            )
        return request.reply.body

    def _number(self) -> int:
        """The next id that no request in flight has."""
        while True:
            self._next = (self._next + 1) & 0xFFFF
            held = self._flying.get(self._next)
            if held is None or held.late:
                return self._next
