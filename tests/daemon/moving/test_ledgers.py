"""The ledger that the configuration names; an etcd that wants certificates, and shows its own."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from accelvisor.daemon.config import LedgerConfig
from accelvisor.daemon.etcd import EtcdClient, Range
from accelvisor.daemon.moving import ledgers
from accelvisor.errors import ConfigError, UnavailableError
from tests.daemon.private_etcd import PrivateEtcd, private_etcd


class Authority:
    """Signs certificates, all of them for 127.0.0.1."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name)
        limits = x509.BasicConstraints(ca=True, path_length=0)
        made = _unsigned(subject, subject, self._key).add_extension(limits, critical=True)
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def sign(self, name: str) -> tuple[str, str]:
        """Files of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = _unsigned(_subject(name), _subject(self._name), key).add_extension(here, False)
        certificate, file = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.write_bytes(
            made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
        )
        file.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        return str(certificate), str(file)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, name)])


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
    )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PrivateEtcd, LedgerConfig]]:
    """An etcd that lets in whom its authority knows, and the configuration of one it does."""
    path = tmp_path_factory.mktemp("tls")
    authority = Authority(path, "authority")
    certificate, key = authority.sign("etcd")
    theirs, their_key = authority.sign("host")
    arguments = (
        f"--cert-file={certificate}", f"--key-file={key}", "--client-cert-auth",
        f"--trusted-ca-file={authority.path}",
    )  # fmt: skip
    config = LedgerConfig("etcd", ("https://x:1",), str(authority.path), theirs, their_key)
    context = ledgers.context(config)
    assert context is not None
    with private_etcd(path, (arguments, context)) as etcd:
        yield etcd, config


def asked(etcd: PrivateEtcd, config: LedgerConfig) -> bool:
    client = EtcdClient([etcd.url], tls=ledgers.context(config))
    return client.swap({b"/tls": 0}, {b"/tls": b"value"}) or bool(client.read([Range(b"/tls")]))


def test_both_sides_show_certificates(fleet: tuple[PrivateEtcd, LedgerConfig]) -> None:
    assert asked(*fleet)


def test_a_host_without_a_certificate_is_not_let_in(
    fleet: tuple[PrivateEtcd, LedgerConfig],
) -> None:
    etcd, config = fleet
    with pytest.raises(UnavailableError):
        asked(etcd, LedgerConfig(config.kind, config.endpoints, config.ca))


def test_an_etcd_of_another_authority_is_not_asked(
    fleet: tuple[PrivateEtcd, LedgerConfig], tmp_path: Path
) -> None:
    etcd, config = fleet
    other = str(Authority(tmp_path, "other").path)
    with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        asked(
            etcd,
            LedgerConfig(config.kind, config.endpoints, other, config.certificate, config.key),
        )


def test_certificates_that_are_none_are_said_so() -> None:
    with pytest.raises(ConfigError) as caught:
        ledgers.context(LedgerConfig("etcd", ("https://x:1",), "/nowhere.pem"))
    assert caught.value.code == "ledger-tls"
