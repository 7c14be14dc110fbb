"""libvirt that hangs (stopped, or stuck in storage) does not take accelvisord with it."""

from __future__ import annotations

from accelvisor.lab import LabHost
from tests.lab.user import accelctl


def test_the_daemon_answers_while_libvirtd_hangs(host: LabHost) -> None:
    host.run(["systemctl", "start", "libvirtd.service"])
    assert accelctl(host, "host", "show")["host"]["hypervisor"]
    pid = host.run(
        ["systemctl", "show", "--property=MainPID", "--value", "libvirtd"]
    ).stdout.strip()
    host.run(["kill", "-STOP", pid])
    try:
        # More calls than there are threads, each left waiting.
        for _ in range(6):
            command = "accelctl vm list >/dev/null 2>&1 &"
            host.run(["sh", "-c", command])
        shown = host.run(["timeout", "10", "accelctl", "host", "show"])
        assert "host1" in shown.stdout
        host.run(["timeout", "10", "accelctl", "function", "list"])
        host.run(["timeout", "10", "accelctl", "profiles"])
        # The keep-alive ends the calls after 15 s, before their own deadline.
        late = host.run(["timeout", "60", "accelctl", "vm", "list"], check=False, timeout=70)
        assert late.returncode == 1
        assert "libvirt" in late.stderr
    finally:
        host.run(["kill", "-CONT", pid])
    host.wait(
        lambda: host.run(["accelctl", "vm", "list"], check=False).returncode == 0,
        deadline_s=40,
        what="libvirt again",
    )
