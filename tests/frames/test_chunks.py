"""Chunks: cut and put together again, what no chunk can be, what a leaf covers."""

from __future__ import annotations

import hashlib
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import DataError, UnavailableError
from accelvisor.frames import chunks
from accelvisor.frames.chunks import (
    ZERO_RUN_BYTES,
    Coding,
    Header,
    Kind,
    compress,
    cut,
    expand,
    leaf_hash,
)
from accelvisor.limits import LIMITS

U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)


@given(st.tuples(U64, U32, U32, U64, U64))
def test_any_header_packs_and_comes_back(fields: tuple[int, int, int, int, int]) -> None:
    header = Header(*fields)
    assert Header.unpack(header.pack()) == header
    assert header.pack() == struct.pack("<QIIQQ", *fields)
    header.fault(0)


pieces = st.lists(
    st.tuples(st.booleans(), st.integers(1, 3 * ZERO_RUN_BYTES)), min_size=0, max_size=5
)


@given(pieces, st.booleans(), st.sampled_from([1, 4]))
def test_what_was_cut_comes_together_again(
    parts: list[tuple[bool, int]], zstd: bool, blocks: int
) -> None:
    data = b"".join((b"\0" if zero else b"ab\0c")[: 1 if zero else 4] * n for zero, n in parts)
    out = bytearray(len(data))
    offset, index = 1 << 40, 7
    made = cut(
        Kind.MEMORY, memoryview(data), index=index, offset=offset, size=blocks * ZERO_RUN_BYTES,
        zstd=zstd,
    )  # fmt: skip
    end = offset
    for header, payload in made:
        assert (header.index, header.offset) == (index, end)
        assert header.fault(len(payload)) is None
        start = header.offset - offset
        out[start : start + header.length] = expand(header, payload)
        index, end = index + 1, end + header.length
    assert out == data


def test_zeros_cost_no_payload() -> None:
    data = memoryview(bytes(8 * LIMITS.chunk_bytes))
    made = list(cut(Kind.MEMORY, data, index=0))
    assert [(h.coding, h.length, len(p)) for h, p in made] == [
        (Coding.ZEROS, LIMITS.chunk_bytes, 0)
    ] * 8


def test_one_byte_among_zeros_costs_one_block() -> None:
    data = bytearray(16 * ZERO_RUN_BYTES)
    data[5 * ZERO_RUN_BYTES + 3] = 1
    made = [(h.coding, h.length) for h, _ in cut(Kind.MEMORY, memoryview(data), index=0)]
    assert made == [
        (Coding.ZEROS, 5 * ZERO_RUN_BYTES),
        (Coding.RAW, ZERO_RUN_BYTES),
        (Coding.ZEROS, 10 * ZERO_RUN_BYTES),
    ]


RAW = Header(0, Kind.MEMORY, Coding.RAW, 0, 100)


@pytest.mark.parametrize(
    ("header", "stored"),
    [
        (Header(0, 0, 0, 0, 1), 1),
        (Header(0, 7, 0, 0, 1), 1),
        (Header(0, 5, 3, 0, 1), 1),
        (Header(0, 5, 0, 0, 0), 0),
        (Header(0, 5, 1, 0, 0), 0),
        (Header(0, 5, 0, 0, LIMITS.chunk_bytes + 1), LIMITS.chunk_bytes + 1),
        (Header(0, 5, 1, 0, LIMITS.chunk_bytes + 1), 0),
        (Header(0, 5, 1, (1 << 63) - 99, 100), 0),
        (Header(0, 5, 1, (1 << 64) - 1, 1), 0),
        (RAW, 99),
        (RAW, 101),
        (RAW, 0),
        (Header(0, 5, 1, 0, 100), 1),
        (Header(0, 5, 2, 0, 100), 0),
        (Header(0, 5, 2, 0, 100), 100),
    ],
)
def test_impossible_chunk_has_a_fault(header: Header, stored: int) -> None:
    assert header.fault(stored)


def test_sealed_payload_has_a_tag() -> None:
    assert RAW.fault(116, sealed=True) is None
    assert RAW.fault(100, sealed=True)
    packed = Header(0, 5, Coding.ZSTD, 0, 100)
    assert packed.fault(17, sealed=True) is None
    assert packed.fault(16, sealed=True)
    assert packed.fault(116, sealed=True)
    assert Header(0, 5, Coding.ZEROS, 0, 100).fault(0, sealed=True) is None


@given(st.binary(max_size=300))
def test_leaf_is_the_hash_of_prefix_header_and_payload(payload: bytes) -> None:
    header = RAW.pack()
    expected = hashlib.sha256(b"\0" + header + payload).digest()
    assert leaf_hash(header, payload) == leaf_hash(header, memoryview(payload)) == expected


@given(st.binary(max_size=2000))
def test_zstd_and_back(data: bytes) -> None:
    packed = compress(data)
    if packed is None:
        assert len(zstandard.compress(data, 1)) >= len(data)
    else:
        assert expand(Header(0, 5, Coding.ZSTD, 0, len(data)), packed) == data


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"no zstd",
        zstandard.compress(bytes(999)),
        zstandard.compress(bytes(1001)),
        zstandard.compress(bytes(1 << 26)),
        zstandard.compress(bytes(1000))[:-1],
        # The frame does not say how long it is.
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
    ],
)
def test_payload_of_another_length_is_refused(payload: bytes) -> None:
    with pytest.raises(DataError) as caught:
        expand(Header(0, 5, Coding.ZSTD, 0, 1000), payload)
    assert caught.value.code == "chunk-damaged"


def test_raw_payload_of_another_length_is_refused() -> None:
    with pytest.raises(DataError):
        expand(RAW, bytes(99))


def test_without_zstandard_a_compressed_chunk_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "_zstd", None)
    assert not chunks.has_zstd()
    with pytest.raises(UnavailableError, match="zstandard") as caught:
        expand(Header(0, 5, Coding.ZSTD, 0, 1000), b"x")
    assert caught.value.code == "zstd-missing"
    with pytest.raises(UnavailableError):
        compress(b"x")
