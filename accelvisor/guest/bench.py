"""``accelguest bench``: what the function costs and gives, as this guest sees it.

Each figure is the median of several repeats, with the repeats' spread, and stands beside what the
guest's own CPU does in the same run where that says something.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from accelvisor.abi import commands
from accelvisor.abi.registers import Reg
from accelvisor.errors import AccelvisorError, UsageError

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

_NOP = commands.nop(0)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. ``low`` and ``high``: the quartiles of the repeats."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    against: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def run(
    function: Function, groups: Sequence[str] = (), *, quick: bool = False
) -> Iterator[Figure]:
    """The figures of some groups (all without any), each as it is measured.

    Args:
        groups: of :data:`GROUPS`.
        quick: a fifth of the time; wider spread.

    Raises:
        UsageError: there is no such group.
    """
    for name in groups:
        if name not in GROUPS:
            raise UsageError(
                f"there is no group {name!r}", where="bench", hint=f"groups: {', '.join(GROUPS)}"
            )
    budget = 0.2 if quick else 1.0
    for name, measure in GROUPS.items():
        if not groups or name in groups:
            yield from measure(function, budget)


def sample(
    action: Callable[[], Any], budget_s: float, least: int = 5, most: int = 100_000
) -> list[float]:
    """Seconds of each of as many calls of ``action`` as fit the budget, after one to warm up."""
    action()
    clock = time.perf_counter
    end = clock() + budget_s
    taken: list[float] = []
    while len(taken) < most and (len(taken) < least or clock() < end):
        start = clock()
        action()
        taken.append(clock() - start)
    return taken


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    n = len(ordered)
    return ordered[n // 4], ordered[n // 2], ordered[(3 * n) // 4]


def _figure(
    name: str, seconds: list[float], unit: str, scale: Callable[[float], float], against: str = ""
) -> Figure:
    low, middle, high = (scale(s) for s in _quartiles(seconds))
    return Figure(name, middle, unit, min(low, high), max(low, high), against)


def _latency(fn: Function, budget: float) -> Iterator[Figure]:
    yield _register(fn, budget)
    yield _round_trip(fn, budget)


def _register(fn: Function, budget: float) -> Figure:
    seconds = sample(lambda: fn.transport.read32(Reg.SCRATCH), budget)
    return _figure("register read", seconds, "us", lambda s: s * 1e6)


def _round_trip(fn: Function, budget: float) -> Figure:
    queue = fn.queue
    seconds = sample(lambda: queue.call(_NOP), budget)
    return _figure("command round trip", seconds, "us", lambda s: s * 1e6)


def _rate(fn: Function, budget: float) -> Iterator[Figure]:
    queue, depth, count = fn.queue, 32, 2000
    half = depth // 2

    def burst() -> None:
        submit, wait = queue.submit, queue.wait
        flying = deque(submit(_NOP) for _ in range(depth))
        for _ in range((count - depth) // half):
            for _ in range(half):
                wait(flying.popleft())
            with queue.batch():
                flying.extend([submit(_NOP) for _ in range(half)])
        for cookie in flying:
            wait(cookie)

    seconds = sample(burst, budget, least=3)
    yield _figure(f"no-op commands, {depth} in flight", seconds, "/s", lambda s: count / s)


def _bandwidth(fn: Function, budget: float) -> Iterator[Figure]:
    import numpy as np

    room = max(fn.identity.memory_bytes // 4, _MIB)
    for size in (64 << 10, _MIB, 16 * _MIB):
        if size > room:
            continue
        label = f"{size >> 10} KiB" if size < _MIB else f"{size // _MIB} MiB"

        def rate(s: float, size: int = size) -> float:
            return size / s / 1e9

        source = np.ones(size, np.uint8)
        target = np.empty(size, np.uint8)
        plain = _quartiles(sample(lambda: np.copyto(target, source), budget / 4))[1]  # noqa: B023
        against = f"memcpy {rate(plain):.2f} GB/s"
        with fn.empty((size,), "uint8") as tensor:
            seconds = sample(lambda: tensor.copy_(source), budget / 2)  # noqa: B023
            yield _figure(f"copy in, {label}", seconds, "GB/s", rate, against)
            seconds = sample(lambda: tensor.numpy(out=target), budget / 2)  # noqa: B023
            yield _figure(f"copy out, {label}", seconds, "GB/s", rate, against)
            try:
                pinned = fn.pinned((size,), "uint8")
            except AccelvisorError:
                continue  # no DMA for this process: the copies above went through the window
            seconds = sample(lambda: tensor.copy_(pinned.array), budget / 2)  # noqa: B023
            yield _figure(f"DMA in, {label}", seconds, "GB/s", rate, against)
            seconds = sample(lambda: tensor.numpy(out=pinned.array), budget / 2)  # noqa: B023
            yield _figure(f"DMA out, {label}", seconds, "GB/s", rate, against)
            pinned.release()


def _matmul(fn: Function, budget: float) -> Iterator[Figure]:
    import numpy as np

    if "matmul" not in fn.instructions:
        return
    for n in (256, 512, 1024):
        if 3 * 4 * n * n > fn.identity.memory_bytes // 2:
            continue

        def speed(s: float, n: int = n) -> float:
            return 2 * n**3 / s / 1e9

        random = np.random.RandomState(n)
        a, b = (random.standard_normal((n, n)).astype(np.float32) for _ in range(2))
        with fn.program(f"matmul-{n}") as p:
            p.output(p.call("matmul", p.input((n, n)), p.input((n, n))))
        with fn.tensor(a) as x, fn.tensor(b) as y, p.bind(x, y) as product:
            seconds = sample(product, budget, least=3)
            result = product.result
        plain = sample(lambda: a @ b, budget / 2, least=1)  # noqa: B023
        against = f"numpy here {speed(_quartiles(plain)[1]):.2f} GFLOP/s"
        yield _figure(f"matmul {n} x {n} float32", seconds, "GFLOP/s", speed, against)
        result.close()
        p.close()


#: Name of a group of figures -> what measures them.
GROUPS: dict[str, Callable[[Function, float], Iterator[Figure]]] = {
    "latency": _latency,
    "rate": _rate,
    "bandwidth": _bandwidth,
    "matmul": _matmul,
}
