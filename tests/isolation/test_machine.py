"""Any sequence of creations, resizes, revocations, ends, uses and crashes, against a memory model
with taint tags: the partition stays whole, and nobody ever reads what somebody else wrote.

The executor here is the plainest that carries out the planner's steps, one at a time, each followed
by a crash if the rules say so, and recovered as the daemon does it: forward if the function has
taken its new table, else back. Pages are real enough: each has a tag of who wrote it last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from accelvisor.abi.registers import PAGE
from accelvisor.errors import CapacityError, UsageError
from accelvisor.isolation import planner
from accelvisor.isolation.placing import Free, plan
from accelvisor.isolation.planner import Action, Plan, Wanted
from accelvisor.isolation.resources import (
    NOTHING,
    Card,
    Links,
    Placement,
    Profile,
    violations,
)
from accelvisor.isolation.segments import SegmentTable, Unmapped, lay
from tests.amount import by_night

CARDS = [
    Card("card0", 2, 4, 64 * PAGE, banks=4, queues=16, functions=6),
    Card("card1", 1, 2, 16 * PAGE, banks=1, queues=8, functions=2),
    Card("card2", 4, 2, 64 * PAGE, banks=2, queues=16, functions=8, boards=2),
]
PROFILES = [
    Profile("small", 1, 1, 3 * PAGE, PAGE, 2, 2),
    Profile("wide", 4, 2, 20 * PAGE, PAGE, 2, 2),
    Profile("large", 2, 1, 30 * PAGE, PAGE, 4, 2),
    Profile("square", 4, 4, 8 * PAGE, PAGE, 2, 2, links=Links.RING),
]


@dataclass
class Device:
    """A function's process: it has the table that it took last, and no other memory."""

    table: SegmentTable
    stopped: bool = False
    #: (address, epoch) that a command of this function resolved earlier
    resolved: list[tuple[int, int]] = field(default_factory=list)


class Died(Exception):  # noqa: N818
    """The daemon dies here."""


class Partition(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, Placement] = {}
        self.epochs: dict[str, int] = {}
        self.journal: dict[str, Plan] = {}
        self.devices: dict[str, Device] = {}
        #: (card, bank, page) -> who wrote it; 0 is clean
        self.tags: dict[tuple[str, int, int], str] = {}
        self.count = 0
        self.crash_after = -1

    # --- the executor -----------------------------------------------------------------------------

    def step(self) -> None:
        """Between two steps, where a crash may come."""
        if self.crash_after == 0:
            self.crash_after = -1
            raise Died
        self.crash_after -= 1

    def held(self) -> dict[str, Placement]:
        """As the registry: what a change is about to have is not free."""
        soon = {f"{name} soon": made.after for name, made in self.journal.items()}
        return {**self.rows, **soon}

    def carry(self, made: Plan) -> None:
        try:
            self.apply(made)
        except Died:
            self.recover()

    def apply(self, made: Plan) -> None:
        name = made.function
        self.journal[name] = made
        self.step()
        device = self.devices[name]
        for action in [item.action for item in made.steps]:
            if action is Action.QUIESCE:
                device.stopped = True
            elif action is Action.SCRUB:
                self.scrub(made)
            elif action is Action.TRANSLATE:
                device.table = SegmentTable(lay(made.after.ranges), made.epoch)
            elif action is Action.RESUME:
                device.stopped = False
            elif action is Action.RELEASE:
                continue  # with the row, below
            if action in (Action.SCRUB, Action.TRANSLATE):
                self.step()
        self.commit(made)

    def commit(self, made: Plan) -> None:
        self.step()
        self.rows[made.function] = made.after
        self.epochs[made.function] = made.epoch
        del self.journal[made.function]

    def scrub(self, made: Plan) -> None:
        kept = set(self.pages(made.after))
        for page in self.pages(made.before):
            if page not in kept:
                self.tags.pop(page, None)

    def recover(self) -> None:
        """A daemon that comes back asks each function which table it has."""
        for name, made in list(self.journal.items()):
            device = self.devices[name]
            device.stopped = False  # the worker thaws by itself
            if device.table.epoch == made.epoch:
                self.commit(made)
            else:
                del self.journal[name]

    @staticmethod
    def pages(item: Placement) -> list[tuple[str, int, int]]:
        return [
            (item.card, piece.bank, at)
            for piece in item.ranges
            for at in range(piece.start, piece.end, PAGE)
        ]

    # --- what happens -----------------------------------------------------------------------------

    @rule(
        profile=st.sampled_from(PROFILES),
        card=st.sampled_from([None, "card0", "card1", "card2"]),
    )
    def create(self, profile: Profile, card: str | None) -> None:
        answer = plan(CARDS, list(self.held().values()), profile, card)
        if answer.placement is None:
            assert answer.reasons
            return
        self.count += 1
        name = f"f{self.count}"
        self.rows[name] = answer.placement
        self.epochs[name] = 1
        self.devices[name] = Device(SegmentTable(lay(answer.placement.ranges), 1))

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(), cores=st.integers(1, 8), pages=st.integers(1, 40),
        crash=st.integers(-1, 5),
    )  # fmt: skip
    def resize(self, data: st.DataObject, cores: int, pages: int, crash: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        try:
            made = planner.resize(
                CARDS, self.held(), name, Wanted(cores, pages * PAGE), self.epochs[name]
            )
        except (CapacityError, UsageError):
            return
        if not made.same:
            self.crash_after = crash
            self.carry(made)
            self.crash_after = -1

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), crash=st.integers(-1, 5))
    def revoke(self, data: st.DataObject, crash: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        if self.rows[name] != NOTHING:
            self.crash_after = crash
            self.carry(planner.revoke(self.held(), name, self.epochs[name]))
            self.crash_after = -1

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Deleted, moved away, crashed: its process goes, and its memory with it."""
        name = data.draw(st.sampled_from(sorted(self.rows)))
        for page in self.pages(self.rows.pop(name)):
            self.tags.pop(page, None)
        del self.devices[name], self.epochs[name]

    @precondition(lambda self: self.devices)
    @rule(data=st.data(), address=st.integers(-2, 45), nbytes=st.integers(0, 3 * PAGE))
    def write(self, data: st.DataObject, address: int, nbytes: int) -> None:
        """A command writes where it likes; the table decides."""
        name = data.draw(st.sampled_from(sorted(self.devices)))
        device = self.devices[name]
        at = address * PAGE + nbytes % 7
        try:
            pieces = device.table.translate(at, nbytes)
        except Unmapped:
            return
        card = self.rows[name].card
        for piece in pieces:
            for page in range(piece.start // PAGE * PAGE, piece.end, PAGE):
                self.tags[card, piece.bank, page] = name
        device.resolved.append((at, device.table.epoch))

    @precondition(lambda self: any(device.resolved for device in self.devices.values()))
    @rule(data=st.data())
    def go_on_with_an_old_address(self, data: st.DataObject) -> None:
        """What a command of an old epoch resolved has no effect any more."""
        able = sorted(name for name, device in self.devices.items() if device.resolved)
        device = self.devices[data.draw(st.sampled_from(able))]
        at, epoch = data.draw(st.sampled_from(device.resolved))
        try:
            device.table.check(at, 0, epoch)
        except Unmapped:
            assert epoch != device.table.epoch
        else:
            assert epoch == device.table.epoch

    # --- what must always hold --------------------------------------------------------------------

    @invariant()
    def nothing_is_held_twice(self) -> None:
        assert violations(CARDS, self.rows) == []

    @invariant()
    def everything_is_held_or_free(self) -> None:
        for card in CARDS:
            mine = [item for item in self.rows.values() if item.card == card.name]
            left = Free(card, mine)
            assert left.core_count + sum(item.core_count for item in mine) == card.cores
            assert left.memory_bytes + sum(item.memory_bytes for item in mine) == (
                card.memory_bytes
            )
            assert len(left.queues) + sum(len(item.queues) for item in mine) == card.queues
            assert len(left.vectors) + len(mine) == card.functions

    @invariant()
    def nobody_can_read_what_another_wrote(self) -> None:
        for name, device in self.devices.items():
            card = self.rows[name].card or next(
                (made.before.card for made in self.journal.values() if made.function == name), ""
            )
            for segment in device.table.segments:
                for at in range(segment.start, segment.start + segment.nbytes, PAGE):
                    assert self.tags.get((card, segment.bank, at), name) == name

    @invariant()
    def memory_that_is_free_is_clean(self) -> None:
        held = {page for item in self.rows.values() for page in self.pages(item)}
        assert set(self.tags) <= held

    @invariant()
    def a_device_and_its_row_agree(self) -> None:
        assert not self.journal
        for name, device in self.devices.items():
            assert device.table.segments == lay(self.rows[name].ranges)
            assert device.table.epoch == self.epochs[name]
            assert not device.stopped


TestPartition = Partition.TestCase
TestPartition.settings = settings(
    max_examples=by_night(600, 25), stateful_step_count=by_night(50, 30), deadline=None
)


class ForgetsToScrub(Partition):
    def scrub(self, made: Plan) -> None:
        """Memory goes to the next with what is in it."""


class ForgetsTheEpoch(Partition):
    def commit(self, made: Plan) -> None:
        self.epochs[made.function] = made.epoch - 1
        super().commit(made)
        self.epochs[made.function] = made.epoch - 1


class RollsForwardBlindly(Partition):
    def recover(self) -> None:
        for made in list(self.journal.values()):
            self.commit(made)


@pytest.mark.parametrize("wrong", [ForgetsToScrub, ForgetsTheEpoch, RollsForwardBlindly])
def test_the_machine_finds_what_is_wrong(wrong: type[Partition]) -> None:
    """A check that cannot fail is worth nothing."""
    quick = settings(
        max_examples=400, stateful_step_count=30, deadline=None, database=None,
        phases=(Phase.generate,), derandomize=True,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(wrong, settings=quick)
