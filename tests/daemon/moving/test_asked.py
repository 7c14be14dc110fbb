"""A pre-copy goes on for as long as libvirt migrates the VM away, or does not say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from accelvisor.daemon.moving import asked
from accelvisor.errors import AccelvisorError, UnavailableError


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "AGAIN_S", 0.001)


def watched(answers: Iterator[bool | None], active: Iterator[bool]) -> list[str]:
    """Codes of what was told; ends when it is asked no more."""

    async def leaves(domain: str) -> bool:
        answer = next(answers)
        if answer is None:
            raise UnavailableError("libvirt is away", code="libvirt-unavailable")
        return answer

    async def run() -> list[str]:
        told: list[AccelvisorError] = []
        one = asked.Asked(leaves, "vm")
        one.watch(lambda: next(active), told.append)
        assert one._task is not None
        async with asyncio.timeout(10):
            await one._task
        one.close()
        return [error.code for error in told]

    return asyncio.run(run())


def test_a_migration_that_was_cancelled_here_ends_the_pre_copy() -> None:
    assert watched(iter([True, True, False]), iter([True] * 4)) == ["migration-not-asked"]


def test_a_libvirt_that_does_not_say_ends_nothing() -> None:
    assert watched(iter([None, True]), iter([True, True, False])) == []


def test_a_vm_that_has_stopped_by_then_is_on_its_way() -> None:
    assert watched(iter([False]), iter([True, False])) == []
