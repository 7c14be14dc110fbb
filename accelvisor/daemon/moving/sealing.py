"""What a source signs of a move: offers, manifests, and the token that QEMU carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from accelvisor.daemon import specifying
from accelvisor.daemon.moving import documents
from accelvisor.errors import DataError
from accelvisor.frames import canonical
from accelvisor.frames import envelope as envelopes
from accelvisor.frames import manifest as manifests
from accelvisor.frames.chunks import Kind
from accelvisor.frames.manifest import (
    MANIFEST_TYPE,
    OFFER_TYPE,
    Algorithms,
    Manifest,
    Model,
    Offer,
    manifest_digest,
    owner_digest,
)
from accelvisor.limits import LIMITS
from accelvisor.migration import messages as wire

if TYPE_CHECKING:
    from accelvisor.daemon.moving.copying import Part
    from accelvisor.daemon.moving.services import Services
    from accelvisor.daemon.moving.source import SourceMove
    from accelvisor.isolation.resources import Card

_SECOND = 10**9
#: A whole migration, its pre-copy included, must fit into an offer's life.
_OFFER_S = 24 * 3600
#: From the seal to the load: QEMU's own deadlines are shorter.
_MANIFEST_S = 120


def _common(services: Services, move: SourceMove, part: Part, life_s: int) -> dict[str, object]:
    asked = move.asked
    now = services.clock_ns()
    return {
        "kind": "both",
        "function": part.uuid,
        "domain": asked.domain,
        "owner": owner_digest(asked.domain),
        "source": str(services.keys.host),
        "audience": str(move.peer.host),
        "nonce": asked.nonce,
        "epoch": part.epoch,
        "sequence": 0,
        "parent": b"",
        "created_ns": now,
        "expires_ns": now + life_s * _SECOND,
        "boot": services.boot,
        "algorithms": Algorithms(),
        "profile": documents.manifest_profile(part.frame),
        "sections": {Kind(kind).name.lower(): size for kind, size in part.sections.items()},
        "seal": None,
    }


def offer(services: Services, move: SourceMove, part: Part) -> bytes:
    """The signed upper bounds of one function's transfer. ``part.sections`` holds bounds by now."""
    statement = Offer(
        **_common(services, move, part, _OFFER_S),  # type: ignore[arg-type]
        chunks=LIMITS.chunks,
        payload_bytes=LIMITS.checkpoint_bytes,
    )
    payload = manifests.encode(statement)
    return envelopes.sign(OFFER_TYPE, payload, [services.keys.identity]).encode()


def offered(part: Part, cards: Sequence[Card]) -> wire.Offered:
    """The same for the control message: what the destination makes room for."""
    function = part.function
    return wire.Offered(
        function.uuid,
        part.epoch,
        function.profile,
        function.cores,
        function.chips,
        function.queues,
        function.ring_entries,
        function.memory_bytes,
        function.window_bytes,
        LIMITS.chunks,
        LIMITS.checkpoint_bytes,
        function.name,
        {key: value[: LIMITS.migration_text_chars] for key, value in part.frame.firmware.items()},
        specifying.shape(function, cards),
    )


def manifest(
    services: Services, move: SourceMove, part: Part, models: Sequence[Model]
) -> tuple[bytes, bytes]:
    """(envelope, digest) of the manifest over everything that was sent of one function.

    Args:
        models: whose watermarks the destination must find.
    """
    statement = Manifest(
        **_common(services, move, part, _MANIFEST_S),  # type: ignore[arg-type]
        chunks=part.tree.size,
        payload_bytes=part.payload_bytes,
        root=part.tree.root(),
        digest=part.status_digest,
        firmware=documents.manifest_firmware(part.frame),
        models=tuple(models),
    )
    payload = manifests.encode(statement)
    envelope = envelopes.sign(MANIFEST_TYPE, payload, [services.keys.identity]).encode()
    return envelope, manifest_digest(payload)


def token(migration: bytes, parts: Sequence[wire.Part]) -> bytes:
    """What travels inside QEMU's own stream: which seal the destination must have."""
    return canonical.encode(
        {
            "version": 1,
            "migration": migration,
            "parts": {part.function: part.digest for part in parts},
        }
    )


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token, taken apart."""

    version: int
    migration: bytes
    parts: dict[str, bytes]


def read_token(data: bytes) -> Token:
    """Raises DataError ``token``: it is none of ours, or was changed."""
    try:
        value = canonical.decode(data, max_bytes=LIMITS.manifest_bytes)
        found = msgspec.convert(value, Token, builtin_types=(bytes,))
    except (DataError, msgspec.ValidationError) as error:
        raise DataError(
            f"what QEMU's stream brings is no token of accelvisor: {error}",
            code="token",
            where="migration",
        ) from error
    if found.version != 1:
        raise DataError(
            f"the token is of version {found.version}", code="token", where="migration"
        )
    return found
