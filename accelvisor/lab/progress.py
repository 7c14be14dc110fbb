"""Progress lines: what is being done, for how long, and how far where that is known.

On a terminal the current line is rewritten; elsewhere (CI, a log) a step prints when it begins,
when it ends, and now and then in between, so that a long build never looks dead.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from accelvisor.lab.process import failure, kill_group

# Without a terminal one line of progress this often is enough to show life.
_LOG_EVERY_S = 15.0
_TICK_S = 0.2

Percent = Callable[[str], float | None]


class Step:
    """One thing being done; told about progress, it draws it."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self.what = what
        self._began = time.monotonic()
        self._drawn = self._began
        self.percent: float | None = None
        self.detail = ""

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._began

    def tick(self, *, percent: float | None = None, detail: str | None = None) -> None:
        """Say how far it is; also called without news, so that the seconds move."""
        self.percent = percent if percent is not None else self.percent
        self.detail = detail if detail is not None else self.detail
        now = time.monotonic()
        every = _TICK_S if self._progress.tty else _LOG_EVERY_S
        if now - self._drawn >= every:
            self._drawn = now
            self._progress.draw(self, done=False)


class Progress:
    """Where steps are drawn. ``quiet`` draws nothing (tests)."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self.tty = not quiet and self._stream.isatty()

    @contextmanager
    def step(self, what: str) -> Iterator[Step]:
        """Draw a step around a block; a failure is marked as such and passes on."""
        step = Step(self, what)
        self.draw(step, done=False)
        try:
            yield step
        except BaseException:
            self.draw(step, done=True, mark="failed")
            raise
        self.draw(step, done=True)

    def say(self, text: str) -> None:
        """A plain line."""
        if not self._quiet:
            print(text, file=self._stream, flush=True)

    def draw(self, step: Step, *, done: bool, mark: str = "done") -> None:
        """Draw one step's line as it stands."""
        if self._quiet:
            return
        share = "" if step.percent is None or done else f" {step.percent:3.0f} %"
        detail = f"  {step.detail}" if step.detail and not done else ""
        state = f"  {mark}" if done else f"{share}{detail}"
        line = f"[{step.seconds:6.1f} s] {step.what}{state}"
        if self.tty:
            end = "\n" if done else ""
            self._stream.write(f"\r\x1b[K{line[:118]}{end}")
            self._stream.flush()
        else:
            print(line, file=self._stream, flush=True)


def run_logged(
    argv: Sequence[str],
    *,
    step: Step,
    log: Path,
    env: Mapping[str, str] | None = None,
    percent: Percent | None = None,
) -> None:
    """Run a long command, its output going to a log file and its last line to the progress line."""
    tail: list[str] = []
    with log.open("ab") as sink:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
        try:
            for line in _lines(process, step):
                sink.write(line.encode() + b"\n")
                tail = [*tail[-40:], line]
                share = percent(line) if percent is not None else None
                step.tick(percent=share, detail=line if share is None else None)
        finally:
            if process.poll() is None:
                kill_group(process)
    if process.returncode != 0:
        error = failure(argv, process.returncode, "\n".join(tail).encode(), where=step.what)
        error.hint = f"the whole output is in {log}"
        raise error


def _lines(process: subprocess.Popen[bytes], step: Step) -> Iterator[str]:
    """Lines of a child's output until it has ended, ticking the step while it is silent."""
    stream = process.stdout
    if stream is None:
        return
    rest = b""
    with stream, selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(_TICK_S):
                step.tick()
                continue
            # What is there, and no more: reading by lines would block the ticking.
            block = os.read(stream.fileno(), 65536)
            if not block:
                break
            *whole, rest = (rest + block).split(b"\n")
            yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
    process.wait()


def apt_percent(line: str) -> float | None:
    """The share that apt reports on its status descriptor."""
    found = re.match(r"(?:pm|dl)status:[^:]*:([0-9.]+):", line)
    return float(found[1]) if found else None


def counted(prefix: str, expected: int) -> Percent:
    """The share by counting lines with a prefix, for tools that only list what they do."""
    seen = 0

    def percent(line: str) -> float | None:
        nonlocal seen
        if line.startswith(prefix):
            seen += 1
            return min(99.0, 100.0 * seen / expected)
        return None

    return percent
