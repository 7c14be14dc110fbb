"""Step 6: the chunks of a checkpoint as they come, into staging.

A receiver begins with a verified manifest (a file) or a verified offer (a migration, whose manifest
comes last). Each chunk is held against what was signed *before* anything is done with it, hashed
once, and its stored bytes handed to staging, which keeps them and looks at nothing. After a refusal
a receiver takes nothing more.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from accelvisor.errors import FrameRefused
from accelvisor.frames.chunks import Buffer, Header, leaf_hash
from accelvisor.frames.manifest import Manifest, Offer
from accelvisor.frames.merkle import Merkle
from accelvisor.frames.pace import Pace
from accelvisor.frames.steps import refuse
from accelvisor.frames.verify import Opened, Verified, Verifier

#: Fields of an offer that its manifest must repeat; the others are bounds, times and totals.
_REPEATED = (
    "kind",
    "function",
    "domain",
    "owner",
    "source",
    "audience",
    "nonce",
    "epoch",
    "parent",
    "boot",
    "algorithms",
    "profile",
    "seal",
)


class Staging(Protocol):
    """Where chunks wait until the checkpoint is verified: memory or a file that no device reads.

    It begins as zeros, copies ``payload`` before it returns, and neither decrypts nor expands nor
    parses it. Placing raw bytes at their offset is no reading of them.
    """

    def write(self, header: Header, payload: Buffer) -> None: ...


class Receiver:
    """Takes the chunks of one checkpoint.

    Args:
        verifier: that opened ``opened``.
        opened: its manifest, or its offer.
        staging: gets every chunk that was in bounds, in order.
        pace: where slowness is to be refused; it is fed with the verifier's clock.

    Raises:
        FrameRefused: ``frame-parent``.
    """

    def __init__(
        self,
        verifier: Verifier,
        opened: Opened[Manifest] | Opened[Offer],
        staging: Staging,
        pace: Pace | None = None,
    ) -> None:
        self._verifier = verifier
        self._opened = opened
        self._statement: Manifest | Offer = opened.statement
        self._staging = staging
        self._pace = pace
        self._tree = Merkle()
        self._bytes = 0
        self._ends: dict[int, int] = {}
        self._admitted: tuple[Header, int] | None = None
        self._failed: FrameRefused | None = None
        wanted = verifier.expected.parent
        if wanted is not None and wanted != self._statement.parent:
            self._refuse(refuse("frame-parent", "it does not continue what is here"))

    @property
    def chunks(self) -> int:
        """How many came."""
        return self._tree.size

    @property
    def payload_bytes(self) -> int:
        """Of the chunks that came, as they are stored."""
        return self._bytes

    def feed(self, header: Header, payload: Buffer, leaf: bytes | None = None) -> None:
        """The next chunk.

        Args:
            leaf: its :func:`~accelvisor.frames.chunks.leaf_hash`, where the caller has computed it
                in another thread. Never what came over a wire.

        Raises:
            FrameRefused: ``frame-excess``, ``frame-chunk``, ``frame-slow``. What staging raises
                goes through, and the chunk may be fed again.
        """
        self.admit(header, len(payload))
        self.take(header, payload, leaf)

    def take(self, header: Header, payload: Buffer, leaf: bytes | None = None) -> None:
        """The chunk that was admitted last. With :meth:`admit`, what :meth:`feed` does."""
        if self._failed is not None:
            raise self._failed
        if self._admitted != (header, len(payload)):
            self._refuse(refuse("frame-chunk", "it is not the chunk that was admitted"))
        self._staging.write(header, payload)
        self._admitted = None
        self._tree.add(leaf_hash(header.pack(), payload) if leaf is None else leaf)
        self._bytes += len(payload)
        end = header.offset + header.length
        self._ends[header.kind] = max(self._ends.get(header.kind, 0), end)

    def admit(self, header: Header, stored: int) -> None:
        """May this chunk be next? To be asked before memory is made for ``stored`` bytes.

        Raises:
            FrameRefused: as :meth:`feed`.
        """
        if self._failed is not None:
            raise self._failed
        try:
            if self._pace is not None:
                self._pace.came(self._verifier.clock_ns(), stored)
            self._admit(header, stored)
            self._admitted = (header, stored)
        except FrameRefused as error:
            self._refuse(error)

    def tick(self) -> None:
        """Nothing came for a while.

        Raises:
            FrameRefused: ``frame-slow``.
        """
        if self._pace is not None and self._failed is None:
            try:
                self._pace.check(self._verifier.clock_ns())
            except FrameRefused as error:
                self._refuse(error)

    def fail(self, error: FrameRefused) -> NoReturn:
        """Whoever reads the chunks found a fault: record it, if that was not done, and raise it."""
        if error is self._failed:
            raise error
        self._refuse(error)

    def finish(self, envelope: bytes | None = None) -> Verified:
        """All chunks came: steps 1 to 7, and the checkpoint may be loaded.

        Args:
            envelope: of the manifest, when the receiver began with an offer.

        Raises:
            FrameRefused: any code.
        """
        if self._failed is not None:
            raise self._failed
        try:
            return self._finish(envelope)
        except FrameRefused as error:
            self._failed = error
            raise

    def _finish(self, envelope: bytes | None) -> Verified:
        if not isinstance(self._statement, Offer):
            final = self._verifier.again(self._opened.envelope)
        elif envelope is None:
            self._refuse(refuse("frame-truncated", "its manifest never came"))
        else:
            final = self._verifier.open(envelope)
        try:
            self._complete(final.statement)
        except FrameRefused as error:
            self._verifier.refused(error, final.digest)
        self._verifier.passed(6, final.digest)
        return self._verifier.finish(final)

    def _admit(self, header: Header, stored: int) -> None:
        said = self._statement
        if self._tree.size >= said.chunks:
            raise refuse("frame-excess", f"there are more than the {said.chunks} chunks signed")
        if self._bytes + stored > said.payload_bytes:
            raise refuse("frame-excess", f"there are more than {said.payload_bytes} bytes")
        fault = header.fault(stored, said.sealed) or self._misplaced(header)
        if fault is not None:
            raise refuse("frame-chunk", f"chunk {self._tree.size}: {fault}")

    def _misplaced(self, header: Header) -> str | None:
        if header.index != self._tree.size:
            return f"it says that it is chunk {header.index}"
        section = self._statement.section_bytes(header.kind)
        if section is None:
            return "it belongs to a section that was not signed"
        if header.offset + header.length > section:
            return "it leaves its section"
        if not self._statement.allows(header.coding):
            return "it is compressed, and that was not signed"
        return None

    def _complete(self, manifest: Manifest) -> None:
        """What came is what ``manifest`` says."""
        if isinstance(self._statement, Offer):
            self._as_offered(manifest, self._statement)
        if self._tree.size < manifest.chunks or self._bytes < manifest.payload_bytes:
            raise refuse(
                "frame-truncated",
                f"{self._tree.size} of {manifest.chunks} chunks came, "
                f"{self._bytes} of {manifest.payload_bytes} bytes",
            )
        if self._tree.size > manifest.chunks or self._bytes > manifest.payload_bytes:
            raise refuse("frame-excess", "more came than its manifest says")
        if self._tree.root() != manifest.root:
            raise refuse("frame-root", "its chunks are not the ones that were signed")

    def _as_offered(self, manifest: Manifest, offer: Offer) -> None:
        for field in _REPEATED:
            if getattr(manifest, field) != getattr(offer, field):
                raise refuse("frame-offer", f"its {field} is not the one that was offered")
        for kind, end in self._ends.items():
            size = manifest.section_bytes(kind)
            if size is None or end > size:
                raise refuse("frame-chunk", "a chunk leaves the section that was signed at last")
        for name, size in manifest.sections.items():
            if size > offer.sections.get(name, 0):
                raise refuse("frame-offer", f"its section {name} is larger than offered")

    def _refuse(self, error: FrameRefused) -> NoReturn:
        self._failed = error
        self._verifier.refused(error, self._opened.digest)
