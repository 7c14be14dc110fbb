"""How much of what repeats: all by night (``make test-nightly``), the most telling part by day."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
_NIGHTLY = bool(os.environ.get("ACCELVISOR_NIGHTLY"))


def by_night(nightly: T, daily: T) -> T:
    """The first by night, the second by day."""
    return nightly if _NIGHTLY else daily
