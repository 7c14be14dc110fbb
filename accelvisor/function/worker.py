"""The worker: the device model of one function, driven from its vfio-user connection.

It holds nothing that the next worker could not find in the state memfd or be given by the holder.
Its main thread answers the client; the engine's threads compute; one thread serves the control
socket.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from accelvisor.errors import DataError
from accelvisor.function import blame
from accelvisor.function import state as s
from accelvisor.function.channel import (
    CONNECT,
    GONE,
    HERE,
    MESSAGE_BYTES,
    READY,
    TROUBLE,
    pack,
    unpack,
)
from accelvisor.function.control import Control
from accelvisor.function.descriptors import Descriptors, teller
from accelvisor.function.device import Device
from accelvisor.function.placement import short_turns
from accelvisor.function.sandbox import enter, tighten
from accelvisor.function.spec import Spec
from accelvisor.function.state import State
from accelvisor.function.wire import Disconnected, Wire
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.messages import PayloadError, parse_dma_unmap
from accelvisor.vfio_user.negotiate import Agreement
from accelvisor.vfio_user.protocol import HEADER, HEADER_BYTES, Command, UnmapFlag
from accelvisor.vfio_user.session import ServerSession
from accelvisor.vfio_user.wire import Message, close_fds, encode_error, encode_reply

log = logging.getLogger(__name__)

#: How long a thread may keep the interpreter while another wants it. A register read takes the
#: interpreter a few times, so this bounds what it waits beside a computing engine.
_SWITCH_S = 50e-6


class Inherited(NamedTuple):
    """What the holder gives a worker. ``number`` is the live connection's, 0 without one."""

    channel: socket.socket
    control: socket.socket
    state: int
    window: int
    memory: int
    track: int
    pipe: tuple[int, int]
    connection: socket.socket | None
    number: int
    held: Mapping[int, int]
    crashed: bool  # the last worker ended by itself, not killed from outside


class Worker:
    """One worker process.

    Args:
        sandbox: which measures are active so far, for ``status``.
    """

    def __init__(
        self, spec: Spec, inherited: Inherited, sandbox: Mapping[str, int]
    ) -> None:
        self._given = inherited
        self._sandbox = dict(sandbox)
        self._state = State(inherited.state)
        self._state.u64[s.W_STARTS] += 1
        self._tell = teller(inherited.channel)
        self._descriptors = Descriptors(self._tell, inherited.held)
        self._device = Device(
            spec,
            self._state,
            inherited.window,
            inherited.memory,
            inherited.track,
            self._descriptors,
        )
        self._device.on_trouble = lambda: self._tell(pack(TROUBLE), ())
        self._device.frontend.points = blame.CRASH if inherited.crashed else blame.KILL
        self._connection: socket.socket | None = None
        self._number = 0
        self._wire: Wire | None = None
        self._session: ServerSession | None = None
        self._poll = select.poll()
        self._greet_until = 0.0

    def run(self) -> None:
        """Serve until the holder goes away."""
        sys.setswitchinterval(_SWITCH_S)
        short_turns()
        channel = self._given.channel
        self._poll.register(channel, select.POLLIN)
        # Until _attach has found out what the client is still owed, no command may go on: it
        # could need DMA by messages.
        self._state.u32[s.R_FREEZE] |= s.FREEZE_DETACHED
        self._device.start()
        control = Control(self._device, self._given.control, self._sandbox, self._tell)
        # Nothing of the client's has been looked at yet.
        self._sandbox["system_calls"] = tighten()
        control.start()
        self._tell(pack(READY), ())
        if self._given.connection is not None:
            self._attach(self._given.connection, self._given.number)
        channel_fd = channel.fileno()
        while True:
            for fd, _ in self._poll.poll(self._patience_ms()):
                if fd == channel_fd:
                    if not self._from_holder():
                        return
                elif self._wire is not None:
                    self._from_client(self._wire)
            if self._patience_ms() == 0:
                self._hang_up(Disconnected("no greeting"))

    def _patience_ms(self) -> int | None:
        """Milliseconds that a client has left to greet. One that never does would keep every other
        out.
        """
        session = self._session
        if session is None or session.agreement is not None:
            return None
        return max(0, int((self._greet_until - time.monotonic()) * 1000))

    # --- the holder -------------------------------------------------------------------------------

    def _from_holder(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._given.channel, MESSAGE_BYTES, 1)
        except ConnectionResetError:
            return False
        if not data:
            return False
        kind, argument = unpack(data)
        if kind == CONNECT and len(fds) == 1:
            self._attach(socket.socket(fileno=fds[0]), argument)
        else:
            close_fds(fds)
        return True

    # --- the client -------------------------------------------------------------------------------

    def _attach(self, connection: socket.socket, number: int) -> None:
        """Serve a connection: a new one from the start, a predecessor's from where that was."""
        u32 = self._state.u32
        held = self._descriptors
        wire = Wire(self._state, connection, self._given.pipe, held.keep, held.fds.__getitem__)
        self._connection, self._number, self._wire = connection, number, wire
        self._greet_until = time.monotonic() + LIMITS.vfio_reply_s
        self._poll.register(connection, select.POLLIN)
        agreement = None
        try:
            if u32[s.N_SEEN] != number:
                self._device.disconnected()
                wire.discard()
                u32[s.N_AGREEMENT] = 0
                self._device.connected()
                u32[s.N_SEEN] = number
                self._state.u64[s.N_STREAM64] = 0
            elif u32[s.N_AGREEMENT]:
                at = s.N_AGREEMENT_AT
                agreement = Agreement.from_json(bytes(self._state.u8[at : at + u32[s.N_AGREEMENT]]))
            # The predecessor's last words come first: only then may the engine ask for DMA.
            message = wire.resume()
            if message is not None and message[2] == Command.VERSION:
                agreement = None  # the greeting itself is handled again
            self._session = ServerSession(self._device, agreement=agreement)
            self._device.remote.attach(wire.send)
            self._device.attached()
            u64 = self._state.u64
            if message is None:
                u64[s.N_STREAM_START64] = u64[s.N_STREAM64]
                # Half a message may have come, with descriptors of its own.
                self._device.sweep(wire.slots())
            else:
                u64[s.N_STREAM64] = u64[s.N_STREAM_START64]
                self._handle_again(wire, message)
        except (Disconnected, DataError) as error:
            self._hang_up(error)

    def _handle_again(self, wire: Wire, raw: bytes) -> None:
        """A message that a predecessor left unanswered. One that kills worker after worker is
        refused, except that a map is acknowledged: QEMU aborts its VM when one fails.
        """
        ident, command, _, flags, _ = HEADER.unpack_from(raw)
        if wire.blame(self._device.frontend.points) >= blame.MOST:
            log.error("worker after worker died over message %d: refused", command)
            if flags:
                wire.answer(None)
            elif command == Command.DMA_MAP:
                wire.answer(encode_reply(ident, command))
            else:
                wire.answer(encode_error(ident, command, errno.EIO))
            self._device.sweep()
            return
        if command == Command.DMA_UNMAP:
            # Its maps may be gone already, so nothing tells any more what was dirty in there.
            with suppress(PayloadError):
                request = parse_dma_unmap(raw[HEADER_BYTES:], UnmapFlag.GET_DIRTY_BITMAP)
                if request.page_size:
                    self._device.migration.doubt(request.address, request.size)
        self._handle(wire, raw)

    def _from_client(self, wire: Wire) -> None:
        try:
            raw = wire.receive()
            if raw is not None:
                self._handle(wire, raw)
        except (Disconnected, DataError) as error:
            self._hang_up(error)

    def _handle(self, wire: Wire, raw: bytes) -> None:
        slots = wire.slots()
        if not self._descriptors.fds.keys() >= set(slots):
            raise Disconnected("a descriptor was lost with a worker")
        fds = [os.dup(self._descriptors.fds[slot]) for slot in slots]
        device = self._device
        device.incoming = dict(zip(fds, slots, strict=True))
        message = Message(raw, fds)
        self._state.u64[_REQUESTS] += 1
        if message.is_reply:
            message.close()
            wire.answer(None)
            device.remote.deliver(message)
            return
        session = self._session
        if session is None:
            raise Disconnected("no session")
        reply = session.handle(message)
        device.incoming = {}
        if message.command == Command.VERSION:
            self._remember(session.agreement)
        try:
            if reply is None:
                wire.answer(None)
            else:
                wire.answer(reply.data, reply.fds)
        finally:
            if reply is not None:
                close_fds(reply.close_after)
        u64 = self._state.u64
        if u64[s.N_STREAM_START64] != u64[s.N_STREAM64]:
            u64[s.N_STREAM_START64] = u64[s.N_STREAM64]
        if slots:
            device.sweep()
        if reply is not None and reply.close:
            raise Disconnected("the session ended the connection")

    def _remember(self, agreement: Agreement | None) -> None:
        data = agreement.to_json() if agreement is not None else b""
        if len(data) > s.N_AGREEMENT_BYTES:
            raise Disconnected("the agreement is too long to keep")
        at = s.N_AGREEMENT_AT
        self._state.u32[s.N_AGREEMENT] = 0
        self._state.u8[at : at + len(data)] = data
        self._state.u32[s.N_AGREEMENT] = len(data)

    def _hang_up(self, reason: Exception) -> None:
        """The connection is over: stop, give everything of the client back, tell the holder."""
        log.info("connection %d ends: %s", self._number, reason)
        if self._connection is None or self._wire is None:
            return
        self._poll.unregister(self._connection)
        self._device.disconnected()
        self._wire.discard()
        self._connection.close()
        self._connection = self._wire = self._session = None
        self._tell(pack(GONE, self._number), ())


def main(spec: Spec, inherited: Inherited) -> None:
    """The forked child's life. Returns when the holder is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        inherited.channel.send(pack(HERE, os.getpid()))
    except OSError:
        return  # the holder wants no worker any more, and answers the client itself
    # First: a thread keeps the capabilities that it was started with.
    sandbox = enter()
    Worker(spec, inherited, sandbox).run()


_REQUESTS = s.K["requests"]
