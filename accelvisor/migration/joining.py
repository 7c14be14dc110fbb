"""Two hosts come to know each other's keys, with one command on each.

``accelctl trust invite`` on A prints a code: A's address, host UUID, the fingerprint of its key, a
one-time secret and when it ends. ``accelctl trust join CODE`` on B connects over TLS, looks whether
A's key has that fingerprint, and proves that it has the secret without sending it:

    B -> A  hello: B's host UUID, public keys, nonce
    A -> B  challenge: A's public keys, nonce
    B -> A  proof: HMAC(secret, "join-b" || transcript), signature over the same by B's key
    A -> B  welcome: HMAC(secret, "join-a" || transcript), signature by A's key

The transcript has both UUIDs, all four public keys and both nonces, so whoever sits in the middle
with another key makes another transcript and has no secret for it. HMAC-SHA-256 is RFC 2104. The
secret has 128 bits, so a listener cannot guess it from an HMAC either.

Sans-IO: :class:`Inviter` and :class:`Joiner` take and give messages; ``joining_io`` moves them.
What the two learn goes to the caller, which puts it into its trust document.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar
from uuid import UUID

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from accelvisor.errors import PermissionDenied, ProtocolError, UsageError
from accelvisor.frames.identity import KEY_BYTES, Identity, PublicIdentity
from accelvisor.limits import LIMITS, Limits

SECRET_BYTES = 16
NONCE_BYTES = 16
_WHERE = "join"
_PREFIX = "avjoin1."
_FIXED = struct.Struct(">16s32s16sQH")
_CONTEXT = b"accelvisor join 1\x00"
M = TypeVar("M", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Code:
    """What one screen shows and the other host is told.

    Args:
        address: host name or IP address of A.
        port: of its accelvisord.
        host: A's UUID.
        fingerprint: SHA-256 of A's raw Ed25519 public key.
        secret: 16 random bytes.
        expires_s: seconds since 1970.
    """

    address: str
    port: int
    host: UUID
    fingerprint: bytes
    secret: bytes
    expires_s: int

    def __str__(self) -> str:
        body = _FIXED.pack(
            self.host.bytes, self.fingerprint, self.secret, self.expires_s, self.port
        )
        raw = body + self.address.encode()
        # A few wrong characters must not look like an unknown host.
        raw += hashlib.sha256(raw).digest()[:4]
        return _PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")

    def __repr__(self) -> str:
        return f"<Code of host {self.host}>"

    @classmethod
    def parse(cls, text: str) -> Code:
        """Raises UsageError ``join-code``."""
        text = "".join(text.split())
        body = text.removeprefix(_PREFIX)
        try:
            if body == text or len(body) > 1024:
                raise ValueError
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            raw, check = raw[:-4], raw[-4:]
            if not hmac.compare_digest(hashlib.sha256(raw).digest()[:4], check):
                raise ValueError
            host, fingerprint, secret, expires_s, port = _FIXED.unpack_from(raw)
            address = raw[_FIXED.size :].decode("ascii")
            if not address or not address.isprintable():
                raise ValueError
        except (ValueError, struct.error):
            raise UsageError(
                "this is no join code, or a part of one",
                code="join-code",
                where=_WHERE,
                hint="copy all that accelctl trust invite printed",
            ) from None
        return cls(address, port, UUID(bytes=host), fingerprint, secret, expires_s)


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host's UUID and public keys, its name, and where it listens (host:port; with an empty host
    the other side knows better: it sees where the connection comes from).
    """

    host: UUID
    signing: bytes
    sealing: bytes
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    address: Annotated[str, msgspec.Meta(max_length=128)] = ""

    @property
    def identity(self) -> PublicIdentity:
        return PublicIdentity(self.signing, self.sealing)

    @classmethod
    def of(
        cls, host: UUID, identity: PublicIdentity, name: str = "", address: str = ""
    ) -> Card:
        return cls(host, identity.signing, identity.sealing, name, address)

    def digest(self) -> bytes:
        """32 bytes that stand for all of it."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    card: Card
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="challenge"):
    card: Card
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="proof"):
    mac: bytes
    signature: bytes


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    mac: bytes
    signature: bytes


def _decode(data: bytes, kind: type[M]) -> M:
    try:
        message = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _message(str(error)) from error
    if isinstance(message, Hello | Challenge):
        card = message.card
        if len(card.signing) != KEY_BYTES or len(card.sealing) != KEY_BYTES:
            raise _message("its keys have another length")
        if len(message.nonce) != NONCE_BYTES:
            raise _message("its nonce has another length")
    return message


class _Transcript:
    """What both sides saw; all fields have fixed lengths, so there is one way to read it."""

    def __init__(self, inviter: Challenge, joiner: Hello) -> None:
        parts = [
            part
            for side in (inviter, joiner)
            for part in (side.card.digest(), side.nonce)
        ]
        self._bytes = _CONTEXT + b"".join(parts)

    def mac(self, secret: bytes, role: bytes) -> bytes:
        return hmac.digest(secret, role + self._bytes, "sha256")

    def signed(self, role: bytes) -> bytes:
        return role + self._bytes


_A, _B = b"join-a\x00", b"join-b\x00"


def _genuine(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


class Invitation:
    """A's side of one code: what is left of it. Kept while the code is good.

    Args:
        code: what was printed.
        now_s: seconds since 1970, of each attempt.
    """

    def __init__(self, code: Code, *, limits: Limits = LIMITS) -> None:
        self.code = code
        self._left = limits.join_attempts
        self._used = False

    @property
    def open(self) -> bool:
        return self._left > 0 and not self._used

    def look(self, now_s: float) -> None:
        """Raises PermissionDenied ``join-refused`` when nobody may join any more."""
        if not self.open or now_s >= self.code.expires_s:
            raise _refused()

    def attempt(self) -> None:
        """A proof is about to be judged: count it, whatever comes of it."""
        if not self.open:
            raise _refused()
        self._left -= 1

    def use(self) -> None:
        """The right secret was proven: nobody else may, not even one that began before."""
        if self._used:
            raise _refused()
        self._used = True


class Inviter:
    """A's side of one connection."""

    def __init__(
        self,
        invitation: Invitation,
        identity: Identity,
        *,
        entropy: Callable[[int], bytes],
        now_s: float,
        name: str = "",
        address: str = "",
    ) -> None:
        invitation.look(now_s)
        self._about = name, address
        self._invitation = invitation
        self._identity = identity
        self._nonce = entropy(NONCE_BYTES)
        self._hello: Hello | None = None
        self._transcript: _Transcript | None = None

    def challenge(self, hello: bytes) -> bytes:
        """From B's first message to our answer; raises ProtocolError ``join-message``."""
        self._hello = _decode(hello, Hello)
        code = self._invitation.code
        card = Card.of(code.host, self._identity.public_identity, *self._about)
        mine = Challenge(card, self._nonce)
        if self._hello.card.host == code.host or self._hello.card.signing == card.signing:
            raise _message("a host cannot join itself")
        self._transcript = _Transcript(mine, self._hello)
        return msgspec.msgpack.encode(mine)

    def welcome(self, proof: bytes) -> tuple[bytes, Card]:
        """From B's proof to our last message and whom to trust from now on.

        Raises:
            PermissionDenied: ``join-refused``.
            ProtocolError: ``join-message``.
        """
        if self._transcript is None or self._hello is None:
            raise _message("a proof came first")
        theirs = _decode(proof, Proof)
        self._invitation.attempt()
        transcript, self._transcript = self._transcript, None
        secret = self._invitation.code.secret
        right = hmac.compare_digest(theirs.mac, transcript.mac(secret, _B))
        if not right or not _genuine(
            self._hello.card.signing, theirs.signature, transcript.signed(_B)
        ):
            raise _refused()
        self._invitation.use()
        mine = Welcome(transcript.mac(secret, _A), self._identity.sign(transcript.signed(_A)))
        return msgspec.msgpack.encode(mine), self._hello.card


class Joiner:
    """B's side.

    Args:
        code: what the operator gave.
        host: our UUID.
        server_key: the public key that TLS showed.

    Raises:
        PermissionDenied: ``join-fingerprint``, ``join-refused`` (it has expired by our clock).
    """

    def __init__(
        self,
        code: Code,
        host: UUID,
        identity: Identity,
        *,
        server_key: bytes,
        entropy: Callable[[int], bytes],
        now_s: float,
        name: str = "",
        address: str = "",
    ) -> None:
        if not hmac.compare_digest(hashlib.sha256(server_key).digest(), code.fingerprint):
            raise _fingerprint(code)
        if now_s >= code.expires_s:
            raise _refused()
        self._code = code
        self._identity = identity
        card = Card.of(host, identity.public_identity, name, address)
        self._hello = Hello(card, entropy(NONCE_BYTES))
        self._transcript: _Transcript | None = None
        self._card: Card | None = None

    def hello(self) -> bytes:
        return msgspec.msgpack.encode(self._hello)

    @property
    def other(self) -> Card:
        """Who answered, after :meth:`proof`; that it has the code, too, is seen in the end."""
        if self._card is None:
            raise _message("there was no challenge")
        return self._card

    def proof(self, challenge: bytes) -> bytes:
        """Raises ProtocolError ``join-message``, PermissionDenied ``join-fingerprint``."""
        theirs = _decode(challenge, Challenge)
        same = hashlib.sha256(theirs.card.signing).digest() == self._code.fingerprint
        if not same or theirs.card.host != self._code.host:
            raise _fingerprint(self._code)
        self._card = theirs.card
        self._transcript = _Transcript(theirs, self._hello)
        signature = self._identity.sign(self._transcript.signed(_B))
        mac = self._transcript.mac(self._code.secret, _B)
        return msgspec.msgpack.encode(Proof(mac, signature))

    def finish(self, welcome: bytes) -> Card:
        """Whom to trust from now on; raises ProtocolError, PermissionDenied ``join-refused``."""
        if self._transcript is None or self._card is None:
            raise _message("a welcome came first")
        theirs = _decode(welcome, Welcome)
        right = hmac.compare_digest(theirs.mac, self._transcript.mac(self._code.secret, _A))
        if not right or not _genuine(
            self._card.signing, theirs.signature, self._transcript.signed(_A)
        ):
            raise _refused()
        return self._card


def invite(
    address: str,
    port: int,
    host: UUID,
    identity: Identity,
    *,
    entropy: Callable[[int], bytes],
    now_s: float,
    limits: Limits = LIMITS,
) -> Invitation:
    """A new code, good for ``LIMITS.join_code_s``."""
    fingerprint = hashlib.sha256(identity.public).digest()
    expires_s = int(now_s + limits.join_code_s)
    code = Code(address, port, host, fingerprint, entropy(SECRET_BYTES), expires_s)
    return Invitation(code, limits=limits)


def _message(why: str) -> ProtocolError:
    return ProtocolError(
        f"a message of joining is wrong: {why}", code="join-message", where=_WHERE
    )


def _fingerprint(code: Code) -> PermissionDenied:
    return PermissionDenied(
        f"who answers at {code.address} port {code.port} is not the host that made the code",
        code="join-fingerprint",
        where=_WHERE,
        hint="somebody may be in between; if that host has a new key, make a new code there",
    )


def _refused() -> PermissionDenied:
    return PermissionDenied(
        "the join code is wrong, used or too old",
        code="join-refused",
        where=_WHERE,
        hint="make a new one with accelctl trust invite on the other host",
    )
