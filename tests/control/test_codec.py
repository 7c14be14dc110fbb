from __future__ import annotations

import contextlib
import json
import sys
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.control.codec import (
    Call,
    Decoder,
    Reply,
    call_message,
    encode,
    parse_call,
    parse_reply,
    reply_message,
)
from accelvisor.errors import ProtocolError
from accelvisor.limits import LIMITS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=4)


def refused(data: bytes, **limits: int) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        Decoder(**limits).feed(data)
    return caught.value


@given(st.lists(OBJECTS, max_size=5), st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(messages, data) -> None:
    stream = b"".join(encode(message) for message in messages)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    decoder, got = Decoder(), []
    for begin, end in pairwise([0, *cuts, len(stream)]):
        got += decoder.feed(stream[begin:end])
    assert got == messages
    assert not decoder.partial


def test_byte_by_byte() -> None:
    decoder = Decoder()
    got: list[Any] = []
    for byte in b'{"a": "\xc3\xa4 \\u0000 }{"}\0{}\0':
        got += decoder.feed(bytes([byte]))
    assert got == [{"a": "ä \0 }{"}, {}]


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_a_protocol_error(data: bytes) -> None:
    decoder = Decoder()
    with contextlib.suppress(ProtocolError):
        for message in decoder.feed(data):
            parse_call(message)


def test_deep_nesting_does_not_reach_the_parser() -> None:
    """A16: giant method name or deep nesting kills the server."""
    for depth in (LIMITS.admin_depth + 1, 4096, 100_000):
        assert refused(b"[" * depth + b"\0").code == "message-too-deep"
        assert refused(b'{"a":' * depth + b"\0").code == "message-too-deep"
    fine = LIMITS.admin_depth - 1
    text = b'{"a":' + b"[" * fine + b"]" * fine + b"}\0"
    assert Decoder().feed(text)


@pytest.mark.parametrize("unit", [b'\\"', b'"', b'"\\', b"\\", b"[]", b'"["'])
def test_no_message_takes_more_than_linear_time(unit: bytes) -> None:
    """What makes naive scanners quadratic; ten times of it would cost them a hundred times."""

    def cost(size: int) -> float:
        message = b'"' + unit * (size // len(unit)) + b"\0"
        return min(_thread_time(message) for _ in range(5))

    assert cost(500_000) < 40 * cost(50_000)


def _thread_time(message: bytes) -> float:
    before = time.thread_time()
    refused(message)
    return time.thread_time() - before


def test_brackets_in_strings_are_no_nesting() -> None:
    text = json.dumps({"a": "[" * 1000 + '\\"' + "{" * 1000}).encode() + b"\0"
    assert Decoder().feed(text)[0]["a"].startswith("[[[")


def test_a_message_without_end_is_bounded() -> None:
    decoder = Decoder(max_bytes=100)
    decoder.feed(b"x" * 100)
    with pytest.raises(ProtocolError) as caught:
        decoder.feed(b"x")
    assert caught.value.code == "message-too-long"
    assert refused(b'{"a":"' + b"x" * 100 + b'"}\0', max_bytes=100).code == "message-too-long"


def test_the_number_of_calls_at_once_is_bounded() -> None:
    assert refused(b"{}\0" * 65).code == "too-many-calls"
    assert len(Decoder().feed(b"{}\0" * 64)) == 64


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense",
        b"[]",
        b"3",
        b'"text"',
        b"\xff\xff",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\\ud800"}',
        b"{} {}",
        b'{"a": 1' + b"0" * 5000 + b"}",
    ],
)
def test_what_is_no_message(raw: bytes) -> None:
    assert refused(raw + b"\0").code == "message-syntax"


def test_one_value_never_changes_the_interpreters_limits() -> None:
    before = sys.getrecursionlimit()
    refused(b"[" * 100_000 + b"\0")
    assert sys.getrecursionlimit() == before


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"method": 3},
        {"method": "GetHost"},
        {"method": "io.accelvisor.Admin."},
        {"method": "io.accelvisor.Admin.getHost"},
        {"method": "io..Admin.GetHost"},
        {"method": "io.accelvisor.Admin.Get Host"},
        {"method": "io.accelvisor.Admin.GetHost\n"},
        {"method": "a." * 5000 + "B"},
        {"method": "a.b.C", "parameters": []},
        {"method": "a.b.C", "more": 1},
        {"method": "a.b.C", "oneway": True, "more": True},
        {"method": "a.b.C", "extra": 1},
    ],
)
def test_what_is_no_call(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_call(message)
    assert caught.value.code == "call-malformed"


@pytest.mark.parametrize(
    "message",
    [
        {"parameters": 3},
        {"error": 3},
        {"continues": "yes"},
        {"method": "a.b.C", "parameters": {}},
    ],
)
def test_what_is_no_reply(message: dict[str, Any]) -> None:
    """A11: event taken for a reply. A call is not one either."""
    with pytest.raises(ProtocolError) as caught:
        parse_reply(message)
    assert caught.value.code == "reply-malformed"


@given(OBJECTS, st.booleans(), st.booleans(), st.booleans())
def test_calls_survive_the_wire(parameters, oneway, more, upgrade) -> None:
    call = Call("a.b", "C", parameters, oneway and not more, more, upgrade)
    [message] = Decoder().feed(encode(call_message(call)))
    assert parse_call(message) == call


@given(OBJECTS, st.none() | st.just("a.b.Wrong"), st.booleans())
def test_replies_survive_the_wire(parameters, error, continues) -> None:
    reply = Reply(parameters, error, continues)
    [message] = Decoder().feed(encode(reply_message(reply)))
    assert parse_reply(message) == reply


def test_null_parameters_are_none_given() -> None:
    assert parse_call({"method": "a.b.C", "parameters": None}).parameters == {}


def test_a_reply_too_long_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError) as caught:
        encode({"a": "x" * 100}, max_bytes=50)
    assert caught.value.code == "message-too-long"
