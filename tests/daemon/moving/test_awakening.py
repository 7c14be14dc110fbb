"""A VM's functions after a move: together, and without one that is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.moving import awakening, orders
from accelvisor.errors import UnavailableError

ONE, TWO = "one", "two"


class Scene:
    """Two functions; those in ``silent`` do not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *silent: str) -> None:
        self.told: list[tuple[str, str]] = []
        self.states = {ONE: State.RUNNING, TWO: State.RUNNING}

        async def control(_: Any, uuid: str, method: str, parameters: dict[str, Any]) -> None:
            if uuid in silent:
                raise UnavailableError("it is gone", code="function-unavailable")
            self.told.append((uuid, method if method != "migrate" else parameters["to"]))

        monkeypatch.setattr(orders, "control", control)

    def wake(self, **how: bool) -> bool:
        functions: Any = SimpleNamespace(
            registry=SimpleNamespace(get=lambda uuid: SimpleNamespace(state=self.states[uuid])),
            world=SimpleNamespace(paths=None),
        )
        return asyncio.run(awakening.wake(functions, [ONE, TWO], full_speed=False, **how))


def test_none_takes_a_step_before_all_have_taken_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.wake(moved=True)
    steps = [method for _, method in scene.told]
    assert steps == [s for s in steps[::2] for _ in range(2)]
    assert steps[::2] == ["RUNNING_P2P", "RUNNING", "moved", "fence", "track"]


def test_a_dead_function_does_not_freeze_its_neighbour_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, ONE)
    scene.states[ONE] = State.FAILED
    assert not scene.wake()
    assert scene.told[-2:] == [(TWO, "fence"), (TWO, "track")]


def test_one_that_only_does_not_answer_yet_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, ONE)
    with pytest.raises(UnavailableError):
        scene.wake()
    assert (TWO, "fence") in scene.told
