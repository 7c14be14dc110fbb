"""Where threads run: apart while they share an operation, anywhere afterwards."""

from __future__ import annotations

import os
import threading

import hypothesis.strategies as st
from hypothesis import given

from accelvisor.function.placement import Placement, current_cpu, settle, shares, short_turns
from accelvisor.function.pool import Pool
from tests.function.test_pool import Tiles, run


@given(st.frozensets(st.integers(0, 40), min_size=1), st.data(), st.integers(1, 12))
def test_shares_use_every_processor_once_while_there_are_enough(
    allowed: frozenset[int], data: st.DataObject, others: int
) -> None:
    mine = data.draw(st.sampled_from(sorted(allowed)))
    given_out = shares(allowed, mine, others)
    if len(allowed) == 1:
        assert given_out == []
        return
    assert len(given_out) == others
    assert all(share and share <= allowed - {mine} for share in given_out)
    if others < len(allowed):
        assert sum(map(len, given_out)) == len(allowed) - 1
        assert set().union(*given_out) == allowed - {mine}


def test_cores_of_one_operation_run_on_different_processors_and_keep_their_freedom() -> None:
    allowed = os.sched_getaffinity(0)
    pool = Pool(2)
    meeting = threading.Barrier(2, timeout=30)
    where: list[int] = []

    def body(tile: int) -> None:
        meeting.wait()
        where.append(current_cpu())
        meeting.wait()

    try:
        for _ in range(50):
            where.clear()
            run(pool, Tiles(2, body))
            assert len(set(where)) == min(2, len(allowed))
            assert os.sched_getaffinity(0) == allowed
    finally:
        pool.close()


def test_with_one_processor_nobody_is_moved() -> None:
    seen: list[object] = []

    def stay() -> None:
        only = {min(os.sched_getaffinity(0))}
        os.sched_setaffinity(0, only)
        pool = Pool(3)
        seen.append(run(pool, Tiles(20))[0])
        seen.append(os.sched_getaffinity(0) == only)
        pool.close()

    thread = threading.Thread(target=stay)
    thread.start()
    thread.join()
    assert seen == [20, True]


def test_processors_that_are_not_there_leave_a_thread_where_it_may_run() -> None:
    allowed = os.sched_getaffinity(0)
    settle({1023})
    assert os.sched_getaffinity(0) == allowed


def test_each_number_of_helpers_has_shares_of_its_own() -> None:
    allowed = os.sched_getaffinity(0)
    placement = Placement()
    for helpers in (1, 3, 2):
        assert len(placement.spread(helpers)) == (helpers if len(allowed) > 1 else 0)
        placement.gather()
    assert os.sched_getaffinity(0) == allowed


def test_asking_for_short_turns_leaves_the_priority_alone() -> None:
    seen: list[bool] = []

    def ask() -> None:
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)
        short_turns()
        after = os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)
        seen.append(before == after)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [True]
