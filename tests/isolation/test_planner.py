"""Plans: from any partition to any size, and what they must not do on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import CapacityError, UsageError
from accelvisor.isolation.placing import plan as place
from accelvisor.isolation.planner import Action, Plan, Verb, Wanted, resize, revoke
from accelvisor.isolation.resources import (
    NOTHING,
    Card,
    Placement,
    Policy,
    Profile,
    Range,
    violations,
)
from accelvisor.isolation.segments import checked, lay
from accelvisor.limits import LIMITS, MIB

CARD = Card("card0", 4, 4, 256 * MIB, banks=4)


def put(held: dict[str, Placement], name: str, cores: int, chips: int, memory: int) -> bool:
    profile = Profile("p", cores, chips, memory * MIB, MIB, 1, 16)
    answer = place([CARD], list(held.values()), profile)
    if answer.placement is not None:
        held[name] = answer.placement
    return answer.placement is not None


def actions(plan: Plan) -> list[Action]:
    return [step.action for step in plan.steps]


def test_growing_takes_what_is_beside() -> None:
    held: dict[str, Placement] = {}
    put(held, "a", 1, 1, 16)
    plan = resize([CARD], held, "a", Wanted(3, 32 * MIB), 1)
    assert plan.after.cores == {0: (0, 1, 2)}
    assert plan.after.ranges == (Range(0, 0, 32 * MIB),), "one piece stays one piece"
    assert plan.epoch == 2
    assert plan.scrub_bytes == 0
    assert plan.quiesce == ("a",)
    assert actions(plan)[0] is Action.TAKE
    assert Action.SCRUB not in actions(plan)


def test_shrinking_keeps_the_first_and_scrubs_the_rest() -> None:
    held: dict[str, Placement] = {}
    put(held, "a", 4, 1, 100)
    plan = resize([CARD], held, "a", Wanted(2, 70 * MIB), 5)
    assert plan.after.ranges == (Range(0, 0, 64 * MIB), Range(1, 0, 6 * MIB))
    assert plan.scrub_bytes == 30 * MIB
    assert plan.after.cores == {0: (0, 1)}
    scrub = next(step for step in plan.steps if step.action is Action.SCRUB)
    assert "30 MiB" in scrub.text
    assert plan.steps[-1].text == "give back cores 0.2, 0.3 and 30 MiB"


def test_the_same_size_needs_nothing() -> None:
    held: dict[str, Placement] = {}
    put(held, "a", 2, 2, 16)
    plan = resize([CARD], held, "a", Wanted(2, 16 * MIB), 1)
    assert plan.same
    assert (plan.steps, plan.quiesce, plan.estimate_ms) == ([], (), 0)


def test_a_full_chip_is_left_for_another() -> None:
    held: dict[str, Placement] = {}
    put(held, "a", 1, 1, 1)
    put(held, "b", 3, 1, 1)
    plan = resize([CARD], held, "a", Wanted(2, MIB), 1)
    assert plan.after.cores == {1: (0, 1)}
    assert plan.moves == [((0, 0), (1, 0))]
    assert held["b"].cores == {0: (1, 2, 3)}, "neighbours stay where they are"


def test_a_function_with_links_keeps_them_and_its_chips() -> None:
    held: dict[str, Placement] = {}
    put(held, "a", 4, 4, 8)
    assert held["a"].links == (0, 1, 2, 3)
    held["a"] = replace(held["a"], cores=dict(reversed(held["a"].cores.items())))
    grown = resize([CARD], held, "a", Wanted(8, 8 * MIB), 1).after
    assert (list(grown.cores), grown.links) == ([3, 2, 1, 0], (0, 1, 2, 3))
    assert grown.core_count == 8
    assert revoke(held, "a", 1).after.links == ()


def test_a_function_with_links_does_not_go_to_other_chips() -> None:
    held: dict[str, Placement] = {}
    put(held, "a", 2, 2, 8)
    put(held, "b", 3, 1, 8)
    assert held["b"].cores == {0: (1, 2, 3)}
    with pytest.raises(CapacityError, match="1 of its 2 chips, which links join, have 2 cores"):
        resize([CARD], held, "a", Wanted(4, 8 * MIB), 1)
    held["a"] = replace(held["a"], links=())
    assert 0 not in resize([CARD], held, "a", Wanted(4, 8 * MIB), 1).after.cores


def test_every_reason_is_given() -> None:
    held: dict[str, Placement] = {}
    put(held, "a", 4, 1, 64)
    put(held, "b", 12, 3, 190)
    with pytest.raises(CapacityError) as caught:
        resize([CARD], held, "a", Wanted(8, 100 * MIB, Policy.GUARANTEED), 1, cpus=(0, 1))
    assert caught.value.code == "no-room"
    for text in ("0 of 4 chips have 8 cores", "2 MiB of memory free", "1 of its CPUs"):
        assert text in caught.value.message


@pytest.mark.parametrize(
    "wanted", [Wanted(0, MIB), Wanted(3, MIB), Wanted(2, 0), Wanted(2, 100), Wanted(2, 1 << 50)]
)
def test_a_size_that_no_function_has(wanted: Wanted) -> None:
    held: dict[str, Placement] = {}
    put(held, "a", 2, 2, 1)
    with pytest.raises(UsageError) as caught:
        resize([CARD], held, "a", wanted, 1)
    assert caught.value.code == "resize-invalid"


def test_a_card_that_is_gone() -> None:
    with pytest.raises(CapacityError, match="not configured any more"):
        resize([CARD], {"a": Placement("old", {0: (0,)})}, "a", Wanted(1, MIB), 1)


def test_guaranteed_cpus_are_kept() -> None:
    held = {"a": Placement("card0", {0: (0, 1)}, (Range(0, 0, MIB),), (), 0, (2, 3))}
    wanted = Wanted(1, MIB, Policy.GUARANTEED)
    assert resize([CARD], held, "a", wanted, 1, range(4)).after.cpus == (2,)
    wanted = Wanted(3, MIB, Policy.GUARANTEED)
    assert resize([CARD], held, "a", wanted, 1, range(4)).after.cpus == (1, 2, 3)


def test_revoking_scrubs_all() -> None:
    held: dict[str, Placement] = {}
    put(held, "a", 2, 2, 16)
    plan = revoke(held, "a", 7)
    assert (plan.verb, plan.after, plan.epoch) == (Verb.REVOKE, NOTHING, 8)
    assert plan.scrub_bytes == 16 * MIB
    assert plan.estimate_ms >= 20
    with pytest.raises(UsageError, match="revoked"):
        resize([CARD], {"a": NOTHING}, "a", Wanted(1, MIB), 8)


SIZES = st.tuples(st.integers(1, 4), st.sampled_from([1, 1, 1, 2, 4]), st.integers(1, 90))


@given(st.lists(SIZES, min_size=1, max_size=10), st.lists(st.tuples(st.integers(0, 9), SIZES)))
def test_any_sequence_of_resizes_keeps_functions_apart(
    made: list[tuple[int, int, int]], changes: list[tuple[int, tuple[int, int, int]]]
) -> None:
    """Disjoint, inside the card, of the size that was asked for; addresses below the smaller size
    stay the same memory; the table fits; what was refused was short by count.
    """
    held: dict[str, Placement] = {}
    for number, (each, chips, memory) in enumerate(made):
        put(held, str(number), each * chips, chips, memory)
    for who, (each, _, memory) in changes:
        name = str(who)
        if name not in held:
            continue
        before = held[name]
        wanted = Wanted(each * len(before.cores), memory * MIB)
        try:
            plan = resize([CARD], held, name, wanted, 1)
        except CapacityError:
            used = sum(item.memory_bytes for uuid, item in held.items() if uuid != name)
            room = CARD.memory_bytes - used < wanted.memory_bytes
            pieces = len(before.ranges) > 1 or not room
            own = {pair for uuid, item in held.items() if uuid != name for pair in item.pairs()}
            able = sum(
                sum((chip, core) not in own for core in range(4)) >= each for chip in range(4)
            )
            assert room or pieces or able < len(before.cores)
            continue
        assert plan.after.core_count == wanted.cores
        assert plan.after.memory_bytes == wanted.memory_bytes
        assert len(plan.after.cores) == len(before.cores)
        assert len({len(cores) for cores in plan.after.cores.values()}) == 1
        assert len(checked(lay(plan.after.ranges), "test")) <= LIMITS.segments
        least = min(before.memory_bytes, plan.after.memory_bytes)
        assert flat(before.ranges)[: least // MIB] == flat(plan.after.ranges)[: least // MIB]
        assert plan.scrub_bytes == max(0, before.memory_bytes - plan.after.memory_bytes)
        held[name] = plan.after
        assert violations([CARD], held) == []


def flat(ranges: tuple[Range, ...]) -> list[tuple[int, int]]:
    """The memory MiB by MiB, as the function sees it."""
    return [(r.bank, at) for r in ranges for at in range(r.start, r.end, MIB)]
