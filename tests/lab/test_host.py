"""A lab host is a real Debian 13 with systemd, libvirt and QEMU, and accelvisor's packages."""

from __future__ import annotations

import re

import pytest

from accelvisor.errors import DeadlineError, SystemFailure
from accelvisor.lab import LabHost, Laboratory


def test_systemd_has_booted_it(host: LabHost) -> None:
    assert host.run(["ps", "-p", "1", "-o", "comm="]).stdout.strip() == "systemd"
    # What is not accelvisor's must run without a failed unit; accelvisor's own has its own tests.
    failed = host.run(["systemctl", "--failed", "--plain", "--no-legend"]).stdout.split("\n")
    assert [line for line in failed if line and not line.startswith("accelvisor")] == []


def test_it_has_an_identity_of_its_own(host: LabHost) -> None:
    with open("/etc/machine-id", encoding="ascii") as own:
        assert host.run(["cat", "/etc/machine-id"]).stdout != own.read()
    assert host.run(["hostname"]).stdout.strip() == host.name
    addresses = host.run(["ip", "-4", "-oneline", "address", "show", "eth0"]).stdout
    assert f" {host.address}/24 " in addresses


def test_libvirt_and_qemu_can_do_what_accelvisor_needs(host: LabHost) -> None:
    version = host.virsh("version", "--daemon").stdout
    assert re.search(r"Using library: libvirt (1[2-9]|[2-9]\d)\.", version), version
    devices = host.run(["qemu-system-x86_64", "-device", "help"]).stdout
    assert '"vfio-user-pci"' in devices


def test_the_packages_are_installed_as_dpkg_does_it(host: LabHost) -> None:
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status}\n", "accelvisor", "accelvisor-guest"]
    assert host.run(query).stdout.split() == ["installed", "installed"]
    assert host.run(["dpkg", "--verify", "accelvisor", "accelvisor-guest"]).stdout == ""
    # From the maintainer scripts: sysusers, tmpfiles, units.
    host.run(["id", "accelvisor"])
    places = ["/run/accelvisor/function", "/run/accelvisor/spec"]
    listing = host.run(["stat", "-c", "%A %U %G", *places]).stdout.splitlines()
    assert listing == [
        "drwx--s--x accelvisor accelvisor-function",
        "drwxr-s--- accelvisor accelvisor-function",
    ]
    enabled = host.run(["systemctl", "is-enabled", "accelvisor.service", "accelvisor.socket"])
    assert enabled.stdout.split() == ["enabled", "enabled"]


def test_nothing_of_the_source_tree_is_in_the_host(host: LabHost) -> None:
    where = host.run(["python3", "-c", "import accelvisor; print(accelvisor.__file__)"], env={})
    assert where.stdout.startswith("/usr/lib/python3/dist-packages/")
    assert host.run(["python3", "-c", "import accelvisor.lab"], check=False).returncode != 0


def test_a_failing_command_says_what_it_said(host: LabHost) -> None:
    with pytest.raises(SystemFailure, match="No such file or directory") as caught:
        host.run(["cat", "/does/not/exist"])
    assert caught.value.where == host.name
    assert "nsenter" not in caught.value.message


def test_a_command_past_its_timeout_is_ended(host: LabHost) -> None:
    with pytest.raises(DeadlineError):
        host.run(["sh", "-c", "sleep 600 & sleep 600"], timeout=1)
    assert host.run(["pgrep", "-c", "-x", "sleep"], check=False).stdout.strip() == "0"


def test_files_travel(host: LabHost, lab: Laboratory) -> None:
    data = bytes(range(256)) * 5000
    host.push(data, "/tmp/deep/file", mode=0o640)
    assert host.pull("/tmp/deep/file") == data
    assert host.run(["stat", "-c", "%a", "/tmp/deep/file"]).stdout.strip() == "640"
