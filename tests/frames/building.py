"""Hosts, keys and whole checkpoints for the tests of this room. Keys come from a seeded generator:
the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from accelvisor.frames import manifest as manifests
from accelvisor.frames.envelope import Envelope, sign
from accelvisor.frames.identity import Identity, Signer, SigningKey
from accelvisor.frames.manifest import (
    MANIFEST_TYPE,
    Algorithms,
    Firmware,
    Manifest,
    Offer,
    Profile,
    owner_digest,
)

SECOND = 10**9
NOW = 1_900_000_000 * SECOND

_dice = random.Random(2024)


def uuid() -> str:
    return str(UUID(int=_dice.getrandbits(128), version=4))


def identity() -> Identity:
    return Identity.generate(_dice.randbytes)


def root_key() -> SigningKey:
    return SigningKey.generate(_dice.randbytes)


HOST_A, HOST_B, HOST_C = uuid(), uuid(), uuid()
KEY_A, KEY_B, KEY_C = identity(), identity(), identity()
FUNCTION, DOMAIN = uuid(), uuid()
OWNER = owner_digest("alice")
NONCE = bytes(range(16))
PROFILE = Profile(
    name="small", cores=2, memory_bytes=1 << 20, window_bytes=1 << 16, queues=4, ring_entries=64
)

#: A small whole checkpoint from A for B; tests change single fields.
FIELDS: dict[str, Any] = {
    "kind": "both",
    "function": FUNCTION,
    "domain": DOMAIN,
    "owner": OWNER,
    "source": HOST_A,
    "audience": HOST_B,
    "nonce": NONCE,
    "epoch": 7,
    "sequence": 3,
    "parent": b"",
    "created_ns": NOW - SECOND,
    "expires_ns": NOW + 120 * SECOND,
    "boot": 5,
    "algorithms": Algorithms(),
    "profile": PROFILE,
    "sections": {"function": 10, "status": 20, "memory": 1 << 20},
    "chunks": 3,
    "payload_bytes": 30,
    "seal": None,
}
MANIFEST_FIELDS: dict[str, Any] = {
    **FIELDS,
    "root": bytes(32),
    "digest": bytes(range(32)),
    "firmware": Firmware(version="0.2.0", blas="openblas 0.3 Haswell"),
    "models": (),
}


def manifest(**changes: Any) -> Manifest:
    return Manifest(**{**MANIFEST_FIELDS, **changes})


def offer(**changes: Any) -> Offer:
    return Offer(**{**FIELDS, **changes})


def signed(what: Manifest, signers: Sequence[Signer] = (KEY_A,)) -> Envelope:
    return sign(MANIFEST_TYPE, manifests.encode(what), signers)
