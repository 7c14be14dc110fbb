"""A checkpoint in a file: head, envelope, chunks; nothing after them (accelvisor-checkpoint(5)).

    head      16 bytes: magic "XCKP", version u16, flags u16, envelope bytes u32, area bytes u32
    area      the envelope, then zeros
    chunks    as many as the manifest says: 36 bytes (index, kind, coding, offset, length, stored),
              then the stored payload

All numbers are little-endian. The writer passes over the state once: it leaves room for the
envelope, writes the chunks while it hashes them, and writes envelope and head when the root is
signed; the head comes last, so a file that was not finished has no magic. The reader goes forward
only (a pipe will do) and holds one chunk at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, Protocol

from accelvisor.errors import CallerError, FrameRefused
from accelvisor.frames.chunks import RECORD, Buffer, Header, leaf_hash
from accelvisor.frames.merkle import Merkle
from accelvisor.frames.receive import Receiver, Staging
from accelvisor.frames.steps import refuse
from accelvisor.frames.verify import Verified, Verifier
from accelvisor.limits import KIB, LIMITS

MAGIC = b"XCKP"
VERSION = 1
HEAD = struct.Struct("<4sHHII")

#: Room for a manifest without models and 16 signatures.
AREA_BYTES = 4 * KIB
#: What one watermarked model adds at most: a name, a key id, a digest, and their field names.
MODEL_BYTES = 256

_MOST_AREA = LIMITS.manifest_bytes + AREA_BYTES


def area_for(models: int) -> int:
    """How much room the envelope of a manifest with so many models needs."""
    return min(AREA_BYTES + MODEL_BYTES * models, _MOST_AREA)


class Writer:
    """Writes one file.

    Args:
        file: empty, binary, seekable. It belongs to the caller, who makes it durable.
        area: bytes to leave for the envelope: :func:`area_for`.
    """

    def __init__(self, file: BinaryIO, area: int = AREA_BYTES) -> None:
        self._file = file
        self._area = area
        self._tree = Merkle()
        #: Of the payloads so far, as they are stored.
        self.payload_bytes = 0
        file.write(bytes(HEAD.size + area))

    @property
    def chunks(self) -> int:
        """How many were added: the index of the next."""
        return self._tree.size

    @property
    def root(self) -> bytes:
        return self._tree.root()

    def add(self, header: Header, payload: Buffer) -> None:
        """The next chunk, its payload as it is to be stored."""
        if header.index != self._tree.size:
            raise _mistake(f"chunk {header.index} comes where {self._tree.size} is due")
        fields = (header.index, header.kind, header.coding, header.offset, header.length)
        self._file.write(RECORD.pack(*fields, len(payload)))
        self._file.write(payload)
        self._tree.add(leaf_hash(header.pack(), payload))
        self.payload_bytes += len(payload)

    def finish(self, envelope: bytes) -> None:
        """The signed manifest over :attr:`root`; the file is a checkpoint from now on."""
        if len(envelope) > self._area:
            raise _mistake(f"the envelope has {len(envelope)} bytes, {self._area} were left for it")
        self._file.seek(HEAD.size)
        self._file.write(envelope)
        # What came before must be on its way to the disk before the head is.
        self._file.flush()
        self._file.seek(0)
        self._file.write(HEAD.pack(MAGIC, VERSION, 0, len(envelope), self._area))
        self._file.flush()


class Readable(Protocol):
    """A binary file, pipe or BytesIO that waits until there is something."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class Reader:
    """Reads one file, forward.

    Args:
        file: binary, at its beginning.

    Raises:
        FrameRefused: ``frame-shape``, ``frame-version``, ``frame-truncated``.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        magic, version, flags, size, area = HEAD.unpack(self._exactly(HEAD.size))
        if magic != MAGIC:
            raise refuse("frame-shape", "the file is no checkpoint, or was not finished")
        if version != VERSION:
            raise refuse("frame-version", f"the file is of version {version}, not {VERSION}")
        if flags or not 1 <= size <= area <= _MOST_AREA:
            raise refuse("frame-shape", "the file's head makes no sense")
        #: Of the manifest; nothing in it is verified.
        self.envelope = bytes(self._exactly(size))
        if any(self._exactly(area - size)):
            raise refuse("frame-shape", "there is something between the envelope and the chunks")

    def chunks(self, receiver: Receiver, count: int) -> Iterator[tuple[Header, memoryview]]:
        """``count`` chunks; each is admitted by ``receiver`` before its payload is read, and its
        payload is gone when the next is asked for.

        Raises:
            FrameRefused: ``frame-truncated``, ``frame-excess`` (bytes after the last), and what
                the receiver says.
        """
        buffer = memoryview(bytearray(LIMITS.chunk_bytes + KIB))
        for _ in range(count):
            *fields, stored = RECORD.unpack(self._exactly(RECORD.size))
            header = Header(*fields)
            receiver.admit(header, stored)
            payload = buffer[:stored]
            self._fill(payload)
            yield header, payload
        if self._file.readinto(buffer[:1]):
            raise refuse("frame-excess", "the file goes on after its last chunk")

    def _exactly(self, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        self._fill(data)
        return data

    def _fill(self, into: memoryview) -> None:
        at = 0
        while at < len(into):
            # A pipe gives less than it is asked for.
            count = self._file.readinto(into[at:])
            if not count:
                raise refuse("frame-truncated", "the file ends in the middle")
            at += count


def verify(file: Readable, verifier: Verifier, staging: Staging) -> Verified:
    """All seven steps for a file. Needs nothing but what ``verifier`` knows.

    Raises:
        FrameRefused: with the step and its code, after it was recorded.
    """
    try:
        reader = Reader(file)
    except FrameRefused as error:
        verifier.refused(error, b"")
    opened = verifier.open(reader.envelope)
    receiver = Receiver(verifier, opened, staging)
    try:
        for header, payload in reader.chunks(receiver, opened.statement.chunks):
            receiver.take(header, payload)
    except FrameRefused as error:
        receiver.fail(error)
    return receiver.finish()


def _mistake(why: str) -> CallerError:
    return CallerError(f"the checkpoint cannot be written: {why}", code="usage", where="frames")
