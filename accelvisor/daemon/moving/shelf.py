"""Checkpoints on disk: ``STATE/checkpoints/FUNCTION/NAME.xckp``, readable by the daemon alone.

Which function a checkpoint belongs to is what the directory says, never what the file says; a file
whose manifest says otherwise is not listed. A file is written under a name that nothing looks for,
made durable, and only then given its own: whatever is there is whole. What a kill left is swept at
the next start.

Who may delete what is in the name too: one that begins with ``auto-`` goes when newer ones take its
place, any other only when a person says so.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from accelvisor.daemon import atomic
from accelvisor.errors import (
    AccelvisorError,
    CapacityError,
    ConflictError,
    NotFoundError,
    StateError,
    SystemFailure,
    UsageError,
)
from accelvisor.frames import envelope as envelopes
from accelvisor.frames import manifest as manifests
from accelvisor.frames.container import Readable, Reader
from accelvisor.frames.manifest import MANIFEST_TYPE, Manifest, manifest_digest
from accelvisor.frames.store import Entry
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
SUFFIX = ".xckp"
AUTOMATIC = "auto-"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{LIMITS.name_chars - 1}}}")
#: A name that no checkpoint can have.
_STAGED = ".new"


@dataclass(frozen=True, slots=True)
class Head:
    """What a file says of itself: **not verified**."""

    manifest: Manifest
    digest: bytes
    envelope: bytes


class Shelf:
    """Is an :class:`accelvisor.frames.store.Store`. Names are ``FUNCTION/NAME``. Blocking; used by
    several threads, none of which works on another's function.

    Args:
        root: made when it is missing.

    Raises:
        SystemFailure: ``checkpoint-io``, here and from every method.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        with self._guarded():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.chmod(0o700)

    def list(self, function: str | None = None) -> Sequence[Entry]:
        """The newest last. A file that makes no sense is left out, and logged."""
        found = []
        for name in self.names(function):
            try:
                found.append(self.entry(name))
            except AccelvisorError as error:
                LOG.warning("checkpoint %s: %s", name, error.message)
        return sorted(found, key=lambda entry: (entry.created_ns, entry.name))

    def names(self, function: str | None = None) -> Sequence[str]:
        """What lies there, sense or not."""
        with self._guarded():
            folders = [function] if function is not None else sorted(os.listdir(self._root))
            found = []
            for folder in folders:
                if _UUID.fullmatch(folder) and (self._root / folder).is_dir():
                    files = sorted(os.listdir(self._root / folder))
                    names = [name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)]
                    found += [f"{folder}/{name}" for name in names if _NAME.fullmatch(name)]
        return found

    def entry(self, name: str) -> Entry:
        """One checkpoint, from its head alone.

        Raises:
            NotFoundError: ``checkpoint-not-found``.
            FrameRefused, DataError: the head makes no sense.
            StateError: ``checkpoint-misplaced``.
        """
        head = self.head(name)
        function, _, own = name.partition("/")
        with self._guarded():
            size = self._path(name).stat().st_size
        return Entry(
            name=name,
            function=function,
            digest=head.digest,
            parent=head.manifest.parent,
            created_ns=head.manifest.created_ns,
            size=size,
            pinned=not own.startswith(AUTOMATIC),
        )

    def head(self, name: str) -> Head:
        """What :meth:`entry` is made of. Raises the same."""
        with self.open(name) as file:
            head = read_head(file)
        if head.manifest.function != name.partition("/")[0]:
            raise StateError(
                f"it says that it is of function {head.manifest.function}",
                code="checkpoint-misplaced",
                where=f"checkpoint:{name}",
                hint="somebody moved the file: accelctl checkpoint import puts it in its place",
            )
        return head

    def find(self, name: str, function: str | None = None) -> str:
        """The whole name of what a person calls ``name``: with the function or, where only one is
        called so, without.

        Raises:
            NotFoundError: ``checkpoint-not-found``; ConflictError: ``checkpoint-ambiguous``.
        """
        known = self.names(function)
        if name in known:
            return name
        found = [item for item in known if item.partition("/")[2] == name]
        if len(found) > 1:
            raise ConflictError(
                f'several functions have a checkpoint "{name}"',
                code="checkpoint-ambiguous",
                where="checkpoints",
                hint="write FUNCTION-UUID/NAME",
            )
        if not found:
            raise _missing(name)
        return found[0]

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """As :meth:`accelvisor.frames.store.Store.open`."""
        path = self._path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise _missing(name) from None
        except OSError as error:
            raise self._failed(error) from error
        with open(fd, "rb") as file:
            yield file

    @contextmanager
    def put(self, name: str) -> Iterator[BinaryIO]:
        """As :meth:`accelvisor.frames.store.Store.put`."""
        path = self._path(name)
        staged = path.with_name(f".{path.name}{_STAGED}")
        with self._guarded():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if path.exists():
                raise _exists(name)
            staged.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(staged, flags, 0o600)
        try:
            with self._guarded(), open(fd, "w+b") as file:
                yield file
                file.flush()
                os.fsync(fd)
                try:
                    # Unlike a rename, this takes nobody's place.
                    os.link(staged, path)
                except FileExistsError:
                    raise _exists(name) from None
        finally:
            staged.unlink(missing_ok=True)
        self._sync(path.parent)

    def delete(self, name: str) -> None:
        """As :meth:`accelvisor.frames.store.Store.delete`."""
        path = self._path(name)
        try:
            path.unlink()
        except FileNotFoundError:
            raise _missing(name) from None
        except OSError as error:
            raise self._failed(error) from error
        self._sync(path.parent)

    def sweep(self) -> None:
        """Remove what a kill left half written."""
        with self._guarded():
            for path in self._root.glob(f"*/.*{_STAGED}"):
                path.unlink(missing_ok=True)

    def require_room(self, nbytes: int) -> None:
        """Raises CapacityError ``checkpoint-space``."""
        with self._guarded():
            free = os.statvfs(self._root)
        left = free.f_bavail * free.f_frsize - nbytes
        if left < LIMITS.checkpoint_free_bytes:
            raise _full(self._root)

    def _path(self, name: str) -> Path:
        function, _, own = name.partition("/")
        if not _UUID.fullmatch(function) or not _NAME.fullmatch(own):
            raise UsageError(
                f'"{name[:120]}" cannot be the name of a checkpoint',
                code="checkpoint-name",
                where="checkpoints",
                hint=f"1 to {LIMITS.name_chars} letters, digits, . _ -, beginning with a letter or"
                " digit",
            )
        return self._root / function / f"{own}{SUFFIX}"

    def _sync(self, path: Path) -> None:
        with self._guarded():
            atomic.sync_directory(path)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> AccelvisorError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _full(self._root)
        return SystemFailure(
            f"checkpoints cannot be kept: {error.strerror or error}",
            code="checkpoint-io",
            where=str(self._root),
        )


def read_head(file: BinaryIO) -> Head:
    """What a checkpoint file says of itself, bounded; nothing is verified.

    Raises:
        FrameRefused: ``frame-shape``, ``frame-version``, ``frame-truncated``.
        DataError: ``envelope-invalid``, ``document-invalid``.
    """
    data = Reader(cast(Readable, file)).envelope
    envelope = envelopes.decode(data, kind=MANIFEST_TYPE, max_bytes=LIMITS.manifest_bytes)
    manifest = manifests.decode(envelope.payload, Manifest)
    return Head(manifest, manifest_digest(envelope.payload), data)


def checked_label(label: str) -> str:
    """A name that a person gives. Raises UsageError ``checkpoint-name``."""
    if _NAME.fullmatch(label) is None or label.startswith((AUTOMATIC, "save-")):
        raise UsageError(
            f'"{label[:80]}" cannot be the name of a checkpoint',
            code="checkpoint-name",
            where="checkpoints",
            hint=f"1 to {LIMITS.name_chars} letters, digits, . _ -; auto- and save- are taken",
        )
    return label


def _missing(name: str) -> NotFoundError:
    return NotFoundError(
        f'there is no checkpoint "{name[:120]}"',
        code="checkpoint-not-found",
        where="checkpoints",
        hint="accelctl checkpoint list",
    )


def _exists(name: str) -> ConflictError:
    return ConflictError(
        f'there is a checkpoint "{name}" already',
        code="checkpoint-exists",
        where="checkpoints",
    )


def _full(root: Path) -> CapacityError:
    return CapacityError(
        "there is no room for the checkpoint",
        code="checkpoint-space",
        where=str(root),
        hint="accelctl checkpoint delete, or give the file system more space",
    )
