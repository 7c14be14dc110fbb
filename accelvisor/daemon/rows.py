"""How placements and changes of them lie in the store: JSON, read back with care."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelvisor.isolation.planner import Verb
from accelvisor.isolation.resources import Placement, Range


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a function's shape that has begun: what it was, and what it is to be.

    Attributes:
        epoch: that the function has once the change is made.
    """

    function: str
    verb: Verb
    epoch: int
    before: Placement
    after: Placement


def cores_to_json(placement: Placement) -> str:
    return json.dumps({str(chip): list(cores) for chip, cores in placement.cores.items()})


def rest_to_json(placement: Placement) -> str:
    """All of a placement but its card and its cores."""
    return json.dumps(
        {
            "ranges": [[item.bank, item.start, item.nbytes] for item in placement.ranges],
            "queues": list(placement.queues),
            "vector": placement.vector,
            "cpus": list(placement.cpus),
            "links": list(placement.links),
        }
    )


def placement(card: str, cores: str, rest: str) -> Placement:
    """Raises ValueError, TypeError, AttributeError, KeyError for what is none."""
    by_chip = {int(chip): tuple(map(int, ids)) for chip, ids in json.loads(cores).items()}
    said: Mapping[str, Any] = json.loads(rest) if rest else {}
    return Placement(
        card,
        by_chip,
        tuple(Range(*map(int, item)) for item in said.get("ranges", ())),
        tuple(map(int, said.get("queues", ()))),
        int(said.get("vector", -1)),
        tuple(map(int, said.get("cpus", ()))),
        tuple(map(int, said.get("links", ()))),  # before links were held there were none
    )


def change_to_json(change: Change) -> str:
    return json.dumps(
        {
            "verb": change.verb.value,
            "epoch": change.epoch,
            "before": _whole(change.before),
            "after": _whole(change.after),
        }
    )


def change(function: str, text: str) -> Change:
    """Raises as :func:`placement`."""
    said = json.loads(text)
    return Change(
        function,
        Verb(said["verb"]),
        int(said["epoch"]),
        placement(*said["before"]),
        placement(*said["after"]),
    )


def _whole(item: Placement) -> list[str]:
    return [item.card, cores_to_json(item), rest_to_json(item)]
