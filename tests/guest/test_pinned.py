"""Locked, pinned memory and its physical addresses; needs root, as the driver does."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import pytest

from accelvisor.abi.registers import PAGE
from accelvisor.errors import PermissionDenied, SystemFailure
from accelvisor.guest import pinned
from accelvisor.guest.pinned import PinnedMemory, physical_segments

PRESENT = 1 << 63


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


def test_compaction_is_switched_off_where_pages_cannot_be_pinned(tmp_path: Path) -> None:
    knob = tmp_path / "compact_unevictable_allowed"
    knob.write_text("1\n")
    pinned._forbid_compaction(knob)
    assert knob.read_text() == "0"
    pinned._forbid_compaction(tmp_path / "absent")  # a kernel without compaction


def test_memory_that_cannot_be_kept_in_place_is_refused(tmp_path: Path) -> None:
    knob = tmp_path / "compact_unevictable_allowed"
    knob.mkdir()  # not readable as a file
    with pytest.raises(SystemFailure) as caught:
        pinned._forbid_compaction(knob)
    assert caught.value.code == "dma-unpinnable"


def test_pinned_memory_has_addresses_for_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    real = physical_segments
    seen: list[tuple[int, int]] = []

    def told(start: int, nbytes: int) -> list[tuple[int, int]]:
        seen.append((start, nbytes))
        try:
            return real(start, nbytes)
        except (PermissionDenied, SystemFailure):  # a container that hides them, even from root
            return [(PAGE, nbytes)]

    monkeypatch.setattr(pinned, "physical_segments", told)
    before = set(os.listdir("/proc/self/fd"))
    memory = PinnedMemory(3 * PAGE - 5)
    assert seen == [(seen[0][0], 3 * PAGE)]
    assert sum(n for _, n in memory.segments) == len(memory.view) == 3 * PAGE
    assert memory.address == memory.segments[0][0]
    assert bytes(memory.view) == bytes(3 * PAGE)
    memory.view[0] = 1
    memory.release()
    memory.release()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_view_in_use_outlives_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "physical_segments", lambda start, nbytes: [(PAGE, nbytes)])
    memory = PinnedMemory(PAGE)
    part = memory.view[:10]
    memory.release()
    part[0] = 1
    part.release()


def test_an_impossible_size_is_a_typed_error() -> None:
    from accelvisor.errors import CapacityError

    with pytest.raises(CapacityError) as caught:
        PinnedMemory(1 << 60)
    assert caught.value.code == "dma-memory"


def test_the_kernels_page_is_our_page() -> None:
    assert mmap.PAGESIZE == PAGE
