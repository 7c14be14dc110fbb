"""The graph container: canonical, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.abi.commands import Binding
from accelvisor.abi.graphs import Entry, Graph, Kind, Node, QueueType, decode, encode, order
from accelvisor.errors import ProgramError
from accelvisor.limits import LIMITS

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A graph whose every WAIT is for a signal that was dealt before it: it comes to its end."""
    rows: dict[tuple[int, QueueType], list[Entry]] = {}
    given_events = [0] * 4
    nodes: list[Node] = []
    for _ in range(draw(st.integers(1, 30))):
        key = draw(st.integers(0, 3)), draw(st.sampled_from(QueueType))
        kind, event = draw(st.sampled_from(Kind)), draw(st.integers(0, 3))
        row = rows.setdefault(key, [])
        if kind is Kind.RUN:
            row.append(Entry(kind, 0, len(nodes)))
            bound = draw(st.lists(st.builds(Binding, U64, U64), max_size=3))
            nodes.append(Node(draw(U64), tuple(bound)))
        elif kind is Kind.SIGNAL:
            row.append(Entry(kind, event))
            given_events[event] += 1
        else:
            row.append(Entry(kind, event, draw(st.integers(0, given_events[event]))))
    return Graph(4, {key: tuple(row) for key, row in sorted(rows.items())}, tuple(nodes))


@given(graphs())
def test_what_is_encoded_is_decoded_and_can_run(graph: Graph) -> None:
    raw = encode(graph)
    assert decode(raw) == graph
    assert encode(decode(raw)) == raw
    assert sorted(order(graph)) == list(range(len(graph.nodes)))


@given(graphs(), st.data())
def test_any_byte_may_be_anything(graph: Graph, data: st.DataObject) -> None:
    raw = bytearray(encode(graph))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        found = decode(bytes(raw))
    except ProgramError:
        return
    assert encode(found) == bytes(raw)


def test_queues_that_wait_in_a_circle_are_named() -> None:
    queues = {
        (0, QueueType.COMPUTE): (Entry(Kind.WAIT, 1, 1), Entry(Kind.SIGNAL, 0)),
        (1, QueueType.TRANSFER): (Entry(Kind.WAIT, 0, 1), Entry(Kind.SIGNAL, 1)),
    }
    with pytest.raises(ProgramError, match=r"chip 0 compute at entry 0.*chip 1 transfer"):
        decode(encode(Graph(2, queues, ())))


@pytest.mark.parametrize(
    ("at", "value"), [(8, 200), (12, 0), (12, 2**31), (16, 2**31), (20, 2**31)],
)  # fmt: skip
def test_counts_that_no_file_can_hold_allocate_nothing(at: int, value: int) -> None:
    rows = {(0, QueueType.COMPUTE): (Entry(Kind.RUN, 0, 0),)}
    raw = bytearray(encode(Graph(1, rows, (Node(1),))))
    raw[at : at + 4] = value.to_bytes(4, "little")
    with pytest.raises(ProgramError):
        decode(bytes(raw))


def test_the_longest_graph_is_read_in_a_moment() -> None:
    """It is checked in one go: entries of all queues, each in a step."""
    half = LIMITS.graph_entries // 2
    rows = {
        (0, QueueType.COMPUTE): tuple(Entry(Kind.SIGNAL, 0) for _ in range(half)),
        (1, QueueType.COMPUTE): tuple(Entry(Kind.WAIT, 0, n) for n in range(half)),
    }
    graph = Graph(2, rows, ())
    assert decode(encode(graph)) == graph
