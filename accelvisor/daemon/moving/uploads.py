"""Files that come to the daemon, and go from it, in parts of admin messages.

The daemon runs as a user of its own in a sandbox: a path of the caller's means nothing to it, and
should not. So a file comes as parts, in order, into a file that has no name, and is whole when as
many bytes came as were promised. Whoever began it is told a number that nobody guesses.
"""

from __future__ import annotations

import base64
import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from accelvisor.errors import (
    AccelvisorError,
    CapacityError,
    DataError,
    NotFoundError,
    SystemFailure,
    UsageError,
)
from accelvisor.limits import LIMITS, Limits

_WHERE = "uploads"


@dataclass
class _Upload:
    file: BinaryIO
    left: int
    used: float
    busy: bool = False


class Uploads:
    """Of one daemon. Thread-safe; blocks.

    Args:
        directory: whose file system takes the files.
        require_room: raises where so many bytes do not fit.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        directory: Path,
        require_room: Callable[[int], None],
        *,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._directory = directory
        self._require_room = require_room
        self._limits = limits
        self._clock = clock
        self._entropy = entropy
        self._lock = threading.Lock()
        self._known: dict[str, _Upload] = {}

    def close(self) -> None:
        """Forget them all."""
        with self._lock:
            for upload in self._known.values():
                upload.file.close()
            self._known.clear()

    def begin(self, nbytes: int) -> str:
        """A file of so many bytes will come; the name for its parts.

        Raises:
            UsageError: that is no size. CapacityError: ``upload-many``, ``checkpoint-space``.
        """
        if nbytes < 1:
            raise UsageError("a file has at least one byte", where=_WHERE)
        with self._lock:
            self._forget_idle()
            if len(self._known) >= self._limits.checkpoint_uploads:
                raise CapacityError(
                    f"{len(self._known)} files are being brought already",
                    code="upload-many",
                    where=_WHERE,
                    hint="wait until one has come",
                )
            self._require_room(nbytes + sum(upload.left for upload in self._known.values()))
            name = self._entropy(16).hex()
            self._known[name] = _Upload(self.nameless(), nbytes, self._clock())
        return name

    def add(self, name: str, part: str) -> int:
        """The next part, in base64; how many bytes are left to come.

        Raises:
            NotFoundError: ``upload-unknown``. DataError: ``upload-part``: it is no part of it.
            CapacityError: ``checkpoint-space``; SystemFailure: ``checkpoint-io``. The file is
            forgotten then.
        """
        with self._taken(name) as upload:
            data = self._decoded(part)
            if not 0 < len(data) <= upload.left:
                raise _no_part("it has more or less than what was to come")
            try:
                upload.file.write(data)
            except OSError as error:
                raise failed(error) from error
            upload.left -= len(data)
            upload.used = self._clock()
            return upload.left

    @contextmanager
    def whole(self, name: str) -> Iterator[BinaryIO]:
        """A file that has come, at its beginning; it is forgotten afterwards.

        Raises:
            NotFoundError: ``upload-unknown``. DataError: ``upload-part``: something is missing.
        """
        try:
            with self._taken(name) as upload:
                if upload.left:
                    raise _no_part(f"{upload.left} bytes of the file did not come")
                upload.file.seek(0)
                yield upload.file
        finally:
            self.drop(name)

    def drop(self, name: str) -> None:
        """Forget one, if it is there."""
        with self._lock:
            upload = self._known.pop(name, None)
        if upload is not None:
            upload.file.close()

    def nameless(self) -> BinaryIO:
        """A file that is gone with its last user. Raises SystemFailure ``checkpoint-io``."""
        try:
            return cast(BinaryIO, tempfile.TemporaryFile(dir=self._directory))
        except OSError as error:
            raise failed(error) from error

    @contextmanager
    def _taken(self, name: str) -> Iterator[_Upload]:
        """One at a time; what goes wrong with it ends it."""
        with self._lock:
            self._forget_idle()
            upload = self._known.get(name)
            if upload is None or upload.busy:
                raise NotFoundError(
                    "no such file is being brought",
                    code="upload-unknown",
                    where=_WHERE,
                    hint=f"begin again: one that stood still for"
                    f" {self._limits.checkpoint_upload_idle_s:g} s is forgotten",
                )
            upload.busy = True
        try:
            yield upload
        except BaseException:
            self.drop(name)
            raise
        finally:
            upload.busy = False

    def _forget_idle(self) -> None:
        oldest = self._clock() - self._limits.checkpoint_upload_idle_s
        for name, upload in list(self._known.items()):
            if upload.used < oldest and not upload.busy:
                self._known.pop(name).file.close()

    def _decoded(self, part: str) -> bytes:
        try:
            data = base64.b64decode(part, validate=True)
        except ValueError:
            raise _no_part("it is not base64") from None
        if len(data) > self._limits.checkpoint_part_bytes:
            raise _no_part(f"it is larger than {self._limits.checkpoint_part_bytes} bytes")
        return data


def parts(file: BinaryIO) -> Iterator[str]:
    """A file from its beginning, in base64."""
    file.seek(0)
    while data := file.read(LIMITS.checkpoint_part_bytes):
        yield base64.b64encode(data).decode()


def _no_part(why: str) -> DataError:
    return DataError(f"this is no part of the file: {why}", code="upload-part", where=_WHERE)


def failed(error: OSError) -> AccelvisorError:
    """What a failed write to such a file is called."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            "there is no room for the file",
            code="checkpoint-space",
            where=_WHERE,
            hint="accelctl checkpoint delete, or give the file system more space",
        )
    return SystemFailure(
        f"checkpoints cannot be kept: {error.strerror or error}",
        code="checkpoint-io",
        where=_WHERE,
    )
