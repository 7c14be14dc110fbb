"""What this host can do for a VM with functions: the checks behind ``accelctl doctor``.

Each check is a pure judgement of something found, so that it can be tried without the machine that
has the fault; :func:`examine` finds.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from accelvisor.errors import AccelvisorError
from accelvisor.hypervisor import binding, kvm
from accelvisor.hypervisor.xml import DRIVER
from accelvisor.hypervisor.xmltree import descend, parse

_QEMU_FALLBACK = "/usr/bin/qemu-system-x86_64"
_HOOK = "/etc/libvirt/hooks/qemu.d/50-accelvisor"


class Severity(StrEnum):
    """A problem keeps something from working, a warning only makes it worse."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found and, unless it is ok, what can be done."""

    name: str
    severity: Severity
    found: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Qemu:
    """A QEMU binary. ``version`` is (0, 0, 0) and ``error`` is set when it could not be asked."""

    path: str
    version: tuple[int, int, int] = (0, 0, 0)
    vfio_user: bool = False
    error: str = ""


@functools.cache
def kvm_verdict() -> kvm.KvmVerdict:
    """Can KVM run a guest? Found out once in a process: it does not change while the host is up.

    accelvisord's unit hides /dev/kvm from it and records the answer beforehand.
    """
    directory = os.environ.get("ACCELVISOR_RUN_DIR", "/run/accelvisor")
    return kvm.verdict(os.path.join(directory, "kvm"))


def query_qemu(path: str, *, deadline_s: float = 20.0) -> Qemu:
    """Ask a QEMU binary for its version and whether it has ``vfio-user-pci``."""
    try:
        version = _output([path, "--version"], deadline_s)
        devices = _output([path, "-machine", "none", "-device", "help"], deadline_s)
    except (OSError, subprocess.SubprocessError) as error:
        return Qemu(path, error=str(error))
    found = re.search(r"version (\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return Qemu(path, error=f"its --version says {version.strip()[:80]!r}")
    major, minor, micro = (int(part) for part in found.groups())
    return Qemu(path, (major, minor, micro), vfio_user=f'name "{DRIVER}"' in devices)


def _output(command: list[str], deadline_s: float) -> str:
    return subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=deadline_s,
    ).stdout


def judge_qemu(qemu: Qemu) -> Finding:
    """Is it there, and does it have vfio-user?"""
    version = ".".join(str(part) for part in qemu.version)
    if qemu.error:
        return Finding(
            "qemu",
            Severity.PROBLEM,
            f"{qemu.path}: {qemu.error}",
            "apt install qemu-system-x86",
        )
    if not qemu.vfio_user:
        return Finding(
            "qemu",
            Severity.PROBLEM,
            f"QEMU {version} has no {DRIVER}, so no VM can have a function",
            "QEMU 10.1 or newer is needed; on Debian 13: apt install -t trixie-backports"
            " qemu-system-x86 libvirt-daemon-system",
        )
    return Finding("qemu", Severity.OK, f"QEMU {version} with {DRIVER}")


def judge_kvm(verdict: kvm.KvmVerdict) -> Finding:
    """Without KVM everything works, slowly."""
    if verdict.usable:
        return Finding("kvm", Severity.OK, verdict.detail)
    return Finding(
        "kvm",
        Severity.WARNING,
        f"KVM cannot run a guest: {verdict.detail}",
        "VMs run under TCG (type qemu), which is many times slower",
    )


def judge_hook(path: str = _HOOK) -> Finding:
    """Without the hook a VM starts even when its function is gone, and then QEMU says why not."""
    if os.access(path, os.X_OK):
        return Finding("hook", Severity.OK, path)
    state = "not executable" if os.path.exists(path) else "not installed"
    return Finding(
        "hook",
        Severity.WARNING,
        f"{path} is {state}",
        "install accelvisor's package, then systemctl restart libvirtd",
    )


def judge_libvirt(version: str, error: AccelvisorError | None) -> Finding:
    """Is libvirt reachable?"""
    if error is not None:
        return Finding("libvirt", Severity.PROBLEM, error.message, error.hint)
    return Finding("libvirt", Severity.OK, version)


def emulator(capabilities: str) -> str | None:
    """The emulator that libvirt takes for an x86_64 VM, from its capabilities XML."""
    for guest in descend(parse(capabilities, where="capabilities").root, "guest/arch"):
        if guest.get("name") == "x86_64":
            for element in descend(guest, "emulator"):
                return (element.text or "").strip() or None
    return None


def examine(uri: str = "qemu:///system") -> Sequence[Finding]:
    """All checks of this room. Takes a second or two; never raises for what it finds."""
    path, version, error = _QEMU_FALLBACK, "", None
    try:
        version, found = _ask_libvirt(uri)
        path = found or path
    except AccelvisorError as failure:
        error = failure
    return [
        judge_libvirt(version, error),
        judge_qemu(query_qemu(path)),
        judge_kvm(kvm_verdict()),
        judge_hook(),
    ]


def _ask_libvirt(uri: str) -> tuple[str, str | None]:
    lv: Any = binding.libvirt()
    with binding.translated("libvirt"):
        connection = lv.open(uri)
        try:
            number = connection.getLibVersion()
            capabilities = connection.getCapabilities()
        finally:
            connection.close()
    version = f"libvirt {number // 1_000_000}.{number // 1000 % 1000}.{number % 1000} at {uri}"
    return version, emulator(capabilities)
