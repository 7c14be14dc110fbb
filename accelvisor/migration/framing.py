"""Frames on one connection between hosts, sans-IO.

Sixteen bytes of header, little-endian ``<BBHIQ``: magic, type, channel, length, exchange; then
``length`` bytes. The header and the greeting stay as they are in every version, so that two
versions can always tell each other what they speak. The length is bounded before a byte is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from uuid import UUID

import msgspec

from accelvisor.errors import ConflictError, ProtocolError
from accelvisor.limits import LIMITS, Limits

HEADER = struct.Struct("<BBHIQ")
MAGIC = 0xAC
#: Versions of the messages that this code speaks.
VERSIONS = (1, 1)

_WHERE = "peer"
_CREDIT = struct.Struct("<I")
_TEXT = 64


class Type(IntEnum):
    """What a frame is. ``exchange`` names a request and is 0 elsewhere."""

    HELLO = 1  # first in both directions, unless it is a CLOSE
    REQUEST = 2
    RESPONSE = 3
    ERROR = 4
    NOTICE = 5  # wants no answer
    PING = 6  # 8 bytes, which come back
    PONG = 7
    WINDOW = 8  # so many more bytes may come on this channel
    CLOSE = 9  # the last one, with the reason


#: Which carry messages, and therefore count against a channel's window.
COUNTED = frozenset((Type.REQUEST, Type.NOTICE))
_SIZED = {Type.PING: 8, Type.PONG: 8, Type.WINDOW: _CREDIT.size}
_EXCHANGED = frozenset((Type.REQUEST, Type.RESPONSE, Type.ERROR))


@dataclass(frozen=True, slots=True)
class Frame:
    """Raises ValueError from :meth:`pack` for what does not fit: a mistake of ours."""

    type: Type
    payload: bytes = b""
    exchange: int = 0
    channel: int = 0

    def pack(self) -> bytes:
        try:
            head = HEADER.pack(MAGIC, self.type, self.channel, len(self.payload), self.exchange)
        except struct.error as error:
            raise ValueError(str(error)) from error
        return head + self.payload


class Decoder:
    """Bytes to frames; keeps at most one frame and what one ``feed`` brought.

    After an error nothing that follows can be trusted; the decoder stays broken.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._greeted = False
        self._broken = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole by now, one by one.

        Raises:
            ProtocolError: ``peer-frame`` (magic, type, form), ``peer-frame-long``,
                ``peer-greeting`` (something else than a greeting came first, or a second one).
        """
        if self._broken:
            raise _bad("the stream was broken before")
        self._buffer += data
        try:
            yield from self._frames()
        except ProtocolError:
            self._broken = True
            self._buffer.clear()
            raise

    @property
    def partial(self) -> bool:
        """The stream ended (or pauses) inside a frame."""
        return bool(self._buffer)

    def _frames(self) -> Iterator[Frame]:
        while len(self._buffer) >= HEADER.size:
            magic, number, channel, length, exchange = HEADER.unpack_from(self._buffer)
            kind = self._check(magic, number, channel, length, exchange)
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[HEADER.size : end])
            del self._buffer[:end]
            self._greeted = True
            yield Frame(kind, payload, exchange, channel)

    def _check(self, magic: int, number: int, channel: int, length: int, exchange: int) -> Type:
        if magic != MAGIC:
            raise _bad("it does not begin with the magic")
        try:
            kind = Type(number)
        except ValueError:
            raise _bad(f"type {number} does not exist") from None
        # Whoever is refused gets no greeting, only the reason.
        if (kind is Type.HELLO) is self._greeted and (self._greeted or kind is not Type.CLOSE):
            raise ProtocolError(
                f"{kind.name} {'again' if self._greeted else 'before a greeting'}",
                code="peer-greeting",
                where=_WHERE,
            )
        most = self._limits.peer_frame_bytes if self._greeted else self._limits.peer_hello_bytes
        if length > most:
            raise ProtocolError(
                f"a frame of {length} bytes, at most {most} are allowed",
                code="peer-frame-long",
                where=_WHERE,
            )
        if length != _SIZED.get(kind, length):
            raise _bad(f"{kind.name} with {length} bytes")
        if (kind in _EXCHANGED) != (exchange > 0):
            raise _bad(f"{kind.name} with exchange {exchange}")
        if channel >= self._limits.peer_channels:
            raise _bad(f"channel {channel}")
        return kind


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The greeting. Fields that a later version adds are passed over by an earlier one.

    Args:
        lowest: and ``highest``, versions of the messages that it speaks.
        features: what it can beyond that, e.g. ``zstd``; unknown ones are passed over.
        host: its UUID; the TLS key decides, this must agree.
        software: ``accelvisor 0.1.0``, for people.
    """

    lowest: int
    highest: int
    host: UUID
    features: tuple[str, ...] = ()
    software: str = ""

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Raises ProtocolError ``peer-greeting``."""
        try:
            hello = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(
                f"the greeting cannot be read: {error}", code="peer-greeting", where=_WHERE
            ) from error
        texts = (hello.software, *hello.features)
        if len(texts) > 32 or any(len(text) > _TEXT or not text.isprintable() for text in texts):
            raise ProtocolError(
                "the greeting has names that are none", code="peer-greeting", where=_WHERE
            )
        return hello


@dataclass(frozen=True, slots=True)
class Agreed:
    """What both sides speak."""

    version: int
    features: frozenset[str]


def agree(mine: Hello, theirs: Hello) -> Agreed:
    """The highest version that both speak; both sides come to the same answer.

    Raises:
        ConflictError: ``peer-version``, there is none.
    """
    version = min(mine.highest, theirs.highest)
    if version < max(mine.lowest, theirs.lowest):
        older = theirs if theirs.highest < mine.lowest else mine
        raise ConflictError(
            f"this host speaks versions {mine.lowest} to {mine.highest}, host {theirs.host} "
            f"{theirs.lowest} to {theirs.highest} ({theirs.software or 'unnamed'})",
            code="peer-version",
            where=_WHERE,
            hint=f"upgrade accelvisor on host {older.host}",
        )
    return Agreed(version, frozenset(mine.features) & frozenset(theirs.features))


def pack_credit(count: int) -> bytes:
    return _CREDIT.pack(count)


def unpack_credit(payload: bytes) -> int:
    (count,) = _CREDIT.unpack(payload)
    return int(count)


def _bad(why: str) -> ProtocolError:
    return ProtocolError(f"this is no frame: {why}", code="peer-frame", where=_WHERE)
