"""What a function's process is told of the function (docs/contracts.md, 2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from accelvisor.daemon.paths import Paths, peer
from accelvisor.daemon.store import Function
from accelvisor.isolation import linking
from accelvisor.isolation.resources import Card
from accelvisor.isolation.segments import lay


def specification(
    function: Function, cards: Sequence[Card], paths: Paths, socket_group: str
) -> dict[str, object]:
    """The fields of ``spec.json``.

    Args:
        cards: as they are configured; of a function whose card is not there any more the links are
            not told.
    """
    files = paths.function(function.uuid)
    made: dict[str, object] = {
        "uuid": function.uuid,
        "profile": function.profile,
        "cores": function.cores,
        "chips": function.chips,
        "memory_bytes": function.memory_bytes,
        "window_bytes": function.window_bytes,
        "queues": function.queues,
        "ring_entries": function.ring_entries,
        "vfio_socket": str(files.vfio_socket),
        "holder_socket": str(files.holder_socket),
        "control_socket": str(files.control_socket),
        "socket_group": socket_group,
        "peer": peer(function.domain_uuid) or "",
        "keeper": os.geteuid(),
        "epoch": function.epoch,
        "segments": [asdict(item) for item in lay(function.placement.ranges)],
    }
    card = next((item for item in cards if item.name == function.card), None)
    if card is not None and len(function.placement.cores) == function.chips:
        made["fabric"] = _fabric(function, card)
    return made


def shape(function: Function, cards: Sequence[Card]) -> tuple[tuple[int, int], ...]:
    """Which of its chips links join, by the function's own numbers: what a host that it goes to has
    to give it, since its programs name these.
    """
    card = next((item for item in cards if item.name == function.card), None)
    laid = [] if card is None else linking.laid(card, function.placement)
    return tuple(sorted({(min(one, other), max(one, other)) for _, one, other in laid}))


def _fabric(function: Function, card: Card) -> dict[str, object]:
    placement = function.placement
    return {
        "chips": [
            [card.board(chip), chip, len(cores)] for chip, cores in placement.cores.items()
        ],
        "links": [
            [number, one, other, card.kind(number)]
            for number, one, other in linking.laid(card, placement)
        ],
    }
