"""Domains with functions on a real libvirt and QEMU: the ways a VM goes, as a user goes them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from accelvisor.hypervisor import xml
from accelvisor.lab import DomainSpec, Guest, LabHost, Laboratory
from tests.lab.user import accelctl, define, seen, selftest, start, state, wait_for_state


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


def window(guest: Guest, address: str) -> int:
    """Where the guest has put BAR2; 0 when it has no address for it."""
    resource = guest.run(["cat", f"/sys/bus/pci/devices/{address}/resource"]).stdout
    return int(resource.splitlines()[2].split()[0], 16)


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
    wait_for_state(host, function["uuid"], "ready")
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


def test_behind_an_emulated_iommu_the_guest_drives_it_by_vfio_before_and_after_it_was_unplugged(
    host: LabHost, domain_name: str, function: dict[str, Any]
) -> None:
    define(host, domain_name, "--iommu", "--hotplug-ports", "0")
    accelctl(host, "attach", function["uuid"], domain_name, "--persistent")
    guest = start(host, domain_name)
    assert guest.run(["ls", "/sys/class/iommu"]).stdout.split() == ["dmar0"]
    selftest(guest)
    # A persistent function can be unplugged and plugged again.
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
    wait_for_state(host, function["uuid"], "running")
    pid = host.run(["cat", f"/run/libvirt/qemu/{domain_name}.pid"]).stdout.strip()
    host.run(["kill", "-KILL", pid])
    host.guest(domain_name).wait_state("shut off")
    wait_for_state(host, function["uuid"], "ready")
    accelctl(host, "vm", "start", domain_name)
    accelctl(host, "attach", function["uuid"], domain_name, "--live")
    accelctl(host, "vm", "destroy", domain_name)


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
        f"{os.path.dirname(function['socket'])}/libvirt-x",
    )
    host.run(["virsh", "define", "/dev/stdin"], input=pasted)
    refused = host.virsh("start", domain_name, check=False)
    assert refused.returncode != 0
    assert 'there is no function "00000000-1111-4222-8333-444444444444"' in refused.stderr
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
    plain = host.virsh("dumpxml", domain_name, "--inactive").stdout
    accelctl(host, "attach", mine["uuid"], domain_name, "--persistent")
    stored = host.virsh("dumpxml", domain_name, "--inactive").stdout
    own = accelctl(host, "function", "show", mine["uuid"])["function"]["domain_socket"]
    foreign = own.replace(mine["uuid"], other["uuid"])
    label, device = stored.split("<qemu:commandline>")
    theirs = device.replace(own, foreign)
    for text, told in (
        (
            stored.replace(own, foreign),
            f"function {mine['uuid']} is at {own}",
        ),
        # An honest label, and only the device goes elsewhere.
        (f"{label}<qemu:commandline>{theirs}", f"gives QEMU {foreign}"),
        # No label at all.
        (
            plain[: plain.index("<qemu:commandline>")] + f"<qemu:commandline>{theirs}",
            f"gives QEMU {foreign}",
        ),
        # What is the function's own is no VM's.
        (stored.replace(own, mine["socket"]), f"function {mine['uuid']} is at {own}"),
    ):
        host.run(["virsh", "define", "/dev/stdin"], input=text)
        refused = host.virsh("start", domain_name, check=False)
        assert refused.returncode != 0
        assert f"accelvisor: {told}" in refused.stderr or told in refused.stderr


def test_a_transient_vm_of_a_pasted_xml_has_its_function_while_it_lives(
    host: LabHost, domain_name: str, function: dict[str, Any]
) -> None:
    """Nobody knew that VM before libvirt's hook asked; others come and go meanwhile."""
    define(host, domain_name)
    vm, uuid = host.virsh("domuuid", domain_name).stdout.strip(), function["uuid"]
    printed = accelctl(host, "attach", uuid, domain_name, "--print")["xml"]
    (socket,) = {entry.socket for entry in xml.functions(printed)}
    plain = host.virsh("dumpxml", domain_name, "--inactive").stdout
    pasted = xml.add(plain, uuid, socket)
    host.virsh("undefine", domain_name)
    wrong = "".join(f"<qemu:arg value='{word}'/>" for word in ("-device", "no-such-device"))
    broken = pasted.replace("</qemu:commandline>", f"{wrong}</qemu:commandline>")
    refused = host.run(["virsh", "create", "/dev/stdin"], input=broken, check=False)
    assert refused.returncode != 0
    said = host.run(["accelctl", "events"]).stdout
    assert f"goes to domain {domain_name}, which is starting" in said, refused.stderr
    wait_for_state(host, uuid, "ready")
    other = plain.replace(domain_name, f"{domain_name}-busy").replace(vm, str(uuid4()))
    host.push(other.encode(), "/tmp/busy.xml")
    busy = "while virsh -q define /tmp/busy.xml; do :; done"
    host.run(["systemd-run", "--quiet", "--collect", "--unit=busy", "sh", "-c", busy])
    try:
        host.run(["virsh", "create", "/dev/stdin"], input=pasted)
    finally:
        host.run(["systemctl", "stop", "busy"])
        host.virsh("undefine", f"{domain_name}-busy", check=False)
    wait_for_state(host, uuid, "running")
    shown = accelctl(host, "function", "show", uuid)["function"]
    assert (shown["domain_uuid"], shown["domain_socket"]) == (vm, socket)
    guest = host.guest(domain_name)
    guest.wait_ready()
    selftest(guest)
    host.virsh("destroy", domain_name)
    wait_for_state(host, uuid, "ready")
    assert host.run(["test", "-e", socket], check=False).returncode != 0


def test_a_copy_of_a_domain_does_not_take_its_function(
    host: LabHost, domain_name: str, function: dict[str, Any]
) -> None:
    define(host, domain_name)
    accelctl(host, "attach", function["uuid"], domain_name, "--persistent")
    stored = host.virsh("dumpxml", domain_name, "--inactive").stdout
    copy = re.sub(r"<uuid>.*?</uuid>", "", stored).replace(
        f"<name>{domain_name}</name>", f"<name>zz-{domain_name}</name>"
    )
    host.run(["virsh", "define", "/dev/stdin"], input=copy)
    try:
        refused = host.virsh("start", f"zz-{domain_name}", check=False)
        assert f"belongs to domain {domain_name} (accelctl detach" in refused.stderr
        owner = accelctl(host, "function", "show", function["uuid"])["function"]["domain"]
        assert owner == domain_name
        host.virsh("start", domain_name)
    finally:
        host.virsh("undefine", f"zz-{domain_name}", check=False)


def test_a_guest_that_lets_go_after_the_deadline_gives_the_function_back(
    host: LabHost, running: Guest, function: dict[str, Any]
) -> None:
    accelctl(host, "attach", function["uuid"], running.domain, "--live")
    accelctl(host, "vm", "suspend", running.domain)
    try:
        words = ("detach", function["uuid"], running.domain, "--live", "--timeout", "0.5")
        assert "detach-deadline" in json.dumps(accelctl(host, *words, check=False))
        assert state(host, function["uuid"]) == "running"
    finally:
        accelctl(host, "vm", "resume", running.domain)
    # Nobody asks again: the guest's late answer is enough.
    wait_for_state(host, function["uuid"], "ready")
    assert seen(running) == []


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
