"""When a checkpoint is due, and that what is due is taken."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from accelvisor.daemon.moving.anticipation import Anticipation, Health, Policy, Watchman
from accelvisor.daemon.store import Function
from tests.daemon.moving.resting import Host, function
from tests.function.harness import Process

FINE = Health()


def test_nothing_is_due_without_a_policy() -> None:
    one = Anticipation(Policy(), 0.0, FINE)
    assert one.due(1e9, Health(10**6, 10**6)) is None


def test_the_timer_begins_anew_with_each_one_whatever_it_was_for() -> None:
    one = Anticipation(Policy(every_s=60, faults=1), 100.0, FINE)
    assert one.due(159.9, FINE) is None
    assert one.due(160.0, FINE) == "timer"
    one.taken(160.0, FINE)
    assert one.due(200.0, Health(faults=1)) == "health"
    one.taken(200.0, Health(faults=1))
    assert one.due(259.0, Health(faults=1)) is None
    assert one.due(260.0, Health(faults=1)) == "timer"


def test_health_counts_since_the_last_one() -> None:
    one = Anticipation(Policy(faults=3, restarts=2), 0.0, Health(faults=10))
    assert one.due(1.0, Health(faults=12)) is None
    assert one.due(1.0, Health(faults=13)) == "health"
    one.taken(1.0, Health(faults=13))
    assert one.due(50.0, Health(faults=15)) is None
    assert one.due(50.0, Health(faults=13, restarts=2)) == "health"


def test_a_function_that_goes_from_bad_to_worse_is_not_captured_all_the_time() -> None:
    one = Anticipation(Policy(faults=1, rest_s=10), 0.0, FINE)
    one.taken(0.0, FINE)
    assert one.due(9.9, Health(faults=100)) is None
    assert one.due(10.0, Health(faults=100)) == "health"
    one.failed(10.0)
    assert one.due(15.0, Health(faults=100)) is None


def test_counters_that_went_back_are_a_new_processs() -> None:
    one = Anticipation(Policy(faults=2), 0.0, Health(faults=50))
    assert one.due(1.0, Health(faults=1)) is None
    assert one.due(2.0, Health(faults=3)) == "health"


def test_a_drain_captures_once_and_at_once() -> None:
    one = Anticipation(Policy(), 0.0, FINE)
    one.taken(0.0, FINE)
    assert one.due(0.1, FINE, draining=True) == "drain"
    one.taken(0.1, FINE, draining=True)
    assert one.due(0.2, FINE, draining=True) is None
    assert one.due(0.3, FINE) is None
    assert one.due(0.4, FINE, draining=True) == "drain", "another drain"


@given(st.lists(st.floats(0.01, 30.0), min_size=1, max_size=60))
def test_a_timer_is_never_late_by_more_than_one_look(steps: list[float]) -> None:
    policy = Policy(every_s=20)
    one, now, last = Anticipation(policy, 0.0, FINE), 0.0, 0.0
    for step in steps:
        before, now = now, now + step
        if one.due(now, FINE) == "timer":
            assert before - last < policy.every_s
            one.taken(now, FINE)
            last = now
        else:
            assert now - last < policy.every_s


# --- the watchman ---------------------------------------------------------------------------------


def test_the_timer_takes_chains_and_keeps_the_last(
    here: Host, one: tuple[Process, Function]
) -> None:
    async def work() -> None:
        man = Watchman(here.services, here.points, Policy(every_s=60, keep=2), lambda: False)
        for now in (0.0, 61.0, 100.0, 122.0, 183.0):
            await man.look(now)

    asyncio.run(work())
    entries = here.shelf.list()
    assert [e.name.partition("/")[2] for e in entries] == ["auto-1.1", "auto-1.2", "auto-1.3"]
    assert [bool(e.parent) for e in entries] == [False, True, True]


def test_a_worker_that_dies_again_and_again_is_captured(
    here: Host, one: tuple[Process, Function]
) -> None:
    async def work() -> None:
        man = Watchman(here.services, here.points, Policy(restarts=1), lambda: False)
        await man.look(0.0)
        one[0].kill_worker()
        await man.look(1.0)

    asyncio.run(work())
    assert ["(health)" in words for _, _, words in here.events] == [True]


def test_a_drain_takes_one_of_each_and_skips_what_moves(
    here: Host, one: tuple[Process, Function]
) -> None:
    with function(here) as (_, other):
        here.functions.held.add(other.uuid)

        async def work() -> None:
            man = Watchman(here.services, here.points, Policy(), lambda: True)
            await man.look(0.0)
            await man.look(1.0)

        asyncio.run(work())
    assert [e.function for e in here.shelf.list()] == [one[1].uuid]


def test_one_function_that_does_not_answer_holds_up_no_other(
    here: Host, one: tuple[Process, Function]
) -> None:
    with function(here) as (process, _):
        process.stop()

        async def work() -> None:
            man = Watchman(here.services, here.points, Policy(), lambda: True, poll_s=0.01)
            man.start()
            while not here.shelf.list():
                await asyncio.sleep(0.01)
            await man.stop()

        asyncio.run(work())
    assert [e.function for e in here.shelf.list()] == [one[1].uuid]
