"""Sealing: only the audience opens, only this chunk of this checkpoint, and the known vectors."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import CallerError, DataError
from accelvisor.frames import canonical
from accelvisor.frames.chunks import Coding, Header, Kind
from accelvisor.frames.manifest import Algorithms, Manifest
from accelvisor.frames.seal import Opener, Sealer

from .building import FUNCTION, HOST_A, HOST_B, HOST_C, KEY_B, KEY_C, NONCE, manifest, uuid

EPHEMERAL = bytes(range(32))
NAMES = {"function": FUNCTION, "source": HOST_A, "audience": HOST_B, "nonce": NONCE}
CHUNK = Header(5, Kind.MEMORY, Coding.RAW, 4096, 100)


def sealer() -> Sealer:
    return Sealer(KEY_B.public_identity.sealing, EPHEMERAL, **NAMES)


def sealed(**changes: Any) -> Manifest:
    algorithms = Algorithms(sealing="x25519-hkdf-sha256-aes256gcm")
    return manifest(**{"seal": sealer().seal, "algorithms": algorithms, **changes})


def opener(**changes: Any) -> Opener:
    return Opener(sealed(**changes), KEY_B.sealing, KEY_B.public_identity.sealing)


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=200))
def test_sealed_and_opened(index: int, payload: bytes) -> None:
    header = dataclasses.replace(CHUNK, index=index)
    stored = sealer().seal_chunk(header, payload)
    assert len(stored) == len(payload) + 16
    assert opener().open_chunk(header, stored) == payload


def test_is_what_the_standards_give() -> None:
    """RFC 5869 by hand: the key is extracted with the nonce as salt and expanded once."""
    theirs = X25519PrivateKey.from_private_bytes(EPHEMERAL).exchange(KEY_B.sealing.public_key())
    recipient = KEY_B.public_identity.sealing
    info = canonical.encode(
        ["accelvisor seal 1", FUNCTION, HOST_A, HOST_B, NONCE, sealer().seal.ephemeral, recipient]
    )
    extracted = hmac.new(NONCE, theirs, hashlib.sha256).digest()
    key = hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()
    expected = AESGCM(key).encrypt((5).to_bytes(12, "little"), b"payload", CHUNK.pack())
    assert sealer().seal_chunk(CHUNK, b"payload") == expected


def test_zeros_stay_without_payload() -> None:
    header = dataclasses.replace(CHUNK, coding=Coding.ZEROS)
    assert sealer().seal_chunk(header, b"") == opener().open_chunk(header, b"") == b""


@pytest.mark.parametrize("index", [5, 4, 0])
def test_index_is_never_sealed_twice(index: int) -> None:
    made = sealer()
    made.seal_chunk(CHUNK, b"x")
    with pytest.raises(CallerError) as caught:
        made.seal_chunk(dataclasses.replace(CHUNK, index=index), b"y")
    assert caught.value.code == "seal-index"


def test_another_host_cannot_open() -> None:
    with pytest.raises(DataError) as caught:
        Opener(sealed(), KEY_C.sealing, KEY_C.public_identity.sealing)
    assert caught.value.code == "seal-recipient"


def test_what_is_not_sealed_is_not_opened() -> None:
    with pytest.raises(DataError) as caught:
        Opener(manifest(), KEY_B.sealing, KEY_B.public_identity.sealing)
    assert caught.value.code == "seal-recipient"


@pytest.mark.parametrize(
    "change",
    [{"function": uuid()}, {"source": HOST_C}, {"audience": HOST_C}, {"nonce": bytes(16)}],
    ids=lambda change: next(iter(change)),
)
def test_key_fits_one_checkpoint_only(change: dict[str, Any]) -> None:
    stored = sealer().seal_chunk(CHUNK, b"payload")
    with pytest.raises(DataError) as caught:
        opener(**change).open_chunk(CHUNK, stored)
    assert caught.value.code == "seal-damaged"


@pytest.mark.parametrize(
    "change", [{"index": 6}, {"kind": 4}, {"coding": 2}, {"offset": 0}, {"length": 99}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_payload_fits_one_chunk_only(change: dict[str, int]) -> None:
    stored = sealer().seal_chunk(CHUNK, b"payload")
    with pytest.raises(DataError):
        opener().open_chunk(dataclasses.replace(CHUNK, **change), stored)


@given(st.integers(0, 22), st.integers(1, 255))
def test_changed_byte_is_refused(at: int, change: int) -> None:
    stored = bytearray(sealer().seal_chunk(CHUNK, b"payload"))
    stored[at] ^= change
    with pytest.raises(DataError):
        opener().open_chunk(CHUNK, stored)


@pytest.mark.parametrize("size", [0, 15])
def test_payload_without_a_whole_tag_is_refused(size: int) -> None:
    with pytest.raises(DataError):
        opener().open_chunk(CHUNK, bytes(size))


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_points_of_small_order_are_refused(point: bytes) -> None:
    """RFC 7748, 6.1: the secret that they give is zero, whoever holds the other key."""
    with pytest.raises(DataError) as caught:
        Sealer(point, EPHEMERAL, **NAMES)
    assert caught.value.code == "seal-damaged"
    broken = sealed(seal=type(sealer().seal)(ephemeral=point, recipient=sealer().seal.recipient))
    with pytest.raises(DataError):
        Opener(broken, KEY_B.sealing, KEY_B.public_identity.sealing)
