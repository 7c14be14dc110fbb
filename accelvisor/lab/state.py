"""What a laboratory leaves behind for the next one to find: its name, its owner, its processes.

Everything else (namespaces, mounts, directories) has a name derived from the laboratory's, so that
whoever comes after a laboratory that was killed can take all of it away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from accelvisor.errors import ConflictError, DeadlineError, UsageError
from accelvisor.lab.cache import root as cache_root
from accelvisor.lab.process import ProcessId, wait_until
from accelvisor.lab.tree import repository, user

RUN = Path("/run/accelvisor-lab")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,19}")
MAX_HOSTS = 4
_LOCK_S = 5.0


def checked_name(name: str) -> str:
    """A laboratory's name as it may appear in namespaces, host names and paths."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"not a name for a laboratory: {name!r}",
            where="lab",
            hint="lower-case letters, digits and hyphens, at most 20",
        )
    return name


@dataclass(slots=True)
class HostState:
    """A host's processes: nspawn outside, the leader (its PID 1) inside."""

    index: int
    supervisor: ProcessId | None = None
    leader: ProcessId | None = None


@dataclass(slots=True)
class LabState:
    """A laboratory as written to disk; ``owner`` is None when it outlives its creator.

    ``tree`` and ``uid`` tell whose it is, ``cache`` on which cache it stands: whoever takes it away
    may have another one.
    """

    name: str
    owner: ProcessId | None
    hosts: list[HostState] = field(default_factory=list)
    package: str = ""
    tree: str = field(default_factory=lambda: str(repository()))
    uid: int = field(default_factory=user)
    cache: str = field(default_factory=lambda: str(cache_root()))

    @property
    def mine(self) -> bool:
        """Whether it was made from this source tree by this user."""
        return self.tree == str(repository()) and self.uid == user()

    @property
    def directory(self) -> Path:
        """Its hosts' writable layers; beside the images, so that they can be linked in."""
        return Path(self.cache) / "instances" / self.name

    def refuse_foreign(self) -> None:
        """Raise ConflictError when it is somebody else's."""
        if not self.mine:
            raise ConflictError(
                f"the laboratory {self.name!r} is of user {self.uid}, from {self.tree}",
                code="lab-foreign",
                where="lab",
                hint="run the command there, or choose another name with ACCELVISOR_LAB_NAME",
            )

    @property
    def abandoned(self) -> bool:
        """Whether its creator has died without taking it down."""
        return self.owner is not None and not self.owner.alive()

    def save(self) -> None:
        """Write it so that a reader sees the old or the new state, never half of one."""
        path = _path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "owner": _pair(self.owner),
            "package": self.package,
            "tree": self.tree,
            "uid": self.uid,
            "cache": self.cache,
            "hosts": [
                {
                    "index": host.index,
                    "supervisor": _pair(host.supervisor),
                    "leader": _pair(host.leader),
                }
                for host in self.hosts
            ],
        }
        work = path.with_suffix(".new")
        work.write_text(json.dumps(document, indent=1), encoding="utf-8")
        os.replace(work, path)

    def forget(self) -> None:
        """Remove it: nothing of this laboratory exists any more."""
        for path in run_directory(self.name).glob("*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            run_directory(self.name).rmdir()
        forget_lock(self.name)


def load(name: str) -> LabState | None:
    """The state of a laboratory; None when there is none. Damage reads as "hosts unknown"."""
    try:
        document = json.loads(_path(name).read_text(encoding="utf-8"))
        hosts = [
            HostState(int(host["index"]), _id(host["supervisor"]), _id(host["leader"]))
            for host in document["hosts"]
        ]
        found = LabState(name, _id(document["owner"]), hosts, str(document["package"]))
        found.tree = str(document.get("tree", found.tree))
        found.uid = int(document.get("uid", found.uid))
        found.cache = str(document.get("cache", found.cache))
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        # Better to take down what may be half a laboratory than to trip over it for ever.
        return LabState(name, ProcessId(0, 0))


def names() -> list[str]:
    """Every laboratory that this machine knows of."""
    return sorted(path.parent.name for path in RUN.glob("*/state.json"))


def run_directory(name: str) -> Path:
    """Small files of a running laboratory: state, sockets."""
    return RUN / name


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Only one process at a time changes a laboratory; a second one is told soon.

    Not at once: children of a process that was just killed may hold its lock for a moment.
    """
    RUN.mkdir(parents=True, exist_ok=True)
    held: list[TextIO] = []
    try:
        try:
            wait_until(lambda: _try_lock(name, held), deadline_s=_LOCK_S, what=f"lock of {name}")
        except DeadlineError:
            raise ConflictError(
                f"another process is changing the laboratory {name!r}",
                code="lab-busy",
                where="lab",
                hint="wait for it, or choose another name with ACCELVISOR_LAB_NAME",
            ) from None
        yield
    finally:
        for handle in held:
            handle.close()


def forget_lock(name: str) -> None:
    """Remove the lock's file; the caller holds the lock.

    Whoever waits for it finds out that the file has gone, and makes a new one.
    """
    _lock_path(name).unlink(missing_ok=True)


def _try_lock(name: str, held: list[TextIO]) -> bool:
    handle = _lock_path(name).open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its holder may have removed the file with the laboratory: that lock locks nothing.
        if _current(name, handle):
            held.append(handle)
            return True
    except BlockingIOError:
        pass
    handle.close()
    return False


def _current(name: str, handle: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), _lock_path(name).stat())
    except FileNotFoundError:
        return False


def _lock_path(name: str) -> Path:
    return RUN / f"{name}.lock"


def _path(name: str) -> Path:
    return run_directory(name) / "state.json"


def _pair(process: ProcessId | None) -> list[int] | None:
    return None if process is None else [process.pid, process.started]


def _id(value: Any) -> ProcessId | None:
    return None if value is None else ProcessId(int(value[0]), int(value[1]))
