"""The graph container: which program runs on which queue of which chip, and who waits for whom.

    header    32 B  magic "XGRF" | version u16 | chips u16 | queues u32 | entries u32 | nodes u32
                    | bindings u32 | 8 B zero
    queues     8 B  chip u16 | type u8 | 0 | entries u32      in order of (chip, type), each once
    entries    8 B  kind u8 | 0 | event u16 | value u32       those of the first queue come first
    nodes     16 B  program u64 | first binding u32 | bindings u32
    bindings  16 B  BINDING records (commands.py)

Each chip has two queues, one of each type. A queue's entries are carried out one after the other:
RUN runs node ``value``, SIGNAL adds 1 to ``event``, WAIT passes once ``event`` is at least
``value``. Events are counters of the graph's own, 0 when a launch begins. Queues know of each other
by events alone. Each node is run by exactly one entry.

Counters only grow, so what can run at all does not depend on who is faster: carrying out whatever
can be, until nothing can, shows whether queues wait for each other in a circle. A graph that does
not come to its end is refused.

The device checks programs, tensors and events when a graph is launched as it does for a launch. The
encoding is canonical, as a program's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from accelvisor.abi.commands import BINDING, Binding
from accelvisor.errors import ProgramError
from accelvisor.limits import LIMITS

MAGIC = b"XGRF"
VERSION = 1

_HEADER = struct.Struct("<4sHHIIII8s")
_QUEUE = struct.Struct("<HBBI")
_ENTRY = struct.Struct("<BBHI")
_NODE = struct.Struct("<QII")


class QueueType(IntEnum):
    """A chip's two queues; an instruction's declaration says on which it runs."""

    COMPUTE = 0
    TRANSFER = 1


class Kind(IntEnum):
    """What an entry of a queue does."""

    RUN = 0
    SIGNAL = 1
    WAIT = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """RUN: ``value`` is the node. SIGNAL: ``value`` is 0. WAIT: until ``event`` >= ``value``."""

    kind: Kind
    event: int = 0
    value: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A program with what its arguments are bound to, in slot order."""

    program: int
    bindings: tuple[Binding, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """``queues`` by (chip, type); those without an entry are left out."""

    chips: int
    queues: Mapping[tuple[int, QueueType], tuple[Entry, ...]]
    nodes: tuple[Node, ...]


def encode(graph: Graph) -> bytes:
    """Canonical bytes of ``graph``; the inverse of :func:`decode`."""
    queues = sorted(graph.queues.items())
    entries = [entry for _, row in queues for entry in row]
    bindings = [binding for node in graph.nodes for binding in node.bindings]
    parts = [
        _HEADER.pack(
            MAGIC, VERSION, graph.chips, len(queues), len(entries), len(graph.nodes),
            len(bindings), bytes(8),
        )
    ]
    parts += [_QUEUE.pack(chip, kind, 0, len(row)) for (chip, kind), row in queues]
    parts += [_ENTRY.pack(entry.kind, 0, entry.event, entry.value) for entry in entries]
    first = 0
    for node in graph.nodes:
        parts.append(_NODE.pack(node.program, first, len(node.bindings)))
        first += len(node.bindings)
    parts += [BINDING.pack(*binding) for binding in bindings]
    return b"".join(parts)


def decode(data: bytes) -> Graph:
    """Parse untrusted bytes, and see that the graph comes to its end.

    Raises:
        ProgramError: the bytes are no canonical graph within the limits, a node is run twice or by
            nobody, or queues wait for each other for ever.
    """
    if len(data) < _HEADER.size:
        raise _bad("header", f"{len(data)} bytes, a header has {_HEADER.size}")
    magic, version, chips, queues, entries, nodes, bindings, zero = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise _bad("header", "wrong magic")
    if version != VERSION or any(zero):
        raise _bad("header", f"version {version} or reserved bits are not supported")
    if not 1 <= chips <= LIMITS.chips or not 1 <= queues <= 2 * chips:
        raise _bad("header", f"{queues} queues of {chips} chips, the limit is {LIMITS.chips} chips")
    if max(entries, nodes) > LIMITS.graph_entries or bindings > LIMITS.graph_bindings:
        raise _bad("header", f"{entries} entries, {nodes} nodes, {bindings} bindings: over a limit")
    sizes = (queues * _QUEUE.size, entries * _ENTRY.size, nodes * _NODE.size)
    if len(data) != _HEADER.size + sum(sizes) + bindings * BINDING.size:
        raise _bad("header", f"{len(data)} bytes do not hold what it counts")
    at = _HEADER.size
    heads = list(_QUEUE.iter_unpack(data[at : at + sizes[0]]))
    at += sizes[0]
    rows = [
        _entry(n, row, nodes) for n, row in enumerate(_ENTRY.iter_unpack(data[at : at + sizes[1]]))
    ]
    at += sizes[1]
    cells = list(_NODE.iter_unpack(data[at : at + sizes[2]]))
    bound = [Binding(*pair) for pair in BINDING.iter_unpack(data[at + sizes[2] :])]
    graph = Graph(chips, _queues(heads, rows, chips), _nodes(cells, bound))
    _check_runs(graph)
    order(graph)
    return graph


def order(graph: Graph) -> list[int]:
    """The nodes in an order in which they can run.

    Raises:
        ProgramError: there is none; the message names the queues that wait.
    """
    counters: dict[int, int] = {}
    at = dict.fromkeys(graph.queues, 0)
    found: list[int] = []
    moved = True
    while moved:
        moved = False
        for key, row in graph.queues.items():
            while at[key] < len(row):
                entry = row[at[key]]
                if entry.kind is Kind.WAIT and counters.get(entry.event, 0) < entry.value:
                    break
                if entry.kind is Kind.SIGNAL:
                    counters[entry.event] = counters.get(entry.event, 0) + 1
                elif entry.kind is Kind.RUN:
                    found.append(entry.value)
                at[key] += 1
                moved = True
    stuck = [
        f"chip {chip} {kind.name.lower()} at entry {at[chip, kind]} for event "
        f"{row[at[chip, kind]].event} >= {row[at[chip, kind]].value}"
        for (chip, kind), row in graph.queues.items()
        if at[chip, kind] < len(row)
    ]
    if stuck:
        raise _bad("queues", "they wait for ever: " + "; ".join(stuck[:4]))
    return found


def _entry(index: int, row: Sequence[int], nodes: int) -> Entry:
    kind, pad, event, value = row
    where = f"entry {index}"
    if kind > Kind.WAIT or pad:
        raise _bad(where, f"unknown kind {kind} or reserved bits")
    if (kind == Kind.RUN and (event or value >= nodes)) or (kind == Kind.SIGNAL and value):
        raise _bad(where, f"event {event} and value {value} do not fit a {Kind(kind).name}")
    if event >= LIMITS.graph_events:
        raise _bad(where, f"event {event}, the limit is {LIMITS.graph_events}")
    return Entry(Kind(kind), event, value)


def _queues(
    heads: Sequence[tuple[int, ...]], rows: Sequence[Entry], chips: int
) -> dict[tuple[int, QueueType], tuple[Entry, ...]]:
    queues: dict[tuple[int, QueueType], tuple[Entry, ...]] = {}
    first, before = 0, (-1, 0)
    for n, (chip, kind, pad, count) in enumerate(heads):
        if chip >= chips or kind > QueueType.TRANSFER or pad or not count:
            raise _bad(f"queue {n}", f"chip {chip}, type {kind}, {count} entries")
        if (chip, kind) <= before:
            raise _bad(f"queue {n}", "queues are not in order, or one is there twice")
        before = (chip, kind)
        if first + count > len(rows):
            raise _bad(f"queue {n}", "its entries are not there")
        queues[chip, QueueType(kind)] = tuple(rows[first : first + count])
        first += count
    if first != len(rows):
        raise _bad("queues", f"{len(rows) - first} entries belong to no queue")
    return queues


def _nodes(cells: Sequence[tuple[int, ...]], bound: Sequence[Binding]) -> tuple[Node, ...]:
    nodes, at = [], 0
    for n, (program, first, count) in enumerate(cells):
        if first != at or first + count > len(bound):
            raise _bad(f"node {n}", "its bindings do not follow the last node's")
        at = first + count
        nodes.append(Node(program, tuple(bound[first:at])))
    if at != len(bound):
        raise _bad("nodes", f"{len(bound) - at} bindings belong to no node")
    return tuple(nodes)


def _check_runs(graph: Graph) -> None:
    seen: set[int] = set()
    for row in graph.queues.values():
        for entry in row:
            if entry.kind is not Kind.RUN:
                continue
            if entry.value in seen:
                raise _bad(f"node {entry.value}", "it is run twice")
            seen.add(entry.value)
    if len(seen) != len(graph.nodes):
        raise _bad("nodes", f"{len(graph.nodes) - len(seen)} of them are run by no queue")


def _bad(where: str, message: str) -> ProgramError:
    return ProgramError(
        message, where=where, hint="record graphs with accelvisor.guest.Graph, which checks them"
    )
