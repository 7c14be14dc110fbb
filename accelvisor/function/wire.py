"""The vfio-user connection as a worker uses it that may be killed between any two instructions.

QEMU never reconnects, aborts when a request stays unread by a dead server, and is lost when half
a reply or a second reply arrives. So every step leaves enough in the state memfd, or in the
kernel, for the next worker to go on without asking anybody.

Receiving: the message is *peeked*, its bytes go into the receive record and its descriptors to
the holder; then it is consumed. One 64-bit word (bytes consumed, bytes recorded, descriptors)
says where that stands. Whether the last read happened is answered by the socket itself: if its
head still equals the recorded bytes, it did not. (Requests carry a counter, so two that follow
each other differ.) A peek shows the descriptors of the first message in the queue that has any,
also when that is not the head (Linux looks on past the end of what was asked for), so only the
consuming read says whose they are; a worker that dies between that read and its note leaves the
question to what is left in the queue.

Sending: a reply goes into the send record, from there into a pipe, and from the pipe into the
socket by splice(2). Both pipe ends are the holder's and outlive the worker, so what is left in
the pipe *is* what has not been sent: the question "did it go out?" never arises. Only a reply
that carries a descriptor cannot take this way: it is sent by one sendmsg between two marks and,
should a worker die between them, never repeated (a duplicate breaks the connection for good, and
such replies occur while a device is being realised, not in operation).
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import termios
import threading
from collections.abc import Callable, Sequence

from accelvisor.function import state as s
from accelvisor.function.state import State
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.protocol import HEADER, HEADER_BYTES, Command
from accelvisor.vfio_user.wire import broken, check_header, close_fds

_PEEK_BYTES = 4096
_MAX_FDS = LIMITS.vfio_message_fds
_ANCILLARY = socket.CMSG_SPACE(_MAX_FDS * 4)
#: Fits an empty pipe of the default size whole, so that one write into it never blocks.
_PIPE_BYTES = 32 * 1024

_RX64 = s.RX_AT // 8  # consumed | recorded << 24 | descriptors << 48 | perhaps descriptors << 56
_RX_SLOTS = s.RX_AT // 4 + 2
_RX_DEATHS = s.RX_AT // 4 + 64
_TX64 = s.TX_AT // 8  # total | flags, 0 when nothing is being sent
_TXP64 = _TX64 + 1  # bytes sent before this chunk | bytes of the chunk that entered the pipe << 32
_REPLY = 1 << 62  # the receive record is answered by this
_DIRECT = 1 << 61  # carries a descriptor

_LOW = 0xFFFF_FFFF
_MESSAGE = 0xFF_FFFF
_RECORDED = 24
_FDS = 48
_PERHAPS = 56


class Disconnected(Exception):  # noqa: N818 - the ordinary end of a connection
    """The client is gone."""


class Wire:
    """One connection. One thread receives; any thread sends.

    Args:
        keep: gives a received descriptor to the holder and returns its slot; it may refuse by
            raising, after it closed the descriptor.
        look: the descriptor in a slot.
    """

    def __init__(
        self,
        state: State,
        connection: socket.socket,
        pipe: tuple[int, int],
        keep: Callable[[int], int],
        look: Callable[[int], int],
    ) -> None:
        self._state = state
        self._u32 = state.u32
        self._u64 = state.u64
        self._socket = connection
        self._fd = connection.fileno()
        self._out, self._in = pipe
        self._keep = keep
        self._look = look
        self._lock = threading.Lock()
        self._scratch = bytearray(_PEEK_BYTES)

    # --- receiving -------------------------------------------------------------------------------

    def receive(self) -> bytes | None:
        """Take what the socket has of the current message; the message if that completes it.

        The message stays in the receive record until :meth:`answer`; :meth:`slots` are its
        descriptors. None: come back when the socket is readable.

        Raises:
            Disconnected: end of stream.
            ProtocolError: bytes that cannot be followed.
        """
        u64 = self._u64
        word = u64[_RX64]
        have = word & _MESSAGE
        data, fds = self._peek(_PEEK_BYTES)
        if not data:
            return None
        try:
            size = self._size(data if not have else bytes(self._record(have)) + data)
            if size == len(data) and not word and not fds and size >= HEADER_BYTES:
                # The common case in one go: a whole small message without descriptors.
                at = s.RX_DATA_AT
                self._state.u8[at : at + size] = data
                u64[_RX64] = size << _RECORDED
                self._socket.recv_into(self._scratch, size)
                u64[_RX64] = size
                return data
            if len(data) < size - have and len(data) == _PEEK_BYTES:
                close_fds(fds)
                fds = []
                data, fds = self._peek(size - have)
        except BaseException:
            close_fds(fds)
            raise
        return self._take(word, size, data[: size - have], fds)

    def _peek(self, count: int) -> tuple[bytes, list[int]]:
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                count, _ANCILLARY, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return b"", []
        except OSError as error:
            raise Disconnected(str(error)) from error
        fds = _descriptors(ancillary) if ancillary else []
        if flags & socket.MSG_CTRUNC:
            close_fds(fds)
            raise broken(f"more than {_MAX_FDS} descriptors in one message")
        if not data:
            raise Disconnected("end of stream")
        return data, fds

    def _size(self, prefix: bytes) -> int:
        """Bytes of the current message, or of its header while that is not complete."""
        if len(prefix) < HEADER_BYTES:
            return HEADER_BYTES
        _, _, size, flags, _ = HEADER.unpack_from(prefix)
        check_header(size, flags, LIMITS.vfio_message_bytes)
        return int(size)

    def _take(self, word: int, size: int, data: bytes, fds: Sequence[int]) -> bytes | None:
        u64 = self._u64
        have, count = word & _MESSAGE, word >> _FDS & 0xFF
        perhaps = self._adopt(count, fds)
        at = s.RX_DATA_AT + have
        self._state.u8[at : at + len(data)] = data
        word = have | count << _FDS
        u64[_RX64] = word | len(data) << _RECORDED | perhaps << _PERHAPS
        if self._consume(len(data), perhaps):
            count += perhaps
        have += len(data)
        u64[_RX64] = have | count << _FDS
        if have < HEADER_BYTES:
            return None
        # The header may have been completed just now, and say that there is more to come.
        size = self._size(bytes(self._record(HEADER_BYTES)))
        return bytes(self._record(size)) if have >= size else None

    def _adopt(self, count: int, fds: Sequence[int]) -> int:
        """Give peeked descriptors to the holder; returns how many."""
        if count + len(fds) > _MAX_FDS:
            close_fds(fds)
            raise broken(f"more than {_MAX_FDS} descriptors in one message")
        for n, fd in enumerate(fds):
            try:
                self._u32[_RX_SLOTS + count + n] = self._keep(fd)
            except BaseException:
                close_fds(fds[n + 1 :])
                raise
        return len(fds)

    def _consume(self, count: int, perhaps: int) -> bool:
        """Take ``count`` bytes off the socket; whether descriptors came with them."""
        # One call for all of it: a worker killed between two would leave half a message consumed.
        if count > len(self._scratch):
            self._scratch = bytearray(count)
        if perhaps:
            view = memoryview(self._scratch)[:count]
            got, ancillary, _, _ = self._socket.recvmsg_into([view], _ANCILLARY)
            close_fds(_descriptors(ancillary))  # those that were peeked are kept already
        else:
            got, ancillary = self._socket.recv_into(self._scratch, count), []
        if got != count:
            raise Disconnected(f"{got} of {count} bytes that had been there")
        return bool(ancillary)

    def _record(self, count: int) -> memoryview:
        return self._state.u8[s.RX_DATA_AT : s.RX_DATA_AT + count]

    def slots(self) -> list[int]:
        """The holder's slots of the descriptors that came with the current message."""
        count = self._u64[_RX64] >> _FDS & 0xFF
        return list(self._u32[_RX_SLOTS : _RX_SLOTS + count])

    # --- sending ---------------------------------------------------------------------------------

    def answer(self, data: bytes | None, fds: Sequence[int] = ()) -> None:
        """Answer the received message and forget it; ``None`` when it wants no reply.

        Raises:
            Disconnected: the client is gone.
        """
        if data is None:
            self._forget()
            return
        with self._lock:
            self._start(data, _REPLY | (_DIRECT if fds else 0))
            self._forget()
            if fds:
                self._direct(data, fds)
            else:
                self._pump(len(data))
            self._u64[_TX64] = 0

    def send(self, data: bytes) -> None:
        """Send a message of our own (a DMA request). Raises Disconnected."""
        with self._lock:
            self._complete()  # half a message of a predecessor's may be out already
            self._start(data, 0)
            self._pump(len(data))
            self._u64[_TX64] = 0

    def _start(self, data: bytes, flags: int) -> None:
        at = s.TX_DATA_AT
        self._state.u8[at : at + len(data)] = data
        self._u64[_TXP64] = 0
        self._u64[_TX64] = len(data) | flags

    def _forget(self) -> None:
        if self._u32[_RX_DEATHS]:
            self._u32[_RX_DEATHS] = 0
        self._u64[_RX64] = 0

    def _pump(self, total: int, sent: int = 0) -> None:
        """Send the record chunk by chunk, from ``sent`` on."""
        u64, u8 = self._u64, self._state.u8
        while sent < total:
            count = min(_PIPE_BYTES, total - sent)
            at = s.TX_DATA_AT + sent
            os.write(self._in, u8[at : at + count])
            u64[_TXP64] = sent | count << 32
            self._splice(count)
            sent += count
            u64[_TXP64] = sent

    def _complete(self) -> None:
        """Bring to its end whatever a predecessor was sending."""
        sending = self._u64[_TX64]
        if sending:
            if sending & _REPLY:
                self._forget()
            if not sending & _DIRECT:
                self._finish(sending & _LOW)
            self._u64[_TX64] = 0

    def _finish(self, total: int) -> None:
        """Send the rest of the record, from wherever a predecessor came to."""
        u64 = self._u64
        sent, count = u64[_TXP64] & _LOW, u64[_TXP64] >> 32
        if not count and self._piped():
            count = min(_PIPE_BYTES, total - sent)
            u64[_TXP64] = sent | count << 32
        self._splice(self._piped())
        u64[_TXP64] = sent + count
        self._pump(total, sent + count)

    def _splice(self, left: int) -> None:
        while left:
            try:
                left -= os.splice(self._out, self._fd, left)
            except OSError as error:
                raise Disconnected(str(error)) from error

    def _piped(self) -> int:
        return int(struct.unpack("i", fcntl.ioctl(self._out, termios.FIONREAD, bytes(4)))[0])

    def _direct(self, data: bytes, fds: Sequence[int]) -> None:
        try:
            sent = socket.send_fds(self._socket, [data], list(fds))
            if sent < len(data):
                self._socket.sendall(data[sent:])
        except OSError as error:
            raise Disconnected(str(error)) from error

    # --- taking over -----------------------------------------------------------------------------

    def resume(self) -> bytes | None:
        """Finish what a predecessor began. Returns a message that it consumed and did not answer.

        Raises:
            Disconnected: the client is gone.
        """
        u64 = self._u64
        with self._lock:
            self._complete()
        word = u64[_RX64]
        have, recorded = word & _MESSAGE, word >> _RECORDED & _MESSAGE
        count, perhaps = word >> _FDS & 0xFF, word >> _PERHAPS
        if recorded:
            head, fds = self._head(recorded)
            if head != bytes(self._record(have + recorded)[have:]):
                have += recorded
                if perhaps and self._were_ours(count, fds):
                    count += perhaps
            close_fds(fds)
            u64[_RX64] = have | count << _FDS
        if have < HEADER_BYTES:
            return None
        size = self._size(bytes(self._record(HEADER_BYTES)))
        return bytes(self._record(size)) if have >= size else None

    def _were_ours(self, count: int, left: Sequence[int]) -> bool:
        """Whether descriptors that were peeked came with the bytes that were then consumed: yes if
        they are not in the queue any more. When the queue's next are of the same file, both can
        be; then the consumed message has them if it is of a kind that brings any.
        """
        if not left:
            return True
        kept = os.fstat(self._look(self._u32[_RX_SLOTS + count]))
        next_one = os.fstat(left[0])
        if (kept.st_dev, kept.st_ino) != (next_one.st_dev, next_one.st_ino):
            return True
        _, command, _, _, _ = HEADER.unpack_from(self._record(HEADER_BYTES))
        return command in (Command.DMA_MAP, Command.DEVICE_SET_IRQS)

    def _head(self, count: int) -> tuple[bytes, list[int]]:
        try:
            return self._peek(count)
        except Disconnected:
            return b"", []

    def unsent(self) -> bytes:
        """What is still to be sent, taken out of record and pipe: for one that has no successor
        and sends it by other means, before :meth:`resume`.
        """
        u64 = self._u64
        sending = u64[_TX64]
        if not sending:
            return b""
        if sending & _REPLY:
            self._forget()
        data = b""
        if not sending & _DIRECT:
            total = sending & _LOW
            sent, count = u64[_TXP64] & _LOW, u64[_TXP64] >> 32
            piped = self._piped()
            if not count and piped:
                count = min(_PIPE_BYTES, total - sent)
            data = os.read(self._out, piped) if piped else b""
            data += bytes(self._state.u8[s.TX_DATA_AT + sent + count : s.TX_DATA_AT + total])
        u64[_TX64] = 0
        return data

    def blame(self, points: int) -> int:
        """A worker died over the current message; the points of all that did (blame.py)."""
        self._u32[_RX_DEATHS] += points
        return int(self._u32[_RX_DEATHS])

    def discard(self) -> None:
        """Forget both records and empty the pipe: the connection is over."""
        self._forget()
        self._u64[_TX64] = 0
        while left := self._piped():
            os.read(self._out, left)


def in_hand(state: State) -> int | None:
    """The command of the message that is received whole and not answered; for an observer."""
    have = state.u64[_RX64] & _MESSAGE
    if have < HEADER_BYTES:
        return None
    _, command, size, _, _ = HEADER.unpack_from(state.u8, s.RX_DATA_AT)
    return int(command) if have >= size else None


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(raw[: len(raw) // 4 * 4])
            fds.extend(numbers)
    return fds
