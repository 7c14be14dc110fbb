"""A host changes its keys while the fleet runs, before the roots have signed anything.

It signs a statement that names its new keys, with the old key (it is me) and with the new one (I
have it), and gives it to its peers. They take it as an overlay on their trust document: the new key
is current, the old one retires at the time that is named. When the roots sign a document with the
new key, the overlay has nothing left to say. A revoked key takes what it signed with it; what was
said of the key before it stays: that one retires, and does not become current again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal

import msgspec
from msgspec import Struct

from accelvisor.errors import DataError
from accelvisor.frames import canonical
from accelvisor.frames import envelope as envelopes
from accelvisor.frames.envelope import HeldKey, SignatureError
from accelvisor.frames.identity import Identity, key_id
from accelvisor.frames.manifest import Count, Hash, KeyId, Uuid
from accelvisor.frames.trust import Host, HostKey, Trust, Version
from accelvisor.limits import KIB, LIMITS

ROTATION_TYPE = "application/vnd.accelvisor.rotation"

_BYTES = KIB
#: Rotations whose signatures were looked at; a kibibyte each.
_FAULTS = 4096
_OVERLAP_NS = int(LIMITS.rotation_overlap_s * 10**9)


class Rotation(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Key ``old`` of ``host`` is followed by these keys, as its version ``version``.

    Args:
        created_ns: since 1970; from ``retire_ns`` on the old key counts no more.
    """

    format: Literal[1] = 1
    host: Uuid
    old: KeyId
    version: Version
    public: Hash
    sealing: Hash
    created_ns: Count
    retire_ns: Count


def rotate(host: Host, old: Identity, new: Identity, *, created_ns: int, retire_ns: int) -> bytes:
    """The envelope that tells of it."""
    statement = Rotation(
        host=host.uuid,
        old=old.key_id,
        version=host.key_version + 1,
        public=new.public_identity.signing,
        sealing=new.public_identity.sealing,
        created_ns=created_ns,
        retire_ns=retire_ns,
    )
    return envelopes.sign(ROTATION_TYPE, _encode(statement), [old, new]).encode()


def overlay(document: Trust, envelope: bytes) -> Trust:
    """``document`` with the rotation: for looking keys up, not for signing.

    The same rotation again changes nothing.

    Raises:
        DataError: ``rotation-invalid``; ``rotation-key``: it is not signed by the host's current
            key; ``rotation-old``: a newer key is known; ``rotation-fork``: another key of the
            same version is known, so somebody else has the old one.
    """
    return _overlay(document, envelope)


def _overlay(document: Trust, envelope: bytes, *, kept: bool = False) -> Trust:
    """``kept``: the new key may have been revoked since, as it was not when the rotation came."""
    found = _open(envelope)[1]
    host = document.host(found.host)
    if host is None:
        raise _refused("rotation-key", f"host {found.host} is not trusted")
    same = next((key for key in host.keys if key.version == found.version), None)
    if same is not None:
        if (same.public, same.sealing) == (found.public, found.sealing):
            return document
        raise _refused("rotation-fork", f"host {host.name} has another key {found.version}")
    if found.version <= host.key_version:
        raise _refused("rotation-old", f"host {host.name} has key {host.key_version} already")
    current = host.current
    if current is None or found.old != current.key_id or found.version != host.key_version + 1:
        raise _refused("rotation-key", f"key {found.old} is not the current key of {host.name}")
    new = key_id(found.public)
    known = {key.key_id for other in document.hosts for key in other.keys}
    revoked = new in document.revoked
    if new in known or (revoked and not kept):
        raise _refused("rotation-key", f"key {new} was used before")
    fault = _fault(envelope, current.public, found.public)
    if fault:
        raise _refused("rotation-key", fault)
    after = _rotated(host, current, found, revoked=revoked)
    hosts = tuple(after if other is host else other for other in document.hosts)
    return msgspec.structs.replace(document, hosts=hosts)


def overlay_all(document: Trust, rotations: Iterable[bytes]) -> tuple[Trust, tuple[bytes, ...]]:
    """``document`` with all of ``rotations`` that still say something, and those.

    What a newer document has made void (signed by the roots since, or by a revoked key) is left
    out: this is what to do with the rotations that were kept, when a document comes in.
    """
    kept = []
    for envelope in rotations:
        try:
            after = _overlay(document, envelope, kept=True)
        except DataError:
            continue
        if after is not document:
            kept.append(envelope)
            document = after
    return document, tuple(kept)


@lru_cache(maxsize=_FAULTS)
def _fault(envelope: bytes, old: bytes, new: bytes) -> str:
    """Why these two keys have not both signed it; empty when they have. Each new document asks
    again about every rotation that is kept, in the daemon's event loop.
    """
    # The two count as two holders: both must have signed.
    keys = {key_id(key): HeldKey(key_id(key), key) for key in (old, new)}
    try:
        envelopes.verify(_open(envelope)[0], keys, 2)
    except SignatureError as error:
        return str(error) or "a signature is wrong"
    return ""


def require_room(document: Trust, effective: Trust) -> None:
    """No host may have more rotations on top of the document than are remembered.

    Args:
        effective: ``document`` with the rotations: each adds one to its host's key version.

    Raises:
        DataError: ``rotation-many``.
    """
    for before, after in zip(document.hosts, effective.hosts, strict=True):
        if after.key_version - before.key_version > LIMITS.rotations:
            raise DataError(
                f"host {after.name} has rotated its keys {LIMITS.rotations} times since its key"
                " was trusted",
                code="rotation-many",
                where="trust",
                hint="let it join again, with accelctl trust invite --again here; or have a fleet's"
                " roots sign its keys",
            )


def _rotated(host: Host, current: HostKey, found: Rotation, *, revoked: bool) -> Host:
    retiring = msgspec.structs.replace(current, status="retiring", not_after_ns=found.retire_ns)
    before = [retiring if key is current else key for key in host.keys]
    added = HostKey(
        algorithm="ed25519",
        public=found.public,
        sealing=found.sealing,
        version=found.version,
        status="current",
        not_after_ns=0,
    )
    # The oldest goes when there are too many: it is the one whose time is over first.
    keys = tuple(before if revoked else (*before, added))[-LIMITS.host_keys :]
    return msgspec.structs.replace(host, key_version=found.version, keys=keys)


def _open(envelope: bytes) -> tuple[envelopes.Envelope, Rotation]:
    try:
        opened = envelopes.decode(envelope, kind=ROTATION_TYPE, max_bytes=_BYTES)
        value: Any = canonical.decode(opened.payload, max_bytes=_BYTES)
        found = msgspec.convert(value, Rotation, builtin_types=(bytes,))
    except (DataError, msgspec.ValidationError, OverflowError) as error:
        raise _refused("rotation-invalid", str(error)) from error
    if _encode(found) != opened.payload:
        raise _refused("rotation-invalid", "a field is missing")
    if not found.created_ns <= found.retire_ns <= found.created_ns + _OVERLAP_NS:
        raise _refused("rotation-invalid", "the old key would count too long")
    if found.public == found.sealing:
        raise _refused("rotation-invalid", "one key for signing and sealing")
    return opened, found


def _encode(statement: Rotation) -> bytes:
    return canonical.encode(msgspec.to_builtins(statement, builtin_types=(bytes,)))


def _refused(code: str, why: str) -> DataError:
    return DataError(f"the rotation of a key is refused: {why}", code=code, where="trust")
