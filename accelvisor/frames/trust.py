"""The trust document: whose signatures count, and when a new one replaces it.

A fleet has root keys (kept by people, away from hosts) whose threshold signs a document that lists
the hosts and their keys. Its rules are those of The Update Framework's root role (specification of
theupdateframework.io, 5.3): a new document is signed by the threshold of the old roots and of its
own, and its version grows.

Beside it: :mod:`accelvisor.frames.changes` makes documents from documents,
:mod:`accelvisor.frames.rotation` has the key changes that hosts make among themselves, and
:mod:`accelvisor.frames.keyring` looks keys up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from accelvisor.errors import DataError
from accelvisor.frames import canonical
from accelvisor.frames import envelope as envelopes
from accelvisor.frames.envelope import Envelope, SignatureError
from accelvisor.frames.identity import Signer, key_id
from accelvisor.frames.manifest import Count, Hash, KeyId, Name, Uuid
from accelvisor.limits import LIMITS

TRUST_TYPE = "application/vnd.accelvisor.trust"

Version: TypeAlias = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Threshold: TypeAlias = Annotated[int, Meta(ge=1, le=LIMITS.signatures)]
Status: TypeAlias = Literal["current", "retiring"]


class RootKey(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key of the people who run the fleet. Each counts as a holder of its own."""

    algorithm: Literal["ed25519"]
    public: Hash

    @property
    def key_id(self) -> str:
        return key_id(self.public)

    @property
    def holder(self) -> str:
        return self.key_id


class Roots(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    threshold: Threshold
    keys: Annotated[tuple[RootKey, ...], Meta(min_length=1, max_length=LIMITS.signatures)]


class HostKey(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A host's keys of one version.

    Args:
        public: Ed25519, for signatures and TLS.
        sealing: X25519, for what only this host may read.
        version: grows with each rotation.
        status: a host has one current key at most; a retiring one counts until its time is over.
        not_after_ns: since 1970; 0 for no end.
    """

    algorithm: Literal["ed25519"]
    public: Hash
    sealing: Hash
    version: Version
    status: Status
    not_after_ns: Count

    @property
    def key_id(self) -> str:
        return key_id(self.public)


class Host(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A host, where it listens, and its keys, the oldest first.

    ``key_version`` is the highest version that a key of it ever had: it outlives revoked keys.
    """

    uuid: Uuid
    name: Name
    address: Name
    key_version: Version
    keys: Annotated[tuple[HostKey, ...], Meta(max_length=LIMITS.host_keys)]

    @property
    def current(self) -> HostKey | None:
        return next((key for key in self.keys if key.status == "current"), None)


class Trust(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One version of the document.

    Args:
        version: of the document; grows by one with each change.
        created_ns: since 1970.
        roots: who may sign the next one.
        manifest_threshold: how many hosts must sign a manifest (its source and witnesses).
        hosts: in the order of their UUIDs.
        revoked: ids of keys that count no more, in order. They never leave the list.
    """

    format: Literal[1] = 1
    version: Version
    created_ns: Count
    roots: Roots
    manifest_threshold: Threshold
    hosts: Annotated[tuple[Host, ...], Meta(max_length=LIMITS.trust_hosts)]
    revoked: Annotated[tuple[KeyId, ...], Meta(max_length=LIMITS.revoked_keys)]

    def host(self, uuid: str) -> Host | None:
        return next((host for host in self.hosts if host.uuid == uuid), None)


@dataclass(frozen=True, slots=True)
class Trusted:
    """A document whose signatures were verified, and the envelope to show to others."""

    document: Trust
    envelope: bytes

    @property
    def digest(self) -> bytes:
        """Of the document, whoever signed it."""
        return hashlib.sha256(encode(self.document)).digest()


def encode(document: Trust) -> bytes:
    """Raises DataError ``trust-shape``: the document contradicts itself."""
    data = _encode(document)
    decode(data)
    return data


def decode(payload: bytes) -> Trust:
    """Raises DataError ``trust-shape``; no signature is looked at."""
    try:
        value: Any = canonical.decode(payload, max_bytes=LIMITS.trust_bytes)
        found = msgspec.convert(value, Trust, builtin_types=(bytes,))
    except (DataError, msgspec.ValidationError, OverflowError) as error:
        raise _shape(str(error)) from error
    if _encode(found) != payload:
        raise _shape("a field is missing")
    _check(found)
    return found


def _encode(document: Trust) -> bytes:
    return canonical.encode(msgspec.to_builtins(document, builtin_types=(bytes,)))


def _check(found: Trust) -> None:
    uuids = [host.uuid for host in found.hosts]
    keys = [key.key_id for host in found.hosts for key in host.keys]
    roots = [key.key_id for key in found.roots.keys]
    signing = {key.public for host in found.hosts for key in host.keys}
    sealing = [key.sealing for host in found.hosts for key in host.keys]
    faults = {
        "its hosts are repeated or out of order": not _ascending(uuids),
        "its revoked keys are repeated or out of order": not _ascending(found.revoked),
        "a key appears twice": len({*keys, *roots}) != len(keys) + len(roots),
        "a sealing key appears twice": len({*sealing, *signing}) != len(sealing) + len(signing),
        "a revoked key is still listed": bool(set(found.revoked) & {*keys, *roots}),
        "its roots cannot reach their threshold": found.roots.threshold > len(roots),
        "a host's key versions do not grow": not all(
            _ascending([*(key.version for key in host.keys), host.key_version + 1])
            for host in found.hosts
        ),
        "a host has a current key that is not its newest": any(
            key.status == "current" for host in found.hosts for key in host.keys[:-1]
        ),
        "a retiring key has no end": any(
            key.status == "retiring" and not key.not_after_ns
            for host in found.hosts
            for key in host.keys
        ),
    }
    for fault, there in faults.items():
        if there:
            raise _shape(fault)


def _ascending(items: Sequence[Any]) -> bool:
    return all(a < b for a, b in pairwise(items))


def sign(document: Trust, signers: Iterable[Signer]) -> bytes:
    """The envelope of a document."""
    return envelopes.sign(TRUST_TYPE, encode(document), signers).encode()


def first(envelope: bytes, pinned: frozenset[str]) -> Trusted:
    """The first document that a host sees. Its roots must be the ones that a person named.

    Args:
        pinned: ids of the root keys, learned on another way than the document.

    Raises:
        DataError: ``trust-shape``, ``trust-roots``, ``trust-signature``, ``trust-threshold``.
    """
    opened, document = _open(envelope)
    roots = {key.key_id: key for key in document.roots.keys}
    if set(roots) != pinned:
        raise _refused(
            "trust-roots",
            "its root keys are not the ones that were named",
            "compare them, character by character, with what accelctl trust show says elsewhere",
        )
    _verified(opened, roots, document.roots.threshold, roots)
    return Trusted(document, envelope)


def update(old: Trusted, envelope: bytes) -> Trusted:
    """The trust after ``envelope`` was seen: ``old`` itself when it says nothing new.

    Raises:
        DataError: ``trust-shape``, ``trust-signature``, ``trust-threshold``, ``trust-rollback``,
            ``trust-jump``, ``trust-fork`` (another document of the same version),
            ``trust-unrevoked`` (it forgets a revoked key or goes back to an older key of a host).
    """
    opened, document = _open(envelope)
    before, after = old.document.roots, document.roots
    roots = {key.key_id: key for key in (*before.keys, *after.keys)}
    # Who signs a change of roots: both the old ones, who give them up, and the new, who take over.
    for side in (before, after):
        _verified(opened, roots, side.threshold, {key.key_id for key in side.keys})
    _check_step(old.document, document)
    return old if document == old.document else Trusted(document, envelope)


def _open(envelope: bytes) -> tuple[Envelope, Trust]:
    try:
        opened = envelopes.decode(envelope, kind=TRUST_TYPE, max_bytes=LIMITS.trust_bytes)
    except DataError as error:
        raise _shape(str(error)) from error
    return opened, decode(opened.payload)


def _verified(
    opened: Envelope, keys: Mapping[str, RootKey], threshold: int, count: Iterable[str]
) -> None:
    try:
        holders = envelopes.verify(opened, keys, 1)
    except SignatureError as error:
        raise _refused("trust-signature", str(error)) from error
    if len(holders & set(count)) < threshold:
        raise _refused(
            "trust-threshold",
            f"{len(holders & set(count))} of its roots signed it and {threshold} are needed",
        )


def _check_step(old: Trust, new: Trust) -> None:
    if new.version < old.version:
        raise _refused("trust-rollback", f"version {old.version} is known, this is {new.version}")
    if new.version == old.version and new != old:
        raise _refused(
            "trust-fork",
            f"there are two different documents of version {new.version}",
            "the roots signed both: find out which is meant, and sign one with a higher version",
        )
    if new.version > old.version + LIMITS.trust_jump:
        raise _refused("trust-jump", f"version {old.version} is known, this is {new.version}")
    lost = set(old.revoked) - set(new.revoked)
    if lost:
        raise _refused("trust-unrevoked", f"it forgets that {min(lost)} was revoked")
    for host in old.hosts:
        after = new.host(host.uuid)
        if after is not None and after.key_version < host.key_version:
            raise _refused("trust-unrevoked", f"host {host.name} goes back to an older key")


def _shape(why: str) -> DataError:
    return _refused("trust-shape", f"it cannot be read: {why}")


def _refused(code: str, why: str, hint: str = "") -> DataError:
    return DataError(f"the trust document is refused: {why}", code=code, where="trust", hint=hint)
