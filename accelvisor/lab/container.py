"""One lab host as a container: an overlay of the host image, booted by systemd-nspawn.

Real systemd as PID 1, its own network, mounts, processes, host name and machine identity; what it
writes goes to an upper layer that is thrown away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from accelvisor.errors import DeadlineError, SystemFailure
from accelvisor.lab import network, state
from accelvisor.lab.process import ProcessId, die_with_parent, readable, run, wait_until

# Where a host finds the guest images: a read-only view of a directory of the laboratory.
GUEST_IMAGES = "/var/lib/accelvisor-lab"
_BOOT_S = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """The paths of one host of one laboratory, whose hosts' layers are under ``home``."""

    lab: str
    index: int
    home: Path

    @classmethod
    def of(cls, found: state.LabState, index: int) -> Place:
        """A host's place in a laboratory."""
        return cls(found.name, index, found.directory)

    @property
    def directory(self) -> Path:
        """Everything on disk that belongs to this host."""
        return self.home / f"host{self.index}"

    @property
    def images(self) -> Path:
        """The guest images as all hosts of the laboratory see them."""
        return self.home / "images"

    @property
    def root(self) -> Path:
        """Where its root is mounted."""
        return self.directory / "root"

    @property
    def console(self) -> Path:
        """What it printed to its console."""
        return self.directory / "console.log"

    @property
    def machine(self) -> str:
        """A name that no other container has."""
        return network.namespace(self.lab, self.index)

    @property
    def hostname(self) -> str:
        """What it calls itself."""
        return f"host{self.index}"


def mount(place: Place, image: Path) -> None:
    """The host's root: image below, a throw-away layer above."""
    for name in ("upper", "work", "root"):
        (place.directory / name).mkdir(parents=True, exist_ok=True)
    # Volatile: nothing of it is wanted after a crash, so nothing is synced to disk.
    options = (
        f"lowerdir={image},upperdir={place.directory}/upper,workdir={place.directory}/work,volatile"
    )
    run(["mount", "-t", "overlay", "accelvisor-lab", "-o", options, str(place.root)], timeout=30)


def personalise(place: Place, hosts: int) -> None:
    """What makes this host itself: identity, name, and the names of the others."""
    etc = place.root / "etc"
    (etc / "machine-id").write_text(os.urandom(16).hex() + "\n", encoding="ascii")
    (etc / "hostname").write_text(place.hostname + "\n", encoding="ascii")
    known = [f"{network.address(index)} host{index}" for index in range(1, hosts + 1)]
    (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]), encoding="ascii")
    (place.root / GUEST_IMAGES.lstrip("/")).mkdir(parents=True, exist_ok=True)


def boot(place: Place, record: state.HostState, *, mortal: bool) -> None:
    """Start it and wait until its systemd has reached its default target.

    A mortal host is killed by the kernel when the process that booted it dies.
    """
    notify = state.run_directory(place.lab) / f"notify{place.index}"
    notify.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(notify))
        with place.console.open("wb") as console:
            process = subprocess.Popen(
                _command(place, mortal=mortal),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
                    "NOTIFY_SOCKET": str(notify),
                    # The host's cgroup tree is version 2 whatever this machine mounts.
                    "UNIFIED_CGROUP_HIERARCHY": "1",
                },
            )
        record.supervisor = ProcessId.of(process.pid)
        _wait_ready(place, process, ready, record)
    notify.unlink(missing_ok=True)
    # The end of the container is seen by its pid, and by /proc in later lab commands; Popen must
    # not warn that its child is still running when it goes out of scope.
    process.returncode = 0


def _command(place: Place, *, mortal: bool) -> list[str]:
    nspawn = [
        "systemd-nspawn",
        "--boot",
        "--quiet",
        # Neither this machine's systemd nor its machined need exist.
        "--register=no",
        "--keep-unit",
        "--notify-ready=yes",
        f"--machine={place.machine}",
        f"--hostname={place.hostname}",
        f"--directory={place.root}",
        f"--network-namespace-path={network.namespace_path(place.lab, place.index)}",
        f"--bind-ro={place.images}:{GUEST_IMAGES}",
        # Not given by default with a network namespace from outside; libvirt and PrivateNetwork=
        # need them.
        "--capability=CAP_NET_ADMIN,CAP_NET_RAW",
        # Functions confine themselves; nspawn has them in its list since systemd 254 only.
        "--system-call-filter=landlock_create_ruleset landlock_add_rule landlock_restrict_self",
        "--link-journal=no",
        "--resolv-conf=off",
        "--timezone=off",
        "--console=pipe",
    ]
    # In a pid namespace of nspawn's own: were nspawn killed outside one, the host would run on.
    contained = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *nspawn]
    return die_with_parent(contained) if mortal else contained


def _wait_ready(
    place: Place, process: subprocess.Popen[bytes], ready: socket.socket, record: state.HostState
) -> None:
    end = time.monotonic() + _BOOT_S
    ended = os.pidfd_open(process.pid)
    try:
        while True:
            left = max(0.0, end - time.monotonic())
            told = readable([ready.fileno(), ended], left)
            if not told:
                raise DeadlineError(f"{place.hostname} did not boot in {_BOOT_S:g} s", where="lab")
            if ready.fileno() not in told:
                said = place.console.read_text(encoding="utf-8", errors="replace").strip()
                raise SystemFailure(
                    f"{place.hostname} ended while booting: {said[-800:] or 'it said nothing'}",
                    code="lab-boot-failed",
                    where="systemd-nspawn",
                )
            words = ready.recv(4096).decode(errors="replace").splitlines()
            # nspawn tells the leader's pid too, but as seen in its own pid namespace.
            record.leader = record.leader or _leader(process.pid)
            if "READY=1" in words and record.leader is not None:
                return
    finally:
        os.close(ended)


def _leader(supervisor: int) -> ProcessId | None:
    """PID 1 of the host: the descendant that is number 1 two pid namespaces further in."""
    parents: dict[int, int] = {}
    inner: dict[int, list[str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            text = (entry / "status").read_text(encoding="utf-8", errors="replace")
            fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            parents[int(entry.name)] = int(fields["PPid"])
            inner[int(entry.name)] = fields["NSpid"].split()
    depth = len(inner.get(supervisor, [])) + 2
    for pid, numbers in inner.items():
        # unshare, or the setpriv that became it, then nspawn, then the leader.
        innermost = len(numbers) == depth and numbers[-1] == "1"
        if innermost and parents.get(parents[pid]) == supervisor:
            return ProcessId.of(pid)
    return None


def remove(place: Place, record: state.HostState) -> None:
    """End the host's processes, whether or not they were recorded, and take away its root."""
    # Killing its PID 1 makes the kernel end everything inside; nspawn then ends by itself.
    for process in (record.leader, record.supervisor, *strays(place)):
        if process is not None and not process.end(deadline_s=10.0):
            raise DeadlineError(f"process {process.pid} of {place.machine} stays", where="lab")
    unmount(place)
    shutil.rmtree(place.directory, ignore_errors=True)


def unmount(place: Place) -> None:
    """Detach the root, also when something still looks into it."""
    if not os.path.ismount(place.root):
        return
    with contextlib.suppress(DeadlineError):
        wait_until(
            lambda: run(["umount", str(place.root)], timeout=30, check=False).returncode == 0,
            deadline_s=5.0,
            what=f"unmounting {place.root}",
        )
    if os.path.ismount(place.root):
        run(["umount", "--lazy", str(place.root)], timeout=30)


def strays(place: Place) -> list[ProcessId]:
    """nspawn processes of exactly this host that no state file tells of (killed while booting)."""
    wanted = f"--directory={place.root}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if wanted in words and b"systemd-nspawn" in words:
                found.append(ProcessId.of(int(entry.name)))
    return [process for process in found if process is not None]
