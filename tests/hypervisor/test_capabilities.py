from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from accelvisor.errors import UnavailableError
from accelvisor.hypervisor import capabilities, kvm
from accelvisor.hypervisor.capabilities import Qemu, Severity


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def qemu(path: Path, version: str, devices: str) -> str:
    return script(
        path,
        f'case "$1" in --version) echo "{version}";; *) echo \'{devices}\';; esac',
    )


def test_a_qemu_with_vfio_user_is_ok(tmp_path: Path) -> None:
    path = qemu(
        tmp_path / "q", "QEMU emulator version 11.1.3 (Debian)", 'name "vfio-user-pci", bus PCI'
    )
    found = capabilities.query_qemu(path)
    assert found == Qemu(path, (11, 1, 3), vfio_user=True)
    assert capabilities.judge_qemu(found).severity is Severity.OK


def test_a_qemu_without_vfio_user_is_a_problem_with_a_way_out(tmp_path: Path) -> None:
    path = qemu(tmp_path / "q", "QEMU emulator version 7.2.15", 'name "vfio-pci", bus PCI')
    finding = capabilities.judge_qemu(capabilities.query_qemu(path))
    assert finding.severity is Severity.PROBLEM
    assert "7.2.15" in finding.found
    assert "trixie-backports" in finding.hint


@pytest.mark.parametrize("body", ["exit 1", "echo nonsense", "exec sleep 60", "kill -9 $$"])
def test_a_qemu_that_does_not_answer_is_a_problem(tmp_path: Path, body: str) -> None:
    found = capabilities.query_qemu(script(tmp_path / "q", body), deadline_s=0.3)
    assert found.error
    assert capabilities.judge_qemu(found).severity is Severity.PROBLEM


def test_a_missing_qemu_is_a_problem() -> None:
    finding = capabilities.judge_qemu(capabilities.query_qemu("/nowhere/qemu"))
    assert finding.severity is Severity.PROBLEM
    assert "apt install" in finding.hint


def test_without_kvm_there_is_a_warning() -> None:
    finding = capabilities.judge_kvm(kvm.KvmVerdict(False, "KVM_RUN: no"))
    assert (finding.severity, "KVM_RUN: no" in finding.found) == (Severity.WARNING, True)
    assert capabilities.judge_kvm(kvm.KvmVerdict(True, "ran")).severity is Severity.OK


def test_the_hook_has_to_be_there_and_executable(tmp_path: Path) -> None:
    path = tmp_path / "50-accelvisor"
    assert "not installed" in capabilities.judge_hook(str(path)).found
    path.write_text("")
    path.chmod(0o644)
    if os.access(path, os.X_OK):  # pragma: no cover - a file system without modes
        pytest.fail("the file system gives every file the x bit")
    assert "not executable" in capabilities.judge_hook(str(path)).found
    path.chmod(0o755)
    assert capabilities.judge_hook(str(path)).severity is Severity.OK


def test_an_unreachable_libvirt_is_a_problem() -> None:
    error = UnavailableError("away", hint="systemctl status libvirtd")
    finding = capabilities.judge_libvirt("", error)
    assert (finding.severity, finding.hint) == (Severity.PROBLEM, "systemctl status libvirtd")


def test_the_emulator_comes_from_libvirts_capabilities() -> None:
    text = """<capabilities><host/><guest><arch name='i686'><emulator>/no</emulator></arch></guest>
    <guest><os_type>hvm</os_type><arch name='x86_64'><emulator>/usr/bin/qemu</emulator>
    <domain type='qemu'/></arch></guest></capabilities>"""
    assert capabilities.emulator(text) == "/usr/bin/qemu"
    assert capabilities.emulator("<capabilities/>") is None


def test_the_whole_examination_never_raises() -> None:
    names = [finding.name for finding in capabilities.examine("test:///default")]
    assert names == ["libvirt", "qemu", "kvm", "hook"]
    broken = capabilities.examine("qemu+unix:///system?socket=/nowhere")
    assert broken[0].severity is Severity.PROBLEM


@pytest.mark.parametrize("device", ["/nowhere/kvm", "/dev/null", "/dev/zero", "/"])
def test_what_is_no_kvm_is_not_usable(device: str) -> None:
    verdict = kvm.probe(device=device)
    assert not verdict.usable
    assert verdict.detail


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm.sys, "executable", script(tmp_path / "python", "exec sleep 60"))
    monkeypatch.setattr(kvm.platform, "machine", lambda: "x86_64")
    verdict = kvm.probe(device="/dev/null", deadline_s=0.2)
    assert (verdict.usable, "did not stop" in verdict.detail) == (False, True)


def test_the_verdict_is_what_running_the_instructions_says() -> None:
    if platform.machine() != "x86_64" or not os.access("/dev/kvm", os.R_OK | os.W_OK):
        assert not kvm.probe().usable
        return
    assert kvm.probe().usable == (kvm.run_code("/dev/kvm") is None)


@pytest.mark.parametrize("usable", [True, False])
def test_a_recorded_verdict_serves_where_the_device_is_hidden(tmp_path: Path, usable: bool) -> None:
    path, verdict = str(tmp_path / "kvm"), kvm.KvmVerdict(usable, "as found")
    kvm.record(path, kvm.KvmVerdict(not usable, "an older one"))
    kvm.record(path, verdict)
    assert kvm.verdict(path, device="/nowhere/kvm") == verdict
    assert [entry.name for entry in tmp_path.iterdir()] == ["kvm"]


@pytest.mark.parametrize("text", ["", "no", "[]", "{}", '{"usable": 1, "detail": ""}', "\x00"])
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kvm"
    path.write_text(text)
    assert kvm.recorded(str(path)) is None
    assert not kvm.verdict(str(path), device="/nowhere/kvm").usable


def test_a_record_is_readable_for_the_daemon_under_a_narrow_umask(tmp_path: Path) -> None:
    """Root writes it under the unit's UMask=0027; the daemon that reads it is another user."""
    old = os.umask(0o077)
    try:
        kvm.record(str(tmp_path / "kvm"), kvm.KvmVerdict(True, "ran"))
    finally:
        os.umask(old)
    assert (tmp_path / "kvm").stat().st_mode & 0o777 == 0o644


def test_recording_succeeds_also_when_kvm_is_of_no_use(tmp_path: Path) -> None:
    assert kvm.main(["kvm", "--record", str(tmp_path / "kvm")]) == 0
    assert kvm.recorded(str(tmp_path / "kvm")) == kvm.probe()
