"""What a test does that needs a laboratory on a machine that cannot run one."""

from __future__ import annotations

import os

import pytest

from accelvisor.lab import requirements


def require_laboratory() -> None:
    """Fail where a laboratory is required (CI, make), skip elsewhere, when there can be none."""
    missing = "; ".join(f"{item.what} ({item.remedy})" for item in requirements.missing())
    if not missing:
        return
    if os.environ.get("CI") == "true" or os.environ.get("ACCELVISOR_LAB_REQUIRED"):
        pytest.fail(f"this machine cannot run a laboratory: {missing}", pytrace=False)
    pytest.skip(f"this machine cannot run a laboratory: {missing}")
