"""A signed payload, after DSSE (Dead Simple Signing Envelope, github.com/secure-systems-lab/dsse).

What is signed says what it is: the payload's type is inside the signature, so a ledger record can
never pass for a manifest. The algorithm is a property of the key that the verifier knows; what a
message claims is compared with it and decides nothing, so there is nothing to downgrade to.

Every signature of an envelope must be right, not just enough of them: so no byte of one can be
changed unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from accelvisor.errors import DataError
from accelvisor.frames import canonical
from accelvisor.frames.identity import ED25519, KEY_ID_CHARS, Signer, key_id
from accelvisor.limits import KIB, LIMITS

_PREFIX = b"AVSEv1"
#: A type and 16 signatures of 150 bytes each are well below this.
_OVERHEAD_BYTES = 4 * KIB
_TYPE_CHARS = 128


class PublicKey(Protocol):
    """What a verifier must know of a key. ``holder`` is whose it is: a threshold counts holders,
    since who steals one key of a host has its others too.
    """

    @property
    def key_id(self) -> str: ...

    @property
    def algorithm(self) -> str: ...

    @property
    def public(self) -> bytes: ...

    @property
    def holder(self) -> str: ...


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A public key of which nothing else is known. Is a :class:`PublicKey`."""

    holder: str
    public: bytes
    algorithm: str = ED25519

    @property
    def key_id(self) -> str:
        return key_id(self.public)


@dataclass(frozen=True, slots=True)
class Signature:
    key_id: str
    algorithm: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload, what it is, and who signed it; signatures in the order of their key ids."""

    type: str
    payload: bytes
    signatures: tuple[Signature, ...]

    def encode(self) -> bytes:
        return canonical.encode(
            {
                "type": self.type,
                "payload": self.payload,
                "signatures": [[s.key_id, s.algorithm, s.value] for s in self.signatures],
            }
        )


class SignatureError(Exception):
    """A signature is not right. :attr:`kind` is ``signature`` or ``threshold``; the caller knows
    which code that is for what it verifies.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _ed25519(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


#: algorithm -> (public key, signature, message) -> is it right. Registered here or not at all.
ALGORITHMS: Mapping[str, Callable[[bytes, bytes, bytes], bool]] = MappingProxyType(
    {ED25519: _ed25519}
)


def pre_authentication(kind: str, payload: bytes) -> bytes:
    """The bytes that are signed: the lengths make every split of type and payload different."""
    name = kind.encode()
    return b"%s %d %s %d %s" % (_PREFIX, len(name), name, len(payload), payload)


def sign(kind: str, payload: bytes, signers: Iterable[Signer]) -> Envelope:
    """``payload`` of type ``kind``, signed by each of ``signers``."""
    message = pre_authentication(kind, payload)
    made = {s.key_id: Signature(s.key_id, s.algorithm, s.sign(message)) for s in signers}
    return Envelope(kind, payload, tuple(made[name] for name in sorted(made)))


def decode(data: bytes, *, kind: str, max_bytes: int) -> Envelope:
    """An envelope of type ``kind`` with a payload of at most ``max_bytes``. Nothing is verified.

    Raises:
        DataError: ``envelope-invalid`` or ``document-invalid``.
    """
    value = canonical.decode(data, max_bytes=max_bytes + _OVERHEAD_BYTES, max_values=128)
    if not isinstance(value, dict) or set(value) != {"payload", "signatures", "type"}:
        raise _invalid("it has other fields")
    found, payload, rows = value["type"], value["payload"], value["signatures"]
    if not isinstance(found, str) or len(found) > _TYPE_CHARS:
        raise _invalid("its type is no short text")
    if found != kind:
        raise _invalid(f"it is of type {found!r}, not {kind!r}")
    if not isinstance(payload, bytes) or len(payload) > max_bytes:
        raise _invalid(f"its payload is not at most {max_bytes} bytes")
    if not isinstance(rows, list) or not 1 <= len(rows) <= LIMITS.signatures:
        raise _invalid(f"it has not 1 to {LIMITS.signatures} signatures")
    signatures = tuple(_signature(row) for row in rows)
    names = [s.key_id for s in signatures]
    if any(a >= b for a, b in pairwise(names)):
        raise _invalid("its signatures are repeated or out of order")
    return Envelope(found, payload, signatures)


def _signature(row: object) -> Signature:
    if not isinstance(row, list) or len(row) != 3:
        raise _invalid("a signature has not three parts")
    name, algorithm, value = row
    if not isinstance(name, str) or len(name) != KEY_ID_CHARS:
        raise _invalid("a key id is not 32 characters")
    if not isinstance(algorithm, str) or not 1 <= len(algorithm) <= 32:
        raise _invalid("an algorithm is no short text")
    if not isinstance(value, bytes) or not 1 <= len(value) <= 128:
        raise _invalid("a signature is not 1 to 128 bytes")
    return Signature(name, algorithm, value)


def verify(envelope: Envelope, keys: Mapping[str, PublicKey], threshold: int) -> frozenset[str]:
    """The holders that signed ``envelope``.

    Args:
        keys: the key of each signature, by key id.
        threshold: how many different holders must have signed.

    Raises:
        SignatureError: a signature is wrong, or the holders are too few.
    """
    message = pre_authentication(envelope.type, envelope.payload)
    holders: set[str] = set()
    for signature in envelope.signatures:
        key = keys.get(signature.key_id)
        if key is None:
            raise SignatureError("signature", f"key {signature.key_id} is not known")
        check = ALGORITHMS.get(key.algorithm)
        if check is None or signature.algorithm != key.algorithm:
            raise SignatureError(
                "signature",
                f"key {key.key_id} is {key.algorithm}, its signature says {signature.algorithm}",
            )
        if not check(key.public, signature.value, message):
            raise SignatureError("signature", f"the signature of key {key.key_id} is wrong")
        holders.add(key.holder)
    if len(holders) < threshold:
        raise SignatureError(
            "threshold", f"{len(holders)} signed it and {threshold} are needed"
        )
    return frozenset(holders)


def _invalid(why: str) -> DataError:
    return DataError(
        f"this is no signed envelope: {why}",
        code="envelope-invalid",
        where="frames",
        hint="it was damaged, or is something else",
    )
