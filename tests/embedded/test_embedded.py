"""The whole product in one directory: daemon, function process, guest library."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from accelvisor.embedded import EmbeddedHost, reference, report
from accelvisor.embedded.__main__ import main
from accelvisor.errors import ConflictError, NotFoundError
from accelvisor.guest import models, nn

DIGITS = Path(__file__).resolve().parents[2] / "fixtures" / "digits"


@pytest.fixture(scope="module")
def host():
    with EmbeddedHost() as running:
        yield running


def processes_under(directory: Path) -> list[int]:
    """Pids of processes whose command line names something in ``directory``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(directory).encode() in words:
                found.append(int(entry.name))
    return found


def test_demonstration_holds_and_shows_equal_bits(capfd):
    assert main(["--digits", str(DIGITS)]) == 0
    shown = capfd.readouterr().out
    assert shown.count("✔") == 4
    assert "✘" not in shown
    assert "forgery     ✔" in shown
    assert "in the middle of the training" in shown


def test_demonstration_without_its_data_says_so(tmp_path, capfd):
    assert main(["--digits", str(tmp_path)]) == 1
    assert "file-not-found" in capfd.readouterr().err


def test_nothing_is_left_behind():
    with EmbeddedHost() as host:
        directory = host.directory
        host.create("small", "left")
        assert processes_under(directory)
    assert not directory.exists()
    assert not processes_under(directory)


def test_killing_the_daemon_costs_a_guest_nothing(host):
    function = host.create("small", "unharmed")
    with host.open(function) as fn:
        x = fn.tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
        host.stop(signal.SIGKILL)
        y = fn.tensor(np.ones((3, 2), np.float32))
        np.testing.assert_array_equal((x @ y).numpy(), [[3, 3], [12, 12]])
        host.start()
        with host.admin() as admin:
            found = admin.call("GetFunction", {"function": "unharmed"})["function"]
        assert found["uuid"] == function["uuid"]
        assert found["state"] in ("ready", "running")
        np.testing.assert_array_equal(x.numpy(), [[0, 1, 2], [3, 4, 5]])
    host.delete("unharmed")


def test_name_that_is_taken_is_refused(host):
    host.create("small", "twice")
    with pytest.raises(ConflictError):
        host.create("small", "twice")
    host.delete("twice")


def test_deleted_function_is_gone(host):
    socket = host.create("small", "gone")["socket"]
    host.delete("gone")
    with pytest.raises(NotFoundError):
        host.delete("gone")
    assert not os.path.exists(socket)


def test_training_on_the_device_has_the_reference_bits(host):
    train, _ = models.load_data(DIGITS / "digits.npz")
    network = nn.Sequential((64, 16, 10))
    function = host.create("small", "bits")
    with host.open(function) as fn:
        done = nn.train(fn, network, train.x, train.labels, epochs=1, batch=64, rate=0.1, seed=5)
    weights, losses = reference.train(train, network, epochs=1, batch=64, rate=0.1, seed=5)
    assert models.digest(done.parameters) == models.digest(weights)
    assert done.losses == losses
    host.delete("bits")


def test_plain_twin_agrees_within_rounding():
    figures = reference.run_figures(DIGITS / "mlp.npz")
    assert figures["same_classes_as_plain_twin"]
    assert 0 <= figures["largest_difference_to_plain_twin"] < 1e-4


def test_report_marks_what_does_not_hold():
    assert report.verdict(False, "x").startswith("✘ NO")


def test_report_shows_a_wrong_digit_with_its_label():
    raw = np.zeros((2, 64), np.uint8)
    raw[:, 0] = 16
    text = report.shown(raw, classes=[3, 1], labels=[3, 8])
    assert "= 3" in text
    assert "1 (is 8)" in text


def test_sparkline_survives_zeros_and_nothing():
    assert report.sparkline([]) == ""
    assert report.sparkline([0.0, 0.0]) == "▁▁"
