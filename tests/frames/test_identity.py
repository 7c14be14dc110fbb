"""Host keys: names, PEM and back, the certificate in a real TLS handshake."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from uuid import UUID

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from accelvisor.errors import DataError
from accelvisor.frames.identity import (
    Identity,
    SigningKey,
    anchor,
    certificate,
    certificate_key,
    key_id,
    sealing_public,
)

HOST = UUID("0c5bc6b2-6f4d-4b0a-9d6c-1f2e3d4c5b6a")
YEAR_NS = 365 * 86_400 * 10**9
#: The handshake below wants a certificate that is valid today, whenever that is.
LONG = {"serial": 7, "not_before_ns": 0, "not_after_ns": 200 * YEAR_NS}


def test_key_id_is_half_of_the_public_keys_sha256_in_hex() -> None:
    # SHA-256 of nothing.
    assert key_id(b"") == "e3b0c44298fc1c149afbf4c8996fb924"


def test_pem_and_back_is_the_same_identity() -> None:
    made = Identity.generate(os.urandom)
    back = Identity.from_pem(made.to_pem())
    assert back.public_identity == made.public_identity
    assert back.sign(b"x") == made.sign(b"x")
    root = SigningKey.generate(os.urandom)
    assert SigningKey.from_pem(root.to_pem()).key_id == root.key_id


def test_same_entropy_same_keys() -> None:
    assert Identity.generate(bytes).key_id == Identity.generate(bytes).key_id


def damaged_texts() -> dict[str, bytes]:
    good = Identity.generate(os.urandom).to_pem()
    blocks = good.split(b"-----BEGIN")
    signing, sealing = b"-----BEGIN" + blocks[1], b"-----BEGIN" + blocks[2]
    other = generate_private_key(SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    return {
        "empty": b"",
        "one key": signing,
        "three keys": good + signing,
        "wrong order": sealing + signing,
        "twice the signing key": signing + signing,
        "another algorithm": other + sealing,
        "text before": b"\n" + good,
        "cut": good[:-2],
        "no base64": signing.replace(b"M", b"*") + sealing,
        "too long": good + b"\n" * 5000,
    }


@pytest.mark.parametrize("name", damaged_texts())
def test_damaged_pem_is_refused(name: str) -> None:
    with pytest.raises(DataError) as caught:
        Identity.from_pem(damaged_texts()[name])
    assert caught.value.code == "identity-damaged"


def test_a_sealing_key_is_no_signing_key() -> None:
    text = Identity.generate(os.urandom).to_pem()
    with pytest.raises(DataError, match="no Ed25519"):
        SigningKey.from_pem(b"-----BEGIN" + text.split(b"-----BEGIN")[2])


def test_repr_shows_no_secret() -> None:
    identity = Identity.generate(os.urandom)
    assert repr(identity) == f"<Identity {identity.key_id}>"


def test_certificate_carries_the_key_and_the_host() -> None:
    identity = Identity.generate(os.urandom)
    pem = certificate(identity, HOST, **LONG)
    parsed = x509.load_pem_x509_certificate(pem)
    assert certificate_key(ssl.PEM_cert_to_DER_cert(pem.decode())) == identity.public
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [f"urn:uuid:{HOST}"]
    assert parsed.serial_number == 7


def test_same_key_same_times_same_certificate() -> None:
    identity = Identity.generate(os.urandom)
    assert certificate(identity, HOST, **LONG) == certificate(identity, HOST, **LONG)


@pytest.mark.parametrize("der", [b"", b"\x30\x03\x02\x01\x01", os.urandom(300)])
def test_what_is_no_certificate_is_refused(der: bytes) -> None:
    with pytest.raises(DataError) as caught:
        certificate_key(der)
    assert caught.value.code == "identity-certificate"


@pytest.mark.parametrize("raw", [b"", bytes(31), bytes(33)])
def test_sealing_key_of_another_length_is_refused(raw: bytes) -> None:
    with pytest.raises(DataError):
        sealing_public(raw)


def test_what_is_no_key_has_no_anchor() -> None:
    with pytest.raises(DataError) as caught:
        anchor(bytes(31))
    assert caught.value.code == "identity-damaged"


def context(side: int, mine: Identity, theirs: Identity, folder: Path) -> ssl.SSLContext:
    """TLS 1.3 that trusts exactly one key, with OpenSSL's strict rules."""
    made = ssl.SSLContext(side)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    path = folder / mine.key_id
    path.write_bytes(certificate(mine, HOST, **LONG) + mine.to_pem())
    made.load_cert_chain(path)
    made.load_verify_locations(cadata=anchor(theirs.public).decode())
    return made


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ...]:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return ends


def test_certificates_serve_mutual_tls(tmp_path: Path) -> None:
    a, b = Identity.generate(os.urandom), Identity.generate(os.urandom)
    client = context(ssl.PROTOCOL_TLS_CLIENT, a, b, tmp_path)
    server = context(ssl.PROTOCOL_TLS_SERVER, b, a, tmp_path)
    near, far = handshake(client, server)
    assert certificate_key(near.getpeercert(True) or b"") == b.public
    assert certificate_key(far.getpeercert(True) or b"") == a.public
    assert near.version() == "TLSv1.3"


def test_tls_refuses_a_certificate_of_another_key(tmp_path: Path) -> None:
    a, b, thief = (Identity.generate(os.urandom) for _ in range(3))
    client = context(ssl.PROTOCOL_TLS_CLIENT, a, b, tmp_path)
    server = context(ssl.PROTOCOL_TLS_SERVER, thief, a, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, server)
