"""Anything in any order, with traffic: what the fabric allows is derived a second time, plainly,
and what arrived is held against what was sent.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from accelvisor.errors import AccelvisorError, PermissionDenied, UsageError
from accelvisor.fabric.fabric import NOBODY, Fabric, Power
from accelvisor.fabric.former import NoRing, Ring, Torus, form_ring
from accelvisor.fabric.grid import Grid
from accelvisor.fabric.links import TRAINING_CYCLES, WINDOW, ChipState, Link, LinkState
from accelvisor.fabric.traffic import Traffic, Transfer

OWNERS = ("anna", "ben", NOBODY)
GRID = Grid(2, 1, 3)
CHIPS = st.integers(0, GRID.chips - 1)
LINKS = st.integers(0, len(GRID.links) - 1)


class Machine(RuleBasedStateMachine):
    """The plain model: who owns which chip, which chips are off, and for each link a word. Of the
    words it takes "draining" and what comes after it from the fabric: traffic decides that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fabric = Fabric(GRID)
        self.traffic = Traffic(self.fabric)
        self.owners = [NOBODY] * GRID.chips
        self.modes = ["enabled"] * GRID.chips
        self.words = ["down"] * len(GRID.links)
        self.since = [0] * len(GRID.links)
        self.bytes = [0] * len(GRID.links)
        self.transfers: list[Transfer] = []
        self.history: list[tuple[int, list[str]]] = []

    # --- the plain rules ---

    def same(self, number: int, by: str) -> bool:
        return all(self.owners[chip] == by for chip in GRID.links[number].ends)

    def rests(self, chip: int) -> bool:
        return all(
            self.words[link.number] == "down" for link in GRID.links if chip in link.ends
        )

    def attempt(self, allowed: bool, call: object, *arguments: object) -> bool:
        before = [self.fabric.link(n).pack() for n in range(len(GRID.links))]
        try:
            call(*arguments)  # type: ignore[operator]
        except AccelvisorError:
            assert not allowed
            assert before == [self.fabric.link(n).pack() for n in range(len(GRID.links))]
            return False
        assert allowed
        return True

    # --- what happens ---

    @rule(chip=CHIPS, owner=st.sampled_from(OWNERS))
    def own(self, chip: int, owner: str) -> None:
        allowed = self.rests(chip) or owner == self.owners[chip]
        if self.attempt(allowed, self.fabric.own, chip, owner):
            self.owners[chip] = owner

    @rule(owner=st.sampled_from(OWNERS))
    def own_all(self, owner: str) -> None:
        for chip in range(GRID.chips):
            self.own(chip, owner)

    @rule(chip=CHIPS)
    def disable(self, chip: int) -> None:
        if self.attempt(self.rests(chip), self.fabric.disable, chip):
            self.modes[chip] = "disabled"

    @rule(chip=CHIPS, passing=st.booleans())
    def enable(self, chip: int, passing: bool) -> None:
        self.attempt(True, self.fabric.pass_through if passing else self.fabric.enable, chip)
        self.modes[chip] = "pass-through" if passing else "enabled"

    @rule(number=LINKS, by=st.sampled_from(OWNERS))
    def activate(self, number: int, by: str) -> None:
        on = all(self.modes[chip] != "disabled" for chip in GRID.links[number].ends)
        allowed = self.same(number, by) and on and self.words[number] == "down"
        if self.attempt(allowed, self.fabric.activate, number, by, self.traffic.now):
            self.words[number], self.since[number] = "training", self.traffic.now

    @rule()
    def activate_all(self) -> None:
        for number, link in enumerate(GRID.links):
            self.activate(number, self.owners[link.ends[0]])

    @rule(number=LINKS, by=st.sampled_from(OWNERS))
    def deactivate(self, number: int, by: str) -> None:
        allowed = self.same(number, by) and self.words[number] in ("training", "up")
        trained = self.words[number] == "up"
        if self.attempt(allowed, self.fabric.deactivate, number, by, self.traffic.now):
            self.words[number] = "draining" if trained else "down"
        self.watch()

    @rule(number=LINKS)
    def fail(self, number: int) -> None:
        self.attempt(True, self.traffic.fail, number)
        self.words[number] = "error"

    @rule(number=LINKS, by=st.sampled_from(OWNERS))
    def clear(self, number: int, by: str) -> None:
        allowed = self.same(number, by) and self.words[number] == "error"
        if self.attempt(allowed, self.fabric.clear, number, by):
            self.words[number] = "down"

    @rule(number=LINKS, nbytes=st.integers(0, 4000), data=st.data())
    def begin(self, number: int, nbytes: int, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(GRID.links[number].ends))
        owner = self.owners[source]
        payload = random.Random(nbytes).randbytes(nbytes)
        try:
            self.transfers.append(self.traffic.begin(number, source, owner, payload))
            assert self.same(number, owner)
        except PermissionDenied:
            assert not self.same(number, owner)

    @rule(cycles=st.sampled_from([1, 7, 40, 300, TRAINING_CYCLES]))
    def run(self, cycles: int) -> None:
        self.traffic.run(cycles)
        self.watch()

    @precondition(lambda self: self.transfers)
    @rule()
    def copy_records(self) -> None:
        """The function is moved: another one finds its links by their records."""
        links = [Link.unpack(self.fabric.link(n).pack()) for n in range(len(GRID.links))]
        states = [ChipState(mode) for mode in self.modes]
        moved = Fabric(GRID, self.owners, links, states)
        self.fabric = self.traffic.fabric = moved

    def watch(self) -> None:
        """What time does to the words."""
        for number, word in enumerate(self.words):
            if word == "training" and self.traffic.now >= self.since[number] + TRAINING_CYCLES:
                self.words[number] = "up"
            if word == "draining" and self.fabric.link(number).state is LinkState.DOWN:
                self.words[number] = "down"

    # --- what is always so ---

    @invariant()
    def states_are_those_of_the_plain_rules(self) -> None:
        states = [self.fabric.link(n).state.name.lower() for n in range(len(GRID.links))]
        assert states == self.words
        for chip in range(GRID.chips):
            assert self.fabric.chip(chip) == ChipState(self.modes[chip])
            off = self.modes[chip] == "disabled"
            low = Power.LOW if self.rests(chip) else Power.FULL
            assert self.fabric.power(chip) is (Power.OFF if off else low)

    @invariant()
    def a_link_that_is_not_down_is_somebodys_and_joins_chips_that_are_on(self) -> None:
        for link in GRID.links:
            if self.words[link.number] in ("training", "up", "draining"):
                one, other = link.ends
                assert self.owners[one] == self.owners[other]
                assert "disabled" not in (self.modes[one], self.modes[other])

    @invariant()
    def nothing_is_carried_but_by_links_that_are_up(self) -> None:
        for number, word in enumerate(self.words):
            carried = self.fabric.link(number).bytes
            if word == "training":
                assert carried == self.bytes[number]
            self.bytes[number] = carried
            if word in ("down", "training", "error"):
                link = self.fabric.link(number)
                assert (link.credits, link.sent) == (WINDOW, link.delivered)

    @invariant()
    def each_group_has_a_ring_of_its_own_enabled_chips(self) -> None:
        taken: dict[int, str] = {}
        for owner in OWNERS:
            mine = {
                c for c in range(GRID.chips)
                if self.owners[c] == owner and self.modes[c] == "enabled"
            }  # fmt: skip
            formed = self.fabric.formed(owner)
            if isinstance(formed, NoRing):
                continue
            rings = [formed] if isinstance(formed, Ring) else [*formed.rows, *formed.columns]
            found = set(formed.chips)
            assert found == mine
            assert len(formed.chips) == len(mine)
            if isinstance(formed, Torus):
                assert len(formed.rows) * len(formed.columns) == len(mine)
            for ring in rings:
                self.is_a_cycle(ring, owner)
                for number in ring.links:
                    assert taken.setdefault(number, owner) == owner

    def is_a_cycle(self, ring: Ring, owner: str) -> None:
        seen = list(ring.chips)
        for i, way in enumerate(ring.ways):
            at = ring.chips[i]
            for number in way:
                assert self.words[number] == "up"
                assert self.same(number, owner)
                at = GRID.links[number].other(at)
            assert at == ring.chips[(i + 1) % len(ring.chips)]
        assert len(set(seen)) == len(seen)

    @invariant()
    def flits_arrive_once_in_order_and_as_they_were_sent(self) -> None:
        numbers = defaultdict(list)
        for flit in self.traffic.log:
            numbers[flit.link].append(flit.sequence)
            assert flit.left < flit.arrived
        for number in range(len(GRID.links)):
            arrived = numbers[number]
            assert arrived == list(range(1, len(arrived) + 1))
            assert self.fabric.link(number).delivered == len(arrived)
        for transfer in self.transfers:
            assert transfer.payload.startswith(transfer.received)
            assert not (transfer.complete and transfer.dropped)
            assert not transfer.complete or transfer.received == transfer.payload

    def teardown(self) -> None:
        """Bring all links up again: then every transfer is complete, unless its link was given
        away.
        """
        for number, link in enumerate(GRID.links):
            if self.words[number] == "error":
                self.clear(number, self.owners[link.ends[0]])
        self.traffic.settle()
        self.watch()
        for chip in range(GRID.chips):
            self.enable(chip, False)
        for number, link in enumerate(GRID.links):
            if self.words[number] == "down":
                self.activate(number, self.owners[link.ends[0]])
        self.traffic.settle()
        self.watch()
        for transfer in self.transfers:
            stuck = self.words[transfer.link] == "error"
            assert transfer.complete or transfer.dropped or stuck
        self.flits_arrive_once_in_order_and_as_they_were_sent()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_broken_link_of_a_disabled_chip_is_found_again() -> None:
    fabric = Fabric(GRID)
    fabric.disable(0)
    fabric.fail(0)
    links = [Link.unpack(fabric.link(n).pack()) for n in range(len(GRID.links))]
    states = [fabric.chip(chip) for chip in range(GRID.chips)]
    moved = Fabric(GRID, links=links, states=states)
    assert (moved.chip(0), moved.link(0).state) == (ChipState.DISABLED, LinkState.ERROR)


def ready(*links: int) -> Traffic:
    fabric = Fabric(GRID, ["anna"] * GRID.chips)
    traffic = Traffic(fabric)
    for number in links:
        fabric.activate(number, "anna", 0)
    traffic.run(TRAINING_CYCLES)
    return traffic


def test_a_transfer_that_was_interrupted_goes_on() -> None:
    traffic = ready(0)
    transfer = traffic.begin(0, 0, "anna", bytes(range(256)) * 40)
    traffic.run(60)
    traffic.fabric.deactivate(0, "anna", traffic.now)
    traffic.settle()
    assert traffic.fabric.link(0).state is LinkState.DOWN
    part = len(transfer.received)
    assert 0 < part < 10240
    traffic.fabric.activate(0, "anna", traffic.now)
    traffic.settle()
    assert transfer.complete
    assert traffic.fabric.link(0).bytes == 10240  # nothing went twice
    assert len(traffic.log) == 40


def test_a_transfer_over_a_link_that_broke_sends_again_what_was_lost() -> None:
    traffic = ready(0)
    transfer = traffic.begin(0, 1, "anna", bytes(range(256)) * 40)
    traffic.run(60)
    traffic.fail(0)
    traffic.fabric.clear(0, "anna")
    traffic.fabric.activate(0, "anna", traffic.now)
    traffic.settle()
    assert transfer.received == transfer.payload
    assert len(traffic.log) == 40
    assert traffic.fabric.link(0).bytes > 10240


def test_a_transfer_whose_link_was_given_away_leaves_nothing() -> None:
    traffic = ready(0)
    transfer = traffic.begin(0, 0, "anna", bytes(10240))
    traffic.run(60)
    traffic.fabric.deactivate(0, "anna", traffic.now)
    traffic.settle()
    traffic.fabric.own(0, "ben")
    traffic.run(1)
    assert transfer.dropped
    assert not transfer.received
    assert not transfer.complete


def test_two_chips_send_to_each_other() -> None:
    traffic = ready(0)
    there = traffic.begin(0, 0, "anna", b"there" * 200)
    back = traffic.begin(0, 1, "anna", b"")
    traffic.settle()
    assert there.complete
    assert back.complete


def test_what_nobody_may_send() -> None:
    traffic = ready(0)
    with pytest.raises(PermissionDenied):
        traffic.begin(0, 0, "ben", b"")
    with pytest.raises(UsageError):
        traffic.begin(0, 5, "anna", b"")


def all_reduce(traffic: Traffic, ring: Ring, data: list[list[int]], upset: random.Random) -> None:
    """A ring all-reduce over real flits, as plainly as can be; ``upset`` drops and breaks links."""
    count = len(ring.chips)
    for step in range(2 * (count - 1)):
        moves = []
        for rank, (chip, way) in enumerate(zip(ring.chips, ring.ways, strict=True)):
            block = (rank - step) % count
            payload = data[rank][block].to_bytes(2048, "little")
            moves.append((rank, block, traffic.begin(way[0], chip, "anna", payload)))
        while not all(transfer.complete for _, _, transfer in moves):
            traffic.run(upset.randrange(1, 200))
            number = upset.choice(ring.links)
            state = traffic.fabric.link(number).state
            if state is LinkState.UP and upset.random() < 0.4:
                traffic.fabric.deactivate(number, "anna", traffic.now)
            elif state is LinkState.UP and upset.random() < 0.2:
                traffic.fail(number)
            for link in ring.links:
                if traffic.fabric.link(link).state is LinkState.ERROR:
                    traffic.fabric.clear(link, "anna")
                if traffic.fabric.link(link).state is LinkState.DOWN:
                    traffic.fabric.activate(link, "anna", traffic.now)
        for rank, block, transfer in moves:
            into = data[(rank + 1) % count]
            value = int.from_bytes(transfer.received, "little")
            into[block] = into[block] + value if step < count - 1 else value


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_whose_links_are_dropped_and_broken_all_the_time_is_the_same_sum(seed: int) -> None:
    traffic = ready(*range(len(GRID.links)))
    ring = form_ring(GRID, range(6), range(len(GRID.links)))
    assert isinstance(ring, Ring)
    values = random.Random(seed)
    data = [[values.randrange(1 << 60) for _ in range(6)] for _ in range(6)]
    wanted = [sum(column) for column in zip(*data, strict=True)]
    all_reduce(traffic, ring, data, random.Random(seed))
    assert data == [wanted] * 6
    assert traffic.now > 2000
