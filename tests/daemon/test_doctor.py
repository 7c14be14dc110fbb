from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelvisor.daemon import doctor
from accelvisor.daemon.doctor import OK, PROBLEM, WARNING, Facts, gather, judge
from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.reconcile import Claim, View
from accelvisor.hypervisor.capabilities import Finding, Severity

from .harness import Harness
from .test_reconcile import function

GOOD = Facts(
    systemd=257,
    supervisor="systemd",
    unit="accelvisor.service",
    controllers=("cpu", "memory", "io"),
    huge_free_bytes=0,
    memory_available_bytes=1 << 34,
    admin_mode=stat.S_IFSOCK | 0o666,
    admin_group="accelvisor",
    socket_group="libvirt-qemu",
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
        ("systemd", {"systemd": None, "supervisor": "subprocess"}, WARNING, "not pid 1"),
        ("systemd", {"supervisor": "subprocess", "unit": ""}, WARNING, "subprocess"),
        ("systemd", {"supervisor": "subprocess"}, PROBLEM, "inside accelvisor.service"),
        ("cgroups", {"controllers": ("cpu",)}, WARNING, "no memory"),
        ("admin-socket", {"admin_mode": None}, PROBLEM, "not there"),
        ("socket-group", {"socket_group_missing": "kvm"}, PROBLEM, '"kvm"'),
        ("socket-group", {"socket_group": ""}, PROBLEM, "none"),
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


def test_facts_of_this_machine(short_path: Path) -> None:
    facts = gather(
        admin_socket=short_path / "none",
        supervisor="subprocess",
        socket_group="no-such-group-here",
    )
    assert facts.memory_available_bytes > 0
    assert facts.admin_mode is None
    assert facts.socket_group_missing == "no-such-group-here"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(short_path / "some"))
        facts = gather(admin_socket=short_path / "some", supervisor="x", socket_group="")
    assert stat.S_ISSOCK(facts.admin_mode or 0)
    assert facts.admin_group
    assert facts.socket_group_missing == ""


def test_the_hypervisors_findings_come_first(harness: Harness) -> None:
    def examine(uri: str) -> Sequence[Finding]:
        return [Finding("qemu", Severity.PROBLEM, f"none for {uri}", "apt install")]

    async def scenario() -> None:
        async with harness.daemon(examine=examine):
            checks = (await harness.call("Doctor"))["checks"]
            assert checks[0] == {
                "name": "qemu",
                "severity": "problem",
                "found": "none for fake",
                "hint": "apt install",
            }
            own = [item.name for item in judge(GOOD, [])]
            assert [item["name"] for item in checks[1:]] == [*own, "confinement", "claims"]

    asyncio.run(scenario())


def test_a_socket_that_a_group_was_given_is_said_to_be_narrow() -> None:
    found = finding("admin-socket", admin_mode=stat.S_IFSOCK | 0o660)
    assert (found.severity, "others cannot connect" in found.found) == (OK, True)


@pytest.mark.parametrize(
    ("cgroups", "unit"),
    [
        ("0::/system.slice/accelvisor.service\n", "accelvisor.service"),
        ("1:name=systemd:/system.slice/accelvisor.service\n0::/\n", "accelvisor.service"),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", ""),
        ("0::/\n", ""),
        ("nonsense\n\n", ""),
    ],
)
def test_the_unit_that_a_daemon_runs_in(cgroups: str, unit: str) -> None:
    assert doctor._unit(cgroups) == unit


ALL = {
    "no_new_privileges": True, "no_capabilities": True, "descriptor_limit": True, "landlock": 7,
    "no_core_dump": True, "resource_limits": True, "concealed": True, "system_calls": True,
}  # fmt: skip
HOST = replace(GOOD, controllers=("cpu", "memory", "pids"))


def test_a_host_that_enforces_everything_is_said_to() -> None:
    for told in ({}, {"f": ALL, "g": ALL}):
        found = doctor.judge_confinement(HOST, told)
        assert (found.severity, found.hint) == (OK, "")
        assert f" {len(told)} " in found.found


@pytest.mark.parametrize("measure", ALL)
def test_a_measure_that_one_function_lacks_is_named_with_the_function(measure: str) -> None:
    for lacking in ({**ALL, measure: 0}, {name: on for name, on in ALL.items() if name != measure}):
        found = doctor.judge_confinement(HOST, {"good": ALL, "poor": lacking})
        assert found.severity == WARNING
        assert "(poor)" in found.found
        assert found.hint


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"systemd": None, "supervisor": "subprocess"}, "no ceiling on memory, processors"),
        ({"supervisor": "subprocess"}, "no network, mounts and devices of their own"),
        ({"controllers": ("cpu", "pids")}, "no ceiling on memory"),
        ({"controllers": ("memory", "pids")}, "no ceiling on processors"),
        ({"controllers": ("cpu", "memory")}, "no ceiling on threads"),
    ],
)
def test_what_only_units_can_enforce_is_said_where_there_are_none(
    changes: dict[str, Any], text: str
) -> None:
    found = doctor.judge_confinement(replace(HOST, **changes), {"f": ALL})
    assert found.severity == WARNING
    assert text in found.found
    assert found.hint


def test_doctor_asks_the_functions_themselves(harness: Harness) -> None:
    """The harness's host has no units; what its function says comes on top, or is no guess."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("f")
            told = harness.paths.function(made["uuid"]).spec.with_suffix(".sandbox")
            checks = {item["name"]: item for item in (await harness.call("Doctor"))["checks"]}
            assert checks["confinement"]["severity"] == WARNING
            assert "all system calls" not in checks["confinement"]["found"]
            told.write_text(json.dumps({"sandbox": {**ALL, "system_calls": False}}))
            checks = {item["name"]: item for item in (await harness.call("Doctor"))["checks"]}
            assert "all system calls of their user (f)" in checks["confinement"]["found"]

    asyncio.run(scenario())


def test_claims_and_unreadable_domains_are_findings() -> None:
    functions = [function("f", State.ATTACHED, "vm")]
    view = View((), (Claim("f", "clone", "clone"),), ("odd",))
    [claims, unreadable] = doctor.judge_view(view, functions)
    assert (claims.severity, claims.found) == (PROBLEM, "clone names f")
    assert (unreadable.severity, "odd" in unreadable.found) == (WARNING, True)
    assert [item.severity for item in doctor.judge_view(View((), (), ()), functions)] == [OK]
