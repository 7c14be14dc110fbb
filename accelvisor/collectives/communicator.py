"""The collectives as a program calls them: one communicator a rank, the same over any transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from accelvisor.collectives import algorithms, fast, zvc
from accelvisor.collectives.algorithms import Part
from accelvisor.collectives.hops import (
    AUTO_DENSITY,
    Expired,
    Flush,
    Hops,
    Receive,
    Send,
    Stats,
    Steps,
    Waiting,
)
from accelvisor.collectives.kinds import Array, Op, kind_of, op_of
from accelvisor.collectives.messages import Call, Collective, Order, Payload
from accelvisor.collectives.tuning import Tuner, bucket
from accelvisor.errors import AccelvisorError, UsageError

DEADLINE_S = 30.0
"""Seconds that a rank waits for one message before it asks who is lost."""

CHUNK_BYTES = 1 << 20
"""Bytes of a part by default: small enough that the next rank begins soon, large enough that a
message costs less than what it carries."""

COMPRESS = ("auto", "always", "never")
#: Less than this is sent so quickly that nothing can be measured.
_WORTH_BYTES = 1 << 16


class Transport(Protocol):
    """Messages between the ranks of one communicator, in order between any two."""

    def send(self, message: Send) -> None:
        """Begin to send; never waits. The payload does not change until :meth:`flush`."""

    def receive(self, source: int | None, timeout_s: float) -> tuple[Payload, Payload]:
        """(header, payload): any report, else the next of ``source``. Raises Expired."""

    def waiting(self, source: int) -> bool:
        """Whether a message of ``source`` is there."""

    def flush(self, timeout_s: float) -> None:
        """Wait until all payloads may change. Raises Expired with the rank that takes none."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a collective runs; none of it but ``order`` can change a bit of its result.

    Args:
        compress: "auto" packs what is guessed to be sparse where that is measured to pay
            (tuning.py), "always", "never".
        order: "ring" or "rank": in which order a value is added (docs/collectives.md).
        chunk_bytes: of a part, so that ranks work at the same time; 0 for whole blocks.
        deadline_s: seconds without a due message.
    """

    compress: str = "auto"
    order: str = "ring"
    chunk_bytes: int = CHUNK_BYTES
    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        if self.compress not in COMPRESS:
            raise _usage(f"compress is {self.compress!r}", f"one of {', '.join(COMPRESS)}")
        if self.order not in ("ring", "rank"):
            raise _usage(f"order is {self.order!r}", "ring or rank")
        if self.chunk_bytes < 0 or not self.deadline_s > 0:
            raise _usage("a chunk or deadline below zero", "chunk_bytes >= 0, deadline_s > 0")

    def changed(self, **given: Any) -> Options:
        """With what is given in place of these."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        unknown = set(given) - set(fields)
        if unknown:
            raise _usage(f"no option {min(unknown)}", f"one of {', '.join(fields)}")
        return Options(**(fields | given))


def _usage(message: str, hint: str) -> UsageError:
    return UsageError(message, where="collectives", hint=hint)


_ALGORITHMS: dict[Collective, Callable[[Hops, Array], Steps]] = {
    Collective.ALL_REDUCE: algorithms.all_reduce,
    Collective.REDUCE_SCATTER: algorithms.reduce_scatter,
    Collective.ALL_GATHER: algorithms.all_gather,
    Collective.BROADCAST: algorithms.broadcast,
    Collective.REDUCE: algorithms.reduce,
    Collective.ALL_REDUCE_2D: algorithms.all_reduce_2d,
}
_COPIES = (Collective.ALL_GATHER, Collective.BROADCAST)
_ORDERED = (Collective.ALL_REDUCE, Collective.REDUCE)


def begin(
    collective: Collective,
    array: Array,
    rank: int,
    size: int,
    options: Options,
    *,
    op: str | Op = Op.SUM,
    dtype: str | None = None,
    sequence: int = 0,
    root: int = 0,
    grid: tuple[int, int] = (0, 0),
) -> tuple[Hops, Steps]:
    """One rank of a collective, ready for a driver; the generator returns a 1-D array, a
    :class:`Part` or None.

    Raises:
        UsageError: dtype, operator, root, grid or order does not fit.
    """
    kind = kind_of(array, dtype)
    order = Order[options.order.upper()]
    if order is Order.RANK and collective not in (*_ORDERED, *_COPIES):
        raise _usage(f"{collective.name.lower()} in order of rank", "all_reduce and reduce have it")
    if not 0 <= root < size:
        raise _usage(f"root {root} of {size} ranks", "a rank of this communicator")
    if collective is Collective.ALL_REDUCE_2D and (min(grid) < 1 or grid[0] * grid[1] != size):
        raise _usage(f"a grid of {grid[0]} x {grid[1]} for {size} ranks", "rows * columns = size")
    chunk = options.chunk_bytes // kind.width
    call = Call(
        collective, array.shape, kind.code, op_of(op), order, size, root, *grid,
        chunk=max(64, chunk // 64 * 64) if options.chunk_bytes else 0,
    )  # fmt: skip
    hops = Hops(call, rank, options.compress, sequence, exact=collective in _COPIES)
    flat = np.ascontiguousarray(array).reshape(-1).view(hops.kind.storage)
    return hops, hops.guarded(_ALGORITHMS[collective](hops, flat))


def drive(steps: Steps, transport: Transport, deadline_s: float) -> Any:
    """Run one rank's generator to its end; its result. Raises what it ends with."""
    answer: Any = None
    expired: Expired | None = None
    while True:
        try:
            command = steps.throw(expired) if expired else steps.send(answer)
        except StopIteration as done:
            return done.value
        answer = expired = None
        try:
            if isinstance(command, Send):
                transport.send(command)
            elif isinstance(command, Receive):
                answer = transport.receive(command.source, command.patience * deadline_s)
            elif isinstance(command, Waiting):
                answer = transport.waiting(command.source)
            elif isinstance(command, Flush):
                transport.flush(deadline_s)
        except Expired as e:
            expired = e


class Communicator:
    """One rank of a group that calls the same collectives in the same order.

    Arrays may have any shape and strides; their dtype is one of ``kinds.KINDS`` (a uint16 array
    with ``dtype="bfloat16"`` is that). Results are new arrays. Options (:class:`Options`) given to
    a call count for it alone. Every call raises UsageError (``collective-mismatch``),
    UnavailableError (``collective-rank-lost``), DeadlineError (``collective-deadline``) or
    DataError (``collective-message``), the same on every rank; after that each call raises it
    again, for what was under way is lost: make a new communicator.

    Args:
        accelerate: let numba pack and unpack, where it is there: the first use of a width of values
            takes about a second, and the first of all three.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        size: int,
        options: Options | None = None,
        *,
        accelerate: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        self.options = options or Options()
        self.stats = Stats()
        """Of the last collective."""
        self._transport = transport
        self._accelerate = accelerate
        self._sequence = 0
        self._broken: AccelvisorError | None = None
        self._tuner = Tuner()
        self._clock = time.perf_counter

    def all_reduce(
        self, array: Array, op: str = "sum", *, dtype: str | None = None, **options: Any
    ) -> Array:
        """Every rank gets the reduction over all ranks, in the shape of ``array``."""
        flat = self._run(Collective.ALL_REDUCE, array, options, op=op, dtype=dtype)
        return self._shaped(flat, array, array.shape)

    def all_reduce_2d(
        self, array: Array, rows: int, columns: int, op: str = "sum", *, dtype: str | None = None,
        **options: Any,
    ) -> Array:  # fmt: skip
        """As :meth:`all_reduce` on a grid of ranks, row by row, in fewer steps; other bits."""
        flat = self._run(
            Collective.ALL_REDUCE_2D, array, options, op=op, dtype=dtype, grid=(rows, columns)
        )
        return self._shaped(flat, array, array.shape)

    def reduce_scatter(
        self, array: Array, op: str = "sum", *, dtype: str | None = None, **options: Any
    ) -> Part:
        """Rank r gets block (r + 1) mod N of the reduction of the flattened arrays."""
        part: Part = self._run(Collective.REDUCE_SCATTER, array, options, op=op, dtype=dtype)
        return part._replace(values=part.values.view(array.dtype))

    def reduce(
        self, array: Array, root: int = 0, op: str = "sum", *, dtype: str | None = None,
        **options: Any,
    ) -> Array | None:  # fmt: skip
        """The root gets the reduction, the others None."""
        flat = self._run(Collective.REDUCE, array, options, op=op, dtype=dtype, root=root)
        return None if flat is None else self._shaped(flat, array, array.shape)

    def all_gather(self, array: Array, *, dtype: str | None = None, **options: Any) -> Array:
        """Every rank gets (N, *shape): all ranks' arrays, bit by bit."""
        flat = self._run(Collective.ALL_GATHER, array, options, dtype=dtype)
        return self._shaped(flat, array, (self.size, *array.shape))

    def broadcast(
        self, array: Array, root: int = 0, *, dtype: str | None = None, **options: Any
    ) -> Array:
        """Every rank gets the root's array, bit by bit; of the others shape and dtype count."""
        flat = self._run(Collective.BROADCAST, array, options, dtype=dtype, root=root)
        return self._shaped(flat, array, array.shape)

    def _shaped(self, flat: Array, array: Array, shape: tuple[int, ...]) -> Array:
        return flat.view(array.dtype).reshape(shape)

    def _run(
        self, collective: Collective, array: Array, options: dict[str, Any], **given: Any
    ) -> Any:
        if self._broken is not None:
            raise self._broken
        chosen = self.options.changed(**options) if options else self.options
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)  # once, for whoever looks at it below
        hops, steps = begin(
            collective, array, self.rank, self.size, chosen, sequence=self._sequence, **given
        )
        if self._accelerate and chosen.compress != "never":
            fast.warm((hops.kind.width,))
        self._sequence += 1
        self.stats = hops.stats
        key = self._key(hops, array) if chosen.compress == "auto" else None
        if key is not None and not self._tuner.packs(key):
            hops.compress = "never"
        began = self._clock()
        try:
            result = drive(steps, self._transport, chosen.deadline_s)
        except AccelvisorError as e:
            self._broken = e
            raise
        if key is not None:
            self._tuner.took(key, hops.compress != "never", self._clock() - began)
        return result

    def _key(self, hops: Hops, array: Array) -> Hashable | None:
        """What calls have to have in common to take about as long; None: it would not pack."""
        if array.nbytes < _WORTH_BYTES or hops.call.collective in _COPIES:
            return None
        flat = np.ascontiguousarray(array).reshape(-1).view(hops.kind.storage)
        density = zvc.density(flat, hops.kind)
        if density > AUTO_DENSITY:
            return None
        return hops.call.collective, hops.kind.code, hops.call.order, *bucket(array.nbytes, density)
