"""Who starts and stops function processes: one interface, two implementations.

A function outlives the daemon, as QEMU outlives libvirtd. :class:`SystemdSupervisor` leaves that to
units; :class:`SubprocessSupervisor` detaches the process and finds it again by pid and start time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from accelvisor.daemon import function_link, processes
from accelvisor.daemon.paths import Paths
from accelvisor.errors import AccelvisorError, DeadlineError, SystemFailure
from accelvisor.limits import GIB

#: How long each step of stopping may take before the next, harsher one (seconds).
SHUTDOWN_S = 2.0
TERMINATE_S = 2.0
KILL_S = 5.0
#: MemoryMax= of the unit file, and what a function uses beside its device's memory: programs,
#: libraries, compiled kernels, scratch, by measurement under 300 MiB.
UNIT_MEMORY_BYTES = 2 * GIB
OWN_MEMORY_BYTES = GIB


class ProcessState(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"  # it ended by itself, and not well


class Supervisor(Protocol):
    """All verbs are idempotent: starting what runs and stopping what does not are no errors.

    They raise :class:`SystemFailure` (``supervisor``) with what the system said.
    """

    name: str

    async def start(self, uuid: str, memory_bytes: int = 0) -> None:
        """Start the process of the spec that is on disk; readiness is asked of it, not of us.

        Args:
            memory_bytes: what its guest may make it use, for a ceiling above that.
        """

    async def allow(self, uuid: str, memory_bytes: int) -> None:
        """Raise the ceiling of a process that runs, as ``start`` does."""

    async def confine(self, uuid: str, cpus: Sequence[int], weight: int) -> None:
        """Where a process may run, and how much of what others want there too.

        Args:
            cpus: numbers of host CPUs.
            weight: 1 to 1000; 0: only what all others leave.
        """

    async def stop(self, uuid: str) -> None:
        """End the process and all of its children, gently, then not. Returns when it is gone."""

    async def state(self, uuid: str) -> ProcessState: ...

    async def pid(self, uuid: str) -> int | None:
        """Of the holder, while it runs."""
        ...

    async def list(self) -> Sequence[str]:
        """UUIDs of all function processes that run, known to the store or not."""
        ...


def choose(kind: str, paths: Paths) -> Supervisor:
    """``auto`` takes systemd where it is pid 1, also when the daemon is not root: polkit lets the
    packaged one command its units, and a process of the daemon's own would end with its unit."""
    if kind == "auto":
        booted = Path("/run/systemd/system").is_dir()
        usual = str(paths.run) == "/run/accelvisor"  # the units know no other directory
        kind = "systemd" if booted and usual else "subprocess"
    return SystemdSupervisor() if kind == "systemd" else SubprocessSupervisor(paths)


class SubprocessSupervisor:
    """Detached processes. Their log is ``UUID.log`` beside the specification.

    Args:
        command: what runs a spec; the path of the specification is appended.
    """

    name = "subprocess"

    def __init__(
        self, paths: Paths, command: Sequence[str] = (sys.executable, "-m", "accelvisor.function")
    ) -> None:
        self._paths = paths
        self._command = tuple(command)

    async def start(self, uuid: str, memory_bytes: int = 0) -> None:
        if await self.pid(uuid) is not None:
            return
        files = self._paths.function(uuid)
        await processes.spawn_detached(
            [*self._command, str(files.spec)], files.process, files.log, _clean(os.environ)
        )

    async def allow(self, uuid: str, memory_bytes: int) -> None:
        """Nothing to do: there is no ceiling."""

    async def confine(self, uuid: str, cpus: Sequence[int], weight: int) -> None:
        """CPUs, for every thread that there is; weights only as far as least and other go."""
        found = self._find(uuid)
        if found is None:
            return
        for member in (found, *found.family()):
            await asyncio.to_thread(_confine, member.pid, frozenset(cpus), idle=not weight)

    async def stop(self, uuid: str) -> None:
        found = self._find(uuid)
        if found is None:
            return
        files = self._paths.function(uuid)
        family = found.family()
        try:
            await function_link.call(files.holder_socket, "shutdown", deadline_s=SHUTDOWN_S)
            gone = await found.wait(SHUTDOWN_S)
        except AccelvisorError:
            gone = False
        if not gone:
            found.signal(signal.SIGTERM)
            gone = await found.wait(TERMINATE_S)
        if not gone:
            found.signal(signal.SIGKILL)
        # Even a holder that went gently may leave a stuck worker behind.
        for member in family:
            member.signal(signal.SIGKILL)
        if not gone and not await found.wait(KILL_S):
            raise DeadlineError(
                f"process {found.pid} survived SIGKILL", code="supervisor", where=f"function:{uuid}"
            )
        files.process.unlink(missing_ok=True)

    async def state(self, uuid: str) -> ProcessState:
        if self._find(uuid) is not None:
            return ProcessState.RUNNING
        left = self._paths.function(uuid).process.exists()
        return ProcessState.FAILED if left else ProcessState.STOPPED

    async def pid(self, uuid: str) -> int | None:
        found = self._find(uuid)
        return None if found is None else found.pid

    async def list(self) -> Sequence[str]:
        try:
            names = sorted(os.listdir(self._paths.specs))
        except FileNotFoundError:
            return []
        uuids = [Path(name).stem for name in names if name.endswith(".process")]
        return [uuid for uuid in uuids if self._find(uuid) is not None]

    def _find(self, uuid: str) -> processes.Process | None:
        return processes.from_record(self._paths.function(uuid).process)


class SystemdSupervisor:
    """Units ``accelvisor-function@UUID.service``, commanded through systemctl."""

    name = "systemd"
    UNIT = "accelvisor-function@"

    def __init__(self, systemctl: Sequence[str] = ("systemctl", "--no-ask-password")) -> None:
        self._systemctl = tuple(systemctl)

    async def allow(self, uuid: str, memory_bytes: int) -> None:
        if memory_bytes > UNIT_MEMORY_BYTES - OWN_MEMORY_BYTES:
            # Shared memory is charged to the unit: under its usual ceiling a large function would
            # be killed for what it was promised.
            ceiling = f"MemoryMax={memory_bytes + OWN_MEMORY_BYTES}"
            await self._run("set-property", "--runtime", self._unit(uuid), ceiling)

    async def confine(self, uuid: str, cpus: Sequence[int], weight: int) -> None:
        allowed = f"AllowedCPUs={' '.join(map(str, cpus))}"
        share = f"CPUWeight={weight or 'idle'}"
        await self._run("set-property", "--runtime", self._unit(uuid), allowed, share)

    async def start(self, uuid: str, memory_bytes: int = 0) -> None:
        await self.allow(uuid, memory_bytes)
        # --no-block: readiness is asked of the process itself, with our own deadline.
        try:
            await self._run("start", "--no-block", self._unit(uuid))
        except SystemFailure:
            # A unit that failed too often refuses to start; whoever asks here has decided anew.
            await self._run("reset-failed", self._unit(uuid), accept=(0, 1))
            await self._run("start", "--no-block", self._unit(uuid))

    async def stop(self, uuid: str) -> None:
        await self._run("stop", self._unit(uuid), deadline_s=30.0)
        await self._run("reset-failed", self._unit(uuid), accept=(0, 1))

    async def state(self, uuid: str) -> ProcessState:
        active = (await self._show(uuid)).get("ActiveState", "")
        if active in ("active", "activating", "reloading", "deactivating"):
            return ProcessState.RUNNING
        return ProcessState.FAILED if active == "failed" else ProcessState.STOPPED

    async def pid(self, uuid: str) -> int | None:
        pid = (await self._show(uuid)).get("MainPID", "0")
        return int(pid) if pid.isdecimal() and int(pid) > 0 else None

    async def list(self) -> Sequence[str]:
        text = await self._run(
            "list-units", "--plain", "--no-legend", "--full", "--all", f"{self.UNIT}*.service"
        )
        found: list[str] = []
        for line in text.splitlines():
            unit, _, rest = line.strip().lstrip("●* ").partition(" ")
            active = rest.split()[1:2]
            if unit.startswith(self.UNIT) and active and active[0] not in ("inactive", "failed"):
                found.append(unit[len(self.UNIT) :].removesuffix(".service"))
        return found

    def _unit(self, uuid: str) -> str:
        return f"{self.UNIT}{uuid}.service"

    async def _show(self, uuid: str) -> Mapping[str, str]:
        text = await self._run("show", "--property=ActiveState,MainPID", self._unit(uuid))
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    async def _run(
        self, *arguments: str, accept: Sequence[int] = (0,), deadline_s: float = 10.0
    ) -> str:
        code, out, err = await processes.run(
            [*self._systemctl, *arguments], _clean(os.environ), deadline_s
        )
        if code not in accept:
            raise SystemFailure(
                f"systemctl {' '.join(arguments)} failed ({code}): {err.strip() or out.strip()}",
                code="supervisor",
                where="systemd",
                hint="systemctl status and journalctl -u of that unit say more",
            )
        return out


def _confine(pid: int, cpus: frozenset[int], *, idle: bool) -> None:
    """Each thread of a process; one that comes meanwhile has it from the thread that made it."""
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cpus)
            if idle:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for children: nothing that speaks to systemd in the daemon's name."""
    drop = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS")
    return {name: value for name, value in environ.items() if name not in (*drop, "LISTEN_FDNAMES")}
