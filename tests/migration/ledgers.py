"""Hosts, a signer and moves for tests of the ledger."""

from __future__ import annotations

from accelvisor.frames import envelope
from accelvisor.migration.ledger import Item, Transfer

A, B, C = (f"{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")
F, G = (f"00000000-0000-0000-0000-{number:012x}" for number in (1, 2))


class TestSigner:
    """No key: these tests are about who is first, not about who may sign."""

    __test__ = False
    key_id = "0" * 32
    algorithm = "ed25519"

    def sign(self, payload_type: str, payload: bytes) -> bytes:
        made = envelope.Signature(self.key_id, self.algorithm, b"s" * 64)
        return envelope.Envelope(payload_type, payload, (made,)).encode()


def migration(number: int) -> bytes:
    return number.to_bytes(16, "big")


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def transfer(
    number: int, source: str, destination: str, epoch: int, *functions: str, sealed: int = 7
) -> Transfer:
    items = tuple(Item(name, epoch, digest(sealed)) for name in functions or (F,))
    return Transfer(migration(number), source, destination, items)
