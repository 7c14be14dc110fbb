"""A plain guest: boots under libvirt to where programs run in it, and goes the ways a VM goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelvisor.errors import DeadlineError, SystemFailure
from accelvisor.lab import DomainSpec, Guest, LabHost, Laboratory
from tests.amount import by_night
from tests.lab.modules import IMPORT_ALL, modules


@pytest.fixture(scope="module")
def plain(lab: Laboratory) -> Iterator[Guest]:
    """One guest for all tests; the last one leaves it on another host."""
    yield lab.hosts[0].boot_guest(DomainSpec("plain"))
    for each in lab.hosts:
        for verb in ("destroy", "undefine"):
            each.virsh(verb, "plain", check=False)


def test_programs_run_in_it(plain: Guest) -> None:
    out = plain.run(["python3", "-c", "import numpy; print(int(numpy.arange(10).sum()))"])
    assert out.stdout == "45\n"
    assert plain.run(["cat"], input="across").stdout == "across"
    assert plain.run(["sh", "-c", "exit 3"], check=False).returncode == 3
    assert plain.run(["hostname"]).stdout.strip() == plain.domain
    with pytest.raises(SystemFailure, match="No such file"):
        plain.run(["cat", "/does/not/exist"])
    with pytest.raises(DeadlineError):
        plain.run(["sleep", "600"], timeout=1)
    # What was ended is gone from the guest as well.
    assert plain.run(["pidof", "sleep"], check=False).returncode != 0


def test_it_has_accelvisor_from_the_package_and_the_tools_for_pci(plain: Guest) -> None:
    found = plain.run(["python3", "-c", "import accelvisor.abi as a; print(a.__file__)"])
    assert found.stdout.startswith("/usr/lib/python3/dist-packages/")
    assert plain.run(["test", "-x", "/usr/bin/accelguest"], check=False).returncode == 0
    assert "Host bridge" in plain.run(["lspci"]).stdout
    plain.run(["modprobe", "vfio-pci"])


def test_every_module_of_its_package_imports_there(plain: Guest) -> None:
    """With what accelvisor-guest depends on, and nothing of the host's."""
    said = plain.run(["python3", "-c", IMPORT_ALL], timeout=120)
    rooms = ("abi", "collectives", "errors", "guest", "limits", "timeline")
    assert set(said.stdout.split()) == modules(*rooms)


def test_files_travel(plain: Guest) -> None:
    data = bytes(range(256)) * 1000
    plain.push(data, "/tmp/file", mode=0o750)
    assert plain.pull("/tmp/file") == data
    assert plain.run(["stat", "-c", "%a", "/tmp/file"]).stdout.strip() == "750"


def test_shutdown_and_reboot(plain: Guest, host: LabHost) -> None:
    guest = plain
    before = guest.boot_id
    host.virsh("reboot", guest.domain)
    host.wait(lambda: guest.ready and guest.boot_id != before, deadline_s=120, what="rebooted")
    host.virsh("shutdown", guest.domain, "--mode", "agent")
    guest.wait_state("shut off")
    host.virsh("start", guest.domain)
    guest.wait_ready()
    if by_night(True, False):
        # The power button, for whoever has no agent. It is heard once the guest listens for it.
        host.wait(lambda: guest.run(["pidof", "acpid"], check=False).returncode == 0, deadline_s=30)
        host.virsh("shutdown", guest.domain, "--mode", "acpi")
        guest.wait_state("shut off")


def test_live_migration(two_hosts: tuple[LabHost, LabHost], plain: Guest) -> None:
    source, target = two_hosts
    if plain.state != "running":
        source.virsh("start", plain.domain)
        plain.wait_ready()
    boot = plain.boot_id
    uri = f"qemu+tcp://{target.address}/system"
    source.virsh("migrate", "--live", "--persistent", "--undefinesource", plain.domain, uri)
    assert plain.on(target).boot_id == boot
    assert source.virsh("domstate", plain.domain, check=False).returncode != 0
