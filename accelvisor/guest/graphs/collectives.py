"""What all chips do together, lowered to nodes of one graph: one node for each chip and step.

A message between chips is a tensor that its sender writes and its receiver reads (a *mailbox*), so
a message under way is device memory like any other and moves with the function. Each node runs on
the sender's transfer queue, beside what the chip computes.

``rank`` adds in the order of ranks: rank 0's values go to rank 1, which adds its own and sends the
sum to rank 2, and so on; the last one's sum is copied back along the same links. Cut in chunks,
this is a pipeline. The order of additions depends on the ranks alone, so the bits depend neither on
the number of chunks nor on the size of the message; and the sum is made once and then only copied,
so all ranks end with the same bits. ``ring`` is the ring scatter-reduce and all-gather of P.
Patarasu and X. Yuan ("Bandwidth optimal all-reduce algorithms for clusters of workstations", J.
Parallel Distrib. Comput. 69(2), 2009): fewer bytes on each link, each block added in an order of
its own, that of the ring from the block's first rank on.

``grid`` is the all-reduce of two dimensions, for chips whose rows and columns are rings (US
11,615,295): each row scatter-reduces, then each column all-reduces the part that it has, 1 /
columns of the data, then each row gathers. As many bytes go over each chip's links as with one
ring, in 2 (columns - 1) + 2 (rows - 1) steps instead of 2 (ranks - 1).

With ``compress`` messages hold only what is not zero and are added while they are packed (after US
11,544,067); the bits are those of the dense run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from accelvisor.errors import UsageError
from accelvisor.guest.program import Program
from accelvisor.guest.tensor import Tensor

if TYPE_CHECKING:
    from accelvisor.guest.function import Function
    from accelvisor.guest.graphs.graph import After, Graph, Recorded

#: Operators by the number that the instructions take.
OPS = {"sum": 0, "min": 1, "max": 2, "absmax": 3}
ORDERS = ("rank", "ring", "grid")
NO_LINK = -1

_programs: WeakKeyDictionary[Function, dict[tuple[Any, ...], Program]] = WeakKeyDictionary()


def all_reduce(
    graph: Graph,
    tensors: Sequence[Tensor],
    op: str = "sum",
    *,
    order: str = "rank",
    chunks: int = 4,
    compress: bool = False,
    chips: Sequence[int] | None = None,
    columns: int = 0,
    after: After = (),
) -> tuple[Recorded, ...]:
    """Record an all-reduce, in place: afterwards each tensor holds the reduction of all.

    Args:
        tensors: one for each rank, of one shape and dtype; rank r's lies with ``chips[r]``.
        op: ``sum``, ``min``, ``max`` or ``absmax``.
        order: ``rank``: additions in the order of ranks; needs links between neighbours.
            ``ring``: in ring order; needs one from the last chip to the first, too.
            ``grid``: ranks are rows of ``columns`` each; needs those links in each row and column.
        chunks: of ``rank``: pieces that follow each other through the chain.
        chips: the chips of the ranks; 0, 1, 2, ... when None.
        after: what must be done before, beside what the tensors say.

    Returns:
        The nodes, for ``after=`` of what uses the result in a graph that is not automatic.

    Raises:
        UsageError: ``collective-mismatch`` (the message names the ranks that differ), or an
            unknown operator or order. Others as :meth:`Graph.node`.
    """
    ranks = _ranks(tensors, chips)
    if op not in OPS or order not in ORDERS or chunks < 1:
        raise UsageError(
            f"all_reduce of op {op!r}, order {order!r}, {chunks} chunks", where="collective",
            hint=f"ops: {', '.join(OPS)}; orders: {', '.join(ORDERS)}",
        )  # fmt: skip
    if order == "grid" and (columns < 1 or len(ranks) % columns):
        raise UsageError(f"{len(ranks)} ranks in rows of {columns}", where="collective")
    first = len(graph.nodes)
    flat = [t.reshape(-1) for t in tensors]
    wire = (_Packed if compress else _Dense)(graph, op, after)
    with graph.tracking():
        if len(ranks) > 1 and flat[0].size:
            if order == "grid":
                _grid(wire, flat, ranks, columns)
            else:
                (_ring if order == "ring" else _chain)(wire, flat, ranks, chunks)
    return tuple(graph.nodes[first:])


def reduce(
    graph: Graph,
    tensors: Sequence[Tensor],
    op: str = "sum",
    *,
    chunks: int = 4,
    compress: bool = False,
    chips: Sequence[int] | None = None,
    after: After = (),
) -> tuple[Recorded, ...]:
    """Record a reduction into the last rank's tensor, in the order of ranks; the others stay as
    they are. Arguments and errors as of :func:`all_reduce`.
    """
    ranks = _ranks(tensors, chips)
    if op not in OPS or chunks < 1:
        raise UsageError(f"reduce of op {op!r}, {chunks} chunks", where="collective")
    first = len(graph.nodes)
    flat = [t.reshape(-1) for t in tensors]
    wire = (_Packed if compress else _Dense)(graph, op, after)
    with graph.tracking():
        if len(ranks) > 1:
            for low, high in blocks(flat[0].size, chunks):
                _round(wire, [t[low:high] for t in flat], ranks, 0)
    return tuple(graph.nodes[first:])


def broadcast(
    graph: Graph,
    tensors: Sequence[Tensor],
    *,
    chunks: int = 4,
    compress: bool = False,
    chips: Sequence[int] | None = None,
    after: After = (),
) -> tuple[Recorded, ...]:
    """Record copies of the first rank's tensor over all others, from chip to chip. Arguments and
    errors as of :func:`all_reduce`.
    """
    ranks = _ranks(tensors, chips)
    if chunks < 1:
        raise UsageError(f"broadcast of {chunks} chunks", where="collective")
    first = len(graph.nodes)
    flat = [t.reshape(-1) for t in tensors]
    wire = (_Packed if compress else _Dense)(graph, "sum", after)
    with graph.tracking():
        for low, high in blocks(flat[0].size, chunks):
            wire.spread([t[low:high] for t in flat], ranks)
    return tuple(graph.nodes[first:])


def _ranks(tensors: Sequence[Tensor], chips: Sequence[int] | None) -> list[int]:
    ranks = list(range(len(tensors)) if chips is None else chips)
    if len(ranks) != len(tensors) or len(set(ranks)) != len(ranks) or not ranks:
        raise _mismatch(f"{len(tensors)} tensors on chips {ranks}")
    for rank, tensor in enumerate(tensors):
        if (tensor.shape, tensor.dtype) != (tensors[0].shape, tensors[0].dtype):
            raise _mismatch(
                f"rank {rank} has {tensor.dtype} {tensor.shape}, "
                f"rank 0 {tensors[0].dtype} {tensors[0].shape}"
            )
    return ranks


def _mismatch(message: str) -> UsageError:
    return UsageError(
        message, code="collective-mismatch", where="collective",
        hint="give one tensor of the same shape and dtype for each chip",
    )  # fmt: skip


# --- who sends what to whom ----------------------------------------------------------------------


def _round(wire: _Dense, parts: Sequence[Tensor], ranks: Sequence[int], first: int) -> int:
    """Reduce ``parts`` along the ring from rank ``first`` on; who has the result in its part."""
    n = len(ranks)
    way = [(first + s) % n for s in range(n)]
    if n > 1:
        message = wire.send(parts[way[0]], ranks[way[0]], ranks[way[1]])
        for here, there in pairwise(way[1:]):
            message = wire.hop(message, parts[here], ranks[here], ranks[there])
        wire.settle(message, parts[way[-1]], ranks[way[-1]])
    return way[-1]


def _onwards(wire: _Dense, parts: Sequence[Tensor], ranks: Sequence[int], first: int) -> None:
    """Copy the part of rank ``first`` over the others, along the ring."""
    way = [(first + s) % len(ranks) for s in range(len(ranks))]
    wire.spread([parts[r] for r in way], [ranks[r] for r in way])


def _chain(wire: _Dense, flat: Sequence[Tensor], ranks: Sequence[int], chunks: int) -> None:
    """Along the ranks with sums, and back with the result; chunk by chunk."""
    for low, high in blocks(flat[0].size, chunks):
        parts = [t[low:high] for t in flat]
        _round(wire, parts, ranks, 0)
        wire.spread(parts[::-1], list(ranks[::-1]))


def _ring(wire: _Dense, flat: Sequence[Tensor], ranks: Sequence[int], chunks: int) -> None:
    """Block b begins at rank b and is complete at rank b - 1; from there it goes round again."""
    for b, (low, high) in enumerate(blocks(flat[0].size, len(ranks))):
        parts = [t[low:high] for t in flat]
        _onwards(wire, parts, ranks, _round(wire, parts, ranks, b))


def _grid(wire: _Dense, flat: Sequence[Tensor], ranks: Sequence[int], columns: int) -> None:
    """Rows, then columns, then rows, block by block."""
    rows = [range(at, at + columns) for at in range(0, len(ranks), columns)]
    for b, (low, high) in enumerate(blocks(flat[0].size, columns)):
        parts = [t[low:high] for t in flat]
        mine = [[parts[r] for r in row] for row in rows]
        chips = [[ranks[r] for r in row] for row in rows]
        ends = [_round(wire, *pair, b) for pair in zip(mine, chips, strict=True)]
        column = [row[end] for row, end in zip(mine, ends, strict=True)]
        below = [row[end] for row, end in zip(chips, ends, strict=True)]
        for j, (first, last) in enumerate(blocks(high - low, len(rows))):
            pieces = [part[first:last] for part in column]
            _onwards(wire, pieces, below, _round(wire, pieces, below, j))
        for pair, end in zip(zip(mine, chips, strict=True), ends, strict=True):
            _onwards(wire, *pair, end)


def blocks(size: int, count: int) -> list[tuple[int, int]]:
    """[start, end) of at most ``count`` parts of ``size`` elements, none empty, as equal as can be:
    the first ones are longer by one where it does not divide.
    """
    short, longer = divmod(size, count)
    ends = [short * (i + 1) + min(i + 1, longer) for i in range(count)]
    return [(a, b) for a, b in zip([0, *ends], ends, strict=False) if a < b]


# --- how a message is made -----------------------------------------------------------------------


class _Dense:
    """Messages of one all-reduce, whole. Each method records one step of one chip."""

    def __init__(self, graph: Graph, op: str, after: After) -> None:
        self.graph = graph
        self.op = OPS[op]
        self.after = after

    def send(self, own: Tensor, source: int, target: int) -> Tensor:
        """``own`` as a message in a mailbox of ``target``."""
        return self._new("link_copy", source, (own,), source=source, target=target)

    def hop(self, message: Tensor, own: Tensor, source: int, target: int) -> Tensor:
        """``message`` op ``own`` as a message in a mailbox of ``target``."""
        pair = (message, own)
        return self._new("ring_hop", source, pair, op=self.op, source=source, target=target)

    def settle(self, message: Tensor, own: Tensor, chip: int) -> None:
        """own = ``message`` op ``own``."""
        links = {"source": NO_LINK, "target": NO_LINK}
        self._run("ring_hop", chip, (message, own), own, op=self.op, **links)

    def spread(self, parts: Sequence[Tensor], chips: Sequence[int]) -> None:
        """Copy ``parts[0]`` over the others, from chip to chip."""
        for i in range(len(parts) - 1):
            ends = {"source": chips[i], "target": chips[i + 1]}
            self._run("link_copy", chips[i], (parts[i],), parts[i + 1], **ends)

    def _new(self, name: str, chip: int, args: tuple[Tensor, ...], **attributes: int) -> Tensor:
        """Run an instruction whose result is a mailbox of the graph's."""
        return self.graph.own(self._run(name, chip, args, None, **attributes))

    def _run(
        self, name: str, chip: int, args: tuple[Tensor, ...], out: Tensor | None, **attributes: int
    ) -> Tensor:
        program = instruction(self.graph.function, name, args, out, **attributes)
        node = self.graph.node(program, *args, chip=chip, out=out, after=self.after)
        result: Tensor = node.result
        return result


class _Packed(_Dense):
    """The same, packed. What goes from chip to chip is packed anew by each: that is cheaper than to
    copy the room that the fullest message would need.
    """

    def send(self, own: Tensor, source: int, target: int) -> Tensor:
        return self._new("zvc_pack", source, (own,), source=source, target=target)

    def hop(self, message: Tensor, own: Tensor, source: int, target: int) -> Tensor:
        pair = (message, own)
        return self._new("zvc_hop", source, pair, op=self.op, source=source, target=target)

    def settle(self, message: Tensor, own: Tensor, chip: int) -> None:
        links = {"source": NO_LINK, "target": NO_LINK}
        done = self._new("zvc_hop", chip, (message, own), op=self.op, **links)
        self._run("zvc_unpack", chip, (done,), own)

    def spread(self, parts: Sequence[Tensor], chips: Sequence[int]) -> None:
        for i in range(len(parts) - 1):
            message = self.send(parts[i], chips[i], chips[i + 1])
            self._run("zvc_unpack", chips[i + 1], (message,), parts[i + 1])


# --- programs of one instruction -----------------------------------------------------------------


def link_copy(
    function: Function, shape: tuple[int, ...], dtype: str, source: int, target: int
) -> Program:
    """A program ``x -> y`` that copies over the link from one chip to another."""
    return _program(function, "link_copy", ((shape, dtype),), None, source=source, target=target)


def instruction(
    function: Function,
    name: str,
    args: Sequence[Tensor],
    out: Tensor | None = None,
    **attributes: int,
) -> Program:
    """A program of one instruction for tensors of these shapes, made once for each function.

    Args:
        out: gives the result's form, where it does not follow from the arguments.
    """
    forms = tuple((t.shape, t.dtype.name) for t in args)
    form = None if out is None else (out.shape, out.dtype.name)
    return _program(function, name, forms, form, **attributes)


_Form = tuple[tuple[int, ...], str]


def _program(
    function: Function, name: str, forms: tuple[_Form, ...], out: _Form | None, **attributes: int
) -> Program:
    kept = _programs.setdefault(function, {})
    key = (name, forms, out, tuple(sorted(attributes.items())))
    program = kept.get(key)
    if program is None:
        with function.program(name) as program:
            values = [program.input(shape, dtype) for shape, dtype in forms]
            shape, dtype = out if out is not None else (None, None)
            program.output(program.call(name, *values, shape=shape, dtype=dtype, **attributes))
        kept[key] = program
    return program
