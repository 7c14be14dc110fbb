"""From signed files to a state that may be loaded: verification, and what comes after it.

A chain of checkpoints is verified link by link, each by all seven steps; only when the last has
passed is anything taken out. Raw bytes are put into their place as they come (nobody looks at
them); what is compressed or encrypted waits as it is stored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias, cast

import numpy as np

from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.lent import PAGE
from accelvisor.daemon.moving.staged import Staged
from accelvisor.errors import ConflictError, FrameRefused, StateError
from accelvisor.frames.chain import check_chain
from accelvisor.frames.chunks import Buffer, Coding, Header, Kind, expand, leaf_hash
from accelvisor.frames.container import Readable, Reader
from accelvisor.frames.identity import Identity
from accelvisor.frames.manifest import Manifest
from accelvisor.frames.receive import Receiver
from accelvisor.frames.seal import Opener
from accelvisor.frames.steps import refuse
from accelvisor.frames.verify import Opened, Verified, Verifier
from accelvisor.function import ram
from accelvisor.function.track import runs_of

#: What a checkpoint adds to those that it continues; everything else it brings whole.
_CONTINUED = (Kind.WINDOW, Kind.MEMORY)


#: What a function is given, in the order of :meth:`Staged.descriptors`.
_LOADED = (Kind.STATE, Kind.WINDOW, Kind.MEMORY, Kind.EXTENTS)
#: Opens a file, anew each time.
Opening: TypeAlias = Callable[[], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True, slots=True)
class Link:
    """One checkpoint of a chain: how its file is opened, and who verifies it."""

    open: Opening
    verifier: Verifier


class Place:
    """The sections that a chain adds up to. Holes stay holes: a function's memory is sparse."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.staged = Staged(sizes)
        self._fds: dict[int, int] = dict(zip(_LOADED, self.staged.descriptors(), strict=True))
        self._touched = {
            kind: np.zeros(-(-nbytes // PAGE), np.uint8) for kind, nbytes in sizes.items()
        }

    def put(self, header: Header, payload: Buffer) -> None:
        """The bytes of a chunk, which is neither compressed nor encrypted (any more)."""
        low, high = header.offset, header.offset + header.length
        touched = self._touched[header.kind][low // PAGE : -(-high // PAGE)]
        if header.coding == Coding.ZEROS and not touched.any():
            return
        touched[:] = 1
        data = expand(header, payload)
        fd = self._fds.get(header.kind)
        if fd is None:
            self.staged.views[header.kind][low:high] = data
            return
        # Fresh pages: a write makes them at half the price of touching them.
        while data:
            count = os.pwrite(fd, data, low)
            low, data = low + count, memoryview(data)[count:]

    def pieces(self) -> Iterator[tuple[Kind, int, memoryview]]:
        """(kind, offset, bytes) of what was put there, in the order of a checkpoint."""
        for kind in sorted(self._touched):
            view = self.staged.views[kind]
            for first, count in runs_of(self._touched[kind]):
                low, high = first * PAGE, min((first + count) * PAGE, len(view))
                yield Kind(kind), low, view[low:high]


@dataclass
class Unpacked:
    """A state that was verified. :meth:`close` gives its memory back.

    Attributes:
        chain: the checkpoints that it comes from, the whole one first.
        place: its sections, ready for ``load``.
        frame: None where the checkpoint has no function frame.
    """

    chain: list[Verified]
    place: Place
    frame: documents.FunctionFrame | None
    status: documents.StatusFrame

    @property
    def staged(self) -> Staged:
        return self.place.staged

    @property
    def verified(self) -> Verified:
        return self.chain[-1]

    @property
    def manifest(self) -> Manifest:
        return self.verified.manifest

    def close(self) -> None:
        self.staged.close()


class _Waiting:
    """Staging of one checkpoint: in place where it lies open, else as it is stored."""

    def __init__(self, manifest: Manifest, place: Place, kinds: Sequence[Kind]) -> None:
        self._place = place
        self._kinds = kinds
        self._open = manifest.algorithms.compression == "none" and not manifest.sealed
        self._waiting: list[tuple[Header, bytes]] = []

    def write(self, header: Header, payload: Buffer) -> None:
        """As :class:`accelvisor.frames.receive.Staging`."""
        if header.kind not in self._kinds:
            return
        if self._open:
            self._place.put(header, payload)
        else:
            # Chunks overwrite each other in their order, so all of them wait.
            self._waiting.append((header, bytes(payload)))

    def take_out(self, opener: Opener | None) -> None:
        """The checkpoint was verified. DataError ``seal-...``, ``chunk-damaged``."""
        for header, payload in self._waiting:
            self._place.put(header, opener.open_chunk(header, payload) if opener else payload)
        self._waiting = []


class _Elsewhere:
    """Staging of a receiver whose chunks are put into their place beside it."""

    def write(self, header: Header, payload: Buffer) -> None:
        """It is being done."""


def unpack(links: Sequence[Link], identity: Identity) -> Unpacked:
    """Verify a chain and take it out. Blocks.

    Args:
        links: the whole checkpoint first, the one that is wanted last; each verifier expects the
            digest of the one before as parent.
        identity: opens what was sealed for this host.

    Raises:
        FrameRefused: a step refused, and that was recorded.
        DataError: ``seal-...``, ``chunk-damaged``; UnavailableError: ``zstd-missing``.
        StateError: ``status-frame``; ConflictError: ``checkpoint-partial``.
    """
    place: Place | None = None
    done: list[tuple[Verified, _Waiting]] = []
    try:
        with ExitStack() as stack:
            # The last first, as far as its signature: it says how large everything is.
            reader, opened = _open(stack.enter_context(links[-1].open()), links[-1].verifier)
            _require_status(opened.statement)
            place = Place(_sizes(opened.statement))
            for link in links[:-1]:
                with link.open() as file:
                    done.append(_take(*_open(file, link.verifier), link.verifier, place, False))
            done.append(_take(reader, opened, links[-1].verifier, place, True))
        chain = [verified for verified, _ in done]
        check_chain(chain)
        for verified, waiting in done:
            waiting.take_out(_opener(verified.manifest, identity))
        return _documents(chain, place)
    except BaseException:
        if place is not None:
            place.staged.close()
        raise


def _open(file: BinaryIO, verifier: Verifier) -> tuple[Reader, Opened[Manifest]]:
    """Steps 1 to 5."""
    try:
        reader = Reader(cast(Readable, file))
    except FrameRefused as error:
        verifier.refused(error, b"")
    return reader, verifier.open(reader.envelope)


def _take(
    reader: Reader, opened: Opened[Manifest], verifier: Verifier, place: Place, last: bool
) -> tuple[Verified, _Waiting]:
    """Steps 6 and 7."""
    waiting = _Waiting(opened.statement, place, tuple(Kind) if last else _CONTINUED)
    receiver = Receiver(verifier, opened, _Elsewhere())
    try:
        for kind in _CONTINUED:
            _require_room(opened.statement, place, kind)
        with ThreadPoolExecutor(1, thread_name_prefix="leaves") as pool:
            for header, payload in reader.chunks(receiver, opened.statement.chunks):
                # Hashing and placing cost the same: one is done beside the other.
                leaf = pool.submit(leaf_hash, header.pack(), payload)
                try:
                    waiting.write(header, payload)
                finally:
                    hashed = leaf.result()
                receiver.take(header, payload, hashed)
    except FrameRefused as error:
        receiver.fail(error)
    return receiver.finish(), waiting


def _require_room(manifest: Manifest, place: Place, kind: Kind) -> None:
    """Along a chain sizes stay; a link that says otherwise is refused before its chunks come."""
    if manifest.section_bytes(kind) != len(place.staged.views[kind]):
        raise refuse("frame-parent", "a section has another size than in what continues it")


def _require_status(manifest: Manifest) -> None:
    if manifest.kind == "function":
        raise ConflictError(
            "the checkpoint has the function frame alone: there is no state in it",
            code="checkpoint-partial",
            where="checkpoints",
            hint="restore one that was made with the status frame",
        )
    missing = {"state", "window", "memory"} - set(manifest.sections)
    if missing:
        raise StateError(
            f"the checkpoint has no section {min(missing)}", code="status-frame", where="status:V1"
        )


def _sizes(manifest: Manifest) -> dict[int, int]:
    """Bytes of each section; the one of the VM's RAM is there even if it says nothing."""
    found = {int(Kind[name.upper()]): size for name, size in manifest.sections.items()}
    found.setdefault(Kind.EXTENTS, len(ram.NOTHING))
    return found


def _opener(manifest: Manifest, identity: Identity) -> Opener | None:
    if manifest.seal is None:
        return None
    return Opener(manifest, identity.sealing, identity.public_identity.sealing)


def _documents(chain: list[Verified], place: Place) -> Unpacked:
    """Everything has passed: from here on it may be read."""
    manifest, staged = chain[-1].manifest, place.staged
    sizes = _sizes(manifest)
    if "extents" not in manifest.sections:
        staged.views[Kind.EXTENTS][:] = ram.NOTHING
    frame = None
    if Kind.FUNCTION in sizes:
        data = staged.document(Kind.FUNCTION, sizes[Kind.FUNCTION])
        frame = documents.decode(data, documents.FunctionFrame)
    status = documents.decode(
        staged.document(Kind.STATUS, sizes[Kind.STATUS]), documents.StatusFrame
    )
    if documents.status_digest(status.digests) != manifest.digest:
        raise StateError(
            "the status frame is not the one that was signed",
            code="status-frame",
            where="status:V3",
        )
    staged.finish(sizes)
    return Unpacked(chain, place, frame, status)
