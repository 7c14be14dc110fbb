"""How much of a host the units leave to what runs in them, as systemd itself rates it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).parents[2] / "systemd"
SERVICES = sorted(path.name for path in SYSTEMD.glob("*.service"))
#: 10 is a service without any protection.
MOST = 2.0


def test_there_are_units() -> None:
    assert {"accelvisor.service", "accelvisor-function@.service"} <= set(SERVICES)


@pytest.mark.parametrize("unit", SERVICES)
def test_a_unit_is_exposed_at_most_so_far(unit: str) -> None:
    """The laboratory asks the systemd of a real host as well (tests/lab/test_package.py)."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(SYSTEMD / unit)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: (\d+\.\d)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= MOST, done.stdout
