"""Files that are there whole or not at all, whatever a full disk or a kill does to the writing."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def write_all(fd: int, data: bytes, at: int = 0) -> None:
    """All of ``data`` at that byte of a file. ``write`` may take a part of it, at the end of a file
    system that is almost full, say, and call that success.

    Raises:
        OSError
    """
    left = memoryview(data)
    while left:
        count = os.pwrite(fd, left, at)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left, at = left[count:], at + count


def replace(path: Path, data: bytes) -> None:
    """A file in the place of the one that is there, or the old one as it was. On disk when this
    returns; only its owner may read it. It is staged beside it, as ``NAME.new``.

    Raises:
        OSError
    """
    staged = path.with_name(path.name + ".new")
    try:
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(staged, path)
    except OSError:
        # Its room may be what the next attempt lacks.
        with suppress(OSError):
            staged.unlink()
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """What was renamed or removed in it stays so. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
