"""The function's links between its chips, as its guest switches and uses them.

A link's record in the state says whether it is up and what it has carried. A transfer asks before
its first tile and reports after its last; what has crossed by then lies in the memory of the chip
that it went to. So a function that is frozen, saved or moved has nothing on its way. A link that is
switched off while transfers use it drains: they end, no other begins, then it is down.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from accelvisor.abi.commands import ALL_LINKS
from accelvisor.abi.status import CommandStatus
from accelvisor.fabric.links import FLIT_BYTES, LINK_TABLE, TRAINING_CYCLES, LinkEvent, LinkState
from accelvisor.function import state as s
from accelvisor.function.fabric_spec import FabricSpec
from accelvisor.function.objects import Refused
from accelvisor.function.pauses import Pauses
from accelvisor.function.state import State

#: Of the numbers in a link's record.
NAMES = tuple(state.name.lower() for state in LinkState)


class _Quiet:
    """No transfer uses these links any more."""

    writes = False

    def __init__(self, links: Links, numbers: Sequence[int]) -> None:
        self._links = links
        self._numbers = numbers

    def ready(self) -> bool:
        """Whether they are free."""
        return not any(self._links.users(number) for number in self._numbers)


class Links:
    """Links by their place in the specification. Transfers come from any engine's thread."""

    def __init__(self, state: State, fabric: FabricSpec) -> None:
        self._u64 = state.u64
        self._fabric = fabric
        self._lock = threading.Lock()
        self._users = [0] * len(fabric.links)
        self._ways: dict[tuple[int, int], tuple[int, ...]] = {}
        for number, link in enumerate(fabric.links):
            for pair in ((link.one, link.other), (link.other, link.one)):
                self._ways[pair] = (*self._ways.get(pair, ()), number)

    # --- transfers (launch.Carrier) ---------------------------------------------------------------

    def begin(self, source: int, target: int) -> None:
        """A transfer begins, or goes on.

        Raises:
            Refused: LINK_DOWN, there is no way between the chips, or a hop of it is not up.
        """
        way = self._ways.get((source, target))
        with self._lock:
            if way is None:
                raise Refused(
                    CommandStatus.LINK_DOWN,
                    f"no link of the function joins its chips {source} and {target}",
                )
            for number in way:
                state = self._u64[s.link_word(number)]
                if LINK_TABLE[LinkState(state), LinkEvent.SEND] is not LinkState.UP:
                    raise Refused(
                        CommandStatus.LINK_DOWN,
                        f"link {number} between the chips {source} and {target} is {NAMES[state]}",
                    )
            for number in way:
                self._users[number] += 1

    def end(self, source: int, target: int, nbytes: int) -> None:
        """A transfer that began is complete with ``nbytes``, or interrupted with none."""
        with self._lock:
            for number in self._ways[source, target]:
                word = s.link_word(number)
                self._users[number] -= 1
                if nbytes:
                    self._u64[word + s.L_FLITS] += -(-nbytes // FLIT_BYTES)
                    self._u64[word + s.L_BYTES] += nbytes
                    self._u64[word + s.L_TRANSFERS] += 1

    def users(self, number: int) -> int:
        """Transfers that use a link now."""
        return self._users[number]

    # --- switching --------------------------------------------------------------------------------

    def switch(self, number: int, on: bool) -> Pauses[int]:
        """Bring a link, or all of them, up or down; repeatable. Returns the cycles that it took.

        Raises:
            Refused: BAD_DESCRIPTOR, there is no such link.
        """
        if number != ALL_LINKS and number >= len(self._users):
            raise Refused(
                CommandStatus.BAD_DESCRIPTOR,
                f"there is no link {number}, the function has {len(self._users)}",
            )
        numbers = range(len(self._users)) if number == ALL_LINKS else (number,)
        return self._up(numbers) if on else self._down(numbers)

    def _up(self, numbers: Sequence[int]) -> Pauses[int]:
        draining = [
            number for number in numbers
            if self._u64[s.link_word(number)] == LinkState.DRAINING
        ]  # fmt: skip
        if draining:  # whoever switched them off was itself ended before they were down
            yield from self._down(draining)
        cycles = 0
        with self._lock:
            for number in numbers:
                if self._happens(number, LinkEvent.ACTIVATE):
                    cycles = TRAINING_CYCLES  # side by side, and the command's own time
                self._happens(number, LinkEvent.TRAINED)
        return cycles

    def _down(self, numbers: Sequence[int]) -> Pauses[int]:
        with self._lock:
            for number in numbers:
                self._happens(number, LinkEvent.DEACTIVATE)
        quiet = _Quiet(self, numbers)
        while not quiet.ready():
            yield quiet
        with self._lock:
            for number in numbers:
                self._happens(number, LinkEvent.DRAINED)
        return 0

    def _happens(self, number: int, event: LinkEvent) -> bool:
        """What the table says of it; False where it says no: the link is there already."""
        word = s.link_word(number)
        after = LINK_TABLE[LinkState(self._u64[word]), event]
        if isinstance(after, LinkState):
            self._u64[word] = int(after)
            return True
        return False

    def describe(self) -> dict[str, Any]:
        """Chips and links as they are now."""
        fabric, u64 = self._fabric, self._u64
        words = [s.link_word(number) for number in range(len(fabric.links))]
        return {
            "chips": [chip._asdict() for chip in fabric.chips],
            "links": [
                {
                    "link": number,
                    "number": link.number,
                    "ends": [link.one, link.other],
                    "kind": link.kind,
                    "state": NAMES[u64[word]],
                    "bytes": u64[word + s.L_BYTES],
                    "flits": u64[word + s.L_FLITS],
                    "transfers": u64[word + s.L_TRANSFERS],
                }
                for number, (link, word) in enumerate(zip(fabric.links, words, strict=True))
            ],
        }
