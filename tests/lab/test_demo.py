"""The demonstration holds on real hosts, with a real VM: the product's first promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelvisor.lab.demo import Demonstration
from accelvisor.lab.progress import Progress

pytestmark = pytest.mark.lab
DIGITS = Path(__file__).resolve().parents[2] / "fixtures" / "digits"


def test_vm_computes_the_reference_bits_on_its_function_and_moves_with_it(two_hosts, capsys):
    held = Demonstration(two_hosts, DIGITS, Progress(quiet=True)).run()
    shown = capsys.readouterr().out
    assert held, shown
    assert "Processing accelerators [1200]" in shown
    assert shown.count("✔") == 4
