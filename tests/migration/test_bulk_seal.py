"""Sealing a transfer: what lies in staging is what complete rounds brought, and nothing else comes.

Each test is a source that writes bytes which no signed chunk covers.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from accelvisor.errors import DataError, UnavailableError
from accelvisor.frames.chunks import Coding
from accelvisor.limits import KIB
from accelvisor.migration.bulk import MESSAGE, PAGE_BYTES, Round, State, Type
from accelvisor.migration.channel import Channel
from accelvisor.migration.receiver import Receiver
from tests.migration.hostile import MEMORY, chunk, victim
from tests.migration.hosts import channels, close, until

PAGE = bytes([1]) * PAGE_BYTES


def say(channel: Channel, *messages: bytes) -> None:
    for message in messages:
        channel.write(message)
    channel.flush()


def answer(channel: Channel) -> Round:
    kind, body = MESSAGE.unpack(channel.read(MESSAGE.size))
    assert kind == Type.ACK
    return Round.unpack(body)


def again(receiver: Receiver) -> tuple[Channel, State]:
    """The connection breaks, and there is another."""
    receiver.close()
    [near], far = channels()
    receiver.attach(far)
    return near, State.read(near)


def uncovered(receiver: Receiver, chunks: int) -> None:
    with pytest.raises(DataError) as caught:
        receiver.seal(chunks)
    assert caught.value.code == "bulk-uncovered"


def test_a_complete_round_is_sealed_at_once_and_nothing_comes_after_it() -> None:
    with victim() as (receiver, near):
        say(near, chunk(), PAGE, Round(0, 0, 1).pack(Type.ROUND))
        assert answer(near) == Round(0, 0, 1)
        began = time.monotonic()
        receiver.seal(1)
        assert time.monotonic() - began < 0.15  # a waiting thread looks around each 0.2 s
        assert not [t for t in receiver._threads if t.is_alive()]
        late, far = channels()
        with pytest.raises(UnavailableError):
            receiver.attach(far)
        close(late)


def test_chunks_behind_the_last_round_are_not_sealed_with_it() -> None:
    """They overwrite what the signed chunks brought, and are in no tree."""
    with victim() as (receiver, near):
        say(near, chunk(), PAGE, Round(0, 0, 1).pack(Type.ROUND))
        answer(near)
        say(near, chunk(1), bytes(PAGE_BYTES))
        until(lambda: receiver._leaves)
        uncovered(receiver, 1)


def test_half_a_chunk_behind_the_last_round_is_not_sealed_with_it() -> None:
    with victim() as (receiver, near):
        say(near, Round(0, 0, 0).pack(Type.ROUND))
        answer(near)
        say(near, chunk(), PAGE[:100])
        until(lambda: receiver._claimed)
        uncovered(receiver, 0)


def test_a_whole_round_behind_those_that_are_signed_is_not_sealed_with_them() -> None:
    with victim() as (receiver, near):
        say(near, chunk(), PAGE, Round(0, 0, 1).pack(Type.ROUND))
        answer(near)
        say(near, chunk(1), PAGE, Round(1, 1, 2).pack(Type.ROUND))
        answer(near)
        uncovered(receiver, 1)


def test_a_chunk_that_a_broken_connection_left_half_must_come_before_its_round_ends() -> None:
    with victim() as (receiver, near):
        say(near, chunk(1), PAGE[:100])
        until(lambda: receiver._claimed)
        close([near])
        near, _ = again(receiver)
        say(near, chunk(0, coding=Coding.ZEROS, offset=PAGE_BYTES))
        say(near, Round(0, 0, 1).pack(Type.ROUND))
        with pytest.raises(DataError) as caught:
            receiver.wait_round(20)
        assert caught.value.code == "bulk-round"
        close([near])


def test_a_chunk_that_a_broken_connection_left_half_comes_again_to_its_place() -> None:
    with victim() as (receiver, near):
        say(near, chunk(), PAGE[:100])
        until(lambda: receiver._claimed)
        close([near])
        near, state = again(receiver)
        assert state == State(0, 0)
        say(near, chunk(coding=Coding.ZEROS, offset=PAGE_BYTES))
        with pytest.raises(DataError) as caught:
            receiver.wait_round(20)
        assert caught.value.code == "bulk-overlap"
        close([near])


def test_a_chunk_that_came_again_is_sealed() -> None:
    """As an honest source does it: the same index and place, and what is there now."""
    staging = np.zeros(8 * KIB, np.uint8)
    receiver = Receiver({MEMORY: memoryview(staging)})
    [near], far = channels()
    receiver.attach(far)
    State.read(near)
    say(near, chunk(), bytes([7]) * 100)
    until(lambda: receiver._claimed)
    close([near])
    near, _ = again(receiver)
    say(near, chunk(), PAGE, Round(0, 0, 1).pack(Type.ROUND))
    answer(near)
    receiver.seal(1)
    assert staging[:PAGE_BYTES].tobytes() == PAGE
    close([near])


def test_what_a_broken_connection_left_after_the_last_round_is_not_sealed() -> None:
    with victim() as (receiver, near):
        say(near, Round(0, 0, 0).pack(Type.ROUND))
        answer(near)
        say(near, chunk(), PAGE[:100])
        until(lambda: receiver._claimed)
        close([near])
        near, _ = again(receiver)
        uncovered(receiver, 0)
        close([near])
