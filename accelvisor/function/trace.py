"""Who ran when: the last spans of every engine, for people. Not part of the state: a worker's
successor begins with none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from accelvisor.limits import LIMITS

#: Spans that are kept: some seconds of a busy function, half a megabyte at most.
_KEPT = 4096
#: What a span takes in an answer at most, as JSON.
_SPAN_BYTES = 320


class Span(NamedTuple):
    """A program on an engine. Times in nanoseconds of the monotonic clock, cycles on the model's,
    counted from where its queue's clock was when the command began; ``node`` is -1 outside of a
    graph.
    """

    context: int
    engine: int
    label: str
    command: int
    node: int
    start_ns: int
    end_ns: int
    cycles: int
    cycle_start: int


class Trace:
    """A ring of spans. Any thread adds to it."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self._spans: deque[Span] = deque(maxlen=_KEPT)
        self._count = 0

    def add(self, span: Span) -> None:
        """One more; the oldest is forgotten."""
        self._count += 1
        self._spans.append(span)

    def forget(self, context: int) -> None:
        """The context is another's from here on."""
        kept = [span for span in tuple(self._spans) if span.context != context]
        self._spans.clear()
        self._spans.extend(kept)

    def describe(
        self, names: dict[int, str], context: int | None = None, room: int = LIMITS.query_bytes
    ) -> dict[str, Any]:
        """As JSON of at most ``room`` bytes: the last spans of one context, or of all; ``names`` by
        context.
        """
        spans = [span for span in tuple(self._spans) if context is None or span.context == context]
        most = room // _SPAN_BYTES - 1
        dropped = max(0, self._count - _KEPT) + max(0, len(spans) - most)
        spans = spans[-most:]
        return {
            "clock": "monotonic",
            "dropped": dropped,
            "spans": [
                {
                    "context": span.context,
                    "name": names.get(span.context, "")[:48],
                    "chip": span.engine // 2,
                    "queue": "transfer" if span.engine % 2 else "compute",
                    "label": span.label,
                    "command": span.command,
                    "node": span.node,
                    "start_ns": span.start_ns,
                    "end_ns": span.end_ns,
                    "cycles": span.cycles,
                    "cycle_start": span.cycle_start,
                }
                for span in spans
            ],
        }
