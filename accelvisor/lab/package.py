"""accelvisor's own Debian packages, built from this source tree and cached by its content."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from accelvisor.errors import SystemFailure
from accelvisor.lab import cache, images
from accelvisor.lab.process import die_with_parent, run
from accelvisor.lab.progress import Progress, run_logged
from accelvisor.lab.tree import repository

HOST = "accelvisor"
GUEST = "accelvisor-guest"

# What the packages are made of. The lab is not: it is a tool of the source tree.
_TREES = ("accelvisor", "debian", "systemd", "docs/man")
_FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
_LEFT_OUT = ("__pycache__", "lab")


def sources(tree: Path) -> list[Path]:
    """Every file that goes into the packages."""
    found = [tree / name for name in _FILES if (tree / name).is_file()]
    for name in _TREES:
        found += [path for path in (tree / name).rglob("*") if _counts(path, tree)]
    return sorted(found)


def _counts(path: Path, tree: Path) -> bool:
    parts = path.relative_to(tree).parts
    built = parts[0] == "debian" and (
        parts[1] in ("accelvisor", "accelvisor-guest", ".debhelper", "files", "tmp")
        or path.name.endswith((".substvars", ".debhelper.log", "-stamp"))
    )
    return path.is_file() and not built and not any(part in _LEFT_OUT for part in parts)


def key() -> str:
    """Changes when the packages must be built anew."""
    tree = repository()
    return cache.digest_tree(tree, sources(tree))


def build(progress: Progress, *, version: str | None = None) -> Path:
    """A directory with the .debs of this source tree as it is now.

    ``version``: another than that of debian/changelog, to have something to upgrade to. What is
    in them is packed once more, not built.
    """
    tree = repository()
    if version is not None:
        built = build(progress)
        return cache.obtain(
            "deb", cache.digest(key(), version), lambda work: _repack(built, work, version)
        )

    def make(work: Path) -> None:
        copy = work / "source"
        for path in sources(tree):
            target = copy / path.relative_to(tree)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        # Debian's own Python and tools, whatever else this machine has in its PATH.
        env = ["env", "-i", "-C", str(copy), "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]
        argv = ["dpkg-buildpackage", "--build=binary", "--no-sign", "--no-pre-clean"]
        with progress.step("packages: dpkg-buildpackage") as step:
            run_logged(die_with_parent([*env, *argv]), step=step, log=images.log_of("package"))
        shutil.rmtree(copy)

    return cache.obtain("deb", key(), make)


def _repack(built: Path, work: Path, version: str) -> None:
    """The same packages in another version, which depend on each other in that one."""
    for name in (HOST, GUEST):
        root = work / name
        run(["dpkg-deb", "--raw-extract", str(package(built, name)), str(root)], timeout=60)
        control = root / "DEBIAN/control"
        text = control.read_text(encoding="utf-8")
        old = re.search(r"^Version: (.*)$", text, re.MULTILINE)
        if old is None:
            raise SystemFailure(f"the {name} package has no version", where="lab")
        text = text.replace(old[0], f"Version: {version}")
        control.write_text(text.replace(f"(= {old[1]})", f"(= {version})"), encoding="utf-8")
        argv = ["dpkg-deb", "--build", "-Zgzip", "-z1", str(root)]
        run([*argv, str(work / f"{name}_{version}_all.deb")], timeout=60)
        shutil.rmtree(root)


def package(directory: Path, name: str) -> Path:
    """The file of one package among those built."""
    found = sorted(directory.glob(f"{name}_*.deb"))
    if len(found) != 1:
        raise SystemFailure(f"one {name} package expected in {directory}, found {len(found)}")
    return found[0]
