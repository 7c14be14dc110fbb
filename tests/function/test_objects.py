"""Contexts, objects and device memory: handles, allocation, scrubbing, restart."""

from __future__ import annotations

import mmap
import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.abi.dtypes import DType
from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as s
from accelvisor.function.objects import (
    PROGRAM,
    TENSOR,
    Contexts,
    Memory,
    Object,
    Objects,
    Refused,
    check_shape,
)
from accelvisor.function.pauses import finish
from accelvisor.function.state import STATE_BYTES, TRACK_BYTES, State
from accelvisor.function.track import Track
from accelvisor.isolation.segments import Segment, SegmentTable
from accelvisor.limits import LIMITS, MIB
from tests.function.harness import memfd

BYTES = 2 * MIB
TABLE = SegmentTable((Segment(0, BYTES, 0, 0),), 1)


class Bench:
    """A table over one state and memory."""

    def __init__(self) -> None:
        self.state = State(memfd("state", STATE_BYTES))
        self.fd = memfd("memory", BYTES)
        self.map = mmap.mmap(self.fd, BYTES)
        self.track = Track(self.state, memfd("track", TRACK_BYTES), BYTES)
        self.again()

    def again(self) -> None:
        """What a replaced worker derives."""
        self.memory = Memory(self.map, TABLE, self.track)
        self.objects = Objects(self.state, self.memory)

    def tensor(self, nbytes: int, context: int = 0) -> Object:
        return self.objects.create(
            self.objects.next_slot(), context, TENSOR, nbytes, nbytes,
            dtype=DType.UINT8, shape=(nbytes,),
        )  # fmt: skip

    def content(self) -> bytes:
        return os.pread(self.fd, BYTES, 0)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def refused(call: object, status: CommandStatus) -> None:
    with pytest.raises(Refused) as caught:
        call()  # type: ignore[operator]
    assert caught.value.status is status


def test_a_handle_is_one_contexts_alone(bench: Bench) -> None:
    made = bench.tensor(100, context=3)
    assert bench.objects.get(made.handle, 3, TENSOR) == made
    wrong = ((made.handle, 4), (made.handle + 1, 3), (made.handle & 0xFFFF, 3), (0, 3))
    for handle, context in wrong:
        with pytest.raises(Refused, match="names no object"):
            bench.objects.get(handle, context, TENSOR)
    refused(lambda: bench.objects.get(made.handle, 3, PROGRAM), CommandStatus.BAD_HANDLE)


def test_a_stale_handle_never_names_the_next_object(bench: Bench) -> None:
    old = bench.tensor(100)
    finish(bench.objects.destroy(old.slot))
    new = bench.tensor(100)
    assert (new.slot, new.address) == (old.slot, old.address)
    assert new.handle != old.handle
    refused(lambda: bench.objects.get(old.handle, 0, TENSOR), CommandStatus.BAD_HANDLE)


def test_released_memory_is_zero(bench: Bench) -> None:
    """Case P11: no byte of a former owner is readable."""
    small, large = bench.tensor(5000), bench.tensor(MIB)
    for one in (small, large):
        bench.memory.view[one.address : one.address + one.nbytes] = b"\xaa" * one.nbytes
    finish(bench.objects.destroy(small.slot))
    finish(bench.objects.destroy(large.slot))
    assert not any(bench.content())
    assert bench.memory.used == 0


def test_a_full_memory_is_refused_and_changes_nothing(bench: Bench) -> None:
    bench.tensor(BYTES - 4096)
    before = bench.state.digest()
    refused(lambda: bench.tensor(4097), CommandStatus.OUT_OF_MEMORY)
    assert bench.state.digest() == before
    assert bench.tensor(4096).address == BYTES - 4096


def test_first_fit_reuses_the_lowest_gap(bench: Bench) -> None:
    made = [bench.tensor(8192) for _ in range(4)]
    finish(bench.objects.destroy(made[1].slot))
    assert bench.tensor(12288).address == made[3].address + 8192
    assert bench.tensor(4096).address == made[1].address


def test_empty_tensors_occupy_nothing(bench: Bench) -> None:
    empty = [bench.tensor(0) for _ in range(5)]
    assert bench.memory.used == 0
    for one in empty:
        finish(bench.objects.destroy(one.slot))
    assert len(bench.objects) == 0


def test_a_half_made_object_leaves_nothing_behind(bench: Bench) -> None:
    made = bench.objects.create(
        0, 0, PROGRAM, 6, 8192, digest=b"d" * 32, content=b"secret"
    )
    bench.state.u32[s.object_at(made.slot) // 4] = 0  # as if the worker died just before this store
    assert any(bench.content())
    bench.again()
    assert bench.objects.at(0) is None
    assert not any(bench.content())
    assert not any(bench.state.u8[s.object_at(0) : s.object_at(0) + s.OBJECT_BYTES])


def test_reset_scrubs_everything_and_moves_generations(bench: Bench) -> None:
    old = bench.tensor(100)
    bench.memory.view[:100] = b"x" * 100
    bench.objects.destroy_all()
    assert not any(bench.content())
    assert bench.tensor(100).handle != old.handle


def test_the_table_has_a_limit(bench: Bench) -> None:
    for _ in range(s.OBJECTS):
        bench.tensor(0)
    refused(lambda: bench.tensor(0), CommandStatus.TOO_MANY_OBJECTS)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300_000)), max_size=40))
def test_extents_never_overlap_and_a_new_worker_agrees(steps: list[tuple[bool, int]]) -> None:
    bench = Bench()
    live: list[Object] = []
    for creating, number in steps:
        if creating or not live:
            try:
                made = bench.tensor(number)
            except Refused:
                continue
            bench.memory.view[made.address : made.address + made.nbytes] = b"\x55" * made.nbytes
            live.append(made)
        else:
            finish(bench.objects.destroy(live.pop(number % len(live)).slot))
        spans = sorted((o.address, o.address + o.extent) for o in live if o.extent)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(a[1] <= BYTES and a[0] % 4096 == 0 for a in spans)
    owned = sum(o.nbytes for o in live)
    assert bench.content().count(b"\x55") == owned
    next_slot, used = bench.objects.next_slot(), bench.memory.used
    bench.again()
    assert bench.objects.of(0) == sorted(live, key=lambda o: o.slot)
    assert (bench.objects.next_slot(), bench.memory.used) == (next_slot, used)


@pytest.mark.parametrize(
    ("dtype", "rank", "dims", "status"),
    [
        (0, 1, (1,), CommandStatus.BAD_DESCRIPTOR),
        (99, 1, (1,), CommandStatus.BAD_DESCRIPTOR),
        (1, 9, (1,) * 8, CommandStatus.BAD_DESCRIPTOR),
        (1, 1, (1, 2), CommandStatus.BAD_DESCRIPTOR),
        (1, 8, (0xFFFFFFFF,) * 8, CommandStatus.LIMIT),
        (2, 2, (0xFFFFFFFF, 0xFFFFFFFF), CommandStatus.LIMIT),
    ],
)
def test_impossible_tensors_are_refused(
    dtype: int, rank: int, dims: tuple[int, ...], status: CommandStatus
) -> None:
    refused(lambda: check_shape(dtype, rank, dims + (0,) * (8 - len(dims))), status)


def test_scalars_and_empty_shapes_are_fine() -> None:
    assert check_shape(1, 0, (0,) * 8) == (DType.FLOAT32, (), 4)
    assert check_shape(1, 2, (0, 5, 0, 0, 0, 0, 0, 0)) == (DType.FLOAT32, (0, 5), 0)


def test_contexts_remember_who_and_what_went_wrong(bench: Bench) -> None:
    contexts = Contexts(bench.state)
    assert contexts.free() == 0
    contexts.open(0, 2, 4711, "prüfung".encode())
    assert contexts.free() == 1
    assert contexts.identity(0) == (4711, "prüfung")
    contexts.note(0, 0x100, 77, "x" * 5000)
    assert contexts.trouble(0) == (0x100, 77, "x" * s.X_TEXT_BYTES)
    contexts.close(0)
    at = s.context_at(0)
    assert not any(bench.state.u8[at : at + s.CONTEXT_BYTES])


def test_a_name_that_is_no_utf8_is_shown_all_the_same(bench: Bench) -> None:
    contexts = Contexts(bench.state)
    contexts.open(0, 0, 1, b"\xff\xfe" + b"a" * 46)
    assert contexts.identity(0)[1].endswith("a" * 46)


def test_context_numbers_run_out(bench: Bench) -> None:
    contexts = Contexts(bench.state)
    for number in range(LIMITS.contexts):
        contexts.open(number, number % 4, 1, b"")
    refused(contexts.free, CommandStatus.TOO_MANY_CONTEXTS)
