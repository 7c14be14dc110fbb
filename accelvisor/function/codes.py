"""Programs and graphs as they can run: validated once, kept by the SHA-256 of their bytes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from accelvisor.abi.graphs import Graph
from accelvisor.abi.graphs import decode as decode_graph
from accelvisor.abi.programs import Program, Role, decode
from accelvisor.errors import ProgramError
from accelvisor.function import state as s
from accelvisor.function.cache import Cache
from accelvisor.function.objects import Memory, Object
from accelvisor.function.pauses import Pauses
from accelvisor.function.placement import lower_priority
from accelvisor.kernels import programs as kernels

_ALIGN = 64  # a cache line and the widest vector register: no kernel wants more
#: Operations, slots and entries (a few hundred bytes each) of what is kept.
_CACHED = 65_536
#: What is longer is validated beside the engine, not in it: that may take a tenth of a second.
_SHORT_BYTES = 16 * 1024

T = TypeVar("T")


def aligned(n: int) -> int:
    """``n`` bytes rounded up to the alignment of temporaries."""
    return (n + _ALIGN - 1) // _ALIGN * _ALIGN


@dataclass(frozen=True, slots=True)
class Code:
    """A validated program. ``temporaries`` are (slot, offset from the object's start)."""

    program: Program
    plan: tuple[kernels.PlannedOperation, ...]
    arguments: tuple[int, ...]
    temporaries: tuple[tuple[int, int], ...]
    extent: int
    cycles: int
    #: whether it runs on a chip's transfer queue
    transfers: bool
    #: its first instructions, for people
    label: str

    @property
    def weight(self) -> int:
        """What it counts in a cache."""
        return len(self.plan) + len(self.program.slots) + 1


class _Build(Generic[T]):
    """A program or graph being validated on a thread of its own."""

    writes = False

    def __init__(self, raw: bytes, wake: Callable[[], None], build: Callable[[bytes], T]) -> None:
        self._raw = raw
        self._wake = wake
        self._build = build
        self._done = False
        self.code: T | None = None
        self.error: BaseException | None = None
        threading.Thread(target=self._run, name="programs", daemon=True).start()

    def _run(self) -> None:
        lower_priority()
        try:
            self.code = self._build(self._raw)
        except BaseException as error:
            self.error = error
        self._done = True
        self._wake()

    def ready(self) -> bool:
        """Whether it has ended."""
        return self._done


class Codes(Generic[T]):
    """Validated programs, or graphs, by the SHA-256 of their bytes; rebuilt from device memory on
    demand.

    Args:
        build: validates bytes. Raises ProgramError.
        weight: what the result counts in the cache, which holds ``room``.
        wake: tells the engine that what a command waited for is there.
    """

    def __init__(
        self,
        build: Callable[[bytes], T],
        weight: Callable[[T], int],
        room: int = _CACHED,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._build = build
        self._weight = weight
        self._wake = wake
        self._by_digest: Cache[bytes, T] = Cache(room)
        self._building: _Build[T] | None = None

    def load(self, raw: bytes) -> Pauses[tuple[bytes, T]]:
        """Digest and code of some bytes.

        Raises:
            ProgramError: they are not valid.
        """
        digest = hashlib.sha256(raw).digest()
        code = self._by_digest.get(digest)
        if code is None:
            code = yield from self._make(raw)
            self._by_digest.put(digest, code, self._weight(code))
        return digest, code

    def known(self, found: Object) -> T | None:
        """Code of an object, unless it has to be built."""
        return self._by_digest.get(found.digest)

    def of(self, found: Object, memory: Memory) -> Pauses[T]:
        """Code of an object."""
        code = self._by_digest.get(found.digest)
        if code is None:
            raw = bytes(memory.part(found.address, found.nbytes))
            _, code = yield from self.load(raw)
        return code

    def _make(self, raw: bytes) -> Pauses[T]:
        if len(raw) <= _SHORT_BYTES:
            return self._build(raw)
        while self._building is not None and not self._building.ready():
            yield self._building  # one at a time, also when its command was aborted
        build = self._building = _Build(raw, self._wake, self._build)
        while not build.ready():
            yield build
        if self._building is build:
            self._building = None
        if build.code is None:
            raise build.error or RuntimeError("no program and no error")
        return build.code


def programs(wake: Callable[[], None] = lambda: None) -> Codes[Code]:
    """The programs of a function."""
    return Codes(_build, lambda code: code.weight, wake=wake)


def graphs(wake: Callable[[], None] = lambda: None) -> Codes[Graph]:
    """The graphs of a function."""
    return Codes(decode_graph, _graph_weight, wake=wake)


def _graph_weight(graph: Graph) -> int:
    return 1 + sum(map(len, graph.queues.values())) + len(graph.nodes)


def _build(raw: bytes) -> Code:
    program = decode(raw)
    plan = kernels.prepare(program)
    for operation in plan:
        if operation.tiles >= s.POSITION_TILES:
            raise ProgramError(
                f"{operation.tiles} tiles, the limit is {s.POSITION_TILES}",
                where=f"instruction {operation.index}",
                hint="split the tensors",
            )
    at = aligned(len(raw))
    temporaries = []
    for index, slot in enumerate(program.slots):
        if slot.role is Role.TEMPORARY:
            temporaries.append((index, at))
            at = aligned(at + slot.nbytes)
    names = [operation.instruction.name for operation in plan]
    return Code(
        program,
        plan,
        program.arguments(),
        tuple(temporaries),
        at,
        sum(o.cost.cycles for o in plan),
        bool(plan) and all(o.instruction.queue is kernels.Queue.TRANSFER for o in plan),
        "+".join(names[:3]) + (f"+{len(names) - 3}" if len(names) > 3 else ""),
    )
