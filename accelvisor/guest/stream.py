"""Streams outside of a graph: launches that are not ordered among themselves.

    s, t = fn.stream(chip=0), fn.stream(chip=1)
    s.run(program, x, out=y)
    t.wait(s.record())
    t.run(other, y, out=z)
    t.synchronize()

Launches of one stream run one after the other, those of different streams side by side, unless one
waits for an event of the other. Everything else that a function does (copies, new tensors) is
*ordered*: it begins when all that was submitted before is done, and nothing later begins before it
is. So tensors for results are best made before.

A launch may depend on one other command. The device remembers the last 256 that are complete and
refuses a dependency on an older one; so what is seen to be complete is depended on no more, and
since at most a ring of commands is under way, nothing older than that is ever named. A launch that
must wait for several that still run is preceded by a fence, which holds up the other streams as
well: record a graph where streams join often.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from accelvisor.abi.commands import ANY_CHIP, Flag, fence, scheduled
from accelvisor.errors import UsageError
from accelvisor.guest.graphs.profile import Profile, profile
from accelvisor.guest.launch import Bound, Launch

if TYPE_CHECKING:
    from accelvisor.guest.function import Function
    from accelvisor.guest.program import Program
    from accelvisor.guest.tensor import Tensor

#: The ids of each queue's commands, from 1 on. By the time they come round again, 2**32 commands
#: are complete.
_ids: WeakKeyDictionary[Function, Iterator[int]] = WeakKeyDictionary()
_IDS = (1 << 32) - 1


class Point:
    """A launch with the id by which others can depend on it."""

    __slots__ = ("generation", "id", "launch")

    def __init__(self, launch: Launch, own: int, generation: int) -> None:
        self.launch = launch
        self.id = own
        self.generation = generation


class Event:
    """A point of a stream that other streams can wait for, and the program too."""

    __slots__ = ("point",)

    def __init__(self) -> None:
        self.point: Point | None = None

    def done(self) -> bool:
        """Whether what it stands for is done; an event that was never recorded is. Never waits."""
        return self.point is None or self.point.launch.done()

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until it is. Raises as :meth:`Launch.result`."""
        if self.point is not None:
            self.point.launch.result(timeout_s)


class Stream:
    """Launches one after the other, beside those of other streams.

    Args:
        chip: where they run; None for whichever is free.

    Raises:
        UsageError: there is no such chip.
    """

    def __init__(self, function: Function, chip: int | None = None) -> None:
        if chip is not None and not 0 <= chip < function.identity.chips:
            raise UsageError(
                f"chip {chip} of {function.identity.chips}", code="chip-unknown", where="stream"
            )
        self.function = function
        self.chip = chip
        self._last: Point | None = None
        self._awaited: list[Point] = []
        self._scratch: dict[bytes, tuple[Profile, list[Tensor]]] = {}

    def run(
        self, program: Program, *args: Any, out: Any = None, repeat: int = 1, **named: Any
    ) -> Launch:
        """Launch ``program``; returns at once.

        Args:
            args, named, out: as for calling it; ``launch.result()`` returns the results.

        Raises:
            UsageError: the arguments do not fit. What an earlier launch of the stream, or of what
            it waits for, failed with.
        """
        bound = self._bind(program, args, named, out)
        before = self._unfinished()
        if len(before) > 1:
            queue = self.function.queue
            queue.abandon(queue.submit(fence(0), self.function.timeout_s))
            before = []
        own = next(_ids.setdefault(self.function, count())) % _IDS + 1
        on = before[0].id if before else 0
        flags = Flag.SYNC | (Flag.CONDITIONAL if before else Flag(0))
        chip = ANY_CHIP if self.chip is None else self.chip
        launch = bound.launch(repeat, lambda entry: scheduled(entry, flags, chip, own, on))
        bound.release()  # its staging memory, as soon as it has run
        self._awaited.clear()
        self._last = Point(launch, own, self.function.generation)
        return launch

    def record(self, event: Event | None = None) -> Event:
        """Let ``event`` (a new one when None) stand for all that was launched here so far."""
        event = event or Event()
        event.point = self._last
        return event

    def wait(self, event: Event) -> None:
        """What is launched here from now on runs after what ``event`` stands for now; an event
        that was never recorded holds up nothing.
        """
        if event.point is not None:
            self._awaited.append(event.point)

    def done(self) -> bool:
        """Whether all that was launched here is done. Never waits."""
        return self._last is None or self._last.launch.done()

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until it is.

        Raises:
            DeviceFault, CommandTimeout, DeviceReset, CommandRefused.
        """
        if self._last is not None:
            self._last.launch.result(timeout_s)

    def close(self) -> None:
        """Free what it keeps for programs' temporaries, once nothing uses it. Safe twice."""
        kept, self._scratch = self._scratch, {}
        for _, tensors in kept.values():
            for tensor in tensors:
                tensor.close()

    # --- inside ----------------------------------------------------------------------------------

    def _unfinished(self) -> list[Point]:
        """What the next launch must wait for and is not complete, each once.

        Raises what a launch among them failed with.
        """
        self.function.queue.poll()
        found: dict[int, Point] = {}
        for point in (*([self._last] if self._last else []), *self._awaited):
            if point.generation != self.function.generation:
                continue  # of a context that is gone, and so is whatever ran in it
            if point.launch.done():
                point.launch.result()
            else:
                found[point.id] = point
        return list(found.values())

    def _bind(
        self, program: Program, args: Iterable[Any], named: dict[str, Any], out: Any
    ) -> Bound:
        """The program with its arguments, and with temporaries of this stream's own: two streams
        may run it at a time.
        """
        bound = program.bind(*args, out=out, **named)
        kept = self._scratch.get(program.data)
        if kept is None:
            known = profile(program.data, self.function.instructions)
            tensors = [self.function.empty(s.shape, s.dtype.label) for s in known.scratch]
            self._scratch[program.data] = kept = (known, tensors)
        known, scratch = kept
        if not scratch:
            return bound
        with bound:
            given = bound.tensors
            whole = [given[n] if n >= 0 else scratch[~n] for n in known.layout]
            handle = self.function.load(known.data)
            return Bound(self.function, handle, whole, bound.result, whole)
