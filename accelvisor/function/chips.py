"""The engines of the function's chips: a compute and a transfer queue each, on a thread of its own
once it is used.

What runs on an engine is a generator of pauses, as on the front end's thread; several share one by
turns. They let go of the interpreter in their kernels, so engines are as parallel as the function's
cores: no more of them are at work at a time than there are cores.

The front end hands work over and goes on when it has ended (:meth:`Engines.carry`). To stop the
function is to **hold** them: a tile is the longest that one goes on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from accelvisor.function.pauses import Pauses, Waiting
from accelvisor.function.placement import lower_priority
from accelvisor.function.pool import Pool
from accelvisor.function.scheduler import COMPUTE

#: How long one work may have an engine while another wants it.
QUANTUM_S = 0.010

Attention: TypeAlias = Callable[[], bool]
#: From what tells the work to pause, and the cores that it may use, to its steps.
Make: TypeAlias = Callable[[Attention, Pool], Pauses[None]]


class Job(NamedTuple):
    """What is to run on an engine, number 2 * chip + type."""

    engine: int
    make: Make


class _Work:
    """One job on its engine. Guarded by the engines' lock, but for its steps."""

    __slots__ = ("blocked", "cancelled", "done", "error", "job", "running", "steps")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps: Pauses[None] | None = None
        self.blocked: Waiting | None = None
        self.cancelled = False
        self.running = False
        self.done = False
        self.error: BaseException | None = None

    def runnable(self) -> bool:
        """Whether its engine could go on with it."""
        return self.blocked is None or self.blocked.ready()


class _Ended:
    """All of some works have ended, or one of them with an error."""

    writes = False

    def __init__(self, works: Sequence[_Work]) -> None:
        self._works = works

    def ready(self) -> bool:
        """Whether there is nothing left to wait for."""
        return all(work.done for work in self._works) or any(
            work.error is not None for work in self._works
        )


class Engines:
    """Two engines for each of ``chips`` chips.

    Args:
        cores: of the function, over all chips.
        asked: whether the front end's thread is wanted for something else.
        wake: tells the front end's thread that a work has ended.
    """

    def __init__(
        self, chips: int, cores: int, asked: Callable[[], bool], wake: Callable[[], None]
    ) -> None:
        self.chips = chips
        self._cores = max(1, cores)
        self._asked = asked
        self._wake = wake
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        #: who signals an event holds this
        self.events = threading.Lock()
        self._works: list[deque[_Work]] = [deque() for _ in range(2 * chips)]
        self._threads: dict[int, threading.Thread] = {}
        self._pools: dict[int, Pool] = {}
        #: one core: for what needs no more
        self.alone = Pool(1)
        self._held = False
        self._at_work = 0
        self._stopping = False
        #: percent of the time that works get
        self.share = 100

    # --- for the front end's thread ---------------------------------------------------------------

    def carry(self, jobs: Sequence[Job]) -> Pauses[None]:
        """Have the jobs carried out, each on its engine; pauses until they are.

        When this is closed, or one of them fails, the others are stopped first, at a tile.

        Raises:
            what a job raised.
        """
        works = [_Work(job) for job in jobs]
        ended = _Ended(works)
        with self._lock:
            for work in works:
                self._works[work.job.engine].append(work)
                self._require(work.job.engine)
            self._moved.notify_all()
        try:
            while not ended.ready():
                yield ended
            for work in works:
                if work.error is not None:
                    raise work.error
        finally:
            self._withdraw(works)

    def _withdraw(self, works: Sequence[_Work]) -> None:
        with self._lock:
            for work in works:
                work.cancelled = True
            self._moved.notify_all()
            while any(work.running for work in works):
                self._moved.wait()
            for work in works:
                if not work.done:
                    work.done = True
                    self._works[work.job.engine].remove(work)
        for work in works:
            if work.steps is not None:
                work.steps.close()

    def hold(self) -> None:
        """Stop every engine at its next boundary, and wait for that."""
        with self._lock:
            self._held = True
            self._moved.notify_all()
            while self._at_work:
                self._moved.wait()

    def release(self) -> None:
        """Let them go on."""
        if self._held:
            with self._lock:
                self._held = False
                self._moved.notify_all()

    def poke(self) -> None:
        """What a work waits for may be there: an event was signalled."""
        with self._lock:
            self._moved.notify_all()

    def resize(self, cores: int) -> None:
        """Have another number of cores from here on. Nothing is at work."""
        self._cores = max(1, cores)
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()

    def close(self) -> None:
        """End the threads. Nothing is at work any more."""
        with self._lock:
            self._stopping = True
            self._moved.notify_all()
        for thread in self._threads.values():
            thread.join()
        self.resize(self._cores)

    # --- the engines' threads ---------------------------------------------------------------------

    def _require(self, engine: int) -> None:
        if engine not in self._threads:
            name = f"chip-{engine // 2}-{'transfer' if engine % 2 else 'compute'}"
            thread = threading.Thread(target=self._run, args=(engine,), name=name, daemon=True)
            self._threads[engine] = thread
            thread.start()

    def _pool(self, engine: int) -> Pool:
        """The cores of the engine's chip; a transfer needs none of them."""
        own = self._cores // self.chips
        if engine % 2 != COMPUTE or own < 2:
            return self.alone
        pool = self._pools.get(engine)
        if pool is None:
            pool = self._pools[engine] = Pool(own)
        return pool

    def _run(self, engine: int) -> None:
        lower_priority()
        while True:
            with self._lock:
                work = self._next(engine)
                if work is None:
                    return
                work.running = True
                self._at_work += 1
            began = time.perf_counter()
            self._step(work, began + QUANTUM_S)
            self._rest(time.perf_counter() - began)
            with self._lock:
                work.running = False
                self._at_work -= 1
                if work.done:
                    self._works[engine].remove(work)
                self._moved.notify_all()
            if work.done:
                self._wake()

    def _next(self, engine: int) -> _Work | None:
        """The work whose turn it is, as soon as there is one and a core for it; None at the end."""
        works = self._works[engine]
        while not self._stopping:
            if not self._held and not self._asked() and self._at_work < self._cores:
                for _ in range(len(works)):
                    work = works[0]
                    works.rotate(-1)
                    if not work.cancelled and work.runnable():
                        return work
            # The front end's thread says when it is done with what it was asked.
            self._moved.wait()
        return None

    def _step(self, work: _Work, until: float) -> None:
        works = self._works[work.job.engine]

        def attention() -> bool:
            if self._held or work.cancelled or self._asked():
                return True
            # Others want this engine, or a core; or the function is to compute only so much.
            crowded = len(works) > 1 or self._at_work >= self._cores or self.share < 100
            return crowded and time.perf_counter() > until

        try:
            if work.steps is None:
                work.steps = work.job.make(attention, self._pool(work.job.engine))
            work.blocked = next(work.steps)
        except StopIteration:
            work.done = True
        except BaseException as error:
            work.error = error
            work.done = True

    def _rest(self, worked_s: float) -> None:
        """Let time pass where the function is held back."""
        share = self.share
        if share < 100:
            with self._lock:
                until = time.perf_counter() + worked_s * (100 - share) / share
                while not self._held and (left := until - time.perf_counter()) > 0:
                    self._moved.wait(left)
