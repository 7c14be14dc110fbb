"""Locked, pinned memory and its physical addresses; needs root, as the driver does."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelvisor.abi.registers import PAGE
from accelvisor.errors import CapacityError, PermissionDenied, SystemFailure
from accelvisor.guest import pinned
from accelvisor.guest.pinned import PinnedMemory, Pins, physical_segments
from tests.descriptors import descriptors

PRESENT = 1 << 63


@pytest.fixture
def pins() -> Iterator[Pins]:
    pins = Pins()
    yield pins
    pins.close()


def write_map(path: Path, first_page: int, entries: list[int]) -> str:
    with path.open("wb") as file:
        file.seek(first_page * 8)
        file.write(struct.pack(f"<{len(entries)}Q", *entries))
    return str(path)


def test_neighbouring_frames_are_joined(tmp_path: Path) -> None:
    frames = [10, 11, 12, 40, 39, 41]
    path = write_map(tmp_path / "map", 100, [PRESENT | f for f in frames])
    assert physical_segments(100 * PAGE, 6 * PAGE, path) == [
        (10 * PAGE, 3 * PAGE),
        (40 * PAGE, PAGE),
        (39 * PAGE, PAGE),
        (41 * PAGE, PAGE),
    ]


def test_flag_bits_are_not_part_of_the_frame(tmp_path: Path) -> None:
    path = write_map(tmp_path / "map", 0, [PRESENT | 1 << 55 | 1 << 61 | 7])
    assert physical_segments(0, PAGE, path) == [(7 * PAGE, PAGE)]


def test_hidden_frames_mean_not_root(tmp_path: Path) -> None:
    path = write_map(tmp_path / "map", 0, [PRESENT])
    with pytest.raises(PermissionDenied) as caught:
        physical_segments(0, PAGE, path)
    assert caught.value.code == "dma-permission"


def test_a_page_that_is_not_in_memory_is_an_error(tmp_path: Path) -> None:
    path = write_map(tmp_path / "map", 0, [PRESENT | 1, 1])
    with pytest.raises(SystemFailure):
        physical_segments(0, 2 * PAGE, path)


def test_a_map_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = write_map(tmp_path / "map", 0, [PRESENT | 1])
    with pytest.raises(SystemFailure):
        physical_segments(0, 2 * PAGE, path)


def test_without_io_uring_there_is_no_dma_rather_than_memory_that_may_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = descriptors()
    monkeypatch.setattr(pinned, "_SYS_IO_URING_SETUP", 100_000)
    with pytest.raises(SystemFailure) as caught:
        Pins()
    assert caught.value.code == "dma-unpinnable"
    monkeypatch.undo()
    monkeypatch.setattr(pinned, "_IORING_REGISTER_BUFFERS", 1000)  # an old kernel, or a policy
    with pytest.raises(SystemFailure):
        Pins()
    assert descriptors() == before


def test_slots_are_used_again_and_never_two_for_one(pins: Pins) -> None:
    free = len(pins._free)
    memories = [PinnedMemory(PAGE, pins) for _ in range(3)]
    assert len({memory._slots[0] for memory in memories}) == 3
    for memory in memories:
        memory.release()
    assert len(pins._free) == free


def test_a_process_with_all_slots_in_use_is_told(pins: Pins) -> None:
    memory = PinnedMemory(PAGE, pins)
    pins._free.clear()
    with pytest.raises(CapacityError) as caught:
        PinnedMemory(PAGE, pins)
    assert caught.value.code == "dma-memory"
    memory.release()


def test_what_is_pinned_stays_pinned_while_somebody_has_the_descriptor(pins: Pins) -> None:
    copy = os.dup(pins.fd)
    memory = PinnedMemory(4 * PAGE, pins)
    pins.close()
    memory.release()  # unmapped here; the slots are the copy's now
    assert os.readlink(f"/proc/self/fd/{copy}").endswith("[io_uring]")
    info = Path(f"/proc/self/fdinfo/{copy}").read_text()
    assert sum(": 0x" in line for line in info.partition("UserBufs")[2].splitlines()) >= 1
    os.close(copy)


def test_a_forked_child_sees_empty_pages_and_not_the_devices(pins: Pins) -> None:
    memory = PinnedMemory(PAGE, pins)
    memory.view[0] = 7
    child = os.fork()
    if child == 0:
        os._exit(memory.view[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.view[0] == 7
    memory.release()


def test_pinned_memory_has_addresses_for_every_page(
    pins: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = physical_segments
    seen: list[tuple[int, int]] = []

    def told(start: int, nbytes: int) -> list[tuple[int, int]]:
        seen.append((start, nbytes))
        try:
            return real(start, nbytes)
        except (PermissionDenied, SystemFailure):  # a container that hides them, even from root
            return [(PAGE, nbytes)]

    monkeypatch.setattr(pinned, "physical_segments", told)
    before = descriptors()
    memory = PinnedMemory(3 * PAGE - 5, pins)
    assert seen == [(seen[0][0], 3 * PAGE)]
    assert sum(n for _, n in memory.segments) == len(memory.view) == 3 * PAGE
    assert memory.address == memory.segments[0][0]
    assert bytes(memory.view) == bytes(3 * PAGE)
    memory.view[0] = 1
    memory.release()
    memory.release()
    assert descriptors() == before


def test_a_view_in_use_outlives_the_release(
    pins: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "physical_segments", lambda start, nbytes: [(PAGE, nbytes)])
    memory = PinnedMemory(PAGE, pins)
    part = memory.view[:10]
    memory.release()
    part[0] = 1
    part.release()


def test_an_impossible_size_is_a_typed_error(pins: Pins) -> None:
    with pytest.raises(CapacityError) as caught:
        PinnedMemory(1 << 60, pins)
    assert caught.value.code == "dma-memory"


def test_the_kernels_page_is_our_page() -> None:
    assert mmap.PAGESIZE == PAGE
