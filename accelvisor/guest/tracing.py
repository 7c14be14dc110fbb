"""``accelguest trace``: run something on all chips, and show who ran when.

A context sees its own spans only, so the command has something of its own to show: the ``demo``
overlaps an exchange between chips with computing, ``train`` trains a small network data-parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accelvisor.guest import links, nn
from accelvisor.guest.parallel import DataParallel

if TYPE_CHECKING:
    from accelvisor.guest.function import Function
    from accelvisor.timeline import Span, Trace

_SIZE = 192
_ROUNDS = 4


def demo(function: Function) -> None:
    """Each chip multiplies matrices; each product is added over the chips while the next one is
    made. On a function without links, each product is copied instead.
    """
    chips = _chips(function)
    with function.program("matmul") as p:
        a, b = p.input((_SIZE, _SIZE)), p.input((_SIZE, _SIZE))
        p.output(p.call("matmul", a, b))
    with function.program("copy") as copy:
        copy.output(copy.call("copy", copy.input((_SIZE, _SIZE))))
    values = function.tensor(np.full((_SIZE, _SIZE), 1 / _SIZE, np.float32))
    with function.graph(name="demo") as g:
        for _ in range(_ROUNDS):
            products = [g.own(g.run(p, values, values, chip=chip)) for chip in chips]
            if len(chips) > 1:
                g.all_reduce(products, chips=chips, chunks=2)
            else:
                g.own(g.run(copy, products[0], chip=chips[0]))
    g()
    g.close()


def train(function: Function) -> None:
    """One epoch of a small network, data-parallel on as many chips as are joined."""
    chips = len(_chips(function))
    network = nn.Sequential((64, 128, 128, 10))
    random = np.random.RandomState(0)
    batch = 32 * chips
    x, labels = random.standard_normal((4 * batch, 64)), random.randint(0, 10, 4 * batch)
    with DataParallel(
        function, network, x, labels, network.initial(0), chips=chips, batch=batch
    ) as job:
        job.epoch(nn.order(len(x), batch, 0, 0))


RUNS: dict[str, Callable[[Function], None]] = {"demo": demo, "train": train}


def _chips(function: Function) -> list[int]:
    """Chips from 0 on, each joined to the next by links that are up now: all links are brought up
    where none is.
    """
    known = links.links(function)
    if known and not any(link.state == "up" for link in known):
        links.switch(function, True)
        known = links.links(function)
    joined = {frozenset(link.ends) for link in known if link.state == "up"}
    chips = [0]
    while frozenset((chips[-1], chips[-1] + 1)) in joined:
        chips.append(chips[-1] + 1)
    return chips


def table(trace: Trace) -> str:
    """How long each queue was busy, and with what most."""
    spans = trace.spans
    if not spans:
        return "nothing ran"
    whole = max(s.end_ns for s in spans) - min(s.start_ns for s in spans)
    lines = [f"{'queue':<20} {'spans':>6} {'busy':>10} {'cycles':>12}  most of it"]
    for key in dict.fromkeys((s.lane, s.queue) for s in sorted(spans, key=_place)):
        mine = [s for s in spans if (s.lane, s.queue) == key]
        busy = sum(s.end_ns - s.start_ns for s in mine)
        lines.append(
            f"{' '.join(key):<20} {len(mine):>6} {busy / 1e6:>7.2f} ms "
            f"{sum(s.cycles for s in mine):>12,}  {_most(mine)}"
        )
    gone = f", {trace.dropped} older ones are gone" if trace.dropped else ""
    return "\n".join([*lines, f"{len(spans)} spans in {whole / 1e6:.2f} ms{gone}"])


def _place(span: Span) -> tuple[Any, ...]:
    return len(span.lane), span.lane, span.queue


def _most(spans: Sequence[Span]) -> str:
    took: dict[str, int] = {}
    for span in spans:
        took[span.label] = took.get(span.label, 0) + span.end_ns - span.start_ns
    return max(took, key=lambda label: (took[label], label))
