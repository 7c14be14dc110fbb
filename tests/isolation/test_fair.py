"""Fair sharing, against plain definitions."""

from __future__ import annotations

import random
from collections import deque
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.errors import ConflictError, NotFoundError, UsageError
from accelvisor.isolation.fair import DeficitRoundRobin, Demand, TokenBucket, max_min

NAMES = st.sampled_from("abcdefgh")
DEMANDS = st.builds(
    Demand, st.integers(1, 12) | st.integers(1, 1000), st.none() | st.integers(0, 120)
)
FLOWS = st.dictionaries(NAMES, DEMANDS, max_size=6)
LARGE = st.dictionaries(
    NAMES, st.builds(Demand, st.integers(1, 1000), st.none() | st.integers(0, 1 << 45))
)


# --- max-min --------------------------------------------------------------------------------------


def unit_by_unit(capacity: int, demands: dict[str, Demand]) -> dict[str, int]:
    """The definition: the next unit to whoever would have least for its weight."""
    shares = dict.fromkeys(demands, 0)
    for _ in range(capacity):
        hungry = [
            (Fraction(shares[name] + 1, weight), name)
            for name, (weight, wanted) in demands.items()
            if wanted is None or shares[name] < wanted
        ]
        if not hungry:
            break
        shares[min(hungry)[1]] += 1
    return shares


@given(st.integers(0, 300), FLOWS)
def test_it_is_its_definition(capacity: int, demands: dict[str, Demand]) -> None:
    assert max_min(capacity, demands) == unit_by_unit(capacity, demands)


@given(st.integers(0, 1 << 46), LARGE)
def test_shares_are_max_min_fair(capacity: int, demands: dict[str, Demand]) -> None:
    shares = max_min(capacity, demands)
    assert shares.keys() == demands.keys()
    total = sum(capacity if d.wanted is None else d.wanted for d in demands.values())
    assert sum(shares.values()) == min(capacity, total)
    for name, (weight, wanted) in demands.items():
        assert shares[name] >= 0
        assert wanted is None or shares[name] <= wanted
        if wanted is None or shares[name] < wanted:
            # Nobody has more for its weight than this one would have with one unit more.
            for other, demand in demands.items():
                assert shares[other] * weight <= (shares[name] + 1) * demand.weight


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), LARGE)
def test_more_capacity_takes_from_nobody(one: int, more: int, demands: dict[str, Demand]) -> None:
    before, after = max_min(one, demands), max_min(one + more, demands)
    assert all(before[name] <= after[name] for name in demands)


@given(st.integers(0, 1 << 40), LARGE, st.data())
def test_who_wants_more_gets_no_less_and_others_no_more(
    capacity: int, demands: dict[str, Demand], data: st.DataObject
) -> None:
    bounded = [name for name, demand in demands.items() if demand.wanted is not None]
    if not bounded:
        return
    name = data.draw(st.sampled_from(bounded))
    weight, wanted = demands[name]
    greedier = {**demands, name: Demand(weight, wanted + data.draw(st.integers(0, 1 << 40)))}
    before, after = max_min(capacity, demands), max_min(capacity, greedier)
    assert after[name] >= before[name]
    assert all(after[other] <= before[other] for other in demands if other != name)


@given(st.integers(0, 1 << 40), LARGE, st.randoms(use_true_random=False))
def test_the_order_of_flows_does_not_matter(
    capacity: int, demands: dict[str, Demand], order: random.Random
) -> None:
    names = list(demands)
    order.shuffle(names)
    assert max_min(capacity, {name: demands[name] for name in names}) == max_min(capacity, demands)


@pytest.mark.parametrize(
    ("capacity", "demand"), [(-1, Demand(1, 1)), (1, Demand(0, 1)), (1, Demand(1, -1))]
)
def test_impossible_shares_are_refused(capacity: int, demand: Demand) -> None:
    with pytest.raises(UsageError):
        max_min(capacity, {"a": demand})


# --- deficit round robin --------------------------------------------------------------------------

LONGEST = 90
SIZES = st.integers(1, LONGEST)


def arbiter(weights: dict[str, int]) -> DeficitRoundRobin:
    made = DeficitRoundRobin(LONGEST)
    for name, weight in weights.items():
        made.add(name, weight)
    return made


@given(
    st.dictionaries(NAMES, st.integers(1, 9), min_size=2, max_size=4),
    st.lists(SIZES, min_size=60, max_size=60),
    st.integers(0, 59),
)
@settings(deadline=None)
def test_service_differs_by_no_more_than_the_bound(
    weights: dict[str, int], sizes: list[int], begin: int
) -> None:
    """Over every interval that begins somewhere, between any two flows that always want."""
    made = arbiter(weights)
    for name in weights:
        for at in range(60):
            made.push(name, sizes[(at + ord(name)) % 60])
    served = dict.fromkeys(weights, 0)
    left = dict.fromkeys(weights, 60)
    for step in range(60 * len(weights)):
        taken = made.pop()
        assert taken is not None
        left[taken[0]] -= 1
        if not left[taken[0]]:
            break  # from here on it does not want any more
        if step < begin:
            continue
        served[taken[0]] += taken[1]
        ahead, wa = taken[0], weights[taken[0]]
        for behind, wb in weights.items():
            # served / weight apart by scale + longest / weight of both, times both weights
            apart = served[ahead] * wb - served[behind] * wa
            assert apart <= made.scale * wa * wb + LONGEST * (wa + wb)


@given(st.lists(st.tuples(NAMES, st.sampled_from(["add", "remove", "push", "pop"]), SIZES)))
def test_nothing_is_lost_reordered_or_left_waiting(steps: list[tuple[str, str, int]]) -> None:
    """Flows come and go; whenever a packet waits one is sent, in the order of its flow."""
    made, waiting = DeficitRoundRobin(LONGEST), dict[str, deque[int]]()
    for name, what, size in steps:
        if what == "add" and name not in waiting:
            made.add(name, size)
            waiting[name] = deque()
        elif what == "remove" and name in waiting:
            assert made.remove(name) == list(waiting.pop(name))
        elif what == "push" and name in waiting:
            made.push(name, size)
            waiting[name].append(size)
        elif what == "pop":
            sent = made.pop()
            assert (sent is None) == (not any(waiting.values()))
            if sent is not None:
                assert waiting[sent[0]].popleft() == sent[1]
        assert len(made) == sum(map(len, waiting.values()))


def test_each_visit_sends_a_packet() -> None:
    """What makes a packet cost O(1): no flow is looked at twice for one packet."""
    made = arbiter({"a": 1, "b": 3})
    looks = 0

    class Counting(deque[int]):
        def __getitem__(self, at: object) -> int:
            nonlocal looks
            looks += 1
            return super().__getitem__(at)  # type: ignore[call-overload]

    for name in "ab":
        made._flows[name].packets = Counting()
        for _ in range(1000):
            made.push(name, LONGEST)
    for _ in range(2000):
        assert made.pop()
    assert looks <= 2 * 2000


def test_a_flow_that_rested_has_no_credit() -> None:
    made = arbiter({"a": 1, "b": 1})
    for _ in range(50):
        made.push("a", LONGEST // 2 + 1)
        assert made.pop() == ("a", LONGEST // 2 + 1)
    for _ in range(10):
        made.push("a", LONGEST)
        made.push("b", LONGEST)
    order = [sent[0] for sent in iter(made.pop, None)]
    assert order[:6] in (list("ababab"), list("bababa"))


def test_flows_that_are_not_there_are_named() -> None:
    made = arbiter({"a": 1})
    with pytest.raises(ConflictError):
        made.add("a", 1)
    with pytest.raises(NotFoundError):
        made.push("b", 1)
    with pytest.raises(NotFoundError):
        made.remove("b")
    for size in (0, LONGEST + 1):
        with pytest.raises(UsageError):
            made.push("a", size)
    assert made.pop() is None


# --- token bucket ---------------------------------------------------------------------------------

TAKES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3_000_000)), min_size=1)


@given(st.integers(1, 10**9), st.integers(0, 5000), TAKES)
def test_no_interval_has_more_than_its_rate_and_one_burst(
    rate: int, burst: int, takes: list[tuple[int, int]]
) -> None:
    """Bytes go when ``take`` says; what went after any of them is held against the rate."""
    bucket, now, gone = TokenBucket(rate, burst), 0, [(0, 0)]
    for nbytes, pause_us in takes:
        now += pause_us * 1000
        wait = round(bucket.take(nbytes, now / 1e9) * 1e9)
        assert wait >= 0
        gone.append((now + wait, nbytes))
    for first, (since, _) in enumerate(gone):
        sent = 0
        for at, nbytes in gone[first + 1 :]:
            sent += nbytes
            # A float's second has room for its nanoseconds, give or take one.
            assert sent * 10**9 <= burst * 10**9 + rate * (at - since + 2)


@given(st.integers(1, 10**9), st.integers(1, 5000))
@settings(deadline=None)
def test_the_rate_is_exact_in_the_long_run(rate: int, piece: int) -> None:
    """Nothing is lost to rounding, however many pieces there are."""
    bucket, now = TokenBucket(rate, 0), 0.0
    for _ in range(500):
        now = max(now, bucket.take(piece, 0.0))
    assert now == pytest.approx(500 * piece / rate, abs=1.1e-9, rel=1e-12)


def test_waiting_as_told_gives_the_rate() -> None:
    """A sender that waits each time, and always wakes a little late, still gets its rate."""
    rate = 1_000_003
    bucket, now, sent = TokenBucket(rate, 20_000), 100.0, 0
    bucket.take(20_000, now)
    began = now
    while now < began + 60:
        wait = bucket.take(4096, now)
        now += wait + 0.0003 if wait else 0.0
        sent += 4096
    assert sent / (now - began) == pytest.approx(rate, rel=1e-3)


def test_a_clock_that_goes_back_grants_nothing_and_stops_nothing() -> None:
    bucket = TokenBucket(1000, 100, now=5000.0)
    assert bucket.take(100, 5000.0) == 0
    assert bucket.take(50, 10.0) == pytest.approx(0.05)
    assert bucket.take(50, 10.05) == pytest.approx(0.05)
    assert bucket.take(0, 10.1) == 0


@pytest.mark.parametrize("now", [0.0, 1e6])
def test_no_rate_is_no_limit(now: float) -> None:
    bucket = TokenBucket(0, 0)
    assert bucket.take(1 << 60, now) == 0
    assert bucket.holds(1 << 60, now)
    bucket.set_rate(1000, 10, now)
    assert bucket.take(1000, now) == pytest.approx(1.0)


def test_who_waits_already_is_told_anew_when_the_rate_changes() -> None:
    bucket = TokenBucket(1000, 0)
    assert bucket.take(1000, 0.0) == 1.0
    first = bucket.taken
    assert bucket.take(1000, 0.0) == 2.0
    second = bucket.taken
    assert (bucket.left(first, 0.5), bucket.left(second, 0.5)) == (0.5, 1.5)
    bucket.set_rate(500, 0, 0.5)
    assert (bucket.left(first, 0.5), bucket.left(second, 0.5)) == (1.0, 3.0)
    bucket.set_rate(0, 0, 0.6)
    assert bucket.left(second, 0.6) == 0.0


def test_a_burst_is_saved_up_and_no_more() -> None:
    bucket = TokenBucket(1000, 300)
    bucket.take(300, 0.0)
    assert not bucket.holds(1, 0.0)
    assert bucket.holds(300, 10.0)
    assert not bucket.holds(301, 10.0)


@pytest.mark.parametrize(("rate", "burst"), [(-1, 0), (0, -1)])
def test_impossible_rates_are_refused(rate: int, burst: int) -> None:
    with pytest.raises(UsageError):
        TokenBucket(rate, burst)
