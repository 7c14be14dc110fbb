"""The function's memory as the holder keeps it: four files that outlive every worker, and what was
handed out or taken back of them. Standard library only.
"""

from __future__ import annotations

import os

from accelvisor.abi.registers import PAGE
from accelvisor.function import shape as shapes
from accelvisor.function.endpoints import has_data, memfd
from accelvisor.function.shape import Shape
from accelvisor.function.state import STATE_BYTES, TRACK_BYTES

NAMES = ("state", "window", "memory", "track")


class Files:
    """New ones: of a function that begins with ``shape``, and with nothing else."""

    def __init__(self, shape: Shape, window_bytes: int) -> None:
        self.state = memfd("state", STATE_BYTES)
        self.window = memfd("window", window_bytes)
        # It may grow with the function's shape, and never shrinks under who maps it.
        self.memory = memfd("memory", max(PAGE, shape.memory_bytes), grows=True)
        self.track = memfd("track", TRACK_BYTES)
        shapes.begin(self.state, shape)

    def all(self) -> list[int]:
        """As a worker inherits them."""
        return [self.state, self.window, self.memory, self.track]

    def close(self) -> None:
        for fd in self.all():
            os.close(fd)

    def adopt_memory(self, fd: int, least: int) -> None:
        """A loaded state brought device memory of its own; one that is too small is let go."""
        if os.fstat(fd).st_size < least:
            os.close(fd)
            return
        os.close(self.memory)
        self.memory = fd

    def lend(self) -> list[int]:
        """Duplicates, to be copied from: read-only but for the marks of what was written."""
        read_only = [self.state, self.window, self.memory]
        fds = [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) for fd in read_only]
        return [*fds, os.dup(self.track)]

    def data(self) -> dict[str, bool]:
        """Which of them hold a page that anybody wrote. (The state always does.)"""
        return {name: has_data(getattr(self, name)) for name in NAMES[1:]}
