"""Who gets a slot, who waits and for how long: single cases, and any sequence against a model."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from accelvisor.errors import CapacityError, ConflictError
from accelvisor.isolation.exhaustion import (
    Candidate,
    Decision,
    Denied,
    Granted,
    Migrate,
    OnExhaustion,
    Slot,
    Waiters,
    Waiting,
    ranked,
)
from accelvisor.limits import LIMITS

ONE, TWO = Slot("card0", 0), Slot("card0", 1)
WAIT, DENY, MIGRATE = OnExhaustion


def full(*slots: Slot) -> Waiters:
    return Waiters(held={slot: f"holder{slot.index}" for slot in slots or (ONE,)})


def code(decision: Decision) -> str:
    assert isinstance(decision, Denied)
    return decision.error.code


def test_the_first_free_slot_is_granted_whatever_the_policy() -> None:
    for policy in OnExhaustion:
        waiters = Waiters([TWO, ONE])
        assert waiters.ask("a", policy, 0.0, 5.0) == Granted(ONE)
        assert waiters.held == {ONE: "a"}


def test_a_second_function_for_the_same_vm_is_refused() -> None:
    waiters = Waiters([ONE, TWO])
    waiters.ask("a", DENY, 0.0, 0.0)
    assert code(waiters.ask("a", WAIT, 9.0, 0.0)) == "one-function-per-vm"
    assert waiters.free == [TWO]


def test_a_vm_that_waits_does_not_wait_twice() -> None:
    waiters = full()
    assert waiters.ask("a", WAIT, 9.0, 0.0) == Waiting(1)
    for policy in OnExhaustion:
        assert code(waiters.ask("a", policy, 9.0, 0.0)) == "one-function-per-vm"
    assert waiters.waiting == ["a"]


def test_a_vm_whose_expiry_was_not_told_yet_cannot_ask_again() -> None:
    """Its first question has no answer yet: it would get two."""
    waiters = full()
    waiters.ask("a", WAIT, 1.0, 0.0)
    assert code(waiters.ask("a", WAIT, 9.0, 2.0)) == "one-function-per-vm"
    assert waiters.expired(2.0) == ["a"]
    assert waiters.ask("a", WAIT, 9.0, 2.0) == Waiting(1)


def test_deny_denies_at_once() -> None:
    decision = full().ask("a", DENY, math.inf, 0.0)
    assert code(decision) == "no-function-free"
    assert isinstance(decision, Denied)
    assert isinstance(decision.error, CapacityError)


@pytest.mark.parametrize("deadline", [4.9, 5.0, math.nan, -math.inf])
def test_there_is_no_waiting_for_a_time_that_is_over(deadline: float) -> None:
    assert code(full().ask("a", WAIT, deadline, 5.0)) == "no-function-free"


def test_a_deadline_is_exact() -> None:
    just_before = math.nextafter(10.0, 0.0)
    waiters = full()
    waiters.ask("a", WAIT, 10.0, 0.0)
    assert waiters.next_deadline == 10.0
    assert waiters.expired(just_before) == []
    assert waiters.expired(10.0) == ["a"]
    assert waiters.expired(11.0) == []


def test_at_the_deadline_a_slot_goes_to_the_next_and_just_before_to_the_first() -> None:
    for now, winner in ((math.nextafter(10.0, 0.0), "a"), (10.0, "b")):
        waiters = full()
        waiters.ask("a", WAIT, 10.0, 0.0)
        waiters.ask("b", WAIT, 20.0, 0.0)
        assert waiters.released(ONE, now) == winner


def test_who_lapsed_is_told_though_somebody_else_was_served_meanwhile() -> None:
    waiters = full()
    waiters.ask("a", WAIT, 10.0, 0.0)
    assert waiters.released(ONE, 12.0) is None
    assert waiters.next_deadline == -math.inf
    assert waiters.expired(12.0) == ["a"]
    assert waiters.next_deadline is None


def test_expiries_are_told_by_deadline_and_then_in_order_of_asking() -> None:
    waiters = full()
    for who, deadline in (("a", 3.0), ("b", 1.0), ("c", 3.0), ("d", 2.0), ("e", 9.0)):
        waiters.ask(who, WAIT, deadline, 0.0)
    assert waiters.expired(3.0) == ["b", "d", "a", "c"]
    assert waiters.waiting == ["e"]


def test_several_released_at_once_go_in_order_of_asking() -> None:
    waiters = full(ONE, TWO)
    for position, who in enumerate("abc", 1):
        assert waiters.ask(who, WAIT, 9.0, 0.0) == Waiting(position)
    assert [waiters.released(TWO, 1.0), waiters.released(ONE, 1.0)] == ["a", "b"]
    assert waiters.waiting == ["c"]


def test_slots_of_a_card_that_is_enabled_go_to_those_that_wait() -> None:
    waiters = Waiters()
    waiters.ask("b", WAIT, 9.0, 0.0)
    waiters.ask("a", WAIT, 9.0, 0.0)
    three = Slot("card0", 2)
    assert waiters.added([three, TWO, ONE], 1.0) == {ONE: "b", TWO: "a"}
    assert waiters.free == [three]


def test_slots_that_are_known_are_not_added_again() -> None:
    waiters = full(ONE)
    with pytest.raises(ConflictError) as caught:
        waiters.added([TWO, ONE], 0.0)
    assert caught.value.code == "slot-exists"
    assert waiters.free == []


def test_slots_of_a_card_are_gone_only_when_nobody_holds_one() -> None:
    waiters = Waiters([ONE, TWO, Slot("card1", 0)])
    waiters.ask("a", DENY, 0.0, 0.0)
    with pytest.raises(ConflictError) as caught:
        waiters.removed("card0")
    assert caught.value.code == "card-in-use"
    waiters.released(ONE, 0.0)
    assert waiters.removed("card0") == [ONE, TWO]
    assert waiters.free == [Slot("card1", 0)]


def test_a_slot_is_not_released_twice() -> None:
    waiters = full()
    waiters.released(ONE, 0.0)
    with pytest.raises(ConflictError) as caught:
        waiters.released(ONE, 0.0)
    assert caught.value.code == "slot-not-held"
    assert waiters.free == [ONE]


def test_who_withdraws_is_passed_over_and_keeps_what_it_holds() -> None:
    waiters = full()
    waiters.ask("a", WAIT, 9.0, 0.0)
    waiters.ask("b", WAIT, 9.0, 0.0)
    assert waiters.withdraw("a")
    assert not waiters.withdraw("a")
    assert not waiters.withdraw("holder0")
    assert waiters.released(ONE, 1.0) == "b"


def test_who_withdraws_is_not_told_that_it_expired() -> None:
    waiters = full()
    waiters.ask("a", WAIT, 1.0, 0.0)
    waiters.released(ONE, 2.0)
    assert waiters.withdraw("a")
    assert waiters.expired(2.0) == []


def test_the_queue_has_an_end() -> None:
    waiters = full()
    for number in range(LIMITS.function_waiters):
        assert waiters.ask(str(number), WAIT, 9.0, 0.0) == Waiting(number + 1)
    assert code(waiters.ask("one more", WAIT, 9.0, 0.0)) == "waiters-full"
    assert len(waiters.waiting) == LIMITS.function_waiters


def test_migration_offers_trusted_hosts_with_most_free_first() -> None:
    hosts = [
        Candidate("delta", 2, True),
        Candidate("alpha", 2, True),
        Candidate("full", 0, True),
        Candidate("stranger", 9, False),
        Candidate("bravo", 5, True),
        Candidate("odd", -1, True),
    ]
    decision = full().ask("a", MIGRATE, 0.0, 0.0, hosts)
    assert isinstance(decision, Migrate)
    assert [item.host for item in decision.candidates] == ["bravo", "alpha", "delta"]


def test_migration_without_any_host_is_denied() -> None:
    hosts = [Candidate("full", 0, True), Candidate("stranger", 9, False)]
    assert code(full().ask("a", MIGRATE, 0.0, 0.0, hosts)) == "no-function-free"


@given(st.lists(st.builds(Candidate, st.sampled_from("abcd"), st.integers(-1, 4), st.booleans())))
def test_ranked_is_a_selection_in_descending_order(hosts: list[Candidate]) -> None:
    found = list(ranked(hosts))
    assert all(item.trusted and item.free >= 1 for item in found)
    assert len(found) == sum(item.trusted and item.free >= 1 for item in hosts)
    for one, two in pairwise(found):
        assert one.free > two.free or (one.free == two.free and one.host <= two.host)


# --- any sequence of events ----------------------------------------------------------------------

CARDS = st.sampled_from(["card0", "card1"])
VMS = st.sampled_from([f"vm{number}" for number in range(8)])


class AgainstAModel(RuleBasedStateMachine):
    """The model keeps one list of every question that is open, in the order of asking, and who
    holds what. It never removes from the middle but by what the rules of the policy say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots = [Slot("card0", 0), Slot("card0", 1), Slot("card1", 0)]
        self.waiters = Waiters(self.slots)
        self.now = 0.0
        self.held: dict[Slot, str] = {}
        self.withheld: set[str] = set()
        self.wants: dict[str, str | None] = {}
        self.open: list[tuple[str, float]] = []
        self.untold: list[tuple[float, str]] = []

    def pass_deadlines(self) -> None:
        self.untold += [(end, who) for who, end in self.open if end <= self.now]
        self.open = [(who, end) for who, end in self.open if end > self.now]

    def serve(self, slot: Slot) -> str | None:
        self.pass_deadlines()
        del self.held[slot]
        return self.offer(slot)

    def offer(self, slot: Slot) -> str | None:
        takers = [item for item in self.open if self.wants[item[0]] in (None, slot.card)]
        if not takers or slot.card in self.withheld:
            return None
        self.open.remove(takers[0])
        self.held[slot] = takers[0][0]
        return takers[0][0]

    def loose(self, card: str | None = None) -> list[Slot]:
        return [
            slot
            for slot in self.slots
            if slot not in self.held
            and slot.card not in self.withheld
            and card in (None, slot.card)
        ]

    @rule(card=CARDS)
    def withhold(self, card: str) -> None:
        self.waiters.withhold(card)
        self.withheld.add(card)

    @rule(card=CARDS)
    def allow(self, card: str) -> None:
        self.pass_deadlines()
        before, mine = card in self.withheld, [s for s in self.slots if s.card == card]
        self.withheld.discard(card)
        given = {}
        for slot in mine:
            if before and slot not in self.held and (who := self.offer(slot)) is not None:
                given[slot] = who
        assert self.waiters.allow(card, self.now) == given

    @rule(
        who=VMS,
        policy=st.sampled_from(OnExhaustion),
        patience=st.integers(-1, 6),
        card=st.one_of(st.none(), CARDS),
    )
    def ask(self, who: str, policy: OnExhaustion, patience: int, card: str | None) -> None:
        self.pass_deadlines()
        end = self.now + patience
        busy = who in self.held.values()
        busy |= who in [item for item, _ in self.open] or who in [item for _, item in self.untold]
        free = self.loose(card)
        hosts = [Candidate("bravo", 1, True)]
        answer = self.waiters.ask(who, policy, end, self.now, hosts, card)
        if busy:
            assert code(answer) == "one-function-per-vm"
        elif free:
            assert not [w for w, _ in self.open if self.wants[w] in (None, free[0].card)]
            assert answer == Granted(free[0])
            self.held[free[0]] = who
        elif policy is WAIT and patience > 0:
            self.open.append((who, end))
            self.wants[who] = card
            assert answer == Waiting(len(self.open))
        elif policy is MIGRATE:
            assert answer == Migrate(hosts)
        else:
            assert code(answer) == "no-function-free"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_some_at_once(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        for slot in slots:
            assert self.waiters.released(slot, self.now) == self.serve(slot)

    @rule(by=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def time_passes(self, by: float) -> None:
        self.now += by

    @rule()
    def expire(self) -> None:
        self.pass_deadlines()
        told = [who for _, who in sorted(self.untold, key=lambda item: item[0])]
        assert self.waiters.expired(self.now) == told
        self.untold = []

    @rule(who=VMS)
    def withdraw(self, who: str) -> None:
        waited = who in [item for item, _ in self.open] or who in [item for _, item in self.untold]
        self.open = [item for item in self.open if item[0] != who]
        self.untold = [item for item in self.untold if item[1] != who]
        assert self.waiters.withdraw(who) == waited

    @invariant()
    def slots_are_conserved(self) -> None:
        free, held = self.waiters.free, self.waiters.held
        assert free == self.loose()
        assert held == self.held
        assert len(set(held.values())) == len(held)

    @invariant()
    def nobody_waits_beside_a_free_slot(self) -> None:
        served = {who for who, end in self.open if end > self.now}
        for slot in self.waiters.free:
            assert not [who for who in served if self.wants[who] in (None, slot.card)]
        assert not set(self.waiters.waiting) & set(self.held.values())

    def teardown(self) -> None:
        """Nobody starves: as many releases as there are waiters serve all who still have time."""
        for card in ("card0", "card1"):
            self.waiters.allow(card, self.now)
        self.waiters.expired(self.now)
        while self.waiters.waiting:
            who = self.waiters.waiting[0]
            slot = min(s for s in self.waiters.held if self.wants[who] in (None, s.card))
            assert self.waiters.released(slot, self.now) == who


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
