"""Framing: bytes and file descriptors <-> messages. No socket is touched here.

A message is a 16-byte header and a body; its ``size`` counts both. File descriptors travel beside
the bytes and belong to the message whose bytes they came with. Peers pipeline, so a reader that
takes all that is there mistakes descriptors of the next message for its own: :class:`FrameReader`
says how many bytes may be read now.

Who owns a descriptor: whoever holds the :class:`Message`. ``take_fds`` moves them out, ``close``
closes what is left, and both may be called twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from accelvisor.errors import ProtocolError
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.protocol import (
    FLAG_ERROR,
    FLAG_NO_REPLY,
    HEADER,
    HEADER_BYTES,
    TYPE_COMMAND,
    TYPE_MASK,
    TYPE_REPLY,
    Command,
)

_GOOD_FLAGS = frozenset(
    kind | no_reply | error
    for kind in (TYPE_COMMAND, TYPE_REPLY)
    for no_reply in (0, FLAG_NO_REPLY)
    for error in (0, FLAG_ERROR)
)
_NO_FDS: tuple[int, ...] = ()
_UNPACK = HEADER.unpack_from


def close_fds(fds: Iterable[int]) -> None:
    """Close each descriptor; one that is closed already is a bug elsewhere and is let pass."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def broken(message: str, hint: str = "the peer does not speak vfio-user") -> ProtocolError:
    """The error for bytes after which a connection cannot go on."""
    return ProtocolError(message, code="vfio-user-framing", where="vfio-user", hint=hint)


class Message:
    """One received message: its raw bytes (header included) and the descriptors it came with.

    Raises:
        ProtocolError: ``raw`` is not exactly one message by its own header.
    """

    __slots__ = ("command", "errno", "fds", "flags", "id", "raw", "size")

    def __init__(self, raw: bytes, fds: Sequence[int] = _NO_FDS) -> None:
        if len(raw) < HEADER_BYTES:
            raise broken(f"{len(raw)} bytes, a header has {HEADER_BYTES}")
        self.raw = raw
        self.fds = fds
        self.id: int
        self.command: int
        self.size: int
        self.flags: int
        self.errno: int
        self.id, self.command, self.size, self.flags, self.errno = _UNPACK(raw)
        if self.size != len(raw):
            raise broken(f"the header says {self.size} bytes, the message has {len(raw)}")

    @property
    def is_reply(self) -> bool:
        return self.flags & TYPE_MASK == TYPE_REPLY

    @property
    def wants_reply(self) -> bool:
        return not self.flags & FLAG_NO_REPLY

    @property
    def body(self) -> memoryview:
        return memoryview(self.raw)[HEADER_BYTES:]

    def take_fds(self) -> Sequence[int]:
        """The descriptors, which the caller owns from now on."""
        fds, self.fds = self.fds, _NO_FDS
        return fds

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        if self.fds:
            close_fds(self.take_fds())

    def __repr__(self) -> str:
        kind = "reply" if self.is_reply else "command"
        return (
            f"Message({kind} {command_name(self.command)} id={self.id} size={self.size}"
            f" flags={self.flags:#x} errno={self.errno} fds={len(self.fds)})"
        )


def command_name(number: int) -> str:
    """The specification's name of a command, or its number when it has none."""
    try:
        return Command(number).name
    except ValueError:
        return f"command {number}"


def encode_command(ident: int, command: int, body: bytes = b"", *, no_reply: bool = False) -> bytes:
    """A request. ``ident`` (0..65535) is echoed by the reply."""
    flags = TYPE_COMMAND | (FLAG_NO_REPLY if no_reply else 0)
    return HEADER.pack(ident, command, HEADER_BYTES + len(body), flags, 0) + body


def encode_reply(ident: int, command: int, body: bytes = b"") -> bytes:
    """A successful reply."""
    return HEADER.pack(ident, command, HEADER_BYTES + len(body), TYPE_REPLY, 0) + body


def encode_error(ident: int, command: int, errno: int) -> bytes:
    """A refusal: the header alone, as the specification demands."""
    return HEADER.pack(ident, command, HEADER_BYTES, TYPE_REPLY | FLAG_ERROR, errno)


def check_header(size: int, flags: int, limit: int) -> None:
    """Refuse a header after which the stream cannot be followed.

    Raises:
        ProtocolError: impossible size or unknown message type.
    """
    if size < HEADER_BYTES:
        raise broken(f"message size {size} is smaller than its header")
    if size > limit:
        raise broken(f"message of {size} bytes, the limit is {limit}")
    if flags not in _GOOD_FLAGS:
        raise broken(f"unknown message flags {flags:#x}")


class FrameReader:
    """Collects one message at a time from reads of any size.

    Use: read at most ``len(reader.space())`` bytes into ``reader.space()``, then call
    ``advance(count, fds)``; a message comes back when it is complete. Where ``first`` lets a read
    run into the next message, :meth:`buffered` gives out what is complete already; call it before
    each read. After an error the stream is lost and the reader must be closed.

    Args:
        limit: largest message in bytes.
        max_fds: most descriptors of one message.
        first: bytes that the first read of a message may take. The default of 32 saves a system
            call for the common requests and still tells descriptors apart: the kernel ends a read
            after the bytes that descriptors came with, and a command shorter than 32 bytes carries
            none, so descriptors belong to the message that the last byte read is part of. A
            client, to which descriptors come only in the reply that it waits for, may take more.
    """

    __slots__ = ("_buffer", "_fds", "_filled", "_first", "_limit", "_max_fds", "_view", "_wanted")

    def __init__(
        self,
        *,
        limit: int = LIMITS.vfio_message_bytes,
        max_fds: int = LIMITS.vfio_message_fds,
        first: int = 32,
    ) -> None:
        self._limit = limit
        self._max_fds = max_fds
        self._first = first
        self._buffer = bytearray(4096)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._wanted = first
        self._fds: list[int] = []

    @property
    def is_idle(self) -> bool:
        """True between messages: the end of the stream is clean here and torn anywhere else."""
        return not self._filled

    def space(self) -> memoryview:
        """Where the next bytes go."""
        return self._view[self._filled : self._wanted]

    def buffered(self) -> Message | None:
        """A message that an earlier read has completed."""
        return self._cut(()) if self._filled >= HEADER_BYTES else None

    def advance(self, count: int, fds: Sequence[int] = _NO_FDS) -> Message | None:
        """Account for ``count`` bytes read into :meth:`space` and the descriptors beside them.

        Raises:
            ProtocolError: the message is impossible, or brings too many descriptors. All
                descriptors, these included, are closed by :meth:`close`.
        """
        self._filled += count
        if self._filled < HEADER_BYTES:
            if fds:
                self._keep(fds)
            return None
        return self._cut(fds)

    def feed(self, data: bytes, fds: Sequence[int] = _NO_FDS) -> list[Message]:
        """Every message that ``data`` completes (for tests and transcripts, where bytes come in
        any cut). ``fds`` belong to the message that the first byte of ``data`` is part of.
        """
        messages: list[Message] = []
        at = 0
        while at < len(data):
            # Never past a message's end, so that the descriptors are its own.
            space = self.space()
            wanted = self._wanted if self._filled >= HEADER_BYTES else HEADER_BYTES
            count = min(len(space), len(data) - at, wanted - self._filled)
            space[:count] = data[at : at + count]
            at += count
            message = self.advance(count, fds)
            fds = _NO_FDS
            if message is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        """Close the descriptors of a message that never became complete."""
        taken, self._fds = self._fds, []
        close_fds(taken)
        self._filled = 0
        self._wanted = self._first

    def _cut(self, fds: Sequence[int]) -> Message | None:
        """The first message of the buffer if it is whole; ``fds`` came with the last byte."""
        _, _, size, flags, _ = _UNPACK(self._buffer)
        if size < HEADER_BYTES or size > self._limit or flags not in _GOOD_FLAGS:
            if fds:
                self._fds.extend(fds)
            check_header(size, flags, self._limit)
        filled = self._filled
        if filled < size:
            if fds:
                self._keep(fds)
            if size > len(self._buffer):
                self._grow(size)
            self._wanted = size
            return None
        raw = bytes(self._view[:size])
        rest = filled - size
        if fds and not rest:
            self._keep(fds)
            fds = _NO_FDS
        taken, self._fds = (self._fds, []) if self._fds else (_NO_FDS, self._fds)
        self._filled = rest
        self._wanted = self._first
        if rest:
            self._buffer[:rest] = self._buffer[size:filled]
            if fds:
                self._fds = list(fds)
        return Message(raw, taken)

    def _keep(self, fds: Sequence[int]) -> None:
        self._fds.extend(fds)
        if len(self._fds) > self._max_fds:
            raise broken(f"{len(self._fds)} descriptors in one message, {self._max_fds} agreed")

    def _grow(self, size: int) -> None:
        # In powers of two: a peer of large messages costs a few allocations, one of small none.
        bigger = bytearray(min(1 << (size - 1).bit_length(), max(self._limit, size)))
        bigger[: self._filled] = self._view[: self._filled]
        self._buffer = bigger
        self._view = memoryview(bigger)
