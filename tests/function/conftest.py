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


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """A function's process tree, shared by a file's tests: each new client finds it clean."""
    with running() as started:
        yield started


@pytest.fixture
def guest(process: Process) -> Iterator[Guest]:
    """The in-tree client, connected to ``process``."""
    with Guest(process) as connected:
        yield connected


@pytest.fixture
def fresh() -> Iterator[Process]:
    """A process tree of the test's own, to be killed or told to give up."""
    with running() as started:
        yield started


@pytest.fixture
def tenant(fresh: Process) -> Iterator[Guest]:
    """The in-tree client, connected to ``fresh``."""
    with Guest(fresh) as connected:
        yield connected
