"""The lab's cache: things that are dear to build, each under the hash of what it is built from.

A thing is built in a directory of its own and renamed into place when whole, so a reader sees all
of it or nothing, whatever happens to the builder. One builder at a time per kind; whoever waited
finds it built. Nothing in the cache is ever changed: a changed recipe has another hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelvisor.lab.process import ProcessId

# How many of a kind stay. Images are large: one older is kept for whoever works on two branches.
# The small things are many where several people work at once, and must not go while one installs.
_KEEP = {"base": 2, "host": 2, "guest": 2}
_KEEP_SMALL = 16


def root() -> Path:
    """The cache directory: ACCELVISOR_LAB_CACHE, or under the user's cache directory."""
    chosen = os.environ.get("ACCELVISOR_LAB_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen) if chosen else Path(base).expanduser() / "accelvisor/lab"


def digest(*parts: str | bytes) -> str:
    """A short hash over parts, each with its length so that no two lists of parts collide."""
    total = hashlib.sha256()
    for part in parts:
        block = part.encode() if isinstance(part, str) else part
        total.update(len(block).to_bytes(8, "little") + block)
    return total.hexdigest()[:16]


def digest_tree(base: Path, paths: list[Path]) -> str:
    """A hash over files: their names below base, their modes' executable bit, their bytes."""
    parts: list[str | bytes] = []
    for path in sorted(paths):
        executable = "x" if path.stat().st_mode & 0o111 else "-"
        parts += [str(path.relative_to(base)), executable, path.read_bytes()]
    return digest(*parts)


def find(kind: str, key: str) -> Path | None:
    """The cached thing, if it has been built."""
    path = root() / f"{kind}-{key}"
    return path if path.is_dir() else None


def obtain(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The thing under this key; built by ``build(directory)`` when it is not there yet."""
    found = find(kind, key)
    if found is not None:
        os.utime(found)
        return found
    with locked(kind):
        final = root() / f"{kind}-{key}"
        if final.is_dir():
            return final
        sweep()
        work = root() / f".build-{kind}-{_tag()}"
        work.mkdir()
        try:
            build(work)
            work.rename(final)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        _prune(kind)
        return final


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock of this name; the kernel lets it go when the holder dies."""
    root().mkdir(parents=True, exist_ok=True)
    with (root() / f".lock-{name}").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _tag() -> str:
    own = ProcessId.own()
    return f"{own.pid}-{own.started}"


def builders() -> list[int]:
    """The processes that are building something right now."""
    return sorted(builder.pid for _, builder in _unfinished() if builder.alive())


def sweep() -> None:
    """Remove what builders that have died left half done."""
    for path, builder in _unfinished():
        if not builder.alive():
            shutil.rmtree(path, ignore_errors=True)


def _unfinished() -> list[tuple[Path, ProcessId]]:
    found = []
    for path in root().glob(".build-*"):
        words = path.name.split("-")[-2:]
        if len(words) == 2 and all(word.isdigit() for word in words):
            found.append((path, ProcessId(int(words[0]), int(words[1]))))
    return found


def _prune(kind: str) -> None:
    """Keep the newest few of a kind, and every one that a living laboratory still uses."""
    keep = _KEEP.get(kind, _KEEP_SMALL)
    things = [path for path in root().glob(f"{kind}-*") if _is_thing(path, kind)]
    for path in sorted(things, key=lambda path: path.stat().st_mtime, reverse=True)[keep:]:
        if not in_use(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_thing(path: Path, kind: str) -> bool:
    return path.is_dir() and len(path.name) == len(kind) + 1 + 16


def in_use(path: Path) -> bool:
    """Whether a laboratory boots from it: an overlay names its lower directory in its options."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    return any(f"{path}/" in line for line in mounts.splitlines())
