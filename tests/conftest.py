"""How the tests are spread over two processes, where there are two (``make test``).

Those of the laboratory share one, so one process has all of them; they mostly wait for VMs, while
the other goes through the rest, file by file.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # tests/lab/conftest.py has marked its own by now: the nearer conftest comes first.
    items.sort(key=lambda item: item.get_closest_marker("lab") is None)
    for item in items:
        alone = item.get_closest_marker("lab") is None
        item.add_marker(pytest.mark.xdist_group(str(item.path) if alone else "laboratory"))
