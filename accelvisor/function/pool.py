"""The function's cores: a few threads that run the tiles of one operation side by side.

Tiles are independent and repeatable, so they are handed out in order and may finish in any order;
what is remembered is the first tile that has not finished. BLAS and ufuncs release the
interpreter's lock, so cores are real; results do not depend on how many there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from accelvisor.function.placement import Placement, lower_priority, settle
from accelvisor.kernels.declare import Arrays
from accelvisor.kernels.programs import PlannedOperation


class Pool:
    """``cores`` cores; the calling thread is one of them. One operation at a time."""

    def __init__(self, cores: int) -> None:
        self._placement = Placement()
        self._threads: list[threading.Thread] = []
        self._begin(cores)

    def _begin(self, cores: int) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._job: _Job | None = None
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._helper, args=(i - 1,), name=f"core-{i}", daemon=True)
            for i in range(1, cores)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def cores(self) -> int:
        """Threads that run tiles, the caller's included."""
        return len(self._threads) + 1

    def run(
        self,
        operation: PlannedOperation,
        arrays: Arrays,
        first: int,
        progress: Callable[[int], None],
        stop: Callable[[], bool],
    ) -> int:
        """Run tiles from ``first`` on until all are done or ``stop`` says so between two tiles.

        ``progress`` is told the first unfinished tile as it moves. Returns it at the end, when no
        tile is running any more. Raises what a tile raised.
        """
        job = _Job(operation, arrays, first, progress, stop)
        job.shares = self._placement.spread(len(self._threads))
        with self._lock:
            self._job = job
            self._work.notify_all()
        try:
            self._drain(job)
        finally:
            self._placement.gather()
            with self._lock:
                self._job = None
                while job.running:
                    self._idle.wait()
        if job.error is not None:
            raise job.error
        return job.low

    def resize(self, cores: int) -> None:
        """Have another number of cores, on the processors that the calling thread may use. Nothing
        is running meanwhile.
        """
        self._placement.refresh()
        if cores != self.cores:
            self.close()
            self._begin(cores)

    def close(self) -> None:
        """End the helper threads."""
        with self._lock:
            self._stopping = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _helper(self, index: int) -> None:
        lower_priority()
        share: Collection[int] = ()
        while True:
            with self._lock:
                while not self._stopping and (self._job is None or self._job.exhausted):
                    self._work.wait()
                if self._stopping:
                    return
                job = self._job
            if job is None:
                continue
            if job.shares and job.shares[index] != share:
                share = job.shares[index]
                settle(share)
            self._drain(job)

    def _drain(self, job: _Job) -> None:
        while True:
            with self._lock:
                if job.exhausted or job.stop():
                    job.exhausted = True
                    return
                tile = job.take()
                job.running += 1
            error: BaseException | None = None
            try:
                job.operation.run_tile(job.arrays, tile)
            except BaseException as caught:
                error = caught
            with self._lock:
                job.running -= 1
                if error is None:
                    job.finished(tile)
                else:
                    job.error, job.exhausted = error, True
                if not job.running:
                    self._idle.notify_all()


class _Job:
    """Tiles of one operation in flight; guarded by the pool's lock."""

    def __init__(
        self,
        operation: PlannedOperation,
        arrays: Arrays,
        first: int,
        progress: Callable[[int], None],
        stop: Callable[[], bool],
    ) -> None:
        self.operation = operation
        self.arrays = arrays
        self.progress = progress
        self.stop = stop
        self.shares: Sequence[Collection[int]] = ()
        self.low = first
        self.running = 0
        self.error: BaseException | None = None
        self.exhausted = first >= operation.tiles
        self._next = first
        self._ahead: set[int] = set()

    def take(self) -> int:
        """The next tile to run."""
        tile = self._next
        self._next += 1
        self.exhausted = self._next >= self.operation.tiles
        return tile

    def finished(self, tile: int) -> None:
        """A tile is done: move the mark of the first that is not."""
        self._ahead.add(tile)
        while self.low in self._ahead:
            self._ahead.discard(self.low)
            self.low += 1
        self.progress(self.low)
