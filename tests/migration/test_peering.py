"""The rules of a connection, two sides of it in one process and a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import (
    AccelvisorError,
    CapacityError,
    ConflictError,
    DeadlineError,
    HostError,
    NotFoundError,
    ProtocolError,
)
from accelvisor.limits import LIMITS
from accelvisor.migration.framing import Frame, Hello, Type, pack_credit
from accelvisor.migration.peering import (
    Answer,
    Closed,
    Event,
    Greeted,
    Notice,
    Peering,
    Request,
    pack_error,
    unpack_error,
)

SMALL = replace(
    LIMITS, peer_window_bytes=1000, peer_frame_bytes=500, peer_requests=4, peer_requests_per_s=8.0
)


def side(number: int, versions: tuple[int, int] = (1, 1)) -> Peering:
    hello = Hello(lowest=versions[0], highest=versions[1], host=UUID(int=number))
    return Peering(hello, 0.0, limits=SMALL)


def move(source: Peering, target: Peering, now: float = 0.0) -> list[Event]:
    return list(target.receive(source.outgoing(), now))


def pair() -> tuple[Peering, Peering]:
    a, b = side(1), side(2)
    [greeted] = move(a, b)
    assert isinstance(greeted, Greeted)
    move(b, a)
    return a, b


def code_of(target: Peering, raw: bytes) -> str:
    with pytest.raises(AccelvisorError) as caught:
        list(target.receive(raw, 0.0))
    return caught.value.code


def test_a_request_and_its_answer() -> None:
    a, b = pair()
    exchange = a.request(b"?")
    assert move(a, b) == [Request(exchange, 0, b"?")]
    b.respond(exchange, b"!")
    assert move(b, a) == [Answer(exchange, b"!")]


def test_an_error_arrives_as_what_it_was() -> None:
    a, b = pair()
    exchange = a.request(b"?")
    move(a, b)
    b.respond(exchange, NotFoundError("no such", code="function-not-found", where="x", hint="h"))
    [answer] = move(b, a)
    assert isinstance(answer, Answer)
    error = answer.result
    assert type(error) is NotFoundError
    assert error.to_dict() == {
        "code": "function-not-found",
        "message": "no such",
        "where": "peer:x",
        "hint": "h",
    }


@given(st.binary(max_size=60))
def test_an_error_that_cannot_be_read_is_one_too(raw: bytes) -> None:
    assert isinstance(unpack_error(raw), AccelvisorError)


def test_an_error_of_a_class_that_is_none_is_the_hosts() -> None:
    raw = pack_error(NotFoundError("m")).replace(b"NotFoundError", b"annotations..")
    assert type(unpack_error(raw)) is HostError


def test_answers_may_come_in_any_order() -> None:
    a, b = pair()
    first, second = a.request(b"1"), a.request(b"2")
    move(a, b)
    b.respond(second, b"two")
    b.respond(first, b"one")
    assert move(b, a) == [Answer(second, b"two"), Answer(first, b"one")]


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    a, b = pair()
    exchange = a.request(b"?")
    move(a, b)
    a.forget(exchange)
    b.respond(exchange, b"late")
    assert move(b, a) == []


def test_an_answer_without_a_request_is_refused() -> None:
    a, _ = pair()
    assert code_of(a, Frame(Type.RESPONSE, b"", 7).pack()) == "peer-exchange"


def test_a_request_that_comes_twice_is_refused() -> None:
    _, b = pair()
    assert code_of(b, Frame(Type.REQUEST, b"", 7).pack() * 2) == "peer-exchange"


def test_without_a_common_version_neither_goes_on() -> None:
    a, b = side(1, (1, 2)), side(2, (3, 4))
    with pytest.raises(ConflictError) as caught:
        move(a, b)
    assert caught.value.code == "peer-version"


def test_more_than_the_window_waits_and_then_comes() -> None:
    a, b = pair()
    for number in range(5):
        a.notify(bytes([number]) * 400)
    came = move(a, b)
    assert len(came) == 2  # 1000 bytes of window hold two of 416
    for notice in came:
        assert isinstance(notice, Notice)
        b.consumed(0, len(notice.payload))
    move(b, a)
    came += move(a, b)
    assert [n.payload[0] for n in came if isinstance(n, Notice)] == [0, 1, 2, 3]


def test_a_full_channel_does_not_hold_up_another() -> None:
    a, b = pair()
    for _ in range(4):
        a.notify(bytes(400), channel=1)
    a.notify(b"x", channel=2)
    assert Notice(2, b"x") in move(a, b)


def test_more_than_the_window_is_refused() -> None:
    _, b = pair()
    assert code_of(b, Frame(Type.NOTICE, bytes(400)).pack() * 3) == "peer-window"


def test_a_window_that_grows_for_ever_is_refused() -> None:
    a, _ = pair()
    assert code_of(a, Frame(Type.WINDOW, pack_credit(1)).pack()) == "peer-window"


def test_what_waits_for_a_slow_peer_is_bounded() -> None:
    a, _ = pair()
    for _ in range(2 + SMALL.peer_requests):
        a.notify(bytes(400))
    with pytest.raises(CapacityError) as caught:
        a.notify(bytes(400))
    assert caught.value.code == "peer-backlog"
    assert len(a.outgoing()) < SMALL.peer_window_bytes


def test_a_message_too_long_is_not_sent() -> None:
    a, _ = pair()
    with pytest.raises(CapacityError) as caught:
        a.notify(bytes(501))
    assert caught.value.code == "peer-frame-long"
    assert a.outgoing() == b""


def test_too_many_requests_are_answered_so() -> None:
    _, b = pair()
    raw = b"".join(Frame(Type.REQUEST, b"", n).pack() for n in range(1, 6))
    assert len(list(b.receive(raw, 0.0))) == 4
    answers = list(pair()[0]._decoder.feed(b.outgoing()))
    assert [f.exchange for f in answers if f.type is Type.ERROR] == [5]


def test_requests_at_too_high_a_rate_are_answered_so() -> None:
    _, b = pair()
    served = 0
    for number in range(1, 41):
        for event in b.receive(Frame(Type.REQUEST, b"", number).pack(), 1.0):
            assert isinstance(event, Request)
            b.respond(event.exchange, b"")
            served += 1
    assert served == 16  # twice the rate at once
    assert list(b.receive(Frame(Type.REQUEST, b"", 99).pack(), 2.0))


def test_silence_is_asked_and_then_ends() -> None:
    a, b = pair()
    assert a.tick(0.0) == LIMITS.peer_ping_s
    a.tick(LIMITS.peer_ping_s)
    assert move(a, b, 3.0) == []
    move(b, a, 3.0)  # the pong
    assert a.tick(5.0) == 6.0
    with pytest.raises(DeadlineError) as caught:
        a.tick(3.0 + LIMITS.peer_dead_s)
    assert caught.value.code == "peer-silent"


def test_nothing_counts_after_a_goodbye() -> None:
    a, b = pair()
    a.close(ProtocolError("why", code="peer-frame"))
    a.notify(b"more")
    raw = a.outgoing() + Frame(Type.NOTICE, b"more").pack()
    [closed] = b.receive(raw, 0.0)
    assert isinstance(closed, Closed)
    assert closed.error.code == "peer-frame"
