"""One figure: what was measured, against what, and whether the goal holds.

A figure is only as good as what it is compared with, so a record carries the peer or limit that was
measured in the same run, and ``holds`` is computed from the ratio and the goal, never given.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """``at_least`` or ``at_most`` so much; of the ratio when there is a peer, else of the value."""

    at_least: float | None = None
    at_most: float | None = None

    def holds(self, figure: float) -> bool:
        if self.at_least is not None and figure < self.at_least:
            return False
        return self.at_most is None or figure <= self.at_most

    def __str__(self) -> str:
        low = f">= {self.at_least:g}" if self.at_least is not None else ""
        high = f"<= {self.at_most:g}" if self.at_most is not None else ""
        return " and ".join(part for part in (low, high) if part)


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one quantity: the median is quoted, with its spread."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the range between the quartiles, relative to the median."""
        if len(self.values) < 4 or not self.median:
            low, high = min(self.values), max(self.values)
        else:
            low, _, high = statistics.quantiles(self.values, n=4)
        return (high - low) / 2 / self.median if self.median else 0.0

    def map(self, function: Callable[[float], float]) -> Sample:
        return Sample(tuple(function(v) for v in self.values))


@dataclass(frozen=True, slots=True)
class Record:
    group: str
    name: str
    value: float
    unit: str
    threads: int
    spread: float
    against: str | None = None  # what the peer or limit is
    against_value: float | None = None
    ratio: float | None = None  # value / against_value
    goal: Goal | None = None
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """None when there is no goal."""
        if self.goal is None:
            return None
        return self.goal.holds(self.value if self.ratio is None else self.ratio)

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["goal"] = str(self.goal) if self.goal else None
        plain["holds"] = self.holds
        return plain


def compare(
    group: str,
    name: str,
    sample: Sample,
    unit: str,
    *,
    threads: int,
    against: tuple[str, Sample] | None = None,
    goal: Goal | None = None,
    note: str = "",
) -> Record:
    """A record of ``sample`` beside its peer; both in the same unit.

    Where each was measured in turn with the other, the ratio is the median of the pairs' ratios: a
    machine that others make slower for a while then slows both sides of a pair.
    """
    peer = against[1].median if against else None
    return Record(
        group=group,
        name=name,
        value=sample.median,
        unit=unit,
        threads=threads,
        spread=sample.spread,
        against=against[0] if against else None,
        against_value=peer,
        ratio=_ratio(sample, against[1]) if against and peer else None,
        goal=goal,
        note=note,
    )


def _ratio(sample: Sample, peer: Sample) -> float:
    if len(sample.values) != len(peer.values):
        return sample.median / peer.median
    return statistics.median(
        mine / other for mine, other in zip(sample.values, peer.values, strict=True)
    )


def table(records: Sequence[Record]) -> str:
    """The records as aligned text for people."""
    head = ("group", "figure", "value", "±", "threads", "against", "ratio", "goal", "holds")
    rows = [head, *(_row(r) for r in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if 2 <= i <= 4 or i == 6 else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    lines += [f"  note: {r.name}: {r.note}" for r in records if r.note]
    return "\n".join(lines)


def _row(r: Record) -> tuple[str, ...]:
    against = f"{r.against} = {_number(r.against_value)}" if r.against_value is not None else "-"
    return (
        r.group,
        r.name,
        f"{_number(r.value)} {r.unit}",
        f"{r.spread:.0%}",
        str(r.threads),
        against,
        f"{r.ratio:.3g}" if r.ratio is not None else "-",
        str(r.goal) if r.goal else "-",
        {True: "yes", False: "NO", None: "-"}[r.holds],
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
