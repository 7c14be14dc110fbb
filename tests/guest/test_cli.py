"""accelguest: output for people and for programs, errors, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelvisor.errors import (
    ConflictError,
    NotFoundError,
    PermissionDenied,
    UnavailableError,
    UsageError,
)
from accelvisor.guest import cli, discovery
from accelvisor.guest.discovery import Device
from accelvisor.guest.function import Function

from .fake_device import FAKE_UUID, FakeDevice

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "fixtures" / "digits"
DEVICE = Device("0000:00:05.0", 1, "", None, "")


@pytest.fixture
def vm(monkeypatch: pytest.MonkeyPatch, open_function: Callable[..., Function]) -> FakeDevice:
    """A VM with one function, reached through the fake."""
    device = FakeDevice(real_kernels=True, window_bytes=1 << 20, entries=64)

    def opened(bdf: str | None = None, **options: Any) -> Function:
        if bdf not in (None, DEVICE.bdf):
            raise NotFoundError("there is no function at there", code="device-not-found")
        return open_function(device, name=options.get("name"))

    monkeypatch.setattr(Function, "open", opened)
    monkeypatch.setattr(discovery, "find", lambda *_, **__: [DEVICE])
    return device


def test_info_for_people(vm: FakeDevice, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"0000:00:05.0  accelerator function {FAKE_UUID}\n")
    assert re.search(r"state +ready", out)
    assert re.search(r"compute +2 cores on 1 chip\n", out)
    assert re.search(r"memory +16 MiB", out)
    assert re.search(r"instructions +80 \(", out)


def test_info_as_json(vm: FakeDevice, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["functions"]
    assert told["uuid"] == str(FAKE_UUID)
    assert told["driver"] == "sysfs"
    assert "matmul" in told["instructions"]


def test_info_lists_instructions_with_their_arguments(
    vm: FakeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["info", "--instructions"]) == 0
    out = capsys.readouterr().out
    assert "    sgd(w, g, /, *, rate=0.01, decay=0.0, out=None" in out
    assert "    conv2d_backward_input(dy, w_, /, *, stride=1, pad=0, h=28, w=28, out=None" in out


def test_info_of_a_busy_function_comes_from_its_registers(
    vm: FakeDevice, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(*_: Any, **__: Any) -> Function:
        raise ConflictError("all 2 queues are used by other processes", code="queue-busy")

    monkeypatch.setattr(Function, "open", busy)
    monkeypatch.setattr(discovery, "discover", lambda *_, **__: vm)
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert str(FAKE_UUID) in out
    assert "all 2 queues are used" in out


def test_selftest_passes(vm: FakeDevice, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest"]) == 0
    out = capsys.readouterr().out
    assert "ok      instructions: 80 agree with numpy" in out
    assert re.search(r"11 of 11 checks passed, 0 failed", out)


def test_a_failing_selftest_exits_6(vm: FakeDevice, capsys: pytest.CaptureFixture[str]) -> None:
    vm.lose_interrupts = True
    assert cli.main(["selftest", "--json"]) == cli.EXIT_VERIFICATION
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert [c["name"] for c in told["checks"] if c["state"] == "failed"] == ["interrupts"]


def test_bench_prints_each_figure_with_its_spread(
    vm: FakeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(re.search(r" to ", line) for line in lines)
    assert any("GFLOP/s" in line and "numpy here" in line for line in lines)


def test_bench_measures_only_the_groups_that_are_asked_for(
    vm: FakeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "latency", "--quick", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [f["name"] for f in figures] == ["register read", "command round trip"]


def test_an_unknown_group_of_figures_is_refused(
    vm: FakeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "speed"]) == 2
    assert "groups: latency" in capsys.readouterr().err


def test_run_classifies_and_shows_pictures(
    vm: FakeDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "logits.npz"
    code = cli.main(["run", str(DIGITS / "mlp.npz"), "--singles", "3", "--save", str(saved)])
    assert code == 0
    out = capsys.readouterr().out
    assert "accuracy   96.11% (346 of 360)" in out
    assert out.count(" (truly ") == 2
    assert "@" in out
    with np.load(saved) as data:
        assert data["logits"].shape == (360, 10)


def test_run_as_json(vm: FakeDevice, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(DIGITS / "mlp.npz"), "--singles", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["correct"] == 346
    assert len(told["logits_sha256"]) == 64
    assert told["latency_us"] == {}


def test_train_saves_a_network_that_run_takes(
    vm: FakeDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "net.npz"
    arguments = ["train", str(DIGITS / "digits.npz"), "--hidden", "16,16", "--epochs", "2"]
    assert cli.main([*arguments, "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "epoch   2 of 2  loss " in out
    assert "network    64-16-16-10, seed 0" in out
    trained = re.search(r"\((\d+) of 360", out)
    assert cli.main(["run", str(saved), "--singles", "0", "--json"]) == 0
    assert trained is not None
    assert json.loads(capsys.readouterr().out)["correct"] == int(trained[1])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["info", "--driver", "magic"],
        ["run"],
        ["train", "x.npz", "--epochs", "many"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: accelguest" in capsys.readouterr().err


@pytest.mark.parametrize(
    "extra", [["--hidden", "0"], ["--hidden", "a"], ["--epochs", "0"], ["--rate", "-1"]]
)
def test_wrong_numbers_exit_2_with_a_message(
    extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(DIGITS / "digits.npz"), *extra]) == 2
    assert capsys.readouterr().err.startswith("accelguest: --")


def test_no_hidden_layer_is_a_network_too(
    vm: FakeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(DIGITS / "digits.npz"), "--hidden", "", "--epochs", "1"]
    assert cli.main(arguments) == 0
    assert "network    64-10" in capsys.readouterr().out


def test_a_vm_without_a_function_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(discovery, "find", lambda *_, **__: [])
    assert cli.main(["info"]) == cli.EXIT_UNREACHABLE
    err = capsys.readouterr().err
    assert err.splitlines() == [
        "accelguest: this VM has no accelerator function [device-not-found]",
        "  hint: attach one on the host: accelctl attach FUNCTION DOMAIN",
    ]


def test_errors_are_json_too_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(discovery, "find", lambda *_, **__: [])
    cli.main(["info", "--json"])
    told = json.loads(capsys.readouterr().out)["error"]
    assert set(told) == {"code", "message", "where", "hint"}


def test_a_missing_file_is_named_before_the_device_is_touched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["run", "/nowhere/net.npz"]) == cli.EXIT_FAILED
    assert "/nowhere/net.npz does not exist [file-not-found]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (NotFoundError("x", code="device-not-found"), 3),
        (UnavailableError("x"), 3),
        (PermissionDenied("x"), 4),
        (ConflictError("x"), 1),
        (NotFoundError("x", code="file-not-found"), 1),
    ],
)
def test_exit_codes(error: Any, code: int) -> None:
    assert cli.exit_code(error) == code


def test_info_needs_no_numpy() -> None:
    """numpy takes seconds to import in an emulated VM."""
    script = (
        "import sys\n"
        "from accelvisor.guest import cli, function, discovery, sysfs, instructions\n"
        "cli.build_parser()\n"
        "print(sorted(m for m in ('numpy', 'subprocess', 'uuid', 'ctypes') if m in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_the_guest_imports_nothing_of_the_host() -> None:
    script = (
        "import sys, pkgutil, importlib, accelvisor.guest as g\n"
        "for m in pkgutil.iter_modules(g.__path__):\n"
        "    importlib.import_module('accelvisor.guest.' + m.name)\n"
        "rooms = {n.split('.')[1] for n in sys.modules if n.startswith('accelvisor.')}\n"
        "others = {n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(rooms), 'msgspec' in others, 'numba' in others)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "['abi', 'collectives', 'errors', 'guest', 'limits'] False False"


def test_the_man_page_names_every_command_and_option() -> None:
    page = (ROOT / "docs" / "man" / "accelguest.1").read_text().replace("\\-", "-")
    parser = cli.build_parser()
    (commands,) = [a for a in parser._actions if a.dest == "command"]
    assert commands.choices is not None
    for name, command in commands.choices.items():  # type: ignore[union-attr]
        assert re.search(rf"^\.B[RI]? .*\b{name}\b", page, re.M), name
        for action in command._actions:
            for option in action.option_strings:
                assert option in page, f"{name} {option}"
    for option in re.findall(r"--[a-z]+", page):
        assert any(
            option in action.option_strings
            for command in commands.choices.values()  # type: ignore[union-attr]
            for action in command._actions
        ), option
