"""Work in steps: how a long command, a scrub or a closing queue lets others run in between.

A step is a generator's run from one ``yield`` to the next, and takes milliseconds. It yields None
when it could go on at once, or something to wait for, which is asked before it runs again; what it
has reached stays in the generator, and in the cursor as far as another worker must know it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

T = TypeVar("T")


class Waiting(Protocol):
    """What a paused generator waits for. ``writes``: the client may still be writing for it."""

    @property
    def writes(self) -> bool: ...

    def ready(self) -> bool: ...


@runtime_checkable
class Timed(Waiting, Protocol):
    """One that wakes nobody: it should be asked again after ``left_s`` seconds."""

    def left_s(self) -> float: ...


Pause: TypeAlias = Waiting | None
Pauses: TypeAlias = Generator[Pause, None, T]


def marking(pauses: Pauses[T], mark: Callable[[], None]) -> Pauses[T]:
    """The same steps, with ``mark`` called after each of them, before anybody else runs."""
    try:
        while True:
            try:
                pause = next(pauses)
            except StopIteration as stop:
                result: T = stop.value
                return result
            mark()
            yield pause
    finally:
        mark()


def attentively(steps: Pauses[T], attention: Callable[[], bool]) -> Pauses[T]:
    """The same steps with a pause between them only when something else wants the engine, or there
    is a wait.
    """
    while True:
        try:
            pause = next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if pause is not None or attention():
            yield pause


def finish(pauses: Pauses[T]) -> T:
    """Run steps that never wait for anybody to their end; what they return."""
    while True:
        try:
            next(pauses)
        except StopIteration as stop:
            result: T = stop.value
            return result
