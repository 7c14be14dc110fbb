"""The client's memory: every access checked, hostile files survived."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.abi.status import CommandStatus
from accelvisor.function.dma import READABLE, WRITABLE, AddressMap, Dma, DmaFault, File
from accelvisor.function.pauses import Pauses, finish
from accelvisor.function.state import STATE_BYTES, State
from accelvisor.vfio_user.model import Refusal
from tests.function.harness import memfd

PAGE = 4096


class NoRemote:
    """DMA by message that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def read(self, address: int, count: int) -> Pauses[bytes]:
        self.asked.append(("read", address, count))
        yield None
        return bytes([address >> 12 & 0xFF]) * count

    def write(self, address: int, data: bytes) -> Pauses[None]:
        self.asked.append(("write", address, len(data)))
        yield None


class Bench:
    """A map over one state and files by slot."""

    def __init__(self) -> None:
        self.state = State(memfd("state", STATE_BYTES))
        self.files: dict[int, File] = {}
        self.maps = AddressMap(self.state, self.files)
        self.remote = NoRemote()
        self.master = True
        self.dirty: list[tuple[int, int]] = []
        self.dma = self.over(self.maps)

    def over(self, maps: AddressMap) -> Dma:
        return Dma(
            maps, self.files, self.remote, lambda: self.master,
            lambda a, n: self.dirty.append((a, n)), threading.Lock(),
        )  # fmt: skip

    def file(self, slot: int, size: int, *, sealed: bool = True) -> int:
        fd = memfd(f"file{slot}", size, sealed=sealed)
        self.files[slot] = File(fd)
        return fd

    def fails(self, call: Callable[[], object]) -> CommandStatus:
        with pytest.raises(DmaFault) as caught:
            call()
        return caught.value.status


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("sealed", [True, False])
def test_bytes_go_to_their_place_across_maps(bench: Bench, sealed: bool) -> None:
    fd = bench.file(0, 4 * PAGE, sealed=sealed)
    bench.maps.map(0x1000, PAGE, 3, 2 * PAGE, 0)
    bench.maps.map(0x2000, PAGE, 3, 0, 0)
    data = os.urandom(2 * PAGE - 10)
    finish(bench.dma.write(0x1005, memoryview(data)))
    assert os.pread(fd, PAGE - 5, 2 * PAGE + 5) == data[: PAGE - 5]
    assert os.pread(fd, PAGE - 5, 0) == data[PAGE - 5 :]
    back = bytearray(len(data))
    finish(bench.dma.read(0x1005, memoryview(back)))
    assert back == data
    assert bench.dirty == [(0x1005, PAGE - 5), (0x2000, PAGE - 5)]


def test_unmapped_gap_and_wrap_are_faults(bench: Bench) -> None:
    bench.file(0, 4 * PAGE)
    bench.maps.map(0x1000, PAGE, 3, 0, 0)
    bench.maps.map(0x3000, PAGE, 3, PAGE, 0)
    room = memoryview(bytearray(3 * PAGE))
    assert bench.fails(lambda: finish(bench.dma.read(0, room[:1]))) is CommandStatus.BAD_ADDRESS
    assert bench.fails(lambda: finish(bench.dma.read(0x1800, room))) is CommandStatus.BAD_ADDRESS
    across = room[:2]
    assert bench.fails(lambda: finish(bench.dma.read(0x1FFF, across))) is CommandStatus.BAD_ADDRESS
    top = (1 << 64) - 1
    assert bench.fails(lambda: finish(bench.dma.read(top, room[:2]))) is CommandStatus.BAD_ADDRESS


def test_direction_is_enforced(bench: Bench) -> None:
    bench.file(0, 2 * PAGE)
    bench.maps.map(0x1000, PAGE, READABLE, 0, 0)
    bench.maps.map(0x2000, PAGE, WRITABLE, PAGE, 0)
    room = memoryview(bytearray(8))
    finish(bench.dma.read(0x1000, room))
    finish(bench.dma.write(0x2000, room))
    assert bench.fails(lambda: finish(bench.dma.write(0x1000, room))) is CommandStatus.DMA_DENIED
    assert bench.fails(lambda: finish(bench.dma.read(0x2000, room))) is CommandStatus.DMA_DENIED


def test_nothing_moves_with_bus_master_off(bench: Bench) -> None:
    bench.file(0, PAGE)
    bench.maps.map(0x1000, PAGE, 3, 0, 0)
    bench.master = False
    room = memoryview(bytearray(8))
    assert bench.fails(lambda: finish(bench.dma.read(0x1000, room))) is CommandStatus.BUS_MASTER_OFF
    assert bench.fails(lambda: finish(bench.dma.check([], True))) is CommandStatus.BUS_MASTER_OFF


def test_an_unmapped_range_is_gone_at_once(bench: Bench) -> None:
    bench.file(0, PAGE)
    bench.maps.map(0x1000, PAGE, 3, 0, 0)
    assert bench.maps.unmap(0x1000, PAGE) == [(0x1000, PAGE)]
    room = memoryview(bytearray(8))
    assert bench.fails(lambda: finish(bench.dma.read(0x1000, room))) is CommandStatus.BAD_ADDRESS
    assert not bench.maps.uses(0)


@pytest.mark.parametrize(
    ("address", "size", "number"),
    [
        (0x1000, 0x1000, errno.EEXIST),
        (0x0, 0x1001, errno.EEXIST),
        (0x2FFF, 0x1000, errno.EEXIST),
        (0x0, 0x10000, errno.EEXIST),
        (0x8000, 0, errno.EINVAL),
        ((1 << 64) - 0x1000, 0x2000, errno.EINVAL),
        (0x8000, 0x100000, errno.EINVAL),
    ],
)
def test_a_bad_map_is_refused_with_its_errno(
    bench: Bench, address: int, size: int, number: int
) -> None:
    bench.file(0, 16 * PAGE)
    bench.maps.map(0x1000, 0x2000, 3, 0, 0)
    with pytest.raises(Refusal) as caught:
        bench.maps.map(address, size, 3, 0, 0)
    assert caught.value.errno == number
    assert len(bench.maps) == 1


def test_the_same_map_again_is_a_repeat(bench: Bench) -> None:
    bench.file(0, PAGE)
    bench.maps.map(0x1000, PAGE, 3, 0, 0)
    bench.maps.map(0x1000, PAGE, 3, 0, 0)
    assert len(bench.maps) == 1


def test_a_writable_map_needs_a_writable_file(bench: Bench) -> None:
    fd = memfd("readonly", PAGE)
    bench.files[0] = File(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
    bench.maps.map(0x1000, PAGE, READABLE, 0, 0)
    with pytest.raises(Refusal) as caught:
        bench.maps.map(0x8000, PAGE, 3, 0, 0)
    assert caught.value.errno == errno.EACCES
    finish(bench.dma.read(0x1000, memoryview(bytearray(8))))


def test_unmapping_what_was_never_mapped_succeeds(bench: Bench) -> None:
    assert bench.maps.unmap(0, 1 << 47) == []
    bench.file(0, 4 * PAGE)
    bench.maps.map(0x1000, PAGE, 3, 0, 0)
    bench.maps.map(0x5000, PAGE, 3, PAGE, 0)
    assert bench.maps.unmap(0, 1 << 47) == [(0x1000, PAGE), (0x5000, PAGE)]


@pytest.mark.parametrize(("address", "size"), [(0x1000, 0x1000), (0x2000, 0x1000), (0, 0x1800)])
def test_an_unmap_that_cuts_a_map_is_refused(bench: Bench, address: int, size: int) -> None:
    bench.file(0, 4 * PAGE)
    bench.maps.map(0x1000, 0x2000, 3, 0, 0)
    with pytest.raises(Refusal):
        bench.maps.unmap(address, size)
    assert len(bench.maps) == 1


def test_a_shrunk_unsealed_file_is_a_fault_and_not_a_dead_worker(bench: Bench) -> None:
    """Case V15: a hostile client truncates the memory that it gave us."""
    fd = bench.file(0, 4 * PAGE, sealed=False)
    bench.maps.map(0x1000, 4 * PAGE, 3, 0, 0)
    room = memoryview(bytearray(4 * PAGE))
    finish(bench.dma.read(0x1000, room))
    os.ftruncate(fd, PAGE)
    assert bench.fails(lambda: finish(bench.dma.read(0x1000, room))) is CommandStatus.BAD_ADDRESS
    assert bench.fails(lambda: finish(bench.dma.write(0x1000, room))) is CommandStatus.BAD_ADDRESS
    assert os.fstat(fd).st_size == PAGE  # and it was not grown again


def test_only_sealed_files_are_mapped(bench: Bench) -> None:
    bench.file(0, PAGE)
    bench.file(1, PAGE, sealed=False)
    assert bench.files[0].view() is not None
    assert bench.files[1].view() is None


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory"])
def test_a_descriptor_that_is_no_file_is_refused(kind: str) -> None:
    a, b = os.pipe()
    fd = {"pipe": a, "socket": os.eventfd(0), "directory": os.open("/", os.O_RDONLY)}[kind]
    with pytest.raises(Refusal):
        File(fd)
    for one in {a, b, fd}:
        os.close(one)


def test_maps_without_a_file_go_by_small_messages(bench: Bench) -> None:
    bench.maps.map(0x10_0000, 0x10_0000, 3, 0, -1)
    finish(bench.dma.write(0x10_0000, memoryview(bytes(200_000))))
    room = bytearray(70_000)
    finish(bench.dma.read(0x10_0000, memoryview(room)))
    assert [n for _, _, n in bench.remote.asked] == [65536, 65536, 65536, 3392, 65536, 4464]
    assert room[0] == 0x00
    assert room[65536] == 0x10


def test_a_new_worker_finds_the_same_maps(bench: Bench) -> None:
    bench.file(0, 64 * PAGE)
    for n in range(40):
        bench.maps.map(n * 0x10000, PAGE, 3, n * PAGE, 0)
    for n in range(0, 40, 3):
        bench.maps.unmap(n * 0x10000, PAGE)
    again = AddressMap(bench.state, bench.files)
    assert list(again) == list(bench.maps)
    again.map(0, PAGE, 3, 0, 0)
    assert len(again) == len(bench.maps) + 1


def test_a_long_gap_of_free_records_hides_no_map(bench: Bench) -> None:
    bench.file(0, PAGE)
    for n in range(3000):
        bench.maps.map(n * PAGE, PAGE, 1, 0, 0)
    for n in range(2999):
        bench.maps.unmap(n * PAGE, PAGE)
    assert list(AddressMap(bench.state, bench.files)) == [(2999 * PAGE, PAGE)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 6)), max_size=40))
def test_the_map_agrees_with_a_page_by_page_model(steps: list[tuple[bool, int, int]]) -> None:
    bench = Bench()
    bench.file(0, 64 * PAGE)
    model: dict[int, tuple[int, int]] = {}  # page -> its map (start, pages)
    for adding, start, pages in steps:
        inside = set(range(start, start + pages))
        touched = {model[p] for p in inside if p in model}
        try:
            if adding:
                bench.maps.map(start * PAGE, pages * PAGE, 3, start * PAGE, 0)
                assert not touched or touched == {(start, pages)}
                model.update(dict.fromkeys(inside, (start, pages)))
            else:
                bench.maps.unmap(start * PAGE, pages * PAGE)
                assert all(set(range(s, s + n)) <= inside for s, n in touched)
                for page in inside:
                    model.pop(page, None)
        except Refusal:
            if adding:
                assert touched
            else:
                assert any(not set(range(s, s + n)) <= inside for s, n in touched)
        for page in range(40):
            mapped = page in model
            try:
                bench.maps.pieces(page * PAGE, PAGE, READABLE)
                assert mapped
            except DmaFault:
                assert not mapped
    assert list(AddressMap(bench.state, bench.files)) == list(bench.maps)
