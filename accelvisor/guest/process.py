"""This process: what it is called, and what becomes of its open functions when it forks."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol


class Forkable(Protocol):
    """What a forked child must let go of."""

    def forked(self) -> None:
        """Called in the child."""
        ...


#: What is open in this process.
OPEN: weakref.WeakSet[Forkable] = weakref.WeakSet()


def process_name() -> str:
    """The program's name as the kernel shows it, at most 48 bytes of UTF-8."""
    try:
        name = Path("/proc/self/comm").read_text().strip()
    except OSError:
        name = "python"
    return name.encode()[:48].decode(errors="ignore")


def _after_fork() -> None:
    for opened in list(OPEN):
        opened.forked()
    OPEN.clear()


os.register_at_fork(after_in_child=_after_fork)
