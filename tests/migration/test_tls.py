"""Who is let in: pinned keys, real TLS over loopback."""

from __future__ import annotations

import socket
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.errors import AccelvisorError, DeadlineError
from accelvisor.limits import KIB
from accelvisor.migration.channel import Channel
from accelvisor.migration.rates import Watch
from accelvisor.migration.tls import Credentials, Pin, Pins
from tests.migration.hosts import STRANGER, A, B, Host, both, channels, close, socket_pair, until


def meet(near: Credentials, far: Credentials, **options: object) -> list[object]:
    """What each side made of the other: a byte that it read, or what it raised."""
    mine, theirs = socket_pair()

    def talk(sock: socket.socket, credentials: Credentials, server: bool) -> bytes:
        expected = None if server else options.get("expected")
        channel = Channel(
            sock, credentials, server=server, clock=lambda: 0.0, expected=expected  # type: ignore[arg-type]
        )
        try:
            channel.write(b"x")
            channel.flush()
            return channel.read(1)
        finally:
            channel.close()

    return both(lambda: talk(mine, near, False), lambda: talk(theirs, far, True))


def code(result: object) -> str:
    assert isinstance(result, AccelvisorError), result
    return result.code


def test_hosts_that_trust_each_other_meet() -> None:
    assert meet(A.trusting(B.pin), B.trusting(A.pin)) == [b"x", b"x"]


def test_a_server_with_an_unknown_key_is_refused() -> None:
    near, _ = meet(A.trusting(B.pin), STRANGER.trusting(A.pin))
    assert code(near) == "peer-unknown"


def test_a_client_with_an_unknown_key_is_refused() -> None:
    near, far = meet(STRANGER.trusting(B.pin), B.trusting(A.pin))
    assert code(far) == "peer-unknown"
    assert code(near) in ("peer-refused", "peer-lost")


def test_a_revoked_key_is_refused_by_name() -> None:
    _, far = meet(A.trusting(B.pin), B.trusting(A.revoked))
    assert code(far) == "peer-revoked"
    near, _ = meet(A.trusting(B.revoked), B.trusting(A.pin))
    assert code(near) == "peer-revoked"


def test_a_key_that_is_revoked_anywhere_is_revoked() -> None:
    pins = Pins([A.pin, A.revoked, A.pin])
    with pytest.raises(AccelvisorError) as caught:
        pins.host_of(A.identity.public)
    assert caught.value.code == "peer-revoked"


def test_another_trusted_host_is_not_the_one_that_was_meant() -> None:
    near, _ = meet(A.trusting(B.pin), B.trusting(A.pin), expected=STRANGER.uuid)
    assert code(near) == "peer-wrong-host"


def test_both_keys_of_a_rotation_are_good() -> None:
    new = Host.make(0xA)
    far = B.trusting(A.pin, new.pin)
    for each in (A, new):
        assert meet(each.trusting(B.pin), far) == [b"x", b"x"]


def test_a_certificate_of_a_trusted_name_by_another_key_is_refused() -> None:
    thief = Host.make(0xB)  # says that it is B
    near, _ = meet(A.trusting(B.pin), thief.trusting(A.pin))
    assert code(near) == "peer-unknown"


def plain_client(**settings: object) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for name, value in settings.items():
        setattr(context, name, value)
    return context


def refused_by_b(context: ssl.SSLContext) -> str:
    mine, theirs = socket_pair()

    def client() -> bytes:
        with context.wrap_socket(mine) as tls:
            return tls.recv(1)

    _, far = both(
        client, lambda: Channel(theirs, B.trusting(A.pin), server=True, clock=lambda: 0.0)
    )
    return code(far)


def test_tls_1_2_is_refused() -> None:
    context = plain_client(maximum_version=ssl.TLSVersion.TLSv1_2)
    assert refused_by_b(context) == "peer-tls"


def test_a_client_without_a_certificate_is_refused() -> None:
    assert refused_by_b(plain_client()) == "peer-tls"


def test_what_is_no_tls_is_refused() -> None:
    mine, theirs = socket_pair()
    with mine:
        mine.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(AccelvisorError) as caught:
            Channel(theirs, B.trusting(A.pin), server=True, clock=lambda: 0.0)
    assert caught.value.code == "peer-tls"


def test_a_handshake_that_does_not_end_is_given_up() -> None:
    mine, theirs = socket_pair()
    clock = iter([0.0] + [float(n) for n in range(1000)])
    mine.sendall(b"\x16\x03\x01\x02\x00")  # the header of a record that never comes
    with mine, pytest.raises(DeadlineError) as caught:
        Channel(theirs, B.trusting(A.pin), server=True, clock=lambda: next(clock))
    assert caught.value.code == "peer-stalled"


def test_revocation_cuts_a_connection_that_is_in_use() -> None:
    far_credentials = B.trusting(A.pin)
    [near], [far] = channels(near=A.trusting(B.pin), far=far_credentials)
    read, _ = both(lambda: far.read(1), lambda: far_credentials.trust(Pins([A.revoked])))
    assert code(read) == "peer-revoked"
    with pytest.raises(AccelvisorError):
        near.read(1)
    close([near, far])


def test_trust_that_changes_otherwise_leaves_connections_alone() -> None:
    far_credentials = B.trusting(A.pin)
    [near], [far] = channels(near=A.trusting(B.pin), far=far_credentials)
    far_credentials.trust(Pins([A.pin, STRANGER.pin]))
    near.write(b"still")
    near.flush()
    assert far.read(5) == b"still"
    close([near, far])


def test_sessions_are_not_resumed() -> None:
    """A resumed session would not show a certificate again."""
    mine, theirs = socket_pair()
    server = B.trusting(A.pin)
    client = A.trusting(B.pin).context(server=False)

    def serve() -> None:
        channel = Channel(theirs, server, server=True, clock=lambda: 0.0)
        channel.write(b"x")
        channel.flush()
        channel.close()

    def see() -> object:
        with client.wrap_socket(mine) as tls:
            tls.recv(1)
            return tls.session.has_ticket if tls.session else False

    assert both(see, serve)[0] is False


def test_a_stalled_peer_is_noticed_by_the_clock() -> None:
    now = [0.0]
    [near], [far] = channels(clock=lambda: now[0], stall_s=10.0)
    assert isinstance(far.watch, Watch)

    def late() -> None:
        near.write(b"1")
        near.flush()
        now[0] = 60.0

    result, _ = both(lambda: far.read(2), late)
    assert code(result) == "peer-stalled"
    close([near, far])


def test_a_peer_that_does_not_read_is_noticed_too() -> None:
    now = [0.0]
    [near], [far] = channels(clock=lambda: now[0], stall_s=10.0)

    def pour() -> None:
        while True:
            near.write(bytes(1 << 20))
            near.flush()

    def later() -> None:
        before = -1
        while before != near.watch._moved:
            before = near.watch._moved
            until(lambda: True)
        now[0] = 1e6

    assert code(both(pour, later)[0]) == "peer-stalled"
    close([near, far])


def test_pins_name_their_hosts() -> None:
    pins = Pins([A.pin, B.pin])
    assert pins.host_of(B.identity.public, B.uuid) == B.uuid
    assert set(pins) == {A.pin, B.pin}
    assert Pin(A.uuid, A.identity.public) in set(pins)


@given(st.lists(st.binary(max_size=600 * KIB // 100).map(lambda b: b * 100), max_size=4), st.data())
@settings(max_examples=20, deadline=None)
def test_bytes_come_out_however_they_are_written_and_read(
    parts: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    [near], [far] = channels()

    def write() -> None:
        for part in parts:
            near.write(part)
        near.flush()

    def read() -> bytes:
        edges = zip([0, *cuts], [*cuts, len(whole)], strict=True)
        return b"".join(far.read(end - begin) for begin, end in edges)

    assert both(write, read)[1] == whole
    close([near, far])
