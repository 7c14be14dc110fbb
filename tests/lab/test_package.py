"""The packages' whole life on a host that has nothing but what they depend on.

The host is one of its own, bare at first: what is installed, upgraded, removed and purged here must
not be what other tests stand on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelvisor.lab import LabHost, Laboratory, package
from accelvisor.lab.progress import Progress
from tests.lab.conftest import own_name
from tests.lab.modules import IMPORT_ALL, modules

NEWER = "0.1.0+rebuilt"
NAMES = ("accelvisor", "accelvisor-guest")
MAN = sorted(path.name for path in (package.repository() / "docs/man").glob("*.[1-8]"))


@pytest.fixture(scope="module")
def bare(lab: Laboratory) -> Iterator[LabHost]:
    """A host without accelvisor; asking for ``lab`` has built the images."""
    with Laboratory(
        1, name=own_name("package"), install=False, progress=Progress(quiet=True)
    ) as own:
        yield own.hosts[0]


@pytest.fixture
def installed(bare: LabHost) -> LabHost:
    """It, with this tree's packages as dpkg leaves them, whatever a test before did."""
    if version(bare) == "":
        dpkg_install(bare, package.build(Progress(quiet=True)))
    return bare


def dpkg_install(host: LabHost, built: Path) -> None:
    """dpkg alone: were a dependency not there, it would fail."""
    debs = [package.package(built, name) for name in NAMES]
    for deb in debs:
        host.push(deb, f"/root/{deb.name}")
    paths = [f"/root/{deb.name}" for deb in debs]
    host.run(["dpkg", "--install", *paths], timeout=180)
    host.run(["rm", *paths])


def version(host: LabHost) -> str:
    """Of the installed host package; empty when there is none, or only its configuration."""
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", "accelvisor"]
    status, _, found = host.run(query, check=False).stdout.partition(" ")
    return found if status == "installed" else ""


def accelctl(host: LabHost, *words: str) -> Any:
    said = host.run(["accelctl", *words, "--json"], timeout=120).stdout
    return json.loads(said) if said.strip() else {}


def create(host: LabHost, name: str) -> str:
    """A new function; returns its UUID."""
    return str(accelctl(host, "function", "create", "small", "--name", name)["function"]["uuid"])


def main_pid(host: LabHost, unit: str) -> int:
    return int(host.run(["systemctl", "show", "--value", "-p", "MainPID", unit]).stdout)


def function_units(host: LabHost) -> list[str]:
    listing = ["systemctl", "list-units", "--all", "--plain", "--no-legend"]
    lines = host.run([*listing, "accelvisor-function@*"]).stdout.splitlines()
    return [line.split()[0] for line in lines]


def processes(host: LabHost) -> list[str]:
    lines = host.run(["ps", "-eo", "pid,args"]).stdout.splitlines()
    return [line for line in lines if re.search(r"accelvisor(d|-function|\.)", line)]


def test_a_fresh_install_runs(installed: LabHost) -> None:
    units = ["accelvisor.service", "accelvisor.socket"]
    assert installed.run(["systemctl", "is-enabled", *units]).stdout.split() == ["enabled"] * 2
    assert installed.run(["systemctl", "is-active", *units]).stdout.split() == ["active"] * 2
    assert accelctl(installed, "function", "list") == {"functions": []}
    hook = installed.run(["stat", "-c", "%A %U", "/etc/libvirt/hooks/qemu.d/50-accelvisor"])
    assert hook.stdout.split() == ["-rwxr-xr-x", "root"]
    checks = {check["name"]: check["severity"] for check in accelctl(installed, "doctor")["checks"]}
    assert checks["hook"] == "ok"
    assert installed.run(["dpkg", "--verify", *NAMES]).stdout == ""
    assert installed.run(["dpkg", "--audit"]).stdout == ""


def test_users_groups_and_directories_are_those_of_sysusers_and_tmpfiles(
    installed: LabHost,
) -> None:
    users = [line.split() for line in rules(installed, "sysusers.d")]
    assert users
    for kind, name, *_ in users:
        installed.run(["getent", {"u": "passwd", "g": "group"}[kind], name])
    directories = [line.split() for line in rules(installed, "tmpfiles.d")]
    assert directories
    for _, path, mode, user, group, *_ in directories:
        found = installed.run(["stat", "-c", "%a %U %G", path]).stdout.split()
        assert found == [mode.lstrip("0"), user, group], path


def rules(host: LabHost, kind: str) -> list[str]:
    """The lines of the package's file for systemd-sysusers or -tmpfiles that say something."""
    lines = host.run(["cat", f"/usr/lib/{kind}/accelvisor.conf"]).stdout.splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("page", MAN)
def test_its_manual_pages_are_found_and_read(installed: LabHost, page: str) -> None:
    name, _, section = page.rpartition(".")
    found = installed.run(["man", "--where", section, name]).stdout.strip()
    assert found == f"/usr/share/man/man{section}/{page}.gz"
    # What groff has to complain about, it says here.
    read = installed.run(["man", "--warnings", section, name], env={"MANWIDTH": "80"})
    assert read.stderr == ""
    assert "NAME" in read.stdout


def test_every_module_imports_with_what_the_packages_depend_on(installed: LabHost) -> None:
    said = installed.run(["python3", "-c", IMPORT_ALL], timeout=120)
    assert set(said.stdout.split()) == modules()


def test_no_python_module_is_there_that_the_packages_do_not_depend_on(installed: LabHost) -> None:
    fields = "${Package}\t${Depends}, ${Pre-Depends}\t${Provides}\n"
    depends: dict[str, list[str]] = {}
    provided: dict[str, list[str]] = {}
    for line in installed.run(["dpkg-query", "-W", "-f", fields]).stdout.splitlines():
        name, needs, provides = line.split("\t")
        depends[name] = re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]+)", needs)
        for other in re.findall(r"(?:^|,)\s*([a-z0-9][a-z0-9+.-]+)", provides):
            provided.setdefault(other, []).append(name)
    reached: set[str] = set()
    waiting = list(NAMES)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [*depends.get(name, []), *provided.get(name, [])]
    assert {"python3-numpy", "python3-msgspec"} <= reached
    assert [name for name in depends if name.startswith("python3-") and name not in reached] == []


@pytest.mark.parametrize(
    "unit", ["accelvisor.service", "accelvisor.socket", "accelvisor-function@.service"]
)
def test_the_units_are_well_formed_and_sandboxed(installed: LabHost, unit: str) -> None:
    instance = unit.replace("@.", "@11111111-1111-4111-8111-111111111111.")
    # With manual pages there, it looks for those that Documentation= names.
    verified = installed.run(["systemd-analyze", "verify", instance], check=False)
    assert verified.stderr == ""
    if unit.endswith(".service"):
        # Exposure as systemd rates it, times ten: 100 is a service without any protection.
        rate = ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit]
        assert "Overall exposure level" in installed.run(rate).stdout


def test_a_function_in_its_unit_takes_every_measure_that_the_kernel_has(
    installed: LabHost,
) -> None:
    ask = "from accelvisor.function import landlock; print(landlock.version())"
    version = int(installed.run(["python3", "-c", ask]).stdout)
    uuid = create(installed, "confined")
    say = (
        "import asyncio, json, pathlib; from accelvisor.daemon.function_link import call;"
        f" path = pathlib.Path('/run/accelvisor/function/{uuid}/control.sock');"
        " print(json.dumps(asyncio.run(call(path, 'status'))['sandbox']))"
    )
    measures = json.loads(installed.run(["python3", "-c", say]).stdout)
    accelctl(installed, "function", "delete", "confined")
    assert measures.pop("landlock") == version
    assert all(measures.values()), measures


def test_a_function_is_made_of_the_spare_that_waits_in_its_unit(installed: LabHost) -> None:
    def spare() -> bool:
        return bool(accelctl(installed, "host", "show")["host"]["spares"])

    installed.wait(spare, deadline_s=30, what="a spare function process")
    (unit,) = function_units(installed)
    waits = main_pid(installed, unit)
    status = installed.run(["systemctl", "show", "--value", "-p", "StatusText", unit]).stdout
    assert status.startswith("a spare")
    uuid = create(installed, "quick")
    try:
        assert unit == f"accelvisor-function@{uuid}.service"
        assert main_pid(installed, unit) == waits
        installed.wait(spare, deadline_s=30, what="the next spare")
        assert len(function_units(installed)) == 2
        # Its end is the daemon's: nobody else would end it.
        installed.run(["systemctl", "kill", "--signal=KILL", "accelvisor.service"])
        installed.wait(spare, deadline_s=60, what="the next daemon's spare")
        installed.wait(
            lambda: len(function_units(installed)) == 2, deadline_s=10, what="the old spare's end"
        )
        assert main_pid(installed, unit) == waits
    finally:
        installed.run(["accelctl", "function", "delete", uuid, "--force"], check=False)


def test_an_upgrade_leaves_functions_running_and_finds_them_again(installed: LabHost) -> None:
    uuid = create(installed, "kept")
    holder = main_pid(installed, f"accelvisor-function@{uuid}.service")
    daemon = main_pid(installed, "accelvisor.service")
    assert holder
    try:
        dpkg_install(installed, package.build(Progress(quiet=True), version=NEWER))
        assert version(installed) == NEWER
        assert installed.run(["systemctl", "is-active", "accelvisor"]).stdout.strip() == "active"
        assert main_pid(installed, "accelvisor.service") not in (0, daemon)
        assert main_pid(installed, f"accelvisor-function@{uuid}.service") == holder
        found = accelctl(installed, "function", "show", "kept")["function"]
        assert (found["uuid"], found["state"]) == (uuid, "ready")
        # Not only known: commanded by the new daemon.
        accelctl(installed, "function", "reset", "kept")
        assert main_pid(installed, f"accelvisor-function@{uuid}.service") == holder
    finally:
        installed.run(["accelctl", "function", "delete", uuid, "--force"], check=False)
    # The old daemon's spare process went with it; the new one may have its own by now.
    assert uuid not in " ".join(function_units(installed))
    assert len(function_units(installed)) <= 1
    assert installed.run(["dpkg", "--verify", *NAMES]).stdout == ""


def test_removing_ends_the_functions_and_purging_leaves_nothing(installed: LabHost) -> None:
    made = [create(installed, name) for name in ("one", "two")]
    units = " ".join(function_units(installed))
    assert all(uuid in units for uuid in made)
    installed.run(["dpkg", "--remove", "accelvisor"], timeout=120)
    assert function_units(installed) == []
    assert processes(installed) == []
    # What an administrator wrote, and what was created, is kept until it is purged.
    installed.run(["test", "-e", "/etc/accelvisor/accelvisor.toml"])
    installed.run(["test", "-e", "/var/lib/accelvisor/accelvisor.db"])
    installed.run(["dpkg", "--purge", *NAMES], timeout=120)
    find = ["find", "/", "-xdev", "(", "-path", "/proc", "-o", "-path", "/sys", ")", "-prune"]
    named = [*find, "-o", "-iname", "*accelvisor*", "-print"]
    found = installed.run(named).stdout.split()
    # The laboratory's own, and pages that man has kept in readable form.
    others = re.compile(r".*accelvisor-lab|/var/cache/man/")
    left = [path for path in found if not others.match(path)]
    left += installed.run(["find", "/run", "/tmp", "-iname", "*accelvisor*"]).stdout.split()
    left = [path for path in left if not others.match(path)]
    assert left == []
    units = ["systemctl", "list-unit-files", "--no-legend", "accelvisor*"]
    assert installed.run(units, check=False).stdout == ""
    # libvirt and its VMs go on without.
    installed.virsh("list")
