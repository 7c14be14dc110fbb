"""Keys that change while the fleet runs, and keys that are stolen."""

from __future__ import annotations

import msgspec
import pytest

from accelvisor.errors import DataError, FrameRefused
from accelvisor.frames import changes, envelope
from accelvisor.frames.history import History
from accelvisor.frames.identity import Identity
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.rotation import ROTATION_TYPE, overlay, rotate
from accelvisor.frames.trust import Host, Trust
from accelvisor.limits import LIMITS

from .building import HOST_A, HOST_B, HOST_C, KEY_A, KEY_B, NOW, SECOND, identity
from .test_trust import start

NEW, NEWER, THIEF = identity(), identity(), identity()
RETIRE = NOW + 3600 * SECOND


def host(document: Trust | None = None) -> Host:
    found = (document or start()).host(HOST_A)
    assert found is not None
    return found


def rotated(old: Identity = KEY_A, new: Identity = NEW, of: Trust | None = None) -> bytes:
    return rotate(host(of), old, new, created_ns=NOW, retire_ns=RETIRE)


def refused(code: str, made: bytes, document: Trust | None = None) -> None:
    with pytest.raises(DataError) as caught:
        overlay(document or start(), made)
    assert caught.value.code == code


def usable(keyring: Keyring, key: Identity, now: int = NOW) -> str:
    try:
        return keyring.usable(key.key_id, now).host
    except FrameRefused as error:
        return error.code


def test_both_keys_count_until_the_old_ones_time_is_over() -> None:
    ring = Keyring(start()).with_rotation(rotated())
    assert [usable(ring, key, RETIRE) for key in (KEY_A, NEW)] == [HOST_A, HOST_A]
    assert usable(ring, KEY_A, RETIRE + 1) == "frame-key-expired"
    assert usable(ring, NEW, RETIRE + 1) == HOST_A
    current = ring.current(HOST_A)
    assert current is not None
    assert current.entry.sealing == NEW.public_identity.sealing


def test_rotation_again_changes_nothing() -> None:
    ring = Keyring(start()).with_rotation(rotated())
    assert ring.with_rotation(rotated()).rotations == ring.rotations == (rotated(),)


def test_rotation_after_rotation() -> None:
    once = overlay(start(), rotated())
    twice = rotated(NEW, NEWER, once)
    ring = Keyring(start(), [rotated(), twice])
    assert [usable(ring, key) for key in (KEY_A, NEW, NEWER)] == [HOST_A] * 3
    assert len(ring.rotations) == 2


def test_rotation_out_of_order_is_refused_until_the_one_before_is_there() -> None:
    twice = rotated(NEW, NEWER, overlay(start(), rotated()))
    refused("rotation-key", twice)


def test_signed_document_makes_the_rotation_void() -> None:
    folded = changes.set_key(
        start(), HOST_A, NEW.public_identity, created_ns=NOW, retire_ns=RETIRE
    )
    ring = Keyring(folded, [rotated()])
    assert ring.rotations == ()
    assert [usable(ring, key) for key in (KEY_A, NEW)] == [HOST_A] * 2
    assert ring.effective == folded


def test_revoked_key_takes_its_rotation_with_it() -> None:
    """A thief rotates with a stolen key; revoking the stolen one is enough."""
    stolen = rotated(KEY_A, THIEF)
    assert usable(Keyring(start(), [stolen]), THIEF) == HOST_A
    after = changes.revoke_key(start(), KEY_A.key_id, created_ns=NOW)
    ring = Keyring(after, [stolen])
    assert usable(ring, KEY_A) == "frame-key-revoked"
    assert usable(ring, THIEF) == "frame-key-unknown"
    assert ring.rotations == ()
    assert ring.current(HOST_A) is None


def test_older_key_is_not_current_again_when_the_newer_one_is_revoked() -> None:
    after = msgspec.structs.replace(start(), revoked=(NEW.key_id,))
    ring = Keyring(after, [rotated(), rotated(NEW, NEWER, overlay(start(), rotated()))])
    assert usable(ring, KEY_A, RETIRE) == HOST_A
    assert usable(ring, KEY_A, RETIRE + 1) == "frame-key-expired"
    assert usable(ring, NEW) == "frame-key-revoked"
    assert usable(ring, NEWER) == "frame-key-unknown"
    assert ring.current(HOST_A) is None
    assert Keyring(after, ring.rotations).effective == ring.effective


def test_what_a_key_signed_before_it_was_replaced_can_be_read() -> None:
    ring, key = Keyring(start()), KEY_A
    for _ in range(LIMITS.host_keys + 1):
        new = identity()
        ring = ring.with_rotation(rotated(key, new, ring.effective))
        key = new
    assert ring.find(KEY_A.key_id) is None
    assert usable(ring, KEY_A) == "frame-key-unknown"
    past = ring.once(KEY_A.key_id)
    assert past is not None
    assert (past.holder, past.public) == (HOST_A, KEY_A.public)
    assert ring.once(THIEF.key_id) is None


def test_what_a_key_signed_before_it_was_revoked_can_be_read() -> None:
    after = changes.revoke_key(start(), KEY_A.key_id, created_ns=NOW)
    after = changes.remove_host(after, HOST_B, created_ns=NOW)
    ring = Keyring(after, (), Keyring(start()).history)
    for key, of in ((KEY_A, HOST_A), (KEY_B, HOST_B)):
        past = ring.once(key.key_id)
        assert past is not None
        assert past.holder == of
        assert ring.find(key.key_id) is None


def test_one_hosts_rotations_leave_room_for_another_one_and_end_with_a_refusal() -> None:
    ring, key = Keyring(start()), KEY_A
    for _ in range(LIMITS.rotations):
        new = identity()
        ring = ring.with_rotation(rotated(key, new, ring.effective))
        key = new
    with pytest.raises(DataError) as caught:
        ring.with_rotation(rotated(key, THIEF, ring.effective))
    assert caught.value.code == "rotation-many"
    other = ring.effective.host(HOST_B)
    assert other is not None
    honest = rotate(other, KEY_B, NEW, created_ns=NOW, retire_ns=RETIRE)
    ring = Keyring(start(), ring.with_rotation(honest).rotations)
    assert [usable(ring, each) for each in (key, NEW)] == [HOST_A, HOST_B]


def test_signatures_of_known_rotations_are_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = Keyring(start()).with_rotation(rotated())
    monkeypatch.setattr(envelope, "verify", None)
    after = changes.set_roots(start(), [identity().public], 1, created_ns=NOW)
    assert Keyring(after, ring.rotations).rotations == ring.rotations


def test_one_host_does_not_push_out_the_keys_of_another() -> None:
    history, many = Keyring(start()).history, host()
    for _ in range(LIMITS.history_keys + 1):
        key = msgspec.structs.replace(many.keys[0], public=identity().public)
        many = msgspec.structs.replace(many, keys=(key,))
        history = history.with_keys(changes.put_host(start(), many, created_ns=NOW))
    assert history.find(KEY_A.key_id) is None
    assert history.find(KEY_B.key_id) is not None
    assert sum(past.holder == HOST_A for past in history) == LIMITS.history_keys
    assert [*History.decode(history.encode())] == [*history]


def test_second_rotation_of_the_same_key_shows_the_theft() -> None:
    after = overlay(start(), rotated())
    refused("rotation-fork", rotated(KEY_A, THIEF), after)


def test_retiring_key_cannot_rotate() -> None:
    after = overlay(start(), rotated())
    refused("rotation-key", rotated(KEY_A, THIEF, after), after)


def test_older_rotation_is_refused() -> None:
    after = changes.set_key(start(), HOST_A, NEW.public_identity, created_ns=NOW, retire_ns=NOW)
    after = changes.revoke_key(after, NEW.key_id, created_ns=NOW)
    refused("rotation-old", rotated(KEY_A, NEW), after)


def test_another_hosts_key_cannot_rotate() -> None:
    refused("rotation-key", rotated(KEY_B, NEW))


def test_key_of_another_host_is_no_new_key() -> None:
    refused("rotation-key", rotated(KEY_A, KEY_B))


def test_revoked_key_is_no_new_key() -> None:
    document = msgspec.structs.replace(start(), revoked=(NEW.key_id,))
    refused("rotation-key", rotated(), document)


def test_unknown_host_cannot_rotate() -> None:
    stranger = msgspec.structs.replace(host(), uuid=HOST_C)
    made = rotate(stranger, KEY_A, NEW, created_ns=NOW, retire_ns=RETIRE)
    refused("rotation-key", made)


def test_new_key_must_have_signed_too() -> None:
    opened = envelope.decode(rotated(), kind=ROTATION_TYPE, max_bytes=1024)
    for signer in ([KEY_A], [NEW], [KEY_A, KEY_B]):
        made = envelope.sign(ROTATION_TYPE, opened.payload, signer)
        refused("rotation-key", made.encode())


@pytest.mark.parametrize("retire", [NOW - 1, NOW + int(LIMITS.rotation_overlap_s * SECOND) + 1])
def test_old_key_cannot_retire_in_the_past_or_never(retire: int) -> None:
    made = rotate(host(), KEY_A, NEW, created_ns=NOW, retire_ns=retire)
    refused("rotation-invalid", made)


def test_every_flipped_byte_of_a_rotation_is_refused() -> None:
    made = rotated()
    for at in range(len(made)):
        changed = bytearray(made)
        changed[at] ^= 4
        with pytest.raises(DataError) as caught:
            overlay(start(), bytes(changed))
        assert caught.value.code.startswith("rotation-")


def test_revoked_before_unknown_before_expired() -> None:
    ring = Keyring(changes.revoke_key(start(), KEY_A.key_id, created_ns=NOW))
    assert usable(ring, KEY_A) == "frame-key-revoked"
    assert usable(ring, THIEF) == "frame-key-unknown"
    assert usable(ring, KEY_B) == HOST_B


def test_tls_peer_is_known_by_its_public_key() -> None:
    ring = Keyring(start())
    assert ring.peer(KEY_B.public, NOW).host == HOST_B
    with pytest.raises(FrameRefused) as caught:
        ring.peer(THIEF.public, NOW)
    assert caught.value.code == "frame-key-unknown"


def test_host_keeps_no_more_keys_than_fit() -> None:
    document = start()
    key = KEY_A
    for _ in range(LIMITS.host_keys + 3):
        new = identity()
        document = overlay(document, rotated(key, new, document))
        key = new
    assert len(host(document).keys) == LIMITS.host_keys
    assert host(document).current == host(document).keys[-1]
    assert host(document).keys[-1].key_id == key.key_id
