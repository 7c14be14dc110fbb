"""A reservation that no QEMU follows is given back; one that a QEMU follows is left alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from accelvisor.daemon.moving.arriving import Arriving
from accelvisor.errors import ConflictError, UnavailableError
from accelvisor.limits import LIMITS
from accelvisor.migration.destination import Event


class Monitor:
    def __init__(self, connects: bool) -> None:
        self.connects = connects

    async def wait_connected(self, deadline_s: float) -> None:
        assert deadline_s == LIMITS.migration_start_s
        if not self.connects:
            raise UnavailableError("nobody", code="monitor-unavailable")


class Doors:
    def __init__(self, connects: bool) -> None:
        self.monitor = Monitor(connects)

    async def open(self, domain: str) -> Any:
        assert domain == "uuid"
        return self


class Driver:
    error = None

    def __init__(self, over: bool = False) -> None:
        self.told: list[Event] = []
        self.over = over

    async def tell(self, event: Event) -> None:
        self.told.append(event)
        if self.over:
            raise ConflictError("it is over", code="migration-over")


def expected(connects: bool, driver: Driver) -> Any:
    move = SimpleNamespace(domain_uuid="uuid", domain="vm", driver=driver, left=False)
    services: Any = None
    doors: Any = Doors(connects)
    asyncio.run(Arriving(services, doors).expect(move))  # type: ignore[arg-type]
    return move


@pytest.mark.parametrize("over", [False, True])
def test_no_qemu_no_move(over: bool) -> None:
    move = expected(False, Driver(over))
    assert move.driver.told == [Event.CANCEL]
    assert move.driver.error.code == "migration-start"
    assert move.left, "no QEMU will ever say that it goes"


def test_a_qemu_that_came_is_left_alone() -> None:
    move = expected(True, Driver())
    assert move.driver.told == []
    assert not move.left
