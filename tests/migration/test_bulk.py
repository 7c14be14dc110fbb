"""Bulk transfers over real TLS: the same bytes and leaves on both sides, whatever breaks."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import (
    AccelvisorError,
    DataError,
    DeadlineError,
    ProtocolError,
    UnavailableError,
)
from accelvisor.frames.chunks import Coding, Header, leaf_hash
from accelvisor.frames.merkle import plain_root
from accelvisor.limits import KIB, LIMITS, MIB
from accelvisor.migration.bulk import MESSAGE, PAGE_BYTES, Round, State, Type, ranges_of, runs
from accelvisor.migration.channel import Channel
from accelvisor.migration.receiver import Receiver
from accelvisor.migration.sender import Sender
from tests.migration.hostile import MEMORY, WINDOW, chunk, victim
from tests.migration.hosts import both, channels, close, until

SIZE = 4 * MIB


def state(seed: int = 1, size: int = SIZE) -> np.ndarray:
    """Random bytes with runs of zero pages, some of a single page."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, size, dtype=np.uint8)
    pages = data.reshape(-1, PAGE_BYTES)
    pages[rng.random(len(pages)) < 0.3] = 0
    pages[100:400] = 0
    return data


class Transfer:
    """Both sides of a transfer, and the staging memory."""

    def __init__(self, count: int = 1, *, limits: object = LIMITS, **options: object) -> None:
        self.count = count
        self.staging = {MEMORY: np.zeros(SIZE, np.uint8), WINDOW: np.zeros(MIB, np.uint8)}
        sections = {kind: memoryview(view) for kind, view in self.staging.items()}
        self.sender = Sender(limits=limits, **options)  # type: ignore[arg-type]
        self.receiver = Receiver(sections, limits=limits)  # type: ignore[arg-type]
        self.near: list[Channel] = []
        self.far: list[Channel] = []

    def attach(self) -> None:
        self.near, self.far = channels(self.count)
        self.receiver.attach(self.far)
        self.sender.attach(self.near)

    def round(self) -> list[bytes]:
        """Ends a round; the leaves, which are the same on both sides."""
        sent, came = both(self.sender.end_round, lambda: self.receiver.wait_round(20))
        assert isinstance(sent, list), sent
        assert sent == came.leaves  # type: ignore[attr-defined]
        return sent


@contextmanager
def transfer(count: int = 1, **options: object) -> Iterator[Transfer]:
    made = Transfer(count, **options)
    made.attach()
    try:
        yield made
    finally:
        made.sender.close()
        made.receiver.close()


@pytest.mark.parametrize("count", [1, 3])
def test_state_arrives_and_both_sides_have_the_same_root(count: int) -> None:
    data, window = state(), state(2, MIB)
    with transfer(count) as moved:
        moved.sender.send(MEMORY, 0, memoryview(data))
        moved.sender.send(WINDOW, 0, memoryview(window))
        first = moved.round()
        data[8 * KIB : 20 * KIB] = 7
        data[64 * KIB : 128 * KIB] = 0
        moved.sender.send(MEMORY, 8 * KIB, memoryview(data)[8 * KIB : 20 * KIB])
        moved.sender.send(MEMORY, 64 * KIB, memoryview(data)[64 * KIB : 128 * KIB])
        second = moved.round()
        assert (moved.staging[MEMORY] == data).all()
        assert (moved.staging[WINDOW] == window).all()
    assert len(plain_root([*first, *second])) == 32
    progress = moved.sender.progress
    assert progress.chunks == len(first) + len(second)
    assert progress.covered == SIZE + MIB + 76 * KIB
    assert progress.sent < progress.covered - 300 * PAGE_BYTES


def test_leaves_are_those_of_the_frames() -> None:
    data = np.full(PAGE_BYTES, 3, np.uint8)
    with transfer() as moved:
        moved.sender.send(MEMORY, PAGE_BYTES, memoryview(data))
        [leaf] = moved.round()
    header = Header(0, MEMORY, Coding.RAW, PAGE_BYTES, PAGE_BYTES)
    assert leaf == leaf_hash(header.pack(), data.tobytes())


def test_an_empty_round_is_a_round() -> None:
    with transfer(2) as moved:
        assert moved.round() == []
        moved.sender.send(WINDOW, 5, memoryview(b"abc"))
        assert len(moved.round()) == 1
        assert moved.staging[WINDOW][5:8].tobytes() == b"abc"


def test_memory_that_changes_meanwhile_has_the_leaf_of_what_was_sent() -> None:
    """Pre-copy: whatever arrives, it is what was hashed."""
    data = state()
    stop = threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            data[: 2 * MIB] += 1

    writer = threading.Thread(target=scribble)
    with transfer(2) as moved:
        writer.start()
        try:
            moved.sender.send(MEMORY, 0, memoryview(data))
            moved.round()  # compares the leaves, and each side hashed its own copy
        finally:
            stop.set()
            writer.join()


class Breaking:
    """A channel that breaks after so many bytes were written to it and the receiver has some."""

    def __init__(self, channel: Channel, after: int, receiver: Receiver) -> None:
        self._channel = channel
        self._left = after
        self._few = 3 if after > MIB // 4 else 0
        self._receiver = receiver

    def write(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            with suppress(AccelvisorError):
                self._channel.flush()
            until(lambda: len(self._receiver._leaves) >= self._few)
            self._channel.close()
        self._channel.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._channel, name)


@pytest.mark.parametrize("after", [0, 1000, MIB, MIB + MIB // 2])
@pytest.mark.parametrize("count", [1, 2])
def test_broken_in_mid_round_and_resumed_gives_the_same(after: int, count: int) -> None:
    data = state()
    moved = Transfer(count, piece_bytes=64 * KIB)
    moved.near, moved.far = channels(count)
    moved.receiver.attach(moved.far)
    breaking = [Breaking(c, after // count, moved.receiver) for c in moved.near]
    moved.sender.attach(breaking)  # type: ignore[arg-type]
    moved.sender.send(MEMORY, 0, memoryview(data))
    sent, came = both(moved.sender.end_round, lambda: moved.receiver.wait_round(20))
    assert isinstance(sent, UnavailableError)
    assert isinstance(came, UnavailableError)
    assert {sent.code, came.code} == {"peer-lost"}
    moved.sender.close()
    moved.receiver.close()
    once, had = moved.sender.progress.chunks, len(moved.receiver._leaves)
    moved.attach()
    leaves = moved.round()
    assert (moved.staging[MEMORY] == data).all()
    # What had arrived was not sent again.
    assert moved.sender.progress.chunks - once == len(leaves) - had
    assert had >= (3 if after > MIB else 0)
    moved.sender.close()
    moved.receiver.close()


def test_resumed_after_only_the_acknowledgement_was_lost() -> None:
    data = state()
    moved = Transfer()
    moved.near, moved.far = channels()
    original = moved.far[0].write

    def no_acknowledgement(raw: bytes) -> None:
        if raw[0] == Type.ACK:
            moved.far[0].close()
        original(raw)

    moved.far[0].write = no_acknowledgement  # type: ignore[method-assign, assignment]
    moved.receiver.attach(moved.far)
    moved.sender.attach(moved.near)
    moved.sender.send(MEMORY, 0, memoryview(data))
    sent, came = both(moved.sender.end_round, lambda: moved.receiver.wait_round(20))
    assert isinstance(sent, UnavailableError)
    chunks = moved.sender.progress.chunks
    moved.attach()
    assert moved.sender.end_round() == came.leaves  # type: ignore[attr-defined]
    assert moved.sender.progress.chunks == chunks
    moved.sender.send(WINDOW, 0, memoryview(b"next"))
    moved.round()
    moved.sender.close()
    moved.receiver.close()


def test_cancel_wakes_everybody() -> None:
    with transfer(2) as moved:
        why = UnavailableError("the operator cancelled", code="migration-cancelled")
        waiting = threading.Thread(target=lambda: both(lambda: moved.receiver.wait_round(60)))
        waiting.start()
        moved.sender.cancel(why)
        with pytest.raises(UnavailableError) as caught:
            moved.sender.end_round()
        assert caught.value is why
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_rate_limit_makes_the_sender_wait() -> None:
    """By an own clock that each wait moves on: 1 MiB at 256 KiB a second takes about 4 s of it."""
    now = [0.0]
    sender = Sender(rate=256 * KIB, piece_bytes=64 * KIB, clock=lambda: now[0])

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0
            return self.is_set()

    sender._stopped = Stopped()
    near, far = channels(clock=lambda: now[0])
    staging = np.zeros(MIB, np.uint8)
    receiver = Receiver({MEMORY: memoryview(staging)}, clock=lambda: now[0])
    receiver.attach(far)
    sender.attach(near)
    sender.send(MEMORY, 0, memoryview(np.full(MIB, 9, np.uint8)))
    both(sender.end_round, lambda: receiver.wait_round(20))
    assert 3.5 <= now[0] <= 4.2
    assert (staging == 9).all()
    sender.close()
    receiver.close()


def test_pages_that_stay_zero_are_not_written() -> None:
    touched: list[int] = []
    with transfer() as moved:
        section = moved.receiver._sections[MEMORY]
        section.bytes = moved.staging[MEMORY].copy()  # would show a write
        section.bytes[:] = 1
        moved.sender.send(MEMORY, 0, memoryview(np.zeros(MIB, np.uint8)))
        moved.round()
        touched = np.flatnonzero(section.bytes == 0).tolist()
    assert touched == []


# --- a hostile sender ----------------------------------------------------------------------------


def refused(*messages: bytes, limits: object = LIMITS) -> str:
    with victim(limits) as (receiver, near):
        with suppress(UnavailableError):  # it may have hung up before the last one
            for message in messages:
                near.write(message)
            near.flush()
        with pytest.raises(DataError) as caught:
            receiver.wait_round(20)
        return caught.value.code


@pytest.mark.parametrize(
    "message",
    [
        chunk(offset=8 * KIB),
        chunk(offset=4 * KIB + 1),
        chunk(offset=2**64 - 1),
        chunk(kind=WINDOW),
        chunk(kind=77),
        chunk(length=0),
        chunk(length=LIMITS.chunk_bytes + 1),
        chunk(stored=100),
        chunk(coding=Coding.ZEROS, stored=1),
        chunk(coding=Coding.ZSTD, stored=10),  # would be expanded unverified
        chunk(coding=9, stored=0),
    ],
)
def test_a_chunk_outside_of_the_offer_is_refused_by_its_header(message: bytes) -> None:
    assert refused(message) == "bulk-chunk"


def test_an_index_that_came_before_is_refused() -> None:
    zeros = chunk(coding=Coding.ZEROS)
    assert refused(zeros, zeros) == "bulk-overlap"


def test_chunks_that_overlap_are_refused_at_the_end_of_the_round() -> None:
    first = chunk(0, coding=Coding.ZEROS, offset=0, length=4096)
    second = chunk(1, coding=Coding.ZEROS, offset=4095, length=4096)
    assert refused(first, second, Round(0, 0, 2).pack(Type.ROUND)) == "bulk-overlap"


def test_more_bytes_than_the_section_are_refused_at_once() -> None:
    zeros = [chunk(n, coding=Coding.ZEROS, length=8 * KIB) for n in range(2)]
    assert refused(*zeros) == "bulk-overlap"


@pytest.mark.parametrize(
    "end", [Round(1, 0, 1), Round(0, 1, 1), Round(0, 0, 2), Round(0, 0, 0), Round(0, 5, 1)]
)
def test_a_round_that_does_not_fit_is_refused(end: Round) -> None:
    assert refused(chunk(coding=Coding.ZEROS), end.pack(Type.ROUND)) == "bulk-round"


def test_endless_rounds_and_indices_are_refused() -> None:
    few = replace(LIMITS, bulk_rounds=2, bulk_chunks=5)
    rounds = [Round(n, 0, 0).pack(Type.ROUND) for n in range(3)]
    with victim(few) as (receiver, near):
        with suppress(UnavailableError):
            for message in rounds:
                near.write(message)
            near.flush()
        receiver.wait_round(20)
        receiver.wait_round(20)
        with pytest.raises(DataError) as caught:
            receiver.wait_round(20)
        assert caught.value.code == "bulk-excess"
    assert refused(chunk(5, coding=Coding.ZEROS), limits=few) == "bulk-excess"


@pytest.mark.parametrize("kind", [0, Type.ACK, Type.STATE, 99])
def test_a_message_that_is_none_of_a_senders_is_refused(kind: int) -> None:
    assert refused(MESSAGE.pack(kind, b"")) == "bulk-message"


def test_a_receiver_that_claims_what_was_not_sent_is_refused() -> None:
    near, [far] = channels()
    sender = Sender()
    far.write(State(0, 0, ((0, 3),)).pack())
    far.flush()
    with pytest.raises(AccelvisorError) as caught:
        sender.attach(near)
    assert caught.value.code == "bulk-message"
    sender.close()
    close([*near, far])


def test_a_receiver_that_claims_endless_ranges_takes_no_memory() -> None:
    """2**20 here, so that a sender which counts them through only fails: 2**63 would kill it."""
    near, [far] = channels()
    sender = Sender()
    far.write(State(0, 0, ((0, 2**20),)).pack())
    far.flush()
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as caught:
            sender.attach(near)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert caught.value.code == "bulk-message"
    sender.close()
    close([*near, far])


def test_a_receiver_that_is_in_another_round_is_refused() -> None:
    near, [far] = channels()
    sender = Sender()
    far.write(State(3, 0).pack())
    far.flush()
    with pytest.raises(AccelvisorError) as caught:
        sender.attach(near)
    assert caught.value.code == "bulk-message"
    close([*near, far])


def test_a_sender_that_stands_still_is_given_up() -> None:
    now = [0.0]
    receiver = Receiver({MEMORY: memoryview(bytearray(8 * KIB))}, clock=lambda: now[0])
    [near], far = channels(clock=lambda: now[0])
    receiver.attach(far)
    State.read(near)
    near.write(chunk())
    near.flush()
    until(lambda: receiver._claimed)
    now[0] = 100.0
    with pytest.raises(DeadlineError) as caught:
        receiver.wait_round(20)
    assert caught.value.code == "peer-stalled"
    receiver.close()
    close([near])


# --- pure parts ----------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=40), st.integers(0, PAGE_BYTES - 1))
def test_runs_cover_all_and_call_only_zeros_zero(pages: list[bool], tail: int) -> None:
    data = np.zeros(len(pages) * PAGE_BYTES + tail, np.uint8)
    for number, filled in enumerate(pages):
        # The first word says nothing: the byte that is set lies further on.
        data[number * PAGE_BYTES + 1000] = filled
    found = runs(data)
    at = 0
    for start, length, zero in found:
        assert start == at
        assert length > 0 or not len(data)
        at += length
        if zero:
            assert not data[start : start + length].any()
    assert at == len(data)


def test_long_runs_of_zeros_are_found() -> None:
    data = np.ones(64 * PAGE_BYTES, np.uint8)
    data[10 * PAGE_BYTES : 20 * PAGE_BYTES] = 0
    data[30 * PAGE_BYTES : 31 * PAGE_BYTES] = 0  # not worth a chunk
    assert [(s // PAGE_BYTES, n // PAGE_BYTES, z) for s, n, z in runs(data)] == [
        (0, 10, False),
        (10, 10, True),
        (20, 44, False),
    ]


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_exactly_the_indices(indices: set[int]) -> None:
    ranges = ranges_of(indices)
    assert {i for first, end in ranges for i in range(first, end)} == indices
    flat = [edge for pair in ranges for edge in pair]
    assert flat == sorted(set(flat))
