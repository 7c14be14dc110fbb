"""Who dies in the middle of a move, and when: exactly one owner, and the same bits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from accelvisor.daemon import function_link
from accelvisor.errors import AccelvisorError
from tests.amount import by_night

from .case import Case, a_case
from .pausing import PausingHost

SOURCE = ("offered", "sealed", "committed", "done")
DESTINATION = (
    "reserving", "preparing", "receiving", "verified", "device-loaded", "loaded", "committed",
    "running",
)  # fmt: skip
HERE = [f"source:{step}" for step in SOURCE]
THERE = [f"destination:{step}" for step in DESTINATION]
STEPS = [*HERE, *THERE]
#: By day: before anything was promised, around the decision on either side, and after it.
TELLING = ["destination:receiving", "source:sealed", "destination:loaded", "source:committed"]


@pytest.fixture
def case() -> Iterator[Case]:
    with a_case() as made:
        yield made


def order_holder(host: PausingHost, function: str, method: str) -> None:
    holder = Path(host.run) / "function" / function / "holder.sock"
    with suppress(AccelvisorError):  # it may not be there (yet, or any more)
        asyncio.run(function_link.call(holder, method))


def restart(host: PausingHost) -> None:
    host.stop(signal.SIGKILL)
    host.start()


def test_source_daemon_dies_at_any_step(case: Case) -> None:
    for step in by_night(STEPS, [*TELLING, "source:offered"]):
        case.move(step, lambda source, _: restart(source))
    case.end()


def test_destination_daemon_dies_at_any_step(case: Case) -> None:
    for step in by_night(STEPS, [*TELLING, "destination:device-loaded", "destination:committed"]):
        case.move(step, lambda _, there: restart(there))
    case.end()


def test_daemon_that_stays_away_leaves_the_decision_to_the_other(case: Case) -> None:
    dead = {
        "source:sealed": lambda source, _: source.stop(signal.SIGKILL),
        "source:committed": lambda source, _: source.stop(signal.SIGKILL),
        "destination:receiving": lambda _, there: there.stop(signal.SIGKILL),
        "destination:loaded": lambda _, there: there.stop(signal.SIGKILL),
    }
    ended = {step: case.move(step, die) for step, die in dead.items()}
    assert ended["source:committed"] == "moved"
    assert "moved" not in (ended["source:sealed"], ended["destination:receiving"])
    case.end()


def test_workers_die_at_any_step(case: Case) -> None:
    def kill(*hosts: PausingHost) -> None:
        for host in hosts:
            order_holder(host, case.function, "kill-worker")

    assert {case.move(step, kill) for step in by_night(STEPS, TELLING)} == {"moved"}
    case.end()


@pytest.mark.parametrize("step", ["source:offered", "destination:receiving"])
def test_holder_of_the_destination_dies_and_the_vm_stays(case: Case, step: str) -> None:
    source = case.source

    def kill(_: PausingHost, there: PausingHost) -> None:
        order_holder(there, case.function, "give-up")
        order_holder(there, case.function, "shutdown")

    if case.move(step, kill) != "moved":
        assert case.source is source
    case.end()
