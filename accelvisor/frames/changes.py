"""Documents from documents: each function gives the next version of a trust document, to be signed
by the roots. None of them looks at signatures or clocks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import msgspec

from accelvisor.errors import ConflictError, NotFoundError
from accelvisor.frames.identity import PublicIdentity
from accelvisor.frames.trust import Host, HostKey, RootKey, Roots, Trust


def create(
    roots: Iterable[bytes], threshold: int, *, created_ns: int, manifest_threshold: int = 1
) -> Trust:
    """Version 1, without hosts.

    Args:
        roots: raw Ed25519 public keys.
    """
    keys = tuple(RootKey(algorithm="ed25519", public=public) for public in roots)
    return Trust(
        version=1,
        created_ns=created_ns,
        roots=Roots(threshold=threshold, keys=keys),
        manifest_threshold=manifest_threshold,
        hosts=(),
        revoked=(),
    )


def add_host(
    old: Trust, uuid: str, name: str, address: str, keys: PublicIdentity, *, created_ns: int
) -> Trust:
    """Raises ConflictError ``trust-host-exists``."""
    if old.host(uuid) is not None:
        raise ConflictError(
            f"host {uuid} is trusted already", code="trust-host-exists", where="trust"
        )
    key = HostKey(
        algorithm="ed25519",
        public=keys.signing,
        sealing=keys.sealing,
        version=1,
        status="current",
        not_after_ns=0,
    )
    added = Host(uuid=uuid, name=name, address=address, key_version=1, keys=(key,))
    return change(old, created_ns, hosts=(*old.hosts, added))


def set_key(
    old: Trust, uuid: str, keys: PublicIdentity, *, created_ns: int, retire_ns: int
) -> Trust:
    """A new current key for a host; the one before counts until ``retire_ns``.

    A host that lost its key, or whose key was revoked, comes back in this way.

    Raises:
        NotFoundError: ``trust-host-unknown``.
    """
    host = require_host(old, uuid)
    kept = tuple(
        msgspec.structs.replace(key, status="retiring", not_after_ns=retire_ns)
        if key.status == "current"
        else key
        for key in host.keys
        if key.status == "current" or key.not_after_ns > created_ns
    )
    version = host.key_version + 1
    added = HostKey(
        algorithm="ed25519",
        public=keys.signing,
        sealing=keys.sealing,
        version=version,
        status="current",
        not_after_ns=0,
    )
    after = msgspec.structs.replace(host, key_version=version, keys=(*kept, added))
    return change(old, created_ns, hosts=[after if h is host else h for h in old.hosts])


def put_host(old: Trust, host: Host, *, created_ns: int) -> Trust:
    """A host of the document as it is with its rotations: the roots say themselves what those say.

    Raises:
        NotFoundError: ``trust-host-unknown``.
    """
    before = require_host(old, host.uuid)
    return change(old, created_ns, hosts=[host if h is before else h for h in old.hosts])


def revoke_key(
    old: Trust, name: str, *, created_ns: int, rotated: Container[str] = ()
) -> Trust:
    """A key counts no more, from the moment that a host has this version of the document. Nor does
    what it signed, and that includes rotations: its host needs :func:`set_key` in the same breath.

    Args:
        rotated: ids of keys that are known by rotations alone, and can be revoked as well.

    Raises:
        NotFoundError: ``trust-key-unknown``: no host has it and none had.
    """
    hosts = tuple(
        msgspec.structs.replace(host, keys=tuple(k for k in host.keys if k.key_id != name))
        for host in old.hosts
    )
    if hosts == old.hosts and name not in old.revoked and name not in rotated:
        raise NotFoundError(f"no host has the key {name}", code="trust-key-unknown", where="trust")
    return change(old, created_ns, hosts=hosts, revoked={*old.revoked, name})


def remove_host(
    old: Trust, uuid: str, *, created_ns: int, rotated: Iterable[str] = ()
) -> Trust:
    """A host is no longer one of the fleet, and all its keys are revoked.

    Args:
        rotated: ids of those that are known by rotations alone.

    Raises:
        NotFoundError: ``trust-host-unknown``.
    """
    host = require_host(old, uuid)
    revoked = {*old.revoked, *(key.key_id for key in host.keys), *rotated}
    hosts = tuple(other for other in old.hosts if other.uuid != uuid)
    return change(old, created_ns, hosts=hosts, revoked=revoked)


def set_roots(old: Trust, roots: Iterable[bytes], threshold: int, *, created_ns: int) -> Trust:
    """Other root keys. The document needs signatures of both the old and the new ones."""
    keys = tuple(RootKey(algorithm="ed25519", public=public) for public in roots)
    return change(old, created_ns, roots=Roots(threshold=threshold, keys=keys))


def change(
    old: Trust,
    created_ns: int,
    *,
    hosts: Iterable[Host] | None = None,
    revoked: Iterable[str] | None = None,
    roots: Roots | None = None,
    manifest_threshold: int | None = None,
) -> Trust:
    """The next version, with these things changed."""
    return Trust(
        version=old.version + 1,
        created_ns=created_ns,
        roots=old.roots if roots is None else roots,
        manifest_threshold=manifest_threshold or old.manifest_threshold,
        hosts=tuple(sorted(old.hosts if hosts is None else hosts, key=lambda host: host.uuid)),
        revoked=tuple(sorted(old.revoked if revoked is None else revoked)),
    )


def require_host(document: Trust, uuid: str) -> Host:
    """Raises NotFoundError ``trust-host-unknown``."""
    host = document.host(uuid)
    if host is None:
        raise NotFoundError(
            f"host {uuid} is not in the trust document",
            code="trust-host-unknown",
            where="trust",
            hint="accelctl trust add",
        )
    return host
