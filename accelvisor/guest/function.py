"""A function as a guest program uses it: one queue, one context, everything that lives in it."""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelvisor.abi import commands
from accelvisor.abi.commands import Completion, Memory, Query
from accelvisor.abi.dtypes import DType
from accelvisor.abi.registers import Control, Reg
from accelvisor.errors import AccelvisorError, ConflictError, UsageError
from accelvisor.guest.claims import LOCKS, Claim, claim
from accelvisor.guest.copies import Copies, Landing
from accelvisor.guest.errors import DeviceFull, DeviceReset, error_from
from accelvisor.guest.instructions import InstructionSet, parse_instructions
from accelvisor.guest.process import OPEN, process_name
from accelvisor.guest.queue import Queue
from accelvisor.guest.registers import Identity, Registers, State
from accelvisor.guest.staging import DmaPool, Staging
from accelvisor.guest.transport import Transport
from accelvisor.guest.waiting import WaitPolicy
from accelvisor.limits import LIMITS

if TYPE_CHECKING:
    import numpy.typing as npt

    from accelvisor.guest.eager import Operations
    from accelvisor.guest.graphs.graph import Graph
    from accelvisor.guest.program import Program
    from accelvisor.guest.stream import Event, Stream
    from accelvisor.guest.tensor import PinnedArray, Tensor

#: How long to wait for a queue that a process has just died with: it is being disabled.
_PATIENCE_S = 1.0


class Function:
    """One accelerator function, opened: a queue, a context, and the tensors and programs in it.

    Use as a context manager, or call :meth:`close`. Safe for threads; not for a forked child, where
    it is closed already.

    Args:
        transport: the way to the device; closed with the function.
        queue: which queue; None for the first that no other process of the VM holds.
        name: what the host's tools show as the user; the program's name when None.
        lock_name: names the queue locks between processes; the transport's PCI address when
            None, and without one nothing is locked.
        locks: where the lock files are.
        depth: commands in flight at most.
        timeout_s: seconds that a command may take; None for ever.
        clock, sleep: monotonic seconds, and how to pass them.

    Raises:
        ConflictError: all queues are held. DeviceInTransition, ProtocolError, UnavailableError: as
        :meth:`Registers.identity`. DeviceFull: the device has no context left.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        queue: int | None = None,
        name: str | None = None,
        lock_name: str | None = None,
        locks: Path = LOCKS,
        depth: int | None = None,
        timeout_s: float | None = 120.0,
        policy: WaitPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.transport = transport
        self.timeout_s = timeout_s
        self.generation = 0
        self._name = name if name is not None else process_name()
        self._claim: Claim | None = None
        self._closed = False
        self._instructions: InstructionSet | None = None
        self._programs: dict[bytes, int] = {}
        self._operations: Operations | None = None
        self._pinned: set[PinnedArray] = set()  # until they are released
        #: Handles of tensors that were garbage-collected, with their generation: destroyed at the
        #: next command, since a collection may come while the queue's lock is held.
        self.graveyard: deque[tuple[int, int]] = deque()
        self.registers = Registers(transport, clock=clock, sleep=sleep)
        try:
            self.identity: Identity = self.registers.identity()
            lock_name = lock_name or getattr(transport, "bdf", None)
            if lock_name is not None:
                self._claim = claim(
                    lock_name, self.identity.queues, queue, directory=locks, patience_s=_PATIENCE_S,
                    clock=clock, sleep=sleep,
                )  # fmt: skip
                queue = self._claim.queue
                claimed = getattr(transport, "claimed", None)
                if claimed is not None:
                    claimed(queue, self._claim.fd)
            self.queue = Queue(
                transport, queue or 0, self.identity.layout, self.registers,
                depth=depth, policy=policy, clock=clock, sleep=sleep,
            )  # fmt: skip
            self.staging = Staging(transport.window, self.identity, self.queue.index)
            self.dma = DmaPool(transport)
            self.copies = Copies(self, self.staging, self.dma)
            self._begin()
        except BaseException:
            self._release()
            raise
        OPEN.add(self)

    @classmethod
    def open(
        cls,
        bdf: str | None = None,
        *,
        driver: str | None = None,
        queue: int | None = None,
        name: str | None = None,
        timeout_s: float | None = 120.0,
    ) -> Function:
        """Open a function of this VM.

        Args:
            bdf: PCI address; None for the only one.
            driver: ``sysfs`` or ``vfio``; None to choose.

        Raises:
            NotFoundError: this VM has none. Others as :func:`discover` and the constructor.
        """
        from accelvisor.guest.discovery import discover

        return cls(discover(bdf, driver=driver), queue=queue, name=name, timeout_s=timeout_s)

    # --- life ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.queue.start()
        entry = commands.context_open(0, os.getpid(), self._name)
        self.check(self.queue.call(entry, self.timeout_s))

    def restart(self) -> None:
        """Open a new context after a fault or a reset; earlier tensors and programs are gone."""
        self._alive()
        self.generation += 1
        self._programs.clear()
        self.graveyard.clear()
        if self._operations is not None:
            self._operations.clear()
        self._begin()

    def reset(self) -> None:
        """Reset the whole function, for every process that uses it, and open a new context."""
        self._alive()
        before = self.registers.state().reset_count
        self.transport.write32(Reg.CONTROL, Control.RESET)
        deadline = time.monotonic() + 10.0
        while self.registers.state().reset_count == before:
            if time.monotonic() > deadline:
                raise ConflictError("the function did not reset", code="reset", where="function")
            time.sleep(0.001)
        self.restart()

    def close(self) -> None:
        """Close the context with all that lives in it, and let go of the device. Safe twice."""
        if self._closed:
            return
        try:
            self.queue.stop()
            stopped = True
        except AccelvisorError:
            stopped = False  # absent, perhaps for a while: what was submitted may still run
        self._release(stopped)

    def _release(self, stopped: bool = True) -> None:
        """Let go of everything.

        Args:
            stopped: the device uses no memory of ours any more. Else that stays as it is until the
                transport has cut the device off from it.
        """
        self._closed = True
        OPEN.discard(self)
        queue = getattr(self, "queue", None)
        if queue is not None:
            queue.release()
        staging = getattr(self, "staging", None)
        if staging is not None:
            staging.close()
        pool = getattr(self, "dma", None)
        if stopped:
            if pool is not None:
                pool.close()
            for array in list(self._pinned):
                array.release()
        self.transport.close()
        if self._claim is not None:
            self._claim.release()

    def forked(self) -> None:
        """In a forked child: the device belongs to the parent."""
        self._closed = True
        self.queue.forked()
        self.staging.forked()
        forked = getattr(self.transport, "forked", None)
        if forked is not None:
            forked()
        if self._claim is not None:
            self._claim.release()  # closing a copy of the descriptor leaves the parent's lock held

    def __enter__(self) -> Function:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"queue {self.queue.index}"
        return f"<Function {self.identity.uuid} {state}>"

    @property
    def closed(self) -> bool:
        """Whether it was closed, here or by a fork."""
        return self._closed

    def _alive(self) -> None:
        if self._closed:
            raise ConflictError(
                "the function is closed", code="function-closed", where="function",
                hint="open it again: Function.open()",
            )  # fmt: skip

    # --- commands --------------------------------------------------------------------------------

    def call(self, entry: bytes, timeout_s: float | None = None) -> Completion:
        """Submit one command, wait, and raise if the device did not say OK.

        Raises:
            CommandRefused, ProgramRefused, DeviceFull, DeviceFault, CommandTimeout, DeviceReset.
        """
        self._alive()
        if self.graveyard:
            self.bury()
        completion = self.queue.call(entry, timeout_s or self.timeout_s)
        if completion.status:
            self.check(completion)
        return completion

    def carry(self, entry: bytes, landing: Landing) -> Completion:
        """Submit a command that uses ``landing`` and wait for it.

        When this raises, the landing is given back as soon as the device is done with it; else it
        is still the caller's.
        """
        try:
            cookie = self.queue.submit(entry, self.timeout_s)
        except AccelvisorError:  # it was not submitted; after anything else nobody knows
            landing.release()
            raise
        try:
            return self.queue.wait(cookie, self.timeout_s)
        except BaseException:
            self.queue.abandon(cookie, landing.release)
            raise

    def check(self, completion: Completion) -> None:
        """Raise the typed error of a completion that is not OK, with the device's own text."""
        if completion.status:
            raise error_from(completion, self._detail())

    def _detail(self) -> str:
        """The device's text for the last refusal or fault; empty when it cannot be had."""
        try:
            told = self.ask(Query.FAULT)
        except AccelvisorError:
            return ""
        return str(told.get("text") or told.get("message") or "") if isinstance(told, dict) else ""

    def bury(self) -> None:
        """Destroy the tensors that were garbage-collected."""
        while True:
            try:
                handle, generation = self.graveyard.popleft()
            except IndexError:  # empty, perhaps because another thread buried the last one
                return
            if generation == self.generation:
                cookie = self.queue.submit(commands.tensor_destroy(0, handle), self.timeout_s)
                self.queue.abandon(cookie)

    def reclaim(self) -> bool:
        """Make staging memory come free; False when there is nothing to wait for."""
        if self.queue.poll():
            return True
        if not self.queue.in_flight:
            return False
        self.queue.settle(self.timeout_s)
        return True

    # --- questions -------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Status flags, epoch and reset count, read now."""
        return self.registers.state()

    def ask(self, what: Query) -> Any:
        """The device's answer to one of its queries, parsed. Raises as :meth:`call`."""
        from accelvisor.guest.questions import ask

        self._alive()
        return ask(self, what)

    def info(self) -> dict[str, Any]:
        """What the device says of itself (Query.INFO)."""
        return dict(self.ask(Query.INFO))

    def statistics(self) -> dict[str, Any]:
        """The device's counters (Query.STATISTICS)."""
        return dict(self.ask(Query.STATISTICS))

    def objects(self) -> Any:
        """The context's tensors and programs as the device has them (Query.OBJECTS)."""
        return self.ask(Query.OBJECTS)

    def trace(self) -> dict[str, Any]:
        """Who ran on which queue, and when (Query.TRACE), for :func:`accelvisor.timeline.read`."""
        return dict(self.ask(Query.TRACE))

    def fabric(self) -> dict[str, Any]:
        """The function's chips and links (Query.FABRIC)."""
        return dict(self.ask(Query.FABRIC))

    @property
    def instructions(self) -> InstructionSet:
        """The device's instruction table by name."""
        if self._instructions is None:
            self._instructions = parse_instructions(self.ask(Query.INSTRUCTIONS))
        return self._instructions

    # --- programs --------------------------------------------------------------------------------

    def program(self, name: str = "program") -> Program:
        """A new program to build: ``with fn.program() as p: ...``."""
        from accelvisor.guest.program import Program

        self._alive()
        return Program(self, name)

    def load(self, data: bytes) -> int:
        """Upload a program's bytes, once for each content; returns its handle.

        Raises:
            ProgramRefused: the device found it invalid; the message says where.
        """
        import hashlib

        digest = hashlib.sha256(data).digest()
        handle = self._programs.get(digest)
        if handle is None:
            self._programs[digest] = handle = self._upload(data, commands.program_load)
        return handle

    def _upload(self, data: bytes, entry: Callable[[int, Memory], bytes]) -> int:
        self._alive()
        landing = self.copies.filled(data)
        completion = self.carry(entry(0, landing.memory), landing)
        landing.release()
        self.check(completion)
        return completion.value

    def unload(self, data: bytes) -> None:
        """Forget an uploaded program; the device frees its temporaries."""
        import hashlib

        handle = self._programs.pop(hashlib.sha256(data).digest(), None)
        if handle is not None:
            self.call(commands.program_unload(0, handle))

    # --- graphs and streams ----------------------------------------------------------------------

    def graph(self, *, automatic: bool = True, name: str = "graph") -> Graph:
        """A new graph to record: ``with fn.graph() as g: ...`` (accelvisor.guest.graphs)."""
        from accelvisor.guest.graphs.graph import Graph

        return Graph(self, automatic=automatic, name=name)

    def load_graph(self, data: bytes) -> int:
        """Upload a graph's bytes (accelvisor.abi.graphs); its handle. Raises as :meth:`load`."""
        return self._upload(data, commands.graph_load)

    def unload_graph(self, handle: int) -> None:
        """Forget an uploaded graph."""
        self.call(commands.graph_unload(0, handle))

    def stream(self, chip: int | None = None) -> Stream:
        """A new stream of launches, on one chip or on whichever is free."""
        from accelvisor.guest.stream import Stream

        return Stream(self, chip)

    def event(self) -> Event:
        """A new event: a point of a stream that other streams can wait for."""
        from accelvisor.guest.stream import Event

        return Event()

    @property
    def ops(self) -> Operations:
        """Instructions to call on tensors at once: ``fn.ops.matmul(a, b)``."""
        if self._operations is None:
            from accelvisor.guest.eager import Operations

            self._operations = Operations(self)
        return self._operations

    # --- tensors ---------------------------------------------------------------------------------

    def create(self, dtype: DType, shape: Sequence[int]) -> int:
        """Device memory for a tensor; returns its handle.

        Raises:
            DeviceFull: no memory is left, also after a garbage collection.
            UsageError: a shape that no tensor has.
        """
        shape = tuple(int(d) for d in shape)
        if len(shape) > LIMITS.tensor_rank or not all(0 <= d < 1 << 32 for d in shape):
            raise UsageError(
                f"shape {shape} is not a tensor's",
                where="tensor",
                hint=f"at most {LIMITS.tensor_rank} dims of 0 to 4294967295 each",
            )
        entry = commands.tensor_create(0, dtype, shape)
        try:
            return self.call(entry).value
        except DeviceFull:
            gc.collect()  # tensors in reference cycles hold memory that nobody can reach
            if not self.graveyard:
                raise
        return self.call(entry).value

    def tensor(self, data: npt.ArrayLike, dtype: str | None = None) -> Tensor:
        """A tensor with the values of ``data`` (anything numpy takes)."""
        from accelvisor.guest.tensor import from_numpy

        return from_numpy(self, data, dtype)

    def empty(self, shape: Sequence[int] | int, dtype: str = "float32") -> Tensor:
        """A tensor whose contents are not defined."""
        from accelvisor.guest.tensor import empty

        return empty(self, shape, dtype)

    def full(self, shape: Sequence[int] | int, value: float, dtype: str = "float32") -> Tensor:
        """A tensor whose elements are all ``value``."""
        from accelvisor.guest.tensor import full

        return full(self, shape, value, dtype)

    def zeros(self, shape: Sequence[int] | int, dtype: str = "float32") -> Tensor:
        """A tensor of zeros."""
        return self.full(shape, 0, dtype)

    def ones(self, shape: Sequence[int] | int, dtype: str = "float32") -> Tensor:
        """A tensor of ones."""
        return self.full(shape, 1, dtype)

    def pinned(self, shape: Sequence[int] | int, dtype: str = "float32") -> PinnedArray:
        """A numpy array in memory that the device can reach: copies of it need no staging."""
        from accelvisor.guest.tensor import PinnedArray

        self._alive()
        array = PinnedArray(self, shape, dtype)
        self._pinned.add(array)
        return array

    @property
    def pinned_arrays(self) -> set[PinnedArray]:
        """The live pinned arrays of this function."""
        return self._pinned

    def stale(self, generation: int) -> AccelvisorError | None:
        """Why an object of ``generation`` can no longer be used; None when it can."""
        if self._closed:
            return ConflictError("the function is closed", code="function-closed", where="function")
        if generation != self.generation:
            return DeviceReset(
                "this object belongs to a context that is gone",
                code="object-gone",
                where="function",
                hint="create it again after Function.restart()",
            )
        return None
