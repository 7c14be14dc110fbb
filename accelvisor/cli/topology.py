"""``accelctl topology``: cards as grids of chips, with the links and whose they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelvisor.cli import files, topology_text
from accelvisor.cli.commands import Session


def topology(session: Session) -> int:
    options = session.options
    reply = session.call("Topology", card=options.card)
    if options.svg:
        from accelvisor.cli import topology_picture

        files.write(options.svg, topology_picture.svg(reply["cards"]))
        if not options.json:
            return 0
    session.show(reply, lambda: _text(reply["cards"]))
    return 0


def _text(cards: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n\n".join(map(topology_text.draw, cards)) or "no cards are configured"
