"""One submission ring and its completion ring, over the shared window.

A busy stream of commands costs no exit from the VM: the guest writes an entry, moves SQ_TAIL, and
rings the doorbell only when the device has said that it sleeps. Completions may come in any order;
they are kept by cookie until their waiter asks. Waiting spins for about as long as recent commands
took, then sleeps: on a machine with few cores, a spinning guest takes the very core that the device
needs.

Ordering. On x86 stores are seen in order and loads are done in order, so an entry written before
SQ_TAIL is visible before it. The one reordering that x86 allows, SQ_TAIL's store after
NEED_WAKEUP's load, is stopped by the release of the queue's lock. Other machines get the same
fence at the other places too.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

from accelvisor.abi.commands import COMPLETION, Completion
from accelvisor.abi.registers import (
    COMMAND_BYTES,
    CQ_HEAD,
    CQ_TAIL,
    NEED_WAKEUP,
    QUEUE_STRIDE,
    SQ_HEAD,
    SQ_TAIL,
    QueueControl,
    QueueReg,
    QueueStatus,
    Reg,
    Status,
    WindowLayout,
)
from accelvisor.errors import AccelvisorError, ConflictError, ProtocolError, UsageError
from accelvisor.guest.errors import DeviceBroken, DeviceReset
from accelvisor.guest.registers import Registers
from accelvisor.guest.transport import Transport
from accelvisor.guest.waiting import Pauses, WaitPolicy

_M32 = 0xFFFFFFFF
_COOKIES = 0x7FFFFFFF  # cookies stay clear of all-ones, which an absent window reads as
_ALL_CAUSES = 0xFFFFFFFF
_IN_ORDER = os.uname().machine in ("x86_64", "i686", "i386")


class Queue:
    """One ring pair. Safe for threads; one owner process.

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
        self._expected_s = self.policy.spin_s / 4
        #: (cookie, what to call at its completion, whether nobody waits for it). A deque, because
        #: garbage collection adds to it while the lock may be held.
        self.abandoned: deque[tuple[int, Callable[[], None] | None, bool]] = deque()
        self._forget()

    def _forget(self) -> None:
        self._tail = 0
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
            self._forget()
            self._epoch = state.epoch
            self._reset_count = state.reset_count
            self._seen_transitions = self._registers.transitions

    def stop(self, timeout_s: float = 5.0) -> None:
        """Disable the queue; the device closes its context. Commands in flight are given up."""
        self._control(QueueControl.DISABLE, QueueStatus.DISABLED, timeout_s)
        with self._lock:
            self._dead = ConflictError("the queue is closed", code="queue-closed", where="queue")

    def release(self) -> None:
        """Let go of the window, so that the transport can unmap it."""
        self._dead = ConflictError("the queue is closed", code="queue-closed", where="queue")
        self._words.release()

    def forked(self) -> None:
        """In a forked child: the rings are the parent's."""
        self._lock = threading.Lock()  # the parent may have held it
        self._dead = ConflictError(
            "the function was opened before a fork",
            code="forked",
            where="queue",
            hint="open it in the child",
        )

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until some command in flight has completed. Raises as :meth:`wait`."""
        before, pause = len(self._flight), Pauses(self, self._clock(), timeout_s)
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
            if len(flight) >= self.depth or (tail - self._sq_head) & _M32 >= self._entries:
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
            self._tail = tail = (tail + 1) & _M32
            if not _IN_ORDER:
                _fence()
            words[self._sq_tail_at] = tail
        # The lock's release above is the full fence that NEED_WAKEUP's protocol wants.
        if words[self._wakeup_at]:
            self._ring()
        return cookie

    def poll(self) -> int:
        """Take what has completed; returns how many commands that were. Never waits."""
        if self._words[self._cq_tail_at] == self._head:
            return 0
        with self._lock:
            return self._reap()

    def wait(
        self, cookie: int, timeout_s: float | None = None, *, interrupt: bool = False
    ) -> Completion:
        """The completion of ``cookie``, whatever its status.

        Args:
            timeout_s: seconds; None waits as long as the function is alive.
            interrupt: the entry carried Flag.INTERRUPT, so sleeping may rely on one.

        Raises:
            CommandTimeout: not in time. It may still run: keep its memory and :meth:`abandon` it.
            DeviceReset, DeviceBroken: it never will.
        """
        if cookie not in self._done:
            start = self._clock()
            if not self._spin(cookie, start + self.policy.spin_for(self._expected_s)):
                self._doze(cookie, start, timeout_s, interrupt and self._interrupts)
            took = min(self._clock() - start, 4 * self.policy.spin_s)
            # An average over about eight waits, so that one long program does not end spinning.
            self._expected_s += (took - self._expected_s) / 8
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

    # --- what waiting needs (accelvisor.guest.waiting.Waited) ------------------------------------

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

    # --- inside ----------------------------------------------------------------------------------

    def _ring(self) -> None:
        self._transport.write32(Reg.DOORBELL + 4 * self.index, 1)

    def _reap(self) -> int:
        """Move completions from the ring into ``_done``. Called with the lock held."""
        if self.abandoned:
            self._adopt()
        words = self._words
        head = self._head
        tail = words[self._cq_tail_at]
        count = (tail - head) & _M32
        if count == 0:
            return 0
        if not _IN_ORDER:
            _fence()
        if count > len(self._flight):
            # More than was asked for: an absent window, or a reset behind our back.
            return self._suspect("completion index", tail)
        window, mask, cq = self._window, self._mask, self._cq
        flight, done = self._flight, self._done
        unpack = COMPLETION.unpack_from
        taken = 0
        while head != tail:
            raw = unpack(window, cq + (head & mask) * COMPLETION.size)
            cookie = raw[0]
            if cookie not in flight:
                self._commit(head)
                return taken or self._suspect("completion", cookie)
            flight.discard(cookie)
            done[cookie] = raw
            head = (head + 1) & _M32
            taken += 1
        self._commit(head)
        return taken

    def _commit(self, head: int) -> None:
        self._head = head
        self._words[self._cq_head_at] = head
        if self._held:
            for cookie in [c for c in self._held if c not in self._flight]:
                for release, drop in self._held.pop(cookie):
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

    def _suspect(self, what: str, value: int) -> int:
        """What the window shows cannot be: wait out a transition, or name the culprit.

        Called with the lock held; returns 0, for the caller to look again.
        """
        before = self._registers.transitions
        self._health()
        plausible = (self._words[self._cq_tail_at] - self._head) & _M32 <= len(self._flight)
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
        if (self._tail - position) & _M32 > self._entries:
            return  # not a live index; the next look decides
        while position != self._tail:
            kept = self._slots[position & self._mask]
            if kept is not None:
                at = self._sq + (position & self._mask) * COMMAND_BYTES
                self._window[at : at + COMMAND_BYTES] = kept[0]
                words[(at >> 2) + 1] = kept[1]
            position = (position + 1) & _M32
        words[self._cq_head_at] = self._head
        words[self._sq_tail_at] = self._tail
        self._ring()

    def _make_room(self, timeout_s: float | None) -> None:
        """Wait until a command may be added. Called with the lock held."""
        pause = Pauses(self, self._clock(), timeout_s)
        while True:
            self._reap()
            self._sq_head = self._words[self._sq_head_at]
            used = (self._tail - self._sq_head) & _M32
            if len(self._flight) < self.depth and used < self._entries:
                return
            pause.once(locked=True)

    def _spin(self, cookie: int, end: float) -> bool:
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
            os.sched_yield()

    def _doze(self, cookie: int, start: float, timeout_s: float | None, interrupt: bool) -> None:
        pause = Pauses(self, start, timeout_s, interrupt)
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


_fence_lock = threading.Lock()


def _fence() -> None:
    """A full barrier: what was stored or loaded before is done before what follows."""
    with _fence_lock:
        pass
