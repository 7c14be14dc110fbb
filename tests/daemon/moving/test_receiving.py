"""What a source may make a destination open."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from accelvisor.daemon.moving.receiving import Receiving
from accelvisor.errors import AccelvisorError, ProtocolError, SystemFailure
from accelvisor.limits import LIMITS
from accelvisor.migration.tickets import TICKET_BYTES

TICKET = bytes(TICKET_BYTES)


class Source:
    """Sends whatever tickets a test says."""

    def __init__(self, tickets: Any) -> None:
        self._tickets = tickets
        self.opened = 0

    async def tickets(self, migration: bytes) -> Any:
        return self._tickets

    async def channel(self, ticket: bytes) -> Any:
        self.opened += 1
        raise RuntimeError("a bug")


def failure(tickets: Any) -> tuple[AccelvisorError | None, int]:
    """Why a move of one function ends, and how many connections were opened until then."""

    async def run() -> tuple[AccelvisorError | None, int]:
        failed: list[AccelvisorError] = []
        source = Source(tickets)
        receiving = Receiving("a move", bytes(16), source, failed.append)  # type: ignore[arg-type]
        receiving.parts = [SimpleNamespace()]  # type: ignore[list-item]
        receiving.begin()
        assert receiving._bulk is not None
        await asyncio.wait([receiving._bulk], timeout=20)
        return (failed or [None])[0], source.opened

    return asyncio.run(run())


@pytest.mark.parametrize(
    "tickets",
    [
        [],
        [[TICKET], [TICKET]],
        [[]],
        [[TICKET] * (LIMITS.bulk_streams + 1)],
        [[TICKET + b"x"]],
    ],
)
def test_tickets_for_anything_but_what_comes_end_the_move(tickets: Any) -> None:
    error, opened = failure(tickets)
    assert isinstance(error, ProtocolError)
    assert error.code == "peer-answer"
    assert not opened


def test_a_bug_while_it_is_received_ends_the_move() -> None:
    """It was waited for until a deadline, and nobody heard why."""
    assert isinstance(failure([[TICKET]])[0], SystemFailure)
