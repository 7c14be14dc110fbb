"""A host whose functions stand for themselves, and one of its functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accelvisor.daemon.store import Function
from tests.daemon.moving.resting import Host, function, host
from tests.function.harness import Process


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path / "here") as made:
        yield made


@pytest.fixture
def one(here: Host) -> Iterator[tuple[Process, Function]]:
    with function(here) as made:
        yield made
