"""Whether a VM's functions would fit on a host: what the other one is asked before a move, and what
it answers. Nothing is reserved by that; a move asks again and is then certain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

import accelvisor
from accelvisor.daemon import specifying
from accelvisor.function.moving import firmware
from accelvisor.isolation import placing
from accelvisor.isolation.resources import Card, Profile
from accelvisor.limits import LIMITS
from accelvisor.migration.messages import Shape

if TYPE_CHECKING:
    from accelvisor.daemon.moving.services import Services
    from accelvisor.daemon.store import Function

Text = Annotated[str, Meta(max_length=LIMITS.migration_text_chars)]
Count = Annotated[int, Meta(ge=0, le=(1 << 53))]


class Need(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one function takes."""

    uuid: Text
    name: Text
    profile: Text
    cores: Annotated[int, Meta(ge=1, le=1 << 16)]
    chips: Annotated[int, Meta(ge=1, le=1 << 16)]
    memory_bytes: Count
    window_bytes: Count
    queues: Annotated[int, Meta(ge=1, le=LIMITS.queues)]
    ring_entries: Annotated[int, Meta(ge=1, le=LIMITS.ring_entries)]
    links: Shape = ()


class AskFit(msgspec.Struct, frozen=True, tag="fit", forbid_unknown_fields=True):
    """Would these functions fit there? ``filler`` only fills the line, whose speed is measured."""

    domain: Text
    functions: Annotated[tuple[Need, ...], Meta(max_length=LIMITS.migration_functions)]
    filler: bytes = b""


class Fit(msgspec.Struct, frozen=True):
    """The answer. A newer host may say more.

    Attributes:
        version, firmware, arbiter: of that host, to be compared with ours.
        missing: why there is no room, a reason for each card; empty when there is.
        present: functions that it has already, by UUID.
        names: names of functions that other functions there have.
        known: whether it has functions of a domain of that UUID.
    """

    version: Text
    firmware: Annotated[dict[Text, Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)]
    arbiter: Text
    missing: Annotated[tuple[Text, ...], Meta(max_length=LIMITS.cards + 1)] = ()
    present: Annotated[tuple[Text, ...], Meta(max_length=LIMITS.migration_functions)] = ()
    names: Annotated[tuple[Text, ...], Meta(max_length=LIMITS.migration_functions)] = ()
    known: bool = False


def need(function: Function, cards: Sequence[Card]) -> Need:
    """What a function of this host would take elsewhere."""
    return Need(
        function.uuid,
        function.name,
        function.profile,
        function.cores,
        function.chips,
        function.memory_bytes,
        function.window_bytes,
        function.queues,
        function.ring_entries,
        specifying.shape(function, cards),
    )


async def answer(services: Services, asked: AskFit) -> bytes:
    """To a host that is trusted; it learns what a refused move would tell it, too."""
    made = await asyncio.to_thread(firmware)
    registry = services.functions.registry
    here = {item.uuid: item for item in registry.all()}
    wanted = {item.uuid for item in asked.functions}
    taken = {item.name for item in here.values() if item.uuid not in wanted}
    fit = Fit(
        version=accelvisor.__version__,
        firmware=made,
        arbiter=services.owners.arbiter,
        missing=tuple(_missing(services, asked.functions)),
        present=tuple(item.uuid for item in asked.functions if item.uuid in here),
        names=tuple(
            item.name for item in asked.functions if item.name != item.uuid and item.name in taken
        ),
        known=any(item.domain_uuid == asked.domain for item in here.values()),
    )
    return msgspec.msgpack.encode(fit)


def _missing(services: Services, wanted: Sequence[Need]) -> list[str]:
    """All of them, placed one after the other beside what is here."""
    held = list(services.functions.registry.held())
    for item in wanted:
        if item.cores % item.chips:
            return [f"{item.cores} cores do not spread evenly over {item.chips} chips"]
        profile = Profile(
            item.profile, item.cores, item.chips, item.memory_bytes, item.window_bytes,
            item.queues, item.ring_entries, shape=item.links,
        )  # fmt: skip
        functions = services.functions
        plan = placing.plan(
            functions.cards, held, profile, cpus=functions.cpus, static=functions.static()
        )
        if plan.placement is None:
            return [str(reason)[: LIMITS.migration_text_chars] for reason in plan.reasons]
        held.append(plan.placement)
    return []
