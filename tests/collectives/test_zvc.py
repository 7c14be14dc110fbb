"""The packed format: against its plain twin, its formula, and hostile bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.collectives import fast, kinds, reference, zvc
from accelvisor.collectives.kinds import BY_NAME, KINDS, Array, Kind, Op
from accelvisor.errors import DataError, UsageError

from .cases import MASKS, engine, values

SIZES = (0, 1, 2, 7, 63, 64, 65, 127, 128, 1000)


@pytest.fixture(params=["numpy", "numba"], scope="module")
def both(request: pytest.FixtureRequest) -> Iterator[str]:
    with engine(request.param):
        yield request.param


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zvc, "PIECE", 128)
    monkeypatch.setattr(kinds, "PIECE", 128)


EVERY = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)


@EVERY
@pytest.mark.usefixtures("both", "small_pieces")
def test_packing_is_the_plain_twin_and_the_formula(kind: Kind) -> None:
    for n in SIZES:
        for name in MASKS:
            x = values(kind, n, name, n)
            packed = zvc.pack(x, kind)
            assert packed.tobytes() == reference.pack(x, kind)
            nnz = int(np.count_nonzero(x.view(kind.bits) & kind.bits.type(kind.keep)))
            assert packed.size == zvc.packed_bytes(n, nnz, kind.width) <= zvc.room(n, kind.width)


@EVERY
@pytest.mark.usefixtures("both", "small_pieces")
def test_unpacking_gives_back_all_but_negative_zeros_and_payloads(kind: Kind) -> None:
    for n in SIZES:
        for name in MASKS:
            x = values(kind, n, name, n + 1)
            out = np.full(n, 1, kind.storage)
            zvc.unpack(zvc.open_packed(zvc.pack(x, kind), kind, n), out)
            kinds.finish(kind, Op.SUM, x)
            assert out.tobytes() == x.tobytes()
            assert reference.unpack(zvc.pack(x, kind).tobytes(), kind).tobytes() == x.tobytes()


@EVERY
@pytest.mark.parametrize("op", Op)
@pytest.mark.usefixtures("both", "small_pieces")
def test_merging_is_packing_the_plain_reduction(kind: Kind, op: Op) -> None:
    for index, name in enumerate(MASKS):
        a, b = values(kind, 500, name, 1), values(kind, 500, MASKS[-1 - index], 2)
        with np.errstate(all="ignore"):
            b[::5] = np.negative(a[::5]) if kind.name != "bfloat16" else a[::5] ^ 0x8000
        wanted = reference.pack(reference.combine(kind, op, a, b), kind)
        left, right = zvc.open_packed(zvc.pack(a, kind)), zvc.open_packed(zvc.pack(b, kind))
        assert zvc.merge_dense(left, b, op).tobytes() == wanted
        assert zvc.merge(left, right, op).tobytes() == wanted
        out = np.empty_like(a)
        zvc.fold(left, b, op, out)
        kinds.finish(kind, op, out)
        assert zvc.pack(out, kind).tobytes() == wanted


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(0, 300), st.sampled_from(MASKS), st.integers(0, 2**32),
    st.sampled_from(Op),
)  # fmt: skip
def test_merging_any_arrays(kind: Kind, n: int, name: str, seed: int, op: Op) -> None:
    a, b = values(kind, n, name, seed), values(kind, n, "half", seed + 1)
    merged = zvc.merge_dense(zvc.open_packed(zvc.pack(a, kind)), b, op)
    assert merged.tobytes() == reference.pack(reference.combine(kind, op, a, b), kind)


def test_numpy_and_numba_agree_where_an_array_begins_anywhere() -> None:
    kind = BY_NAME["float32"]
    found = []
    for name in ("numpy", "numba"):
        with engine(name):
            for shift in range(4):
                room = np.empty(4000, np.float32)
                x = room[shift : shift + 3001]
                x[:] = values(kind, 3001, "sparse", 7)
                raw = np.empty(zvc.room(x.size, 4) + 8, np.uint8)[shift:]
                packed = zvc.pack(x, kind, raw)
                moved = np.concatenate([np.zeros(shift, np.uint8), packed])[shift:]
                out = np.empty_like(x)
                zvc.unpack(zvc.open_packed(moved), out)
                found.append((packed.tobytes(), out.tobytes()))
    assert len(set(found)) == 1


def test_a_sum_that_cancels_leaves_an_empty_mask() -> None:
    kind = BY_NAME["float32"]
    x = values(kind, 200, "half", 1)
    x = np.where(np.isfinite(x), x, 1).astype(np.float32)
    merged = zvc.merge_dense(zvc.open_packed(zvc.pack(x, kind)), -x, Op.SUM)
    assert zvc.open_packed(merged).nnz == 0


def test_a_mask_with_more_bits_than_needed_is_read() -> None:
    """Another writer may leave the bit of a sum that cancelled."""
    kind = BY_NAME["float32"]
    mask = np.array([0b111], np.uint64)
    body = mask.tobytes() + np.array([1, 0, 2], np.float32).tobytes()
    out = np.empty(64, np.float32)
    zvc.unpack(zvc.open_packed(_signed(64, 3, body)), out)
    assert out[:4].tolist() == [1, 0, 2, 0]
    assert zvc.open_packed(zvc.pack(out, kind)).nnz == 2


def test_absent_values_are_zeros_to_min_and_max() -> None:
    kind = BY_NAME["int32"]
    a, b = np.array([0, 0, 5, -5], "i4"), np.array([3, -3, 0, 0], "i4")
    packed = zvc.open_packed(zvc.pack(np.resize(a, 256), kind))
    assert packed.mask is not None
    for op, wanted in ((Op.MIN, [0, -3, 0, -5]), (Op.MAX, [3, 0, 5, 0])):
        out = np.empty(256, "i4")
        zvc.fold(packed, np.resize(b, 256), op, out)
        assert out[:4].tolist() == wanted


def test_a_raw_array_is_never_longer_than_its_values_and_a_header() -> None:
    for kind in KINDS:
        for n in (1, 63, 1000):
            x = values(kind, n, "all", n)
            assert zvc.pack(x, kind).size <= n * kind.width + zvc.HEADER.size


# --- hostile bytes -------------------------------------------------------------------------------


def _signed(n: int, nnz: int, body: bytes, flags: int = 0, code: int = 1) -> bytes:
    head = struct.pack("<4B2I", 1, code, flags, 0, n, nnz)
    return head + struct.pack("<I", zlib.crc32(head + body)) + body


HOSTILE = {
    "nothing": b"",
    "half a header": bytes(10),
    "another version": b"\2" + _signed(0, 0, b"")[1:],
    "an unknown flag": _signed(0, 0, b"", flags=2),
    "an unknown dtype": _signed(0, 0, b"", code=99),
    "values beyond the end": _signed(64, 64, b"\xff" * 8 + bytes(4)),
    "a mask beyond the end": _signed(2**32 - 1, 0, bytes(8)),
    "more values than elements": _signed(4, 5, b"\x1f" + bytes(27)),
    "raw with fewer values": _signed(4, 3, bytes(16), flags=1),
    "more bits than values": _signed(64, 1, b"\xff" * 8 + bytes(4)),
    "fewer bits than values": _signed(64, 2, b"\x01" + bytes(15)),
    "a bit beyond the last element": _signed(3, 1, b"\x08" + bytes(11)),
    "a wrong checksum": _signed(64, 0, bytes(8))[:-1] + b"\1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_packed_array_is_refused(name: str) -> None:
    with pytest.raises(DataError) as caught:
        zvc.open_packed(HOSTILE[name])
    assert caught.value.code == "zvc-invalid"


def test_every_bit_of_a_packed_array_is_under_its_checksum() -> None:
    packed = zvc.pack(values(BY_NAME["int16"], 40, "half", 3), BY_NAME["int16"])
    for bit in range(8 * packed.size):
        bad = packed.copy()
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataError):
            zvc.open_packed(bad)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 200), st.integers(0, 200), st.integers(0, 1))
def test_any_bytes_are_read_within_bounds_or_refused(
    body: bytes, n: int, nnz: int, flags: int
) -> None:
    try:
        packed = zvc.open_packed(_signed(n, nnz, body, flags))
    except DataError:
        return
    out = np.empty(n, np.float32)
    zvc.unpack(packed, out)
    assert np.count_nonzero(out.view(np.uint32)) <= nnz


def test_a_mask_that_changes_after_it_was_checked_is_not_looked_at() -> None:
    """A guest can write to memory that a kernel reads."""
    kind = BY_NAME["float32"]
    x = values(kind, 640, "sparse", 4)
    raw = zvc.pack(x, kind).copy()
    packed = zvc.open_packed(raw)
    raw[16 : 16 + zvc.mask_bytes(640)] = 255
    out = np.empty_like(x)
    zvc.unpack(packed, out)
    kinds.finish(kind, Op.SUM, x)
    assert out.tobytes() == x.tobytes()


def test_arrays_that_do_not_fit_each_other() -> None:
    kind = BY_NAME["float32"]
    a = zvc.open_packed(zvc.pack(np.ones(70, "f4"), kind))
    whole = zvc.open_packed(zvc.pack(np.ones(70, "i4"), BY_NAME["int32"]))
    calls: list[Any] = [
        lambda: zvc.unpack(a, np.empty(71, "f4")),
        lambda: zvc.merge_dense(a, np.empty(69, "f4"), Op.SUM),
        lambda: zvc.merge(a, whole, Op.SUM),
        lambda: zvc.pack(np.ones(70, "f4"), kind, np.empty(100, np.uint8)),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()


def test_density_is_a_guess_that_is_right_for_even_data() -> None:
    kind = BY_NAME["float32"]
    random = np.random.default_rng(0)
    for part in (0.0, 0.1, 0.5, 0.9):
        x = (random.random(1 << 18) < part).astype(np.float32)
        assert abs(zvc.density(x, kind) - part) < 0.06
    image: Array = np.zeros((512, 512), np.float32)
    image[:, ::2] = 1
    assert abs(zvc.density(image.reshape(-1), kind) - 0.5) < 0.06
    assert zvc.density(np.full(10, -0.0, np.float32), kind) == 0
    assert zvc.density(np.empty(0, np.float32), kind) == 0


def test_without_numba_numpy_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    fast.cool()
    monkeypatch.setattr(fast, "_made", [])
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    assert not fast.warm((4,))
    x = values(BY_NAME["float32"], 100, "half", 1)
    assert zvc.pack(x, BY_NAME["float32"]).tobytes() == reference.pack(x, BY_NAME["float32"])
