"""Register rules of the physical function: every bit, every width, and nothing in between."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.abi.registers import BAR0_BYTES, DEVICE_ID
from accelvisor.errors import UsageError
from accelvisor.isolation.sriov import CONFIG_BYTES, Change, PhysicalFunction
from accelvisor.limits import GIB, MIB

# The capability lies here; within it, offsets are the specification's.
BASE = 0x140
CAPS, CTRL, STATUS, INITIAL, TOTAL = BASE + 4, BASE + 8, BASE + 0xA, BASE + 0xC, BASE + 0xE
NUM, LINK, OFFSET, STRIDE = BASE + 0x10, BASE + 0x12, BASE + 0x14, BASE + 0x16
DEVICE, SUPPORTED, SYSTEM, BARS = BASE + 0x1A, BASE + 0x1C, BASE + 0x20, BASE + 0x24
SIZES = [4096 << bit for bit in (0, 1, 4, 6, 8, 10)]


def function(total: int = 16) -> PhysicalFunction:
    return PhysicalFunction(total, MIB)


def u(pf: PhysicalFunction, at: int, nbytes: int) -> int:
    return int.from_bytes(pf.read(at, nbytes), "little")


def put(pf: PhysicalFunction, at: int, value: int, nbytes: int) -> Change:
    return pf.write(at, value.to_bytes(nbytes, "little"))


def test_the_capability_is_where_the_standard_puts_its_registers() -> None:
    pf = function()
    assert u(pf, 0x100, 4) == 0x1401_000E
    assert u(pf, BASE, 4) == 0x0001_0010
    assert (u(pf, CAPS, 4), u(pf, CTRL, 2), u(pf, STATUS, 2)) == (0, 0, 0)
    assert (u(pf, INITIAL, 2), u(pf, TOTAL, 2), u(pf, NUM, 2), u(pf, LINK, 1)) == (16, 16, 0, 0)
    assert (u(pf, STRIDE, 2), u(pf, DEVICE, 2)) == (1, DEVICE_ID)
    assert (u(pf, SUPPORTED, 4), u(pf, SYSTEM, 4)) == (0x553, 1)
    assert [u(pf, BARS + 4 * bar, 4) for bar in range(6)] == [0, 0, 0xC, 0, 0, 0]
    assert u(pf, BASE + 0x3C, 4) == 0


#: Registers that keep what is written, by the specification: command, cache line, BAR0, interrupt
#: line, power state, device control without FLR, link control; then VF control and the VF BARs.
KEPT = {
    0x04: 0x46, 0x05: 0x05, 0x0C: 0xFF, 0x12: 0xFF, 0x13: 0xFF, 0x3C: 0xFF,
    0x44: 0x03, 0xA8: 0xFF, 0xA9: 0x7F, 0xB0: 0xC3,
    CTRL: 0x19,
    BARS + 2: 0xFF, BARS + 3: 0xFF,
    BARS + 10: 0xF0, BARS + 11: 0xFF, **dict.fromkeys(range(BARS + 12, BARS + 16), 0xFF),
}  # fmt: skip


@pytest.mark.parametrize("value", [0xFF, 0x00, 0xA5, 0x5A])
def test_every_byte_keeps_the_bits_that_it_may_and_no_others(value: int) -> None:
    fresh = function().read(0, CONFIG_BYTES)
    for at in range(CONFIG_BYTES):
        if NUM <= at < NUM + 2 or SYSTEM <= at < SYSTEM + 4:
            continue  # these take some values only: below
        pf = function()
        # Bit 7 here asks for a reset, which is another test.
        pf.write(at, bytes([value & 0x7F if at == 0xA9 else value]))
        mask = KEPT.get(at, 0)
        expected = bytearray(fresh)
        expected[at] = fresh[at] & ~mask | value & mask
        if at == CTRL:
            expected[OFFSET : OFFSET + 2] = b"\1\0" if value & 0x10 else b"\0\1"
        assert pf.read(0, CONFIG_BYTES) == expected, hex(at)


@pytest.mark.parametrize("nbytes", [2, 4, 8, 16])
def test_num_vfs_takes_what_it_may_at_any_width(nbytes: int) -> None:
    for value in [*range(20), 0xFF, 0x100, 0x0110, 0xFFFF]:
        pf = function()
        put(pf, NUM, 3, 2)
        change = put(pf, NUM, value, nbytes)
        assert pf.number == u(pf, NUM, 2) == (value if value <= 16 else 3)
        assert change == (Change.NUMBER if value <= 16 and value != 3 else Change(0))


def test_num_vfs_can_be_written_by_bytes() -> None:
    pf = PhysicalFunction(256, MIB)
    put(pf, NUM, 5, 1)
    assert pf.number == 5
    # 0x0105 is more than there can be: the high byte is not taken with this low byte.
    assert not put(pf, NUM + 1, 1, 1)
    put(pf, NUM, 0, 1)
    put(pf, NUM + 1, 1, 1)
    assert pf.number == 256


@pytest.mark.parametrize("at_and_bytes", [(NUM, 1), (NUM, 2), (NUM, 4), (NUM - 1, 2), (NUM - 4, 8)])
def test_nothing_moves_num_vfs_while_vfs_are_enabled(at_and_bytes: tuple[int, int]) -> None:
    at, nbytes = at_and_bytes
    pf = function()
    put(pf, NUM, 4, 2)
    put(pf, CTRL, 0x01, 2)
    before = pf.read(0, CONFIG_BYTES)
    for byte in range(256):
        assert not pf.write(at, bytes([byte]) * nbytes)
        assert pf.read(0, CONFIG_BYTES) == before
    put(pf, CTRL, 0x00, 2)
    assert put(pf, NUM, 8, 2) == Change.NUMBER


def test_one_access_over_both_enables_first_and_so_does_not_set_the_number() -> None:
    """Double words act in ascending order: VF Enable lies below NumVFs."""
    pf = function()
    put(pf, NUM, 4, 2)
    word = bytearray(pf.read(CTRL, 12))
    word[0], word[8] = 0x01, 8
    assert pf.write(CTRL, bytes(word)) == Change.ENABLED
    assert (pf.enabled, pf.number) == (True, 4)
    word[0], word[8] = 0x00, 8
    assert pf.write(CTRL, bytes(word)) == Change.DISABLED | Change.NUMBER
    assert (pf.enabled, pf.number) == (False, 8)


def test_the_page_size_is_one_of_those_supported() -> None:
    for value in [0, *(1 << bit for bit in range(32)), 3, 0x11, 0x553, 0x40000001, 0xFFFF_FFFF]:
        pf = function()
        put(pf, SYSTEM, 0x10, 4)
        put(pf, SYSTEM, value, 4)
        good = value * 4096 in SIZES
        assert u(pf, SYSTEM, 4) == (value if good else 0x10), hex(value)


def test_page_size_and_ari_are_frozen_while_vfs_are_enabled() -> None:
    pf = function()
    put(pf, SYSTEM, 0x10, 4)
    put(pf, CTRL, 0x11, 2)
    put(pf, SYSTEM, 0x1, 4)
    put(pf, CTRL, 0x01, 2)
    assert (u(pf, SYSTEM, 4), u(pf, CTRL, 2), u(pf, OFFSET, 2)) == (0x10, 0x11, 1)
    put(pf, CTRL, 0x00, 2)
    assert u(pf, CTRL, 2) == 0x10
    put(pf, CTRL, 0x00, 2)
    assert (u(pf, CTRL, 2), u(pf, OFFSET, 2)) == (0, 0x100)


@pytest.mark.parametrize("page", SIZES)
@pytest.mark.parametrize("window", [4096, 64 * 1024, 2 * MIB, GIB])
def test_all_ones_read_back_as_sizes_of_whole_pages(page: int, window: int) -> None:
    pf = PhysicalFunction(16, window)
    put(pf, SYSTEM, page // 4096, 4)
    pf.write(BARS, b"\xff" * 24)
    assert u(pf, BARS, 4) == 0x1_0000_0000 - max(BAR0_BYTES, page)
    assert u(pf, BARS + 4, 4) == 0
    assert u(pf, BARS + 8, 8) == 0x1_0000_0000_0000_0000 - max(window, page) | 0xC
    assert u(pf, BARS + 16, 8) == 0


def test_addresses_are_aligned_again_when_pages_grow() -> None:
    pf = PhysicalFunction(4, 4096)
    put(pf, BARS, 0xFE01_0000, 4)
    put(pf, BARS + 8, 0x12_3456_7000, 8)
    put(pf, SYSTEM, 0x100, 4)
    assert u(pf, BARS, 4) == 0xFE00_0000
    assert u(pf, BARS + 8, 8) == 0x12_3450_000C
    registers, window = pf.apertures()
    assert (registers.each, window.each, window.base) == (MIB, MIB, 0x12_3450_0000)


def test_apertures_are_num_vfs_times_one() -> None:
    pf = function()
    put(pf, BARS, 0xFE00_0000, 4)
    put(pf, BARS + 8, 0x38_0000_0000, 8)
    for number in range(17):
        put(pf, NUM, number, 2)
        registers, window = pf.apertures()
        assert (registers.nbytes, window.nbytes) == (number * BAR0_BYTES, number * MIB)
    assert registers.of(1).start == 0xFE00_0000
    pieces = [window.of(index) for index in range(1, 17)]
    assert pieces[0].start == 0x38_0000_0000
    assert all(one.stop == two.start for one, two in pairwise(pieces))
    assert pieces[-1].stop == window.base + window.nbytes


@pytest.mark.parametrize("index", [-1, 0, 5])
def test_a_vf_that_is_not_has_no_id(index: int) -> None:
    pf = function()
    put(pf, NUM, 4, 2)
    with pytest.raises(UsageError):
        pf.virtual_function_id(index)


def test_ids_are_pf_plus_offset_plus_strides() -> None:
    pf = PhysicalFunction(16, MIB, 0x4200)
    put(pf, NUM, 16, 2)
    assert pf.virtual_function_id(1) == 0x4300
    assert pf.virtual_function_id(16) == 0x430F
    put(pf, CTRL, 0x10, 2)
    assert pf.virtual_function_id(16) == 0x4210


def test_a_function_level_reset_takes_the_vfs_away() -> None:
    pf = function()
    fresh = pf.read(0, CONFIG_BYTES)
    put(pf, NUM, 4, 2)
    put(pf, CTRL, 0x19, 2)
    assert put(pf, 0xA8, 0x80 << 8, 2) == (
        Change.RESET | Change.DISABLED | Change.NUMBER | Change.MEMORY
    )
    assert pf.read(0, CONFIG_BYTES) == fresh
    assert put(pf, 0xA9, 0x80, 1) == Change.RESET


@pytest.mark.parametrize(
    ("total", "window", "routing_id"),
    [
        (0, MIB, 0x100),
        (257, MIB, 0x100),
        (16, 2048, 0x100),
        (16, 3 * MIB, 0x100),
        (16, 2 * GIB, 0x100),
        (16, MIB, 0x101),
        (16, MIB, 0xFF00),
        (16, MIB, -0x100),
    ],
)
def test_what_cannot_be_a_physical_function_is_refused(
    total: int, window: int, routing_id: int
) -> None:
    with pytest.raises(UsageError):
        PhysicalFunction(total, window, routing_id)


def test_accesses_beyond_the_space_read_ones_and_write_nothing() -> None:
    pf = function()
    whole = pf.read(0, CONFIG_BYTES)
    assert pf.read(CONFIG_BYTES - 2, 4) == b"\0\0\xff\xff"
    assert pf.read(-2, 4) == b"\xff\xff" + whole[:2]
    assert pf.read(CONFIG_BYTES + 8, 2) == pf.read(-8, 2) == b"\xff\xff"
    for at in (CONFIG_BYTES - 1, CONFIG_BYTES, -4, -6000):
        assert not pf.write(at, b"\xff" * 4)
    assert pf.read(0, CONFIG_BYTES) == whole


# --- any writes at all ---------------------------------------------------------------------------

INTERESTING = [0, *range(0xA4, 0xB4), *range(BASE - 4, BASE + 0x44)]
accesses = st.tuples(
    st.sampled_from(INTERESTING) | st.integers(-4, CONFIG_BYTES + 4),
    st.binary(min_size=1, max_size=20) | st.sampled_from([b"\x01", b"\x19\x00", b"\x04\x00"]),
)


def facts(pf: PhysicalFunction) -> tuple[bool, int, bool]:
    control = u(pf, CTRL, 2)
    return bool(control & 1), u(pf, NUM, 2), bool(control & 8)


@given(st.lists(accesses, max_size=30), st.sampled_from([1, 7, 8, 16]))
def test_no_sequence_of_writes_breaks_a_rule(writes: list[tuple[int, bytes]], total: int) -> None:
    pf = function(total)
    fixed = [(0, 4), (8, 4), (0x2C, 8), (0xA0, 8), (0x100, 0x44), (INITIAL, 4), (LINK, 2)]
    fixed += [(STRIDE, 4), (DEVICE, 6), (BARS + 4, 4), (BARS + 16, 12), (BASE + 0x40, 0xE80)]
    fixed += [(STATUS, 2)]
    before = [pf.read(*area) for area in fixed]
    for at, data in writes:
        was = facts(pf)
        frozen = (pf.number, u(pf, SYSTEM, 4), u(pf, OFFSET, 2))
        change = pf.write(at, data)
        now = facts(pf)
        assert [pf.read(*area) for area in fixed] == before
        assert pf.number <= total
        assert u(pf, SYSTEM, 4) * 4096 in SIZES
        assert u(pf, CTRL, 2) & ~0x19 == 0
        if was[0] and not change & Change.DISABLED:
            assert (pf.number, u(pf, SYSTEM, 4), u(pf, OFFSET, 2)) == frozen
        # No access enables and disables, so what was told is the difference.
        assert bool(change & Change.ENABLED) == (now[0] and not was[0])
        assert bool(change & Change.DISABLED) == (was[0] and not now[0])
        assert bool(change & Change.NUMBER) == (was[1] != now[1])
        assert bool(change & Change.MEMORY) == (was[2] != now[2])
        for aperture in pf.apertures():
            assert aperture.base % aperture.each == 0
            assert aperture.each % pf.page_bytes == 0
        ids = [pf.virtual_function_id(index) for index in range(1, pf.number + 1)]
        assert len({pf.routing_id, *ids}) == pf.number + 1
        assert all(0 <= item < 0x10000 for item in ids)


@given(st.lists(accesses, max_size=10), st.integers(0, CONFIG_BYTES), st.integers(0, 64))
def test_a_part_reads_as_the_same_part_of_the_whole(
    writes: list[tuple[int, bytes]], at: int, nbytes: int
) -> None:
    pf = function()
    for where, data in writes:
        pf.write(where, data)
    whole = pf.read(0, CONFIG_BYTES) + b"\xff" * 64
    assert pf.read(at, nbytes) == whole[at : at + nbytes]


@given(st.lists(accesses, max_size=10))
def test_a_write_is_its_double_words_one_after_the_other(writes: list[tuple[int, bytes]]) -> None:
    one, two = function(), function()
    for at, data in writes:
        told = one.write(at, data)
        parts, start = Change(0), at
        while start < at + len(data):
            end = min((start & ~3) + 4, at + len(data))
            parts |= two.write(start, data[start - at : end - at])
            start = end
        assert told == parts
        assert one.read(0, CONFIG_BYTES) == two.read(0, CONFIG_BYTES)
