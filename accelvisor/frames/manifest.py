"""The manifest: what a checkpoint is, whose, from where, for whom, and the root over its chunks.

Canonical msgpack of a map with exactly these fields, each bounded. Its signature is what everything
hangs on, so whatever a destination must be able to refuse stands in here. An *offer* is the same
statement before the chunks are there: upper bounds in place of totals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from accelvisor.errors import DataError
from accelvisor.frames import canonical
from accelvisor.frames.chunks import Coding, Kind
from accelvisor.frames.steps import refuse
from accelvisor.limits import LIMITS

MANIFEST_TYPE = "application/vnd.accelvisor.manifest"
OFFER_TYPE = "application/vnd.accelvisor.offer"

#: The only version that is spoken; what is older or newer is refused by its code.
VERSION = 1

NONCE_BYTES = 16

_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
Uuid: TypeAlias = Annotated[str, Meta(pattern=rf"\A{_UUID}\Z")]
MaybeUuid: TypeAlias = Annotated[str, Meta(pattern=rf"\A({_UUID})?\Z")]
Name: TypeAlias = Annotated[str, Meta(pattern=r"\A[ -~]{1,128}\Z")]
KeyId: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Hash: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
MaybeHash: TypeAlias = Annotated[bytes, Meta(max_length=32)]
Nonce: TypeAlias = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
#: Numbers that grow stay below 2**63, so that adding to one never overflows anywhere.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Chunks: TypeAlias = Annotated[int, Meta(ge=1, le=LIMITS.chunks)]
Payload: TypeAlias = Annotated[int, Meta(ge=0, le=LIMITS.checkpoint_bytes)]
SectionBytes: TypeAlias = Annotated[int, Meta(ge=0, le=LIMITS.checkpoint_bytes)]
SectionName: TypeAlias = Literal["function", "status", "state", "window", "memory", "extents"]

#: The section that chunks of a kind belong to.
_SECTION_OF: Mapping[int, SectionName] = MappingProxyType(
    {
        Kind.FUNCTION: "function",
        Kind.STATUS: "status",
        Kind.STATE: "state",
        Kind.WINDOW: "window",
        Kind.MEMORY: "memory",
        Kind.EXTENTS: "extents",
    }
)

Captured: TypeAlias = Literal["function", "status", "both"]


class Algorithms(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was used; a verifier takes only what it knows."""

    hash: Literal["sha256"] = "sha256"
    compression: Literal["none", "zstd"] = "none"
    sealing: Literal["none", "x25519-hkdf-sha256-aes256gcm"] = "none"


class Profile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The size of the function; everything but its cores and name decides the layout of state."""

    name: Name
    cores: Annotated[int, Meta(ge=1, le=1 << 16)]
    memory_bytes: Annotated[int, Meta(ge=1, le=LIMITS.memory_bytes)]
    window_bytes: Annotated[int, Meta(ge=1, le=LIMITS.window_bytes)]
    queues: Annotated[int, Meta(ge=1, le=LIMITS.queues)]
    ring_entries: Annotated[int, Meta(ge=1, le=LIMITS.ring_entries)]

    def fits(self, other: Profile) -> bool:
        """State of this size can be loaded into a function of ``other``'s."""
        mine = (self.memory_bytes, self.window_bytes, self.queues, self.ring_entries)
        theirs = (other.memory_bytes, other.window_bytes, other.queues, other.ring_entries)
        return mine == theirs


class Firmware(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What computes: the package's version, and what its products are computed with."""

    version: Name
    blas: Name


class Seal(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For whom the payloads are encrypted (accelvisor.frames.seal)."""

    ephemeral: Hash
    recipient: KeyId


class Model(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A watermarked model: what the destination must find in it."""

    model: Name
    key: KeyId
    digest: Hash


class _Statement(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an offer and a manifest have in common.

    Args:
        kind: which frames were captured.
        function: and ``domain``, UUIDs; no domain where there is none (embedded).
        owner: SHA-256 of the owner's name.
        source: and ``audience``, UUIDs of hosts; an empty audience means the source itself.
        nonce: chosen by the audience (migration) or the writer (at rest).
        epoch: of ownership; ``sequence`` grows with each checkpoint of an epoch.
        parent: the digest of the manifest that this one continues; empty when it is whole.
        created_ns: and ``expires_ns``, nanoseconds since 1970 by the source's clock.
        boot: how often the source's daemon has started.
        sections: bytes of each section's state, by its name; chunks stay inside.
        chunks: how many there are (offer: at most).
        payload_bytes: of all chunks' payloads as they are stored, added up (offer: at most).
    """

    version: Literal[1] = 1
    kind: Captured
    function: Uuid
    domain: MaybeUuid
    owner: Hash
    source: Uuid
    audience: MaybeUuid
    nonce: Nonce
    epoch: Count
    sequence: Count
    parent: MaybeHash
    created_ns: Count
    expires_ns: Count
    boot: Count
    algorithms: Algorithms
    profile: Profile
    sections: dict[SectionName, SectionBytes]
    chunks: Chunks
    payload_bytes: Payload
    seal: Seal | None

    def section_bytes(self, kind: int) -> int | None:
        """Bytes of the section that chunks of ``kind`` belong to; None where it has none."""
        return self.sections.get(_SECTION_OF[kind]) if kind in _SECTION_OF else None

    def allows(self, coding: int) -> bool:
        """Chunks may be encoded so."""
        return coding != Coding.ZSTD or self.algorithms.compression == "zstd"

    @property
    def sealed(self) -> bool:
        return self.seal is not None


class Offer(_Statement, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a source is about to send."""


class Manifest(_Statement, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a checkpoint is. Beyond :class:`_Statement`:

    Args:
        root: of the Merkle tree over its chunks.
        digest: the status digest, read back at the destination; empty without a status frame.
        firmware: what the program was computed with.
        models: watermarks.
    """

    root: Hash
    digest: MaybeHash
    firmware: Firmware
    models: Annotated[tuple[Model, ...], Meta(max_length=LIMITS.manifest_models)] = ()


Statement = TypeVar("Statement", Offer, Manifest)


def owner_digest(name: str) -> bytes:
    """How a manifest names an owner."""
    return hashlib.sha256(name.encode()).digest()


def manifest_digest(payload: bytes) -> bytes:
    """How a manifest is named: by its parent field, a token, a ledger record."""
    return hashlib.sha256(payload).digest()


def encode(statement: Offer | Manifest) -> bytes:
    """The payload of its envelope.

    Raises:
        DataError: ``frame-shape``: a field is out of bounds, which is a mistake of its writer.
    """
    data = _encode(statement)
    if isinstance(statement, Offer):
        decode(data, Offer)
    else:
        decode(data, Manifest)
    return data


def _encode(statement: Offer | Manifest) -> bytes:
    return canonical.encode(msgspec.to_builtins(statement, builtin_types=(bytes,)))


def decode(payload: bytes, kind: type[Statement]) -> Statement:
    """The manifest or offer in an envelope's payload. Step 1 of the verification.

    Raises:
        FrameRefused: ``frame-shape`` or ``frame-version``.
    """
    try:
        value: Any = canonical.decode(
            payload, max_bytes=LIMITS.manifest_bytes, max_values=8 * LIMITS.manifest_models + 256
        )
    except DataError as error:
        raise refuse("frame-shape", f"the manifest: {error}") from error
    version = value.get("version") if isinstance(value, dict) else None
    if type(version) is int and version != VERSION:
        raise refuse(
            "frame-version", f"the manifest is of version {version}, this is version {VERSION}"
        )
    try:
        found = msgspec.convert(value, kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, OverflowError) as error:
        raise refuse("frame-shape", f"the manifest: {error}") from error
    if _encode(found) != payload:
        raise refuse("frame-shape", "the manifest: a field is missing")
    _check(found)
    return found


def _check(found: Offer | Manifest) -> None:
    """What the fields must be to each other."""
    names = set(found.sections)
    if found.kind == "function":
        right = names == {"function"}
    elif found.kind == "status":
        right = "status" in names and "function" not in names
    else:
        right = {"function", "status"} <= names
    profile = found.profile
    most: dict[SectionName, int] = {
        "function": LIMITS.document_bytes,
        "status": LIMITS.document_bytes,
        "window": profile.window_bytes,
        "memory": profile.memory_bytes,
    }
    # Whoever reads a section makes room for as much as it is said to have.
    large = [name for name, nbytes in most.items() if found.sections.get(name, 0) > nbytes]
    faults = {
        f"its sections are larger than any can be: {', '.join(large)}": bool(large),
        f"a {found.kind} checkpoint has other sections": not right,
        "its parent is no digest": len(found.parent) not in (0, 32),
        "it expires before it was created": found.expires_ns < found.created_ns,
        "sealing is named and its key is missing, or the other way round": found.sealed
        != (found.algorithms.sealing != "none"),
        "its digest is missing": isinstance(found, Manifest)
        and len(found.digest) != (0 if found.kind == "function" else 32),
    }
    for fault, there in faults.items():
        if there:
            raise refuse("frame-shape", f"the manifest: {fault}")
