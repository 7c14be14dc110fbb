"""The collectives across hosts: any MPI that mpi4py loads carries the messages.

A header and its payload are two messages on two tags, a report is one on a third, all on a
duplicate of the communicator that was given, so nothing else can meet them. Everything is
nonblocking and polled against a deadline: MPI itself would wait for a lost rank for ever.

MPI_Finalize waits for all ranks, too. After a rank was lost it is given one deadline at the end of
the process, which then ends without it (and the starter, mpirun, ends the job). MPI_Abort is called
by :meth:`MpiCommunicator.abort` alone.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from accelvisor.collectives.communicator import Communicator, Options
from accelvisor.collectives.hops import Expired, Send
from accelvisor.collectives.kinds import Array
from accelvisor.collectives.messages import HEADER_BYTES, Payload, decode
from accelvisor.errors import UnavailableError

_HEAD, _BODY, _REPORT = 1, 2, 3

_SPINS = 200
"""Polls before a waiting rank begins to sleep: what comes soon is taken at once."""
_NAP_S = (0.00002, 0.0005)
"""The first and the longest sleep between two polls."""


class _Leaving(NamedTuple):
    """A send that may still read its buffer."""

    request: Any
    buffer: Array
    to: int


class _Mpi:
    """The transport of one rank."""

    def __init__(self, communicator: Any, mpi: Any) -> None:
        self.mpi = mpi
        self.world = communicator.Dup()
        self.leaving: list[_Leaving] = []

    def send(self, message: Send) -> None:
        self._begin(message.header, message.to, _REPORT if message.report else _HEAD)
        payload = np.frombuffer(message.payload, np.uint8)
        if payload.size and not message.report:
            self._begin(payload, message.to, _BODY)

    def _begin(self, data: Payload, to: int, tag: int) -> None:
        buffer = np.frombuffer(data, np.uint8)
        request = self.world.Isend([buffer, self.mpi.BYTE], to, tag)
        self.leaving.append(_Leaving(request, buffer, to))

    def receive(self, source: int | None, timeout_s: float) -> tuple[Payload, Payload]:
        until = time.monotonic() + timeout_s
        found = self._match([(self.mpi.ANY_SOURCE, _REPORT), (source, _HEAD)], until)
        header = self._take(found, until)
        size = decode(header).payload if header.nbytes == HEADER_BYTES else 0
        if not size or source is None:
            return header, b""
        return header, self._take(self._match([(source, _BODY)], until), until)

    def _match(self, wanted: list[tuple[int | None, int]], until: float) -> tuple[Any, int]:
        """The first message that is there, in order of ``wanted``, and its size."""
        status = self.mpi.Status()
        pause = _Pause(until)
        while True:
            for source, tag in wanted:
                if source is not None:
                    message = self.world.Improbe(source, tag, status)
                    if message is not None:
                        return message, status.Get_count(self.mpi.BYTE)
            pause.wait()

    def _take(self, found: tuple[Any, int], until: float) -> Array:
        message, size = found
        buffer = np.empty(size, np.uint8)
        request = message.Irecv([buffer, self.mpi.BYTE])
        pause = _Pause(until)
        while not request.Test():
            pause.wait()
        return buffer

    def waiting(self, source: int) -> bool:
        return bool(self.world.Iprobe(source, _HEAD))

    def flush(self, timeout_s: float) -> None:
        pause = _Pause(time.monotonic() + timeout_s)
        while self.leaving:
            self.leaving = [item for item in self.leaving if not item.request.Test()]
            if self.leaving:
                try:
                    pause.wait()
                except Expired:
                    raise Expired(self.leaving[0].to) from None


class _Pause:
    """What a waiting rank does between two looks: nothing at first, then it leaves the CPU."""

    def __init__(self, until: float) -> None:
        self.until, self.turns, self.nap = until, 0, _NAP_S[0]

    def wait(self) -> None:
        """Raises Expired when the time is over."""
        self.turns += 1
        if self.turns < _SPINS:
            if self.turns % 16 == 0:
                os.sched_yield()
            return
        if time.monotonic() > self.until:
            raise Expired
        time.sleep(self.nap)
        self.nap = min(2 * self.nap, _NAP_S[1])


class MpiCommunicator(Communicator):
    """The collectives over an mpi4py communicator; all of its ranks construct one together.

    Args:
        communicator: COMM_WORLD if None.

    Raises:
        UnavailableError: mpi4py is not installed, or finds no MPI (``mpi-unavailable``).
    """

    def __init__(
        self, communicator: Any = None, options: Options | None = None, *, accelerate: bool = False
    ) -> None:
        mpi = _load()
        given = mpi.COMM_WORLD if communicator is None else communicator
        transport = _Mpi(given, mpi)
        super().__init__(
            transport, given.Get_rank(), given.Get_size(), options, accelerate=accelerate
        )
        self._mpi_transport = transport

    def _run(self, *arguments: Any, **given: Any) -> Any:
        try:
            return super()._run(*arguments, **given)
        except UnavailableError:
            _finalize_within(self.options.deadline_s)
            raise

    def close(self) -> None:
        """Give the duplicate back, all ranks together. Not after an error: nobody may be there."""
        if self._broken is None:
            self._mpi_transport.world.Free()

    def abort(self, code: int = 1) -> None:
        """MPI_Abort: end all ranks of the job now, this one and those that hang."""
        self._mpi_transport.world.Abort(code)


def _load() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as e:
        raise UnavailableError(
            f"MPI cannot be used: {e}",
            code="mpi-unavailable",
            where="collectives",
            hint="install mpi4py and an MPI library (Debian: openmpi-bin)",
        ) from None


_ending = threading.Lock()


def _finalize_within(seconds: float) -> None:
    """At the end of this process give MPI_Finalize so long, once."""
    if _ending.acquire(blocking=False):
        # Registered after mpi4py's own, so it runs before that.
        atexit.register(_finalize, seconds)


def _finalize(seconds: float) -> None:
    mpi = _load()
    if mpi.Is_finalized():
        return
    # MPI_Finalize holds the interpreter's lock, so only a thread without Python can end it.
    with open(os.devnull, "w") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        mpi.Finalize()
        faulthandler.cancel_dump_traceback_later()
