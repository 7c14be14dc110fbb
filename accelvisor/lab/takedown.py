"""Taking laboratories away again: by name, all that were abandoned, and the cache below them.

Needs nothing but Python itself, so that a machine whose .venv is broken can still clean up.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from accelvisor.errors import AccelvisorError, ConflictError
from accelvisor.lab import cache, container, network, state, tree
from accelvisor.lab.container import Place
from accelvisor.lab.process import run
from accelvisor.lab.progress import Progress
from accelvisor.lab.state import HostState, LabState


def take_down(found: LabState) -> None:
    """End its hosts and remove everything that belongs to it; the caller holds its lock."""
    failed: AccelvisorError | None = None
    for index in range(1, state.MAX_HOSTS + 1):
        known = [record for record in found.hosts if record.index == index]
        record = known[0] if known else HostState(index)
        try:
            container.remove(Place.of(found, index), record)
        except AccelvisorError as error:
            failed = error
    network.remove(found.name)
    if failed is not None:
        # The state stays, so that the next `down` tries again.
        raise failed
    shutil.rmtree(found.directory, ignore_errors=True)
    found.forget()


def remove(name: str) -> bool:
    """Take down this user's and tree's laboratory of that name; False when there is none.

    Raises:
        ConflictError: it is somebody else's (``lab-foreign``), or just changing (``lab-busy``).
    """
    found = state.load(name)
    if found is None:
        return False
    found.refuse_foreign()
    with state.locked(name):
        take_down(found)
    return True


def reap(progress: Progress) -> None:
    """Take down every laboratory of this user whose owner died; its reaper may have died too."""
    for name in state.names():
        found = state.load(name)
        if found is None or not found.abandoned or found.uid != tree.user():
            continue
        try:
            with state.locked(name), progress.step(f"removing the abandoned laboratory {name}"):
                # Its reaper may have done it while we waited.
                found = state.load(name)
                if found is not None and found.abandoned:
                    take_down(found)
        except ConflictError:
            # Somebody else is at it already.
            continue


def clean(progress: Progress) -> None:
    """Delete the cache, having taken down this tree's persistent laboratories that stand on it.

    Raises:
        ConflictError: ``lab-cache-in-use``, before anything was touched: another laboratory stands
            on the cache, a process runs one of this tree's, or one is building into it.
    """
    reap(progress)
    standing = [found for found in _all() if found.cache == str(cache.root())]
    # Not ours to take down unasked: another tree's, and one that a living process will miss.
    users = [
        f"laboratory {found.name} ({found.tree})"
        for found in standing
        if not found.mine or found.owner is not None
    ]
    users += [f"process {pid}, which builds" for pid in cache.builders()]
    if users:
        raise ConflictError(
            f"the cache {cache.root()} is in use: {', '.join(users)}",
            code="lab-cache-in-use",
            where="lab",
            hint="wait for its end, or take it down where it belongs",
        )
    for found in standing:
        remove(found.name)
    # Not into a mount that no laboratory knows of any more: it is somebody's files.
    _unmount_below(cache.root())
    if cache.root().is_dir():
        shutil.rmtree(cache.root())


def _unmount_below(directory: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    # Field 5, in which blanks and the like are octal escapes.
    escaped = (line.split(" ")[4] for line in mounts.splitlines())
    places = (re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), text) for text in escaped)
    below = [place for place in places if place.startswith(f"{directory.resolve()}/")]
    for place in sorted(below, reverse=True):
        run(["umount", "--lazy", place], timeout=30)


def _all() -> list[LabState]:
    return [found for name in state.names() if (found := state.load(name)) is not None]
