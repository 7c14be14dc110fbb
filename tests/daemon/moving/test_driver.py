"""The driver: events in turn, actions in order, work beside, and what a failure leaves undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import pytest

from accelvisor.daemon.moving.driver import Driver, in_thread
from accelvisor.errors import ConflictError, SystemFailure
from accelvisor.migration import messages as wire
from accelvisor.migration.actions import (
    AnswerOwners,
    Deadline,
    Freeze,
    Journal,
    Move,
    Refused,
    Send,
    SetDeadline,
    Thaw,
)


class State(StrEnum):
    A = "a"
    B = "b"


class Event(StrEnum):
    GO = "go"
    DONE = "done"
    FAILED = "failed"
    LATE = "late"


class Bench:
    """A machine of two states, and what was done."""

    def __init__(self, table: dict[tuple[State, Event], Move[State]]) -> None:
        self.done: list[str] = []
        self.entered: list[State] = []
        self.broken: set[type[Any]] = set()
        self.driver: Driver[State, Event] = Driver(
            "bench",
            lambda state, event: table.get((state, event), Refused("migration-stale", "too late")),
            State.A,
            dict.fromkeys((Send, Journal, AnswerOwners, Thaw, Freeze), self._perform),
            Event.FAILED,
            Event.LATE,
            self.entered.append,
        )

    async def _perform(self, action: Any) -> None:
        if type(action) in self.broken:
            raise SystemFailure("the disk is full")
        self.done.append(type(action).__name__)


def run(body: Callable[[], Any]) -> None:
    asyncio.run(body())


def test_actions_are_performed_in_their_order() -> None:
    async def body() -> None:
        actions = (Journal(State.B), Send(wire.Accept), Thaw())
        bench = Bench({(State.A, Event.GO): Move(State.B, actions)})
        await bench.driver.tell(Event.GO)
        assert bench.done == ["Journal", "Send", "Thaw"]
        assert (bench.driver.state, bench.entered) == (State.B, [State.B])
        await bench.driver.close()

    run(body)


def test_what_could_not_be_journaled_is_promised_to_nobody() -> None:
    async def body() -> None:
        actions = (Journal(State.B), Send(wire.Sealed), AnswerOwners(True), AnswerOwners(False),
                   Thaw())  # fmt: skip
        bench = Bench(
            {(State.A, Event.GO): Move(State.B, actions), (State.B, Event.FAILED): Move(State.A)}
        )
        bench.broken = {Journal}
        await bench.driver.tell(Event.GO)
        assert bench.done == ["AnswerOwners", "Thaw"]
        assert await bench.driver.reach(State.A) is State.A, "and the machine hears of it"
        await bench.driver.close()

    run(body)


def test_a_refused_event_reaches_whoever_caused_it() -> None:
    async def body() -> None:
        bench = Bench({})
        with pytest.raises(ConflictError) as caught:
            await bench.driver.tell(Event.GO)
        assert caught.value.code == "migration-stale"
        await bench.driver.close()

    run(body)


def test_work_beside_ends_in_its_event_and_a_failure_in_another() -> None:
    async def body() -> None:
        table = {
            (State.A, Event.DONE): Move(State.B),
            (State.B, Event.FAILED): Move(State.A),
        }
        bench = Bench(table)

        async def works() -> None:
            await asyncio.sleep(0)

        async def breaks() -> None:
            raise ValueError("a bug")

        bench.driver.begin(works(), Event.DONE)
        await bench.driver.reach(State.B)
        bench.driver.begin(breaks(), Event.DONE)
        await bench.driver.reach(State.A)
        assert bench.driver.error is not None
        assert "ValueError" in bench.driver.error.message
        await bench.driver.close()

    run(body)


def test_work_waits_for_the_work_before_it_unless_that_was_given_up() -> None:
    async def body() -> None:
        bench = Bench({})
        order: list[str] = []
        gate = asyncio.Event()

        async def first() -> None:
            await gate.wait()
            order.append("first")

        async def second() -> None:
            order.append("second")

        bench.driver.begin(first(), None)
        bench.driver.begin(second(), None)
        await asyncio.sleep(0)
        gate.set()
        while len(order) < 2:
            await asyncio.sleep(0)
        assert order == ["first", "second"]
        gate.clear()
        bench.driver.begin(first(), None)
        await bench.driver.settle()
        assert order == ["first", "second"]
        await bench.driver.close()

    run(body)


def test_the_timer_is_one_and_ends_in_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        class Short:
            migration_load_s = 0.0

        monkeypatch.setattr("accelvisor.daemon.moving.driver.LIMITS", Short)
        table = {
            (State.A, Event.GO): Move(State.A, (SetDeadline(Deadline.LOAD),)),
            (State.A, Event.LATE): Move(State.B),
        }
        bench = Bench(table)
        await bench.driver.tell(Event.GO)
        await bench.driver.reach(State.B)
        await bench.driver.close()

    run(body)


def test_whoever_waits_for_a_reply_gets_the_error_when_the_daemon_ends() -> None:
    async def body() -> None:
        bench = Bench({(State.A, Event.GO): Move(State.A)})
        waiting = asyncio.create_task(bench.driver.ask(Event.GO, "owners"))
        await asyncio.sleep(0.01)
        await bench.driver.close()
        with pytest.raises(SystemFailure):
            await waiting

    run(body)


def test_a_thread_is_stopped_and_awaited_when_its_task_is_cancelled() -> None:
    async def body() -> None:
        import threading

        stop, ended = threading.Event(), threading.Event()

        def work() -> None:
            stop.wait(30)
            ended.set()

        task = asyncio.create_task(in_thread(work, stop.set))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    run(body)
