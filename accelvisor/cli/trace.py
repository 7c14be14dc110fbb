"""``accelctl trace``: what ran when on the chips of a function, as a table, a Chrome trace or a
picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from accelvisor.cli import files, render
from accelvisor.cli.commands import Session

if TYPE_CHECKING:
    from accelvisor.timeline import Span, Trace


def trace(session: Session) -> int:
    from accelvisor import timeline  # numpy: only here

    options = session.options
    name = options.function
    reply = session.call("Trace", function=name)
    if options.json is True:
        print(json.dumps(reply, indent=2))
    found = timeline.read(reply["trace"])
    if isinstance(options.json, str):
        made = timeline.chrome(found.spans, found.dropped)
        files.write(options.json, json.dumps(made, indent=1) + "\n")
    if options.svg:
        files.write(options.svg, timeline.svg(found.spans, name))
    if options.png:
        files.write(options.png, timeline.png(found.spans, name))
    if not (options.json or options.svg or options.png):
        print(table(found))
    return 0


def table(found: Trace) -> str:
    """How long each queue was busy, and with how much."""
    if not found.spans:
        return "nothing ran on it lately"
    first = min(span.start_ns for span in found.spans)
    last = max(span.end_ns for span in found.spans)
    whole = max(1, last - first)
    rows = []
    for lane, queue in sorted({(span.lane, span.queue) for span in found.spans}, key=_order):
        mine = [span for span in found.spans if (span.lane, span.queue) == (lane, queue)]
        busy = covered(mine)
        rows.append(
            {
                "CHIP": lane.removeprefix("chip "),
                "QUEUE": queue,
                "SPANS": str(len(mine)),
                "BUSY": render.duration(busy / 1e9),
                "OF": f"{100 * busy / whole:.0f} %",
                "MODEL CYCLES": str(sum(span.cycles for span in mine)),
                "MOST OF IT": _most(mine),
            }
        )
    gone = f", {found.dropped} older ones are gone" if found.dropped else ""
    tail = f"{len(found.spans)} spans over {render.duration(whole / 1e9)}{gone}"
    return f"{render.table(rows, '')}\n\n{tail}"


def covered(spans: Iterable[Span]) -> int:
    """Nanoseconds in which at least one of them was under way."""
    total, until = 0, 0
    for start, end in sorted((span.start_ns, span.end_ns) for span in spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def _most(spans: Sequence[Span]) -> str:
    """The label that took longest."""
    times: dict[str, int] = {}
    for span in spans:
        times[span.label] = times.get(span.label, 0) + span.end_ns - span.start_ns
    return max(times, key=lambda label: (times[label], label))


def _order(key: tuple[str, str]) -> tuple[int, str]:
    lane, queue = key
    return int(lane.removeprefix("chip ")), queue
