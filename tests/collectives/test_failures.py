"""Collectives that fail: one error, on every rank, that says who and what."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.collectives import messages
from accelvisor.collectives.communicator import Options, begin
from accelvisor.collectives.hops import Send
from accelvisor.collectives.kinds import Op
from accelvisor.collectives.local import LocalGroup, Simulation
from accelvisor.collectives.messages import NOBODY, Call, Collective, Head, Kind, Order, Reason
from accelvisor.collectives.verdict import Report, judge
from accelvisor.errors import AccelvisorError, DataError, UsageError

ALL = list(Collective)


def start(
    collective: Collective, size: int, differs: dict[int, dict[str, Any]], **options: Any
) -> list[Any]:
    """Generators of all ranks; ``differs``: rank -> what it calls otherwise."""
    ranks = []
    for rank in range(size):
        own = dict(differs.get(rank, {}))
        x = own.pop("array", np.arange(40, dtype=np.float32))
        which = own.pop("collective", collective)
        chunk = own.pop("chunk_bytes", 0)
        chosen = Options(chunk_bytes=chunk, **(options | own.pop("options", {})))
        grid = (1, size) if which is Collective.ALL_REDUCE_2D else (0, 0)
        ranks.append(begin(which, x, rank, size, chosen, **({"grid": grid} | own))[1])
    return ranks


DIFFERENCES: dict[str, dict[str, Any]] = {
    "shape (4, 10), not (40,)": {"array": np.zeros((4, 10), np.float32)},
    "shape (41,), not (40,)": {"array": np.zeros(41, np.float32)},
    "dtype int32, not float32": {"array": np.zeros(40, np.int32)},
    "op max, not sum": {"op": Op.MAX},
    "chunk 64, not 0": {"chunk_bytes": 256},
}


@pytest.mark.parametrize("collective", ALL)
@pytest.mark.parametrize("said", DIFFERENCES)
def test_a_different_call_is_the_same_error_on_every_rank(
    collective: Collective, said: str
) -> None:
    for size, odd in ((2, 1), (3, 0), (5, 2), (8, 7)):
        for seed in range(3):
            steps = start(collective, size, {odd: DIFFERENCES[said]})
            errors = Simulation(steps, seed=seed).run()
            assert len({str(e) for e in errors}) == 1, errors
            assert all(isinstance(e, UsageError) for e in errors)
            assert errors[0].code == "collective-mismatch"
            if size > 2:
                assert f"rank {odd} has {said}" in str(errors[0])


@pytest.mark.parametrize(
    ("collective", "differs"),
    [
        (Collective.BROADCAST, {"root": 1}),
        (Collective.REDUCE, {"root": 1}),
        (Collective.REDUCE, {"options": {"order": "rank"}}),
        (Collective.ALL_REDUCE, {"options": {"order": "rank"}}),
        (Collective.ALL_REDUCE, {"collective": Collective.BROADCAST}),
        (Collective.BROADCAST, {"collective": Collective.ALL_GATHER}),
        (Collective.REDUCE_SCATTER, {"collective": Collective.REDUCE}),
        (Collective.ALL_REDUCE_2D, {"grid": (4, 1)}),
        (Collective.ALL_REDUCE_2D, {"grid": (2, 2)}),
    ],
)
def test_another_root_order_grid_or_collective_too(
    collective: Collective, differs: dict[str, Any]
) -> None:
    for odd, seed in itertools.product(range(4), range(5)):
        errors = Simulation(start(collective, 4, {odd: differs}), seed=seed).run()
        assert {e.code for e in errors} == {"collective-mismatch"}
        assert len({str(e) for e in errors}) == 1
        assert f"rank {odd} has" in str(errors[0])


@settings(max_examples=150, deadline=None)
@given(
    collective=st.sampled_from(ALL), size=st.integers(2, 9), lost=st.integers(0, 8),
    after=st.integers(0, 40), seed=st.integers(0, 2**32), order=st.sampled_from(["ring", "rank"]),
)  # fmt: skip
def test_a_lost_rank_is_named_by_every_rank_that_does_not_end_well(
    collective: Collective, size: int, lost: int, after: int, seed: int, order: str
) -> None:
    lost %= size
    if collective in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE_2D):
        order = "ring"
    simulation = Simulation(
        start(collective, size, {}, order=order), seed=seed, stops={lost: after}
    )
    results = simulation.run()
    errors = [r for i, r in enumerate(results) if i != lost and isinstance(r, AccelvisorError)]
    assert {e.code for e in errors} <= {"collective-rank-lost"}
    assert len({str(e) for e in errors}) <= 1
    for error in errors:
        assert f"lost rank {lost} (" in str(error)
    if after == 0 and (collective not in (Collective.REDUCE, Collective.BROADCAST)):
        assert len(errors) == size - 1
    # Nobody waits longer than a deadline for a message and half of one for reports.
    assert simulation.now <= 1.5 + 1e-9


def test_nobody_can_end_a_rooted_collective_before_all_have_begun_it() -> None:
    for collective in (Collective.BROADCAST, Collective.REDUCE):
        for lost in range(5):
            results = Simulation(start(collective, 5, {}), stops={lost: 0}).run()
            errors = [str(r) for i, r in enumerate(results) if i != lost]
            assert len(set(errors)) == 1
            assert f"lost rank {lost} (it never began)" in errors[0]


def test_the_last_step_of_a_lost_rank_is_told() -> None:
    # Rank 1 of 4: a send, then (a receive, a send) for each step: lost before its third send.
    results = Simulation(start(Collective.ALL_REDUCE, 4, {}), stops={1: 4}).run()
    assert "lost rank 1 (its last step was 1)" in str(results[0])


def test_two_lost_ranks_are_both_named() -> None:
    results = Simulation(start(Collective.ALL_REDUCE, 6, {}), stops={1: 0, 4: 0}).run()
    assert "lost rank 1 (it never began), rank 4 (it never began)" in str(results[0])


def test_a_damaged_message_is_the_same_error_on_every_rank() -> None:
    for seed in range(30):
        source = random.Random(seed)
        steps = start(Collective.ALL_REDUCE, 4, {}, compress="always")
        simulation = Simulation(steps, seed=seed)
        victim = source.randrange(4)
        nth = source.randrange(1, 7)
        _damage(simulation, victim, nth, source)
        results = simulation.run()
        errors = [r for r in results if isinstance(r, AccelvisorError)]
        # Whoever has its result from the others already, as they are, keeps it.
        assert len(errors) == 4 or nth > 3
        assert {e.code for e in errors} == {"collective-message"}
        right = f"rank {(victim + 1) % 4} received a message that is damaged"
        assert {str(e) for e in errors} == {right}


def _damage(simulation: Simulation, rank: int, nth: int, source: random.Random) -> None:
    """Flip a bit of a payload of ``rank``'s, as it is sent."""
    obey = simulation._obey
    count = 0

    def changed(sender: int, command: Any) -> None:
        nonlocal count
        if sender == rank and isinstance(command, Send) and not command.report:
            count += 1
            if count == nth:
                raw = bytearray(np.frombuffer(command.payload, np.uint8).tobytes())
                raw[source.randrange(len(raw))] ^= 1 << source.randrange(8)
                command = command._replace(payload=bytes(raw))
        obey(sender, command)

    simulation._obey = changed  # type: ignore[method-assign]


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=messages.HEADER_BYTES, max_size=messages.HEADER_BYTES), st.booleans())
def test_any_bytes_are_a_header_or_refused(raw: bytes, marked: bool) -> None:
    if marked:
        raw = messages.MAGIC + bytes([0, 0, 1, 0, 1, 0]) + raw[10:]
    try:
        head = messages.decode(raw)
    except DataError:
        return
    assert messages.decode(messages.encode(head)) == head


def test_a_header_survives() -> None:
    call = Call(Collective.REDUCE, (3, 0, 2**40), 4, Op.ABSMAX, Order.RANK, 500, 7, 2, 3, 64)
    for head in (
        Head(Kind.DATA, messages.Form.PACKED, call, 499, 17, 2**31, 2**32 - 1, 2**50),
        Head(Kind.REPORT, Reason.SLOW, call, 0, 1, NOBODY, 0, 0),
    ):
        assert messages.decode(messages.encode(head)) == head
    with pytest.raises(UsageError):
        messages.encode(Head(Kind.DATA, 0, Call(*_nine_dims(call)), 0, 0, 0, 0, 0))


def _nine_dims(call: Call) -> list[Any]:
    return [call.collective, (1,) * 9, call.dtype, call.op, call.order, call.size]


# --- verdicts ------------------------------------------------------------------------------------

CALL = Call(Collective.ALL_REDUCE, (4,), 1, Op.SUM, Order.RING, 4)


def test_a_rank_that_ended_well_and_is_silent_is_not_lost() -> None:
    """Rank 3 has its result and is gone; rank 2 died before it sent rank 3's part on."""
    reports = {0: Report(CALL, 5, Reason.TOLD, 6, 1), 1: Report(CALL, 5, Reason.LATE, 5, 2)}
    assert "lost rank 2 (its last step was 4)" in str(judge(4, reports))
    assert "rank 3" not in str(judge(4, reports))


def test_a_rank_that_is_further_is_not_blamed() -> None:
    reports = {
        0: Report(CALL, 6, Reason.TOLD, 0, 3),
        1: Report(CALL, 5, Reason.LATE, 5, 2),
        3: Report(CALL, 5, Reason.TOLD, 5, 2),
    }
    assert "lost rank 2" in str(judge(4, reports))


def test_a_rank_that_keeps_others_waiting_is_lost_though_it_reports() -> None:
    reports = {r: Report(CALL, 0, Reason.LATE, 1, (r - 1) % 4) for r in range(4)}
    assert judge(4, reports).code == "collective-deadline"
    reports[2] = Report(CALL, 0, Reason.SLOW, 0, 1)
    assert "lost rank 2" in str(judge(4, reports))


def test_a_tie_of_two_calls_goes_to_the_lowest_rank() -> None:
    other = Call(Collective.ALL_REDUCE, (5,), 1, Op.SUM, Order.RING, 4)
    calls = enumerate([CALL, other] * 2)
    reports = {r: Report(c, 0, Reason.DIFFERENT, 0, NOBODY) for r, c in calls}
    text = str(judge(4, reports))
    assert "rank 1 has shape (5,), not (4,) | rank 3 has shape (5,), not (4,)" in text
    assert "rank 0 has" not in text


# --- threads -------------------------------------------------------------------------------------


def test_threads_with_a_lost_rank_end_within_their_deadline() -> None:
    group = LocalGroup(4, Options(deadline_s=0.2))
    results = group.run(lambda c: c.all_reduce(np.ones(1000, np.float32)), absent=[2])
    assert [r.code for i, r in enumerate(results) if i != 2] == ["collective-rank-lost"] * 3
    assert len({str(r) for i, r in enumerate(results) if i != 2}) == 1
    # And from then on each call says it again, at once.
    again = group.run(lambda c: c.broadcast(np.ones(3)), absent=[2])
    assert [str(a) for a in again] == [str(r) for r in results]


def test_a_rank_that_comes_too_late_hears_of_it() -> None:
    group = LocalGroup(3, Options(deadline_s=0.1))
    work = lambda c: c.all_reduce(np.ones(10, np.float32))  # noqa: E731
    first = group.run(work, absent=[1])
    late = group.run(work, absent=[0, 2])
    assert str(late[1]) == str(first[0])


def test_a_clock_of_another_kind_makes_deadlines() -> None:
    now = itertools.count(0, 1000)
    group = LocalGroup(2, Options(deadline_s=1000), clock=lambda: float(next(now)))
    [error, _] = group.run(lambda c: c.all_gather(np.ones(2)), absent=[1])
    assert error.code == "collective-rank-lost"


def test_threads_give_the_bits_of_the_simulation_on_any_array() -> None:
    random_ = np.random.default_rng(0)
    arrays = [random_.standard_normal((40, 50)).astype("f4")[::2, ::3] for _ in range(4)]
    results = LocalGroup(4).run(lambda c: c.all_reduce(arrays[c.rank], order="rank"))
    wanted = ((arrays[0] + arrays[1]) + arrays[2]) + arrays[3]
    assert all(r.shape == (20, 17) and r.tobytes() == wanted.tobytes() for r in results)


def test_many_collectives_in_a_row_and_what_they_sent() -> None:
    def work(c: Any) -> tuple[int, int]:
        for _ in range(50):
            c.all_reduce(np.zeros(4096, np.float32), chunk_bytes=0)
            c.broadcast(np.ones((), np.int64), root=1)
        c.all_reduce(np.zeros(4096, np.float32), chunk_bytes=0)
        return c.stats.sent_bytes, c.stats.dense_bytes

    for sent, dense in LocalGroup(4).run(work):
        # 6 messages of 1024 zeros: header, packed header and mask.
        assert sent == 6 * (128 + 16 + 128)
        assert dense == 6 * (128 + 4096)


def test_a_program_error_of_a_rank_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        LocalGroup(1).run(lambda c: 1 // 0)
    with pytest.raises(UsageError):
        LocalGroup(0)
