"""Domains with functions on a real libvirt and QEMU: the ways a VM goes, as a user goes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelvisor.hypervisor import xml
from accelvisor.lab import DomainSpec, Guest, LabHost, Laboratory
from accelvisor.lab.container import GUEST_IMAGES
from accelvisor.lab.domain import KERNEL_ARGUMENTS

#: What ``lspci -d`` takes for our functions.
DEVICE = "acce:0001"


def accelctl(host: LabHost, *words: str, check: bool = True, input: str | None = None) -> Any:
    """One command's JSON; with ``check=False`` the error's, which goes to standard error."""
    said = host.run(["accelctl", *words, "--json"], check=check, timeout=120, input=input)
    text = said.stdout.strip() or said.stderr.strip()
    return json.loads(text) if text else {}


@pytest.fixture
def new_function(host: LabHost) -> Iterator[Callable[..., dict[str, Any]]]:
    """Makes functions, which are gone afterwards."""
    made: list[str] = []

    def create(profile: str = "small") -> dict[str, Any]:
        function = accelctl(host, "function", "create", profile)["function"]
        made.append(function["uuid"])
        return dict(function)

    yield create
    for uuid in made:
        host.run(["accelctl", "function", "delete", uuid, "--force"], check=False, timeout=60)


@pytest.fixture
def function(new_function: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return new_function()


def define(host: LabHost, name: str, *options: str) -> None:
    """A domain from options alone, that boots the laboratory's guest."""
    accelctl(
        host, "vm", "define", name,
        "--memory", "256MiB",
        "--kernel", f"{GUEST_IMAGES}/vmlinuz",
        "--initrd", f"{GUEST_IMAGES}/initrd.img",
        "--cmdline", f"{KERNEL_ARGUMENTS} hostname={name}",
        "--disk", f"{GUEST_IMAGES}/base.squashfs",
        "--disk", f"{GUEST_IMAGES}/layer.squashfs",
        "--console-log", f"/var/log/libvirt/qemu/{name}-console.log",
        *options,
    )  # fmt: skip


def start(host: LabHost, name: str) -> Guest:
    accelctl(host, "vm", "start", name)
    guest = host.guest(name)
    guest.wait_ready()
    return guest


@pytest.fixture(scope="module")
def shared(lab: Laboratory) -> Iterator[Guest]:
    """A domain from options, running for all tests that only plug and unplug."""
    host, name = lab.hosts[0], "shared"
    define(host, name)
    yield start(host, name)
    for verb in ("destroy", "undefine"):
        host.virsh(verb, name, check=False)


@pytest.fixture
def running(shared: Guest, new_function: Callable[..., dict[str, Any]]) -> Guest:
    """It; the functions of a test are taken from it when they are deleted, which comes first."""
    assert seen(shared) == []
    return shared


def seen(guest: Guest) -> list[str]:
    """PCI addresses of the functions that the guest sees."""
    listed = guest.run(["lspci", "-D", "-d", DEVICE]).stdout
    return [line.split()[0] for line in listed.splitlines()]


def window(guest: Guest, address: str) -> int:
    """Where the guest has put BAR2; 0 when it has no address for it."""
    resource = guest.run(["cat", f"/sys/bus/pci/devices/{address}/resource"]).stdout
    return int(resource.splitlines()[2].split()[0], 16)


def state(host: LabHost, uuid: str) -> str:
    return str(accelctl(host, "function", "show", uuid)["function"]["state"])


def selftest(guest: Guest, *options: str) -> None:
    guest.run(["accelguest", "selftest", *options], timeout=120)


def test_a_function_is_plugged_into_a_running_vm_and_taken_out(
    host: LabHost, running: Guest, function: dict[str, Any]
) -> None:
    assert seen(running) == []
    done = accelctl(host, "attach", function["uuid"], running.domain, "--live")["attachment"]
    assert done["bus"] == xml.spare_id(0)
    host.wait(lambda: len(seen(running)) == 1, deadline_s=10, what="the function in the guest")
    (address,) = seen(running)
    assert window(running, address)
    # Behind a root port: its parent in sysfs is a bridge, not the host bridge.
    path = running.run(["readlink", "-f", f"/sys/bus/pci/devices/{address}"]).stdout.strip()
    assert running.run(["cat", f"{path}/../class"]).stdout.startswith("0x0604")
    selftest(running)

    accelctl(host, "detach", function["uuid"], running.domain, "--live")
    assert seen(running) == []
    host.wait(lambda: state(host, function["uuid"]) == "ready", deadline_s=10, what="ready again")
    # And once more: nothing of the first time stands in the way.
    accelctl(host, "attach", function["uuid"], running.domain, "--live")
    host.wait(lambda: len(seen(running)) == 1, deadline_s=10, what="the function in the guest")
    selftest(running)


def test_functions_of_two_sizes_come_and_go_while_the_vm_runs(
    host: LabHost, running: Guest, new_function: Callable[..., dict[str, Any]]
) -> None:
    first, second = new_function("small"), new_function("medium")
    for each in (first, second):
        accelctl(host, "attach", each["uuid"], running.domain, "--live")
    host.wait(lambda: len(seen(running)) == 2, deadline_s=10, what="both functions")
    assert all(window(running, address) for address in seen(running))
    accelctl(host, "detach", first["uuid"], running.domain, "--live")
    (left,) = seen(running)
    domain = accelctl(host, "vm", "show", running.domain)["domain"]
    assert domain["live_functions"] == [second["uuid"]]
    accelctl(host, "attach", first["uuid"], running.domain, "--live")
    host.wait(lambda: len(seen(running)) == 2, deadline_s=10, what="both functions")
    assert left in seen(running)
    for address in seen(running):
        selftest(running, "--device", address)


def test_a_persistent_function_is_there_after_every_way_to_restart(
    host: LabHost, domain_name: str, function: dict[str, Any]
) -> None:
    define(host, domain_name)
    accelctl(host, "attach", function["uuid"], domain_name, "--persistent")
    guest = start(host, domain_name)
    (address,) = seen(guest)
    selftest(guest)
    for verb in ("reboot", "reset"):
        before = guest.boot_id
        accelctl(host, "vm", verb, domain_name)
        host.wait(
            lambda before=before: guest.ready and guest.boot_id != before,
            deadline_s=120,
            what=f"the guest after {verb}",
        )
        assert seen(guest) == [address]
    selftest(guest)
    accelctl(host, "vm", "destroy", domain_name)
    host.wait(lambda: state(host, function["uuid"]) == "attached", deadline_s=10, what="attached")
    assert seen(start(host, domain_name)) == [address]
    accelctl(host, "vm", "stop", domain_name)
    accelctl(host, "detach", function["uuid"], domain_name, "--persistent")
    assert state(host, function["uuid"]) == "ready"
    assert xml.NAMESPACE not in host.virsh("dumpxml", domain_name, "--inactive").stdout


def test_a_persistent_function_can_be_unplugged_and_plugged_again(
    host: LabHost, domain_name: str, function: dict[str, Any]
) -> None:
    define(host, domain_name, "--hotplug-ports", "0")
    accelctl(host, "attach", function["uuid"], domain_name, "--persistent")
    guest = start(host, domain_name)
    accelctl(host, "detach", function["uuid"], domain_name, "--live")
    assert seen(guest) == []
    done = accelctl(host, "attach", function["uuid"], domain_name, "--live")["attachment"]
    assert done["bus"] == xml.port_id(function["uuid"]), "the port that it left is free"
    host.wait(lambda: len(seen(guest)) == 1, deadline_s=10, what="the function in the guest")
    selftest(guest)


def test_a_killed_qemu_gives_the_function_back(
    host: LabHost, domain_name: str, function: dict[str, Any]
) -> None:
    define(host, domain_name)
    accelctl(host, "vm", "start", domain_name)  # its firmware is enough of a guest
    accelctl(host, "attach", function["uuid"], domain_name, "--live")
    host.wait(lambda: state(host, function["uuid"]) == "running", deadline_s=10, what="in use")
    pid = host.run(["cat", f"/run/libvirt/qemu/{domain_name}.pid"]).stdout.strip()
    host.run(["kill", "-KILL", pid])
    host.guest(domain_name).wait_state("shut off")
    host.wait(lambda: state(host, function["uuid"]) == "ready", deadline_s=15, what="ready again")
    accelctl(host, "vm", "start", domain_name)
    accelctl(host, "attach", function["uuid"], domain_name, "--live")
    accelctl(host, "vm", "destroy", domain_name)


def test_behind_an_emulated_iommu_the_guest_drives_it_by_vfio(
    host: LabHost, domain_name: str, function: dict[str, Any]
) -> None:
    define(host, domain_name, "--iommu")
    accelctl(host, "attach", function["uuid"], domain_name, "--persistent")
    guest = start(host, domain_name)
    assert guest.run(["ls", "/sys/class/iommu"]).stdout.split() == ["dmar0"]
    selftest(guest)


def test_a_port_that_cannot_hold_the_window_is_refused_and_the_vm_goes_on(
    host: LabHost, domain_name: str, function: dict[str, Any]
) -> None:
    # Ports as libvirt makes them, behind which firmware leaves 2 MiB.
    guest = host.boot_guest(DomainSpec(domain_name))
    error = accelctl(host, "attach", function["uuid"], domain_name, "--live", check=False)
    assert "port-window" in json.dumps(error)
    assert seen(guest) == []
    assert state(host, function["uuid"]) == "ready"
    listed = host.virsh(
        "qemu-monitor-command",
        domain_name,
        '{"execute": "qom-list", "arguments": {"path": "/machine/peripheral"}}',
    ).stdout
    assert xml.device_id(function["uuid"]) not in listed


def test_the_hook_stops_a_vm_whose_function_is_gone_and_no_other(
    host: LabHost, domain_name: str, function: dict[str, Any]
) -> None:
    define(host, domain_name)
    pasted = xml.add(
        host.virsh("dumpxml", domain_name, "--inactive").stdout,
        "00000000-1111-4222-8333-444444444444",
        function["socket"],
    )
    host.run(["virsh", "define", "/dev/stdin"], input=pasted)
    refused = host.virsh("start", domain_name, check=False)
    assert refused.returncode != 0
    assert "accelvisor: function 00000000-1111-4222-8333-444444444444" in refused.stderr
    host.run(["systemctl", "stop", "accelvisor.socket", "accelvisor.service"])
    try:
        refused = host.virsh("start", domain_name, check=False)
        assert "cannot reach accelvisord" in refused.stderr
        plain = xml.remove(pasted, "00000000-1111-4222-8333-444444444444")
        host.run(["virsh", "define", "/dev/stdin"], input=plain)
        host.virsh("start", domain_name)
    finally:
        host.run(["systemctl", "start", "accelvisor.socket", "accelvisor.service"])


def test_a_stolen_socket_path_does_not_start(
    host: LabHost, domain_name: str, new_function: Callable[..., dict[str, Any]]
) -> None:
    mine, other = new_function(), new_function()
    define(host, domain_name)
    accelctl(host, "attach", mine["uuid"], domain_name, "--persistent")
    stored = host.virsh("dumpxml", domain_name, "--inactive").stdout
    host.run(
        ["virsh", "define", "/dev/stdin"], input=stored.replace(mine["socket"], other["socket"])
    )
    refused = host.virsh("start", domain_name, check=False)
    assert refused.returncode != 0
    assert f"accelvisor: function {mine['uuid']} is at {mine['socket']}" in refused.stderr


def test_libvirt_restarts_under_a_running_function(
    host: LabHost, running: Guest, function: dict[str, Any]
) -> None:
    accelctl(host, "attach", function["uuid"], running.domain, "--live")
    host.run(["systemctl", "restart", "libvirtd"])
    host.wait(["virsh", "list"], deadline_s=30)
    assert running.state == "running", "the reconnect hook must not fail"
    host.wait(lambda: running.ready, deadline_s=30, what="the agent again")
    selftest(running)
    accelctl(host, "detach", function["uuid"], running.domain, "--live")
    assert seen(running) == []


_WATCH = """\
import sys, threading
from accelvisor.hypervisor.domains import Domains
domains = Domains()
def show(event):
    print(event.kind, event.domain, event.detail, flush=True)
subscription = domains.subscribe(show)
sys.stdin.read()
subscription.close()
domains.close()
print("closed", [t.name for t in threading.enumerate() if t is not threading.main_thread()])
"""


def test_events_go_on_after_a_restart_of_libvirt(host: LabHost, domain_name: str) -> None:
    define(host, domain_name)
    host.push(_WATCH.encode(), "/tmp/watch.py")
    start_watch = "mkfifo /tmp/watch.in; exec python3 /tmp/watch.py < /tmp/watch.in"
    unit = ["systemd-run", "--quiet", "--collect"]
    into = [f"--property=Standard{end}=file:/tmp/watch.log" for end in ("Output", "Error")]
    host.run([*unit, "--unit=watch", *into, "sh", "-c", start_watch])
    log = lambda: host.run(["cat", "/tmp/watch.log"], check=False).stdout.splitlines()  # noqa: E731
    try:
        host.wait(["test", "-p", "/tmp/watch.in"], deadline_s=10)
        host.run([*unit, "--unit=watch-end", "sh", "-c", "sleep infinity > /tmp/watch.in"])
        host.wait(lambda: log() == ["connected  "], deadline_s=20, what="a connection")
        host.run(["systemctl", "restart", "libvirtd"])
        host.wait(
            lambda: log()[1:] == ["disconnected  ", "connected  "],
            deadline_s=30,
            what="the connection again",
        )
        host.virsh("start", domain_name)
        host.virsh("destroy", domain_name)
        wanted = [  # in libvirt's order
            f"resumed {domain_name} unpaused",
            f"started {domain_name} booted",
            f"stopped {domain_name} destroyed",
        ]
        host.wait(
            lambda: [line for line in log() if domain_name in line] == wanted,
            deadline_s=20,
            what="the domain's events",
        )
        host.run(["systemctl", "stop", "watch-end"])
        host.wait(lambda: log()[-1:] == ["closed []"], deadline_s=20, what="a clean end")
    finally:
        host.run(["systemctl", "stop", "watch", "watch-end"], check=False)
        host.run(["rm", "-f", "/tmp/watch.in", "/tmp/watch.log"])


_MONITOR = """\
from accelvisor.hypervisor.monitor import Monitor, MonitorError
with Monitor("/tmp/private.qmp") as monitor:
    print(monitor.version >= (11, 0, 0), monitor.execute("query-status")["status"])
    monitor.execute("stop")
    print(monitor.wait_event(lambda e: e.name == "STOP", deadline_s=5).name)
    monitor.execute("cont")
    print(monitor.wait_event(lambda e: e.name == "RESUME", deadline_s=5).name)
    print(len(monitor.execute("query-qmp-schema")) > 100)
    try:
        monitor.execute("device_del", {"id": "none"})
    except MonitorError as error:
        print(error.error_class)
"""


def test_a_private_monitor_of_a_real_qemu(host: LabHost, domain_name: str) -> None:
    arguments = ("-chardev", "socket,id=private,path=/tmp/private.qmp,server=on,wait=off",
                 "-object", "monitor-qmp,id=own,chardev=private")  # fmt: skip
    host.define(DomainSpec(domain_name, qemu=arguments))
    host.virsh("start", domain_name)
    said = host.run(["python3", "-c", _MONITOR]).stdout.splitlines()
    assert said == ["True running", "STOP", "RESUME", "True", "DeviceNotFound"]


def test_doctor_finds_a_host_that_can_do_it(host: LabHost) -> None:
    checks = {check["name"]: check for check in accelctl(host, "doctor")["checks"]}
    assert {checks[name]["severity"] for name in ("libvirt", "qemu", "hook")} == {"ok"}
    assert checks["kvm"]["severity"] in ("ok", "warning")


_TIME_HOOK = """\
import subprocess, sys, time
text = sys.stdin.buffer.read()
command = ["/etc/libvirt/hooks/qemu.d/50-accelvisor", "plain", "prepare", "begin", "-"]
def once(words):
    began = time.perf_counter()
    subprocess.run(words, input=text, check=True)
    return time.perf_counter() - began
# In turns, and the best of many: what else the machine does is not the hook's.
bare = ["/usr/bin/python3", "-IS", "-c", "import os, signal"]
both = [(once(command), once(bare)) for _ in range(30)]
print(min(hook for hook, _ in both) / min(bare for _, bare in both))
"""


def test_the_hook_costs_a_vm_without_a_function_little_more_than_an_interpreter(
    host: LabHost,
) -> None:
    said = host.run(["python3", "-c", _TIME_HOOK], input=DomainSpec("plain").xml())
    assert float(said.stdout) < 3
