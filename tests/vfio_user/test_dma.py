"""The DMA table against a map of every page."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.vfio_user.dma import DmaTable
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import DmaFlag

READ, WRITE = int(DmaFlag.READ), int(DmaFlag.WRITE)
BOTH = READ | WRITE


def table(*ranges: tuple[int, int, int], limit: int = 100) -> DmaTable[str]:
    t: DmaTable[str] = DmaTable(limit)
    for address, size, flags in ranges:
        t.add(address, size, flags, f"{address:#x}")
    return t



def test_access_across_ranges_that_touch() -> None:
    t = table((0, 0x1000, BOTH), (0x1000, 0x1000, BOTH))
    pieces = t.pieces(0x800, 0x1000, WRITE)
    assert [(p.range.address, p.offset, p.size) for p in pieces] == [
        (0, 0x800, 0x800),
        (0x1000, 0, 0x800),
    ]


@pytest.mark.parametrize(
    ("address", "size"),
    [(0x2000, 1), (0xFFF, 2), (0, 0x2000), (2**64 - 1, 4), (0x5000, 0x2000), (0x4FFF, 1)],
)
def test_access_that_leaves_the_map_is_refused(address: int, size: int) -> None:
    t = table((0, 0x1000, BOTH), (0x5000, 0x1000, BOTH))
    with pytest.raises(Refusal) as refusal:
        t.pieces(address, size, READ)
    assert refusal.value.errno == errno.EFAULT


def test_access_in_a_forbidden_direction_is_refused() -> None:
    t = table((0, 0x1000, READ), (0x1000, 0x1000, BOTH))
    assert t.pieces(0, 16, READ)
    for address in (0, 0xFF8):
        with pytest.raises(Refusal) as refusal:
            t.pieces(address, 16, WRITE)
        assert refusal.value.errno == errno.EACCES


@pytest.mark.parametrize(
    ("address", "size"),
    [(0x1000, 0x1000), (0, 0x1001), (0x1FFF, 1), (0, 0x10000), (0x1800, 0x100)],
)
def test_map_over_another_is_refused(address: int, size: int) -> None:
    t = table((0x1000, 0x1000, BOTH))
    with pytest.raises(Refusal) as refusal:
        t.add(address, size, BOTH, "")
    assert refusal.value.errno == errno.EEXIST
    assert len(t) == 1


@pytest.mark.parametrize(("address", "size"), [(0, 0), (0, -1), (2**64 - 1, 2), (-1, 5)])
def test_impossible_map_is_refused(address: int, size: int) -> None:
    with pytest.raises(Refusal) as refusal:
        table().add(address, size, BOTH, "")
    assert refusal.value.errno == errno.EINVAL


def test_limit_of_maps() -> None:
    t = table((0, 1, BOTH), (1, 1, BOTH), limit=2)
    with pytest.raises(Refusal) as refusal:
        t.add(2, 1, BOTH, "")
    assert refusal.value.errno == errno.ENOSPC
    t.remove(0, 1)
    t.add(2, 1, BOTH, "")


def test_unmapping_what_was_never_mapped_is_no_error() -> None:
    t = table((0x1000, 0x1000, BOTH))
    assert t.remove(0x8000, 0x1000) == []
    assert t.remove(0, 0) == []
    assert t.remove(0x3000, 1 << 47) == []
    assert len(t) == 1


def test_unmapping_a_wide_span_takes_every_range_in_it() -> None:
    t = table((0x1000, 0x1000, BOTH), (0x5000, 0x1000, BOTH), (1 << 48, 1, BOTH))
    assert [r.address for r in t.remove(0, 1 << 47)] == [0x1000, 0x5000]
    assert [r.address for r in t] == [1 << 48]


@pytest.mark.parametrize(("address", "size"), [(0x1000, 0x800), (0x1800, 0x800), (0x1400, 0x10)])
def test_unmapping_half_a_map_is_refused(address: int, size: int) -> None:
    t = table((0x1000, 0x1000, BOTH))
    with pytest.raises(Refusal) as refusal:
        t.remove(address, size)
    assert refusal.value.errno == errno.EINVAL
    assert len(t) == 1


def test_clear_gives_everything_back() -> None:
    t = table((0x1000, 0x1000, BOTH), (0x5000, 0x1000, BOTH))
    assert [r.item for r in t.clear()] == ["0x1000", "0x5000"]
    assert len(t) == 0
    with pytest.raises(Refusal):
        t.pieces(0x1000, 1, READ)


steps = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "access"]), st.integers(0, 30), st.integers(0, 10)),
    max_size=60,
)


@given(steps)
def test_against_a_map_of_every_page(operations: list[tuple[str, int, int]]) -> None:
    t: DmaTable[int] = DmaTable(1000)
    owner: dict[int, tuple[int, int]] = {}  # page -> (address, size) of its range
    for what, address, size in operations:
        span = range(address, address + size)
        try:
            if what == "add":
                t.add(address, size, BOTH, 0)
                assert size > 0
                assert not any(p in owner for p in span)
                owner.update(dict.fromkeys(span, (address, size)))
            elif what == "remove":
                t.remove(address, size)
                for p in span:
                    if p in owner:
                        assert owner[p][0] >= address
                        assert sum(owner[p]) <= address + size
                        del owner[p]
            else:
                pieces = t.pieces(address, size, READ)
                assert all(p in owner for p in span)
                covered = [p.range.address + p.offset + i for p in pieces for i in range(p.size)]
                assert covered == list(span)
        except Refusal as refusal:
            if refusal.errno == errno.EEXIST:
                assert any(p in owner for p in span)
            elif refusal.errno == errno.EFAULT:
                assert any(p not in owner for p in span)
            elif what == "remove":
                cut = [owner[p] for p in span if p in owner]
                assert any(a < address or a + n > address + size for a, n in cut)
            else:
                assert size <= 0
