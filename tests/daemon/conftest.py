from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Harness


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A short temporary directory: a socket's path has 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="a"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def harness(short_path: Path) -> Iterator[Harness]:
    made = Harness(short_path)
    yield made
    made.clean_up()
