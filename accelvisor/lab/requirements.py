"""Can this machine run a laboratory? Answered before anything is built, with what to do."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from accelvisor.errors import DeadlineError, SystemFailure, UnavailableError
from accelvisor.lab import cache
from accelvisor.lab.process import run

# A base, a host image, a guest image and two of each while they are renewed.
_DISK_BYTES = 4 * 1024**3
_MEMORY_BYTES = 2 * 1024**3

_TOOLS = {
    "debootstrap": "debootstrap",
    "mksquashfs": "squashfs-tools",
    "systemd-nspawn": "systemd-container",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "dpkg-buildpackage": "dpkg-dev",
    "dh": "debhelper",
}


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing that a laboratory needs and this machine lacks."""

    what: str
    remedy: str


def missing() -> list[Missing]:
    """Everything that stands in the way, not only the first thing."""
    found = [
        Missing(f"the program {tool}", f"apt-get install {package}, or scripts/bootstrap")
        for tool, package in _TOOLS.items()
        if shutil.which(tool) is None
    ]
    if platform.machine() != "x86_64":
        found.append(Missing(f"an x86-64 machine (this is {platform.machine()})", "use another"))
    if os.geteuid() != 0:
        # What follows can only be tried as root.
        return [*found, Missing("root", "run it as root: it mounts and makes namespaces")]
    return [*found, *_kernel(), *_room()]


def require() -> None:
    """Raise one error that names everything that is missing."""
    found = missing()
    if found:
        raise UnavailableError(
            "this machine cannot run a laboratory; it lacks: "
            + "; ".join(item.what for item in found),
            code="lab-unavailable",
            where="lab",
            hint="; ".join(dict.fromkeys(item.remedy for item in found)),
        )


def _kernel() -> list[Missing]:
    found = []
    try:
        run(
            ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "true"], timeout=20
        )
    except (SystemFailure, DeadlineError) as error:
        remedy = (
            f"inside a container it must be a privileged one ({error.message.splitlines()[-1]})"
        )
        found.append(Missing("namespaces", remedy))
    if not _filesystem("overlay"):
        found.append(Missing("the overlay file system", "modprobe overlay, or another kernel"))
    return found


def _filesystem(name: str) -> bool:
    if shutil.which("modprobe"):
        run(["modprobe", "--quiet", name], timeout=20, check=False)
    known = Path("/proc/filesystems").read_text(encoding="ascii").split()
    return name in known


def _room() -> list[Missing]:
    found = []
    directory = cache.root()
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    built = any(directory.glob("host-*"))
    if not built and free < _DISK_BYTES:
        remedy = "free some, or point ACCELVISOR_LAB_CACHE at another disk"
        what = f"{_DISK_BYTES >> 30} GiB of disk under {directory} ({free >> 20} MiB are free)"
        found.append(Missing(what, remedy))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory < _MEMORY_BYTES:
        found.append(Missing("2 GiB of memory", "use a larger machine"))
    return found
