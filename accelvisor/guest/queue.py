"""One submission ring and its completion ring: what a program does with them.

A busy stream of commands costs no exit from the VM: the guest writes an entry, moves SQ_TAIL, and
rings the doorbell only when the device has said that it sleeps. Completions may come in any order;
they are kept by cookie until their waiter asks. Waiting spins, then sleeps; for how long it spins
is learned, since on a machine with few cores a spinning guest takes the very core that the device
needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelvisor.abi.commands import Completion
from accelvisor.abi.registers import COMMAND_BYTES, QueueControl, QueueReg, QueueStatus
from accelvisor.errors import ConflictError, UsageError
from accelvisor.guest.rings import IN_ORDER, M32, Rings, fence
from accelvisor.guest.waiting import Pauses

_COOKIES = 0x7FFFFFFF  # cookies stay clear of all-ones, which an absent window reads as


class Queue(Rings):
    """One ring pair. Safe for threads; one owner process. Made as :class:`Rings`."""

    # --- life ------------------------------------------------------------------------------------

    def start(self, timeout_s: float = 5.0) -> None:
        """Disable whatever was left of an earlier owner, then enable with empty rings.

        Raises:
            ConflictError: the device did not enable the queue in ``timeout_s`` seconds.
            DeviceInTransition: the device is absent.
        """
        state = self._registers.state()
        self._control(QueueControl.DISABLE, QueueStatus.DISABLED, timeout_s)
        self._control(QueueControl.ENABLE, QueueStatus.ENABLED, timeout_s)
        with self._lock:
            self._drain()
            self._forget()
            self._epoch = state.epoch
            self._reset_count = state.reset_count
            self._seen_transitions = self._registers.transitions

    def stop(self, timeout_s: float = 5.0) -> None:
        """Disable the queue; the device closes its context. Commands in flight are given up, and
        what was kept for them is released.

        Raises:
            ConflictError, DeviceInTransition: it could not be had, so they may still run.
        """
        self._control(QueueControl.DISABLE, QueueStatus.DISABLED, timeout_s)
        with self._lock:
            self._dead = ConflictError("the queue is closed", code="queue-closed", where="queue")
            self._drain()

    def release(self) -> None:
        """Let go of the window, so that the transport can unmap it."""
        self._dead = ConflictError("the queue is closed", code="queue-closed", where="queue")
        self._leave_window(self._dead)

    def forked(self) -> None:
        """In a forked child: the rings are the parent's, and the window is let go of."""
        self._lock = threading.Lock()  # the parent may have held it
        self._dead = ConflictError(
            "the function was opened before a fork",
            code="forked",
            where="queue",
            hint="open it in the child",
        )
        self._leave_window(self._dead)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until some command in flight has completed. Raises as :meth:`wait`."""
        before, pause = len(self._flight), Pauses(self, self._clock(), timeout_s)
        self._kick()
        while before and len(self._flight) >= before:
            with self._lock:
                if self._dead is not None:
                    raise self._dead.with_traceback(None)
                self._reap()
            if len(self._flight) >= before:
                pause.once(locked=False)

    def status(self) -> int:
        """The queue's own register (QueueStatus), past any transition."""
        return self._registers.steady(lambda t: t.read32(self._block + QueueReg.STATUS))

    def _control(self, value: QueueControl, wanted: QueueStatus, timeout_s: float) -> None:
        deadline = self._clock() + timeout_s
        nap = 0.0002
        while True:
            # Written again each time round: a store into an absent device is lost.
            self._transport.write32(self._block + QueueReg.CONTROL, value)
            if self.status() == wanted:
                return
            if self._clock() >= deadline:
                raise ConflictError(
                    f"queue {self.index} did not become {wanted.name.lower()}",
                    code="queue-stuck",
                    where="queue",
                    hint="reset the function",
                )
            self._sleep(nap)
            nap = min(nap * 2, 0.02)

    # --- the fast path ---------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Commands whose completion has not been seen."""
        return len(self._flight)

    def submit(self, entry: bytes, timeout_s: float | None = 30.0) -> int:
        """Put one 64-byte entry into the ring; its cookie field is filled in here.

        An entry may be submitted many times. Blocks while ``depth`` commands are in flight.

        Returns:
            The cookie to wait for.

        Raises:
            CommandTimeout: no room came free in ``timeout_s`` seconds.
            DeviceReset, DeviceBroken: nothing will complete here any more.
        """
        with self._lock:
            if self._dead is not None:
                raise self._dead.with_traceback(None)
            flight = self._flight
            tail = self._tail
            if len(flight) >= self.depth or (tail - self._sq_head) & M32 >= self._entries:
                self._make_room(timeout_s)
                tail = self._tail
            self._cookie = cookie = self._cookie % _COOKIES + 1
            slot = tail & self._mask
            at = self._sq + slot * COMMAND_BYTES
            words = self._words
            self._window[at : at + COMMAND_BYTES] = entry
            words[(at >> 2) + 1] = cookie
            self._slots[slot] = (entry, cookie)
            flight.add(cookie)
            self._tail = tail = (tail + 1) & M32
            if self._batches:
                return cookie
            if not IN_ORDER:
                fence()
            words[self._sq_tail_at] = tail
        # The lock's release above is the full fence that NEED_WAKEUP's protocol wants.
        if words[self._wakeup_at]:
            self._ring()
        return cookie

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Commands submitted in the block are shown to the device together at its end, or when
        somebody waits: one doorbell, if any, instead of one for each.
        """
        with self._lock:
            self._batches += 1
        try:
            yield
        finally:
            with self._lock:
                self._batches -= 1
            self._kick()

    def poll(self) -> int:
        """Take what has completed; returns how many commands that were. Never waits."""
        if self._words[self._cq_tail_at] == self._head:
            return 0
        with self._lock:
            return self._reap()

    def wait(
        self,
        cookie: int,
        timeout_s: float | None = None,
        *,
        interrupt: bool = False,
        expected_s: float = 0.0,
    ) -> Completion:
        """The completion of ``cookie``, whatever its status.

        Args:
            timeout_s: seconds; None waits as long as the function is alive.
            interrupt: the entry carried Flag.INTERRUPT, so sleeping may rely on one.
            expected_s: how long it is likely to take from now on, if known; half of that is slept
                through. A time in the past says nothing.

        Raises:
            CommandTimeout: not in time. It may still run: keep its memory and :meth:`abandon` it.
            DeviceReset, DeviceBroken: it never will.
        """
        if cookie not in self._done:
            if self._batches:
                self._kick()
            start = self._clock()
            pause = Pauses(self, start, timeout_s, interrupt and self._interrupts, expected_s)
            if expected_s > self.policy.spin_s:
                self._doze(cookie, pause)
            else:
                spinning = self._spinning
                long = spinning.pick()
                if not self._spin(cookie, start + spinning.seconds(long), long):
                    self._doze(cookie, pause)
                spinning.learn(long, self._clock() - start)
        with self._lock:
            raw = self._done.pop(cookie, None)
        if raw is None:
            raise UsageError(f"cookie {cookie} was already waited for", where="queue")
        return Completion(raw[0], raw[1], raw[2], raw[3], raw[4])

    def call(self, entry: bytes, timeout_s: float | None = 30.0) -> Completion:
        """Submit and wait."""
        return self.wait(self.submit(entry, timeout_s), timeout_s)

    def abandon(self, cookie: int, release: Callable[[], None] | None = None) -> None:
        """Nobody will wait for ``cookie``; call ``release`` once the device is done with it."""
        self.abandoned.append((cookie, release, True))

    def hold(self, cookie: int, release: Callable[[], None]) -> None:
        """Call ``release`` once ``cookie`` has completed; its completion is still waited for."""
        self.abandoned.append((cookie, release, False))

    def is_done(self, cookie: int) -> bool:
        """Whether ``cookie`` has completed. Never waits."""
        if cookie not in self._done:
            self.poll()
        return cookie in self._done

    def _make_room(self, timeout_s: float | None) -> None:
        """Wait until a command may be added. Called with the lock held, which others get while this
        sleeps: what they wait for may be complete already.
        """
        pause = Pauses(self, self._clock(), timeout_s)
        while True:
            if self._dead is not None:
                raise self._dead.with_traceback(None)
            self._kick()
            self._reap()
            self._sq_head = self._words[self._sq_head_at]
            used = (self._tail - self._sq_head) & M32
            if len(self._flight) < self.depth and used < self._entries:
                return
            self._lock.release()
            try:
                pause.once(locked=False)
            finally:
                self._lock.acquire()

    def _spin(self, cookie: int, end: float, generous: bool) -> bool:
        words, at, done = self._words, self._cq_tail_at, self._done
        clock = self._clock
        while True:
            for _ in range(32):
                if words[at] != self._head:
                    with self._lock:
                        self._reap()
                    if cookie in done:
                        return True
            if cookie in done:  # another thread took it out of the ring
                return True
            if clock() >= end:
                return False
            if generous:  # a moment is not worth it: the scheduler counts a yield as a whole turn
                os.sched_yield()

    def _doze(self, cookie: int, pause: Pauses) -> None:
        while True:
            with self._lock:
                if self._dead is not None and cookie not in self._done:
                    raise self._dead.with_traceback(None)
                self._reap()
                if cookie in self._done:
                    return
                if cookie not in self._flight:
                    raise UsageError(f"cookie {cookie} is not in flight", where="queue")
            pause.once(locked=False)
