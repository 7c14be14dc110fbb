"""accelctl against a whole daemon: what it prints for people, what with --json, how it exits."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from accelvisor.cli import main as main_module
from accelvisor.control import admin
from accelvisor.hypervisor.port import DomainEventKind
from tests.daemon.harness import Harness

Ctl = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]


@pytest.fixture
def ctl(harness: Harness, capsys: pytest.CaptureFixture[str]) -> Ctl:
    async def run(*words: str) -> tuple[int, str, str]:
        argv = [*words, "--socket", str(harness.paths.admin_socket)]
        code = await asyncio.to_thread(main_module.main, argv)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def scenario(harness: Harness, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with harness.daemon():
            await body()

    asyncio.run(run())


def test_a_function_from_create_to_delete(harness: Harness, ctl: Ctl) -> None:
    async def body() -> None:
        code, out, err = await ctl("function", "create", "small", "--name", "nn0")
        assert (code, err) == (0, "")
        shown = dict(line.split(":", 1) for line in out.splitlines())
        assert shown["state"].strip() == "ready"
        assert shown["cores"].strip() == "1 (chip 0: 0)"
        assert shown["memory"].strip() == "64 MiB"
        uuid = shown["uuid"].strip()
        _, out, _ = await ctl("function", "list")
        head, row = out.splitlines()
        assert head.split() == ["NAME", "UUID", "PROFILE", "CARD", "CORES", "MEMORY", "STATE", "VM"]
        assert row.split() == ["nn0", uuid, "small", "card0", "1", "64", "MiB", "ready", "-"]
        assert (await ctl("function", "statistics", "nn0"))[1] == "resets: 0\ncommands: 0\n"
        assert (await ctl("function", "reset", "nn0"))[0] == 0
        assert (await ctl("function", "delete", "nn0"))[1] == "function nn0 is deleted\n"
        code, out, _ = await ctl("function", "list")
        assert out == "no functions; accelctl function create PROFILE makes one\n"

    scenario(harness, body)


def test_a_card_is_cut_and_a_vm_gets_a_part_of_it(harness: Harness, ctl: Ctl) -> None:
    async def body() -> None:
        code, out, _ = await ctl("card", "set", "card0", "--functions", "2")
        shown = dict(line.split(":", 1) for line in out.splitlines() if ":" in line)
        assert (code, shown["mode"].strip()) == (0, "static 2")
        assert shown["partitions free"].strip() == "0-1 (of 2)"
        for name in ("one", "two", "three"):
            harness.domains.put(name, DomainEventKind.DEFINED)
        code, out, err = await ctl("attach", "one", "--card", "any")
        assert (code, err) == (0, "")
        assert "attached to one (stored definition), partition 0 of card card0" in out
        code, out, _ = await ctl("attach", "two", "--card", "card0", "--json")
        function = json.loads(out)["assigned"]["function"]
        words = ("--on-exhaustion", "wait", "--timeout", "0.2")
        code, out, err = await ctl("attach", "three", "--card", "any", *words)
        assert (code, out) == (1, "")
        assert "number 1 in the queue" in err
        assert "no static function became free in time" in err
        code, out, _ = await ctl("card", "show", "card0")
        assert "none of 2" in out
        assert ["1", "two", function] in [line.split() for line in out.splitlines()]
        assert "static 2" in (await ctl("card", "list"))[1]
        assert (await ctl("attach", "one", "two", "--card", "any"))[0] == 2
        assert (await ctl("attach", "one", "two", "--timeout", "3"))[0] == 2

    scenario(harness, body)


def test_json_is_the_wire_object(harness: Harness, ctl: Ctl) -> None:
    commands = [
        ("host show", "GetHost", {}),
        ("card list", "ListCards", {}),
        ("card show card0", "GetCard", {"card": "card0"}),
        ("card show card0 --config-space", "GetCardConfigSpace", {"card": "card0"}),
        ("profiles", "ListProfiles", {}),
        ("function list", "ListFunctions", {}),
        ("function show nn0", "GetFunction", {"function": "nn0"}),
        ("function statistics nn0", "FunctionStatistics", {"function": "nn0"}),
        ("attach nn0 vm --print", "PrintAttachment", {"function": "nn0", "domain": "vm"}),
        ("vm list", "ListDomains", {}),
        ("vm show vm", "GetDomain", {"domain": "vm"}),
        ("vm xml vm", "DomainXml", {"domain": "vm"}),
        ("events", "ListEvents", {}),
    ]
    harness.domains.put("vm", DomainEventKind.DEFINED)

    async def body() -> None:
        await harness.create("nn0")
        for words, method, parameters in commands:
            code, out, err = await ctl(*words.split(), "--json")
            assert (code, err) == (0, ""), words
            wire = await harness.call(method, **parameters)
            assert json.loads(out) == wire, words
            admin.interface().check_reply(method, wire)
            # And for people there is something else to read.
            code, out, _ = await ctl(*words.split())
            assert code == 0
            assert out.strip()
            assert not out.startswith("{")

    scenario(harness, body)


def test_a_vms_life(harness: Harness, ctl: Ctl) -> None:
    async def body() -> None:
        await harness.create("nn0")
        code, out, _ = await ctl("vm", "define", "web", "--memory", "256MiB", "--dry-run")
        assert out == "<domain><name>web</name></domain>\n"
        assert (await ctl("vm", "list"))[1] == "no VMs; accelctl vm define makes one\n"
        assert (await ctl("vm", "define", "web"))[0] == 0
        code, out, _ = await ctl("attach", "nn0", "web")
        assert out.endswith("attached to web (stored definition)\n")
        for verb, state in (
            ("start", "running"),
            ("suspend", "paused"),
            ("resume", "running"),
            ("reboot", "running"),
            ("reset", "running"),
            ("stop", "shutoff"),
            ("start", "running"),
            ("destroy", "shutoff"),
        ):
            code, out, err = await ctl("vm", verb, "web")
            assert (code, err) == (0, ""), verb
            shown = dict(line.split(":", 1) for line in out.splitlines())
            assert shown["state"].strip() == state, verb
        assert "virsh" in (await ctl("vm", "console", "web"))[1]
        code, out, _ = await ctl("detach", "nn0")
        assert out.endswith("detached from web (stored definition)\n")
        code, _, err = await ctl("detach", "nn0")
        assert code == 2
        assert "[function-not-attached]" in err
        assert (await ctl("vm", "undefine", "web"))[1] == "VM web is undefined\n"

    scenario(harness, body)


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("function show zz", 1, 'accelctl: there is no function "zz" [function-not-found]'),
        ("function create huge", 1, 'accelctl: there is no profile "huge" [profile-not-found]'),
        ("function create small --name a/b", 2, "[name-invalid]"),
        ("card show zz", 1, 'accelctl: there is no card "zz" [card-not-found]'),
        ("vm start zz", 1, "[domain-not-found]"),
        ("attach zz", 2, "accelctl: attach needs a VM [usage]"),
        ("vm define", 2, "accelctl: give a NAME with options, or --xml FILE, not both [usage]"),
        ("vm define a --xml /nowhere", 2, "not both [usage]"),
        ("vm define --xml /nowhere", 2, "cannot read /nowhere: No such file or directory [usage]"),
        ("vm define a --vcpus 0", 2, "[domain-options]"),
    ],
)
def test_errors_have_a_code_and_the_right_exit(
    harness: Harness, ctl: Ctl, words: str, code: int, error: str
) -> None:
    async def body() -> None:
        got, out, err = await ctl(*words.split())
        assert (got, out) == (code, "")
        assert error in err.splitlines()[0]
        got, out, _ = await ctl(*words.split(), "--json")
        wire = json.loads(out)
        assert wire["parameters"]["code"] in error
        assert wire["error"].startswith("io.accelvisor.Admin.")

    scenario(harness, body)


def test_a_hint_is_shown_on_a_line_of_its_own(harness: Harness, ctl: Ctl) -> None:
    async def body() -> None:
        _, _, err = await ctl("function", "create", "smal")
        assert err.splitlines()[1] == "hint: profiles: small, medium, large"

    scenario(harness, body)


@pytest.mark.parametrize(
    "words", [[], ["functions"], ["function"], ["vm", "stop", "a", "--timeout", "x"]]
)
def test_usage_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main_module.main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err


def test_no_daemon_is_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.main(["function", "list", "--socket", "/nowhere/admin"]) == 3
    assert "[daemon-unreachable]" in capsys.readouterr().err
    assert main_module.main(["version", "--socket", "/nowhere/admin"]) == 0
    assert "accelvisord unknown" in capsys.readouterr().out


def test_no_permission_is_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert main_module.main(["function", "list"]) == 4
    assert "[socket-permission]" in capsys.readouterr().err


def test_the_socket_is_found_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELVISOR_RUN_DIR", "/nowhere/at/all")
    assert main_module.main(["function", "list", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["parameters"]["where"] == "/nowhere/at/all/admin"


def test_doctor_exits_by_its_findings(harness: Harness, ctl: Ctl) -> None:
    async def body() -> None:
        code, out, _ = await ctl("doctor")
        severities = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
        assert code == int("problem" in severities)
        assert {"ok"} < {*severities, "x"}

    scenario(harness, body)


def test_attach_prints_the_socket_of_the_vm_that_it_is_for(harness: Harness, ctl: Ctl) -> None:
    harness.domains.put("vm", DomainEventKind.DEFINED)
    vm, later = harness.domains.get("vm").uuid, "0b36e1ad-94f1-4e5c-8a5e-0e5a6a7f1a01"

    async def body() -> None:
        made = await harness.create("nn0")
        paths = harness.paths.function(made["uuid"])
        for named, uuid in (("vm", vm), (vm, vm), (later.upper(), later)):
            code, out, _ = await ctl("attach", "nn0", named, "--print")
            assert code == 0
            assert f"'{paths.domain_socket(uuid)}'" in out
        code, _, err = await ctl("attach", "nn0", "--print")
        assert code == 2
        assert "name the domain" in err
        code, _, err = await ctl("attach", "nn0", "nobody", "--print")
        assert "nobody" in err
        await ctl("attach", "nn0", "vm")
        code, out, _ = await ctl("attach", "nn0", "--print")
        assert f"'{paths.domain_socket(vm)}'" in out

    scenario(harness, body)


def test_selftest_refuses_a_function_that_a_vm_has(harness: Harness, ctl: Ctl) -> None:
    harness.domains.put("vm", DomainEventKind.DEFINED)

    async def body() -> None:
        await harness.create("nn0")
        await ctl("attach", "nn0", "vm")
        code, _, err = await ctl("function", "selftest", "nn0")
        assert code == 1
        assert "is attached (VM vm)" in err
        assert "[function-in-use]" in err

    scenario(harness, body)


def test_events_are_followed_as_they_happen(harness: Harness) -> None:
    async def body() -> None:
        command = [sys.executable, "-m", "accelvisor.cli.main", "events", "--follow", "--json"]
        environ = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "ACCELVISOR_RUN_DIR": str(harness.paths.run),
        }
        await harness.create("one")
        child = await asyncio.create_subprocess_exec(
            *command, "--after", "1", env=environ, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert child.stdout is not None
            async with asyncio.timeout(20):
                first = json.loads(await child.stdout.readline())
                assert first["event"]["id"] == 2
                await harness.create("two")
                second = json.loads(await child.stdout.readline())
                assert second["event"]["kind"] == "function-creating"
        finally:
            child.terminate()
            await child.communicate()

    scenario(harness, body)


def test_a_reader_that_has_seen_enough_is_no_error(harness: Harness) -> None:
    async def body() -> None:
        for number in range(3):
            await harness.create(f"f{number}")
        script = (
            f"{sys.executable} -m accelvisor.cli.main events | head -n 1; exit ${{PIPESTATUS[0]}}"
        )
        environ = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "ACCELVISOR_RUN_DIR": str(harness.paths.run),
        }
        child = await asyncio.create_subprocess_exec(
            "bash", "-c", script, env=environ, stdout=-1, stderr=-1
        )
        out, err = await child.communicate()
        assert (child.returncode, err) == (0, b"")
        assert out.count(b"\n") == 1

    scenario(harness, body)


def test_starting_is_fast() -> None:
    """Imports of accelctl beyond Python's own start: no msgspec, no numpy, no asyncio."""
    script = "import sys, accelvisor.cli.main; print(*sys.modules)"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    heavy = {"numpy", "msgspec", "asyncio", "libvirt", "rich", "accelvisor.guest", "numba"}
    assert heavy.isdisjoint(done.stdout.split())
