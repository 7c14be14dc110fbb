"""Mutual TLS 1.3 between hosts, by pinned keys.

A host trusts keys of its trust document and nothing else: no name, no authority, no date of a
certificate. OpenSSL wants certificates, so each pinned key gets a trust anchor
(``frames.identity.anchor``); after the handshake the key in the peer's certificate says which host
it is. Revoked and replaced keys get an anchor too, so that their host is refused by name and not
as a stranger. There is no session resumption: it would let a peer in without a look at its key.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from accelvisor.errors import AccelvisorError, PermissionDenied, ProtocolError
from accelvisor.frames.identity import Identity, anchor, certificate_key, key_id

_WHERE = "peer"


@dataclass(frozen=True, slots=True)
class Pin:
    """One key of one host.

    Args:
        host: whose.
        public: raw Ed25519 public key, 32 bytes.
        revoked: it was taken back; a retiring key is not.
        not_after_ns: since 1970, from when on it counts no more; 0 for no end.
    """

    host: UUID
    public: bytes
    revoked: bool = False
    not_after_ns: int = 0

    def over(self, now_ns: int) -> bool:
        """Whether the key's time has ended."""
        return bool(self.not_after_ns) and now_ns >= self.not_after_ns


class Connected(Protocol):
    """A connection that stands on a key."""

    @property
    def key(self) -> bytes | None: ...

    def cut(self, error: AccelvisorError) -> None:
        """End it now; may be called from any thread."""


class Pins:
    """Whom we let in. Immutable, but what it answers changes as the time of keys ends."""

    def __init__(
        self, pins: Iterable[Pin] = (), *, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._clock_ns = clock_ns
        self._pins: dict[bytes, Pin] = {}
        for pin in pins:
            known = self._pins.get(pin.public)
            # A key that was revoked anywhere is revoked.
            if known is None or pin.revoked:
                self._pins[pin.public] = pin

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def host_of(self, public: bytes, expected: UUID | None = None) -> UUID:
        """The host that a key belongs to.

        Raises:
            PermissionDenied: ``peer-unknown``, ``peer-revoked``, ``peer-expired``, or
                ``peer-wrong-host`` when it is not ``expected``.
        """
        pin = self._pins.get(public)
        if pin is None:
            raise unknown(key_id(public))
        if pin.revoked:
            raise PermissionDenied(
                f"the key {key_id(public)} of host {pin.host} is revoked",
                code="peer-revoked",
                where=_WHERE,
                hint="if that host is yours, let it join again with a new key",
            )
        if pin.over(self._clock_ns()):
            raise PermissionDenied(
                f"the key {key_id(public)} of host {pin.host} was replaced and counts no more",
                code="peer-expired",
                where=_WHERE,
                hint="that host shows a key that it gave up: let it join again",
            )
        if expected is not None and pin.host != expected:
            raise PermissionDenied(
                f"host {pin.host} answered where {expected} was expected",
                code="peer-wrong-host",
                where=_WHERE,
                hint="the address may have been given to another host: accelctl trust show",
            )
        return pin.host

    def next_end(self) -> int | None:
        """When the time of a key ends next, in ns since 1970; None when all stay as they are."""
        now = self._clock_ns()
        ends = [pin.not_after_ns for pin in self if pin.not_after_ns and not pin.over(now)]
        return min(ends, default=None)

    def anchors(self) -> str:
        return "".join(anchor(public).decode() for public in self._pins)


def unknown(which: str) -> PermissionDenied:
    return PermissionDenied(
        f"the peer's key ({which}) is none that this host trusts",
        code="peer-unknown",
        where=_WHERE,
        hint="let the two hosts join: accelctl trust invite there, accelctl trust join here",
    )


class Credentials:
    """Who we are and whom we let in, now: makes the contexts of each connection.

    Args:
        host: our UUID.
        identity: our keys.
        certificate: PEM of ``frames.identity.certificate``.
        pins: whom we let in; :meth:`trust` changes it.
    """

    def __init__(self, host: UUID, identity: Identity, certificate: bytes, pins: Pins) -> None:
        self.host = host
        self.identity = identity
        self.certificate = certificate
        self._pins = pins
        self._lock = threading.Lock()
        self._connected: weakref.WeakSet[Connected] = weakref.WeakSet()
        self._made: dict[tuple[bool, bool], ssl.SSLContext] = {}

    @property
    def pins(self) -> Pins:
        return self._pins

    def trust(self, pins: Pins) -> None:
        """From now on this is whom we let in. Connections that stand on a key which is not good any
        more are cut.
        """
        with self._lock:
            self._pins = pins
            self._made.clear()
        self.judge()

    def judge(self) -> None:
        """The time of a key is over: connections that stand on it are cut."""
        with self._lock:
            connected = list(self._connected)
        for each in connected:
            self._judge(each)

    def renew(self, identity: Identity, certificate: bytes) -> None:
        """Show another key from the next connection on."""
        with self._lock:
            self.identity, self.certificate = identity, certificate
            self._made.clear()

    def hold(self, connection: Connected) -> None:
        """Have ``connection`` cut when its key is not good any more."""
        with self._lock:
            self._connected.add(connection)
        # The trust may have changed since its handshake.
        self._judge(connection)

    def _judge(self, connection: Connected) -> None:
        key = connection.key
        if key is None:
            return
        try:
            self._pins.host_of(key)
        except PermissionDenied as error:
            connection.cut(error)

    def context(self, *, server: bool, anybody: bool = False) -> ssl.SSLContext:
        """TLS 1.3, both sides show a certificate.

        Args:
            server: the side that was connected to.
            anybody: let in whoever it is: only for joining, which proves more by itself.
        """
        with self._lock:
            made = self._made.get((server, anybody))
            if made is None:
                made = self._made[server, anybody] = self._make(server, anybody)
            return made

    def _make(self, server: bool, anybody: bool) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = made.maximum_version = ssl.TLSVersion.TLSv1_3
        made.check_hostname = False
        if server:
            made.num_tickets = 0
        made.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        # OpenSSL reads keys from files only; this one is gone with its descriptor.
        with os.fdopen(os.memfd_create("identity"), "wb") as file:
            file.write(self.certificate + self.identity.to_pem())
            file.flush()
            made.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        if anybody:
            made.verify_mode = ssl.CERT_NONE
        else:
            made.verify_mode = ssl.CERT_REQUIRED
            anchors = self._pins.anchors()
            if anchors:
                made.load_verify_locations(cadata=anchors)
        return made

    def peer_key(self, der: bytes | None) -> bytes:
        """The key in a peer's certificate, as ``getpeercert(True)`` gives it."""
        if not der:
            raise unknown("none")
        return certificate_key(der)


def refusal(error: Exception, address: object) -> AccelvisorError:
    """What an error of a handshake means to us."""
    if isinstance(error, AccelvisorError):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        return unknown(f"at {address}")
    reason = (getattr(error, "reason", None) or "").upper()
    if "ALERT" in reason and ("UNKNOWN_CA" in reason or "CERTIFICATE" in reason):
        return PermissionDenied(
            f"the peer at {address} does not trust this host",
            code="peer-refused",
            where=_WHERE,
            hint="let the two hosts join; if they had, look whether this host's key was revoked",
        )
    return ProtocolError(
        f"no TLS 1.3 with {address}: {error or type(error).__name__}",
        code="peer-tls",
        where=_WHERE,
        hint="is it an accelvisord that listens there?",
    )
