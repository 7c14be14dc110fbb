"""What is said, signed, of a function's resources when they are clean: the record that whoever is
given them asks for. Documents only; who scrubs is the function's process, who signs the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from accelvisor.isolation.resources import Placement

#: The payload type under which a record is signed.
TYPE = "application/vnd.accelvisor.scrub"
VERSION = 1


class How(StrEnum):
    """By what the resources became clean."""

    NEW = "new-process"  # memory, registers, queues and caches were made anew with the process
    RENEWED = "renewed"  # all of them replaced between two owners, and the worker with them
    RESIZED = "resized"  # the memory that went was given back, and read as zero
    ENDED = "ended"  # the process is gone, and with it everything it held


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Attributes:
        host, boot: where and in which boot of it.
        epoch: of the function from which on it holds.
        placement: what is clean.
        nbytes: of memory that was scrubbed.
        tenant: UUID of the domain that had it before; empty for none.
        evidence: what was read back, each of which must be zero or false.
    """

    host: str
    boot: str
    function: str
    epoch: int
    how: How
    placement: Placement
    nbytes: int
    tenant: str
    time_ns: int
    evidence: tuple[tuple[str, int], ...] = ()

    def document(self) -> dict[str, Any]:
        """What is signed: text, numbers, lists and maps of them."""
        place = self.placement
        return {
            "version": VERSION,
            "host": self.host,
            "boot": self.boot,
            "function": self.function,
            "epoch": self.epoch,
            "how": self.how.value,
            "card": place.card,
            "cores": [list(pair) for pair in sorted(place.pairs())],
            "ranges": [[item.bank, item.start, item.nbytes] for item in place.ranges],
            "queues": list(place.queues),
            "vector": max(0, place.vector),
            "bytes": self.nbytes,
            "tenant": self.tenant,
            "time_ns": self.time_ns,
            "evidence": dict(self.evidence),
        }


def unclean(evidence: tuple[tuple[str, int], ...]) -> list[str]:
    """What was read back and should not have been there."""
    return [f"{name}: {value}" for name, value in evidence if value]


def covers(document: dict[str, Any], host: str, function: str, epoch: int) -> bool:
    """Whether a record, verified, says that ``function`` is clean at ``epoch`` on ``host``."""
    return (
        document.get("version") == VERSION
        and document.get("host") == host
        and document.get("function") == function
        and document.get("epoch") == epoch
        and document.get("how") in (How.NEW.value, How.RENEWED.value)
        and isinstance(document.get("evidence"), dict)
        and not any(document["evidence"].values())
    )
