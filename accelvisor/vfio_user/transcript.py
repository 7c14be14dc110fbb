"""Transcripts: what two ends said to each other, one JSON object a line, without times.

    {"connection": 1}                                        a client connected
    {"from": "client", "id": 4, "command": "DMA_MAP", "body": "2000…", "bytes": 48, "fds": [...]}
    {"from": "server", "id": 4, "command": "DMA_MAP", "reply": true, "bytes": 16}
    {"end": "client"}                                        the client closed its end

``body`` is hexadecimal without trailing zero bytes; ``bytes`` is the size of the whole message and
restores them. Descriptors are markers: ``memfd:SIZE``, ``eventfd`` or ``file``. Keys with default
values (``flags`` of a plain message, ``errno`` 0) are left out.

:func:`replay` plays a client's part to a server session and tells where the answers differ.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from accelvisor.errors import ProtocolError
from accelvisor.vfio_user.protocol import (
    FLAG_ERROR,
    FLAG_NO_REPLY,
    HEADER,
    HEADER_BYTES,
    TYPE_COMMAND,
    TYPE_REPLY,
    Command,
)
from accelvisor.vfio_user.session import ServerSession
from accelvisor.vfio_user.wire import Message, close_fds, command_name

#: A replayed memfd is never made larger than this; a guest's RAM is recorded with its true size.
_MAX_MEMFD = 1 << 40

Side = Literal["client", "server"]


class _Line(
    msgspec.Struct,
    rename={"sender": "from"},
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    connection: int = 0
    end: Side | None = None
    sender: Side | None = None
    id: int = 0
    command: str = ""
    reply: bool = False
    no_reply: bool = False
    error: bool = False
    errno: int = 0
    body: str = ""
    bytes: int = 0
    fds: list[str] = []


_LINE = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class Connected:
    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    side: Side


@dataclass(frozen=True, slots=True)
class Said:
    """One message: who sent it, its bytes, and markers for its descriptors."""

    side: Side
    raw: bytes
    fds: tuple[str, ...] = ()


Record = Connected | Ended | Said


def write_line(record: Record) -> str:
    """One line, without its newline."""
    return msgspec.json.encode(_to_line(record)).decode()


def _to_line(record: Record) -> _Line:
    if isinstance(record, Connected):
        return _Line(connection=record.number)
    if isinstance(record, Ended):
        return _Line(end=record.side)
    ident, command, size, flags, number = HEADER.unpack_from(record.raw)
    return _Line(
        sender=record.side,
        id=ident,
        command=command_name(command),
        reply=bool(flags & TYPE_REPLY),
        no_reply=bool(flags & FLAG_NO_REPLY),
        error=bool(flags & FLAG_ERROR),
        errno=number,
        body=record.raw[HEADER_BYTES:].rstrip(b"\0").hex(),
        bytes=size,
        fds=list(record.fds),
    )


def read(lines: Iterable[str]) -> Iterator[Record]:
    """Parse a transcript; empty lines and lines that start with # are comments.

    Raises:
        ProtocolError: code ``transcript``, a line is none of the above.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            yield _from_line(_LINE.decode(line))
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            raise ProtocolError(
                f"line {number}: {error}",
                code="transcript", where="vfio-user transcript", hint="record it again",
            ) from error  # fmt: skip


def _from_line(line: _Line) -> Record:
    if line.connection:
        return Connected(line.connection)
    if line.end is not None:
        return Ended(line.end)
    if line.sender is None:
        raise ValueError("neither a connection nor an end nor a message")
    known = line.command in Command.__members__
    number = Command[line.command] if known else int(line.command.removeprefix("command "))
    flags = TYPE_REPLY if line.reply else TYPE_COMMAND
    flags |= (FLAG_NO_REPLY if line.no_reply else 0) | (FLAG_ERROR if line.error else 0)
    body = bytes.fromhex(line.body)
    if not HEADER_BYTES + len(body) <= line.bytes < 1 << 32:
        raise ValueError(f"{len(body)} bytes of body in a message of {line.bytes}")
    header = HEADER.pack(line.id, number, line.bytes, flags, line.errno)
    return Said(line.sender, (header + body).ljust(line.bytes, b"\0"), tuple(line.fds))


def marker(fd: int) -> str:
    """What a descriptor is, as a transcript names it."""
    name = os.readlink(f"/proc/self/fd/{fd}")
    if "eventfd" in name:
        return "eventfd"
    status = os.fstat(fd)
    return f"memfd:{status.st_size}" if stat.S_ISREG(status.st_mode) else "file"


def make_fd(name: str) -> int:
    """A descriptor of the kind that a marker names.

    Raises:
        ProtocolError: code ``transcript``, the marker is unknown.
    """
    kind, _, size = name.partition(":")
    if kind == "eventfd":
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    if kind == "memfd" and size.isdigit() and int(size) <= _MAX_MEMFD:
        fd = os.memfd_create("replay", os.MFD_CLOEXEC)
        os.ftruncate(fd, int(size))
        return fd
    if kind == "file":
        return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    raise ProtocolError(
        f"descriptor marker {name!r}", code="transcript", where="vfio-user transcript",
        hint="record it again",
    )  # fmt: skip


def replay(
    records: Iterable[Record],
    connect: Callable[[], ServerSession],
    make: Callable[[str], int] = make_fd,
) -> list[str]:
    """Play the client's messages to sessions and compare the answers with the recorded ones.

    Args:
        connect: a new session for each recorded connection. At the client's end the session is
            released, as a server does.

    Returns:
        A sentence for each difference; none when every answer is the recorded one, byte by byte.
    """
    differences: list[str] = []
    session: ServerSession | None = None
    answers: list[tuple[bytes, int]] = []
    for record in records:
        if isinstance(record, Said) and (record.side == "server") != Message(record.raw).is_reply:
            continue  # the server asked for DMA and was answered: not a session's part
        if isinstance(record, Said) and record.side == "server":
            _compare(record, answers, differences)
            continue
        if isinstance(record, Connected):
            session = connect()
            answers = []
        elif session is None:
            differences.append("a message before any connection")
        elif isinstance(record, Ended):
            if answers:
                differences.append(f"{len(answers)} answers more than were recorded")
                answers = []
            if record.side == "client":
                session.release()
        else:
            answer = _ask(session, record, make)
            if answer is not None:
                answers.append(answer)
    return differences


def _ask(
    session: ServerSession, said: Said, make: Callable[[str], int]
) -> tuple[bytes, int] | None:
    reply = session.handle(Message(said.raw, [make(name) for name in said.fds]))
    if reply is None:
        return None
    close_fds(reply.close_after)
    return reply.data, len(reply.fds)


def _compare(said: Said, answers: list[tuple[bytes, int]], differences: list[str]) -> None:
    wanted = Message(said.raw)
    if not answers:
        differences.append(f"no answer where {wanted!r} was recorded")
        return
    data, fds = answers.pop(0)
    if data != said.raw:
        differences.append(_difference(wanted, Message(data)))
    if fds != len(said.fds):
        differences.append(f"{fds} descriptors with {wanted!r}, {len(said.fds)} were recorded")


def _difference(wanted: Message, got: Message) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(wanted.raw, got.raw, strict=False)) if a != b),
        min(wanted.size, got.size),
    )
    return f"{got!r} where {wanted!r} was recorded; byte {at} is the first to differ"


def commands(records: Sequence[Record]) -> dict[str, int]:
    """How often the client asked for what: the summary of a transcript."""
    counts: dict[str, int] = {}
    for record in records:
        if isinstance(record, Said) and record.side == "client":
            name = command_name(Message(record.raw).command)
            counts[name] = counts.get(name, 0) + 1
    return counts



