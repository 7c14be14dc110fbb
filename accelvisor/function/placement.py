"""Where a worker's threads run, and which of them goes first. Best effort throughout: a sandbox or
another system may forbid it, and then only speed is lost.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Collection, Sequence

#: So far below the threads that answer register accesses. On a host with units this counts within a
#: function only: between functions, and between them and VMs, the units' weights do.
_NICE = 10

_sched_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def lower_priority() -> None:
    """Let this thread yield to the ones that answer the guest, and to the guest itself."""
    try:
        # From where the process was put: what its unit or its user chose still counts. 0 is this
        # thread; a worker may not name any other (system_calls.py).
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, min(usual + _NICE, 19))
    except OSError:
        pass
    # Within its turn a thread is not interrupted, whatever its priority: a vCPU that its register's
    # value is there for would wait for the end of a usual turn of 3 ms.
    short_turns()


def short_turns(slice_ns: int = 100_000) -> None:
    """Ask the scheduler for short turns of this thread (sched_setattr(2): sched_runtime, Linux
    6.12): then it interrupts others sooner when it wakes, and is sooner interrupted when it runs.

    Args:
        slice_ns: the turn's length in nanoseconds, at least 100 us.
    """
    number = {"x86_64": 314, "aarch64": 274}.get(os.uname().machine)
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # size, policy (normal), flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("<IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def current_cpu() -> int:
    """The processor that this thread runs on; -1 where the C library cannot tell."""
    return int(_sched_getcpu()) if _sched_getcpu is not None else -1


def shares(allowed: frozenset[int], mine: int, others: int) -> list[set[int]]:
    """Processors of each of ``others`` threads that shall run beside the one on ``mine``.

    Disjoint as long as there are enough of them, then by turns. Every share is a range rather than
    one processor where there are more, so that the scheduler can still avoid busy ones.
    """
    rest = sorted(allowed - {mine})
    after = [cpu for cpu in rest if cpu > mine] + [cpu for cpu in rest if cpu < mine]
    if not after:
        return []
    return [set(after[i % len(after) :: others]) for i in range(others)]


class Placement:
    """Keeps the threads of one parallel operation on different processors while it lasts.

    A thread is woken where its waker runs, and threads that hand out tiles wake each other all the
    time, so left alone a function's cores gather on one processor, for as long as the kernel's
    balancer takes to notice: up to the whole of an operation of 20 ms. In between the threads may
    run wherever the process might when this was made.
    """

    def __init__(self) -> None:
        self._allowed = _affinity()
        self._shares: dict[tuple[int, int], list[set[int]]] = {}

    def refresh(self) -> None:
        """The process may run elsewhere now. Called by a thread that was never moved by itself."""
        self._allowed = _affinity()
        self._shares.clear()

    def spread(self, helpers: int) -> Sequence[set[int]]:
        """Fix the calling thread where it runs. Returns processors beside it for each of the
        helpers, which take them themselves (:func:`settle`); none when nobody is to be moved.
        """
        mine = current_cpu()
        if mine not in self._allowed:
            return ()
        found = self._shares.get((mine, helpers))
        if found is None:
            found = self._shares[mine, helpers] = shares(self._allowed, mine, helpers)
        if found:
            settle({mine})
        return found

    def gather(self) -> None:
        """Let the calling thread run anywhere again; helpers stay until the next operation."""
        if len(self._allowed) > 1:
            settle(self._allowed)


def settle(cpus: Collection[int]) -> None:
    """Let the calling thread run on these processors only. No thread does it for another: a worker
    that was taken over could do it for those of other functions (system_calls.py).
    """
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        pass  # the process was moved to other processors meanwhile, or may not choose


def _affinity() -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset()
