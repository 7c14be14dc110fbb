"""Framing: bytes in any cut, descriptors to their own message, limits, no leak."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import ProtocolError
from accelvisor.vfio_user.protocol import HEADER, Command
from accelvisor.vfio_user.wire import (
    FrameReader,
    Message,
    encode_command,
    encode_error,
    encode_reply,
)
from tests.descriptors import open_fds

bodies = st.lists(st.binary(max_size=200), min_size=1, max_size=8)


def stream(parts: list[bytes]) -> bytes:
    return b"".join(encode_command(i, Command.REGION_WRITE, b) for i, b in enumerate(parts))


def read_all(reader: FrameReader, data: bytes, step: int) -> list[Message]:
    """Read as a socket does: at most ``space`` bytes, at most ``step`` of them."""
    messages: list[Message] = []
    at = 0
    while True:
        message = reader.buffered()
        if message is None:
            if at == len(data):
                return messages
            space = reader.space()
            count = min(len(space), step, len(data) - at)
            space[:count] = data[at : at + count]
            at += count
            message = reader.advance(count)
        if message is not None:
            messages.append(message)


@given(bodies, st.integers(1, 300), st.sampled_from([16, 32, 4096]))
def test_messages_come_out_whole_however_the_bytes_are_cut(
    parts: list[bytes], step: int, first: int
) -> None:
    messages = read_all(FrameReader(first=first), stream(parts), step)
    assert [bytes(m.body) for m in messages] == parts
    assert [m.id for m in messages] == list(range(len(parts)))


def test_byte_by_byte() -> None:
    reader = FrameReader()
    messages = read_all(reader, stream([b"one", b"", b"three"]), 1)
    assert [bytes(m.body) for m in messages] == [b"one", b"", b"three"]
    assert reader.is_idle


def test_reader_never_asks_past_a_long_message() -> None:
    reader = FrameReader()
    data = encode_command(1, Command.REGION_WRITE, bytes(100))
    reader.space()[:32] = data[:32]
    assert reader.advance(32) is None
    assert len(reader.space()) == 16 + 100 - 32


@pytest.mark.parametrize("size", [0, 1, 15])
def test_size_smaller_than_header_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="smaller than its header"):
        FrameReader().feed(HEADER.pack(1, 1, size, 0, 0))


def test_oversized_message_is_refused_before_its_body_is_read() -> None:
    with pytest.raises(ProtocolError, match="the limit is 4096"):
        FrameReader(limit=4096).feed(HEADER.pack(1, 1, 4097, 0, 0))


@pytest.mark.parametrize("flags", [0x2, 0xF, 0x40, 0x8000_0000, 0x101])
def test_unknown_message_flags_are_refused(flags: int) -> None:
    with pytest.raises(ProtocolError, match="unknown message flags"):
        FrameReader().feed(HEADER.pack(1, 1, 16, flags, 0))


def test_message_at_the_limit_is_read() -> None:
    data = encode_command(1, Command.REGION_WRITE, bytes(4096 - 16))
    (message,) = FrameReader(limit=4096).feed(data)
    assert message.size == 4096


def pipe_fds(count: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]


def test_descriptors_go_with_the_message_they_came_beside() -> None:
    reader = FrameReader()
    one, two = pipe_fds(2)
    first = reader.feed(encode_command(1, Command.DMA_MAP, bytes(32)), [one])
    second = reader.feed(encode_command(2, Command.DMA_MAP, bytes(32)), [two])
    assert list(first[0].fds) == [one]
    assert list(second[0].fds) == [two]
    first[0].close()
    second[0].close()


def test_descriptor_of_the_next_message_is_not_taken_for_a_short_one() -> None:
    # A RESET (16 bytes) and the head of a DMA_MAP arrive in one read, the descriptor with them:
    # the kernel ends a read at the bytes that a descriptor came with.
    reader = FrameReader()
    (fd,) = pipe_fds(1)
    dma_map = encode_command(2, Command.DMA_MAP, bytes(32))
    reader.space()[:32] = encode_command(1, Command.DEVICE_RESET) + dma_map[:16]
    reset = reader.advance(32, [fd])
    assert reset is not None
    assert not reset.fds
    assert reader.buffered() is None
    rest = reader.space()
    assert len(rest) == 32
    rest[:] = dma_map[16:]
    message = reader.advance(32)
    assert message is not None
    assert list(message.fds) == [fd]
    message.close()


def test_several_short_messages_in_one_read() -> None:
    reader = FrameReader(first=4096)
    data = b"".join(encode_command(i, Command.DEVICE_RESET) for i in range(5))
    reader.space()[: len(data)] = data
    got = [reader.advance(len(data))]
    while (message := reader.buffered()) is not None:
        got.append(message)
    assert [m.id for m in got if m] == [0, 1, 2, 3, 4]


def test_too_many_descriptors_are_refused_and_closed() -> None:
    before = open_fds()
    reader = FrameReader(max_fds=3)
    data = encode_command(1, Command.DMA_MAP, bytes(32))
    with pytest.raises(ProtocolError, match="4 descriptors"):
        reader.feed(data, pipe_fds(4))
    reader.close()
    assert open_fds() == before


def test_descriptors_over_several_reads_are_counted_together() -> None:
    before = open_fds()
    reader = FrameReader(max_fds=3)
    data = encode_command(1, Command.DMA_MAP, bytes(32))
    reader.feed(data[:20], pipe_fds(2))
    with pytest.raises(ProtocolError, match="4 descriptors"):
        reader.feed(data[20:], pipe_fds(2))
    reader.close()
    assert open_fds() == before


def test_descriptors_of_an_unfinished_message_are_closed() -> None:
    before = open_fds()
    reader = FrameReader()
    reader.feed(encode_command(1, Command.DMA_MAP, bytes(32))[:20], pipe_fds(2))
    assert not reader.is_idle
    reader.close()
    assert reader.is_idle
    assert open_fds() == before


def test_descriptors_beside_a_broken_header_are_closed() -> None:
    before = open_fds()
    reader = FrameReader()
    with pytest.raises(ProtocolError):
        reader.feed(HEADER.pack(1, 1, 3, 0, 0), pipe_fds(2))
    reader.close()
    assert open_fds() == before


def test_message_must_be_exactly_as_long_as_its_header_says() -> None:
    raw = encode_command(1, Command.DEVICE_RESET)
    for wrong in (raw[:-1], raw + b"\0", b""):
        with pytest.raises(ProtocolError):
            Message(wrong)


def test_encoders_and_the_message_agree() -> None:
    command = Message(encode_command(7, Command.REGION_READ, b"body", no_reply=True))
    assert (command.id, command.command, command.is_reply, command.wants_reply) == (
        7, Command.REGION_READ, False, False,
    )  # fmt: skip
    reply = Message(encode_reply(7, Command.REGION_READ, b"data"))
    assert reply.is_reply
    assert bytes(reply.body) == b"data"
    refusal = Message(encode_error(7, Command.REGION_READ, 22))
    assert refusal.size == 16
    assert refusal.errno == 22
    assert "REGION_READ" in repr(refusal)
    assert "command 999" in repr(Message(encode_command(1, 999)))


def test_taking_descriptors_twice_gives_them_once() -> None:
    before = open_fds()
    message = Message(encode_command(1, Command.DMA_MAP), pipe_fds(1))
    taken = message.take_fds()
    assert not message.take_fds()
    message.close()
    for fd in taken:
        os.close(fd)
    assert open_fds() == before


@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_give_messages_or_a_protocol_error(data: bytes, step: int) -> None:
    try:
        messages = read_all(FrameReader(limit=4096), data, step)
    except ProtocolError:
        return
    assert sum(m.size for m in messages) <= len(data)
