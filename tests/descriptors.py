"""What a process has open, for tests that show that nothing is left open."""

from __future__ import annotations

import gc
import os


def listed() -> int:
    """How many descriptors this process has open now, whoever will close them: for a loop, in which
    collecting garbage each time would take minutes. More after than before is a leak.
    """
    return len(os.listdir("/proc/self/fd"))


def descriptors() -> set[str]:
    """This process' descriptors, with the one that the listing itself takes.

    What earlier tests left to the garbage collector is closed first: else it is closed in the
    middle of this one, and fewer are open after than before.
    """
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def open_fds(pid: int | str = "self") -> int:
    """How many descriptors a process has open."""
    return len(descriptors() if pid == "self" else os.listdir(f"/proc/{pid}/fd"))
