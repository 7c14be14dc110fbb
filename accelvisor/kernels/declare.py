"""What one declaration of an instruction holds, and what is derived from it without its kernels.

An instruction is declared once, in a topic file of this room. Its kernels see numpy arrays in
operand order: C-contiguous, outputs preallocated, shapes and dtypes already checked against the
declaration. A *fast* kernel computes the half-open range of *units* [start, stop) of a tile and
writes exactly that part of every output, from inputs alone: tiles can run in any order, on any
thread, and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from accelvisor.abi.attributes import FLOAT, INT, Attribute, unpack
from accelvisor.abi.dtypes import DType

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = Sequence[Array]
Shapes: TypeAlias = Sequence[tuple[int, ...]]
Values: TypeAlias = tuple[Any, ...]  # decoded attributes, int or float each

F32 = (DType.FLOAT32,)
FLOATS = (DType.FLOAT32, DType.FLOAT64)
INTS = (DType.INT32, DType.INT64)
INDEX = (DType.INT64, DType.INT32)
NUMBERS = FLOATS + INTS
ALL = tuple(DType)

# The model clock's hardware: one 64 x 64 multiply-accumulate array, 64 vector lanes, a memory port.
MATRIX_MACS_PER_CYCLE = 64 * 64
VECTOR_LANES = 64
BYTES_PER_CYCLE = 256
ISSUE_CYCLES = 32  # fetch, decode and drain of one instruction


class Access(StrEnum):
    """How an instruction uses an operand. What is both read and written is two operands."""

    READ = "read"
    WRITE = "write"


class Queue(StrEnum):
    """Which of a chip's two queues an instruction runs on."""

    COMPUTE = "compute"
    TRANSFER = "transfer"


class Cost(NamedTuple):
    """Model clock cycles and bytes moved. Integers only, a function of shapes and dtypes only."""

    cycles: int
    bytes_read: int
    bytes_written: int


class Work(NamedTuple):
    """Operations of one execution: multiply-accumulates of the array, element operations of
    lanes."""

    macs: int = 0
    vector: int = 0


class Tiling(NamedTuple):
    """``extent`` units of output, ``step`` of them a tile. Depends on shapes and attributes
    only."""

    extent: int
    step: int

    @property
    def tiles(self) -> int:
        """Tiles; 0 when there is nothing to write."""
        return -(-self.extent // self.step)


class Scale(NamedTuple):
    """What a sum's error is measured against: the sum of magnitudes, for each output in order."""

    magnitude: Callable[[Arrays, Values], list[Array]]
    roundings: Callable[[Shapes, Values], int]


@dataclass(frozen=True, slots=True)
class Bound:
    """How far the fast twin may be from the reference. ``ulps`` 0: the same bits.

    Else |fast - reference| <= ulps * roundings * eps * max(|reference|, magnitude) + four times
    the smallest normal number, where the reference is finite; NaN and infinity agree.
    """

    ulps: int = 0
    scale: Scale | None = None

    def text(self) -> str:
        """For the documentation table."""
        if self.ulps == 0:
            return "same bits"
        return f"{self.ulps} eps x terms" if self.scale else f"{self.ulps} eps"


SAME_BITS = Bound()


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand: name, access, shape pattern (accelvisor.abi.shapes), dtypes.

    ``like`` names an earlier operand whose dtype it must share. ``below`` is for indices that lie
    in data: what they must be less than; the kernel checks each and raises NumericError.
    """

    name: str
    access: Access
    shape: str
    dtypes: tuple[DType, ...] = F32
    like: str = ""
    below: str = ""

    def describe(self) -> dict[str, Any]:
        """The JSON form in Query.INSTRUCTIONS."""
        return {
            "name": self.name,
            "access": self.access.value,
            "dtypes": [d.label for d in self.dtypes],
            "shape": self.shape,
            "like": self.like,
            "below": self.below,
        }


def read(
    name: str, shape: str, dtypes: tuple[DType, ...] = F32, like: str = "", below: str = ""
) -> Operand:
    """Declare an operand that is only read."""
    return Operand(name, Access.READ, shape, dtypes, like, below)


def write(name: str, shape: str, dtypes: tuple[DType, ...] = F32, like: str = "") -> Operand:
    """Declare an operand of which every element is written, and nothing read."""
    return Operand(name, Access.WRITE, shape, dtypes, like)


def integer(name: str, default: int, minimum: int, maximum: int) -> Attribute:
    """Declare an integer attribute; shapes may name it."""
    return Attribute(name, INT, default, minimum, maximum)


def real(
    name: str, default: float, minimum: float | None = None, maximum: float | None = None
) -> Attribute:
    """Declare a float attribute. NaN is never accepted."""
    return Attribute(name, FLOAT, default, minimum, maximum)


def elementwise_work(weight: int = 1) -> Callable[[Shapes, Values], Work]:
    """Work of ``weight`` vector operations for each element of the largest operand."""
    return lambda shapes, attributes: Work(vector=weight * max(prod(s) for s in shapes))


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One instruction. See the module for what a kernel may assume and must do.

    Args:
        reference: ``(arrays, attributes)``: the plain twin, an independent derivation; fills
        outputs. fast: ``(arrays, attributes, start, stop)``: computes the units of one tile.
        tiling: ``(shapes, attributes)``: how the outputs are cut. May use integer attributes only.
        work: ``(shapes, attributes)``: operations, for the model clock; integer attributes only.
        requires: relations between dims and integer attributes beyond the shape patterns; the
        limits
            among them keep one tile within ~20 ms.
        bound: how far ``fast`` may be from ``reference``.
        crossing: for an instruction that moves data over a link (its attributes ``source`` and
        ``target``): ``(arrays, attributes)``: the bytes that crossed, from the finished
        operands; what it wrote when None.
    """

    name: str
    opcode: int
    doc: str
    operands: tuple[Operand, ...]
    reference: Callable[[Arrays, Values], None]
    fast: Callable[[Arrays, Values, int, int], None]
    tiling: Callable[[Shapes, Values], Tiling]
    attributes: tuple[Attribute, ...] = ()
    queue: Queue = Queue.COMPUTE
    work: Callable[[Shapes, Values], Work] = field(default_factory=elementwise_work)
    requires: tuple[str, ...] = ()
    bound: Bound = SAME_BITS
    crossing: Callable[[Arrays, Values], int] | None = None
    reads: tuple[int, ...] = field(init=False)
    writes: tuple[int, ...] = field(init=False)
    declaration: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kinds = [o.access for o in self.operands]
        for name, access in (("reads", Access.READ), ("writes", Access.WRITE)):
            object.__setattr__(self, name, tuple(i for i, a in enumerate(kinds) if a is access))
        object.__setattr__(self, "declaration", self.describe())

    def tiles(self, shapes: Shapes, attributes: Values) -> int:
        """How many tiles one execution has; 0 when the outputs are empty."""
        return self.tiling(shapes, attributes).tiles

    def run_tile(self, arrays: Arrays, attributes: Values, tile: int) -> None:
        """Run the fast twin on tile ``tile``. Repeatable; uses one thread.

        Raises:
            NumericError: data of an index operand is out of range.
        """
        tiling = self.tiling([a.shape for a in arrays], attributes)
        start = tile * tiling.step
        stop = min(start + tiling.step, tiling.extent)
        with np.errstate(all="ignore"):
            self.fast(arrays, attributes, start, stop)

    def run_reference(self, arrays: Arrays, attributes: Values) -> None:
        """Run the reference twin on everything. Raises as :meth:`run_tile`."""
        with np.errstate(all="ignore"):
            self.reference(arrays, attributes)

    def cost(
        self, shapes: Shapes, attributes: Values, dtypes: Sequence[DType] | None = None
    ) -> Cost:
        """Model clock cost. ``dtypes`` default to each operand's first."""
        kinds = dtypes or [o.dtypes[0] for o in self.operands]
        sizes = [prod(s) * d.itemsize for s, d in zip(shapes, kinds, strict=True)]
        bytes_read = sum(sizes[i] for i in self.reads)
        bytes_written = sum(sizes[i] for i in self.writes)
        work = self.work(shapes, attributes)
        compute = -(-work.macs // MATRIX_MACS_PER_CYCLE) + -(-work.vector // VECTOR_LANES)
        memory = -(-(bytes_read + bytes_written) // BYTES_PER_CYCLE)
        return Cost(ISSUE_CYCLES + max(compute, memory), bytes_read, bytes_written)

    def describe(self) -> dict[str, Any]:
        """The JSON form: one entry of Query.INSTRUCTIONS."""
        return {
            "name": self.name,
            "opcode": self.opcode,
            "doc": self.doc,
            "queue": self.queue.value,
            "operands": [o.describe() for o in self.operands],
            "attributes": [a.describe() for a in self.attributes],
            "requires": list(self.requires),
        }


def decode_attributes(instruction: Instruction, raw: Sequence[int], where: str = "") -> Values:
    """Values of an operation's raw 64-bit attribute patterns.

    Raises:
        ProgramError: their number is wrong, or a value is out of its declared range.
    """
    return unpack(instruction.attributes, raw, where or instruction.name)


def flat(shapes: Shapes, attributes: Values) -> Tiling:
    """Cut element by element; for kernels that treat every operand as a flat run of elements."""
    return Tiling(prod(shapes[-1]), FLAT_STEP)


FLAT_STEP = 1 << 18  # elements: 1 MiB of float32, half a millisecond of exp


def spans(arrays: Arrays, start: int, stop: int) -> Arrays:
    """Elements [start, stop) of each array, flattened; the arrays themselves when that is all (but
    never of rank 0: numpy turns results of that rank into scalars).
    """
    if start == 0 and stop == arrays[-1].size and arrays[-1].ndim:
        return arrays
    return [a.reshape(-1)[start:stop] for a in arrays]


def rows(unit_elements: int) -> int:
    """How many rows of ``unit_elements`` elements make a tile; at least 1."""
    return max(1, FLAT_STEP // max(1, unit_elements))
