"""The files of one function: what the daemon writes, and removing what the function left.

The specification lies in a directory that a function can only read. The function's own directory
is writable for it and so is *hostile*: the daemon opens no file in it for writing, follows no link
that it finds there, and removes entries relative to a descriptor of the directory itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from itertools import islice

from accelvisor.daemon.paths import FunctionPaths
from accelvisor.errors import SystemFailure

LOG = logging.getLogger(__name__)

#: Entries that are removed at most: a function has four sockets, the rest is a mess of its own.
_ENTRIES = 1000
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write(files: FunctionPaths, spec: Mapping[str, object]) -> None:
    """Make the function's directory, and write its specification, complete or not at all.

    Raises:
        SystemFailure: ``spec-write``.
    """
    try:
        # The parents' set-group-id bit (tmpfiles.d) gives both to the group that functions run in.
        # The function makes its sockets in its directory, and QEMU only passes through to the one
        # whose path it knows. chmod: a umask takes from mkdir's mode.
        files.directory.mkdir(parents=True, exist_ok=True)
        files.directory.chmod(0o771)
        files.spec.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        staged = files.spec.with_suffix(".new")
        staged.unlink(missing_ok=True)
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640)
        with open(fd, "w") as stream:
            stream.write(json.dumps(dict(spec), indent=2) + "\n")
        os.replace(staged, files.spec)
    except OSError as error:
        raise SystemFailure(
            f"cannot write the specification: {error.strerror}",
            code="spec-write",
            where=str(files.spec),
        ) from error


def sweep(files: FunctionPaths) -> bool:
    """Remove everything of a function whose process is gone; repeatable.

    Returns:
        False when something stays in its directory that the daemon may not remove (the function
        made a directory there that it alone may open). That holds up nothing.

    Raises:
        SystemFailure: ``sweep``: our own files cannot be removed.
    """
    try:
        for path in (files.spec, files.spec.with_suffix(".new"), files.process, files.log):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise SystemFailure(
            f"cannot remove it: {error.strerror}", code="sweep", where=str(files.spec)
        ) from error
    return _empty(files) and _gone(files)


def _empty(files: FunctionPaths) -> bool:
    """Remove the entries one level deep; one that resists is left."""
    try:
        fd = os.open(files.directory, _DIRECTORY)
    except FileNotFoundError:
        return True
    except OSError as error:
        LOG.warning("cannot open %s: %s", files.directory, error.strerror)
        return False
    try:
        with os.scandir(fd) as entries:
            names = [
                (entry.name, entry.is_dir(follow_symlinks=False))
                for entry in islice(entries, _ENTRIES)
            ]
        for name, is_directory in names:
            with contextlib.suppress(OSError):
                (os.rmdir if is_directory else os.unlink)(name, dir_fd=fd)
    finally:
        os.close(fd)
    return True


def _gone(files: FunctionPaths) -> bool:
    try:
        os.rmdir(files.directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        LOG.warning("cannot remove %s: %s", files.directory, error.strerror)
        return False
    return True
