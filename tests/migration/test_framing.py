"""Frames and greetings: what goes in comes out, and what breaks a rule is refused early."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import AccelvisorError, ConflictError, ProtocolError
from accelvisor.limits import LIMITS
from accelvisor.migration.framing import HEADER, MAGIC, Decoder, Frame, Hello, Type, agree

HELLO = Hello(lowest=1, highest=3, host=UUID(int=1), features=("zstd",), software="a 1")
GREETING = Frame(Type.HELLO, HELLO.pack()).pack()

payloads = st.binary(max_size=300)
channels = st.integers(0, LIMITS.peer_channels - 1)
messages = st.one_of(
    st.builds(
        Frame,
        st.sampled_from([Type.REQUEST, Type.RESPONSE, Type.ERROR]),
        payloads,
        st.integers(1, 2**64 - 1),
        channels,
    ),
    st.builds(Frame, st.just(Type.NOTICE), payloads, st.just(0), channels),
    st.builds(Frame, st.sampled_from([Type.PING, Type.PONG]), st.binary(min_size=8, max_size=8)),
)


@given(st.lists(messages, max_size=6), st.data())
def test_frames_come_out_however_the_stream_is_cut(
    frames: list[Frame], data: st.DataObject
) -> None:
    stream = GREETING + b"".join(frame.pack() for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = Decoder()
    out: list[Frame] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        out += decoder.feed(stream[begin:end])
    assert out[1:] == frames
    assert Hello.unpack(out[0].payload) == HELLO
    assert not decoder.partial


@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_do_more_than_raise_protocol_errors(junk: bytes, greeted: bool) -> None:
    decoder = Decoder()
    try:
        for frame in decoder.feed((GREETING if greeted else b"") + junk):
            if frame.type is Type.HELLO:
                Hello.unpack(frame.payload)
    except ProtocolError as error:
        assert error.code.startswith("peer-")  # noqa: PT017 - most examples raise, some do not


def code_of(*parts: bytes) -> str:
    decoder = Decoder()
    *before, last = parts
    for part in before:
        list(decoder.feed(part))
    with pytest.raises(AccelvisorError) as caught:
        list(decoder.feed(last))
    return caught.value.code


def header(
    kind: int, length: int, *, magic: int = MAGIC, channel: int = 0, exchange: int = 0
) -> bytes:
    return HEADER.pack(magic, kind, channel, length, exchange)


def test_a_frame_too_long_is_refused_by_its_header_alone() -> None:
    long = LIMITS.peer_frame_bytes + 1
    assert code_of(GREETING, header(Type.NOTICE, long)) == "peer-frame-long"


def test_before_the_greeting_only_a_greeting_may_be_long_or_come() -> None:
    assert code_of(header(Type.HELLO, LIMITS.peer_hello_bytes + 1)) == "peer-frame-long"
    assert code_of(header(Type.NOTICE, 0)) == "peer-greeting"


def test_a_second_greeting_is_refused() -> None:
    assert code_of(GREETING, GREETING) == "peer-greeting"


@pytest.mark.parametrize(
    "frame",
    [
        header(Type.NOTICE, 0, magic=0x16),  # a TLS record
        header(99, 0),
        header(Type.PING, 7),
        header(Type.WINDOW, 0),
        header(Type.REQUEST, 0),  # without an exchange
        header(Type.NOTICE, 0, exchange=1),
        header(Type.NOTICE, 0, channel=LIMITS.peer_channels),
    ],
)
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    assert code_of(GREETING, frame) == "peer-frame"


def test_a_broken_decoder_stays_broken() -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolError):
        list(decoder.feed(b"\0" * 16))
    with pytest.raises(ProtocolError):
        list(decoder.feed(GREETING))


def test_no_more_is_kept_than_one_frame() -> None:
    decoder = Decoder()
    most = header(Type.NOTICE, LIMITS.peer_frame_bytes) + bytes(LIMITS.peer_frame_bytes - 1)
    assert [frame.type for frame in decoder.feed(GREETING + most)] == [Type.HELLO]
    assert decoder.partial
    assert [frame.type for frame in decoder.feed(b"\0")] == [Type.NOTICE]


@pytest.mark.parametrize(
    "names", [("x" * 65,), ("line\nbreak",), tuple(f"f{i}" for i in range(32))]
)
def test_greetings_with_odd_names_are_refused(names: tuple[str, ...]) -> None:
    raw = Hello(lowest=1, highest=1, host=UUID(int=1), features=names).pack()
    with pytest.raises(ProtocolError) as caught:
        Hello.unpack(raw)
    assert caught.value.code == "peer-greeting"


def test_fields_of_a_later_greeting_are_passed_over() -> None:
    later = {**msgspec.to_builtins(HELLO), "colour": "blue"}
    assert Hello.unpack(msgspec.msgpack.encode(later)) == HELLO


@given(*[st.integers(1, 6)] * 4)
def test_both_sides_agree_on_the_highest_common_version(a: int, b: int, c: int, d: int) -> None:
    mine = Hello(lowest=min(a, b), highest=max(a, b), host=UUID(int=1), features=("x", "y"))
    theirs = Hello(lowest=min(c, d), highest=max(c, d), host=UUID(int=2), features=("y", "z"))
    common = set(range(mine.lowest, mine.highest + 1)) & set(
        range(theirs.lowest, theirs.highest + 1)
    )
    if common:
        assert agree(mine, theirs) == agree(theirs, mine)
        assert agree(mine, theirs).version == max(common)
        assert agree(mine, theirs).features == {"y"}
    else:
        with pytest.raises(ConflictError) as caught:
            agree(mine, theirs)
        older = mine if mine.highest < theirs.lowest else theirs
        assert str(older.host) in caught.value.hint


def test_a_frame_that_does_not_fit_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="65535"):
        replace(Frame(Type.NOTICE), channel=2**16).pack()
