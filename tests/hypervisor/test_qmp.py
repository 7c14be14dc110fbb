from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qemu.qmp.message import Message

from accelvisor.errors import ProtocolError
from accelvisor.hypervisor.qmp import Codec, Event, Greeting, Reply

GREETING = (
    b'{"QMP": {"version": {"qemu": {"micro": 3, "minor": 1, "major": 11}, "package": "Debian"},'
    b' "capabilities": ["oob"]}}\r\n'
)
STOP = b'{"timestamp": {"seconds": 1700000000, "microseconds": 250000}, "event": "STOP"}\r\n'


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\r\n"


def test_a_greeting_is_read() -> None:
    assert Codec().feed(GREETING) == [Greeting((11, 1, 3), ("oob",))]


def test_an_event_before_the_greeting_is_an_event() -> None:
    messages = Codec().feed(STOP + GREETING)
    assert messages == [Event("STOP", {}, 1700000000.25), Greeting((11, 1, 3), ("oob",))]


def test_an_event_between_command_and_reply_is_not_the_reply() -> None:
    codec = Codec()
    identifier, _ = codec.command("query-status")
    event, reply = codec.feed(STOP + line({"return": {"running": False}, "id": identifier}))
    assert isinstance(event, Event)
    assert reply == Reply(identifier, {"running": False})


def test_an_event_that_carries_a_return_member_is_still_an_event() -> None:
    codec = Codec()
    identifier, _ = codec.command("cont")
    (message,) = codec.feed(line({"event": "X", "return": {}, "id": identifier}))
    assert isinstance(message, Event)


def test_replies_out_of_order_find_their_commands() -> None:
    codec = Codec()
    ids = [codec.command("a")[0], codec.command("b")[0], codec.command("c")[0]]
    for order in itertools.permutations(ids):
        fresh = Codec()
        for name in "abc":
            fresh.command(name)
        replies = fresh.feed(b"".join(line({"return": n, "id": n}) for n in order))
        assert [(r.id, r.value) for r in replies if isinstance(r, Reply)] == [(n, n) for n in order]


def test_an_abandoned_reply_is_dropped() -> None:
    codec = Codec()
    late, _ = codec.command("slow")
    codec.abandon(late)
    asked, _ = codec.command("quick")
    assert codec.feed(line({"return": 1, "id": late}) + line({"return": 2, "id": asked})) == [
        Reply(asked, 2)
    ]


def test_an_error_is_a_reply_with_class_and_text() -> None:
    codec = Codec()
    identifier, _ = codec.command("device_del", {"id": "x"})
    error = {"class": "DeviceNotFound", "desc": "Device 'x' not found"}
    (reply,) = codec.feed(line({"error": error, "id": identifier}))
    assert reply == Reply(identifier, None, "DeviceNotFound", "Device 'x' not found")
    assert isinstance(reply, Reply)
    assert reply.failed


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\n",
        b"[]\n",
        b"1\n",
        b'{"x": 1}\n',
        b'{"return": 1}\n',
        b'{"return": 1, "id": "1"}\n',
        b'{"return": 1, "id": true}\n',
        b'{"return": 1, "id": 7}\n',
        b'{"id": 1}\n',
        b'{"error": 5, "id": 1}\n',
        b'{"error": {"class": "GenericError", "desc": "JSON parse error"}}\n',
        b'{"event": 5}\n',
        b'{"event": "X", "data": []}\n',
        b'{"event": "X", "timestamp": 1}\n',
        b'{"QMP": {}}\n',
        b'{"QMP": {"version": {"qemu": {"major": "x", "minor": 1, "micro": 1}}}}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b"x" * 2000,
        b'"' + b"x" * 2000 + b'"\n',
    ],
)
def test_what_is_no_qmp_breaks_the_connection(raw: bytes) -> None:
    codec = Codec(max_bytes=1000) if len(raw) < 10_000 else Codec()
    codec.command("query-status")
    with pytest.raises(ProtocolError) as caught:
        codec.feed(raw)
    assert caught.value.code == "qmp"


def test_an_event_without_a_clock_has_time_zero() -> None:
    (event,) = Codec().feed(line({"event": "X", "timestamp": {"seconds": -1, "microseconds": -1}}))
    assert event == Event("X", {}, 0.0)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_bytes_may_come_in_any_pieces(cuts: list[int]) -> None:
    def codec() -> Codec:
        made = Codec()
        made.command("a")
        return made

    stream = GREETING + STOP + line({"return": {"ä": [1, None]}, "id": 1}) + b"\r\n" + STOP
    whole = codec().feed(stream)
    pieces, left, found = codec(), stream, []
    for cut in cuts:
        found += pieces.feed(left[:cut])
        left = left[cut:]
    assert found + pieces.feed(left) == whole


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_protocol_error(raw: bytes) -> None:
    codec = Codec()
    codec.command("a")
    try:
        codec.feed(raw)
    except ProtocolError:
        pass


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@given(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=4))
def test_qemus_own_library_reads_our_commands(name: str, arguments: dict[str, object]) -> None:
    identifier, raw = Codec().command(name, arguments)
    assert raw.count(b"\n") == 1
    message = Message(raw.strip())
    assert (message["execute"], message["id"]) == (name, identifier)
    assert message.get("arguments", {}) == arguments
