"""Fixtures of the function's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.function.harness import Guest, Local, Process, running


@pytest.fixture
def local() -> Iterator[Local]:
    """A device in this process."""
    with Local() as device:
        yield device


@pytest.fixture
def process() -> Iterator[Process]:
    """A function's process tree."""
    with running() as started:
        yield started


@pytest.fixture
def guest(process: Process) -> Iterator[Guest]:
    """The in-tree client, connected to ``process``."""
    with Guest(process) as connected:
        yield connected
