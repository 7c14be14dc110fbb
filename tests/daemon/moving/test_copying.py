"""Rounds of a pre-copy over a network that is away for a while."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from accelvisor.daemon.moving.copying import CANCELLED, Copying
from accelvisor.errors import AccelvisorError, DeadlineError, ProtocolError, UnavailableError


class Sender:
    """Fails with ``errors``, one after another, and then ends its round."""

    def __init__(self, *errors: AccelvisorError) -> None:
        self.errors = list(errors)

    def end_round(self) -> list[object]:
        if self.errors:
            raise self.errors.pop(0)
        return []

    def cancel(self, error: AccelvisorError) -> None: ...


def ended(*errors: AccelvisorError) -> bool:
    async def run() -> bool:
        sender = Sender(*errors)
        part: Any = SimpleNamespace(sender=sender, attached=asyncio.Event(), tree=None)
        part.attached.set()
        copying: Any = object.__new__(Copying)
        ending = asyncio.create_task(copying._end_round(part))
        while not ending.done():
            await asyncio.sleep(0)
            part.attached.set()  # the destination connects again
        await ending
        return not sender.errors

    return asyncio.run(run())


@pytest.mark.parametrize("kind", [UnavailableError, DeadlineError])
def test_a_network_that_stalls_is_one_that_broke(kind: type[AccelvisorError]) -> None:
    assert ended(kind("nothing comes through", code="peer-stalled"))


def test_a_move_that_was_given_up_is_not_tried_again() -> None:
    with pytest.raises(UnavailableError) as caught:
        ended(CANCELLED, CANCELLED)
    assert caught.value is CANCELLED


def test_a_destination_that_claims_nonsense_is_not_waited_for() -> None:
    def attach(channels: object) -> None:
        raise ProtocolError("endless ranges", code="bulk-message")

    async def run() -> tuple[list[AccelvisorError], bool]:
        part: Any = SimpleNamespace(
            sender=SimpleNamespace(attach=attach), attached=asyncio.Event()
        )
        told: list[AccelvisorError] = []
        copying: Any = object.__new__(Copying)
        copying._failed = told.append
        await copying._attach(part, [])
        return told, part.attached.is_set()

    told, attached = asyncio.run(run())
    assert [error.code for error in told] == ["bulk-message"]
    assert not attached
