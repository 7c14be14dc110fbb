"""The rings of one queue in the shared window: indices, entries, and what survives an absence.

Ordering. On x86 stores are seen in order and loads are done in order, so an entry written before
SQ_TAIL is visible before it. The one reordering that x86 allows, SQ_TAIL's store after
NEED_WAKEUP's load, is stopped by the release of a lock. Other machines get the same fence at the
other places too.

Absence. An unmapped window reads as zeros or ones and swallows stores. Indices and cookies that
cannot be are therefore never believed: the registers are asked, a transition is waited out, and
what is in flight is written again, the same bytes under the same cookies.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

from accelvisor.abi.commands import COMPLETION
from accelvisor.abi.registers import (
    COMMAND_BYTES,
    CQ_HEAD,
    CQ_TAIL,
    NEED_WAKEUP,
    QUEUE_STRIDE,
    SQ_HEAD,
    SQ_TAIL,
    Reg,
    Status,
    WindowLayout,
)
from accelvisor.errors import AccelvisorError, ProtocolError, UsageError
from accelvisor.guest.errors import (
    DeviceBroken,
    DeviceQuarantined,
    DeviceReset,
    DeviceRevoked,
)
from accelvisor.guest.registers import Registers
from accelvisor.guest.transport import Transport
from accelvisor.guest.waiting import Spinning, WaitPolicy

M32 = 0xFFFFFFFF
IN_ORDER = os.uname().machine in ("x86_64", "i686", "i386")
_ALL_CAUSES = 0xFFFFFFFF


class Rings:
    """State of one ring pair. :class:`accelvisor.guest.queue.Queue` is its public face.

    Methods that begin with an underscore want the lock held, but for ``_kick`` and ``_ring``.

    Args:
        transport: the function.
        index: which of the function's queues.
        layout: where the rings lie.
        registers: guarded register reads, shared with the owner.
        depth: commands in flight at most; the ring's size when None.
        clock, sleep: monotonic seconds, and how to pass them.
    """

    def __init__(
        self,
        transport: Transport,
        index: int,
        layout: WindowLayout,
        registers: Registers,
        *,
        depth: int | None = None,
        policy: WaitPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 <= index < layout.queues:
            raise UsageError(f"queue {index} of {layout.queues}", where="queue")
        if depth is not None and not 1 <= depth <= layout.entries:
            raise UsageError(f"depth {depth}, the rings hold {layout.entries}", where="queue")
        self.index = index
        self.depth = depth or layout.entries
        self.policy = policy or WaitPolicy()
        self._transport = transport
        self._registers = registers
        self._clock = clock
        self._sleep = sleep
        self._window = transport.window
        self._words = transport.window.cast("I")
        self._entries = layout.entries
        self._mask = layout.entries - 1
        self._sq = layout.submission(index)
        self._cq = layout.completion(index)
        control = layout.control(index)
        self._sq_tail_at = (control + SQ_TAIL) >> 2
        self._sq_head_at = (control + SQ_HEAD) >> 2
        self._cq_head_at = (control + CQ_HEAD) >> 2
        self._cq_tail_at = (control + CQ_TAIL) >> 2
        self._wakeup_at = (control + NEED_WAKEUP) >> 2
        self._block = Reg.QUEUE + QUEUE_STRIDE * index
        self._lock = threading.Lock()
        self._interrupts: bool = getattr(transport, "interrupts", True)
        self._cookie = 0
        self._spinning = Spinning(self.policy)
        #: (cookie, what to call at its completion, whether nobody waits for it). A deque, because
        #: garbage collection adds to it while the lock may be held.
        self.abandoned: deque[tuple[int, Callable[[], None] | None, bool]] = deque()
        self._forget()

    def _forget(self) -> None:
        self._tail = 0
        self._batches = 0
        self._head = 0
        self._sq_head = 0
        self._flight: set[int] = set()
        self._done: dict[int, tuple[int, int, int, int, int, int]] = {}
        self._held: dict[int, list[tuple[Callable[[], None] | None, bool]]] = {}
        self._slots: list[tuple[bytes, int] | None] = [None] * self._entries
        self._dead: AccelvisorError | None = None
        self._epoch = 0
        self._reset_count = 0
        self._seen_transitions = 0

    def _reap(self) -> int:
        """Move completions from the ring into ``_done``. Called with the lock held."""
        if self.abandoned:
            self._adopt()
        words = self._words
        head = self._head
        tail = words[self._cq_tail_at]
        count = (tail - head) & M32
        if count == 0:
            return 0
        if not IN_ORDER:
            fence()
        if count > len(self._flight):
            # More than was asked for: an absent window, or a reset behind our back.
            return self._suspect("completion index", tail)
        window, mask, cq = self._window, self._mask, self._cq
        flight, done = self._flight, self._done
        unpack = COMPLETION.unpack_from
        fresh = [
            unpack(window, cq + (at & mask) * COMPLETION.size) for at in range(head, head + count)
        ]
        if (words[self._cq_tail_at] - tail) & M32 > len(flight) - count:
            # The index went back: the window was away while the entries were read, or still is.
            return self._suspect("completion index", words[self._cq_tail_at])
        taken = 0
        for raw in fresh:
            cookie = raw[0]
            if cookie not in flight:
                break
            flight.discard(cookie)
            done[cookie] = raw
            taken += 1
        self._commit((head + taken) & M32)
        return taken or self._suspect("completion", fresh[0][0])

    def _commit(self, head: int) -> None:
        self._head = head
        self._words[self._cq_head_at] = head
        if self._held:
            for cookie in [c for c in self._held if c not in self._flight]:
                for release, drop in self._held.pop(cookie):
                    self._let_go(cookie, release, drop)

    def _drain(self) -> None:
        """Release what was kept for commands in flight: the queue is disabled, so none runs."""
        self._flight.clear()
        self._adopt()
        held, self._held = self._held, {}
        for cookie, releases in held.items():
            for release, drop in releases:
                self._let_go(cookie, release, drop)

    def _adopt(self) -> None:
        """Take over what garbage collection and timed-out waiters left."""
        while self.abandoned:
            cookie, release, drop = self.abandoned.popleft()
            if cookie in self._flight:
                self._held.setdefault(cookie, []).append((release, drop))
            else:
                self._let_go(cookie, release, drop)

    def _let_go(self, cookie: int, release: Callable[[], None] | None, drop: bool) -> None:
        if drop:
            self._done.pop(cookie, None)
        if release is not None:
            release()

    def _kick(self) -> None:
        words = self._words
        if words[self._sq_tail_at] != self._tail:
            if not IN_ORDER:
                fence()
            words[self._sq_tail_at] = self._tail
            fence()
            if words[self._wakeup_at]:
                self._ring()

    def _ring(self) -> None:
        self._transport.write32(Reg.DOORBELL + 4 * self.index, 1)

    def _suspect(self, what: str, value: int) -> int:
        """What the window shows cannot be: wait out a transition, or name the culprit.

        Called with the lock held; returns 0, for the caller to look again.
        """
        before = self._registers.transitions
        self._health()
        plausible = (self._words[self._cq_tail_at] - self._head) & M32 <= len(self._flight)
        cookie, *_ = COMPLETION.unpack_from(
            self._window, self._cq + (self._head & self._mask) * COMPLETION.size
        )
        if (plausible and cookie in self._flight) or self._registers.transitions != before:
            return 0
        if plausible and self._words[self._cq_tail_at] == self._head:
            return 0
        self._dead = ProtocolError(
            f"the device shows an impossible {what} ({value:#x})",
            code="completion-unknown",
            where=f"queue:{self.index}",
            hint="the function's process is damaged: reset the function",
        )
        raise self._dead

    def _health(self) -> Status:
        """Look at the registers. Called with the lock held.

        After a move or a transition, stores of that moment may have been lost, so what is in flight
        is written again: same bytes, same cookies, so it does no harm when nothing was lost.
        """
        state = self._registers.state()
        if state.status & Status.BROKEN:
            self._dead = DeviceBroken(
                "the function's process gave up",
                where=f"queue:{self.index}",
                hint="the host's log says why; the function must be created again",
            )
            raise self._dead
        if state.status & Status.REVOKED:
            self._dead = DeviceRevoked(
                "the host took the function's cores and memory away",
                where=f"queue:{self.index}",
                hint="the VM's administrator can detach the device and attach another",
            )
            raise self._dead
        if state.status & Status.QUARANTINED:
            raise DeviceQuarantined(
                "the function faulted again and again, and stands still",
                where=f"queue:{self.index}",
                hint="the host's administrator can reset it: accelctl function reset",
            )
        if state.reset_count != self._reset_count:
            self._dead = DeviceReset(
                "the function was reset",
                where=f"queue:{self.index}",
                hint="open a new context; tensors and programs of before are gone",
            )
            raise self._dead
        transitions = self._registers.transitions
        if state.epoch != self._epoch or transitions != self._seen_transitions:
            self._epoch = state.epoch
            self._seen_transitions = transitions
            self._publish()
        return state.status

    def _publish(self) -> None:
        words = self._words
        position = words[self._sq_head_at]
        if (self._tail - position) & M32 > self._entries:
            return  # not a live index; the next look decides
        while position != self._tail:
            kept = self._slots[position & self._mask]
            if kept is not None:
                at = self._sq + (position & self._mask) * COMMAND_BYTES
                self._window[at : at + COMMAND_BYTES] = kept[0]
                words[(at >> 2) + 1] = kept[1]
            position = (position + 1) & M32
        words[self._cq_head_at] = self._head
        words[self._sq_tail_at] = self._tail
        self._ring()

    def _leave_window(self, error: AccelvisorError) -> None:
        self._words.release()
        self._words = cast(memoryview, _Gone(error))

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def nap(self, seconds: float) -> None:
        """Let time pass."""
        self._sleep(seconds)

    def wait_interrupt(self, timeout_s: float) -> None:
        """Sleep until the function's interrupt, unless the ring moved meanwhile.

        The function interrupts when a cause becomes set that was clear, so all are cleared *before*
        the last look at the ring: what completes afterwards interrupts. All, because it interrupts
        again at once for a cause that is left, an old fault for example.
        """
        self._transport.write32(Reg.INTERRUPT_CAUSE, _ALL_CAUSES)
        if self._words[self._cq_tail_at] == self._head:
            self._transport.wait_interrupt(timeout_s)

    def look(self, *, locked: bool) -> Status:
        """Look at the registers while a command takes long; ring again if a doorbell was lost.

        Args:
            locked: the caller holds the queue's lock.

        Raises:
            DeviceReset, DeviceBroken, DeviceInTransition.
        """
        with nullcontext() if locked else self._lock:
            status = self._health()
        if self._words[self._wakeup_at] and self._words[self._sq_head_at] != self._tail:
            self._ring()
        return status


class _Gone:
    """In place of the window's words: whoever looks is told why they are gone."""

    def __init__(self, error: AccelvisorError) -> None:
        self._error = error

    def __getitem__(self, at: int) -> int:
        raise self._error.with_traceback(None)

    def __setitem__(self, at: int, value: int) -> None:
        raise self._error.with_traceback(None)

    def release(self) -> None:
        """Nothing: it was."""


_FENCE = threading.Lock()


def fence() -> None:
    """A full barrier: what was stored or loaded before is done before what follows."""
    with _FENCE:
        pass
