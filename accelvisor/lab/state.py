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
from accelvisor.lab import cache
from accelvisor.lab.process import ProcessId, wait_until

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
    """A laboratory as written to disk; ``owner`` is None when it outlives its creator."""

    name: str
    owner: ProcessId | None
    hosts: list[HostState] = field(default_factory=list)
    package: str = ""

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


def load(name: str) -> LabState | None:
    """The state of a laboratory; None when there is none. Damage reads as "hosts unknown"."""
    try:
        document = json.loads(_path(name).read_text(encoding="utf-8"))
        hosts = [
            HostState(int(host["index"]), _id(host["supervisor"]), _id(host["leader"]))
            for host in document["hosts"]
        ]
        return LabState(name, _id(document["owner"]), hosts, str(document["package"]))
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


def instance_directory(name: str) -> Path:
    """Its hosts' writable layers; on the cache's file system, so that images can be linked in."""
    return cache.root() / "instances" / name


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Only one process at a time changes a laboratory; a second one is told soon.

    Not at once: children of a process that was just killed may hold its lock for a moment.
    """
    RUN.mkdir(parents=True, exist_ok=True)
    with (RUN / f"{name}.lock").open("w") as handle:
        try:
            wait_until(lambda: _try_lock(handle), deadline_s=_LOCK_S, what=f"lock of {name}")
        except DeadlineError:
            raise ConflictError(
                f"another process is changing the laboratory {name!r}",
                code="lab-busy",
                where="lab",
                hint="wait for it, or choose another name with ACCELVISOR_LAB_NAME",
            ) from None
        yield


def _try_lock(handle: TextIO) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _path(name: str) -> Path:
    return run_directory(name) / "state.json"


def _pair(process: ProcessId | None) -> list[int] | None:
    return None if process is None else [process.pid, process.started]


def _id(value: Any) -> ProcessId | None:
    return None if value is None else ProcessId(int(value[0]), int(value[1]))
