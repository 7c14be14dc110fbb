"""A card as the operator sees it: its chips and links, whose they are, and what the processes of
those that have them say of the links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from accelvisor.daemon import function_link, wire
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import ALIVE
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError
from accelvisor.isolation.placing import Free
from accelvisor.isolation.resources import Card

#: A process that is busy for longer does not say how its links are.
ASKED_S = 2.0
STATES = frozenset({"down", "training", "up", "draining", "error"})
#: What the interface carries of what a process said.
_MOST_BYTES = 1 << 53


async def cards(functions: Functions, wanted: Sequence[Card]) -> list[dict[str, Any]]:
    """As the Admin interface carries them; each function that has links is asked once."""
    names = {item.name for item in wanted}
    here = [item for item in functions.registry.all() if item.card in names]
    told = await asyncio.gather(*(_ask(functions, item) for item in here))
    live = {item.uuid: links for item, links in zip(here, told, strict=True)}
    return [_card(item, [f for f in here if f.card == item.name], live) for item in wanted]


async def _ask(functions: Functions, function: Function) -> Mapping[int, tuple[str, int]]:
    """State and bytes of its links, by number: nothing of a process that cannot say, or does not
    know the question.
    """
    if not function.placement.links or function.state not in ALIVE:
        return {}
    path = functions.world.paths.function(function.uuid).control_socket
    try:
        reply = await function_link.call(path, "fabric", deadline_s=ASKED_S)
    except AccelvisorError:
        return {}
    return heard(reply, function.placement.links)


def heard(reply: Mapping[str, Any], own: Sequence[int]) -> Mapping[int, tuple[str, int]]:
    """What a function's process says of links that are its own; what makes no sense is left out:
    the process may be its guest's by now.
    """
    rows = reply.get("links")
    found: dict[int, tuple[str, int]] = {}
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, dict):
            continue
        number, state, count = row.get("number"), row.get("state"), row.get("bytes")
        if type(number) is not int or type(count) is not int or not 0 <= count <= _MOST_BYTES:
            continue
        if number in own and isinstance(state, str) and state in STATES:
            found[number] = (state, count)
    return found


def _card(
    card: Card, functions: Sequence[Function], live: Mapping[str, Mapping[int, tuple[str, int]]]
) -> dict[str, Any]:
    free = Free(card, [item.placement for item in functions]).cores
    owners = {number: item for item in functions for number in item.placement.links}
    return {
        "card": card.name,
        "boards": card.boards,
        "rows": card.rows,
        "columns": card.columns,
        "chips": [_chip(card, chip, functions, len(free[chip])) for chip in range(card.chips)],
        "links": [_link(card, n, owners.get(n), live) for n in range(len(card.links))],
    }


def _chip(card: Card, chip: int, functions: Sequence[Function], free: int) -> dict[str, Any]:
    row, column = divmod(chip, card.columns)
    return {
        "chip": chip,
        "board": card.board(chip),
        "row": row % card.rows,
        "column": column,
        "mode": wire.name(card.mode(chip)),
        "cores": card.cores_per_chip,
        "cores_free": free,
        "holders": [
            {"function": item.uuid, "name": item.name, "cores": list(item.placement.cores[chip])}
            for item in functions
            if item.placement.cores.get(chip)
        ],
    }


def _link(
    card: Card,
    number: int,
    owner: Function | None,
    live: Mapping[str, Mapping[int, tuple[str, int]]],
) -> dict[str, Any]:
    uuid = None if owner is None else owner.uuid
    state, count = live.get(uuid or "", {}).get(number, (None, None))
    return {
        "link": wire.link(card, number),
        "function": uuid,
        "name": None if owner is None else owner.name,
        "state": state,
        "bytes": count,
    }
