from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from accelvisor.daemon import doctor
from accelvisor.daemon.doctor import OK, PROBLEM, WARNING, Facts, gather, judge
from accelvisor.daemon.lifecycle import State

from .test_reconcile import function

GOOD = Facts(
    kernel="6.12",
    kvm="usable",
    qemu_path="/usr/bin/qemu-system-x86_64",
    qemu_version=(11, 1),
    qemu_vfio_user=True,
    hypervisor="libvirt 12.9.0, QEMU 11.1.3",
    hypervisor_error="",
    systemd=257,
    supervisor="systemd",
    controllers=("cpu", "memory", "io"),
    huge_free_bytes=0,
    memory_available_bytes=1 << 34,
    admin_mode=stat.S_IFSOCK | 0o660,
    admin_group="accelvisor",
    socket_group_missing="",
)


def finding(name: str, **changes: object) -> doctor.Check:
    checks = judge(replace(GOOD, **changes), [])  # type: ignore[arg-type]
    [found] = [item for item in checks if item.name == name]
    others = [item for item in checks if item.name != name]
    assert all(item.severity == OK for item in others)
    return found


def test_a_good_host_has_no_finding() -> None:
    assert {item.severity for item in judge(GOOD, [])} == {OK}


@pytest.mark.parametrize(
    ("name", "changes", "severity", "text"),
    [
        ("qemu", {"qemu_path": None}, PROBLEM, "no qemu"),
        (
            "qemu",
            {"qemu_version": (7, 2), "qemu_vfio_user": False},
            PROBLEM,
            "7.2 has no vfio-user",
        ),
        ("qemu", {"qemu_vfio_user": False}, PROBLEM, "11.1 was built without"),
        ("qemu", {"qemu_version": None, "qemu_vfio_user": False}, PROBLEM, "QEMU ?"),
        ("kvm", {"kvm": None}, WARNING, "no /dev/kvm"),
        ("kvm", {"kvm": "Permission denied"}, WARNING, "Permission denied"),
        ("libvirt", {"hypervisor": None, "hypervisor_error": "gone"}, WARNING, "gone"),
        ("systemd", {"systemd": None, "supervisor": "subprocess"}, WARNING, "not pid 1"),
        ("systemd", {"supervisor": "subprocess"}, WARNING, "subprocess"),
        ("cgroups", {"controllers": ("cpu",)}, WARNING, "no memory"),
        ("admin-socket", {"admin_mode": None}, PROBLEM, "not there"),
        ("admin-socket", {"admin_mode": stat.S_IFSOCK | 0o666}, WARNING, "0666"),
        ("socket-group", {"socket_group_missing": "kvm"}, PROBLEM, '"kvm"'),
    ],
)
def test_each_finding(name: str, changes: dict[str, object], severity: str, text: str) -> None:
    found = finding(name, **changes)
    assert found.severity == severity
    assert text in found.found
    assert found.hint


def test_functions_are_judged() -> None:
    functions = [function("a", State.READY), function("b", State.FAILED)]
    checks = {item.name: item for item in judge(GOOD, functions)}
    assert checks["functions"].severity == PROBLEM
    assert "b" in checks["functions"].found
    poor = replace(GOOD, memory_available_bytes=1)
    checks = {item.name: item for item in judge(poor, functions)}
    assert checks["memory"].severity == WARNING


def test_facts_of_this_machine(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A QEMU of one's own in the path is found and asked."""
    qemu = short_path / "qemu-system-x86_64"
    qemu.write_text(
        '#!/bin/sh\ncase "$*" in --version) echo "QEMU emulator version 10.1.2 (Debian)";;'
        " *) echo 'name \"vfio-user-pci\", bus PCI';; esac\n"
    )
    qemu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{short_path}:{os.environ['PATH']}")
    facts = gather(
        admin_socket=short_path / "none",
        supervisor="subprocess",
        hypervisor=None,
        hypervisor_error="x",
        socket_group="no-such-group-here",
    )
    assert facts.qemu_version == (10, 1)
    assert facts.qemu_vfio_user
    assert facts.memory_available_bytes > 0
    assert facts.admin_mode is None
    assert facts.socket_group_missing == "no-such-group-here"
    assert facts.kernel == os.uname().release
