"""Canonical msgpack: one encoding for each value, and a refusal for every other spelling."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import DataError
from accelvisor.frames.canonical import decode, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5)
    | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)


def plain(value: Any) -> bytes:
    """The format's specification as a function: the reference that the module is compared with."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return plain_integer(value)
    if isinstance(value, str):
        raw = value.encode()
        return length(len(raw), (0xA0, 32), 0xD9, 0xDA, 0xDB) + raw
    if isinstance(value, bytes):
        return length(len(value), (0, 0), 0xC4, 0xC5, 0xC6) + value
    if isinstance(value, list):
        return length(len(value), (0x90, 16), None, 0xDC, 0xDD) + b"".join(map(plain, value))
    pairs = sorted((key.encode(), item) for key, item in value.items())
    body = b"".join(plain(key.decode()) + plain(item) for key, item in pairs)
    return length(len(pairs), (0x80, 16), None, 0xDE, 0xDF) + body


def length(n: int, fixed: tuple[int, int], one: int | None, two: int, four: int) -> bytes:
    if n < fixed[1]:
        return bytes([fixed[0] + n])
    if one is not None and n < 1 << 8:
        return struct.pack(">BB", one, n)
    return struct.pack(">BH", two, n) if n < 1 << 16 else struct.pack(">BI", four, n)


def plain_integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack("b", value)
    for code, width in zip((0xCC, 0xCD, 0xCE, 0xCF), "BHIQ", strict=True):
        if 0 <= value < 1 << 8 * struct.calcsize(width):
            return struct.pack(f">B{width}", code, value)
    for code, width in zip((0xD0, 0xD1, 0xD2, 0xD3), "bhiq", strict=True):
        if -(1 << 8 * struct.calcsize(width) - 1) <= value < 0:
            return struct.pack(f">B{width}", code, value)
    raise AssertionError(value)


@given(values)
def test_encoding_is_the_specification_and_comes_back(value: Any) -> None:
    data = encode(value)
    assert data == plain(value)
    assert decode(data) == value


@given(st.binary(max_size=60))
def test_what_is_decoded_has_this_one_encoding(data: bytes) -> None:
    """For any bytes: either a value whose only encoding they are, or a refusal."""
    try:
        value = decode(data)
    except DataError:
        return
    assert plain(value) == data


@given(values, st.data())
def test_changed_byte_is_refused_or_means_another_value(value: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(value))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        other = decode(bytes(raw))
    except DataError:
        return
    assert encode(other) == raw != encode(value)


def test_order_of_filling_does_not_matter() -> None:
    assert encode({"b": 1, "a": 2}) == encode({"a": 2, "b": 1}) == b"\x82\xa1a\x02\xa1b\x01"


REFUSED = {
    "nothing": b"",
    "two values": b"\x01\x01",
    "cut": b"\xa5abc",
    "float": b"\xca\x3f\x80\x00\x00",
    "double": b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00",
    "NaN": b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    "extension": b"\xd4\x05\x00",
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "number in 2 bytes": b"\xcc\x05",
    "number in 3 bytes": b"\xcd\x00\xff",
    "positive number as signed": b"\xd1\x00\xff",
    "negative number in 2 bytes": b"\xd0\xff",
    "long text length": b"\xd9\x01a",
    "long bytes length": b"\xc5\x00\x01a",
    "long list length": b"\xdc\x00\x01\x01",
    "long map length": b"\xde\x00\x01\xa1a\x01",
    "text is no UTF-8": b"\xa1\xff",
    "text is an overlong UTF-8": b"\xa2\xc0\x80",
    "text is a surrogate": b"\xa3\xed\xa0\x80",
    "key twice": b"\x82\xa1a\x01\xa1a\x01",
    "key twice, other value": b"\x82\xa1a\x01\xa1a\x02",
    "keys out of order": b"\x82\xa1b\x01\xa1a\x01",
    "key is a number": b"\x81\x01\x01",
    "key is bytes": b"\x81\xc4\x01a\x01",
    "key is a list": b"\x81\x90\x01",
    "key is nil": b"\x81\xc0\x01",
    "never used byte": b"\xc1",
    "length past the end": b"\xdd\xff\xff\xff\xff",
    "bytes past the end": b"\xc6\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(DataError) as caught:
        decode(REFUSED[name])
    assert caught.value.code == "document-invalid"


@pytest.mark.parametrize("depth", [17, 500, 2000, 200_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(DataError):
        decode(b"\x91" * depth + b"\x01")


def test_depth_sixteen_is_taken() -> None:
    value: Any = 1
    for _ in range(16):
        value = [value]
    assert decode(encode(value)) == value
    with pytest.raises(DataError, match="too deeply"):
        encode([value])


def test_size_and_number_of_values_are_bounded() -> None:
    data = encode([1, 2, 3])
    assert decode(data, max_bytes=4, max_values=4) == [1, 2, 3]
    with pytest.raises(DataError, match="longer than 3"):
        decode(data, max_bytes=3)
    with pytest.raises(DataError, match="too many"):
        decode(data, max_values=3)


@pytest.mark.parametrize(
    "value", [1.5, 1 << 64, -(1 << 63) - 1, "\ud800", {1: 2}, {"\ud800": 1}, object(), {1, 2}]
)
def test_what_has_no_canonical_form_is_not_encoded(value: Any) -> None:
    with pytest.raises(DataError) as caught:
        encode(value)
    assert caught.value.code == "document-invalid"
