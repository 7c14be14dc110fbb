"""Who a host is: an Ed25519 key that signs (frames, offers, TLS) and an X25519 key that opens what
was sealed for it.

Values only: entropy, time and serial numbers are arguments, and where the PEM text is kept (0600)
is the daemon's business. A key is named by its key id: the first 32 hex digits of the SHA-256 of
its public bytes. Ed25519 is RFC 8032, X25519 is RFC 7748, the certificate is RFC 5280.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from accelvisor.errors import DataError
from accelvisor.limits import LIMITS

#: The only signature algorithm so far; a key carries its name, a message cannot choose.
ED25519 = "ed25519"
KEY_BYTES = 32
KEY_ID_CHARS = 32

_WHERE = "identity"
_BLOCK = re.compile(rb"-----BEGIN PRIVATE KEY-----\n.+?-----END PRIVATE KEY-----\n", re.DOTALL)


def key_id(public: bytes) -> str:
    """The name of a public key of any algorithm, from its raw bytes."""
    return hashlib.sha256(public).hexdigest()[:KEY_ID_CHARS]


class Signer(Protocol):
    """Whatever can sign: an :class:`Identity`, or a key that lives in hardware."""

    @property
    def key_id(self) -> str: ...

    @property
    def algorithm(self) -> str: ...

    def sign(self, message: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True)
class PublicIdentity:
    """What others know of a host's keys.

    Args:
        signing: raw Ed25519 public key, 32 bytes.
        sealing: raw X25519 public key, 32 bytes.
    """

    signing: bytes
    sealing: bytes

    @property
    def key_id(self) -> str:
        return key_id(self.signing)

    @property
    def sealing_id(self) -> str:
        return key_id(self.sealing)

    @property
    def algorithm(self) -> str:
        return ED25519


class SigningKey:
    """One Ed25519 private key: a root key of the trust document, or half of an identity."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @classmethod
    def generate(cls, entropy: Callable[[int], bytes]) -> SigningKey:
        """``entropy(32)`` must be unguessable: ``os.urandom``."""
        return cls(Ed25519PrivateKey.from_private_bytes(entropy(KEY_BYTES)))

    @property
    def key_id(self) -> str:
        return key_id(self.public)

    @property
    def algorithm(self) -> str:
        return ED25519

    @property
    def private(self) -> Ed25519PrivateKey:
        return self._private

    def sign(self, message: bytes) -> bytes:
        """64 bytes, the same for the same message."""
        return self._private.sign(message)

    def to_pem(self) -> bytes:
        """Unencrypted PKCS #8: keep it 0600."""
        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @classmethod
    def from_pem(cls, data: bytes) -> SigningKey:
        """Raises DataError ``identity-damaged``."""
        [key] = _load(data, 1)
        if not isinstance(key, Ed25519PrivateKey):
            raise _damaged("it is no Ed25519 key")
        return cls(key)

    def __repr__(self) -> str:
        return f"<SigningKey {self.key_id}>"


class Identity(SigningKey):
    """A host's two private keys. Is a :class:`Signer`; shows no secret in its ``repr``."""

    def __init__(self, private: Ed25519PrivateKey, sealing: X25519PrivateKey) -> None:
        super().__init__(private)
        self._sealing = sealing
        self._public_identity = PublicIdentity(
            self.public, sealing.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        )

    @classmethod
    def generate(cls, entropy: Callable[[int], bytes]) -> Identity:
        """``entropy(32)`` is asked twice and must be unguessable: ``os.urandom``."""
        return cls(
            Ed25519PrivateKey.from_private_bytes(entropy(KEY_BYTES)),
            X25519PrivateKey.from_private_bytes(entropy(KEY_BYTES)),
        )

    @property
    def public_identity(self) -> PublicIdentity:
        return self._public_identity

    @property
    def sealing(self) -> X25519PrivateKey:
        return self._sealing

    def to_pem(self) -> bytes:
        """Two unencrypted PKCS #8 blocks, the signing key first (what OpenSSL reads): keep it
        0600.
        """
        return super().to_pem() + self._sealing.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )

    @classmethod
    def from_pem(cls, data: bytes) -> Identity:
        """Raises DataError ``identity-damaged``."""
        signing, sealing = _load(data, 2)
        if not isinstance(signing, Ed25519PrivateKey):
            raise _damaged("its first key is no Ed25519 key")
        if not isinstance(sealing, X25519PrivateKey):
            raise _damaged("its second key is no X25519 key")
        return cls(signing, sealing)

    def __repr__(self) -> str:
        return f"<Identity {self.key_id}>"


def certificate(
    identity: SigningKey, host: UUID, *, serial: int, not_before_ns: int, not_after_ns: int
) -> bytes:
    """A certificate (PEM) for mutual TLS, signed with the key that it carries. It only carries the
    key: whoever meets it compares :func:`certificate_key` with the trust document and believes
    nothing else in it.

    Its issuer is the key id, not the subject: OpenSSL takes a self-issued certificate only when it
    has that very certificate, and a trust document has keys (:func:`anchor`).

    Args:
        serial: positive, below 2**159.
        not_before_ns: and ``not_after_ns``, nanoseconds since 1970, cut to whole seconds.
    """
    public = identity.private.public_key()
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(str(host)))
        .issuer_name(_name(identity.key_id))
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(_time(not_before_ns))
        .not_valid_after(_time(not_after_ns))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"urn:uuid:{host}")]),
            critical=False,
        )
    )
    return builder.sign(identity.private, None).public_bytes(Encoding.PEM)


def anchor(public: bytes) -> bytes:
    """What OpenSSL needs (PEM) to take a :func:`certificate` of this raw Ed25519 public key.

    Made by whoever trusts the key, for itself. Nobody checks the signature of a trust anchor
    (RFC 5280, 6.1.1 d), so it is made with a key that the whole world has.

    Raises:
        DataError: ``identity-damaged``, it is no Ed25519 public key.
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(public)
    except ValueError as error:
        raise _damaged("it is no Ed25519 public key") from error
    name = _name(key_id(public))
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key)
        .serial_number(1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
    nobody = Ed25519PrivateKey.from_private_bytes(bytes(KEY_BYTES))
    return builder.sign(nobody, None).public_bytes(Encoding.PEM)


def certificate_key(der: bytes) -> bytes:
    """The raw Ed25519 public key of a certificate (DER, as ``getpeercert(True)`` gives it).

    Raises:
        DataError: ``identity-certificate``, it is no certificate of an Ed25519 key.
    """
    try:
        public = x509.load_der_x509_certificate(der).public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _certificate("it cannot be read") from error
    if not isinstance(public, Ed25519PublicKey):
        raise _certificate("it is not of an Ed25519 key")
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw)


def sealing_public(raw: bytes) -> X25519PublicKey:
    """From 32 raw bytes. Raises DataError ``identity-damaged``."""
    try:
        return X25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise _damaged("it is no X25519 public key") from error


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _time(nanoseconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(nanoseconds // 1_000_000_000, datetime.UTC)


def _load(data: bytes, count: int) -> list[object]:
    """The private keys of a PEM text that holds exactly ``count`` of them."""
    blocks = _BLOCK.findall(data) if len(data) <= LIMITS.identity_bytes else []
    if len(blocks) != count or b"".join(blocks) != data:
        raise _damaged(f"it does not hold exactly {count} private keys")
    try:
        return [load_pem_private_key(block, None) for block in blocks]
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _damaged("a private key cannot be read") from error


def _damaged(why: str) -> DataError:
    return DataError(
        f"the identity's keys are damaged: {why}",
        code="identity-damaged",
        where=_WHERE,
        hint="restore the file from a backup, or make a new identity and have it trusted again",
    )


def _certificate(why: str) -> DataError:
    return DataError(
        f"the peer's certificate is not usable: {why}",
        code="identity-certificate",
        where=_WHERE,
        hint="the peer must show the certificate that accelvisord made for it",
    )
