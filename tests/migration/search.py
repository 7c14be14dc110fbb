"""Breadth-first search through everything that can happen, and questions about what it found."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class Violation(Exception):  # noqa: N818 - what a promise suffers
    """A promise is broken; the message says which, and what led there."""


class Searched(Protocol):
    """A world: where it begins, what can happen, what must hold."""

    start: Any

    def steps(self, node: Any) -> Iterator[tuple[str, str, Any]]: ...

    def canonical(self, node: Any) -> Any: ...

    def invariant(self, node: Any) -> None: ...

    def shown(self, node: Any) -> str: ...


@dataclass
class Graph:
    """Everything reachable. ``edges[kind]``: (from, to) pairs, flat."""

    nodes: list[Any]
    edges: dict[str, array[int]]
    parents: list[tuple[int, str]]
    world: Searched

    def shown(self, number: int) -> str:
        """How one gets there, and what it looks like."""
        return f"{_trace(self.parents, number)}\n{self.world.shown(self.nodes[number])}"

    def can_reach(self, goal: Callable[[Any], bool], kinds: tuple[str, ...]) -> bytearray:
        """For each node 1 if a goal can be reached by steps of these kinds alone."""
        before: list[list[int]] = [[] for _ in self.nodes]
        for kind in kinds:
            flat = self.edges.get(kind, array("l"))
            for here, there in zip(flat[::2], flat[1::2], strict=True):
                before[there].append(here)
        found = bytearray(len(self.nodes))
        todo = [number for number, node in enumerate(self.nodes) if goal(node)]
        for number in todo:
            found[number] = 1
        while todo:
            for number in before[todo.pop()]:
                if not found[number]:
                    found[number] = 1
                    todo.append(number)
        return found


class StepKind(StrEnum):
    """Who takes a step: liveness may lean on some and not on others."""

    S = "s"  # the source alone: results, timer, restart, its arbiter
    D = "d"  # the destination alone
    NET = "net"  # a message arrives
    ANY = "any"  # link events, cancels, a beginning
    QEMU = "qemu"
    CRASH = "crash"
    CUT = "cut"


def explore(world: Searched, limit: int = 2_000_000) -> Graph:
    """Breadth first from the start. Raises Violation with the shortest way there."""
    numbers: dict[Any, int] = {world.start: 0}
    nodes = [world.start]
    parents: list[tuple[int, str]] = [(-1, "start")]
    edges: dict[str, array[int]] = {kind.value: array("l") for kind in StepKind}
    here = 0
    while here < len(nodes):
        node = nodes[here]
        try:
            world.invariant(node)
            for kind, what, after in world.steps(node):
                after = world.canonical(after)
                if after is node:
                    continue
                number = numbers.get(after)
                if number is None:
                    number = numbers[after] = len(nodes)
                    nodes.append(after)
                    parents.append((here, what))
                edges[kind].append(here)
                edges[kind].append(number)
        except Violation as violation:
            raise Violation(f"{violation}\n{_trace(parents, here)}\n{world.shown(node)}") from None
        here += 1
        if here > limit:
            raise AssertionError(f"more than {limit} states: {world.shown(node)}")
    return Graph(nodes, edges, parents, world)


def _trace(parents: list[tuple[int, str]], number: int) -> str:
    steps = []
    while number >= 0:
        number, what = parents[number]
        steps.append(what)
    return " -> ".join(reversed(steps))
