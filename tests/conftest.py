"""What all tests share."""

from __future__ import annotations

import gc

from hypothesis import settings

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("unhurried", settings.default, deadline=None)
settings.load_profile("unhurried")


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end: thousands of tests, and all modules. Who
    counts descriptors collects garbage first (tests/descriptors.py), and would look through all of
    it each time, for half a second.
    """
    gc.collect()
    gc.freeze()
