"""Spans in the trace event format that chrome://tracing and ui.perfetto.dev open.

After Google's "Trace Event Format": complete events (``ph: X``) with ``ts`` and ``dur`` in
microseconds, and metadata events (``M``) that name processes and threads. A lane is a process, each
of its queues a thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelvisor.timeline.spans import QUEUES, Span


def chrome(spans: Iterable[Span], dropped: int = 0) -> dict[str, Any]:
    """A JSON-able trace. Its first span begins at 0; ``otherData.start_ns`` says when that was.

    The model clock is a second set of processes, one for each client, in which a microsecond stands
    for a cycle: clients have clocks of their own, and none is the clock of the wall.
    """
    rows = list(spans)
    zero = min((s.start_ns for s in rows), default=0)
    tracks = _Tracks()
    events = [
        _event(s, tracks.of(s.lane, s.queue), (s.start_ns - zero) / 1000,
               (s.end_ns - s.start_ns) / 1000)
        for s in rows
    ]  # fmt: skip
    for s in rows:
        if s.cycles:
            name = f"model clock, {s.client}" if s.client else "model clock"
            where = tracks.of(name, f"{s.lane} {s.queue}")
            events.append(_event(s, where, float(s.cycle_start), float(s.cycles)))
    return {
        "traceEvents": tracks.names() + events,
        "displayTimeUnit": "ms",
        "otherData": {"start_ns": zero, "dropped": dropped},
    }


class _Tracks:
    """Numbers for lanes and queues, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {}

    def of(self, lane: str, queue: str) -> tuple[int, int]:
        """(pid, tid), from 1 on; a lane's own queues always have the same numbers."""
        if lane not in self._numbers:
            self._numbers[lane] = {}
        threads = self._numbers[lane]
        if queue not in threads:
            known = QUEUES.index(queue) + 1 if queue in QUEUES else 0
            threads[queue] = known or max([len(QUEUES), *threads.values()]) + 1
        return list(self._numbers).index(lane) + 1, threads[queue]

    def names(self) -> list[dict[str, Any]]:
        found = []
        for pid, (lane, threads) in enumerate(self._numbers.items(), 1):
            found.append(_named("process_name", pid, 0, lane))
            found += [_named("thread_name", pid, tid, queue) for queue, tid in threads.items()]
        return found


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(span: Span, where: tuple[int, int], start: float, length: float) -> dict[str, Any]:
    extra: dict[str, Any] = {"command": span.command, "cycles": span.cycles}
    if span.node >= 0:
        extra["node"] = span.node
    if span.client:
        extra["client"] = span.client
    return {
        "ph": "X", "name": span.label, "cat": span.queue, "pid": where[0], "tid": where[1],
        "ts": start, "dur": length, "args": extra,
    }  # fmt: skip
