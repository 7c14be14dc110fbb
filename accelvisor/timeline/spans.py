"""Spans: what ran on which queue of which chip, from when to when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelvisor.errors import DataError

QUEUES = ("compute", "transfer")
#: Of one label or name; what a device says is shown to people.
_TEXT = 80


@dataclass(frozen=True, slots=True)
class Span:
    """One program on one queue.

    Attributes:
        lane: what the queue belongs to: ``chip 0``, or a function's name and a chip.
        queue: ``compute`` or ``transfer``.
        start_ns, end_ns: on one clock for all spans that are shown together.
        client: who launched it; empty when that is plain.
        command, node: the command's cookie; the node of a graph, or -1.
        cycles, cycle_start: on the model clock.
    """

    lane: str
    queue: str
    label: str
    start_ns: int
    end_ns: int
    client: str = ""
    command: int = 0
    node: int = -1
    cycles: int = 0
    cycle_start: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans in order of their start; ``dropped``: how many older ones are gone."""

    spans: tuple[Span, ...]
    dropped: int = 0


def read(document: Mapping[str, Any], function: str = "") -> Trace:
    """A device's trace (Query.TRACE) as spans.

    Args:
        document: ``{"clock": "monotonic", "spans": [...], "dropped": n}``; see docs/guest.md.
        function: put before each lane, where several functions are shown together.

    Raises:
        DataError: it is none (code ``trace-invalid``).
    """
    try:
        dropped = _count(document.get("dropped", 0), "dropped")
        spans = [_span(row, function) for row in document["spans"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"no trace: {error}", code="trace-invalid", where="trace",
            hint="it must come from the same or a newer accelvisor: Query.TRACE as JSON",
        ) from error  # fmt: skip
    return Trace(tuple(sorted(spans, key=lambda s: (s.start_ns, s.end_ns, s.lane))), dropped)


def _span(row: Mapping[str, Any], function: str) -> Span:
    start, end = _count(row["start_ns"], "start_ns"), _count(row["end_ns"], "end_ns")
    queue = row["queue"]
    if end < start or queue not in QUEUES:
        raise ValueError(f"a span on queue {str(queue)[:_TEXT]!r} from {start} to {end}")
    return Span(
        lane=f"{function} chip {_count(row['chip'], 'chip')}".strip(),
        queue=queue,
        label=_text(row["label"]) or "unnamed",
        start_ns=start,
        end_ns=end,
        client=_text(row.get("name", "")),
        command=_count(row.get("command", 0), "command"),
        node=_count(row.get("node", -1), "node", -1),
        cycles=_count(row.get("cycles", 0), "cycles"),
        cycle_start=_count(row.get("cycle_start", 0), "cycle_start"),
    )


def _count(value: Any, name: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ValueError(f"{name} is {str(value)[:_TEXT]}")
    return value


def _text(value: Any) -> str:
    """Printable, and short: it may come from a guest."""
    if not isinstance(value, str):
        raise ValueError(f"a name is {str(value)[:_TEXT]}")
    return "".join(c if c.isprintable() else "?" for c in value[:_TEXT])
