"""The collectives, sans-IO: one generator a rank, that says what to send and what to wait for.

Ring scatter-reduce and all-gather after US patent 11,544,067 (and P. Patarasu, X. Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009): in step s rank r sends block
(r - s) mod N and receives block (r - s - 1) mod N, which it adds to its own; after N - 1 steps it
has the sum of block (r + 1) mod N, which is then only copied on, so that all ranks end with the
same bits. Blocks are cut from the whole tensor; *parts* of a block (``chunk``) only let the next
rank begin earlier, and change no bit.

``Order.RING`` adds block b in the order b, b + 1, ... round the ring; which block a value is in
depends on how many values there are. ``Order.RANK`` adds every value in the order 0, 1, ..., N - 1:
a chain of parts along the ring, then a broadcast of the finished parts. Both send 2 (N - 1) n
values in all; a ring's links each carry 2 (N - 1) / N n of them, a chain's up to 2 n.

The 2-D form (rows R, columns C) is a scatter-reduce along rows, an all-reduce of what came out of
it along columns, an all-gather along rows: 2 (C - 1) + 2 (R - 1) steps instead of 2 (R C - 1).

A driver resumes the generators (``local``, ``mpi``); each returns this rank's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from accelvisor.collectives.hops import Hops, Steps
from accelvisor.collectives.kinds import Array, finish
from accelvisor.collectives.messages import Form, Order

Span: TypeAlias = slice


class Part(NamedTuple):
    """What a rank has after a scatter-reduce: elements [start, start + values.size) of the sum."""

    block: int
    start: int
    values: Array


def cut(n: int, blocks: int) -> list[Span]:
    """``n`` elements in ``blocks`` blocks, all of ceil(n / blocks) but the last."""
    size = -(-n // blocks)
    return [slice(min(i * size, n), min((i + 1) * size, n)) for i in range(blocks)]


def parts(span: Span, chunk: int) -> list[Span]:
    """A block in parts of ``chunk`` elements (0: one part). An empty block has one, empty."""
    if chunk <= 0 or span.stop - span.start <= chunk:
        return [span]
    starts = range(span.start, span.stop, chunk)
    return [slice(at, min(at + chunk, span.stop)) for at in starts]


class Ring:
    """Ranks in a ring, seen from one of them. ``members``: their numbers, in order."""

    def __init__(self, hops: Hops, members: Sequence[int]) -> None:
        self.hops, self.members = hops, members
        self.size = len(members)
        self.place = members.index(hops.rank)
        self.right = members[(self.place + 1) % self.size]
        self.left = members[(self.place - 1) % self.size]
        self.chunk = hops.call.chunk

    def blocks(self, n: int) -> list[list[Span]]:
        """The parts of each block."""
        return [parts(span, self.chunk) for span in cut(n, self.size)]

    def scatter(self, x: Array, out: Array, offset: int, step: int, gather: bool) -> Steps:
        """Scatter-reduce: this rank's finished block into ``out``, whose first element is element
        ``offset`` of ``x``. With ``gather`` it goes on to the right at once.
        """
        hops, blocks = self.hops, self.blocks(x.size)
        for number, at in enumerate(blocks[self.place]):
            yield from self._send(step, number, x[at])
        for s in range(self.size - 1):
            for number, at in enumerate(blocks[(self.place - s - 1) % self.size]):
                message = yield from hops.receive(self.left, step + s, number)
                if s < self.size - 2:
                    form, payload = hops.relay(message, x[at])
                    n = at.stop - at.start
                    yield from hops.send(self.right, step + s + 1, number, form, payload, n)
                    continue
                result = out[at.start - offset : at.stop - offset]
                hops.fold(message, x[at], result)
                if gather:
                    yield from self._send(step + self.size - 1, number, result)

    def gather(self, out: Array, first: int, step: int, sent: bool) -> Steps:
        """All-gather: every block of ``out`` from the rank that has it; this one has ``first``, and
        has ``sent`` it already or not.
        """
        hops, blocks = self.hops, self.blocks(out.size)
        if self.size > 1 and not sent:
            for number, at in enumerate(blocks[first]):
                yield from self._send(step, number, out[at])
        for s in range(self.size - 1):
            for number, at in enumerate(blocks[(first - s - 1) % self.size]):
                message = yield from hops.receive(self.left, step + s, number)
                hops.take(message, out[at])  # first: what is damaged goes no further
                if s < self.size - 2:
                    payload = np.frombuffer(message.payload, np.uint8)
                    n = at.stop - at.start
                    yield from hops.send(
                        self.right, step + s + 1, number, message.form, payload, n
                    )

    def all_reduce(self, x: Array, out: Array, step: int) -> Steps:
        """2 (N - 1) steps from ``step``. ``out`` is not ``x``."""
        if self.size == 1:
            np.copyto(out, x)
            finish(self.hops.kind, self.hops.call.op, out)
            return
        yield from self.scatter(x, out, 0, step, gather=True)
        first = (self.place + 1) % self.size
        yield from self.gather(out, first, step + self.size - 1, sent=True)

    def _send(self, step: int, number: int, x: Array) -> Steps:
        form, payload = self.hops.form(x)
        yield from self.hops.send(self.right, step, number, form, payload, x.size)

    # --- chains ----------------------------------------------------------------------------------

    def chain(self, x: Array, out: Array | None, step: int, spread: bool) -> Steps:
        """Add along ``members`` from the first to the last, whose ``out`` gets the finished sum.
        With ``spread`` the last sends each part on at once, as the first of :meth:`spread`.
        """
        hops, last = self.hops, self.size - 1
        for number, at in enumerate(parts(slice(0, x.size), self.chunk)):
            if self.place == 0:
                if last:
                    yield from self._send(step, number, x[at])
                elif out is not None:
                    np.copyto(out[at], x[at])
                    finish(hops.kind, hops.call.op, out[at])
                continue
            message = yield from hops.receive(self.left, step + self.place - 1, number)
            if self.place < last:
                form, payload = hops.relay(message, x[at])
                n = at.stop - at.start
                yield from hops.send(self.right, step + self.place, number, form, payload, n)
            elif out is not None:
                hops.fold(message, x[at], out[at])
                if spread:
                    yield from self._send(step + last, number, out[at])

    def spread(self, out: Array, step: int, sent: bool = False) -> Steps:
        """Copy ``out`` of the first of ``members`` along to the last."""
        hops, last = self.hops, self.size - 1
        for number, at in enumerate(parts(slice(0, out.size), self.chunk)):
            if self.place == 0:
                if last and not sent:
                    yield from self._send(step, number, out[at])
                continue
            message = yield from hops.receive(self.left, step + self.place - 1, number)
            hops.take(message, out[at])
            if self.place < last:
                payload = np.frombuffer(message.payload, np.uint8)
                n = at.stop - at.start
                to = step + self.place
                yield from hops.send(self.right, to, number, message.form, payload, n)


def _turned(size: int, first: int) -> list[int]:
    """All ranks round the ring, beginning with ``first``."""
    return [(first + i) % size for i in range(size)]


def agree(hops: Hops) -> Steps:
    """Learn that all ranks make the same call, before any data moves: ceil(log2 N) rounds.

    Where a result depends on all ranks, so does its check. Where it does not (a broadcast's root
    receives nothing), ranks could return before another finds that it was called for something
    else. After D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization"
    (1988): in round k rank r hears that the 2**k ranks up to r - 2**k agree.
    """
    size, distance, step = hops.call.size, 1, 0
    empty = np.empty(0, np.uint8)
    while distance < size:
        to, source = (hops.rank + distance) % size, (hops.rank - distance) % size
        yield from hops.send(to, step, 0, Form.DENSE, empty, 0)
        yield from hops.receive(source, step, 0)
        distance, step = 2 * distance, step + 1
    return step




def all_reduce(hops: Hops, x: Array) -> Steps:
    """Every rank gets the reduction of all ranks' ``x`` (1-D, contiguous). A new array."""
    out = np.empty_like(x)
    size = hops.call.size
    if hops.call.order is Order.RING:
        yield from Ring(hops, range(size)).all_reduce(x, out, 0)
        return out
    yield from Ring(hops, range(size)).chain(x, out, 0, spread=True)
    last = size - 1
    yield from Ring(hops, _turned(size, last)).spread(out, last, sent=True)
    return out


def reduce_scatter(hops: Hops, x: Array) -> Steps:
    """Rank r gets block (r + 1) mod N of the reduction, as a :class:`Part`."""
    ring = Ring(hops, range(hops.call.size))
    block = (ring.place + 1) % ring.size
    at = cut(x.size, ring.size)[block]
    out = np.empty(at.stop - at.start, x.dtype)
    if ring.size == 1:
        yield from ring.all_reduce(x, out, 0)
    else:
        yield from ring.scatter(x, out, at.start, 0, gather=False)
    return Part(block, at.start, out)


def all_gather(hops: Hops, x: Array) -> Steps:
    """Every rank gets all ranks' ``x`` (1-D, as long on each), in order of rank: (N x.size,)."""
    size = hops.call.size
    out = np.empty(size * x.size, x.dtype)
    ring = Ring(hops, range(size))
    np.copyto(out[ring.place * x.size : (ring.place + 1) * x.size], x)
    yield from ring.gather(out, ring.place, 0, sent=False)
    return out


def broadcast(hops: Hops, x: Array) -> Steps:
    """Every rank gets the root's ``x``; of the others only shape and dtype count."""
    step = yield from agree(hops)
    root = hops.call.root
    out = x.copy()
    yield from Ring(hops, _turned(hops.call.size, root)).spread(out, step)
    return out


def reduce(hops: Hops, x: Array) -> Steps:
    """The root gets the reduction of all ranks' ``x``, the others None.

    Order.RING adds from the rank after the root round to the root: (N - 1) n values in all, n from
    each. Order.RANK adds from 0 to N - 1, which sends the sum to the root.
    """
    step = yield from agree(hops)
    size, root = hops.call.size, hops.call.root
    ranked = hops.call.order is Order.RANK
    members = _turned(size, 0 if ranked else (root + 1) % size)
    last = members[-1]
    out = np.empty_like(x) if hops.rank in (root, last) else None
    yield from Ring(hops, members).chain(x, out, step, spread=False)
    if last != root and hops.rank in (last, root) and out is not None:
        yield from Ring(hops, [last, root]).spread(out, step + size - 1)
    return out if hops.rank == root else None


def all_reduce_2d(hops: Hops, x: Array) -> Steps:
    """As :func:`all_reduce`, on a grid: rank = row * columns + column."""
    rows, columns = hops.call.rows, hops.call.columns
    row, column = divmod(hops.rank, columns)
    along = Ring(hops, [row * columns + c for c in range(columns)])
    across = Ring(hops, [r * columns + column for r in range(rows)])
    out = np.empty_like(x)
    block = (along.place + 1) % columns
    at = cut(x.size, columns)[block]
    middle = x
    if columns > 1:
        middle = np.empty(at.stop - at.start, x.dtype)
        yield from along.scatter(x, middle, at.start, 0, gather=False)
    step = columns - 1
    yield from across.all_reduce(middle, out[at], step)
    yield from along.gather(out, block, step + 2 * (rows - 1), sent=False)
    return out
