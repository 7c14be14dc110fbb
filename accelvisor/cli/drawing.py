"""Progress of a migration: two bars with rich on a terminal, plain lines everywhere else.

Plain lines are for logs and for readers that a moving bar would disturb: one when the phase
changes, and one now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from accelvisor.cli.render import duration, size

#: Between two plain lines of one phase (seconds).
_EVERY_S = 2.0


class Drawing(Protocol):
    """What shows progress; nothing is left of it on the screen after :meth:`close`."""

    def update(self, progress: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Lines:
    """One line at a time."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._last = ("", 0.0)

    def update(self, progress: Mapping[str, Any]) -> None:
        phase, when = self._last
        now = self._clock()
        if progress["phase"] == phase and now < when + _EVERY_S:
            return
        self._last = (progress["phase"], now)
        head = f"{progress['seconds']:6.1f} s  {progress['phase']:<12}"
        self._out.write(f"{head}  {facts(progress)}".rstrip() + "\n")
        self._out.flush()

    def close(self) -> None:
        """Nothing to take away."""


class Bars:
    """Two bars: what the functions have to send, and the guest's memory."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[words]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._functions = self._bars.add_task("functions", total=None, words="")
        self._memory = self._bars.add_task("memory", total=None, words="")
        self._bars.start()

    def update(self, progress: Mapping[str, Any]) -> None:
        functions = [progress["phase"]]
        if progress["round"]:
            functions.append(f"round {progress['round']}")
        if progress["rate"]:
            functions.append(f"{size(int(progress['rate']))}/s")
        if progress["throttle"] < 100:
            functions.append(f"slowed to {progress['throttle']} %")
        if progress["time_left"] is not None:
            functions.append(f"about {duration(progress['time_left'])} left")
        self._bars.update(
            self._functions,
            total=progress["state_bytes"] or None,
            completed=min(progress["copied_bytes"], progress["state_bytes"]),
            words=", ".join(functions),
        )
        memory = f"pass {progress['memory_round']}" if progress["memory_round"] else ""
        self._bars.update(
            self._memory,
            total=progress["memory_total"] or None,
            completed=progress["memory_done"],
            words=f"{size(progress['memory_total'])} {memory}".strip(),
        )

    def close(self) -> None:
        self._bars.stop()


def choose(out: TextIO | None = None) -> Drawing:
    """Bars where somebody sees them and rich is there."""
    stream = sys.stderr if out is None else out
    if stream.isatty():
        try:
            return Bars()
        except ImportError:
            pass
    return Lines(stream)


def facts(progress: Mapping[str, Any]) -> str:
    """What a plain line says."""
    words = []
    if progress["state_bytes"]:
        copied = min(progress["copied_bytes"], progress["state_bytes"])
        words.append(f"functions {size(copied)} of {size(progress['state_bytes'])}")
    if progress["round"]:
        words.append(f"round {progress['round']}")
    if progress["rate"]:
        words.append(f"{size(int(progress['rate']))}/s")
    if progress["dirty_rate"]:
        words.append(f"{size(int(progress['dirty_rate']))}/s change")
    if progress["throttle"] < 100:
        words.append(f"slowed to {progress['throttle']} %")
    if progress["memory_total"]:
        words.append(f"memory {size(progress['memory_done'])} of {size(progress['memory_total'])}")
    if progress["time_left"] is not None:
        words.append(f"about {duration(progress['time_left'])} left")
    return ", ".join(words)
