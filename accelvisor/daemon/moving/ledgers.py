"""Which ledger a host has, as its configuration says."""

from __future__ import annotations

import ssl
import time
from functools import partial

from accelvisor.daemon.config import LedgerConfig
from accelvisor.daemon.etcd import EtcdClient
from accelvisor.daemon.ledger_etcd import EtcdLedger
from accelvisor.daemon.ledger_seen import Seen
from accelvisor.daemon.ledger_sqlite import SqliteLedger
from accelvisor.daemon.moving.keys import Keys
from accelvisor.daemon.moving.owners import Arbiter, KeySigner, judge
from accelvisor.daemon.paths import Paths
from accelvisor.errors import ConfigError


def make(
    config: LedgerConfig, paths: Paths, keys: Keys
) -> tuple[SqliteLedger | EtcdLedger, Arbiter]:
    """The ledger, and who decides about the moves that begin here.

    Raises:
        ConfigError: ``ledger-endpoint``, ``ledger-tls``.
        StateError, UnavailableError: this host's own file.
    """
    signer, host = KeySigner(keys), str(keys.host)
    if config.kind == "local":
        return SqliteLedger(paths.state / "ledger.db", host, signer, time.time_ns), "source"
    client = EtcdClient(config.endpoints, tls=context(config))
    # Whoever may write to etcd is not for that one of us: a record counts by its signature, and by
    # what came before it.
    seen = Seen(paths.state / "ledger-seen.db")
    return EtcdLedger(client, host, signer, time.time_ns, partial(judge, keys), seen), "etcd"


def context(config: LedgerConfig) -> ssl.SSLContext | None:
    """Whom of etcd this host trusts, and what it shows; None where no endpoint is https.

    Raises:
        ConfigError: ``ledger-tls``.
    """
    if not any(text.startswith("https:") for text in config.endpoints):
        return None
    try:
        made = ssl.create_default_context(cafile=config.ca or None)
        if config.certificate:
            made.load_cert_chain(config.certificate, config.key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificates for etcd cannot be used: {error}",
            code="ledger-tls",
            where="config:[ledger]",
            hint="ca, certificate and key are PEM files that accelvisord's user may read",
        ) from error
    return made
