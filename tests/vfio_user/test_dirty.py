"""Dirty pages: exactly once between two reads, any page size, flat memory."""

from __future__ import annotations

import errno
import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.vfio_user.dirty import DirtyLog
from accelvisor.vfio_user.model import Refusal

PAGE = 4096
MIB = 1 << 20


def pages(bitmap: bytes) -> list[int]:
    return [i for i in range(len(bitmap) * 8) if bitmap[i >> 3] >> (i & 7) & 1]


def test_written_pages_are_reported_once() -> None:
    log = DirtyLog()
    log.start(PAGE, [(0, MIB)])
    log.mark(3 * PAGE, 1)
    log.mark(5 * PAGE - 1, 2)
    assert pages(log.report(0, MIB, PAGE)) == [3, 4, 5]
    assert pages(log.report(0, MIB, PAGE)) == []


def test_reading_clears_only_what_was_read() -> None:
    # nutanix/libvfio-user #526: a read of the log did not clear it.
    log = DirtyLog()
    log.start(PAGE, [(0, MIB)])
    log.mark(0, 10 * PAGE)
    assert pages(log.report(2 * PAGE, 3 * PAGE, PAGE)) == [0, 1, 2]
    assert pages(log.report(0, 10 * PAGE, PAGE)) == [0, 1, 5, 6, 7, 8, 9]


def test_writes_outside_the_ranges_are_not_logged() -> None:
    log = DirtyLog()
    log.start(PAGE, [(MIB, PAGE), (4 * MIB, PAGE)])
    log.mark(0, 8 * MIB)
    assert pages(log.report(0, 8 * MIB, PAGE)) == [MIB // PAGE, 4 * MIB // PAGE]


def test_no_ranges_log_everything() -> None:
    log = DirtyLog()
    log.start(PAGE)
    log.mark(2**63, 1)
    assert pages(log.report(2**63 - PAGE, 2 * PAGE, PAGE)) == [1]
    assert pages(log.report(2**63, PAGE, PAGE)) == []


def test_nothing_is_logged_before_start_or_after_stop() -> None:
    log = DirtyLog()
    log.mark(0, PAGE)
    log.start(PAGE, [(0, MIB)])
    assert pages(log.report(0, MIB, PAGE)) == []
    log.mark(0, PAGE)
    log.stop()
    log.mark(0, PAGE)
    log.start(PAGE, [(0, MIB)])
    assert pages(log.report(0, MIB, PAGE)) == []
    log.stop()
    log.stop()


def test_report_without_logging_is_refused() -> None:
    with pytest.raises(Refusal) as refusal:
        DirtyLog().report(0, PAGE, PAGE)
    assert refusal.value.errno == errno.EINVAL


def test_second_start_is_refused_and_changes_nothing() -> None:
    log = DirtyLog()
    log.start(PAGE, [(0, MIB)])
    log.mark(0, 1)
    with pytest.raises(Refusal) as refusal:
        log.start(PAGE, [(MIB, MIB)])
    assert refusal.value.errno == errno.EBUSY
    assert pages(log.report(0, MIB, PAGE)) == [0]


@pytest.mark.parametrize(
    ("hint", "taken"), [(PAGE, PAGE), (1, PAGE), (4097, PAGE), (65536, 65536), (1 << 40, PAGE)]
)
def test_page_size_hint(hint: int, taken: int) -> None:
    log = DirtyLog()
    assert log.start(hint, [(0, MIB)]) == taken == log.page_size


def test_overlapping_ranges_are_refused() -> None:
    log = DirtyLog()
    with pytest.raises(Refusal) as refusal:
        log.start(PAGE, [(0, 2 * PAGE), (PAGE, PAGE)])
    assert refusal.value.errno == errno.EINVAL
    assert not log.active


def test_huge_ranges_are_refused_instead_of_allocated() -> None:
    log = DirtyLog()
    with pytest.raises(Refusal) as refusal:
        log.start(PAGE, [(0, 1 << 60)])
    assert refusal.value.errno == errno.ENOMEM


def test_huge_reports_are_refused() -> None:
    log = DirtyLog()
    log.start(PAGE, [(0, MIB)])
    with pytest.raises(Refusal):
        log.report(0, 1 << 60, PAGE)


def test_larger_report_pages_merge_bits() -> None:
    log = DirtyLog()
    log.start(PAGE, [(0, MIB)])
    log.mark(5 * PAGE, 1)
    log.mark(17 * PAGE, 1)
    assert pages(log.report(0, MIB, 16 * PAGE)) == [0, 1]


def test_smaller_report_pages_replicate_bits() -> None:
    log = DirtyLog(16 * PAGE)
    log.start(16 * PAGE, [(0, MIB)])
    log.mark(16 * PAGE, 1)
    assert pages(log.report(0, MIB, PAGE)) == list(range(16, 32))


ops = st.lists(
    st.one_of(
        st.tuples(st.just("mark"), st.integers(0, 300 * PAGE), st.integers(1, 40 * PAGE)),
        st.tuples(st.just("read"), st.integers(0, 300), st.integers(1, 100)),
    ),
    max_size=40,
)


@given(ops, st.booleans())
def test_against_a_set_of_pages(operations: list[tuple[str, int, int]], everything: bool) -> None:
    log = DirtyLog()
    low, high = 7 * PAGE, 205 * PAGE
    log.start(PAGE, [] if everything else [(low, high - low)])
    dirty: set[int] = set()
    for what, a, b in operations:
        if what == "mark":
            log.mark(a, b)
            dirty |= {
                p
                for p in range(a // PAGE, (a + b - 1) // PAGE + 1)
                if everything or low <= p * PAGE < high
            }
        else:
            got = {a + p for p in pages(log.report(a * PAGE, b * PAGE, PAGE))}
            expected = {p for p in dirty if a <= p < a + b}
            assert got == expected
            dirty -= expected


def test_starting_and_stopping_10000_times_keeps_memory_flat() -> None:
    # nutanix/libvfio-user #852: the bitmap of each start leaked.
    log = DirtyLog()

    def rounds(count: int) -> None:
        for _ in range(count):
            log.start(PAGE, [(0, 64 * MIB)])
            log.mark(MIB, PAGE)
            log.stop()

    rounds(100)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    rounds(10_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 64 * 1024


def test_page_dirtied_while_another_thread_reads_appears_exactly_once() -> None:
    log = DirtyLog()
    log.start(PAGE, [(0, 64 * MIB)])
    total = 4000

    def write() -> None:
        for page in range(total):
            log.mark(page * PAGE, 1)

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[int] = []
    while writer.is_alive():
        seen += pages(log.report(0, total * PAGE, PAGE))
    writer.join()
    seen += pages(log.report(0, total * PAGE, PAGE))
    assert sorted(seen) == list(range(total))


@settings(max_examples=30)
@given(st.integers(-5, 5), st.integers(-5, 5000))
def test_report_arguments_never_crash(page_size: int, size: int) -> None:
    log = DirtyLog()
    log.start(PAGE, [(0, MIB)])
    if page_size > 0 and page_size & (page_size - 1) == 0 and size > 0:
        assert len(log.report(0, size, page_size)) % 8 == 0
        return
    with pytest.raises(Refusal) as refusal:
        log.report(0, size, page_size)
    assert refusal.value.errno == errno.EINVAL
