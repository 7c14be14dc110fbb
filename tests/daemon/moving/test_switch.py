"""Whose question is it: a move's, a save's, or that of a QEMU that loads a file?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from accelvisor.daemon.moving.switch import Switch
from accelvisor.errors import ConflictError

VM = "11111111-2222-3333-4444-555555555555"


class Moves:
    """Of no domain, unless a test says so."""

    def __init__(self) -> None:
        self.answer: bool | None = None
        self.loads = False

    async def owners(self, domain: str) -> bool | None:
        return self.answer

    async def save(self, domain: str) -> bytes | None:
        return b"move" if self.answer else None

    async def load(self, domain: str, token: bytes) -> bool:
        return self.loads

    def going(self, domain: str) -> None:
        return None

    def coming(self, domain: str) -> None:
        return None

    def resumed(self, domain: str) -> None: ...

    def gone(self, domain: str) -> None: ...


class Saves:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def save_for_domain(self, domain: str) -> bytes:
        self.asked.append("save")
        return b"token"

    async def load_for_domain(self, domain: str, token: bytes) -> None:
        self.asked.append(f"load {token.decode()}")

    async def drop(self, token: bytes) -> None:
        self.asked.append(f"drop {token.decode()}")

    async def watch(self, domain: str) -> None:
        self.asked.append("watch")

    async def resumed(self, domain: str) -> None:
        self.asked.append("resumed")

    async def gone(self, domain: str) -> None:
        self.asked.append("gone")


class Doors:
    """A QEMU that does what a test says."""

    def __init__(self) -> None:
        self.said: str | None = "running"

    def status(self, domain: str) -> str | None:
        return self.said

    def loaded(self, domain: str) -> None:
        self.said = "paused"


class Case:
    def __init__(self) -> None:
        self.moves, self.saves, self.doors = Moves(), Saves(), Doors()
        self.switch = Switch(self.moves, self.saves)  # type: ignore[arg-type]
        self.switch.use(self.doors)  # type: ignore[arg-type]

    async def settle(self) -> None:
        """Let what events began come to its end."""
        await asyncio.gather(*self.switch._tasks)


def scenario(body: Callable[[Case], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        case = Case()
        await body(case)
        await case.settle()

    asyncio.run(run())


@pytest.mark.parametrize("status", ["running", "paused", "finish-migrate", "prelaunch", None])
def test_a_qemu_that_may_have_run_a_vm_saves_it(status: str | None) -> None:
    async def body(case: Case) -> None:
        case.doors.said = status
        assert await case.switch.owners(VM)
        assert await case.switch.save(VM) == b"token"
        assert case.saves.asked == ["save"]

    scenario(body)


@pytest.mark.parametrize("status", ["inmigrate", "restore-vm"])
def test_a_qemu_that_waits_for_a_vm_saves_nothing(status: str) -> None:
    async def body(case: Case) -> None:
        case.doors.said = status
        case.switch.event(VM, "MIGRATION")
        assert await case.switch.owners(VM)
        await case.switch.load(VM, b"t")
        assert case.saves.asked == ["load t"]

    scenario(body)


@pytest.mark.parametrize("status", ["prelaunch", None])
def test_so_does_one_that_libvirt_is_about_to_start(status: str | None) -> None:
    """It loads a snapshot before it answers any monitor."""

    async def body(case: Case) -> None:
        case.switch.starting(VM)
        case.doors.said = status
        assert await case.switch.owners(VM)
        assert case.saves.asked == []

    scenario(body)


def test_a_vm_that_was_restored_paused_is_saved_again() -> None:
    """It was neither started nor resumed since: were it taken for one that loads, QEMU would
    write a file without its functions, and end.
    """

    async def body(case: Case) -> None:
        case.switch.starting(VM)
        case.doors.said = "inmigrate"
        await case.switch.owners(VM)
        await case.switch.load(VM, b"t")
        await case.switch.owners(VM)
        assert await case.switch.save(VM) == b"token"

    scenario(body)


@pytest.mark.parametrize("end", ["RESUME", "gone"])
def test_a_domain_that_was_started_long_ago_is_not_starting(end: str) -> None:
    async def body(case: Case) -> None:
        case.switch.starting(VM)
        if end == "RESUME":
            case.switch.event(VM, "RESUME")
        else:
            await case.switch.gone(VM)
        case.doors.said = None
        await case.switch.owners(VM)
        assert "save" in case.saves.asked

    scenario(body)


def test_what_qemu_did_not_take_is_deleted_when_the_vm_goes_on() -> None:
    async def body(case: Case) -> None:
        await case.switch.owners(VM)
        case.switch.event(VM, "RESUME")
        await case.settle()
        assert case.saves.asked == ["save", "resumed", "drop token"]

    scenario(body)


def test_what_a_snapshot_has_stays_when_the_vm_goes_on() -> None:
    async def body(case: Case) -> None:
        await case.switch.owners(VM)
        await case.switch.save(VM)
        case.switch.event(VM, "RESUME")
        await case.settle()
        assert case.saves.asked == ["save", "resumed"]

    scenario(body)


def test_a_load_that_was_taken_for_a_save_loads_and_drops_what_was_saved() -> None:
    async def body(case: Case) -> None:
        case.doors.said = None
        await case.switch.owners(VM)
        await case.switch.load(VM, b"t")
        assert case.saves.asked == ["save", "drop token", "load t"]

    scenario(body)


def test_a_move_answers_for_itself() -> None:
    async def body(case: Case) -> None:
        case.moves.answer = True
        assert await case.switch.owners(VM)
        assert await case.switch.save(VM) == b"move"
        case.moves.loads = True
        await case.switch.load(VM, b"move")
        assert case.saves.asked == []

    scenario(body)


def test_nothing_is_handed_out_that_was_not_saved() -> None:
    async def body(case: Case) -> None:
        with pytest.raises(ConflictError) as refused:
            await case.switch.save(VM)
        assert refused.value.code == "save-refused"

    scenario(body)


def test_a_vm_that_stops_has_its_functions_writes_followed() -> None:
    async def body(case: Case) -> None:
        case.switch.event(VM, "STOP")
        await case.settle()
        assert case.saves.asked == ["watch"]

    scenario(body)
