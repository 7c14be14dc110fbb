"""The scheduler: what it promises, checked on traces of whole runs."""

from __future__ import annotations

import itertools
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.abi.commands import ANY_CHIP
from accelvisor.function.scheduler import COMPUTE, QUANTUM, Command, Scheduler, Step
from accelvisor.limits import LIMITS
from benchmarks.scheduling import Order, in_order, simulate, workload


@st.composite
def programs(draw: st.DrawFn) -> list[list[Order]]:
    """Some queues of commands that depend on earlier ones of theirs."""
    queues = []
    for _ in range(draw(st.integers(1, 3))):
        program: list[Order] = []
        for number in range(1, draw(st.integers(1, 60)) + 1):
            on = draw(st.sampled_from([0, 0, *(o.own for o in program if o.own)][-20:] or [0]))
            own = number if draw(st.booleans()) else 0
            program.append(Order(own, on, draw(st.integers(1, 5000))))
        queues.append(program)
    return queues


@settings(max_examples=200, deadline=None)
@given(programs(), st.integers(1, 4))
def test_traces_keep_every_rule(queues: list[list[Order]], engines: int) -> None:
    trace = simulate(queues, engines)
    assert not trace.refused
    spans = []
    for program, begins, ends in zip(queues, trace.begins, trace.ends, strict=True):
        assert set(begins) == set(ends) == set(range(len(program)))
        owners = {order.own: n for n, order in enumerate(program) if order.own}
        last: dict[int, int] = {}
        for n, order in enumerate(program):
            assert ends[n] - begins[n] == order.cost
            spans += [(begins[n], 1), (ends[n], -1)]
            if order.on:
                assert begins[n] >= ends[owners[order.on]]
                assert begins[n] >= last.get(order.on, 0)  # waiters keep their order
                last[order.on] = begins[n]
    at_work = 0
    for _, change in sorted(spans):
        at_work += change
        assert at_work <= engines


def test_the_stream_runs_ahead_of_its_slow_commands() -> None:
    gains = []
    for seed in range(30):
        program = workload(seed)
        gains.append(in_order(program) / simulate([program]).makespan)
    assert mean(gains) >= 1.9
    assert min(gains) > 1.7


def test_without_dependencies_and_in_a_chain_it_is_as_fast_as_one_by_one() -> None:
    free = [Order(0, 0, 100 + n % 7) for n in range(500)]
    assert simulate([free]).makespan == in_order(free)
    chain = [Order(n, n - 1, 50) for n in range(1, 300)]
    assert simulate([chain]).makespan == in_order(chain) == 299 * 50


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=4), st.integers(0, 2**32))
def test_nobody_waits_longer_than_everybodys_quanta(weights: list[int], seed: int) -> None:
    """Queues that always have work on one engine: between two commands of one, every other starts
    at most what it may: a quantum for each round, and what it could have saved.
    """
    programs = [[Order(0, 0, 300 * weight)] * (200 // weight) for weight in weights]
    trace = simulate(programs, engines=1)
    full = min(max(ends.values()) for ends in trace.ends)
    for lane, program in enumerate(programs):
        begins = sorted(trace.begins[lane].values())
        cost = program[0].cost
        rounds = 1 + -(-cost // QUANTUM)
        most = sum(
            rounds * QUANTUM + other[0].cost
            for n, other in enumerate(programs)
            if n != lane
        )
        for one, two in itertools.pairwise(begins):
            if two < full:
                assert two - one <= cost + most


def test_queues_with_short_and_with_long_commands_get_the_same_share() -> None:
    trace = simulate([[Order(0, 0, 50)] * 4000, [Order(0, 0, 7000)] * 30], engines=2)
    half = trace.makespan // 3
    got = [
        sum(min(end, half) - begin for begin, end in zip(begins.values(), ends.values(),
            strict=True) if begin < half)
        for begins, ends in zip(trace.begins, trace.ends, strict=True)
    ]  # fmt: skip
    assert got[0] == pytest.approx(got[1], rel=0.15)


def command(own: int = 0, on: int = 0, lane: int = 0, cost: int = 1) -> Command:
    return Command(lane, 0, own, on, ANY_CHIP, COMPUTE, cost)


def test_more_waiting_queues_or_waiters_than_there_is_room_for_stay_in_the_ring() -> None:
    scheduler = Scheduler(2, 1)
    for own in range(1, LIMITS.waiting_queues + 2):
        scheduler.taken(command(own))
    for on in range(1, LIMITS.waiting_queues + 1):
        for _ in range(LIMITS.waiting_commands):
            waits = command(on=on)
            assert scheduler.consider(waits) is Step.WAIT
            scheduler.taken(waits)
            scheduler.parked(waits)
        assert scheduler.consider(command(on=on)) is Step.STAY
    assert scheduler.consider(command(on=LIMITS.waiting_queues + 1)) is Step.STAY
    assert scheduler.consider(command(lane=1)) is Step.GO


def test_an_id_is_forgotten_after_256_others_and_lives_again_when_it_is_reused() -> None:
    scheduler = Scheduler(1, 1)
    for own in range(1, LIMITS.completed_ids + 2):
        scheduler.taken(command(own))
        scheduler.ended(command(own), well=True)
    assert scheduler.consider(command(on=1)) is Step.UNKNOWN
    assert scheduler.consider(command(on=2)) is Step.GO
    scheduler.taken(command(2))
    assert scheduler.consider(command(on=2)) is Step.WAIT
