"""Where a destination puts what it receives: files of its own, that no device maps.

Only when everything was verified is a device given them: window and registers are copied by the
function process, device memory changes hands as a file, so nothing is copied while the guest waits.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress

from accelvisor.frames.chunks import Kind
from accelvisor.function.endpoints import memfd

#: In the order in which ``load`` wants them.
_LOADED = (Kind.STATE, Kind.WINDOW, Kind.MEMORY, Kind.EXTENTS)
#: Sections whose size is only known at the end: their files are cut to it.
_OPEN = (Kind.FUNCTION, Kind.STATUS, Kind.EXTENTS)


class Staged:
    """Files for one function's sections.

    Args:
        sections: bytes of each section, for those in ``_OPEN`` at most. Holes take no memory.
    """

    def __init__(self, sections: Mapping[int, int]) -> None:
        self._fds: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        #: where each section may be written
        self.views: dict[int, memoryview] = {}
        for kind, nbytes in sections.items():
            if kind in _OPEN:
                fd = os.memfd_create("staged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(fd, max(1, nbytes))
            else:
                fd = memfd("staged", nbytes, grows=True)
            self._fds[kind] = fd
            if nbytes:
                mapped = mmap.mmap(fd, nbytes)
                self._maps[kind] = mapped
                self.views[kind] = memoryview(mapped)

    def finish(self, sections: Mapping[int, int]) -> None:
        """Cut the open sections to the sizes that the manifest signed."""
        for kind in _OPEN:
            if kind in self._fds:
                # Nobody reads beyond what was signed, so the mapping may stay.
                os.ftruncate(self._fds[kind], max(1, sections.get(kind, 0)))
                fcntl.fcntl(self._fds[kind], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def document(self, kind: int, nbytes: int) -> bytes:
        """A document, whole. Only after it was verified."""
        return os.pread(self._fds[kind], nbytes, 0)

    def descriptors(self) -> list[int]:
        """For ``load``; they stay ours."""
        return [self._fds[kind] for kind in _LOADED]

    def close(self) -> None:
        """Let go of everything; what a device took over lives on."""
        for kind in list(self._maps):
            self._unmap(kind)
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _unmap(self, kind: int) -> None:
        if kind in self._maps:
            del self.views[kind]
            with suppress(BufferError):  # the last of those who look at it lets it go
                self._maps.pop(kind).close()
