"""Signing and verifying, with RFC 8032's own vectors and the corners of Ed25519."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import DataError
from accelvisor.frames import canonical
from accelvisor.frames.envelope import (
    ALGORITHMS,
    Envelope,
    PublicKey,
    Signature,
    SignatureError,
    decode,
    pre_authentication,
    sign,
    verify,
)
from accelvisor.frames.identity import Identity, key_id

from .building import KEY_A, KEY_B, KEY_C, identity

TYPE = "application/vnd.accelvisor.test"


@dataclasses.dataclass(frozen=True)
class Key:
    public: bytes
    holder: str = "h"
    algorithm: str = "ed25519"

    @property
    def key_id(self) -> str:
        return key_id(self.public)


def keyring(*keys: Key) -> dict[str, PublicKey]:
    return {key.key_id: key for key in keys}


A, B = Key(KEY_A.public, "a"), Key(KEY_B.public, "b")


@given(st.binary(max_size=200), st.sampled_from([[KEY_A], [KEY_A, KEY_B], [KEY_B, KEY_A]]))
def test_signed_encoded_decoded_verified(payload: bytes, signers: list[Identity]) -> None:
    made = sign(TYPE, payload, signers)
    back = decode(made.encode(), kind=TYPE, max_bytes=200)
    assert back == made
    assert verify(back, keyring(A, B), len(signers)) == {"a", "b"} - set("b"[len(signers) - 1 :])


def test_same_signers_in_any_order_give_the_same_bytes() -> None:
    one, two = sign(TYPE, b"x", [KEY_A, KEY_B]), sign(TYPE, b"x", [KEY_B, KEY_A, KEY_B])
    assert one.encode() == two.encode()


def test_what_is_signed_is_the_written_form() -> None:
    assert pre_authentication("t/x", b"\x00\x20") == b"AVSEv1 3 t/x 2 \x00\x20"


@given(st.text(max_size=9), st.binary(max_size=9), st.text(max_size=9), st.binary(max_size=9))
def test_no_two_statements_are_signed_as_the_same_bytes(
    type_a: str, a: bytes, type_b: str, b: bytes
) -> None:
    same = pre_authentication(type_a, a) == pre_authentication(type_b, b)
    assert same == ((type_a, a) == (type_b, b))


def refused(envelope: Envelope, *keys: Key, threshold: int = 1) -> str:
    with pytest.raises(SignatureError) as caught:
        verify(envelope, keyring(*keys), threshold)
    return caught.value.kind


def test_signature_for_one_type_is_wrong_for_another() -> None:
    made = sign(TYPE, b"payload", [KEY_A])
    assert refused(dataclasses.replace(made, type=TYPE + "2"), A) == "signature"


def test_one_wrong_signature_beside_enough_right_ones_is_refused() -> None:
    made = sign(TYPE, b"x", [KEY_A, KEY_B])
    first, second = made.signatures
    spoilt = dataclasses.replace(second, value=bytes(64))
    assert refused(dataclasses.replace(made, signatures=(first, spoilt)), A, B) == "signature"


def test_signature_of_an_unknown_key_is_refused() -> None:
    assert refused(sign(TYPE, b"x", [KEY_A, KEY_C]), A, B) == "signature"


def test_two_keys_of_one_holder_count_once() -> None:
    other = identity()
    made = sign(TYPE, b"x", [KEY_A, other])
    assert refused(made, A, Key(other.public, "a"), threshold=2) == "threshold"
    assert verify(made, keyring(A, Key(other.public, "c")), 2) == {"a", "c"}


@pytest.mark.parametrize("claim", ["none", "ED25519", "ed25519ph", "hmac-sha256"])
def test_message_cannot_choose_the_algorithm(claim: str) -> None:
    made = sign(TYPE, b"x", [KEY_A])
    changed = dataclasses.replace(made.signatures[0], algorithm=claim)
    assert refused(dataclasses.replace(made, signatures=(changed,)), A) == "signature"


def test_key_of_an_algorithm_that_is_not_registered_verifies_nothing() -> None:
    made = sign(TYPE, b"x", [KEY_A])
    changed = dataclasses.replace(made.signatures[0], algorithm="none")
    odd = dataclasses.replace(A, algorithm="none")
    assert refused(dataclasses.replace(made, signatures=(changed,)), odd) == "signature"
    assert set(ALGORITHMS) == {"ed25519"}


GOOD = {"type": TYPE, "payload": b"x", "signatures": [["0" * 32, "ed25519", bytes(64)]]}
ROW = GOOD["signatures"][0]
MALFORMED = {
    "no map": [1],
    "field missing": {"type": TYPE, "payload": b"x"},
    "field too many": {**GOOD, "extra": 1},
    "another type": {**GOOD, "type": "text/plain"},
    "type is no text": {**GOOD, "type": b"x"},
    "payload is text": {**GOOD, "payload": "x"},
    "payload too long": {**GOOD, "payload": bytes(101)},
    "no signatures": {**GOOD, "signatures": []},
    "too many signatures": {**GOOD, "signatures": [[f"{i:032}", "a", b"x"] for i in range(17)]},
    "signatures are a map": {**GOOD, "signatures": {"a": 1}},
    "signature twice": {**GOOD, "signatures": [ROW, ROW]},
    "signatures out of order": {**GOOD, "signatures": [["1" * 32, "a", b"x"], ROW]},
    "signature of two parts": {**GOOD, "signatures": [["0" * 32, "ed25519"]]},
    "key id too short": {**GOOD, "signatures": [["0", "ed25519", b"x"]]},
    "key id is bytes": {**GOOD, "signatures": [[bytes(32), "ed25519", b"x"]]},
    "algorithm is empty": {**GOOD, "signatures": [["0" * 32, "", b"x"]]},
    "signature is empty": {**GOOD, "signatures": [["0" * 32, "ed25519", b""]]},
    "signature is long": {**GOOD, "signatures": [["0" * 32, "ed25519", bytes(129)]]},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_envelope_is_refused(name: str) -> None:
    with pytest.raises(DataError) as caught:
        decode(canonical.encode(MALFORMED[name]), kind=TYPE, max_bytes=100)
    assert caught.value.code == "envelope-invalid"


def test_the_well_formed_one_is_decoded() -> None:
    assert decode(canonical.encode(GOOD), kind=TYPE, max_bytes=100).payload == b"x"


# RFC 8032, 7.1: public key, message, signature. The functions of the registry take raw messages,
# so the vectors go through what verify() calls.
RFC_8032 = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701c"
        "f9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0"
        "f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f76098"
        "4dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
ORDER = (1 << 252) + 27742317777372353535851937790883648493


@pytest.mark.parametrize(("public", "message", "signature"), RFC_8032)
def test_vectors_of_rfc_8032(public: str, message: str, signature: str) -> None:
    check = ALGORITHMS["ed25519"]
    raw = bytes.fromhex(signature)
    assert check(bytes.fromhex(public), raw, bytes.fromhex(message))
    assert not check(bytes.fromhex(public), raw, bytes.fromhex(message) + b"\0")


def altered(value: bytes) -> dict[str, bytes]:
    """Other spellings and near misses of a right signature (R, S)."""
    r, s = value[:32], int.from_bytes(value[32:], "little")
    return {
        "S plus the group's order": r + (s + ORDER).to_bytes(32, "little"),
        "S negated": r + (-s % ORDER).to_bytes(32, "little"),
        "S is zero": r + bytes(32),
        "R is zero": bytes(32) + value[32:],
        "R and S are zero": bytes(64),
        "R is the identity": b"\x01" + bytes(31) + value[32:],
        "R with its sign bit turned": r[:31] + bytes([r[31] ^ 0x80]) + value[32:],
        "R is no point": b"\x02" + bytes(31) + value[32:],
        "R is not reduced": b"\xff" * 31 + b"\x7f" + value[32:],
        "all ones": b"\xff" * 64,
        "cut": value[:-1],
        "longer": value + b"\0",
        "only R": r,
    }


@pytest.mark.parametrize("name", altered(bytes(64)))
def test_other_spellings_of_a_signature_are_refused(name: str) -> None:
    made = sign(TYPE, b"payload", [KEY_A])
    value = altered(made.signatures[0].value)[name]
    changed = Signature(KEY_A.key_id, "ed25519", value)
    assert refused(dataclasses.replace(made, signatures=(changed,)), A) == "signature"


@pytest.mark.parametrize(
    "public",
    [
        bytes(31),
        b"\x02" + bytes(31),
        b"\xff" * 32,
    ],
)
def test_key_that_is_no_point_verifies_nothing(public: bytes) -> None:
    made = sign(TYPE, b"payload", [KEY_A])
    changed = dataclasses.replace(made.signatures[0], key_id=key_id(public))
    assert refused(dataclasses.replace(made, signatures=(changed,)), Key(public)) == "signature"
