"""Joining two hosts: only both who have the code and the right keys learn of each other."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import AccelvisorError, PermissionDenied, UsageError
from accelvisor.limits import LIMITS
from accelvisor.migration.joining import Card, Challenge, Code, Invitation, Inviter, Joiner, invite
from accelvisor.migration.joining_io import answering, join
from accelvisor.migration.link import Handler
from accelvisor.migration.listener import Listener
from accelvisor.migration.tickets import Tickets
from tests.migration.hosts import STRANGER, A, B, Host

NOW = 1_800_000_000.0


def invitation() -> Invitation:
    return invite("a.example", 4477, A.uuid, A.identity, entropy=os.urandom, now_s=NOW)


def inviter(given: Invitation, now_s: float = NOW) -> Inviter:
    return Inviter(given, A.identity, entropy=os.urandom, now_s=now_s)


def joiner(code: Code, host: Host = B, *, key: bytes | None = None, now_s: float = NOW) -> Joiner:
    return Joiner(
        code,
        host.uuid,
        host.identity,
        server_key=key or A.identity.public,
        entropy=os.urandom,
        now_s=now_s,
    )


def code_of(action: object, *arguments: object) -> str:
    with pytest.raises(AccelvisorError) as caught:
        action(*arguments)  # type: ignore[operator]
    return caught.value.code


def attempt(given: Invitation, code: Code) -> tuple[Card, Card]:
    near, far = inviter(given), joiner(code)
    welcome, theirs = near.welcome(far.proof(near.challenge(far.hello())))
    return theirs, far.finish(welcome)


def wrong(code: Code) -> Code:
    return replace(code, secret=bytes(16))


@given(
    st.builds(
        Code,
        st.from_regex(r"[a-z0-9.:-]{1,60}", fullmatch=True),
        st.integers(0, 65535),
        st.uuids(),
        st.binary(min_size=32, max_size=32),
        st.binary(min_size=16, max_size=16),
        st.integers(0, 2**64 - 1),
    )
)
def test_a_code_and_back(code: Code) -> None:
    text = str(code)
    assert Code.parse(text) == code
    assert Code.parse(f"  {text[:20]}\n{text[20:]} ") == code


def test_a_damaged_code_is_none() -> None:
    text = str(invitation().code)
    damaged = [text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :] for at in range(60)]
    for bad in (*damaged, "", "avjoin1.", text[:-3], text + "AAAA", "x" * 5000, "é" + text):
        with pytest.raises(UsageError) as caught:
            Code.parse(bad)
        assert caught.value.code == "join-code"


def test_a_code_does_not_show_its_secret_in_logs() -> None:
    code = invitation().code
    assert code.secret.hex() not in repr(code)
    assert str(code) not in repr(code)


def test_both_learn_of_each_other() -> None:
    given = invitation()
    theirs, ours = attempt(given, Code.parse(str(given.code)))
    assert theirs == Card.of(B.uuid, B.identity.public_identity)
    assert ours == Card.of(A.uuid, A.identity.public_identity)
    assert ours.identity == A.identity.public_identity
    assert not given.open


def test_a_secret_is_used_once() -> None:
    given = invitation()
    late_near, late_far = inviter(given), joiner(given.code, STRANGER)
    proof = late_far.proof(late_near.challenge(late_far.hello()))
    attempt(given, given.code)
    assert code_of(inviter, given) == "join-refused"
    assert code_of(late_near.welcome, proof) == "join-refused"  # it had begun before


def test_a_wrong_secret_is_refused_and_five_of_them_end_it() -> None:
    given = invitation()
    for _ in range(LIMITS.join_attempts):
        near, far = inviter(given), joiner(wrong(given.code))
        proof = far.proof(near.challenge(far.hello()))
        assert code_of(near.welcome, proof) == "join-refused"
    assert code_of(inviter, given) == "join-refused"


def test_an_expired_code_is_refused_by_both() -> None:
    given = invitation()
    late = NOW + LIMITS.join_code_s
    assert code_of(lambda: inviter(given, late)) == "join-refused"
    assert code_of(lambda: joiner(given.code, now_s=late)) == "join-refused"


def test_who_shows_another_key_is_refused_before_a_word() -> None:
    code = invitation().code
    assert code_of(lambda: joiner(code, key=STRANGER.identity.public)) == "join-fingerprint"


def test_another_key_in_the_challenge_is_refused() -> None:
    far = joiner(invitation().code)
    card = Card.of(A.uuid, STRANGER.identity.public_identity)
    challenge = msgspec.msgpack.encode(Challenge(card, bytes(16)))
    assert code_of(far.proof, challenge) == "join-fingerprint"


def test_another_host_in_the_challenge_is_refused() -> None:
    far = joiner(invitation().code)
    card = Card.of(STRANGER.uuid, A.identity.public_identity)
    challenge = msgspec.msgpack.encode(Challenge(card, bytes(16)))
    assert code_of(far.proof, challenge) == "join-fingerprint"


def test_who_is_in_between_cannot_put_in_its_own_key() -> None:
    """It passes everything on but the keys in B's greeting (signing, then only sealing)."""
    own = STRANGER.identity.public_identity
    for card in (
        Card.of(B.uuid, own),
        Card(B.uuid, B.identity.public, own.sealing),
        Card(STRANGER.uuid, B.identity.public, B.identity.public_identity.sealing),
    ):
        given = invitation()
        near, far = inviter(given), joiner(given.code)
        hello = msgspec.msgpack.decode(far.hello())
        hello["card"] = msgspec.to_builtins(card, builtin_types=(bytes,))
        challenge = near.challenge(msgspec.msgpack.encode(hello))
        assert code_of(near.welcome, far.proof(challenge)) == "join-refused"


def test_a_replayed_proof_is_refused() -> None:
    given, again = invitation(), None
    near, far = inviter(given), joiner(given.code)
    hello = far.hello()
    proof = far.proof(near.challenge(hello))
    again = inviter(given)
    again.challenge(hello)
    assert code_of(again.welcome, proof) == "join-refused"  # another nonce
    near.welcome(proof)
    assert code_of(near.welcome, proof) in ("join-message", "join-refused")


def test_a_key_that_the_joiner_does_not_have_is_refused() -> None:
    """Whoever has the secret still cannot bring in somebody else's key."""
    given = invitation()
    mixed = Host(B.uuid, B.identity)
    near, far = inviter(given), joiner(given.code, mixed)
    hello = msgspec.msgpack.decode(far.hello())
    hello["card"]["signing"] = STRANGER.identity.public
    far._hello = msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=type(far._hello))
    proof = far.proof(near.challenge(msgspec.msgpack.encode(hello)))
    assert code_of(near.welcome, proof) == "join-refused"


def test_a_forged_welcome_is_refused() -> None:
    given = invitation()
    near, far = inviter(given), joiner(given.code)
    welcome, _ = near.welcome(far.proof(near.challenge(far.hello())))
    fields = msgspec.msgpack.decode(welcome)
    for name in ("mac", "signature"):
        forged = msgspec.msgpack.encode({**fields, name: bytes(len(fields[name]))})
        assert code_of(far.finish, forged) == "join-refused"


def test_a_host_cannot_join_itself() -> None:
    given = invitation()
    assert code_of(inviter(given).challenge, joiner(given.code, A).hello()) == "join-message"


@given(st.binary(max_size=80))
def test_no_bytes_do_more_than_raise(junk: bytes) -> None:
    given = invitation()
    assert code_of(inviter(given).challenge, junk) == "join-message"
    assert code_of(joiner(given.code).proof, junk) == "join-message"
    near, far = inviter(given), joiner(given.code)
    far.proof(near.challenge(far.hello()))
    assert code_of(near.welcome, junk) == "join-message"
    assert code_of(far.finish, junk) == "join-message"


@pytest.mark.parametrize("order", ["welcome", "finish"])
def test_messages_out_of_order_are_refused(order: str) -> None:
    given = invitation()
    target = inviter(given).welcome if order == "welcome" else joiner(given.code).finish
    assert code_of(target, b"") == "join-message"


def test_over_a_real_connection() -> None:
    async def test() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        credentials = A.trusting()
        listener = Listener(sock, credentials, Handler(), tickets=Tickets(os.urandom))
        await listener.start()
        port = sock.getsockname()[1]
        given = invite("127.0.0.1", port, A.uuid, A.identity, entropy=os.urandom, now_s=NOW)
        learned: list[Card] = []

        async def learn(card: Card) -> None:
            learned.append(card)

        listener.join = answering(given, credentials, learn, now_s=lambda: NOW)
        joining = B.trusting()
        with pytest.raises(PermissionDenied) as caught:
            await join(wrong(given.code), joining, learn, now_s=lambda: NOW)
        assert caught.value.code == "join-refused"
        assert learned == []
        other = replace(given.code, fingerprint=bytes(32))
        with pytest.raises(PermissionDenied) as caught:
            await join(other, joining, learn, now_s=lambda: NOW)
        assert caught.value.code == "join-fingerprint"
        card = await join(given.code, joining, learn, now_s=lambda: NOW)
        assert learned == [Card.of(B.uuid, B.identity.public_identity), card]
        assert card == Card.of(A.uuid, A.identity.public_identity)
        with pytest.raises(PermissionDenied):
            await join(given.code, joining, learn, now_s=lambda: NOW)
        await listener.stop()

    asyncio.run(test())
