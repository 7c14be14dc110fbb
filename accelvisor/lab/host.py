"""A host of the laboratory as its users see it: run programs, move files, drive libvirt."""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accelvisor.errors import DeadlineError, SystemFailure
from accelvisor.lab import network
from accelvisor.lab.container import Place
from accelvisor.lab.domain import DomainSpec
from accelvisor.lab.guest import Guest
from accelvisor.lab.process import run, shorten, wait_until
from accelvisor.lab.state import HostState

# What a login shell of root would have; nothing of this machine's environment leaks in.
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "LIBVIRT_DEFAULT_URI": "qemu:///system",
}


class LabHost:
    """One booted host."""

    def __init__(self, place: Place, record: HostState) -> None:
        self._place = place
        self._record = record

    @property
    def name(self) -> str:
        """Its host name, by which the other hosts know it."""
        return self._place.hostname

    @property
    def address(self) -> str:
        """Its address in the laboratory's network."""
        return network.address(self._place.index)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._record.leader is not None and self._record.leader.alive()

    def plug(self, connected: bool) -> None:
        """Plug its network cable in, or pull it."""
        network.plug(self._place.lab, self._place.index, connected=connected)

    def enter(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
        """The command of this machine that runs ``argv`` inside the host."""
        if self._record.leader is None or not self._record.leader.alive():
            raise SystemFailure(
                f"{self.name} is not running",
                code="lab-host-gone",
                where="lab",
                hint=f"its console log: {self._place.console}",
            )
        words = [f"{name}={value}" for name, value in {**_ENVIRONMENT, **(env or {})}.items()]
        target = str(self._record.leader.pid)
        # --root as well: inside a chroot, nspawn cannot make its root that of the namespace.
        nsenter = ["nsenter", "--target", target, "--all", "--root", "--wd", "--"]
        return [*nsenter, "env", "-i", *words, *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60.0,
        input: str | bytes | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as root; with ``check`` a failure is an error that quotes what it said."""
        result = self.run_bytes(argv, timeout=timeout, input=input, check=check, env=env)
        return subprocess.CompletedProcess(
            list(argv),
            result.returncode,
            result.stdout.decode(errors="replace"),
            result.stderr.decode(errors="replace"),
        )

    def run_bytes(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60.0,
        input: str | bytes | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """As ``run``, for output that is not text."""
        data = input.encode() if isinstance(input, str) else input
        return run(
            self.enter(argv, env),
            timeout=timeout,
            input=data,
            check=check,
            where=self.name,
            shown=argv,
        )

    def push(self, local: Path | bytes, remote: str, *, mode: int = 0o644) -> None:
        """Copy a file, its bytes, or the contents of a directory into the host."""
        if isinstance(local, Path) and local.is_dir():
            archive = io.BytesIO()
            with tarfile.open(fileobj=archive, mode="w") as tar:
                tar.add(local, arcname=".")
            self.run(["mkdir", "-p", remote])
            self.run(["tar", "-x", "-C", remote], input=archive.getvalue(), timeout=300)
            return
        data = local if isinstance(local, bytes) else local.read_bytes()
        self.run(["install", "-D", "-m", f"{mode:o}", "/dev/stdin", remote], input=data)

    def pull(self, remote: str, local: Path | None = None) -> bytes:
        """The bytes of a file in the host; written to ``local`` as well when given."""
        data = self.run_bytes(["cat", remote]).stdout
        if local is not None:
            local.write_bytes(data)
        return data

    def wait(
        self,
        condition: Sequence[str] | Callable[[], bool],
        *,
        deadline_s: float = 30.0,
        what: str = "",
    ) -> None:
        """Wait until a predicate holds, or a command run in the host succeeds."""
        if callable(condition):
            wait_until(condition, deadline_s=deadline_s, what=what or "a condition")
            return
        argv = list(condition)
        end = time.monotonic() + deadline_s
        last: list[subprocess.CompletedProcess[str]] = []

        def succeeds() -> bool:
            timeout = max(1.0, end - time.monotonic())
            last[:] = [self.run(argv, timeout=timeout, check=False)]
            return last[0].returncode == 0

        try:
            wait_until(succeeds, deadline_s=deadline_s, what=what or shorten(argv))
        except DeadlineError as error:
            if last:
                error.hint = f"it last said: {(last[0].stderr or last[0].stdout).strip()[-400:]}"
            raise

    # --- libvirt -------------------------------------------------------------------------------

    def virsh(
        self, *words: str, timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run virsh against this host's libvirtd."""
        return self.run(["virsh", *words], timeout=timeout, check=check)

    def guest(self, domain: str) -> Guest:
        """The guest of a domain, by its agent. The domain need not run yet."""
        return Guest(self, domain)

    def define(self, spec: DomainSpec) -> Guest:
        """Define a domain and return its guest."""
        self.run(["virsh", "define", "/dev/stdin"], input=spec.xml())
        return self.guest(spec.name)

    def boot_guest(self, spec: DomainSpec, *, deadline_s: float = 120.0) -> Guest:
        """Define and start a domain, and wait until programs can be run in it."""
        guest = self.define(spec)
        self.virsh("start", spec.name)
        guest.wait_ready(deadline_s=deadline_s)
        return guest

    def journal(self, unit: str | None = None, lines: int = 200) -> str:
        """The end of the host's journal, for messages of tests that fail."""
        chosen = ["--unit", unit] if unit else []
        argv = ["journalctl", "--no-pager", "--output=short-monotonic", *chosen, "-n", str(lines)]
        return self.run(argv, check=False).stdout
