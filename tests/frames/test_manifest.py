"""The manifest: there and back, every field bounded, one spelling only."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from accelvisor.errors import FrameRefused
from accelvisor.frames import canonical
from accelvisor.frames.manifest import (
    Algorithms,
    Manifest,
    Model,
    Offer,
    Seal,
    decode,
    encode,
    manifest_digest,
    owner_digest,
)

from .building import DOMAIN, FUNCTION, MANIFEST_FIELDS, PROFILE, manifest, offer

SEALED = {
    "seal": Seal(ephemeral=bytes(32), recipient="0" * 32),
    "algorithms": Algorithms(sealing="x25519-hkdf-sha256-aes256gcm", compression="zstd"),
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"domain": "", "audience": ""},
        {"parent": bytes(range(32)), "epoch": (1 << 63) - 1},
        {"kind": "function", "sections": {"function": 1}, "digest": b""},
        {"kind": "status", "sections": {"status": 1, "window": 5}},
        {"models": (Model(model="net", key="f" * 32, digest=bytes(32)),) * 256},
        SEALED,
    ],
)
def test_manifest_and_back(changes: dict[str, Any]) -> None:
    made = manifest(**changes)
    assert decode(encode(made), Manifest) == made


def test_offer_and_back() -> None:
    assert decode(encode(offer()), Offer) == offer()
    assert decode(encode(offer(**SEALED)), Offer).sealed


def test_offer_is_no_manifest_and_manifest_is_no_offer() -> None:
    for data, kind in ((encode(offer()), Manifest), (encode(manifest()), Offer)):
        with pytest.raises(FrameRefused) as caught:
            decode(data, kind)
        assert (caught.value.step, caught.value.code) == (1, "frame-shape")


def fields(**changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = canonical.decode(encode(manifest()))
    return {**value, **changes}


BAD: dict[str, list[Any]] = {
    "kind": ["", "memory", b"both", 1, None],
    "function": ["", FUNCTION.upper(), FUNCTION + "\n", FUNCTION[:-1], FUNCTION.encode(), None],
    "domain": ["x", DOMAIN + DOMAIN, None],
    "owner": [b"", bytes(31), bytes(33), "A" * 44, None],
    "source": ["", "x"],
    "audience": ["*", None],
    "nonce": [b"", bytes(15), bytes(17), "A" * 24],
    "epoch": [-1, 1 << 63, (1 << 64) - 1, True, "1", None],
    "sequence": [-1, 1 << 63, False],
    "parent": [bytes(31), bytes(33), b"\0", "", None],
    "created_ns": [-1, 1 << 63, MANIFEST_FIELDS["expires_ns"] + 1],
    "expires_ns": [-1, 1 << 63, MANIFEST_FIELDS["created_ns"] - 1],
    "boot": [-1, 1 << 63],
    "algorithms": [
        {},
        None,
        {"hash": "sha1", "compression": "none", "sealing": "none"},
        {"hash": "sha256", "compression": "lz4", "sealing": "none"},
        {"hash": "sha256", "compression": "none", "sealing": "rot13"},
        {"hash": "sha256", "compression": "none"},
        {"hash": "sha256", "compression": "none", "sealing": "none", "more": 1},
        {"hash": "sha256", "compression": "none", "sealing": "x25519-hkdf-sha256-aes256gcm"},
    ],
    "profile": [{}, None, [], {**canonical.decode(encode(manifest()))["profile"], "cores": 0}],
    "sections": [
        {},
        {"function": 1},
        {"status": 1},
        {"function": -1, "status": 1},
        {"function": 1, "status": 1 << 63},
        {"function": 1, "status": 1, "disk": 1},
        [["function", 1], ["status", 1]],
    ],
    "chunks": [0, -1, (1 << 24) + 1, True],
    "payload_bytes": [-1, (1 << 40) + 1],
    "seal": [{"ephemeral": bytes(32), "recipient": "0" * 32}, {}, 0],
    "root": [b"", bytes(31), bytes(33), None],
    "digest": [b"", bytes(31), bytes(33)],
    "firmware": [{}, {"version": "", "blas": "x"}, {"version": "1\n", "blas": "x"}, None],
    "models": [None, {}, [{}], [{"model": "m", "key": "z" * 32, "digest": bytes(32)}],
               [{"model": "m", "key": "0" * 32, "digest": bytes(32)}] * 257],
    "surprise": [1],
}  # fmt: skip


@pytest.mark.parametrize("field", BAD)
def test_field_out_of_bounds_is_refused_at_step_1(field: str) -> None:
    for value in BAD[field]:
        with pytest.raises(FrameRefused) as caught:
            decode(canonical.encode(fields(**{field: value})), Manifest)
        assert (caught.value.step, caught.value.code) == (1, "frame-shape"), value


def test_every_field_has_a_row_of_bad_values() -> None:
    assert set(BAD) - {"surprise"} == set(fields()) - {"version"}


@pytest.mark.parametrize("field", fields())
def test_missing_field_is_refused(field: str) -> None:
    value = fields()
    del value[field]
    with pytest.raises(FrameRefused) as caught:
        decode(canonical.encode(value), Manifest)
    assert caught.value.code == "frame-shape"


@pytest.mark.parametrize("version", [0, 2, 255, 1 << 63, -1])
def test_another_version_is_refused_as_such(version: int) -> None:
    with pytest.raises(FrameRefused) as caught:
        decode(canonical.encode(fields(version=version)), Manifest)
    assert (caught.value.step, caught.value.code) == (1, "frame-version")


@pytest.mark.parametrize("version", [True, "1", None, b"\1"])
def test_version_that_is_no_number_is_refused(version: Any) -> None:
    with pytest.raises(FrameRefused) as caught:
        decode(canonical.encode(fields(version=version)), Manifest)
    assert caught.value.code == "frame-shape"


def test_writer_cannot_make_what_a_reader_refuses() -> None:
    with pytest.raises(FrameRefused):
        encode(manifest(chunks=0))


def test_digests_are_sha256() -> None:
    assert owner_digest("alice") == hashlib.sha256(b"alice").digest()
    assert manifest_digest(b"x") == hashlib.sha256(b"x").digest()


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"name": "other"}, True),
        ({"cores": 1}, True),
        ({"memory_bytes": 2 << 20}, False),
        ({"memory_bytes": 1 << 19}, False),
        ({"window_bytes": 1 << 17}, False),
        ({"queues": 5}, False),
        ({"ring_entries": 128}, False),
    ],
)
def test_state_fits_a_function_of_the_same_layout(change: dict[str, Any], fits: bool) -> None:
    other = type(PROFILE)(**{f: getattr(PROFILE, f) for f in PROFILE.__struct_fields__} | change)
    assert PROFILE.fits(other) is fits
