"""Who gets which host CPUs, and who may borrow how many cores."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from accelvisor.isolation.resources import Card, Placement, Policy
from accelvisor.isolation.sharing import Member, Share, divide
from accelvisor.limits import MIB

CARD = Card("card0", 2, 4, 64 * MIB)


def member(
    first: int, cores: int, policy: Policy = Policy.BURSTABLE, weight: int = 100,
    cpus: tuple[int, ...] = (),
) -> Member:  # fmt: skip
    taken: dict[int, tuple[int, ...]] = {}
    for core in range(first, first + cores):
        taken[core // 4] = (*taken.get(core // 4, ()), core % 4)
    return Member(Placement("card0", taken, cpus=cpus), policy, weight)


def shares(members: dict[str, Member], cpus: int) -> dict[str, Share]:
    held = [item.placement for item in members.values()]
    return dict(divide(members, [CARD], held, range(cpus)))


def test_a_guaranteed_function_has_its_cpus_alone() -> None:
    found = shares(
        {"g": member(0, 2, Policy.GUARANTEED, cpus=(2, 3)), "b": member(2, 1)}, cpus=4
    )
    assert found["g"] == Share((2, 3), 100, 0)
    assert found["b"].cpus == (0, 1)


def test_best_effort_gets_what_is_left() -> None:
    assert shares({"e": member(0, 1, Policy.BEST_EFFORT)}, 8)["e"] == Share(tuple(range(8)), 0, 0)


def test_free_cores_are_lent_by_weight() -> None:
    found = shares({"a": member(0, 1, weight=100), "b": member(1, 1, weight=200)}, cpus=16)
    assert (found["a"].borrowed, found["b"].borrowed) == (2, 4)


def test_nobody_borrows_more_than_there_are_cpus_to_run_on() -> None:
    assert shares({"a": member(0, 1)}, cpus=2)["a"].borrowed == 0
    assert shares({"a": member(0, 1)}, cpus=3)["a"].borrowed == 1


def test_a_core_that_somebody_is_about_to_get_is_not_lent() -> None:
    members = {"a": member(0, 1)}
    held = [members["a"].placement, Placement("card0", {0: (1, 2, 3), 1: (0, 1, 2)})]
    assert divide(members, [CARD], held, range(16))["a"].borrowed == 1


MEMBERS = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from(list(Policy)), st.integers(1, 1000)), max_size=4
)


@given(MEMBERS, st.integers(1, 12))
def test_no_cpu_of_a_guaranteed_function_is_anybody_elses(
    made: list[tuple[int, Policy, int]], cpus: int
) -> None:
    members: dict[str, Member] = {}
    first, left = 0, list(range(cpus))
    for number, (cores, policy, weight) in enumerate(made):
        own: tuple[int, ...] = ()
        if policy is Policy.GUARANTEED:
            if len(left) <= cores:
                continue
            own = tuple(left[-cores:])
            del left[-cores:]
        members[str(number)] = member(first, cores, policy, weight, own)
        first += cores
    found = shares(members, cpus)
    assert found.keys() == members.keys()
    taken = 0
    for name, share in found.items():
        assert share.cpus
        for other, theirs in found.items():
            if name != other and members[name].policy is Policy.GUARANTEED:
                assert not set(share.cpus) & set(theirs.cpus)
        taken += len(members[name].placement.pairs()) + share.borrowed
    assert taken <= CARD.cores, "what is lent is free"
