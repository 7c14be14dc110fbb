"""The trust document: who may change it, and what no change may do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from accelvisor.errors import AccelvisorError, DataError
from accelvisor.frames import canonical, changes, envelope, trust
from accelvisor.frames.identity import SigningKey
from accelvisor.frames.trust import TRUST_TYPE, Trust, Trusted, first, sign, update
from accelvisor.limits import LIMITS

from .building import HOST_A, HOST_B, HOST_C, KEY_A, KEY_B, KEY_C, NOW, SECOND, identity, root_key

ROOTS = [root_key() for _ in range(3)]
OTHERS = [root_key() for _ in range(3)]


def start(threshold: int = 2) -> Trust:
    made = changes.create([key.public for key in ROOTS], threshold, created_ns=NOW)
    for uuid, name, keys in ((HOST_A, "a", KEY_A), (HOST_B, "b", KEY_B)):
        made = changes.add_host(
            made, uuid, name, f"{name}.example:7777", keys.public_identity, created_ns=NOW
        )
    return made


def trusted(document: Trust, signers: Sequence[SigningKey] = ROOTS[:2]) -> Trusted:
    return first(sign(document, signers), frozenset(key.key_id for key in ROOTS))


def refused(code: str, envelope: bytes, old: Trusted | None = None) -> None:
    with pytest.raises(DataError) as caught:
        update(old or trusted(start()), envelope)
    assert caught.value.code == code


def later(document: Trust, version: int) -> Trust:
    return msgspec.structs.replace(document, version=version)


def test_document_and_back() -> None:
    assert trust.decode(trust.encode(start())) == start()
    assert trusted(start()).document == start()
    assert len(trusted(start()).digest) == 32


def test_next_version_is_taken() -> None:
    new = changes.add_host(
        start(), HOST_C, "c", "c.example:1", KEY_C.public_identity, created_ns=NOW
    )
    after = update(trusted(start()), sign(new, ROOTS[1:]))
    assert after.document.version == start().version + 1
    assert after.document.host(HOST_C) is not None
    assert update(after, after.envelope) is after


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_roots_than_the_threshold_are_refused(count: int) -> None:
    new = later(start(), 9)
    signers = [*ROOTS[:count], *([] if count else OTHERS[:1])]
    refused("trust-threshold" if count else "trust-signature", sign(new, signers))


def test_threshold_is_not_met_by_one_root_twice() -> None:
    made = envelope.sign(TRUST_TYPE, trust.encode(later(start(), 9)), [ROOTS[0], ROOTS[0]])
    refused("trust-threshold", made.encode())


@pytest.mark.parametrize(("threshold", "signers"), [(1, 1), (2, 2), (3, 3)])
def test_k_of_n_roots(threshold: int, signers: int) -> None:
    document = start(threshold)
    old = trusted(document, ROOTS[:signers])
    assert update(old, sign(later(document, 9), ROOTS[-signers:])).document.version == 9
    if signers > 1:
        refused("trust-threshold", sign(later(document, 9), ROOTS[: signers - 1]), old)


def test_hosts_cannot_sign_for_roots() -> None:
    refused("trust-signature", sign(later(start(), 9), [KEY_A, KEY_B]))


def test_new_roots_need_the_old_ones_signatures_and_their_own() -> None:
    new = changes.set_roots(start(), [key.public for key in OTHERS], 2, created_ns=NOW)
    refused("trust-threshold", sign(new, OTHERS))
    refused("trust-threshold", sign(new, ROOTS))
    refused("trust-threshold", sign(new, [*ROOTS[:1], *OTHERS]))
    after = update(trusted(start()), sign(new, [*ROOTS[:2], *OTHERS[:2]]))
    # From now on the old roots are nobody.
    refused("trust-signature", sign(later(new, 9), ROOTS), after)
    assert update(after, sign(later(new, 9), OTHERS[1:])).document.version == 9


def test_rollback_is_refused() -> None:
    old = trusted(later(start(), 9))
    refused("trust-rollback", sign(later(start(), 8), ROOTS), old)


def test_another_document_of_the_same_version_is_a_fork() -> None:
    other = msgspec.structs.replace(start(), created_ns=NOW + 1)
    refused("trust-fork", sign(other, ROOTS))


def test_same_document_signed_by_others_changes_nothing() -> None:
    old = trusted(start())
    assert update(old, sign(start(), ROOTS[1:])) is old


def test_fast_forward_is_refused() -> None:
    version = start().version + LIMITS.trust_jump
    refused("trust-jump", sign(later(start(), version + 1), ROOTS))
    refused("trust-jump", sign(later(start(), (1 << 63) - 1), ROOTS))
    assert update(trusted(start()), sign(later(start(), version), ROOTS))


def test_revoked_key_stays_revoked() -> None:
    revoked = changes.revoke_key(start(), KEY_A.key_id, created_ns=NOW)
    old = trusted(revoked)
    refused("trust-unrevoked", sign(later(start(), 9), ROOTS), old)
    forgotten = msgspec.structs.replace(later(revoked, 9), revoked=())
    refused("trust-unrevoked", sign(forgotten, ROOTS), old)


def test_host_cannot_go_back_to_an_older_key() -> None:
    rotated = changes.set_key(
        start(), HOST_A, identity().public_identity, created_ns=NOW, retire_ns=NOW + SECOND
    )
    refused("trust-unrevoked", sign(later(start(), 9), ROOTS), trusted(rotated))


def test_first_document_must_have_the_named_roots() -> None:
    for pinned in (frozenset({ROOTS[0].key_id}), frozenset(key.key_id for key in OTHERS)):
        with pytest.raises(DataError) as caught:
            first(sign(start(), ROOTS), pinned)
        assert caught.value.code == "trust-roots"


def test_first_document_needs_its_own_threshold() -> None:
    with pytest.raises(DataError) as caught:
        trusted(start(), ROOTS[:1])
    assert caught.value.code == "trust-threshold"


def test_envelope_of_another_type_is_refused() -> None:
    made = envelope.sign("application/vnd.accelvisor.manifest", trust.encode(start()), ROOTS)
    refused("trust-shape", made.encode())


def test_every_flipped_byte_of_a_document_is_refused() -> None:
    old = trusted(start())
    data = sign(later(start(), 9), ROOTS[:2])
    codes = set()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x10
        with pytest.raises(DataError) as caught:
            update(old, bytes(changed))
        codes.add(caught.value.code)
    # A byte of a public root key may also show as a root that did not sign.
    assert codes <= {"trust-shape", "trust-signature", "trust-threshold"}


def contradictions() -> dict[str, dict[str, Any]]:
    value: dict[str, Any] = canonical.decode(trust.encode(start()))
    host, other = value["hosts"]
    [key] = host["keys"]
    [stranger] = other["keys"]

    def hosts(*keys: dict[str, Any], version: int = 5) -> dict[str, Any]:
        return {**value, "hosts": [{**host, "keys": list(keys), "key_version": version}, other]}

    retiring = {**key, "status": "retiring", "not_after_ns": 5}
    newer = {**key, "public": bytes(32), "sealing": b"\1" * 32, "version": 2}
    return {
        "hosts out of order": {**value, "hosts": [other, host]},
        "host twice": {**value, "hosts": [host, host]},
        "key of two hosts": hosts({**key, "public": stranger["public"]}),
        "sealing key of two hosts": hosts({**key, "sealing": stranger["sealing"]}),
        "one key for signing and sealing": hosts({**key, "sealing": key["public"]}),
        "root's key as a host's": hosts({**key, "public": ROOTS[0].public}),
        "revoked and listed": {**value, "revoked": [KEY_A.key_id]},
        "revoked root": {**value, "revoked": [ROOTS[0].key_id]},
        "revoked out of order": {**value, "revoked": ["f" * 32, "0" * 32]},
        "threshold out of reach": {**value, "roots": {**value["roots"], "threshold": 4}},
        "threshold of nobody": {**value, "roots": {**value["roots"], "threshold": 0}},
        "nobody signs manifests": {**value, "manifest_threshold": 0},
        "version nought": {**value, "version": 0},
        "other format": {**value, "format": 2},
        "unknown field": {**value, "more": 1},
        "field missing": {name: value[name] for name in value if name != "format"},
        "two current keys": hosts(key, newer),
        "current key is not the newest": hosts(key, {**newer, "status": "retiring"}),
        "versions do not grow": hosts(retiring, {**newer, "version": 1}),
        "version above the host's": hosts({**key, "version": 2}, version=1),
        "retiring for ever": hosts({**retiring, "not_after_ns": 0}),
        "unknown algorithm": hosts({**key, "algorithm": "none"}),
        "short key": hosts({**key, "public": bytes(31)}),
    }


@pytest.mark.parametrize("name", contradictions())
def test_document_that_contradicts_itself_is_refused(name: str) -> None:
    with pytest.raises(DataError) as caught:
        trust.decode(canonical.encode(contradictions()[name]))
    assert caught.value.code == "trust-shape"


def test_document_without_contradictions_is_read() -> None:
    assert trust.decode(canonical.encode(canonical.decode(trust.encode(start())))) == start()


def test_changes_name_what_is_missing() -> None:
    for attempt, code in (
        (lambda: changes.remove_host(start(), HOST_C, created_ns=NOW), "trust-host-unknown"),
        (lambda: changes.revoke_key(start(), "0" * 32, created_ns=NOW), "trust-key-unknown"),
        (
            lambda: changes.add_host(
                start(), HOST_A, "a", "a", KEY_C.public_identity, created_ns=NOW
            ),
            "trust-host-exists",
        ),
    ):
        with pytest.raises(AccelvisorError) as caught:
            attempt()
        assert caught.value.code == code


def test_removed_hosts_keys_are_revoked() -> None:
    after = changes.remove_host(start(), HOST_A, created_ns=NOW)
    assert after.revoked == (KEY_A.key_id,)
    assert after.host(HOST_A) is None
    trust.encode(after)


def test_host_whose_key_was_revoked_comes_back_with_a_new_one() -> None:
    after = changes.revoke_key(start(), KEY_A.key_id, created_ns=NOW)
    new = identity()
    after = changes.set_key(after, HOST_A, new.public_identity, created_ns=NOW, retire_ns=NOW)
    update(trusted(start()), sign(after, ROOTS))
    host = after.host(HOST_A)
    assert host is not None
    assert [(key.key_id, key.version, key.status) for key in host.keys] == [
        (new.key_id, 2, "current")
    ]
