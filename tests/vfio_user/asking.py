"""Ask a session and get its answer: what the session tests share."""

from __future__ import annotations

import os

from accelvisor.vfio_user import features, messages
from accelvisor.vfio_user.messages import DmaMap, IrqRequest
from accelvisor.vfio_user.protocol import (
    Command,
    IrqSet,
    PciIrq,
)
from accelvisor.vfio_user.session import ServerSession
from accelvisor.vfio_user.wire import Message, encode_command

EVENTFD = IrqSet.DATA_EVENTFD | IrqSet.ACTION_TRIGGER
TRIGGER = IrqSet.DATA_NONE | IrqSet.ACTION_TRIGGER


def ask(
    session: ServerSession, command: int, body: bytes = b"", fds: list[int] | None = None
) -> Message:
    reply = session.handle(Message(encode_command(9, command, body), fds or []))
    assert reply is not None
    message = Message(reply.data, reply.fds)
    assert (message.id, message.command, message.is_reply) == (9, command, True)
    assert message.errno == 0 or message.size == 16, "an error reply is the header alone"
    return message


def refused(
    session: ServerSession, command: int, body: bytes = b"", fds: list[int] | None = None
) -> int:
    number = ask(session, command, body, fds).errno
    assert number, "it was not refused"
    return number


def memfd(size: int = 0x10000) -> int:
    fd = os.memfd_create("ram")
    os.ftruncate(fd, size)
    return fd


def mapping(address: int = 0x1000, size: int = 0x1000, flags: int = 3, offset: int = 0) -> bytes:
    return messages.pack_dma_map(DmaMap(flags, offset, address, size))


def read(region: int, offset: int, count: int) -> bytes:
    return messages.ACCESS.pack(offset, region, count)


def irqs(flags: int, start: int, count: int, data: bytes = b"", index: int = PciIrq.MSI) -> bytes:
    return messages.pack_set_irqs(IrqRequest(flags, index, start, count, data))


def feature(session: ServerSession, flags: int, number: int, data: bytes = b"") -> bytes:
    body = features.pack_feature(flags, number, data, argsz=4096)
    return bytes(ask(session, Command.DEVICE_FEATURE, body).body)


