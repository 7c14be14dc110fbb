"""The engine: one thread that serves the queues, and what the rest of the worker may ask of it.

Round robin between queues, each for a quantum, which a long program gives up at a tile boundary.
While commands come the thread polls the queues' tails; when they stop it spins for a time that
adapts to how often spinning paid, then it announces in each queue's NEED_WAKEUP that it sleeps,
looks once more, and waits without a timeout: an idle function costs no wake-ups.

Requests from other threads (freeze, reset, disable a queue) are flags in the state memfd, so that
a replaced worker carries them out as well, and one attention flag here, which tiles are watched
by.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from accelvisor.abi.registers import QueueControl, QueueStatus
from accelvisor.errors import DeadlineError
from accelvisor.function import state as s
from accelvisor.function.chips import Engines
from accelvisor.function.frontend import Frontend
from accelvisor.function.lanes import Lane
from accelvisor.function.pauses import Timed, Waiting
from accelvisor.function.placement import lower_priority
from accelvisor.function.state import State

log = logging.getLogger(__name__)

#: How long one queue may compute while others wait.
QUANTUM_S = 0.010
#: How often a command whose quantum is over looks for others: to stop for nobody leaves cores idle.
_RIVALS_S = 0.001
#: Spinning costs a core that the guest may need, so it stays short and must pay.
_SPIN_MIN_S = 10e-6
_SPIN_MAX_S = 200e-6
#: How often what a command waits for is asked whether it is overdue; it wakes the engine itself.
_LOOK_S = 0.05
_NONE = int(QueueStatus.DISABLED)
_DISABLE = 1  # Q_CLOSING
_ENABLE = 2


class Engine:
    """Owns the thread. ``reset`` carries out a function-level reset on it (see device.py)."""

    def __init__(
        self,
        state: State,
        reset: Callable[[], None],
        chips: int = 1,
        cores: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._state = state
        self._u32 = state.u32
        self._reset = reset
        self._clock = clock
        self._frontend: Frontend | None = None
        self._attend = True
        self._deadline = 0.0
        #: who may want the rest of a quantum; None when somebody always does
        self._rivals: Sequence[Lane] | None = None
        self._stopping = False
        self._event = threading.Event()
        self._fence = threading.Lock()
        self._flags = threading.Lock()
        self._settled = threading.Condition()
        self._parked = False
        self._spin_s = _SPIN_MAX_S
        #: percent of the time that commands get
        self._share = 100
        self._rang = 0.0
        #: what runs on the chips; stands still whenever this thread carries out a request
        self.engines = Engines(chips, cores, lambda: self._attend, self.nudge)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, frontend: Frontend) -> None:
        """Take over from a predecessor, then serve."""
        self._frontend = frontend
        self._thread.start()

    def stop(self) -> None:
        """End the thread at the next boundary."""
        self._stopping = True
        self._wake()
        self._thread.join()

    # --- asked by the engine's own thread and its cores -------------------------------------------

    def attention(self) -> bool:
        """Whether the command in progress should pause at this boundary."""
        if self._attend:
            return True
        now = self._clock()
        return now > self._deadline and self._contended(now)

    def _contended(self, now: float) -> bool:
        """Whether another queue has something to do; if not, the quantum is prolonged."""
        rivals, frontend = self._rivals, self._frontend
        if rivals is None or frontend is None or any(map(frontend.pending, rivals)):
            return True
        self._deadline = now + _RIVALS_S
        return False

    # --- asked by other threads -------------------------------------------------------------------

    def nudge(self) -> None:
        """Something that a command waits for may be there."""
        self._event.set()

    def doorbell(self, queue: int) -> None:
        """A tail moved while NEED_WAKEUP was set."""
        self._state.count("doorbells")
        self._rang = self._clock()
        if self._frontend is not None:
            # One doorbell is enough, however long it takes until the thread runs: or a guest that
            # goes on submitting rings for each command. Before the event, or a sleep that begins
            # in between would have no doorbell.
            self._frontend.announce_sleep(self._frontend.lanes, False)
        self._event.set()

    def queue_control(self, queue: int, value: int) -> None:
        """ENABLE a disabled queue, DISABLE any other. Carried out by the engine; the guest reads
        the queue's STATUS. Anything else is ignored.
        """
        word = s.queue_word(queue)
        with self._flags:
            if value == QueueControl.DISABLE and self._u32[word] != _NONE:
                self._u32[word + s.Q_CLOSING] = _DISABLE
            elif value == QueueControl.ENABLE and self._u32[word] == _NONE:
                self._u32[word + s.Q_CLOSING] = _ENABLE
            else:
                return
            self._wake()

    def throttle(self, percent: int) -> None:
        """Serve the queues this share of the time only, 1 to 100: who changes memory faster than
        it can be copied is slowed down. A worker's successor begins with all of it again.
        """
        with self._flags:
            self._share = self.engines.share = percent
            self._wake()

    def request_reset(self, timeout_s: float) -> None:
        """Reset everything behind BAR0 and wait for it.

        Raises:
            DeadlineError: the engine did not come to a boundary in time; the reset still follows.
        """
        with self._flags:
            self._u32[s.R_RESETTING] = 1
            self._wake()
        self._wait(lambda: not self._u32[s.R_RESETTING], timeout_s, "reset")

    def reset_soon(self) -> None:
        """As :meth:`request_reset`, for the engine's own thread: at its next boundary."""
        with self._flags:
            self._u32[s.R_RESETTING] = 1
            self._wake()

    def hold(self, bit: int) -> None:
        """As :meth:`freeze`, for the engine's own thread: at its next boundary."""
        with self._flags:
            self._u32[s.R_FREEZE] |= bit
            self._wake()

    def freeze(self, bit: int, timeout_s: float) -> None:
        """Stop at the next boundary and stay there until every freeze bit is gone.

        Raises:
            DeadlineError: the engine did not come to a boundary in time; it is thawed again.
        """
        with self._flags:
            self._u32[s.R_FREEZE] |= bit
            self._wake()
        try:
            # Parked since this was asked, not still from before: then requests may be under way.
            self._wait(lambda: self._parked and not self._attend, timeout_s, "freeze")
        except DeadlineError:
            self.thaw(bit)
            raise

    def thaw(self, bit: int) -> None:
        """Take one freeze bit away."""
        with self._flags:
            self._u32[s.R_FREEZE] &= ~bit
            self._wake()

    def _wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._settled:
            if not self._settled.wait_for(done, timeout_s):
                raise DeadlineError(
                    f"{what} took longer than {timeout_s:g} s",
                    where="engine",
                    hint="a tile or a DMA message does not end; reset the function",
                )

    def _wake(self) -> None:
        self._attend = True
        self._event.set()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority()
        frontend = self._frontend
        if frontend is None:
            raise RuntimeError("the engine was started without a front end")
        try:
            frontend.recover()
            while self._service(frontend):
                self._serve(frontend)
        except BaseException:
            # Without its engine a worker is of no use: let the holder replace it.
            log.critical("the engine failed", exc_info=True)
            abort()

    def _service(self, frontend: Frontend) -> bool:
        """Carry out requests; stay here while frozen. False when the thread is to end."""
        u32 = self._u32
        self.engines.hold()
        while True:
            self._event.clear()
            self._parked = False
            self._attend = False
            if self._stopping:
                return False
            if u32[s.R_RESETTING]:
                self._reset()
            frozen = u32[s.R_FREEZE]
            if not self._attend:
                with self._settled:
                    self._parked = bool(frozen)
                    self._settled.notify_all()
                if not frozen:
                    self.engines.release()
                    return True
                self._park(frontend, bool(frozen & s.FREEZE_MIGRATION))

    def _park(self, frontend: Frontend, still: bool) -> None:
        """Stay until something is asked. Queues may be closed meanwhile, unless the state must be
        ``still``.
        """
        while not self._attend:
            closing = [] if still else self._closing(frontend)
            if not self._close(frontend, closing):
                waited = [lane.blocked for lane in closing]
                self._event.wait(self._patience(waited) if waited else None)
                self._event.clear()

    def _closing(self, frontend: Frontend) -> list[Lane]:
        """Start the queues that are to be enabled; those that are being disabled."""
        closing = []
        for lane in frontend.lanes:
            wanted = self._u32[lane.record + s.Q_CLOSING]
            if wanted == _DISABLE:
                closing.append(lane)
            elif wanted:
                with self._flags:
                    if self._u32[lane.record] == _NONE:
                        frontend.enable(lane)
                    self._u32[lane.record + s.Q_CLOSING] = 0
        return closing

    def _close(self, frontend: Frontend, closing: list[Lane]) -> bool:
        """A quantum for each queue that is being disabled. False when all of them wait."""
        progress = False
        for lane in list(closing):
            self._deadline, self._rivals = self._clock() + QUANTUM_S, None
            step = frontend.close(lane)
            if step:
                with self._flags:  # an ENABLE that follows at once is not overlooked
                    frontend.disabled(lane)
                closing.remove(lane)
            progress |= step is not None
        return progress

    def _serve(self, frontend: Frontend) -> None:
        """Serve lanes until something else wants the thread."""
        clock = self._clock
        u32 = self._u32
        closing = self._closing(frontend)
        lanes = [lane for lane in frontend.lanes if u32[lane.record] and lane not in closing]
        turns = [(lane, [other for other in lanes if other is not lane]) for lane in lanes]
        while not self._attend:
            progress = self._close(frontend, closing) if closing else False
            progress |= frontend.unordered.advance()
            for lane, rivals in turns:
                began, share = clock(), self._share
                self._deadline = began + QUANTUM_S
                self._rivals = None if closing or share < 100 else rivals
                while frontend.serve(lane):
                    progress = True
                    if self._attend or clock() > self._deadline:
                        break
                if share < 100:
                    self._hold_back((clock() - began) * (100 - share) / share)
            progress |= frontend.unordered.dispatch()
            if not progress and not self._attend:
                self._rest(frontend, lanes, closing)

    def _hold_back(self, seconds: float) -> None:
        """Let time pass; whatever else is asked of the engine comes first."""
        until = self._clock() + seconds
        while True:
            self._event.clear()
            left = until - self._clock()
            if self._attend or left <= 0:
                return
            self._event.wait(left)

    @staticmethod
    def _patience(waited: Sequence[Waiting | None]) -> float:
        """Seconds after which what is waited for has to be asked."""
        return min(item.left_s() if isinstance(item, Timed) else _LOOK_S for item in waited)

    def _rest(self, frontend: Frontend, lanes: list[Lane], closing: list[Lane]) -> None:
        """Spin a little, then sleep until a doorbell, a request or a reply."""
        clock, pending = self._clock, frontend.pending
        until = clock() + self._spin_s
        while clock() < until:
            for lane in lanes:
                if pending(lane):
                    return
            if self._attend:
                return
        self._event.clear()
        frontend.announce_sleep(lanes, True)
        with self._fence:
            pass  # the stores above are seen before the tails are looked at
        if not self._attend and not any(pending(lane) for lane in lanes):
            self._state.count("sleeps")
            began = clock()
            waited = [lane.blocked for lane in closing]
            waited += [lane.blocked for lane in lanes if lane.blocked is not None]
            waited += frontend.unordered.blocked()
            self._event.wait(self._patience(waited) if waited else None)
            # A doorbell that came at once would have been saved by a little more spinning. When it
            # was rung counts, not when this thread got a core again.
            slept = (self._rang if self._rang >= began else clock()) - began
            self._spin_s = _SPIN_MAX_S if slept < 2 * _SPIN_MAX_S else _SPIN_MIN_S
        frontend.announce_sleep(lanes, False)


def abort() -> None:
    """End this process at once, without any clean-up that could touch the state."""
    import os
    import signal

    os.kill(os.getpid(), signal.SIGABRT)
