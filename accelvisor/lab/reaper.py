"""A laboratory whose owner is killed goes away by itself: a process that waits for that moment.

The kernel ends the hosts with their owner, but mounts, namespaces and directories have nobody who
would. So the owner starts this process first, in a session of its own; it waits for the owner's end
and takes away what is left then, which is nothing when the owner did it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from accelvisor.errors import AccelvisorError
from accelvisor.lab import cache, state, takedown, tree
from accelvisor.lab.process import ProcessId, readable, wait_until

# A host's processes need a moment to die, and whoever changes the laboratory holds its lock.
_DEADLINE_S = 120.0


class Reaper:
    """The waiting process, as its owner holds it."""

    def __init__(self, lab: str) -> None:
        own = ProcessId.own()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, lab, str(own.pid), str(own.started)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # Not the owner's process group: what ends the owner must not end it as well.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(tree.repository())},
        )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def dismiss(self) -> None:
        """Its owner has taken the laboratory away."""
        self._process.kill()
        self._process.wait()


def main(argv: Sequence[str]) -> int:
    """``LAB PID STARTED``: wait for the process's end, then take away its laboratory."""
    lab, owner = argv[0], ProcessId(int(argv[1]), int(argv[2]))
    _wait(owner)
    try:
        wait_until(lambda: _gone(lab, owner), deadline_s=_DEADLINE_S, what=f"the end of {lab}")
    except AccelvisorError:
        # The next lab command tries again.
        return 1
    cache.sweep()
    return 0


def _wait(owner: ProcessId) -> None:
    try:
        handle = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    try:
        # Only now is it sure that the descriptor is the owner's, not that of who came after it.
        if owner.alive():
            readable([handle])
    finally:
        os.close(handle)


def _gone(lab: str, owner: ProcessId) -> bool:
    """Whether nothing of the owner's laboratory is left, after trying once."""
    try:
        with state.locked(lab):
            found = state.load(lab)
            if found is not None and found.owner == owner:
                takedown.take_down(found)
            elif found is None:
                state.forget_lock(lab)
        return True
    except AccelvisorError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
