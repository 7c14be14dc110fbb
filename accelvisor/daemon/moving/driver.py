"""Runs one state machine: takes events in turn, performs each move's actions in their order.

The machine decides, :class:`Driver` performs. An action that takes time runs beside (one at a time)
and ends in an event; an action that must have ended before the next one begins is awaited. Whoever
needs an answer (QEMU, the hook, an operator) waits for a *reply*, which an action gives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any, Generic, TypeVar

from accelvisor.errors import AccelvisorError, ConflictError, SystemFailure
from accelvisor.limits import LIMITS
from accelvisor.migration.actions import (
    Action,
    ClearDeadline,
    Journal,
    Move,
    Refused,
    Send,
    SetDeadline,
)

LOG = logging.getLogger(__name__)
S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
Perform = Callable[[Any], Awaitable[None]]


class Driver(Generic[S, E]):
    """One machine.

    Args:
        name: for the log.
        answer: the machine's table.
        state: where it begins.
        perform: for each type of action who does it.
        failed, late: the events of an action that failed, and of the timer.
        entered: told of each new state.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[S, E], Move[S] | Refused],
        state: S,
        perform: Mapping[type[Any], Perform],
        failed: E,
        late: E,
        entered: Callable[[S], None] = lambda state: None,
    ) -> None:
        self.name = name
        self.state = state
        #: what went wrong last, for whoever is told that it did
        self.error: AccelvisorError | None = None
        self._answer = answer
        self._perform = perform
        self._failed = failed
        self._late = late
        self._entered = entered
        self._events: asyncio.Queue[tuple[E, asyncio.Future[None] | None]] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._work: asyncio.Task[None] | None = None
        self._replies: dict[str, asyncio.Future[Any]] = {}
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    # --- what others use --------------------------------------------------------------------------

    def post(self, event: E) -> None:
        """Something happened."""
        self._events.put_nowait((event, None))

    async def tell(self, event: E) -> None:
        """Something happened; returns when its actions were begun.

        Raises:
            ConflictError: the machine refuses it.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events.put_nowait((event, done))
        await done

    async def ask(self, event: E, reply: str) -> Any:
        """Something happened that wants a reply: what :meth:`reply` is then given.

        Raises:
            ConflictError: the machine refuses the event.
            AccelvisorError: the reply is one.
        """
        waiting = self._replies.get(reply)
        if waiting is None or waiting.done():
            waiting = self._replies[reply] = asyncio.get_running_loop().create_future()
        await self.tell(event)
        return await asyncio.shield(waiting)

    def reply(self, name: str, value: object) -> None:
        """Give whoever waits for ``name`` its answer; an error is raised there."""
        waiting = self._replies.get(name)
        if waiting is None or waiting.done():
            return
        if isinstance(value, AccelvisorError):
            waiting.set_exception(value)
            waiting.exception()  # nobody may be waiting any more
        else:
            waiting.set_result(value)

    async def reach(self, *states: S) -> S:
        """Wait until the machine is in one of ``states``."""
        while self.state not in states:
            self._changed.clear()
            await self._changed.wait()
        return self.state

    def begin(self, work: Coroutine[Any, Any, None], done: E | None) -> None:
        """Do something beside; it ends in ``done``, or in the event of a failure."""
        before = self._work
        self._work = asyncio.get_running_loop().create_task(self._beside(work, done, before))
        self._work.add_done_callback(lambda _: work.close())  # it may never have begun

    async def settle(self) -> None:
        """Give up what is done beside, and wait for its end."""
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def close(self) -> None:
        """Stop: what is on disk is what counts."""
        self._clear_timer()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.settle()
        gone = SystemFailure("accelvisord is ending", code="stopping", where="migration")
        for name in self._replies:
            self.reply(name, gone)

    # --- inside -----------------------------------------------------------------------------------

    async def _beside(
        self, work: Coroutine[Any, Any, None], done: E | None, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None and not before.done():
            await asyncio.gather(before, return_exceptions=True)
        try:
            await work
        except AccelvisorError as error:
            self._fail(error)
        except Exception as error:
            LOG.exception("%s", self.name)
            self._fail(SystemFailure(f"{type(error).__name__}: {error}", where="migration"))
        else:
            if done is not None:
                self.post(done)

    def _fail(self, error: AccelvisorError) -> None:
        LOG.warning("%s (%s): %s", self.name, self.state, error.message)
        self.error = error
        self.post(self._failed)

    async def _run(self) -> None:
        while True:
            event, waiting = await self._events.get()
            try:
                await self._take(event)
            except AccelvisorError as error:
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error)
                continue
            except Exception:
                LOG.exception("%s: %s in %s", self.name, event, self.state)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    async def _take(self, event: E) -> None:
        answer = self._answer(self.state, event)
        if isinstance(answer, Refused):
            LOG.debug("%s: %s refused in %s: %s", self.name, event, self.state, answer.code)
            raise ConflictError(
                answer.message, code=answer.code, where="migration", hint=answer.hint
            )
        before, self.state = self.state, answer.next
        if before is not self.state:
            LOG.info("%s: %s -> %s (%s)", self.name, before, self.state, event)
            self._entered(self.state)
        unwritten = False
        for action in answer.actions:
            # What could not be written down is told to nobody; what undoes something is done.
            if unwritten and _promises(action):
                continue
            if not await self._do(action):
                unwritten |= isinstance(action, Journal)
        self._changed.set()

    async def _do(self, action: Action) -> bool:
        """Whether it was done, or begun."""
        if isinstance(action, SetDeadline):
            self._clear_timer()
            loop = asyncio.get_running_loop()
            after = float(getattr(LIMITS, f"migration_{action.which}_s"))
            self._timer = loop.call_later(after, self.post, self._late)
        elif isinstance(action, ClearDeadline):
            self._clear_timer()
        else:
            try:
                await self._perform[type(action)](action)
            except AccelvisorError as error:
                self._fail(error)
                return False
        return True

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _promises(action: Action) -> bool:
    """Whether somebody will rely on it."""
    return isinstance(action, Send) or bool(getattr(action, "yes", False))


async def in_thread(work: Callable[[], Any], stop: Callable[[], None]) -> Any:
    """``work()`` in a thread; when this is cancelled ``stop()`` ends it, and its end is awaited."""
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        with suppress(Exception):
            await running
        raise
