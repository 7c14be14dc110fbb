"""Sealed records for bulk data: AES-256-GCM under keys that came over TLS.

A bulk connection begins with mutual TLS 1.3. Over it the side that was connected to sends 32 random
bytes; both make one key for each direction of them (HKDF-SHA-256, RFC 5869), and from then on the
same TCP connection carries records: four bytes of length, ciphertext, tag of 16 bytes. The nonce is
the number of the record in its direction, so a record that is changed, left out, repeated or moved
does not open. TLS itself is limited to records of 16 KiB, and each costs a call (docs/adr/0009).
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from accelvisor.errors import ProtocolError
from accelvisor.limits import KIB

SECRET_BYTES = 32
#: The longest plain text of one record: what is encrypted and hashed fits the second-level cache.
RECORD_BYTES = 256 * KIB
LENGTH = struct.Struct("<I")
TAG_BYTES = 16
#: What a record has beside its plain text, and the room that a cipher wants behind its output.
OVERHEAD = LENGTH.size + TAG_BYTES
SLACK = 15
#: Below this the interface that allocates its result is faster.
_SMALL = 4 * KIB
Bytes: TypeAlias = bytes | bytearray | memoryview


def keys(secret: bytes) -> tuple[bytes, bytes]:
    """The key of what the connecting side sends, and that of the other direction."""
    made = HKDF(SHA256(), 64, None, b"accelvisor bulk records 1").derive(secret)
    return made[:32], made[32:]


class Sealer:
    """Makes the records of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = AES(key)
        self._aead: Any = AESGCM(key)
        self._number = 0

    def seal(self, plain: Bytes, out: memoryview) -> int:
        """One record at the beginning of ``out``; answers with its length.

        ``plain`` has 1 to ``RECORD_BYTES`` bytes, ``out`` room for it, OVERHEAD and SLACK.
        """
        size = len(plain)
        nonce = self._number.to_bytes(12, "little")
        self._number += 1
        LENGTH.pack_into(out, 0, size + TAG_BYTES)
        end = LENGTH.size + size + TAG_BYTES
        if size < _SMALL:
            out[LENGTH.size : end] = self._aead.encrypt(nonce, plain, None)
        elif hasattr(self._aead, "encrypt_into"):  # cryptography >= 47
            self._aead.encrypt_into(nonce, plain, None, out[LENGTH.size : end])
        else:
            cipher = Cipher(self._key, GCM(nonce)).encryptor()
            cipher.update_into(plain, out[LENGTH.size : end + SLACK])
            cipher.finalize()
            out[end - TAG_BYTES : end] = cipher.tag
        return end


class Opener:
    """Opens the records of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = AES(key)
        self._aead: Any = AESGCM(key)
        self._number = 0

    def open(self, record: memoryview, out: memoryview) -> None:
        """``record`` is without its length; ``out`` is exactly as long as the plain text.

        Raises:
            ProtocolError: ``peer-record``; what ``out`` has then is worth nothing.
        """
        nonce = self._number.to_bytes(12, "little")
        self._number += 1
        size = len(out)
        try:
            if size < _SMALL:
                out[:] = self._aead.decrypt(nonce, record, None)
            elif hasattr(self._aead, "decrypt_into"):
                self._aead.decrypt_into(nonce, record, None, out)
            else:
                cipher = Cipher(self._key, GCM(nonce)).decryptor()
                # The room that it wants behind its output is taken from the output's own end.
                body = size - TAG_BYTES
                cipher.update_into(record[:body], out)
                out[body:] = cipher.update(record[body:size])
                cipher.finalize_with_tag(bytes(record[size:]))
        except InvalidTag as error:
            raise broken("a record was changed on its way") from error


def record_length(head: Bytes) -> int:
    """Bytes that follow the four of ``head``; raises ProtocolError ``peer-record``."""
    (length,) = LENGTH.unpack(head)
    if not TAG_BYTES < length <= RECORD_BYTES + TAG_BYTES:
        raise broken(f"a record of {length} bytes")
    return int(length)


def broken(why: str) -> ProtocolError:
    return ProtocolError(why, code="peer-record", where="peer")
