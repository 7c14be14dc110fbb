"""A program with its arguments fixed, and a run of it that may still be going on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from accelvisor.abi.commands import BINDING, Completion, Flag, Memory, launch
from accelvisor.errors import UsageError
from accelvisor.guest.copies import Landing
from accelvisor.guest.tensor import Tensor

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

#: Launches that took at least this long lately ask for an interrupt; for shorter ones it would cost
#: more than it saves.
INTERRUPT_FROM_S = 0.0003


class Bound:
    """A program and the tensors of one call: its entry is encoded once and submitted often.

    Args:
        program: handle of the uploaded program.
        tensors: one for each argument slot, in slot order.
        result: what a run returns.
        keep: tensors to hold on to while this exists.
    """

    def __init__(
        self,
        function: Function,
        program: int,
        tensors: Sequence[Tensor],
        result: Any,
        keep: Sequence[Tensor],
    ) -> None:
        self.function = function
        self.result = result
        self._generation = function.generation
        self._program = program
        self._keep = list(keep)
        self._count = len(tensors)
        self._flying: set[int] = set()
        self._landing: Landing | None = None
        self._entries: dict[tuple[int, int], bytes] = {}
        self._expected_s = 0.0
        source = Memory(0, 0, 0, 0, 0)
        if tensors:
            bindings = b"".join(BINDING.pack(t.handle, t.offset) for t in tensors)
            self._landing = landing = function.copies.filled(bindings)
            source = landing.memory
        self._source = source

    def __call__(self, repeat: int = 1, timeout_s: float | None = None) -> Any:
        """Run it ``repeat`` times in one command and wait; returns the program's results.

        Raises:
            DeviceFault, CommandTimeout, DeviceReset, CommandRefused.
        """
        function = self.function
        started = time.perf_counter()
        interrupt = self._expected_s >= INTERRUPT_FROM_S
        cookie = self._submit(repeat, interrupt)
        completion = self._wait(cookie, timeout_s, interrupt, self._expected_s * repeat)
        self._expected_s = (time.perf_counter() - started) / max(repeat, 1)
        if completion.status:
            function.check(completion)
        return self.result

    def launch(
        self, repeat: int = 1, schedule: Callable[[bytes], bytes] | None = None
    ) -> Launch:
        """Start it; the returned :class:`Launch` is waited for later.

        Args:
            schedule: makes the ordered command one that is not (``commands.scheduled``).
        """
        interrupt = self._expected_s >= INTERRUPT_FROM_S
        ends = time.perf_counter() + self._expected_s * repeat
        return Launch(self, self._submit(repeat, interrupt, schedule), interrupt, ends)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it is bound to, in slot order."""
        return tuple(self._keep)

    def entry(self, repeat: int, flags: int) -> bytes:
        """The command, without its cookie."""
        return launch(0, self._program, self._count, self._source, repeat, flags)

    def release(self) -> None:
        """Give back the bindings' staging memory, once no run uses it. Safe to call twice."""
        landing, self._landing = self._landing, None
        if landing is None:
            return
        queue = self.function.queue
        left = set(self._flying)
        if not left or self.function.closed:
            landing.release()
            return
        for cookie in tuple(left):
            queue.hold(cookie, _countdown(left, cookie, landing.release))

    def __enter__(self) -> Bound:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        landing = getattr(self, "_landing", None)
        if landing is not None and not self.function.closed:
            # Through the queue, whose lock may be held now: this runs in the middle of anything.
            left = set(self._flying) or {0}
            for cookie in tuple(left):
                self.function.queue.hold(cookie, _countdown(left, cookie, landing.release))

    # --- inside ----------------------------------------------------------------------------------

    def _submit(
        self, repeat: int, interrupt: bool, schedule: Callable[[bytes], bytes] | None = None
    ) -> int:
        function = self.function
        if self._generation != function.generation or function.closed:
            gone = function.stale(self._generation)
            if gone is not None:
                raise gone
        if self._landing is None and self._count:
            raise UsageError("the binding was released", code="binding-released", where="launch")
        if function.graveyard:
            function.bury()
        key = (repeat, interrupt)
        entry = self._entries.get(key)
        if entry is None:
            if not 1 <= repeat < 1 << 32:
                raise UsageError(f"repeat {repeat}", where="launch", hint="1 or more")
            entry = self.entry(repeat, Flag.INTERRUPT if interrupt else 0)
            self._entries[key] = entry
        if schedule is not None:
            entry = schedule(entry)
        cookie = function.queue.submit(entry, function.timeout_s)
        self._flying.add(cookie)
        return cookie

    def _wait(
        self, cookie: int, timeout_s: float | None, interrupt: bool, expected_s: float
    ) -> Completion:
        function = self.function
        limit = function.timeout_s if timeout_s is None else timeout_s
        completion = function.queue.wait(
            cookie, limit, interrupt=interrupt, expected_s=expected_s
        )
        self._flying.discard(cookie)
        return completion


class Launch:
    """A run of a program. Its arguments stay alive until it is done."""

    __slots__ = ("_bound", "_completion", "_ends", "_interrupt", "cookie")

    def __init__(self, bound: Bound, cookie: int, interrupt: bool, ends: float) -> None:
        self._bound = bound
        self._ends = ends  # not before, by what is known of the program
        self._completion: Completion | None = None
        self._interrupt = interrupt
        self.cookie = cookie

    def done(self) -> bool:
        """Whether it has ended, well or not. Never waits."""
        return self._completion is not None or self._bound.function.queue.is_done(self.cookie)

    def wait(self, timeout_s: float | None = None) -> Completion:
        """Wait for its end and return the device's answer, whatever it is.

        Raises:
            CommandTimeout: not within ``timeout_s`` (the function's own when None); ask again.
            DeviceReset, DeviceBroken: it will never end.
        """
        if self._completion is None:
            self._completion = self._bound._wait(
                self.cookie, timeout_s, self._interrupt, self._ends - time.perf_counter()
            )
        return self._completion

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait, and return the program's results.

        Raises:
            DeviceFault: the context was stopped. Others as :meth:`wait`.
        """
        completion = self.wait(timeout_s)
        if completion.status:
            self._bound.function.check(completion)
        return self._bound.result

    @property
    def cycles(self) -> int:
        """Model clock cycles that it took. Waits for its end."""
        return self.wait().cycles

    def __del__(self) -> None:
        bound = getattr(self, "_bound", None)
        if bound is not None and self._completion is None and not bound.function.closed:
            bound.function.queue.abandoned.append((self.cookie, None, True))

    def __repr__(self) -> str:
        state = "running" if self._completion is None else f"status {self._completion.status:#x}"
        return f"<Launch {self.cookie} {state}>"


def _countdown(left: set[int], cookie: int, release: Callable[[], None]) -> Callable[[], None]:
    def landed() -> None:
        left.discard(cookie)
        if not left:
            release()

    return landed

