from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.harness import Harness


@pytest.fixture
def harness() -> Iterator[Harness]:
    """A daemon's paths with a short name: a socket's path has 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="a"))
    made = Harness(path)
    yield made
    made.clean_up()
    shutil.rmtree(path)
