"""Taking a function's state: copied while it computes, then stopped for as long as it takes to copy
what changed meanwhile, and let go on.

What is hashed, compressed, encrypted and written comes from the copy, so a slow disk holds no guest
up. The copy is private memory, as large as what the function uses.

A checkpoint that continues another copies only what changed since. That needs tracking to have been
on without a gap: a function that was reset, moved, given to another VM or begun anew meanwhile is
copied whole (:class:`Base` tells).

Everything here blocks and belongs into a thread.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.lent import PAGE, Lent, Piece
from accelvisor.daemon.moving.orders import Given, ask
from accelvisor.daemon.paths import FunctionPaths
from accelvisor.daemon.store import Function
from accelvisor.errors import (
    AccelvisorError,
    CapacityError,
    ConflictError,
    DeadlineError,
    UnavailableError,
)
from accelvisor.frames.chunks import Kind
from accelvisor.function.moving import normal
from accelvisor.function.track import runs_of
from accelvisor.limits import LIMITS, MIB

LOG = logging.getLogger(__name__)
#: (device, inode) of each file.
Files: TypeAlias = tuple[tuple[int, int], ...]
#: With no more than this left to copy, another round before the stop gains nothing: the stop itself
#: takes as long as copying so much.
ENOUGH_BYTES = 4 * MIB
#: A stop waits for a tile, and walks four states.
_ORDER_S = LIMITS.control_reply_s
#: A function that must go on and does not answer is asked again after so many seconds each time.
PAUSES_S = (0.1, 0.4, 1.0, 3.0)
#: Code of the error, and kind of the event, of one that stands still though its VM runs.
STANDING = "function-standing"


class Link:
    """Orders to one function process."""

    def __init__(self, paths: FunctionPaths) -> None:
        self._paths = paths

    def control(self, method: str, **parameters: object) -> Given:
        return ask(self._paths.control_socket, method, parameters, (), 0, _ORDER_S)

    def describe(self) -> documents.Described:
        return documents.described(self.control("describe"))

    def lend(self, function: Function) -> tuple[Lent, Files, int]:
        """Its memory, which files that is, and how many bytes they take."""
        given = ask(self._paths.holder_socket, "lend", None, (), 4, _ORDER_S)
        stats = [os.fstat(fd) for fd in given.fds]
        lent = Lent(given.fds, function.memory_bytes, function.window_bytes)
        files = tuple((stat.st_dev, stat.st_ino) for stat in stats)
        return lent, files, sum(stat.st_blocks for stat in stats) * 512

    def extents(self) -> bytes:
        """The pages of the VM's RAM that the device wrote since tracking began."""
        given = ask(self._paths.control_socket, "extents", None, (), 1, _ORDER_S)
        try:
            return os.pread(given.fds[0], os.fstat(given.fds[0]).st_size, 0)
        finally:
            given.close()

    def freeze(self) -> None:
        """Stop it at a boundary between two tiles; what its client does no longer starts it."""
        self.control("fence", on=True)
        self.control("migrate", to="STOP_COPY")

    def thaw(self) -> None:
        """Let it go on.

        Raises:
            UnavailableError: ``function-standing``: it did not answer for long, or refused.
        """
        try:
            self._insist("migrate", to="RUNNING")
            self._insist("fence", on=False)
        except AccelvisorError as error:
            raise UnavailableError(
                f"the function stands still: {error.message}",
                code=STANDING,
                where=error.where,
                hint="virsh suspend and resume its VM, or restart accelvisord: both let it go on",
            ) from error

    def _insist(self, method: str, **parameters: object) -> None:
        """An order that must be carried out, and may be twice. The worker may just have been
        replaced, or the host have more to do than it can.
        """
        for pause_s in PAUSES_S:
            try:
                self.control(method, **parameters)
                return
            except (UnavailableError, DeadlineError) as error:
                LOG.warning("%s", error.message)
            time.sleep(pause_s)
        self.control(method, **parameters)


class Copy:
    """Private memory for one section, sparse as the section is."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._map)
        self._taken: npt.NDArray[np.uint8] = np.zeros(nbytes // PAGE, np.uint8)

    def take(self, piece: Piece) -> int:
        """Copy a piece; how many bytes."""
        end = piece.offset + len(piece.view)
        self._view[piece.offset : end] = piece.view
        self._taken[piece.offset // PAGE : end // PAGE] = 1
        return len(piece.view)

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) of what was taken, in order."""
        for first, count in runs_of(self._taken):
            yield first * PAGE, self._view[first * PAGE : (first + count) * PAGE]


@dataclass
class Base:
    """What the next checkpoint of a function can continue: memory that is followed since.

    Attributes:
        lent: with what the window and the sums of memory were.
        resets: how often the function had been reset.
        digest: of the checkpoint; empty as long as that is not written.
        length: of the chain that ends with it.
        files: which memory was followed.
    """

    lent: Lent
    resets: int
    epoch: int
    files: Files
    digest: bytes = b""
    length: int = 1

    def holds(self, said: documents.Described, files: Files) -> bool:
        """Nothing happened since that was not followed."""
        return said.tracking and said.resets == self.resets and files == self.files


@dataclass
class Taken:
    """A function's state, apart from the function.

    Attributes:
        frame: what it is and stands in.
        status: what must be read back; None where only the function frame was wanted.
        section: registers, queues, contexts, objects.
        parts: of window and memory: everything, or what changed since ``parent``.
        extents: written pages of the VM's RAM; None where the VM went on.
        parent: what this continues; empty: it is whole.
        frozen_s: how long the function stood still for it.
        base: what the next may continue.
    """

    frame: documents.FunctionFrame
    status: documents.StatusFrame | None = None
    section: bytes = b""
    parts: Mapping[Kind, Copy] | None = None
    extents: bytes | None = None
    parent: bytes = b""
    length: int = 1
    frozen_s: float = 0.0
    base: Base | None = None


class Taker:
    """Takes one function's state once: :meth:`begin`, :meth:`precopy`, then :meth:`stopped` while
    it stands still, then :meth:`finish`.

    Args:
        base: to continue, where that is possible.
        epoch: at which this host owns the function.
        ours: what it writes was followed for checkpoints alone.

    Nobody else may begin to follow the function before :meth:`drop`, which may end that.
    """

    def __init__(
        self,
        function: Function,
        paths: FunctionPaths,
        epoch: int,
        base: Base | None = None,
        *,
        ours: bool = False,
    ) -> None:
        self.function = function
        self.link = Link(paths)
        self._epoch = epoch
        self._wanted = base
        self._base: Base | None = None
        self._continues = False
        self._said: documents.Described | None = None
        self._section = b""
        self._extents: bytes | None = None
        self._parts: dict[Kind, Copy] = {}
        #: Whether it is for us to say that what it writes need not be followed any more.
        self._ours = ours

    def begin(self) -> documents.Described:
        """Look at it, borrow its memory, follow what it writes."""
        self._said = said = self.link.describe()
        lent, files, nbytes = self.link.lend(self.function)
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted.epoch == self._epoch and wanted.holds(said, files):
            lent.close()
            self._base, self._continues = wanted, True
        else:
            if wanted is not None:
                wanted.lent.close()
            self._base = Base(lent, said.resets, self._epoch, files)
            _require_memory(nbytes)
            self._ours = self._ours or not said.tracking
            self.link.control("track", on=True)
        sizes = {Kind.WINDOW: said.window_bytes, Kind.MEMORY: said.memory_bytes}
        self._parts = {kind: Copy(nbytes) for kind, nbytes in sizes.items()}
        return said

    def precopy(self) -> int:
        """Copy beside the running function until little is left, or it does not get less; how many
        bytes.
        """
        lent = self._lent
        total = self._copy(lent.changes() if self._continues else lent.everything())
        last = lent.dirty_bytes()
        for _ in range(LIMITS.migration_rounds):
            if last <= ENOUGH_BYTES:
                break
            total += self._copy(lent.changes())
            left = lent.dirty_bytes()
            if left > last // 2:
                break
            last = left
        return total

    def stopped(self, *, whole: bool, extents: bool) -> None:
        """It stands still: copy the rest.

        Args:
            whole: nothing was copied before.
            extents: and what it wrote to the VM's RAM.
        """
        said = self.link.describe()
        base = self._base
        if base is None:
            raise _not_begun()
        if not said.tracking or said.resets != base.resets:
            # A client came, or the guest reset it, while we copied: what we have is not its own.
            self._again(said)
            whole = True
        self._copy(self._lent.everything() if whole else self._lent.changes())
        self._section = self._lent.section()
        if extents:
            self._extents = self.link.extents()
        self._said = said

    def finish(self, frozen_s: float) -> Taken:
        """It may go on; work out the rest."""
        base, said = self._base, self._said
        if base is None or said is None:
            raise _not_begun()
        state = hashlib.sha256(normal(self._section)).hexdigest()
        digests = {**base.lent.digests(), "state": state}
        return Taken(
            frame=documents.function_frame(said),
            status=documents.status_frame(said, digests),
            section=self._section,
            parts=self._parts,
            extents=self._extents,
            parent=base.digest if self._continues else b"",
            length=base.length + 1 if self._continues else 1,
            frozen_s=frozen_s,
            base=base,
        )

    def drop(self) -> None:
        """Give everything back; what was copied can be continued by nobody. What the function
        writes is followed on where somebody else had asked for it, or may have: before
        :meth:`begin` got as far as to ask, nobody here did.
        """
        for base in (self._base, self._wanted):
            if base is not None:
                base.lent.close()
        self._base = self._wanted = None
        if self._ours:
            self._ours = False
            try:
                self.link.control("track", on=False)
            except AccelvisorError as error:
                LOG.info("function %s: %s", self.function.uuid, error.message)

    def _again(self, said: documents.Described) -> None:
        self.link.control("track", on=True)
        base = self._base
        if base is not None:
            base.lent.close()
        lent, files, _ = self.link.lend(self.function)
        self._base = Base(lent, said.resets, self._epoch, files)
        self._continues = False
        self._parts = {
            Kind.WINDOW: Copy(said.window_bytes),
            Kind.MEMORY: Copy(said.memory_bytes),
        }

    def _copy(self, pieces: Iterator[Piece]) -> int:
        return sum(self._parts[piece.kind].take(piece) for piece in pieces)

    @property
    def _lent(self) -> Lent:
        if self._base is None:
            raise _not_begun()
        return self._base.lent


def take_running(taker: Taker, fault: Callable[[str], None]) -> Taken:
    """All of it for a function that computes, and goes on at once. Raises UnavailableError
    ``function-standing`` when it does not, and what else hinders it.
    """
    require_computing(taker.begin())
    taker.precopy()
    fault("checkpoint:copied")
    began = time.monotonic()
    try:
        taker.link.freeze()
        fault("checkpoint:frozen")
        taker.stopped(whole=False, extents=False)
    finally:
        taker.link.thaw()
    frozen_s = time.monotonic() - began
    fault("checkpoint:thawed")
    return taker.finish(frozen_s)


def require_computing(said: documents.Described) -> None:
    """Raises ConflictError ``checkpoint-state``: it stands still for somebody else."""
    if said.fenced or said.migration_state != "RUNNING":
        raise ConflictError(
            "the function stands still: its VM is saved, or it is being moved",
            code="checkpoint-state",
            where=f"function:{said.uuid}",
            hint="wait for the migration's end, or start or restore its VM",
        )


def _require_memory(wanted: int) -> None:
    """The copy must fit beside all that runs here. Raises CapacityError ``checkpoint-memory``."""
    if wanted > _available():
        raise CapacityError(
            f"the host has no {wanted // MIB} MiB of memory for a copy of the function's",
            code="checkpoint-memory",
            where="checkpoints",
            hint="end something, or move a function away",
        )


def _available() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _not_begun() -> ConflictError:
    return ConflictError("nothing was begun", code="checkpoint-state", where="checkpoints")
