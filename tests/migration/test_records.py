"""Sealed records: what goes in comes out, and nothing else does."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import ProtocolError
from accelvisor.migration.records import (
    LENGTH,
    OVERHEAD,
    RECORD_BYTES,
    SLACK,
    TAG_BYTES,
    Opener,
    Sealer,
    keys,
    record_length,
)

KEY = bytes(range(32))
SIZES = [1, 40, 4095, 4096, 5000, RECORD_BYTES]


def old(target: Sealer | Opener) -> None:
    """As with a cryptography that cannot work in place (before 47)."""
    aead = target._aead
    target._aead = SimpleNamespace(encrypt=aead.encrypt, decrypt=aead.decrypt)


def sealed(sealer: Sealer, plain: bytes) -> memoryview:
    out = memoryview(bytearray(len(plain) + OVERHEAD + SLACK))
    length = sealer.seal(plain, out)
    assert length == len(plain) + OVERHEAD
    return out[:length]


def opened(opener: Opener, record: memoryview) -> bytes:
    assert record_length(record[: LENGTH.size]) == len(record) - LENGTH.size
    out = bytearray(len(record) - OVERHEAD)
    opener.open(record[LENGTH.size :], memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("older", [(), (0,), (1,), (0, 1)])
def test_both_ways_of_the_library_make_the_same(size: int, older: tuple[int, ...]) -> None:
    ends = (Sealer(KEY), Opener(KEY))
    for end in older:
        old(ends[end])
    for _ in range(3):
        plain = os.urandom(size)
        assert opened(ends[1], sealed(ends[0], plain)) == plain


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_record_with_any_bit_flipped_does_not_open(plain: bytes, data: st.DataObject) -> None:
    record = sealed(Sealer(KEY), plain)
    bit = data.draw(st.integers(LENGTH.size * 8, len(record) * 8 - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError) as caught:
        opened(Opener(KEY), record)
    assert caught.value.code == "peer-record"


@pytest.mark.parametrize("size", [40, 5000])
@pytest.mark.parametrize("older", [False, True])
def test_a_long_record_that_was_changed_does_not_open_either(size: int, older: bool) -> None:
    record = sealed(Sealer(KEY), bytes(size))
    record[-1] ^= 1
    opener = Opener(KEY)
    if older:
        old(opener)
    with pytest.raises(ProtocolError):
        opened(opener, record)


def test_left_out_repeated_or_reordered_records_do_not_open() -> None:
    sealer = Sealer(KEY)
    records = [sealed(sealer, b"same") for _ in range(3)]
    for order in ((1,), (0, 0), (0, 2), (0, 1, 1)):
        opener = Opener(KEY)
        *good, wrong = order
        for number in good:
            assert opened(opener, records[number]) == b"same"
        with pytest.raises(ProtocolError):
            opened(opener, records[wrong])


def test_directions_and_connections_have_their_own_keys() -> None:
    made = [*keys(bytes(32)), *keys(bytes(31) + b"1")]
    assert len(set(made)) == 4
    with pytest.raises(ProtocolError):
        opened(Opener(made[1]), sealed(Sealer(made[0]), b"x"))


@pytest.mark.parametrize("length", [0, TAG_BYTES, RECORD_BYTES + TAG_BYTES + 1, 2**32 - 1])
def test_a_length_that_is_none_is_refused_before_anything_is_read(length: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        record_length(LENGTH.pack(length))
    assert caught.value.code == "peer-record"
