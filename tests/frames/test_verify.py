"""Every attack on a checkpoint, refused by the step that is meant to, before the device is touched.

The rows are those of The Update Framework's attack list (rollback, freeze, fast-forward, wrong
target, key compromise) and those of checkpoints: replay, another VM, host or user, expired,
future-dated, spliced, downgraded. Those on the bytes that it says: test_verify_chunks.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from accelvisor.frames import canonical, changes, envelope
from accelvisor.frames.identity import Identity
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.manifest import MANIFEST_TYPE, owner_digest
from accelvisor.frames.receive import Receiver
from accelvisor.frames.rotation import rotate
from accelvisor.frames.steps import STEP_OF, STEPS
from accelvisor.frames.verify import AT_REST, INSPECTION, PASSED
from accelvisor.limits import LIMITS

from .building import (
    EXPECTED,
    HOST_A,
    HOST_B,
    HOST_C,
    KEY_A,
    KEY_C,
    NOW,
    PROFILE,
    SECOND,
    Checkpoint,
    Destination,
    document,
    identity,
    signed_offer,
    uuid,
)


def test_honest_checkpoint_is_loaded() -> None:
    here = Destination()
    verified = here.take(Checkpoint())
    assert verified.manifest == Checkpoint().manifest
    assert verified.signers == {HOST_A}
    assert here.device.memory[4096:4112] == b"sixteen letters!"
    assert here.records.steps == [(step.number, PASSED) for step in STEPS]
    assert {event.subject for event in here.records.events} == {verified.digest.hex()}


def test_honest_migration_is_loaded() -> None:
    here = Destination()
    verified = here.stream(signed_offer(), Checkpoint())
    assert here.device.writes == 2
    steps = [number for number, _ in here.records.steps]
    assert steps == [1, 2, 3, 4, 5, 7, 1, 2, 3, 4, 5, 6, 7]
    assert here.nonces.used == {verified.manifest.nonce}


def test_table_of_steps_is_in_order_and_names_each_code_once() -> None:
    assert [step.number for step in STEPS] == [1, 2, 3, 4, 5, 6, 7]
    assert sum(len(step.codes) for step in STEPS) == len(STEP_OF)


# --- rollback, freeze, fast-forward ---


@pytest.mark.parametrize(("epoch", "sequence"), [(6, 9), (0, 0), (7, 2), (7, 0)])
def test_rollback_to_an_older_state(epoch: int, sequence: int) -> None:
    old = Checkpoint(epoch=epoch, sequence=sequence)
    assert Destination().refuses(old) == (5, "frame-epoch-old")


def test_replay_of_every_earlier_checkpoint() -> None:
    """As time goes on, what was right before is refused."""
    made = [Checkpoint(epoch=e, sequence=s) for e in (7, 8) for s in (3, 4)]
    for known, checkpoint in enumerate(made):
        floor = checkpoint.manifest
        here = Destination(epoch=floor.epoch, sequence=floor.sequence)
        for earlier in made[: known + 1]:
            assert here.refuses(earlier) == (5, "frame-epoch-old")
            here.records.events.clear()


def test_state_from_before_the_sources_last_start() -> None:
    assert Destination(boot=6).refuses(Checkpoint()) == (5, "frame-epoch-old")


def test_freeze_until_it_has_expired() -> None:
    """It was right when it was opened, and the chunks were held back until it was not."""
    here = Destination()
    verifier = here.verifier
    checkpoint = Checkpoint(expires_ns=NOW + 60 * SECOND)
    receiver = Receiver(verifier, verifier.open(checkpoint.envelope()), here.staging)
    for header, payload in checkpoint.chunks:
        receiver.feed(header, payload)
    here.now += 60 * SECOND + 1
    assert here.refusal(receiver.finish) == (5, "frame-stale")


@pytest.mark.parametrize("epoch", [EXPECTED.epoch + LIMITS.epoch_jump + 1, (1 << 63) - 1])
def test_fast_forward_of_the_epoch(epoch: int) -> None:
    assert Destination().refuses(Checkpoint(epoch=epoch)) == (5, "frame-epoch-jump")


def test_epoch_may_jump_to_the_limit() -> None:
    assert Destination().take(Checkpoint(epoch=EXPECTED.epoch + LIMITS.epoch_jump))


def test_a_day_of_aborts_elsewhere_keeps_no_function_from_coming_back() -> None:
    """Each spends an epoch, and a host with a ledger of its own has not heard of them."""
    assert Destination().take(Checkpoint(epoch=EXPECTED.epoch + 10 * 86_400))


def test_a_function_of_many_epochs_comes_to_a_host_that_never_had_it() -> None:
    assert Destination(epoch=0, sequence=-1).take(Checkpoint(epoch=LIMITS.epoch_jump * 3))


# --- wrong target: each field of the statement ---


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"audience": HOST_C}, (4, "frame-audience")),
        ({"audience": ""}, (4, "frame-audience")),
        ({"source": HOST_C}, (4, "frame-source")),
        ({"nonce": bytes(16)}, (4, "frame-nonce")),
        ({"owner": owner_digest("mallory")}, (7, "frame-owner")),
        ({"function": uuid()}, (7, "frame-function")),
        ({"domain": uuid()}, (7, "frame-domain")),
        ({"domain": ""}, (7, "frame-domain")),
        ({"profile": msgspec.structs.replace(PROFILE, memory_bytes=2 << 20)}, (7, "frame-profile")),
        ({"profile": msgspec.structs.replace(PROFILE, queues=5)}, (7, "frame-profile")),
    ],
)
def test_wrong_target(change: dict[str, Any], expected: tuple[int, str]) -> None:
    assert Destination().refuses(Checkpoint(**change)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"audience": HOST_C}, (4, "frame-audience")),
        ({"nonce": bytes(16)}, (4, "frame-nonce")),
        ({"owner": owner_digest("mallory")}, (7, "frame-owner")),
        ({"function": uuid()}, (7, "frame-function")),
        ({"domain": uuid()}, (7, "frame-domain")),
    ],
)
def test_wrong_target_is_refused_before_its_chunks_are_sent(
    change: dict[str, Any], expected: tuple[int, str]
) -> None:
    here = Destination()
    assert here.refusal(lambda: here.stream(signed_offer(**change), Checkpoint())) == expected
    assert here.staging.chunks == []


def test_peer_sends_what_another_host_signed() -> None:
    """C cannot pass off a checkpoint that A made for B as its own migration."""
    assert Destination(source=HOST_C).refuses(Checkpoint()) == (4, "frame-source")


def test_host_signs_for_another() -> None:
    assert Destination().refuses(Checkpoint(signers=[KEY_C])) == (4, "frame-source")


def test_replay_of_a_used_nonce() -> None:
    here = Destination()
    here.take(Checkpoint())
    again = Destination()
    again.nonces = here.nonces
    assert again.refuses(Checkpoint()) == (4, "frame-replayed")


def test_two_at_once_with_one_nonce() -> None:
    """Both were opened before either was finished: the second loses at the end."""
    here, made = Destination(), Checkpoint()
    verifier = here.verifier
    both = [Receiver(verifier, verifier.open(made.envelope()), here.staging) for _ in range(2)]
    for receiver in both:
        for header, payload in made.chunks:
            receiver.feed(header, payload)
    both[0].finish()
    assert here.refusal(both[1].finish) == (4, "frame-replayed")


def test_refused_checkpoint_does_not_use_its_nonce_up() -> None:
    here = Destination()
    made = Checkpoint()
    del made.chunks[3:]
    here.refuses(made)
    assert here.nonces.used == set()


# --- freshness ---


def test_expired() -> None:
    late = Checkpoint(created_ns=NOW - 9 * SECOND, expires_ns=NOW - 1)
    assert Destination().refuses(late) == (5, "frame-stale")


def test_expires_at_this_very_moment() -> None:
    assert Destination().take(Checkpoint(expires_ns=NOW))


def test_too_old_for_a_migration_but_not_at_rest() -> None:
    age = int(LIMITS.frame_age_s * SECOND)
    old = Checkpoint(created_ns=NOW - age - 1)
    assert Destination().take(Checkpoint(created_ns=NOW - age))
    assert Destination().refuses(old) == (5, "frame-stale")
    assert Destination(policy=AT_REST).take(old)


def test_future_dated() -> None:
    skew = int(LIMITS.clock_skew_s * SECOND)
    assert Destination().take(Checkpoint(created_ns=NOW + skew))
    ahead = Checkpoint(created_ns=NOW + skew + 1)
    assert Destination().refuses(ahead) == (5, "frame-future")
    assert Destination(policy=AT_REST).refuses(ahead) == (5, "frame-future")


# --- keys ---


def test_key_of_nobody() -> None:
    assert Destination().refuses(Checkpoint(signers=[identity()])) == (2, "frame-key-unknown")


def test_stranger_signs_beside_the_host() -> None:
    made = Checkpoint(signers=[KEY_A, identity()])
    assert Destination().refuses(made) == (2, "frame-key-unknown")


def test_key_revoked_in_mid_fleet() -> None:
    here = Destination()
    assert here.take(Checkpoint())
    here = Destination()
    here.keyring = Keyring(changes.revoke_key(document(), KEY_A.key_id, created_ns=NOW))
    assert here.refuses(Checkpoint()) == (2, "frame-key-revoked")


def test_key_revoked_in_mid_transfer() -> None:
    here, made = Destination(), Checkpoint()
    verifier = here.verifier
    receiver = Receiver(verifier, verifier.open(made.envelope()), here.staging)
    for header, payload in made.chunks:
        receiver.feed(header, payload)
    here.keyring = Keyring(changes.revoke_key(document(), KEY_A.key_id, created_ns=NOW))
    assert here.refusal(receiver.finish) == (2, "frame-key-revoked")


def test_revoked_is_revoked_at_rest_too() -> None:
    here = Destination(policy=AT_REST)
    here.keyring = Keyring(changes.revoke_key(document(), KEY_A.key_id, created_ns=NOW))
    assert here.refuses(Checkpoint()) == (2, "frame-key-revoked")


def rotated(retire_ns: int) -> tuple[Keyring, Identity]:
    host = document().host(HOST_A)
    assert host is not None
    new = identity()
    made = rotate(host, KEY_A, new, created_ns=NOW - 9 * SECOND, retire_ns=retire_ns)
    return Keyring(document(), [made]), new


def test_both_keys_sign_while_the_fleet_rotates() -> None:
    keyring, new = rotated(NOW + SECOND)
    for key in (KEY_A, new):
        here = Destination()
        here.keyring = keyring
        assert here.take(Checkpoint(signers=[key]))


def test_retired_key_signs_no_more_but_what_it_signed_at_rest_stays() -> None:
    keyring, _ = rotated(NOW - SECOND // 2)
    for policy in (AT_REST, INSPECTION):
        kept = Destination(policy=policy)
        kept.keyring = keyring
        assert kept.take(Checkpoint(created_ns=NOW - SECOND))
    late = Destination(policy=AT_REST)
    late.keyring = keyring
    assert late.refuses(Checkpoint(created_ns=NOW)) == (2, "frame-key-expired")
    moving = Destination()
    moving.keyring = keyring
    assert moving.refuses(Checkpoint(created_ns=NOW - SECOND)) == (2, "frame-key-expired")


def test_one_stolen_key_is_not_enough_where_two_must_sign() -> None:
    here = Destination()
    here.keyring = Keyring(document(manifest_threshold=2))
    assert here.refuses(Checkpoint()) == (3, "frame-threshold")
    assert here.take(Checkpoint(signers=[KEY_A, KEY_C])).signers == {HOST_A, HOST_C}


def test_two_keys_of_one_host_are_one_signature() -> None:
    keyring, new = rotated(NOW + SECOND)
    here = Destination()
    here.keyring = Keyring(document(manifest_threshold=2), keyring.rotations)
    assert here.refuses(Checkpoint(signers=[KEY_A, new])) == (3, "frame-threshold")


def test_signature_of_something_else() -> None:
    here = Destination()
    made, other = Checkpoint(), Checkpoint(epoch=8)
    theirs = envelope.decode(other.envelope(), kind=MANIFEST_TYPE, max_bytes=1 << 16)
    mine = envelope.decode(made.envelope(), kind=MANIFEST_TYPE, max_bytes=1 << 16)
    mixed = dataclasses.replace(mine, signatures=theirs.signatures).encode()
    assert here.refusal(lambda: here.verifier.open(mixed)) == (3, "frame-signature")


def test_offer_is_no_manifest() -> None:
    here = Destination()
    assert here.refusal(lambda: here.verifier.open(signed_offer())) == (1, "frame-shape")


# --- downgrades ---


def resigned(**fields: Any) -> bytes:
    value = canonical.decode(
        envelope.decode(
            Checkpoint().envelope(), kind=MANIFEST_TYPE, max_bytes=1 << 16
        ).payload
    )
    return envelope.sign(MANIFEST_TYPE, canonical.encode({**value, **fields}), [KEY_A]).encode()


@pytest.mark.parametrize("version", [0, 2])
def test_downgraded_manifest(version: int) -> None:
    here = Destination()
    data = resigned(version=version)
    assert here.refusal(lambda: here.verifier.open(data)) == (1, "frame-version")


@pytest.mark.parametrize("field", ["hash", "compression", "sealing"])
def test_downgraded_algorithm(field: str) -> None:
    here = Destination()
    honest = {"hash": "sha256", "compression": "none", "sealing": "none"}
    data = resigned(algorithms={**honest, field: "md5"})
    assert here.refusal(lambda: here.verifier.open(data)) == (1, "frame-shape")


@pytest.mark.parametrize("claim", ["none", "ed25519ph"])
def test_downgraded_signature(claim: str) -> None:
    here = Destination()
    made = envelope.decode(Checkpoint().envelope(), kind=MANIFEST_TYPE, max_bytes=1 << 16)
    weaker = dataclasses.replace(made.signatures[0], algorithm=claim)
    data = dataclasses.replace(made, signatures=(weaker,)).encode()
    assert here.refusal(lambda: here.verifier.open(data)) == (3, "frame-signature")


# --- the parent ---


@pytest.mark.parametrize(
    ("wanted", "given"), [(b"", bytes(32)), (bytes(32), b""), (bytes(32), b"\1" * 32)]
)
def test_spliced_chain(wanted: bytes, given: bytes) -> None:
    here = Destination(parent=wanted)
    assert here.refuses(Checkpoint(parent=given)) == (6, "frame-parent")
    assert here.staging.chunks == []


# --- order ---

FAULTS: dict[int, Callable[[], dict[str, Any]]] = {
    2: lambda: {"signers": [identity()]},
    4: lambda: {"audience": HOST_C},
    5: lambda: {"epoch": 1},
    6: lambda: {"root": bytes(32)},
    7: lambda: {"owner": bytes(32)},
}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(FAULTS, 2)))
def test_of_two_faults_the_one_of_the_lower_step_is_told(first: int, second: int) -> None:
    made = Checkpoint(**{**FAULTS[second](), **FAULTS[first]()})
    here = Destination()
    step, code = here.refuses(made)
    assert step == first
    assert STEP_OF[code].number == first
    assert [number for number, said in here.records.steps if said == PASSED] == list(
        range(1, first)
    )


def test_nothing_is_looked_at_before_the_signature_is_right() -> None:
    """Step 3 with faults of every later step behind it."""
    bad: dict[str, Any] = {}
    for later in (4, 5, 6, 7):
        bad.update(FAULTS[later]())
    made = Checkpoint(**bad)
    opened = envelope.decode(made.envelope(), kind=MANIFEST_TYPE, max_bytes=1 << 16)
    spoilt = dataclasses.replace(opened.signatures[0], value=bytes(64))
    here = Destination()
    data = dataclasses.replace(opened, signatures=(spoilt,)).encode()
    assert here.refusal(lambda: here.verifier.open(data)) == (3, "frame-signature")


# --- offline ---


def test_anybody_with_the_trust_document_can_inspect() -> None:
    here = Destination(policy=INSPECTION)
    here.expected = type(EXPECTED)()
    assert here.take(Checkpoint(epoch=1 << 40, expires_ns=NOW)).signers == {HOST_A}
    assert here.nonces.used == set()
    here = Destination(policy=INSPECTION)
    here.expected = type(EXPECTED)()
    assert here.refuses(Checkpoint(signers=[identity()])) == (2, "frame-key-unknown")


def test_checkpoint_at_rest_without_audience_is_its_own_hosts() -> None:
    own = Checkpoint(audience="", nonce=bytes(16))
    assert Destination(policy=AT_REST, me=HOST_A, nonce=None).take(own)
    other = Destination(policy=AT_REST, me=HOST_B, nonce=None)
    assert other.refuses(own) == (4, "frame-audience")
