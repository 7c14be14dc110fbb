"""One link: the table by search, the object against a plain twin, the record against damage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.errors import AccelvisorError, ConflictError, StateError, UsageError
from accelvisor.fabric.links import (
    CHIP_TABLE,
    FLIT_BYTES,
    LINK_TABLE,
    TRAINING_CYCLES,
    WINDOW,
    ChipEvent,
    ChipState,
    Link,
    LinkEvent,
    LinkState,
    Refusal,
)

S, E = LinkState, LinkEvent


def reach(start: S, without: Iterable[S] = (), events: Iterable[E] = tuple(E)) -> set[S]:
    """States that paths from ``start`` lead to, not through those of ``without``."""
    barred = set(without)
    found: set[S] = set()
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for event in events:
            move = LINK_TABLE[state, event]
            if isinstance(move, S) and move not in found | barred:
                found.add(move)
                queue.append(move)
    return found


def test_the_table_answers_every_pair() -> None:
    assert set(LINK_TABLE) == set(product(S, E))
    assert set(CHIP_TABLE) == set(product(ChipState, ChipEvent))


def test_only_a_link_that_is_up_takes_flits() -> None:
    assert {s for s in S if isinstance(LINK_TABLE[s, E.SEND], S)} == {S.UP}
    assert {s for s in S if isinstance(LINK_TABLE[s, E.DELIVER], S)} == {S.UP, S.DRAINING}


def test_nothing_is_up_that_has_not_trained_nor_down_that_has_not_drained() -> None:
    assert S.UP in reach(S.DOWN)
    for start in (S.DOWN, S.DRAINING, S.ERROR):
        assert S.UP not in reach(start, without=[S.TRAINING])
    assert S.DOWN in reach(S.UP)
    assert S.DOWN not in reach(S.UP, without=[S.DRAINING, S.ERROR])
    assert S.UP not in reach(S.DRAINING, without=[S.DOWN, S.ERROR])


def test_every_state_can_fail_and_every_state_comes_down() -> None:
    for state in S:
        assert LINK_TABLE[state, E.FAIL] is S.ERROR
        assert S.DOWN in reach(state) | {state}
    assert S.DOWN not in reach(S.ERROR, events=set(E) - {E.CLEAR})


def test_what_a_table_refuses_raises_its_code_and_changes_nothing() -> None:
    calls: dict[E, Callable[[Link], object]] = {
        E.ACTIVATE: lambda k: k.activate(0),
        E.SEND: lambda k: k.send(1),
        E.DELIVER: lambda k: k.deliver(1),
        E.RELEASE: lambda k: k.release(0),
        E.DEACTIVATE: lambda k: k.deactivate(0),
        E.CLEAR: lambda k: k.clear(),
    }
    for state, (event, call) in product(S, calls.items()):
        move = LINK_TABLE[state, event]
        if isinstance(move, Refusal):
            link = Link(state)
            with pytest.raises(ConflictError) as caught:
                call(link)
            assert (caught.value.code, link) == (move.value, Link(state))


def up() -> Link:
    link = Link()
    link.activate(5)
    link.advance(5 + TRAINING_CYCLES)
    return link


def test_training_takes_its_cycles() -> None:
    link = Link()
    link.activate(5)
    link.advance(4 + TRAINING_CYCLES)
    assert link.state is S.TRAINING
    link.advance(5 + TRAINING_CYCLES)
    assert link.state is S.UP


def test_a_window_is_eight_flits() -> None:
    link = up()
    assert [link.send(FLIT_BYTES) for _ in range(WINDOW + 1)] == [*range(1, 9), None]
    link.deliver(1)
    assert link.send(1) is None  # delivered, but its credit is not back
    link.release(0)
    assert link.send(1) == 9


@pytest.mark.parametrize("nbytes", [-1, FLIT_BYTES + 1])
def test_a_flit_has_a_size(nbytes: int) -> None:
    with pytest.raises(UsageError):
        up().send(nbytes)


def test_draining_ends_with_the_last_credit() -> None:
    link = up()
    link.send(1)
    link.send(1)
    link.deactivate(0)
    link.deliver(1)
    link.deliver(2)
    link.release(0)
    assert link.state is S.DRAINING
    link.release(0)
    assert link.state is S.DOWN


def test_a_failed_link_says_what_arrived_and_sends_the_rest_again() -> None:
    link = up()
    for _ in range(3):
        link.send(10)
    link.deliver(1)
    assert link.fail() == (1, 3)
    assert link.fail() == (1, 1)  # nothing more is lost by failing again
    link.clear()
    link.activate(0)
    link.advance(TRAINING_CYCLES)
    assert [link.send(10), link.send(10)] == [2, 3]


OPERATIONS = st.lists(
    st.sampled_from(
        ["activate", "send", "send", "send", "deliver", "deliver", "again", "release", "release",
         "deactivate", "fail", "clear", "wait", "wait"]
    ),
    max_size=80,
)  # fmt: skip


class Plain:
    """The plain twin: flits as lists of numbers, states as words."""

    def __init__(self) -> None:
        self.word, self.left = "down", 0
        self.way: list[int] = []  # numbers that left
        self.there: list[int] = []  # that arrived
        self.held = 0  # flits whose credit is out and that arrived

    def do(self, what: str) -> bool:
        """Whether it is done."""
        next_number = len(self.there) + len(self.way) + 1
        flying = self.word in ("up", "draining")
        if what == "activate" and self.word == "down":
            self.word, self.left = "training", TRAINING_CYCLES
        elif what == "wait":
            self.left -= 400
            if self.word == "training" and self.left <= 0:
                self.word = "up"
        elif what == "send" and self.word == "up" and len(self.way) + self.held < WINDOW:
            self.way.append(next_number)
        elif what == "deliver" and flying and self.way:
            self.there.append(self.way.pop(0))
            self.held += 1
        elif what == "release" and flying and self.held:
            self.held -= 1
        elif what == "deactivate" and self.word in ("up", "training"):
            self.word = "draining" if self.word == "up" else "down"
        elif what == "fail":
            self.word, self.way, self.held = "error", [], 0
        elif what == "clear" and self.word == "error":
            self.word = "down"
        else:
            return False
        if self.word == "draining" and not self.way and not self.held:
            self.word = "down"
        return True


@settings(max_examples=300)
@given(OPERATIONS)
def test_a_link_does_what_its_plain_twin_does(operations: list[str]) -> None:
    link, plain, now = Link(), Plain(), 0
    for what in operations:
        now += 400 if what == "wait" else 0
        before = link.pack()
        done = plain.do(what)
        try:
            match what:
                case "activate":
                    link.activate(now)
                case "wait":
                    link.advance(now)
                case "send":
                    assert (link.send(7) is not None) is done
                case "deliver":
                    link.deliver(link.delivered + 1)
                case "again":
                    link.deliver(link.delivered)
                case "release":
                    link.release(now)
                case "deactivate":
                    link.deactivate(now)
                case "fail":
                    link.fail()
                case "clear":
                    link.clear()
            assert done or what == "send"
        except AccelvisorError:
            assert not done
            assert link.pack() == before
        assert link.state.name.lower() == plain.word
        assert link.sent - link.delivered == len(plain.way)
        assert plain.there == list(range(1, link.delivered + 1))
        assert link.credits == WINDOW - len(plain.way) - plain.held
        assert Link.unpack(link.pack()) == link


@pytest.mark.parametrize(
    "words",
    [
        (), (0,) * 8, (5, 0, 0, 0, 8, 0, 0), (2, 0, 0, 0, 8, 0, 1 << 64), (2, 0, -1, 0, 8, 0, 0),
        (2, 0, 1, 2, 8, 0, 0), (2, 0, 9, 0, 0, 0, 0), (2, 0, 0, 0, 9, 0, 0), (0, 0, 1, 0, 7, 0, 0),
        (0, 7, 0, 0, 8, 0, 0), (3, 0, 4, 4, 8, 0, 0), (1, 9, 1, 1, 7, 0, 0), (4, 0, 1, 1, 7, 0, 0),
    ],
)  # fmt: skip
def test_a_record_that_no_link_can_have_is_refused(words: tuple[int, ...]) -> None:
    with pytest.raises(StateError):
        Link.unpack(words)
