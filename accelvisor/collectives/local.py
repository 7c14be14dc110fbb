"""All ranks in one process: as threads with queues between them, or simulated in one thread.

The threads are the embedded default and what tests of real deadlines use. The simulation is
deterministic: a seed decides who runs next, and time passes only when nobody can.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from accelvisor.collectives.communicator import Communicator, Options
from accelvisor.collectives.hops import Command, Expired, Flush, Receive, Send, Steps, Waiting
from accelvisor.collectives.messages import Payload
from accelvisor.errors import AccelvisorError, UsageError

T = TypeVar("T")
Letter = tuple[Payload, Payload]

_GLANCE_S = 0.05
"""How often a waiting rank looks at a clock that is not the machine's own."""


@dataclass(slots=True)
class _Inbox:
    """What came for one rank: reports, and messages by sender."""

    reports: deque[Letter] = field(default_factory=deque)
    letters: dict[int, deque[Letter]] = field(default_factory=dict)

    def put(self, sender: int, message: Send) -> None:
        # A copy: the sender may change its arrays once its own part is done.
        letter = message.header, np.array(np.frombuffer(message.payload, np.uint8))
        if message.report:
            self.reports.append(letter)
        else:
            self.letters.setdefault(sender, deque()).append(letter)

    def take(self, source: int | None) -> Letter | None:
        if self.reports:
            return self.reports.popleft()
        letters = self.letters.get(source) if source is not None else None
        return letters.popleft() if letters else None

    def has(self, source: int) -> bool:
        return bool(self.letters.get(source))


# --- threads -------------------------------------------------------------------------------------


class _Threaded:
    """One rank's transport."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.group, self.rank = group, rank
        self.inbox = _Inbox()
        self.changed = threading.Condition()

    def send(self, message: Send) -> None:
        to = self.group.transports[message.to]
        with to.changed:
            to.inbox.put(self.rank, message)
            to.changed.notify()

    def receive(self, source: int | None, timeout_s: float) -> Letter:
        clock = self.group.clock
        with self.changed:
            until = clock() + timeout_s
            while (letter := self.inbox.take(source)) is None:
                left = until - clock()
                if left <= 0:
                    raise Expired
                own = clock is not time.monotonic
                self.changed.wait(min(left, _GLANCE_S) if own else left)
            return letter

    def waiting(self, source: int) -> bool:
        with self.changed:
            return self.inbox.has(source)

    def flush(self, timeout_s: float) -> None:
        """Nothing to wait for: inboxes hold copies."""


class LocalGroup:
    """``size`` communicators in this process, each for a thread of its own.

    Args:
        clock: seconds, for deadlines.
    """

    def __init__(
        self,
        size: int,
        options: Options | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        accelerate: bool = False,
    ) -> None:
        if size < 1:
            raise UsageError(f"a group of {size} ranks", where="collectives")
        self.clock = clock
        self.transports = [_Threaded(self, rank) for rank in range(size)]
        self.ranks = [
            Communicator(transport, rank, size, options, accelerate=accelerate)
            for rank, transport in enumerate(self.transports)
        ]

    def run(self, work: Callable[[Communicator], T], absent: Collection[int] = ()) -> list[Any]:
        """``work`` on every rank that is not ``absent``, each in a thread; what each returned, or
        the AccelvisorError that it raised (None of the absent). Other exceptions are raised.
        """
        results: list[Any] = [None] * len(self.ranks)
        strange: list[BaseException] = []

        def one(communicator: Communicator) -> None:
            try:
                results[communicator.rank] = work(communicator)
            except AccelvisorError as e:
                results[communicator.rank] = e
            except BaseException as e:
                strange.append(e)

        threads = [
            threading.Thread(target=one, args=(c,), name=f"rank-{c.rank}", daemon=True)
            for c in self.ranks
            if c.rank not in absent
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if strange:
            raise strange[0]
        return results


# --- simulation ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rank:
    steps: Steps
    answer: Any = None
    expired: Expired | None = None
    receives: Receive | None = None
    until: float = 0.0
    done: bool = False
    commands: int = 0


class Simulation:
    """Runs the generators of all ranks in one thread.

    Args:
        steps: of each rank (``communicator.begin``). deadline_s: in simulated seconds.
        stops: rank -> after how many commands it is lost; 0: it never begins.
    """

    def __init__(
        self,
        steps: Sequence[Steps],
        deadline_s: float = 1.0,
        seed: int = 0,
        stops: dict[int, int] | None = None,
    ) -> None:
        self.ranks = [_Rank(s) for s in steps]
        self.inboxes = [_Inbox() for _ in steps]
        self.deadline_s = deadline_s
        self.random = random.Random(seed)
        self.stops = stops or {}
        self.now = 0.0
        self.results: list[Any] = [None] * len(steps)
        self.sent: list[list[Send]] = [[] for _ in steps]

    def run(self) -> list[Any]:
        """What each rank returned, or the AccelvisorError that it raised; None of a lost one."""
        while True:
            live = [r for r in range(len(self.ranks)) if self._lives(r)]
            if not live:
                return self.results
            able = [r for r in live if self._able(r)]
            if able:
                self._resume(self.random.choice(able))
                continue
            self.now = min(self.ranks[r].until for r in live)
            for r in live:
                if self.ranks[r].until <= self.now:
                    self.ranks[r].receives, self.ranks[r].expired = None, Expired()

    def _lives(self, rank: int) -> bool:
        state = self.ranks[rank]
        return not state.done and state.commands < self.stops.get(rank, state.commands + 1)

    def _able(self, rank: int) -> bool:
        state = self.ranks[rank]
        if state.receives is not None:
            state.answer = self.inboxes[rank].take(state.receives.source)
            if state.answer is None:
                return False
            state.receives = None
        return True

    def _resume(self, rank: int) -> None:
        state = self.ranks[rank]
        state.commands += 1
        answer, expired = state.answer, state.expired
        state.answer = state.expired = None
        try:
            self._obey(rank, state.steps.throw(expired) if expired else state.steps.send(answer))
        except StopIteration as done:
            self.results[rank], state.done = done.value, True
        except AccelvisorError as e:
            self.results[rank], state.done = e, True

    def _obey(self, rank: int, command: Command) -> None:
        state = self.ranks[rank]
        if isinstance(command, Send):
            self.sent[rank].append(command)
            self.inboxes[command.to].put(rank, command)
        elif isinstance(command, Receive):
            state.receives = command
            state.until = self.now + command.patience * self.deadline_s
        elif isinstance(command, Waiting):
            state.answer = self.inboxes[rank].has(command.source)
        elif isinstance(command, Flush):
            pass  # inboxes hold copies
