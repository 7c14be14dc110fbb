"""Fuzz the frames room: canonical documents, envelopes, files, trust documents, rotations, records.

    python -m tests.fuzz.frames --seconds 600 [--seed N]

Mutates honest bytes; envelopes are also made anew over mutated payloads with a trusted key, so that
the parsers behind the signature are reached. Allowed outcomes are a refusal by a DataError and, for
what was validly signed, acceptance. Findings: another exception; a file that is accepted though
neither it nor a signer said so; a document that decodes and encodes to other bytes.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

from accelvisor.errors import DataError
from accelvisor.frames import audit as audits
from accelvisor.frames import canonical, changes, container, envelope, trust
from accelvisor.frames.chunks import Coding, Header, expand
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.manifest import MANIFEST_TYPE
from accelvisor.frames.rotation import rotate
from accelvisor.frames.trust import TRUST_TYPE
from tests.frames.building import (
    HOST_A,
    KEY_A,
    KEY_B,
    NOW,
    ROOT,
    SECOND,
    Checkpoint,
    Destination,
    document,
    identity,
)
from tests.frames.test_container import Memory

NUMBERS = (0, 1, 0x7F, 0x80, 0x8F, 0x90, 0xA0, 0xC0, 0xC1, 0xC4, 0xC6, 0xCA, 0xD9, 0xDF, 0xFF)


class Target:
    """Honest bytes of each kind, and what is done with changed ones."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        checkpoint = Checkpoint()
        self.file = checkpoint.file()
        self.signed = checkpoint.envelope()
        opened = envelope.decode(self.signed, kind=MANIFEST_TYPE, max_bytes=1 << 16)
        self.payload = opened.payload
        self.trust = trust.first(trust.sign(document(), [ROOT]), frozenset({ROOT.key_id}))
        host = document().host(HOST_A)
        if host is None:
            raise AssertionError("no host")
        self.rotation = rotate(host, KEY_A, identity(), created_ns=NOW, retire_ns=NOW + SECOND)
        later = changes.revoke_key(document(), KEY_B.key_id, created_ns=NOW)
        self.later = trust.encode(later)
        record, head = audits.Head().append(audits.Event(NOW, 1, "passed", "ab", "x"))
        self.records = audits.pack(record) + audits.pack(head.append(
            audits.Event(NOW, 2, "frame-key-unknown", "ab", "y"))[0])

    def changed(self, data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(self.dice.choice((1, 1, 2, 4))):
            at = self.dice.randrange(len(out)) if out else 0
            kind = self.dice.randrange(6)
            if kind == 0 and out:
                out[at] ^= 1 << self.dice.randrange(8)
            elif kind in (1, 2) and out:
                out[at] = self.dice.choice(NUMBERS)
            elif kind == 3:
                out[at:at] = self.dice.randbytes(self.dice.randrange(1, 9))
            elif kind == 4:
                del out[at : at + self.dice.randrange(1, 9)]
            elif out:
                size = self.dice.randrange(1, 40)
                out[at : at + size] = data[self.dice.randrange(len(data)) :][:size]
        return bytes(out)

    def document(self) -> None:
        data = self.changed(self.dice.choice((self.payload, self.later, self.signed)))
        if canonical.encode(canonical.decode(data)) != data:
            raise AssertionError("a document has two encodings")

    def whole(self) -> None:
        """A file: never accepted unless it is the honest one."""
        data = self.changed(self.file)
        here = Destination()
        container.verify(Memory(data), here.verifier, here.staging)
        if data != self.file:
            raise AssertionError("a changed file was accepted")

    def resigned(self) -> None:
        """A manifest that its own host signed: anything but an unknown exception."""
        made = envelope.sign(MANIFEST_TYPE, self.changed(self.payload), [KEY_A]).encode()
        Destination().verifier.open(made)

    def trusted(self) -> None:
        made = envelope.sign(TRUST_TYPE, self.changed(self.later), [ROOT]).encode()
        after = trust.update(self.trust, made)
        if trust.encode(trust.decode(trust.encode(after.document))) != trust.encode(after.document):
            raise AssertionError("a trust document has two encodings")

    def rotated(self) -> None:
        data = self.changed(self.rotation)
        Keyring(document()).with_rotation(data)
        if data != self.rotation:
            raise AssertionError("a changed rotation was accepted")

    def recorded(self) -> None:
        audits.verify(audits.unpack(self.changed(self.records)))

    def expanded(self) -> None:
        """A zstd payload of whatever bytes; those that begin as a frame does get further."""
        data = b"\x28\xb5\x2f\xfd" + self.dice.randbytes(self.dice.randrange(40))
        header = Header(0, 5, Coding.ZSTD, 0, self.dice.choice((1, 30, 4096)))
        if len(expand(header, data)) != header.length:
            raise AssertionError("a payload gave another length")


def run(seconds: float, seed: int) -> int:
    """Fuzz; returns 0, or raises at the first finding after it was printed."""
    dice = random.Random(seed)
    target = Target(dice)
    feeds: list[Callable[[], None]] = [
        target.document, target.whole, target.resigned, target.trusted, target.rotated,
        target.recorded, target.expanded,
    ]  # fmt: skip
    counts: dict[str, int] = {}
    rounds = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        feed = dice.choice(feeds)
        try:
            feed()
            outcome = "accepted"
        except DataError:
            outcome = "refused"
        except Exception as error:
            print(f"FINDING in {feed.__name__}: {error!r} (seed {seed}, round {rounds})")
            raise
        key = f"{feed.__name__} {outcome}"
        counts[key] = counts.get(key, 0) + 1
        rounds += 1
    for key, count in sorted(counts.items()):
        print(f"{count:>9}  {key}")
    print(f"{rounds} inputs in {seconds:g} s, seed {seed}: nothing found")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz checkpoint frames and trust.")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    return run(options.seconds, seed)


if __name__ == "__main__":
    sys.exit(main())
