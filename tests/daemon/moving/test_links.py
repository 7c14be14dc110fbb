"""A function that has links goes only where its programs find the same ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from accelvisor.daemon import specifying
from accelvisor.daemon.card_config import CardConfig, ProfileConfig, Size, card_of
from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.moving import fit
from accelvisor.daemon.store import Function
from accelvisor.errors import ProtocolError
from accelvisor.isolation.resources import Placement
from accelvisor.limits import MIB
from accelvisor.migration import messages as wire
from tests.daemon.moving.pair import pair

UUID = "0b36e1ad-94f1-4e5c-8a5e-0e5a6a7f1a01"
SQUARE = card_of("card0", CardConfig(rows=2, columns=2))


def function() -> Function:
    place = Placement("card0", dict.fromkeys(range(4), (0,)), links=(0, 1, 2, 3))
    return Function(UUID, "a", "ring", place, 4, 4, MIB, MIB, 1, 16, State.READY, 0.0)


def test_the_other_host_is_told_which_chips_are_joined() -> None:
    need = fit.need(function(), [SQUARE])
    assert need.links == ((0, 1), (0, 2), (1, 3), (2, 3))
    asked = fit.AskFit(UUID, (need,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=fit.AskFit) == asked
    plain = replace(function(), placement=replace(function().placement, links=()))
    assert b"links" not in msgspec.msgpack.encode(fit.need(plain, [SQUARE])), "for older hosts"
    assert specifying.shape(function(), []) == ()


@pytest.mark.parametrize("links", [((0, 16),), ((-1, 0),), ((0, 1),) * 257, ((0, 1, 2),)])
def test_an_offer_with_impossible_links_is_refused(links) -> None:
    offered = wire.Offered(UUID, 1, "p", 4, 4, 1, 16, MIB, MIB, 1, 1, links=links)
    message = wire.Offer(bytes(16), "source", (offered,), (b"x",))
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(message))


@pytest.mark.parametrize(
    ("card", "room"),
    [({"chips": 4}, True), ({"columns": 3, "rows": 2}, True), ({"chips": 6}, False)],
)
def test_a_host_says_whether_it_could_join_them(card, room) -> None:
    async def body() -> None:
        async with pair() as two:
            functions = two.daemon_b._moving.services.functions
            two.b.config = msgspec.structs.replace(
                two.b.config, cards={"card0": CardConfig(**card)},
                profiles={"ring": ProfileConfig(memory=Size(MIB))},
            )  # fmt: skip
            functions.configure(two.b.config)
            moving = two.daemon_a._moving
            host = moving.keys.peers()[0]
            asked = fit.AskFit(UUID, (fit.need(function(), [SQUARE]),))
            said, _ = await moving.moves.neighbours.fit(host, asked)
            assert (not said.missing) == room
            assert room or "with the links that it has" in said.missing[0]

    asyncio.run(body())
