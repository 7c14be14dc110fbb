"""Spans of the window and pieces of DMA buffers."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import CapacityError
from accelvisor.guest.registers import Registers
from accelvisor.guest.staging import DmaPool, Spans, Staging, pieces
from accelvisor.guest.transport import segments_of, slice_segments

from .fake_device import FakeDevice


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=80))
def test_spans_never_overlap_and_always_come_back(actions: list[tuple[bool, int]]) -> None:
    spans = Spans(4096, 4096 + 8192)
    held: list[tuple[int, int]] = []
    for give, size in actions:
        if give and held:
            spans.give(*held.pop(size % len(held)))
            continue
        offset = spans.take(size)
        if offset is None:
            assert spans.largest < size
            continue
        assert offset % 64 == 0
        assert offset >= 4096
        assert offset + size <= 4096 + 8192
        assert all(offset + size <= o or o + n <= offset for o, n in held)
        held.append((offset, size))
    for span in held:
        spans.give(*span)
    assert spans.largest == 8192


def test_an_empty_range_has_no_spans() -> None:
    assert Spans(4096, 4096).take(1) is None


def test_queues_have_disjoint_parts_of_the_window(device: FakeDevice) -> None:
    identity = Registers(device).identity()
    parts = []
    for queue in range(device.queues):
        staging = Staging(device.window, identity, queue)
        span = staging.take(staging.spans.capacity)
        parts.append((span.offset, span.offset + span.nbytes))
    (a, b), (c, d) = parts
    assert identity.staging_offset <= a < b <= c < d <= identity.window_bytes


def test_a_full_staging_area_says_so(device: FakeDevice) -> None:
    staging = Staging(device.window, Registers(device).identity(), 0)
    staging.take(staging.spans.capacity)
    with pytest.raises(CapacityError) as caught:
        staging.take(1)
    assert caught.value.code == "staging-full"


def test_a_full_staging_area_waits_while_waiting_helps(device: FakeDevice) -> None:
    staging = Staging(device.window, Registers(device).identity(), 0)
    span = staging.take(staging.spans.capacity)

    def wait() -> bool:
        span.release()
        return True

    assert staging.take(64, wait).nbytes == 64


def test_more_than_all_of_it_is_refused_at_once(device: FakeDevice) -> None:
    staging = Staging(device.window, Registers(device).identity(), 0)

    def wait() -> bool:
        raise AssertionError("waiting is in vain")

    with pytest.raises(CapacityError):
        staging.take(staging.spans.capacity + 1, wait)


def test_dma_buffers_are_used_again_smallest_first(device: FakeDevice) -> None:
    pool = DmaPool(device)
    small, large = pool.take(4096), pool.take(1 << 20)
    pool.give(large)
    pool.give(small)
    assert pool.take(100) is small
    assert pool.take(8192) is large


def test_no_more_dma_buffers_are_kept_than_agreed(device: FakeDevice) -> None:
    pool = DmaPool(device, keep=1)
    buffers = [pool.take(4096) for _ in range(3)]
    for buffer in buffers:
        pool.give(buffer)
    assert [b.released for b in buffers] == [0, 1, 1]  # type: ignore[attr-defined]
    pool.close()
    assert buffers[0].released == 1  # type: ignore[attr-defined]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 400), st.integers(0, 400)
)
def test_a_part_of_segments_covers_exactly_its_bytes(
    sizes: list[int], offset: int, nbytes: int
) -> None:
    segments = [(1000 * i, size) for i, size in enumerate(sizes)]
    every = [a + i for a, n in segments for i in range(n)]
    part = slice_segments(segments, offset, nbytes)
    assert [a + i for a, n in part for i in range(n)] == every[offset : offset + nbytes]


def test_neighbouring_pages_are_one_piece(device: FakeDevice) -> None:
    buffer = device.allocate_dma(16384)
    buffer.segments = [(0x1000, 4096), (0x2000, 4096), (0x8000, 8192)]
    assert pieces(buffer, 100, 9000) == [(0x1064, 8092), (0x8000, 908)]
    assert segments_of(buffer) == buffer.segments


def test_no_two_threads_hold_the_same_dma_buffer(device: FakeDevice) -> None:
    pool = DmaPool(device)
    inside = threading.Event()
    may_go = threading.Event()

    class Slow:
        """A buffer whose size is asked for exactly while another thread takes one."""

        def __init__(self) -> None:
            self.asked = 0
            self.bytes = memoryview(bytearray(4096))

        @property
        def view(self) -> memoryview:
            self.asked += 1
            if self.asked == 1:
                inside.set()
                may_go.wait(0.2)
            return self.bytes

    pool._idle.append(Slow())  # type: ignore[arg-type]
    taken: list[object] = []
    first = threading.Thread(target=lambda: taken.append(pool.take(100)))
    first.start()
    assert inside.wait(10)
    taken.append(pool.take(100))
    may_go.set()
    first.join(10)
    assert len({id(b) for b in taken}) == 2


def test_a_buffer_that_comes_back_after_the_close_is_released(device: FakeDevice) -> None:
    pool = DmaPool(device)
    buffer = pool.take(4096)
    pool.close()
    pool.give(buffer)
    assert buffer.released == 1  # type: ignore[attr-defined]
