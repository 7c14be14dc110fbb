"""Which error a failed collective ends with: the same on every rank, from what all reported.

Pure: reports in, error out. A rank that stays silent is not lost for that alone: it may have ended
the collective before it failed for others. Lost are those that somebody waits for and that are
silent, or that could go on and did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from accelvisor.collectives.messages import NOBODY, Call, Reason, damaged
from accelvisor.errors import AccelvisorError, DeadlineError, UnavailableError, UsageError


@dataclass(frozen=True, slots=True)
class Report:
    """How far one rank came: the step that it waits in, and for whom (NOBODY: it does not wait)."""

    call: Call
    sequence: int
    reason: Reason
    step: int
    waits_for: int


def judge(size: int, reports: Mapping[int, Report]) -> AccelvisorError:
    """The error of a collective of ``size`` ranks. ``reports``: at least one, by rank."""
    first = min(r.sequence for r in reports.values())
    # Whoever is further ended this one well, and waits in vain for those that did not.
    parties = {rank: r for rank, r in sorted(reports.items()) if r.sequence == first}
    if len({r.call for r in parties.values()}) > 1:
        return _mismatch(parties)
    bad = [rank for rank, r in parties.items() if r.reason is Reason.DAMAGED]
    if bad:
        return damaged(f"{_ranks(bad)} received a message that is damaged")
    return _lost(size, parties, set(reports) - set(parties))


def _mismatch(parties: Mapping[int, Report]) -> AccelvisorError:
    """Names the ranks that differ from most, and in what."""
    counts = Counter(r.call for r in parties.values())
    # Of as many the one with the lowest rank: Counter keeps the order in which it met them.
    common = max(counts, key=lambda call: counts[call])
    said = []
    for rank, report in parties.items():
        names = report.call.differences(common)
        if names:
            parts = [f"{n} {report.call.describe(n)}, not {common.describe(n)}" for n in names]
            said.append(f"rank {rank} has {'; '.join(parts)}")
    return UsageError(
        f"the ranks do not call the same {common.collective.name.lower()}: {' | '.join(said)}",
        code="collective-mismatch",
        where="collectives",
        hint="every rank must call the same collectives in the same order, with the same shape, "
        "dtype and operator",
    )


def _lost(size: int, parties: Mapping[int, Report], ahead: set[int]) -> AccelvisorError:
    steps: dict[int, int] = {}
    for report in parties.values():
        whom = report.waits_for
        if report.reason is Reason.SLOW or whom == NOBODY or whom in ahead or whom >= size:
            continue
        if whom not in parties or parties[whom].reason is Reason.SLOW:
            # It sent nothing of the first step that somebody still waits in.
            steps[whom] = min(steps.get(whom, report.step), report.step)
    if not steps:
        return DeadlineError(
            "no rank is lost, but messages did not arrive in time", code="collective-deadline",
            where="collectives", hint="give a longer deadline, or look at the links",
        )  # fmt: skip
    said = [
        f"rank {rank} ({f'its last step was {step - 1}' if step else 'it never began'})"
        for rank, step in sorted(steps.items())
    ]
    names = [r.call.collective.name.lower() for r in parties.values()]
    return UnavailableError(
        f"{names[0]} of {size} ranks lost {', '.join(said)}",
        code="collective-rank-lost",
        where="collectives",
        hint="look at that rank; the others can go on with a new communicator without it",
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
