"""The answers of a function that gave up: always a whole message, never an exception."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.function.giveup import reply_to
from accelvisor.vfio_user.protocol import FLAG_ERROR, HEADER, TYPE_REPLY, Command
from accelvisor.vfio_user.wire import encode_command


@given(command=st.integers(0, 40), flags=st.integers(0, 0x3F), body=st.binary(max_size=80))
def test_every_message_gets_one_whole_reply_or_wants_none(
    command: int, flags: int, body: bytes
) -> None:
    raw = HEADER.pack(7, command, 16 + len(body), flags, 0) + body
    reply = reply_to(raw)
    if flags & 0x1F:
        assert reply is None
        return
    assert reply is not None
    ident, echoed, size, kind, _ = HEADER.unpack_from(reply)
    assert (ident, echoed, size) == (7, command, len(reply))
    assert kind & 0xF == TYPE_REPLY


def test_reads_give_all_ones() -> None:
    access = struct.pack("<QII", 0x10, 0, 8)
    assert reply_to(encode_command(1, Command.REGION_READ, access)) == (
        HEADER.pack(1, Command.REGION_READ, 40, TYPE_REPLY, 0) + access + b"\xff" * 8
    )


@pytest.mark.parametrize("count", [1 << 21, (1 << 32) - 1])
def test_a_huge_read_is_refused_and_not_allocated(count: int) -> None:
    reply = reply_to(encode_command(1, Command.REGION_READ, struct.pack("<QII", 0, 0, count)))
    assert reply is not None
    _, _, size, flags, number = HEADER.unpack(reply)
    assert (size, flags, number) == (16, TYPE_REPLY | FLAG_ERROR, errno.ENODEV)


@pytest.mark.parametrize("command", [Command.VERSION, Command.DEVICE_GET_INFO, 99])
def test_everything_else_is_no_device(command: int) -> None:
    reply = reply_to(encode_command(1, command, bytes(32)))
    assert reply is not None
    assert HEADER.unpack(reply)[4] == errno.ENODEV
