"""Who reaches what on an installed host: users of the look-only group, and a hostile function."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from accelvisor.lab import LabHost, Laboratory
from tests.lab.user import accelctl, define, state

LOOKER = "accel-looker"
OPERATOR = "accel-operator"
STRANGER = "accel-stranger"
RUN = "/run/accelvisor"

CONNECT = """
import socket, sys
for name in ("holder", "control", "vfio"):
    try:
        socket.socket(socket.AF_UNIX).connect(f"{sys.argv[1]}/{name}.sock")
        print("connected")
    except OSError as error:
        print(error.strerror)
"""

#: What a worker that a guest took over may leave behind.
MESS = """
cd {run}/function/{uuid}
mkdir closed deep
touch closed/file
chmod 700 closed
ln -s /var/lib/accelvisor/accelvisor.db spec.new
ln -s /var/lib/accelvisor/accelvisor.db process
(cd deep && for i in $(seq 1500); do mkdir x && cd x || exit 1; done)
for file in {run}/spec/{uuid}.json {run}/spec/other.json {run}/function/other; do
    (: > $file) 2>/dev/null && echo wrote $file
done
true
"""


@pytest.fixture(scope="module")
def users(lab: Laboratory) -> Iterator[None]:
    host = lab.hosts[0]
    for name, group in ((LOOKER, "accelvisor"), (OPERATOR, "accelvisor-operate"), (STRANGER, "")):
        host.run(["useradd", name, *(["--groups", group] if group else [])])
    yield
    for name in (LOOKER, OPERATOR, STRANGER):
        host.run(["userdel", name], check=False)


@pytest.fixture
def function(host: LabHost) -> Iterator[str]:
    """The UUID of one that is ready."""
    made = accelctl(host, "function", "create", "small")["function"]
    yield made["uuid"]
    host.run(["accelctl", "function", "delete", made["uuid"], "--force"], check=False)


def run_as(host: LabHost, user: str, *command: str) -> tuple[int, str]:
    done = host.run(["runuser", "-u", user, "--", *command], check=False)
    return done.returncode, done.stdout + done.stderr


def test_who_may_look_reaches_no_function(host: LabHost, users: None, function: str) -> None:
    """Its sockets take commands, and who can put a file there gets the next guest's memory."""
    directory = f"{RUN}/function/{function}"
    assert run_as(host, LOOKER, "accelctl", "function", "list")[0] == 0
    said = run_as(host, LOOKER, "python3", "-c", CONNECT, directory)[1]
    assert said.split("\n")[:3] == ["Permission denied"] * 3
    for command in (
        ["touch", f"{directory}/mine"],
        ["rm", "-f", f"{directory}/vfio.sock"],
        ["ls", directory],
        ["cat", f"{RUN}/spec/{function}.json"],
    ):
        code, text = run_as(host, LOOKER, *command)
        assert code != 0, command
        assert "Permission denied" in text


#: QEMU's user, and the group that its sockets are given to.
QEMU = ("libvirt-qemu", "libvirt-qemu")
KNOCK = """
import os, socket, sys
for path in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("connected")
    except OSError as error:
        print(error.strerror)
"""


def knock(host: LabHost, *paths: str) -> list[str]:
    """What a QEMU that a guest took over gets at these sockets."""
    user, group = QEMU
    words = ["setpriv", "--reuid", user, "--regid", group, "--init-groups"]
    return host.run([*words, "python3", "-c", KNOCK, *paths]).stdout.splitlines()


def test_qemu_reaches_no_function_that_no_vm_has(
    host: LabHost, function: str, domain_name: str
) -> None:
    """QEMU's group opens the sockets that are for VMs, not those of the function itself."""
    define(host, domain_name)
    uuid = host.virsh("domuuid", domain_name).stdout.strip()
    own = [f"{RUN}/function/{function}/{name}.sock" for name in ("vfio", "holder", "control")]
    vms = f"{RUN}/function/{function}/libvirt-{uuid}"
    assert knock(host, *own, vms) == ["Permission denied"] * 3 + ["No such file or directory"]
    accelctl(host, "attach", function, domain_name)
    shown = accelctl(host, "function", "show", function)["function"]
    assert shown["domain_socket"] == vms
    mode = host.run(["stat", "-c", "%a %G", vms]).stdout.strip()
    assert mode == "660 libvirt-qemu"
    assert knock(host, *own, vms) == ["Permission denied"] * 3 + ["connected"]
    accelctl(host, "detach", function, domain_name)
    assert knock(host, *own, vms) == ["Permission denied"] * 3 + ["No such file or directory"]


#: As the daemon does it, without being in QEMU's group.
LISTEN = """
import sys
from accelvisor.hypervisor.endpoints import listen
sock = listen(sys.argv[1])
print("listening", flush=True)
sys.stdin.read()
"""


def test_qemu_reaches_the_bus_that_the_daemon_makes_and_no_stranger_does(
    host: LabHost, users: None
) -> None:
    path = f"{RUN}/domain/libvirt-{'0' * 8}.bus"
    become = ["setpriv", "--reuid", "accelvisor", "--regid", "accelvisor", "--init-groups"]
    script = f"{LISTEN.strip()}\n"
    unit = ["systemd-run", "--unit=accel-listen", "--collect", "--property=UMask=0027"]
    words = " ".join(become)
    host.run(
        [*unit, "sh", "-c", f"tail -f /dev/null | {words} python3 -c '{script}' {path}"]
    )
    try:
        host.wait(
            lambda: host.run(["test", "-S", path], check=False).returncode == 0
            and knock(host, path) == ["connected"],
            deadline_s=10,
            what="the socket",
        )
        assert host.run(["stat", "-c", "%a %U %G", path]).stdout.split() == [
            "660", "accelvisor", "libvirt-qemu",
        ]  # fmt: skip
        said = run_as(host, STRANGER, "python3", "-c", KNOCK, path)[1]
        assert said.strip() == "Permission denied"
        assert run_as(host, STRANGER, "ls", f"{RUN}/domain")[0] != 0
    finally:
        host.run(["systemctl", "stop", "accel-listen"], check=False)
        host.run(["rm", "-f", path])


def admitted(host: LabHost, vm: str) -> list[re.Pattern[str]]:
    """All paths in the profile of a VM, with the rule as it is packaged, as this host's parser
    would hand them to a kernel. No kernel here has AppArmor: this is what can be tried."""
    template = host.run(["cat", "/etc/apparmor.d/libvirt/TEMPLATE.qemu"]).stdout
    profile = template.replace("LIBVIRT_TEMPLATE", f"libvirt-{vm}")
    command = ["apparmor_parser", "--base", "/etc/apparmor.d", "-QK", "-D", "rule-exprs"]
    said = host.run(command, input=profile)
    lines = (said.stdout + said.stderr).splitlines()
    paths = [line.rpartition("->")[2].strip() for line in lines if line.startswith("aare:")]
    assert len(paths) > 100, "libvirt's own rules are there as well"
    return [re.compile(path) for path in paths]


def test_a_vms_profile_admits_its_own_sockets_and_no_other(host: LabHost) -> None:
    vms = ("37062d46-ed05-4e63-b102-fa45c8ac403f", "7c1e9b90-2f2b-4b4e-8f0a-51c7f0b2ad22")
    at = f"{RUN}/function/0f6d3a52-8a0e-4c53-9d57-6a3b1b2f4c11"
    for vm, other in (vms, vms[::-1]):
        paths = admitted(host, vm)
        for path, wanted in (
            (f"{at}/libvirt-{vm}", True),
            (f"{at}/libvirt-{other}", False),
            (f"{at}/x/libvirt-{vm}", False),
            (f"{at}/libvirt-{vm}/x", False),
            (f"{at}/vfio.sock", False),
            (f"{at}/holder.sock", False),
            (f"{RUN}/spec/libvirt-{vm}", False),
            (f"{RUN}/domain/libvirt-{vm}.bus", True),
            (f"{RUN}/domain/libvirt-{vm}.monitor", True),
            (f"{RUN}/domain/libvirt-{other}.bus", False),
            (f"{RUN}/domain/libvirt-{other}.monitor", False),
            (f"{RUN}/domain/libvirt-{vm}.other", False),
            (f"{RUN}/domain/libvirt-{vm}", False),
        ):
            assert any(each.fullmatch(path) for each in paths) is wanted, path


def test_levels_do_not_need_each_others_groups(host: LabHost, users: None, function: str) -> None:
    assert run_as(host, OPERATOR, "accelctl", "function", "reset", function)[0] == 0
    assert run_as(host, OPERATOR, "accelctl", "function", "delete", function)[0] == 4
    assert run_as(host, LOOKER, "accelctl", "function", "reset", function)[0] == 4
    assert run_as(host, STRANGER, "accelctl", "function", "list")[0] == 4


def test_a_hostile_function_writes_nowhere_else_and_is_deleted(
    host: LabHost, function: str
) -> None:
    """As the function's own uid, in its own mount namespace, with what it may do there."""
    unit = f"accelvisor-function@{function}.service"
    pid = host.run(["systemctl", "show", "--property=MainPID", "--value", unit]).stdout.strip()
    directory = f"{RUN}/function/{function}"
    uid, gid = host.run(["stat", "-c", "%u %g", f"{directory}/holder.sock"]).stdout.split()
    become = ["setpriv", "--reuid", uid, "--regid", gid, "--clear-groups"]
    script = MESS.format(run=RUN, uuid=function)
    done = host.run(["nsenter", "-t", pid, "-m", "--", *become, "sh", "-c", script])
    assert done.stdout == ""
    listed = host.run(["ls", directory]).stdout.split()
    assert {"closed", "deep", "spec.new"} <= set(listed)
    host.run(["kill", "-KILL", pid])  # and the daemon writes the specification anew
    host.wait(
        lambda: (
            "restarted" in host.run(["accelctl", "events"]).stdout
            and state(host, function) == "ready"
        ),
        deadline_s=20,
        what="a new process",
    )
    magic = host.run(["head", "-c", "15", "/var/lib/accelvisor/accelvisor.db"]).stdout
    assert magic == "SQLite format 3"
    accelctl(host, "function", "delete", function)
    assert function not in host.run(["ls", f"{RUN}/function", f"{RUN}/spec"]).stdout


def test_a_large_function_has_a_ceiling_above_its_memory(host: LabHost) -> None:
    """Set by the daemon, which polkit lets command this unit."""
    drop_in = "/etc/accelvisor/conf.d/90-large.toml"
    text = '[cards.card0]\n[cards.wide]\nmemory = "20GiB"\n[profiles.small]\n'
    text += '[profiles.wide]\nmemory = "16GiB"\n'
    try:
        host.run(["sh", "-c", f"cat > {drop_in}"], input=text)
        host.run(["systemctl", "reload", "accelvisor.service"])
        made = accelctl(host, "function", "create", "wide")["function"]
        unit = f"accelvisor-function@{made['uuid']}.service"
        shown = host.run(["systemctl", "show", "--property=MemoryMax", "--value", unit]).stdout
        accelctl(host, "function", "delete", made["uuid"])
        assert int(shown) == (17 << 30) + (16 << 20)
    finally:
        host.run(["rm", "-f", drop_in])
        host.run(["systemctl", "reload", "accelvisor.service"])


def test_an_autostarted_vm_gets_its_function(
    host: LabHost, function: str, domain_name: str
) -> None:
    """libvirt starts it while it comes up, as at a boot; its hook asks accelvisord."""
    define(host, domain_name)
    accelctl(host, "attach", function, domain_name)
    host.virsh("autostart", domain_name)
    try:
        # In this order: accelvisord would connect again, which brings libvirtd back by its socket.
        for service in ("accelvisor.service", "libvirtd.service"):
            host.run(["systemctl", "stop", service])
        host.run(["rm", "-f", "/run/libvirt/qemu/autostarted"])  # as if libvirt never ran
        # One after the other, as their order at a boot is.
        for service in ("accelvisor.service", "libvirtd.service"):
            host.run(["systemctl", "start", service], timeout=60)
        host.wait(lambda: state(host, function) == "running", deadline_s=30, what="the VM with it")
        assert "running" in host.virsh("domstate", domain_name).stdout
    finally:
        host.virsh("destroy", domain_name, check=False)
        host.virsh("undefine", domain_name, check=False)
