"""Chained records: added, verified, and every way to tamper with them."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import DataError
from accelvisor.frames import canonical
from accelvisor.frames.audit import START, Event, Head, pack, unpack, verify

from .building import NOW


def chain(count: int) -> tuple[list[bytes], Head]:
    records, head = [], Head()
    for index in range(count):
        event = Event(NOW + index, index % 7 + 1, "passed", "ab" * 32, f"detail {index}")
        data, head = head.append(event)
        records.append(data)
    return records, head


def refused(code: str, records: list[bytes], expected: Head | None = None) -> None:
    with pytest.raises(DataError) as caught:
        verify(records, expected)
    assert caught.value.code == code


@pytest.mark.parametrize("count", [0, 1, 5])
def test_chain_is_verified_up_to_its_head(count: int) -> None:
    records, head = chain(count)
    found, reached = verify(records, head)
    assert reached == head
    assert [record.index for record in found] == list(range(count))
    assert [record.detail for record in found] == [f"detail {i}" for i in range(count)]


def test_each_record_has_the_digest_of_the_one_before() -> None:
    records, head = chain(3)
    found, _ = verify(records)
    before = [START, *(hashlib.sha256(data).digest() for data in records)]
    assert [record.previous for record in found] == before[:3]
    assert head == Head(3, before[3])


def test_chain_may_have_grown_since_the_head_that_is_known() -> None:
    records, _ = chain(5)
    assert verify(records, chain(3)[1])[1] == chain(5)[1]


@pytest.mark.parametrize("at", range(5))
def test_record_left_out(at: int) -> None:
    records, head = chain(5)
    del records[at]
    refused("audit-truncated" if at == 4 else "audit-broken", records, head)


def test_records_swapped() -> None:
    records, _ = chain(5)
    records[1], records[2] = records[2], records[1]
    refused("audit-broken", records)


def test_record_repeated() -> None:
    records, _ = chain(3)
    refused("audit-broken", [*records, records[-1]])


def test_cut_is_seen_only_by_who_knows_the_head() -> None:
    records, head = chain(5)
    assert verify(records[:3])[1] == chain(3)[1]
    refused("audit-truncated", records[:3], head)
    refused("audit-truncated", [], head)


def test_written_anew_from_the_middle() -> None:
    records, head = chain(5)
    other = chain(2)[1]
    for _ in range(3):
        data, other = other.append(Event(NOW, 1, "passed", "", "nothing happened"))
        records[other.count - 1] = data
    assert verify(records)[1] == other
    refused("audit-broken", records, head)


@given(st.integers(0, 4), st.data())
def test_flipped_byte(record: int, data: st.DataObject) -> None:
    records, head = chain(5)
    changed = bytearray(records[record])
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    records[record] = bytes(changed)
    with pytest.raises(DataError) as caught:
        verify(records, head)
    assert caught.value.code in ("audit-broken", "audit-damaged")


@pytest.mark.parametrize("record", [b"", b"\xc0", canonical.encode({"index": 0}), b"x" * 9000])
def test_what_is_no_record(record: bytes) -> None:
    refused("audit-damaged", [record])


def test_long_texts_are_cut_so_that_a_record_fits() -> None:
    data, head = Head().append(Event(NOW, 1, "c" * 9999, "\N{GRINNING FACE}" * 9999, "d" * 9999))
    assert verify([data], head)[1] == head


def test_file_of_records_and_a_last_one_that_was_cut() -> None:
    records, head = chain(4)
    data = b"".join(map(pack, records))
    assert list(unpack(data)) == records
    for cut in range(1, len(pack(records[-1])) + 1):
        assert list(unpack(data[:-cut])) == records[:3]
    assert verify(unpack(data), head)[1] == head


@pytest.mark.parametrize("length", [0, 1 << 20, 0xFFFFFFFF])
def test_impossible_length_in_a_file(length: int) -> None:
    with pytest.raises(DataError) as caught:
        list(unpack(length.to_bytes(4, "little") + bytes(8)))
    assert caught.value.code == "audit-damaged"
