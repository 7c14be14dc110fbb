"""One laboratory for the whole session; whoever asks for it is a test of the laboratory.

With ``ACCELVISOR_LAB_NAME`` naming one that is up (``python -m accelvisor.lab up``) the tests use
that one and leave it running: the quick way to work on them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelvisor.errors import NotFoundError
from accelvisor.lab import DomainSpec, Guest, LabHost, Laboratory, state
from accelvisor.lab.progress import Progress
from tests.laboratory import require_laboratory

# Building both images from nothing falls into the first test that asks for the laboratory.
_TIMEOUT_S = 900
_numbers = itertools.count(1)


def own_name(word: str) -> str:
    """A laboratory's name that no other test run on this machine uses."""
    return f"{word[:9]}-{os.getpid()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"lab", "laboratory_possible"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.lab)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture(scope="session")
def laboratory_possible() -> None:
    """Fails where a laboratory is required (CI, make), skips elsewhere, when there can be none."""
    require_laboratory()


@pytest.fixture(scope="session")
def lab(laboratory_possible: None, pytestconfig: pytest.Config) -> Iterator[Laboratory]:
    """One host with this tree's packages; ``two_hosts`` adds the second."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        laboratory = _running() or Laboratory(1)
        laboratory.progress.say("")
        laboratory.up()
    yield laboratory
    laboratory.__exit__(None, None, None)


def _running() -> Laboratory | None:
    if not os.environ.get("ACCELVISOR_LAB_NAME"):
        return None
    try:
        return Laboratory.attach()
    except NotFoundError:
        return None


@pytest.fixture
def host(lab: Laboratory) -> LabHost:
    """The first host."""
    return lab.hosts[0]


@pytest.fixture
def two_hosts(lab: Laboratory) -> tuple[LabHost, LabHost]:
    """Two hosts that can migrate guests to each other; the second is booted when asked for."""
    lab.add_hosts(2)
    return lab.hosts[0], lab.hosts[1]


@pytest.fixture
def domain_name(lab: Laboratory) -> Iterator[str]:
    """A name for one domain, which is gone from every host afterwards."""
    name = f"test{next(_numbers)}"
    yield name
    for each in lab.hosts:
        each.virsh("destroy", name, check=False)
        each.virsh("undefine", name, check=False)


@pytest.fixture
def guest(host: LabHost, domain_name: str) -> Guest:
    """A plain guest, ready to run programs."""
    return host.boot_guest(DomainSpec(domain_name))


@pytest.fixture
def lab_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own in place of /run/accelvisor-lab, for tests of the state files."""
    monkeypatch.setattr(state, "RUN", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def quiet() -> Progress:
    return Progress(quiet=True)
