"""VERSION: capabilities, limits, and the phases of a connection."""

from __future__ import annotations

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.vfio_user.messages import VERSION, PayloadError
from accelvisor.vfio_user.negotiate import (
    PHASES,
    Agreement,
    Capabilities,
    Event,
    Phase,
    accept_version,
    answer_version,
    own_capabilities,
    pack_version,
    parse_version,
)


def proposal(data: object = None, major: int = 0, minor: int = 0, end: bytes = b"\0") -> bytes:
    text = b"" if data is None else json.dumps(data).encode() + end
    return VERSION.pack(major, minor) + text


def named(**capabilities: object) -> bytes:
    return proposal({"capabilities": capabilities})


QEMU = {
    "pgsizes": 4096, "max_msg_fds": 16, "max_dma_maps": 65535, "max_data_xfer_size": 1048576,
    "migration": {"max_bitmap_size": 268435456, "pgsize": 4096}, "write_multiple": True,
}  # fmt: skip


def answered(body: bytes) -> tuple[dict[str, object], Agreement]:
    reply, agreement = answer_version(body, own_capabilities())
    assert reply.endswith(b"\0")
    return json.loads(reply[4:-1])["capabilities"], agreement


def test_qemu_is_answered_within_what_it_proposed() -> None:
    reply, agreement = answered(named(**QEMU))
    assert set(reply) <= set(QEMU)
    for name in ("max_msg_fds", "max_dma_maps", "max_data_xfer_size"):
        assert reply[name] <= QEMU[name]  # type: ignore[operator]
    assert agreement.minor == 0
    assert agreement.write_multiple
    assert agreement.peer_max_fds == 16


@given(
    st.dictionaries(st.sampled_from(["max_msg_fds", "max_dma_maps", "max_data_xfer_size"]),
                    st.integers(0, 2**64 - 1))
)  # fmt: skip
def test_reply_is_a_subset_and_never_above_the_proposal(proposed: dict[str, int]) -> None:
    reply, _ = answered(named(**proposed))
    assert set(reply) == set(proposed)
    assert all(reply[name] <= value for name, value in proposed.items())  # type: ignore[operator]


def test_absent_capabilities_have_the_specification_s_defaults() -> None:
    for body in (proposal(), proposal({}), proposal({"capabilities": {}})):
        reply, agreement = answered(body)
        assert reply == {}
        assert agreement.peer_max_fds == 1
        assert agreement.peer_max_transfer == 1 << 20
        assert agreement.max_dma_maps == 65535
        assert not agreement.write_multiple
        assert not agreement.twin_socket


def test_small_peer_bounds_what_we_send_and_what_we_take() -> None:
    _, agreement = answered(named(max_data_xfer_size=4096, max_msg_fds=2))
    assert agreement.peer_max_transfer == 4096
    assert agreement.own_max_transfer == 4096
    assert agreement.peer_max_fds == 2


@pytest.mark.parametrize(("proposed", "minor"), [(0, 0), (1, 1), (7, 1)])
def test_minor_is_never_above_the_proposed_one(proposed: int, minor: int) -> None:
    reply, agreement = answer_version(proposal({}, minor=proposed), own_capabilities())
    assert VERSION.unpack_from(reply) == (0, minor)
    assert agreement.minor == minor


@pytest.mark.parametrize("major", [1, 2, 65535])
def test_other_major_is_refused(major: int) -> None:
    with pytest.raises(PayloadError, match="major"):
        answer_version(proposal({}, major=major), own_capabilities())


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\0\0\0", VERSION.pack(0, 0) + b"{", VERSION.pack(0, 0) + b"[]\0",
        VERSION.pack(0, 0) + b"\xff\xfe\0", named(max_msg_fds="many"), named(max_msg_fds=-1),
        named(max_msg_fds=1.5), named(max_data_xfer_size=2**64), named(write_multiple=1),
        named(pgsizes=8192), named(twin_socket=True), proposal({"capabilities": 7}),
        VERSION.pack(0, 0) + b'{"capabilities":' + b"[" * 4000,
        VERSION.pack(0, 0) + b'{"x":' + b"[" * 2000 + b"]" * 2000 + b"}\0",
        VERSION.pack(0, 0) + b" " * 5000,
    ],
)  # fmt: skip
def test_damaged_proposal_is_refused(body: bytes) -> None:
    with pytest.raises(PayloadError):
        answer_version(body, own_capabilities())


def test_version_data_may_lack_its_nul_and_have_unknown_members() -> None:
    body = proposal({"capabilities": {"max_msg_fds": 4, "new": {"a": [1]}}, "more": 1}, end=b"")
    _, agreement = answered(body)
    assert agreement.peer_max_fds == 4


def test_client_takes_what_the_server_answers() -> None:
    reply = pack_version(0, 0, Capabilities(max_msg_fds=8, write_multiple=True))
    agreement, twin = accept_version(reply, own_capabilities(), 0)
    assert (agreement.minor, agreement.peer_max_fds, agreement.write_multiple) == (0, 8, True)
    assert twin is None


@pytest.mark.parametrize(("major", "minor"), [(1, 0), (0, 2)])
def test_client_refuses_a_version_that_it_did_not_propose(major: int, minor: int) -> None:
    with pytest.raises(PayloadError):
        accept_version(pack_version(major, minor, Capabilities()), own_capabilities(), 0)


@pytest.mark.parametrize(
    ("twin", "fds"),
    [({"supported": True}, 1), ({"supported": True, "fd_index": 1}, 1),
     ({"supported": True, "fd_index": -1}, 1), ({"supported": True, "fd_index": 0}, 0)],
)  # fmt: skip
def test_inconsistent_twin_socket_is_refused(twin: dict[str, object], fds: int) -> None:
    own = own_capabilities()
    asked = parse_version(named(twin_socket={"supported": True}))[2]
    own.twin_socket = asked.twin_socket
    with pytest.raises(PayloadError, match="twin"):
        accept_version(named(twin_socket=twin), own, fds)


def test_twin_socket_that_nobody_asked_for_is_refused() -> None:
    body = named(twin_socket={"supported": True, "fd_index": 0})
    with pytest.raises(PayloadError, match="twin"):
        accept_version(body, own_capabilities(), 1)


def test_twin_socket_is_offered_only_to_who_asks() -> None:
    asks = named(twin_socket={"supported": True})
    reply, agreement = answer_version(asks, own_capabilities(), twin=True)
    assert agreement.twin_socket
    assert json.loads(reply[4:-1])["capabilities"]["twin_socket"] == {
        "supported": True, "fd_index": 0,
    }  # fmt: skip
    for body, twin in ((asks, False), (named(), True), (named(twin_socket={}), True)):
        reply, agreement = answer_version(body, own_capabilities(), twin=twin)
        assert not agreement.twin_socket
        assert b"twin" not in reply


def test_agreement_survives_a_journal() -> None:
    _, agreement = answered(named(**QEMU))
    assert Agreement.from_json(agreement.to_json()) == agreement
    with pytest.raises(PayloadError):
        Agreement.from_json(b'{"minor": "x"}')


def test_every_phase_and_event_has_a_move() -> None:
    assert set(PHASES) == set(product(Phase, Event))


def test_nothing_but_version_opens_a_connection_and_nothing_reopens_a_refused_one() -> None:
    for (phase, event), move in PHASES.items():
        opens = move.phase is Phase.READY
        assert opens == (phase is Phase.READY or (phase, event) == (
            Phase.GREETING, Event.VERSION_AGREED,
        ))  # fmt: skip
        assert move.close == (move.phase is Phase.REFUSED)
        if move.phase is Phase.REFUSED:
            assert move.refusal
