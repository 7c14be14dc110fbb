"""Every collective on up to 16 simulated ranks: bits against the plain twin, bytes by formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.collectives import reference, zvc
from accelvisor.collectives.communicator import Options, begin
from accelvisor.collectives.hops import Hops
from accelvisor.collectives.kinds import BY_NAME, KINDS, Array, Kind, Op
from accelvisor.collectives.local import Simulation
from accelvisor.collectives.messages import HEADER_BYTES, Collective
from accelvisor.errors import AccelvisorError, UsageError

from .cases import MASKS, smooth, values


def simulate(
    collective: Collective, inputs: list[Array], kind: Kind, options: Options, seed: int = 0,
    **given: Any,
) -> tuple[list[Any], list[Hops]]:  # fmt: skip
    dtype = "bfloat16" if kind.name == "bfloat16" else None
    ranks = [
        begin(collective, x, r, len(inputs), options, dtype=dtype, **given)
        for r, x in enumerate(inputs)
    ]
    before = [x.tobytes() for x in inputs]
    simulation = Simulation([steps for _, steps in ranks], seed=seed)
    results = simulation.run()
    for result in results:
        if isinstance(result, AccelvisorError):
            raise result
    assert [x.tobytes() for x in inputs] == before
    return results, [hops for hops, _ in ranks]


def ring_reduction(kind: Kind, op: Op, inputs: list[Array], first: int = 0) -> Array:
    """What a ring gives: value by value, in the order that its block goes round."""
    n, size = inputs[0].size, len(inputs)
    length = -(-n // size)
    out = np.empty_like(inputs[0])
    for block in range(size):
        at = slice(min(n, block * length), min(n, (block + 1) * length))
        order = [inputs[(block + i + first) % size][at] for i in range(size)]
        out[at] = reference.reduce_in_order(kind, op, order)
    return out


#: One of each width and arithmetic, where all types would only take longer.
SOME = [BY_NAME[name] for name in ("float64", "bfloat16", "int8", "uint32")]
SETTINGS = [
    Options(compress=compress, order=order, chunk_bytes=chunk)
    for compress in ("never", "always", "auto")
    for order in ("ring", "rank")
    for chunk in (0, 256)
]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 16), n=st.integers(0, 300), kind=st.sampled_from(KINDS),
    op=st.sampled_from(Op), mask=st.sampled_from(MASKS), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_all_reduce_has_the_bits_of_the_plain_twin_however_it_travels(
    size: int, n: int, kind: Kind, op: Op, mask: str, seed: int
) -> None:
    inputs = [values(kind, n, mask if i % 2 else "half", seed + i) for i in range(size)]
    wanted = {
        "ring": ring_reduction(kind, op, inputs).tobytes(),
        "rank": reference.reduce_in_order(kind, op, inputs).tobytes(),
    }
    for options in SETTINGS:
        results, _ = simulate(Collective.ALL_REDUCE, inputs, kind, options, seed, op=op)
        assert {r.tobytes() for r in results} == {wanted[options.order]}, options


def test_one_rank_gets_its_own_array_as_a_result() -> None:
    kind = BY_NAME["float32"]
    x = values(kind, 100, "dense", 1)
    for collective in (Collective.ALL_REDUCE, Collective.REDUCE, Collective.ALL_REDUCE_2D):
        grid = (1, 1) if collective is Collective.ALL_REDUCE_2D else (0, 0)
        [out], _ = simulate(collective, [x], kind, Options(), op=Op.ABSMAX, grid=grid)
        assert out.tobytes() == reference.finish(kind, Op.ABSMAX, x).tobytes()
    [part], _ = simulate(Collective.REDUCE_SCATTER, [x], kind, Options())
    assert part.values.tobytes() == reference.finish(kind, Op.SUM, x).tobytes()
    for collective in (Collective.ALL_GATHER, Collective.BROADCAST):
        [out], _ = simulate(collective, [x], kind, Options())
        assert out.tobytes() == x.tobytes()


def test_ranks_may_differ_in_how_they_compress() -> None:
    kind = BY_NAME["float32"]
    inputs = [values(kind, 500, "half", i) for i in range(4)]
    ways = ["never", "always", "auto", "always"]
    ranks = [
        begin(Collective.ALL_REDUCE, x, r, 4, Options(compress=ways[r]))
        for r, x in enumerate(inputs)
    ]
    results = Simulation([steps for _, steps in ranks]).run()
    wanted = ring_reduction(kind, Op.SUM, inputs).tobytes()
    assert {r.tobytes() for r in results} == {wanted}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_scatter_reduce_leaves_each_rank_its_block(size: int) -> None:
    for kind in SOME:
        for n in (0, 1, size, 101):
            inputs = [values(kind, n, "half", i) for i in range(size)]
            whole = ring_reduction(kind, Op.SUM, inputs)
            for options in SETTINGS[:2] + SETTINGS[4:6]:
                if options.order == "rank":
                    continue
                results, _ = simulate(Collective.REDUCE_SCATTER, inputs, kind, options)
                seen = np.zeros(n, int)
                for rank, part in enumerate(results):
                    assert part.block == (rank + 1) % size
                    at = slice(part.start, part.start + part.values.size)
                    assert part.values.tobytes() == whole[at].tobytes()
                    seen[at] += 1
                assert (seen == 1).all()


@pytest.mark.parametrize("collective", [Collective.ALL_GATHER, Collective.BROADCAST])
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_what_is_copied_keeps_every_bit(collective: Collective, size: int) -> None:
    for kind in SOME:
        inputs = [values(kind, 150, "dense", i) for i in range(size)]
        for options in SETTINGS:
            root = size // 2 if collective is Collective.BROADCAST else 0
            results, _ = simulate(collective, inputs, kind, options, root=root)
            all_of_them = b"".join(x.tobytes() for x in inputs)
            wanted = inputs[root].tobytes() if root else all_of_them
            assert {r.tobytes() for r in results} == {wanted}


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_reduce_gives_the_root_the_sum_and_others_nothing(size: int) -> None:
    kind = BY_NAME["float32"]
    inputs = [values(kind, 200, "half", i) for i in range(size)]
    in_rank = reference.reduce_in_order(kind, Op.SUM, inputs).tobytes()
    for root in range(size):
        turned = [inputs[(root + 1 + i) % size] for i in range(size)]
        in_ring = reference.reduce_in_order(kind, Op.SUM, turned).tobytes()
        for options in SETTINGS:
            results, _ = simulate(Collective.REDUCE, inputs, kind, options, root=root)
            wanted = in_rank if options.order == "rank" else in_ring
            assert results[root].tobytes() == wanted
            assert [r for i, r in enumerate(results) if i != root] == [None] * (size - 1)


@pytest.mark.parametrize("grid", [(1, 4), (4, 1), (2, 2), (2, 3), (4, 4), (3, 5)])
def test_the_two_dimensional_form_adds_along_rows_then_columns(grid: tuple[int, int]) -> None:
    rows, columns = grid
    for kind in (BY_NAME["float32"], BY_NAME["bfloat16"], BY_NAME["int8"]):
        for n in (0, 1, 5, 333):
            inputs = [values(kind, n, "half", i) for i in range(rows * columns)]
            by_row = [
                ring_reduction(kind, Op.SUM, inputs[r * columns : (r + 1) * columns])
                for r in range(rows)
            ]
            wanted = np.empty(n, kind.storage)
            length = -(-n // columns)
            for c in range(columns):
                at = slice(min(n, c * length), min(n, (c + 1) * length))
                wanted[at] = ring_reduction(kind, Op.SUM, [x[at] for x in by_row])
            for options in SETTINGS[:2] + SETTINGS[4:6]:
                if options.order == "rank":
                    continue
                results, hops = simulate(
                    Collective.ALL_REDUCE_2D, inputs, kind, options, grid=grid
                )
                assert {r.tobytes() for r in results} == {wanted.tobytes()}
                steps = 2 * (columns - 1) + 2 * (rows - 1)
                if options.chunk_bytes == 0:
                    assert {h.stats.messages for h in hops} == {steps}


def test_four_by_four_takes_12_steps_where_one_ring_takes_30() -> None:
    kind = BY_NAME["float32"]
    inputs = [smooth(kind, 1600, "all", i) for i in range(16)]
    plain = Options(compress="never", chunk_bytes=0)
    _, ring = simulate(Collective.ALL_REDUCE, inputs, kind, plain)
    _, grid = simulate(Collective.ALL_REDUCE_2D, inputs, kind, plain, grid=(4, 4))
    assert {h.stats.messages for h in ring} == {30}
    assert {h.stats.messages for h in grid} == {12}
    sent = {h.stats.sent_bytes - HEADER_BYTES * h.stats.messages for h in ring + grid}
    assert sent == {2 * 1600 * 4 * 15 // 16}


@pytest.mark.parametrize("compress", ["never", "always"])
@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_the_bytes_of_an_all_reduce_are_the_formula(compress: str, size: int) -> None:
    """Computed from the inputs alone, block by block: which partial sums go round."""
    kind, n = BY_NAME["float32"], 1000
    inputs = [smooth(kind, n, "sparse", i) for i in range(size)]
    options = Options(compress=compress, chunk_bytes=0)
    _, hops = simulate(Collective.ALL_REDUCE, inputs, kind, options)
    length, total = -(-n // size), 0
    for block in range(size):
        at = slice(min(n, block * length), min(n, (block + 1) * length))
        count = at.stop - at.start
        for added in range(1, size):
            order = [inputs[(block + i) % size][at] for i in range(added)]
            partial = reference.reduce_in_order(kind, Op.SUM, order)
            total += message_bytes(kind, count, partial, compress)
        order = [inputs[(block + i) % size][at] for i in range(size)]
        final = reference.reduce_in_order(kind, Op.SUM, order)
        total += (size - 1) * message_bytes(kind, count, final, compress)
    assert sum(h.stats.sent_bytes for h in hops) == total
    dense = 2 * (size - 1) * (n * 4 + size * HEADER_BYTES)
    assert sum(h.stats.dense_bytes for h in hops) == dense


def message_bytes(kind: Kind, count: int, x: Array, compress: str) -> int:
    if compress == "never":
        return HEADER_BYTES + count * kind.width
    return HEADER_BYTES + zvc.packed_bytes(count, int(np.count_nonzero(x)), kind.width)


def test_both_orders_send_as_much_in_all() -> None:
    kind = BY_NAME["float64"]
    inputs = [smooth(kind, 960, "all", i) for i in range(8)]
    totals = []
    for order in ("ring", "rank"):
        options = Options(compress="never", order=order, chunk_bytes=0)
        _, hops = simulate(Collective.ALL_REDUCE, inputs, kind, options)
        totals.append(
            sum(h.stats.sent_bytes - HEADER_BYTES * h.stats.messages for h in hops)
        )
    assert totals == [2 * 7 * 960 * 8] * 2


def test_in_order_of_rank_a_split_tensor_has_the_bits_of_the_whole() -> None:
    """As users do who send layer by layer, or all at once. A ring's blocks move with the split."""
    kind = BY_NAME["float32"]
    inputs = [smooth(kind, 999, "all", i) * np.float32(0.37) for i in range(5)]

    def reduced(order: str, splits: list[int]) -> bytes:
        found = []
        for pieces in zip(*(np.split(x, splits) for x in inputs), strict=True):
            results, _ = simulate(
                Collective.ALL_REDUCE, list(pieces), kind, Options(order=order, chunk_bytes=512)
            )
            found.append(results[0])
        return np.concatenate(found).tobytes()

    assert reduced("rank", []) == reduced("rank", [1, 77, 500]) == reduced("rank", [333])
    assert reduced("ring", []) != reduced("ring", [1, 77, 500])


def test_any_schedule_gives_the_same_bits() -> None:
    kind = BY_NAME["float16"]
    inputs = [smooth(kind, 700, "half", i) for i in range(6)]
    options = Options(chunk_bytes=256)
    seen = {
        simulate(Collective.ALL_REDUCE, inputs, kind, options, seed)[0][3].tobytes()
        for seed in range(20)
    }
    assert len(seen) == 1


def test_what_does_not_fit_is_refused_at_once() -> None:
    x = np.zeros(4, np.float32)
    calls: list[Any] = [
        lambda: begin(Collective.BROADCAST, x, 0, 2, Options(), root=2),
        lambda: begin(Collective.ALL_REDUCE_2D, x, 0, 6, Options(), grid=(2, 2)),
        lambda: begin(Collective.REDUCE_SCATTER, x, 0, 2, Options(order="rank")),
        lambda: Options(compress="sometimes"),
        lambda: Options(order="any"),
        lambda: Options(deadline_s=0),
        lambda: Options().changed(chunk=3),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()
