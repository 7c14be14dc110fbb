"""Collectives in graphs, and data-parallel training: bit for bit against plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from accelvisor.abi.graphs import QueueType
from accelvisor.errors import UsageError
from accelvisor.guest import nn
from accelvisor.guest.errors import CommandRefused, DeviceFault
from accelvisor.guest.function import Function
from accelvisor.guest.graphs import collectives
from accelvisor.guest.parallel import DataParallel, train_parallel

from .graph_device import GraphDevice

C, T = QueueType.COMPUTE, QueueType.TRANSFER
NETWORK = nn.Sequential((6, 9, 5, 3))


def opened(open_function: Callable[..., Function], **changes: object) -> Function:
    fields = {"real_kernels": True, "window_bytes": 1 << 20, "entries": 64, "chips": 8, **changes}
    return open_function(GraphDevice(**fields))  # type: ignore[arg-type]


@pytest.fixture
def fn(open_function: Callable[..., Function]) -> Function:
    return opened(open_function)


# --- all-reduce ----------------------------------------------------------------------------------


def parts(n: int, size: int, zeros: float = 0.0, seed: int = 0) -> list[np.ndarray]:
    random = np.random.RandomState(seed)
    found = []
    for _ in range(n):
        values = (random.standard_normal(size) * 10.0 ** random.randint(-6, 6, size))
        values[random.rand(size) < zeros] = 0
        found.append(values.astype(np.float32))
    return found


def in_rank_order(values: Sequence[np.ndarray]) -> np.ndarray:
    total = values[0].copy()
    for v in values[1:]:
        total = total + v
    return total


def in_ring_order(values: Sequence[np.ndarray]) -> np.ndarray:
    """Block b begins with rank b's values and goes on along the ring."""
    n = len(values)
    total = np.empty_like(values[0])
    for b, (low, high) in enumerate(collectives.blocks(values[0].size, n)):
        total[low:high] = in_rank_order([values[(b + s) % n][low:high] for s in range(n)])
    return total


def reduced(fn: Function, values: Sequence[np.ndarray], **options: object) -> list[np.ndarray]:
    tensors = [fn.tensor(v) for v in values]
    with fn.graph() as g:
        g.all_reduce(tensors, **options)  # type: ignore[arg-type]
    g()
    g.close()
    return [t.numpy() for t in tensors]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("size", [1, 3, 130, 1000])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_all_ranks_end_with_the_bits_of_the_sum_in_their_order(
    fn: Function, n: int, size: int, compress: bool
) -> None:
    values = parts(n, size, zeros=0.6 * compress)
    wanted = in_rank_order(values).tobytes()
    for chunks in (1, 3, 8):
        found = reduced(fn, values, chunks=chunks, compress=compress)
        assert {f.tobytes() for f in found} == {wanted}
    wanted = in_ring_order(values).tobytes()
    found = reduced(fn, values, order="ring", compress=compress)
    assert {f.tobytes() for f in found} == {wanted}


def in_grid_order(values: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Each block along its row's ring, then each piece of it along its column's."""
    rows = [values[at : at + columns] for at in range(0, len(values), columns)]
    total = np.empty_like(values[0])
    for b, (low, high) in enumerate(collectives.blocks(values[0].size, columns)):
        column = [
            in_rank_order([row[(b + s) % columns][low:high] for s in range(columns)])
            for row in rows
        ]
        for j, (first, last) in enumerate(collectives.blocks(high - low, len(rows))):
            order = [(j + s) % len(rows) for s in range(len(rows))]
            total[low + first : low + last] = in_rank_order(
                [column[r][first:last] for r in order]
            )
    return total


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("n", "columns"), [(4, 2), (6, 3), (8, 4), (8, 8), (8, 1)])
@pytest.mark.parametrize("size", [2, 131])
def test_a_grid_reduces_rows_and_columns(
    fn: Function, n: int, columns: int, size: int, compress: bool
) -> None:
    values = parts(n, size, zeros=0.6 * compress)
    found = reduced(fn, values, order="grid", columns=columns, compress=compress)
    assert {f.tobytes() for f in found} == {in_grid_order(values, columns).tobytes()}


@pytest.mark.parametrize("compress", [False, True])
def test_one_rank_can_have_the_sum_and_one_be_copied(fn: Function, compress: bool) -> None:
    values = parts(4, 77, zeros=0.6 * compress)
    tensors = [fn.tensor(v) for v in values]
    with fn.graph() as g:
        collectives.reduce(g, tensors, chunks=3, compress=compress)
    g()
    assert tensors[3].numpy().tobytes() == in_rank_order(values).tobytes()
    for tensor, value in zip(tensors[:3], values[:3], strict=True):
        assert tensor.numpy().tobytes() == value.tobytes()
    with fn.graph() as g:
        collectives.broadcast(g, tensors[::-1], chunks=2, compress=compress, chips=[3, 2, 1, 0])
    g()
    assert {t.numpy().tobytes() for t in tensors} == {in_rank_order(values).tobytes()}


@pytest.mark.parametrize("op", ["min", "max", "absmax"])
def test_other_operators(fn: Function, op: str) -> None:
    values = parts(4, 50)
    pair = {"min": np.minimum, "max": np.maximum, "absmax": None}[op]
    stack = np.stack(values)
    wanted = np.abs(stack).max(axis=0) if pair is None else pair.reduce(stack, axis=0)
    for order in collectives.ORDERS:
        for found in reduced(fn, values, op=op, order=order, columns=2):
            assert np.array_equal(found, wanted)


def test_the_shape_stays_and_other_chips_can_be_named(
    fn: Function, open_function: Callable[..., Function]
) -> None:
    values = [v.reshape(5, 2) for v in parts(3, 10)]
    tensors = [fn.tensor(v) for v in values]
    with fn.graph() as g:
        nodes = g.all_reduce(tensors, chips=[5, 1, 3], chunks=1)
    assert {n.chip for n in nodes} == {5, 1, 3}
    g()
    assert np.array_equal(tensors[2].numpy(), in_rank_order(values))


def test_one_rank_or_no_elements_need_no_nodes(fn: Function) -> None:
    g = fn.graph()
    assert g.all_reduce([fn.ones(4)]) == ()
    assert g.all_reduce([fn.empty(0), fn.empty(0)]) == ()


def test_ranks_that_differ_are_named(fn: Function) -> None:
    g = fn.graph()
    cases = [
        ([fn.ones(4), fn.ones(4), fn.ones(5)], None, "rank 2"),
        ([fn.ones(4), fn.zeros(4, "float64")], None, "rank 1"),
        ([fn.ones(4), fn.ones(4)], [0], "chips"),
        ([fn.ones(4), fn.ones(4)], [1, 1], "chips"),
        ([], None, "0 tensors"),
    ]
    for tensors, chips, text in cases:
        with pytest.raises(UsageError, match=text) as caught:
            g.all_reduce(tensors, chips=chips)
        assert caught.value.code == "collective-mismatch"
    for wrong in ({"op": "mean"}, {"order": "tree"}, {"chunks": 0}):
        with pytest.raises(UsageError):
            g.all_reduce([fn.ones(4), fn.ones(4)], **wrong)  # type: ignore[arg-type]


def test_all_of_it_runs_on_transfer_queues_and_chunks_follow_each_other(fn: Function) -> None:
    spans = {}
    for chunks in (1, 8):
        tensors = [fn.zeros(1 << 16) for _ in range(4)]
        g = fn.graph()
        g.all_reduce(tensors, chunks=chunks)
        assert {n.profile.type for n in g.nodes} == {T}
        spans[chunks] = max(s.end_ns for s in g.timeline())
        g.close()
    assert spans[8] * 2 < spans[1]


def test_a_hand_written_graph_orders_a_collective_by_itself(fn: Function) -> None:
    values = parts(4, 40)
    tensors = [fn.tensor(v) for v in values]
    with fn.program("double") as p:
        x = p.parameter((40,))
        p.call("add", x, x, out=x)
    with fn.graph(automatic=False) as g:
        doubled = [g.node(p, t, chip=c) for c, t in enumerate(tensors)]
        nodes = g.all_reduce(tensors, after=doubled)
        for c, t in enumerate(tensors):
            g.run(p, t, chip=c, after=nodes)
    g()
    wanted = 2 * in_rank_order([2 * v for v in values])
    assert all(np.array_equal(t.numpy(), wanted) for t in tensors)


def test_a_copy_goes_over_the_link_on_the_sources_transfer_queue(fn: Function) -> None:
    x = fn.tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    with fn.graph() as g:
        y = g.copy(x, source=1, target=2)
    assert (g.nodes[0].chip, g.nodes[0].profile.type) == (1, T)
    g()
    assert np.array_equal(y.numpy(), x.numpy())


def test_a_link_that_is_down_is_a_refusal_that_changes_nothing(
    open_function: Callable[..., Function],
) -> None:
    fn = opened(open_function, down={(1, 2)})
    values = parts(4, 40)
    tensors = [fn.tensor(v) for v in values]
    with fn.graph() as g:
        g.all_reduce(tensors)
    with pytest.raises(CommandRefused) as caught:
        g()
    assert caught.value.code == "device-link-down"
    assert all(np.array_equal(t.numpy(), v) for t, v in zip(tensors, values, strict=True))


# --- training ------------------------------------------------------------------------------------


def problem(samples: int = 40) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(1)
    labels = random.randint(0, 3, samples)
    x = np.zeros((samples, 6), np.float32)
    x[np.arange(samples), labels] = 1
    return x + 0.1 * random.standard_normal(x.shape).astype(np.float32), labels


def softmax_gradient(z: np.ndarray, labels: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
    """(mean loss, scale * d sum of losses / d z), float32 step by step."""
    top = z.max(axis=1, keepdims=True)
    e = np.exp(z - top)
    total = e.sum(axis=1, keepdims=True)
    here = np.arange(len(z))
    losses = np.log(total[:, 0]) - (z[here, labels] - top[:, 0])
    e /= total
    e[here, labels] -= np.float32(1)
    return losses, e * np.float32(scale)


def plain(
    x: np.ndarray, labels: np.ndarray, *, chips: int, epochs: int, batch: int, rate: float,
    decay: float, seed: int,
) -> list[np.ndarray]:  # fmt: skip
    """The same training in plain numpy: gradients of each chip's part, summed in order of chips."""
    w = NETWORK.initial(seed)
    share = batch // chips
    rate32, decay32 = np.float32(rate), np.float32(decay)
    for epoch in range(epochs):
        for rows in nn.order(len(x), batch, epoch, seed):
            sums: list[np.ndarray] = []
            for c in range(chips):
                mine = rows[c * share : (c + 1) * share]
                layers = [x[mine]]
                for i in range(3):
                    h = layers[-1] @ w[2 * i] + w[2 * i + 1]
                    layers.append(np.maximum(h, np.float32(0)) if i < 2 else h)
                _, g = softmax_gradient(layers[-1], labels[mine], 1.0 / batch)
                found: list[np.ndarray] = []
                for i in (2, 1, 0):
                    found = [layers[i].T @ g, np.add.reduce(g, axis=0), *found]
                    g = np.where(layers[i] > 0, g @ w[2 * i].T, np.float32(0))
                sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
            for i, total in enumerate(sums):
                step = (w[i] * decay32 if i % 2 == 0 else w[i] * np.float32(0)) + total
                w[i] = w[i] - step * rate32
    return w


@pytest.mark.parametrize("chips", [1, 2, 4, 8])
def test_training_has_the_bits_of_plain_numpy(fn: Function, chips: int) -> None:
    x, labels = problem()
    options = {"chips": chips, "epochs": 2, "batch": 16, "rate": 0.3, "decay": 0.01, "seed": 3}
    found = train_parallel(fn, NETWORK, x, labels, **options)  # type: ignore[arg-type]
    wanted = plain(x, labels, **options)  # type: ignore[arg-type]
    for mine, theirs in zip(found.parameters, wanted, strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert found.steps == 2 * 2


def test_bits_depend_on_neither_chunks_nor_compression_nor_who_is_faster(
    open_function: Callable[..., Function],
) -> None:
    x, labels = problem()
    seen = set()
    cases = [(1, False), (2, False), (7, False), (1, True), (5, True)]
    for seed, (chunks, compress) in enumerate(cases):
        fn = opened(open_function, seed=seed)
        done = train_parallel(
            fn, NETWORK, x, labels, chips=4, epochs=1, batch=8, chunks=chunks, compress=compress
        )
        seen.add((b"".join(w.tobytes() for w in done.parameters), done.losses[0]))
    assert len(seen) == 1


def test_a_run_that_was_interrupted_ends_with_the_same_bits(fn: Function) -> None:
    x, labels = problem()
    whole = train_parallel(fn, NETWORK, x, labels, chips=2, epochs=3, batch=8, seed=5)
    first = train_parallel(fn, NETWORK, x, labels, chips=2, epochs=1, batch=8, seed=5)
    seen: list[tuple[int, float]] = []
    rest = train_parallel(
        fn, NETWORK, x, labels, chips=2, epochs=2, batch=8, seed=5, parameters=first.parameters,
        first_epoch=1, progress=lambda epoch, loss: seen.append((epoch, loss)),
    )  # fmt: skip
    for a, b in zip(whole.parameters, rest.parameters, strict=True):
        assert a.tobytes() == b.tobytes()
    assert whole.losses == first.losses + rest.losses
    assert seen == [(2, rest.losses[0]), (3, rest.losses[1])]


def test_all_chips_have_the_same_parameters_and_it_learns(fn: Function) -> None:
    x, labels = problem(64)
    with DataParallel(fn, NETWORK, x, labels, NETWORK.initial(2), batch=16, rate=0.5) as job:
        losses = [job.epoch(nn.order(64, 16, epoch, 0))[0] for epoch in range(12)]
        for chip in job.chips:
            for mine, first in zip(job.parameters(chip), job.parameters(0), strict=True):
                assert mine.tobytes() == first.tobytes()
        assert losses[-1] < 0.3 * losses[0]
        (found,) = {nn.classify(fn, NETWORK, job.parameters(), x).tobytes()}
        assert (np.frombuffer(found, np.int64) == labels).mean() > 0.9


def test_the_exchange_of_a_layer_overlaps_the_layer_before(fn: Function) -> None:
    net = nn.Sequential((64, 256, 256, 256, 10))
    x, labels = np.zeros((512, 64), np.float32), np.zeros(512, np.int64)
    with DataParallel(fn, net, x, labels, net.initial(0), batch=512) as job:
        plan = job.graph.plan
        assert plan is not None
        spans = job.graph.timeline()
        assert {s.queue for s in spans} == {"compute", "transfer"}
        moved = [s for s in spans if s.queue == "transfer"]
        first = min(s.start_ns for s in moved)
        last = max(s.end_ns for s in spans if s.label == "backward 0")
        assert sum(s.start_ns < last for s in moved) > len(moved) / 4
        assert first < last
        assert plan.waits < plan.dependencies


def test_training_leaves_nothing_on_the_device(fn: Function) -> None:
    x, labels = problem()
    train_parallel(fn, NETWORK, x, labels, chips=2, epochs=1, batch=8)
    assert fn.transport.tensors == {}  # type: ignore[attr-defined]
    assert fn.transport.graphs == {}  # type: ignore[attr-defined]


def test_a_wrong_label_is_the_devices_typed_fault(fn: Function) -> None:
    x, labels = problem()
    with pytest.raises(DeviceFault) as caught:
        train_parallel(fn, NETWORK, x, labels + 3, chips=2, epochs=1, batch=8)
    assert caught.value.code == "device-numeric"


@pytest.mark.parametrize(
    "options",
    [{"chips": 3}, {"chips": 16}, {"chips": 0}, {"batch": 64}, {"batch": 0}, {"reduction": "star"}],
)
def test_what_cannot_be_split_is_refused(fn: Function, options: dict[str, object]) -> None:
    x, labels = problem()
    given = {"chips": 4, "batch": 16, **options}
    with pytest.raises(UsageError):
        train_parallel(fn, NETWORK, x, labels, epochs=1, **given)  # type: ignore[arg-type]
    assert fn.transport.tensors == {}  # type: ignore[attr-defined]


def test_rows_of_another_size_are_refused(fn: Function) -> None:
    x, labels = problem()
    with (
        DataParallel(fn, NETWORK, x, labels, NETWORK.initial(0), chips=2, batch=8) as job,
        pytest.raises(UsageError),
    ):
        job.epoch(np.zeros((2, 8), np.int64))
