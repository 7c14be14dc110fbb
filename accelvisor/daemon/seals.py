"""What a host signs for itself and later believes again: scrub records, partition tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from accelvisor.errors import DataError
from accelvisor.frames import canonical, envelope
from accelvisor.frames.envelope import HeldKey
from accelvisor.frames.identity import Signer
from accelvisor.limits import MIB

#: A table of 16 partitions, or a record of 256 cores, is some tens of kilobytes.
_MOST_BYTES = MIB


class Seal(Protocol):
    """The host's key: signs, and knows which keys it had before."""

    @property
    def signer(self) -> Signer: ...

    def key(self, key_id: str) -> HeldKey | None: ...


def signed(seal: Seal, kind: str, document: Mapping[str, Any]) -> bytes:
    """An envelope of type ``kind`` around the document."""
    payload = canonical.encode(document)
    return envelope.sign(kind, payload, [seal.signer]).encode()


def opened(seal: Seal | None, kind: str, data: bytes) -> dict[str, Any]:
    """The document of an envelope that this host signed, now or with a key that it had.

    Raises:
        DataError: it is no such envelope.
        SignatureError: its signature is not one of this host's; without a seal none is.
    """
    sealed = envelope.decode(data, kind=kind, max_bytes=_MOST_BYTES)
    keys: dict[str, HeldKey] = {}
    for signature in sealed.signatures:
        found = seal.key(signature.key_id) if seal is not None else None
        if found is not None:
            keys[signature.key_id] = found
    envelope.verify(sealed, keys, 1)
    document = canonical.decode(sealed.payload, max_bytes=_MOST_BYTES)
    if not isinstance(document, dict):
        raise DataError("what was signed is no map", code="document-invalid", where="seals")
    return document
