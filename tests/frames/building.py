"""Hosts, keys and whole checkpoints for the tests of this room. Keys come from a seeded generator:
the same in every run.
"""

from __future__ import annotations

import dataclasses
import io
import random
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest

from accelvisor.errors import FrameRefused
from accelvisor.frames import changes, container
from accelvisor.frames import manifest as manifests
from accelvisor.frames.audit import Event
from accelvisor.frames.chunks import Buffer, Coding, Header, Kind, expand, leaf_hash
from accelvisor.frames.envelope import Envelope, sign
from accelvisor.frames.identity import Identity, Signer, SigningKey
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.manifest import (
    MANIFEST_TYPE,
    OFFER_TYPE,
    Algorithms,
    Firmware,
    Manifest,
    Offer,
    Profile,
    owner_digest,
)
from accelvisor.frames.merkle import Merkle
from accelvisor.frames.pace import Pace
from accelvisor.frames.receive import Receiver
from accelvisor.frames.trust import Trust
from accelvisor.frames.verify import MIGRATION, Expected, Policy, Verified, Verifier

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
    name="small", cores=2, memory_bytes=4 << 20, window_bytes=1 << 16, queues=4, ring_entries=64
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


# --- a small fleet and whole checkpoints ---


def document(*, manifest_threshold: int = 1) -> Trust:
    """Trust in A, B and C, by one root."""
    made = changes.create([ROOT.public], 1, created_ns=NOW, manifest_threshold=manifest_threshold)
    for host, name, key in ((HOST_A, "a", KEY_A), (HOST_B, "b", KEY_B), (HOST_C, "c", KEY_C)):
        made = changes.add_host(
            made, host, name, f"{name}.example:7", key.public_identity, created_ns=NOW
        )
    return made


ROOT = root_key()


class Records:
    """An audit sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)

    @property
    def steps(self) -> list[tuple[int, str]]:
        return [(event.step, event.code) for event in self.events]


class Nonces:
    """A store of used nonces in memory."""

    def __init__(self, *used: bytes) -> None:
        self.used = set(used)

    def seen(self, nonce: bytes) -> bool:
        return nonce in self.used

    def use(self, nonce: bytes, until_ns: int) -> bool:
        fresh = nonce not in self.used
        self.used.add(nonce)
        return fresh


class Staging:
    """Keeps stored payloads; what it was given shows that nobody looked into them before."""

    def __init__(self) -> None:
        self.chunks: list[tuple[Header, bytes]] = []

    def write(self, header: Header, payload: Buffer) -> None:
        self.chunks.append((header, bytes(payload)))


class Device:
    """Loads from staging, but only with what a verification gave; counts its writes."""

    def __init__(self) -> None:
        self.memory = bytearray(PROFILE.memory_bytes)
        self.writes = 0

    def load(self, verified: Verified, staging: Staging) -> None:
        assert type(verified) is Verified
        for header, payload in staging.chunks:
            if header.kind == Kind.MEMORY:
                self.memory[header.offset : header.offset + header.length] = expand(header, payload)
                self.writes += 1


#: B waits for the checkpoint of FIELDS and has not seen any of this epoch.
EXPECTED = Expected(
    me=HOST_B, source=HOST_A, nonce=NONCE, epoch=7, sequence=2, boot=5, parent=b"", owner=OWNER,
    function=FUNCTION, domain=DOMAIN, profile=PROFILE,
)  # fmt: skip


class Destination:
    """B, with everything that its verifier is given; tests change parts of it."""

    def __init__(self, **changed: Any) -> None:
        self.now = NOW
        self.keyring = Keyring(document())
        self.records = Records()
        self.nonces = Nonces()
        self.staging = Staging()
        self.device = Device()
        self.policy: Policy = changed.pop("policy", MIGRATION)
        self.expected = dataclasses.replace(EXPECTED, **changed)

    @property
    def verifier(self) -> Verifier:
        return Verifier(
            keyring=lambda: self.keyring,
            policy=self.policy,
            expected=self.expected,
            clock_ns=lambda: self.now,
            audit=self.records,
            used=self.nonces,
        )

    def take(self, checkpoint: Checkpoint) -> Verified:
        """A file, whole, into the device."""
        verified = container.verify(io.BytesIO(checkpoint.file()), self.verifier, self.staging)
        self.device.load(verified, self.staging)
        return verified

    def stream(self, offered: bytes, checkpoint: Checkpoint, pace: Pace | None = None) -> Verified:
        """A migration: offer, chunks, manifest."""
        verifier = self.verifier
        receiver = Receiver(verifier, verifier.open_offer(offered), self.staging, pace)
        for header, payload in checkpoint.chunks:
            receiver.feed(header, payload)
        verified = receiver.finish(checkpoint.envelope())
        self.device.load(verified, self.staging)
        return verified

    def refusal(self, action: Callable[[], object]) -> tuple[int, str]:
        """Step and code; the record of it is there and the device was not touched."""
        with pytest.raises(FrameRefused) as caught:
            action()
        assert self.device.writes == 0
        assert self.records.steps[-1] == (caught.value.step, caught.value.code)
        assert self.records.steps.count(self.records.steps[-1]) == 1
        assert caught.value.hint
        return caught.value.step, caught.value.code

    def refuses(self, checkpoint: Checkpoint) -> tuple[int, str]:
        return self.refusal(lambda: self.take(checkpoint))


class Checkpoint:
    """Chunks and the manifest over them; ``changes`` are what its (trusted) writer says instead."""

    def __init__(
        self,
        chunks: Sequence[tuple[Header, Buffer]] | None = None,
        signers: Sequence[Signer] = (KEY_A,),
        **changes: Any,
    ) -> None:
        self.chunks = list(small_chunks() if chunks is None else chunks)
        self.signers = signers
        tree = Merkle()
        for header, payload in self.chunks:
            tree.add(leaf_hash(header.pack(), payload))
        honest = {
            "root": tree.root(),
            "chunks": len(self.chunks),
            "payload_bytes": sum(len(payload) for _, payload in self.chunks),
        }
        self.manifest = manifest(**{**honest, **changes})

    def envelope(self) -> bytes:
        return signed(self.manifest, self.signers).encode()

    def file(self) -> bytes:
        """By hand, since :class:`container.Writer` would not write every lie."""
        envelope = self.envelope()
        head = container.HEAD.pack(b"XCKP", 1, 0, len(envelope), container.AREA_BYTES)
        records = (
            header.pack() + len(payload).to_bytes(4, "little") + bytes(payload)
            for header, payload in self.chunks
        )
        return head + envelope.ljust(container.AREA_BYTES, b"\0") + b"".join(records)


def small_chunks() -> list[tuple[Header, Buffer]]:
    """A function frame, a status frame and two pieces of memory, one of them zeros."""
    return [
        (Header(0, Kind.FUNCTION, Coding.RAW, 0, 10), b"function!!"),
        (Header(1, Kind.STATUS, Coding.RAW, 0, 20), b"status" + bytes(14)),
        (Header(2, Kind.MEMORY, Coding.RAW, 4096, 16), b"sixteen letters!"),
        (Header(3, Kind.MEMORY, Coding.ZEROS, 8192, 4096), b""),
    ]


def signed_offer(signers: Sequence[Signer] = (KEY_A,), **changes: Any) -> bytes:
    """Of at most 10 chunks and 1000 bytes."""
    made = offer(**{"chunks": 10, "payload_bytes": 1000, **changes})
    return sign(OFFER_TYPE, manifests.encode(made), signers).encode()
