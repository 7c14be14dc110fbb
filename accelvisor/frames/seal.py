"""Sealing: payloads that only the audience can read.

A fresh X25519 key for each checkpoint, HKDF-SHA256 (RFC 5869), AES-256-GCM (NIST SP 800-38D).
Everything that names the checkpoint goes into the derivation, so a key fits exactly one. The nonce
of a chunk is its index: the key is fresh, indices never repeat (:class:`Sealer` sees to it), so no
pair of key and nonce is used twice. The chunk's header is authenticated with it.

The tree's leaves cover what is stored, that is the sealed bytes: they are verified first, and
nothing is decrypted before step 7 has passed. Chunks of zeros have no payload: that they are zeros
can be seen from outside.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from accelvisor.errors import CallerError, DataError
from accelvisor.frames import canonical
from accelvisor.frames.chunks import Buffer, Coding, Header
from accelvisor.frames.identity import key_id, sealing_public
from accelvisor.frames.manifest import Manifest, Offer, Seal

_LABEL = "accelvisor seal 1"
_KEY_BYTES = 32


class Sealer:
    """Encrypts the chunks of one checkpoint.

    Args:
        recipient: the audience's X25519 public key, 32 bytes.
        ephemeral: 32 fresh unguessable bytes (``os.urandom(32)``), for this checkpoint alone.
        function: UUIDs, as in the manifest: ``function``, ``source``, ``audience``.
        nonce: the manifest's.

    Raises:
        DataError: ``identity-damaged``, the recipient's key is none.
    """

    def __init__(
        self,
        recipient: bytes,
        ephemeral: bytes,
        *,
        function: str,
        source: str,
        audience: str,
        nonce: bytes,
    ) -> None:
        private = X25519PrivateKey.from_private_bytes(ephemeral)
        public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        #: What the manifest says about it.
        self.seal = Seal(ephemeral=public, recipient=key_id(recipient))
        shared = _exchange(private, recipient)
        self._aead = _key(shared, recipient, public, (function, source, audience), nonce)
        self._next = 0

    def seal_chunk(self, header: Header, payload: Buffer) -> Buffer:
        """The payload to store: 16 bytes longer, or none for a chunk of zeros.

        Raises:
            CallerError: ``seal-index``: an index was used before. What broke off is sent again as
                it was stored, never sealed again.
        """
        if header.index < self._next:
            raise CallerError(
                f"chunk {header.index} was sealed before", code="seal-index", where="frames"
            )
        self._next = header.index + 1
        if header.coding == Coding.ZEROS:
            return b""
        # cryptography 38 takes no other buffers; the copy costs a tenth of the cipher.
        return self._aead.encrypt(_nonce(header.index), bytes(payload), header.pack())


class Opener:
    """Decrypts the chunks of one checkpoint that was verified.

    Args:
        statement: its manifest, or the offer that it follows.
        private: the audience's X25519 key.
        recipient: that key's public half, 32 bytes.

    Raises:
        DataError: ``seal-recipient``, it is sealed for another key, or not sealed.
    """

    def __init__(
        self, statement: Manifest | Offer, private: X25519PrivateKey, recipient: bytes
    ) -> None:
        seal = statement.seal
        if seal is None or seal.recipient != key_id(recipient):
            raise DataError(
                "the checkpoint is not sealed for this host's key",
                code="seal-recipient",
                where="frames",
                hint="only the host that it was made for can open it, with the key it had then",
            )
        names = (statement.function, statement.source, statement.audience)
        shared = _exchange(private, seal.ephemeral)
        self._aead = _key(shared, recipient, seal.ephemeral, names, statement.nonce)

    def open_chunk(self, header: Header, payload: Buffer) -> Buffer:
        """What :meth:`Sealer.seal_chunk` was given.

        Raises:
            DataError: ``seal-damaged``.
        """
        if header.coding == Coding.ZEROS:
            return b""
        try:
            return self._aead.decrypt(_nonce(header.index), bytes(payload), header.pack())
        except (InvalidTag, ValueError) as error:
            raise DataError(
                f"chunk {header.index} cannot be decrypted",
                code="seal-damaged",
                where="frames",
            ) from error


def _exchange(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(sealing_public(public))
    except ValueError as error:
        # A point of small order: the shared secret would be zero for everybody.
        raise DataError(
            "the key that it is sealed with is not usable", code="seal-damaged", where="frames"
        ) from error


def _key(
    shared: bytes, recipient: bytes, ephemeral: bytes, names: tuple[str, str, str], nonce: bytes
) -> AESGCM:
    function, source, audience = names
    info = canonical.encode([_LABEL, function, source, audience, nonce, ephemeral, recipient])
    derived = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=nonce, info=info).derive(shared)
    return AESGCM(derived)


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "little")
