"""Sockets of domains are there while they are wanted, whoever opens and closes them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from accelvisor.daemon.moving.doors import Doors
from accelvisor.hypervisor.companions import Companions

ONE = "11111111-1111-4111-8111-111111111111"
TWO = "22222222-2222-4222-8222-222222222222"


class Handler:
    """Nobody connects."""

    async def owners(self, domain: str) -> bool:
        raise AssertionError(domain)

    async def save(self, domain: str) -> bytes:
        raise AssertionError(domain)

    async def load(self, domain: str, token: bytes) -> None:
        raise AssertionError(domain)


def tried(run: Path, body: Callable[[Doors], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        doors = Doors(run, Handler(), lambda domain, event: None)
        try:
            await body(doors)
        finally:
            await doors.close()

    asyncio.run(all_of_it())


@pytest.fixture
def run(short_path: Path) -> Path:
    (short_path / "domain").mkdir()
    return short_path


def there(run: Path, domain: str) -> bool:
    paths = Companions.of(run, domain)
    both = {Path(paths.bus).is_socket(), Path(paths.monitor).is_socket()}
    assert len(both) == 1
    return both.pop()


def test_they_follow_what_is_wanted(run: Path) -> None:
    async def body(doors: Doors) -> None:
        await doors.keep(lambda: [ONE])
        assert there(run, ONE)
        await doors.keep(lambda: [TWO])
        assert (there(run, ONE), there(run, TWO)) == (False, True)
        await doors.keep(list)
        assert not there(run, TWO)

    tried(run, body)


def test_what_somebody_opens_while_it_is_closed_is_there(run: Path) -> None:
    async def body(doors: Doors) -> None:
        await doors.open(ONE)
        wanted: list[str] = []
        closing = asyncio.create_task(doors.keep(lambda: wanted))
        await asyncio.sleep(0)
        wanted.append(ONE)
        await doors.open(ONE)
        await closing
        assert there(run, ONE)

    tried(run, body)
