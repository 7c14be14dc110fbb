"""From a function's state to a signed file: chunks, sealing, manifest, signature.

Pure but for the file that is written; blocks, and belongs into a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.capture import Taken
from accelvisor.daemon.moving.numbers import Mark
from accelvisor.daemon.moving.services import Services
from accelvisor.errors import NotFoundError, UnavailableError
from accelvisor.frames import chunks
from accelvisor.frames import envelope as envelopes
from accelvisor.frames import manifest as manifests
from accelvisor.frames.chunks import Buffer, Kind
from accelvisor.frames.container import Writer, area_for
from accelvisor.frames.manifest import (
    MANIFEST_TYPE,
    NONCE_BYTES,
    Algorithms,
    Captured,
    Manifest,
    Model,
    Profile,
    SectionName,
    manifest_digest,
)
from accelvisor.frames.seal import Sealer
from accelvisor.limits import LIMITS

_SECOND = 10**9
#: How manifests name the sections.
_NAMES: Mapping[Kind, SectionName] = {
    Kind.FUNCTION: "function",
    Kind.STATUS: "status",
    Kind.STATE: "state",
    Kind.WINDOW: "window",
    Kind.MEMORY: "memory",
    Kind.EXTENTS: "extents",
}
_LIFE_NS = int(LIMITS.checkpoint_life_s) * _SECOND


@dataclass(frozen=True, slots=True)
class Recipient:
    """For whom a checkpoint is.

    Args:
        audience: UUID of the host that may load it; empty: this one.
        key: X25519 public key that it is encrypted for; None: it is not encrypted.
    """

    audience: str = ""
    key: bytes | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """What a checkpoint holds, and what its manifest says about it."""

    function: str
    domain: str
    owner: bytes
    mark: Mark
    frames: Captured
    profile: Profile
    firmware: manifests.Firmware
    digest: bytes
    parent: bytes
    models: tuple[Model, ...]
    sections: dict[Kind, int]
    pieces: list[tuple[Kind, int, memoryview]] = field(repr=False)


def recipient(services: Services, host: str | None, *, sealed: bool) -> Recipient:
    """A host by UUID or name; None: this one.

    Raises:
        NotFoundError: ``trust-host-unknown``, ``trust-no-key``.
    """
    mine = str(services.keys.host)
    if host is None or host == mine:
        uuid, audience = mine, ""
    else:
        uuid = audience = services.keys.find(host).uuid
    key = services.keys.keyring.current(uuid)
    if key is None:
        raise NotFoundError(
            f"host {uuid} has no key that counts", code="trust-no-key", where="trust"
        )
    return Recipient(audience, key.entry.sealing if sealed else None)


def content(
    taken: Taken,
    frames: Captured,
    *,
    domain: str,
    owner: bytes,
    mark: Mark,
    models: Sequence[Model],
) -> Content:
    """What was taken, in the order in which it is written: documents first."""
    pieces: list[tuple[Kind, int, memoryview]] = []
    sections: dict[Kind, int] = {}

    def whole(kind: Kind, data: bytes) -> None:
        sections[kind] = len(data)
        pieces.append((kind, 0, memoryview(data)))

    if frames != "status":
        whole(Kind.FUNCTION, documents.encode(taken.frame))
    digest = b""
    if frames != "function" and taken.status is not None:
        digest = documents.status_digest(taken.status.digests)
        whole(Kind.STATUS, documents.encode(taken.status))
        whole(Kind.STATE, taken.section)
        sections[Kind.WINDOW] = taken.frame.window_bytes
        sections[Kind.MEMORY] = taken.frame.memory_bytes
        for kind, part in (taken.parts or {}).items():
            pieces += [(kind, offset, view) for offset, view in part.pieces()]
        if taken.extents is not None:
            whole(Kind.EXTENTS, taken.extents)
    return Content(
        function=taken.frame.function,
        domain=domain,
        owner=owner,
        mark=mark,
        frames=frames,
        profile=documents.manifest_profile(taken.frame),
        firmware=documents.manifest_firmware(taken.frame),
        digest=digest,
        parent=taken.parent,
        models=tuple(models) if frames != "function" else (),
        sections=sections,
        pieces=pieces,
    )


def write(
    services: Services, file: BinaryIO, what: Content, whom: Recipient, *, zstd: bool
) -> bytes:
    """A checkpoint into an empty, seekable file; its digest.

    Raises:
        UnavailableError: ``zstd-missing``.
    """
    require_zstd(zstd)
    nonce = services.entropy(NONCE_BYTES)
    source = str(services.keys.host)
    sealer = None
    if whom.key is not None:
        sealer = Sealer(
            whom.key,
            services.entropy(32),
            function=what.function,
            source=source,
            audience=whom.audience,
            nonce=nonce,
        )
    writer = Writer(file, area_for(len(what.models)))
    for header, payload in _chunks(what, zstd):
        writer.add(header, sealer.seal_chunk(header, payload) if sealer else payload)
    now = services.clock_ns()
    statement = Manifest(
        kind=what.frames,
        function=what.function,
        domain=what.domain,
        owner=what.owner,
        source=source,
        audience=whom.audience,
        nonce=nonce,
        epoch=what.mark.epoch,
        sequence=what.mark.sequence,
        parent=what.parent,
        created_ns=now,
        expires_ns=now + _LIFE_NS,
        boot=services.boot,
        algorithms=Algorithms(
            compression="zstd" if zstd else "none",
            sealing="x25519-hkdf-sha256-aes256gcm" if sealer else "none",
        ),
        profile=what.profile,
        sections={_NAMES[kind]: size for kind, size in what.sections.items()},
        chunks=writer.chunks,
        payload_bytes=writer.payload_bytes,
        seal=sealer.seal if sealer else None,
        root=writer.root,
        digest=what.digest,
        firmware=what.firmware,
        models=what.models,
    )
    payload = manifests.encode(statement)
    writer.finish(envelopes.sign(MANIFEST_TYPE, payload, [services.keys.identity]).encode())
    return manifest_digest(payload)


def require_zstd(wanted: bool) -> None:
    """Raises UnavailableError ``zstd-missing``."""
    if wanted and not chunks.has_zstd():
        raise UnavailableError(
            "compressed checkpoints need Python's zstandard",
            code="zstd-missing",
            where="checkpoints",
            hint="apt install python3-zstandard",
        )


def _chunks(what: Content, zstd: bool) -> Iterator[tuple[chunks.Header, Buffer]]:
    index = 0
    for kind, offset, view in what.pieces:
        cut = chunks.cut(
            kind, view, index=index, offset=offset, size=LIMITS.chunk_bytes, zstd=zstd
        )
        for header, payload in cut:
            yield header, payload
            index += 1
