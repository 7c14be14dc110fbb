"""Long work of one queue comes in steps: other queues, freezes and registers go in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot, encode
from accelvisor.abi.registers import NEED_WAKEUP, QueueControl, QueueReg, QueueStatus, Reg, Status
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import DeadlineError
from accelvisor.function import codes
from accelvisor.function import launch as launching
from accelvisor.function import state as s
from accelvisor.function.cache import Cache
from accelvisor.function.launch import Launch, Launcher, Progress, Step
from accelvisor.function.objects import Memory
from accelvisor.function.pauses import Pauses
from accelvisor.isolation.segments import SegmentTable
from accelvisor.limits import KIB, MIB
from accelvisor.vfio_user.messages import DMA_ACCESS
from accelvisor.vfio_user.protocol import TYPE_REPLY, Command
from accelvisor.vfio_user.wire import HEADER, Message
from tests.function.harness import Local, Ring, operation, wait_for
from tests.function.test_dma import PAGE, Bench

F32 = DType.FLOAT32
REMOTE = 0x2_0000_0000
CHUNK = 64 * KIB

TABLE = SegmentTable((), 1)


class Client:
    """A client that answers DMA when it is told to."""

    def __init__(self, local: Local) -> None:
        self.asked: list[Message] = []
        self.remote = local.device.remote
        local.map(REMOTE, 4 * MIB, None)
        self.remote.attach(lambda raw: self.asked.append(Message(bytes(raw))))

    def answer(self, number: int) -> None:
        """Reply to the request of that number as a client does."""
        wait_for(lambda: len(self.asked) > number, "a DMA request")
        request = self.asked[number]
        address, count = DMA_ACCESS.unpack_from(request.body)
        body = DMA_ACCESS.pack(address, count)
        if request.command == Command.DMA_READ:
            body += bytes([number + 1]) * count
        size = HEADER.size + len(body)
        raw = HEADER.pack(request.id, request.command, size, TYPE_REPLY, 0) + body
        self.remote.deliver(Message(raw))


def far(length: int, at: int = 0) -> abi.Memory:
    return abi.Memory(abi.Space.GUEST, 0, REMOTE + at, length, 0)


def begin_copy(ring: Ring, length: int) -> None:
    """Submit a copy into a new tensor that the client is asked for."""
    tensor = ring.ok(abi.tensor_create, DType.UINT8, (length,))
    ring.post(abi.copy_in(ring.next_cookie(), tensor, 0, far(length)))
    ring.submit()


def two(local: Local) -> tuple[Ring, Ring]:
    rings = local.ring(0), local.ring(1)
    for ring in rings:
        ring.open()
    return rings


# --- DMA by message -------------------------------------------------------------------------------


def test_a_client_that_owes_an_answer_keeps_only_that_queue_waiting(local: Local) -> None:
    slow, other = two(local)
    client = Client(local)
    tensor = slow.ok(abi.tensor_create, DType.UINT8, (100,))
    slow.post(abi.copy_in(slow.next_cookie(), tensor, 0, far(100)))
    slow.submit()
    wait_for(lambda: client.asked, "the request")
    for _ in range(20):
        assert other.do(abi.nop).status == 0
    assert not slow.ready()
    client.answer(0)
    local.wait(slow.ready)
    assert slow.take().status == 0
    assert bytes(local.device.memory.view[:100]) == b"\1" * 100


def test_two_queues_wait_for_the_client_side_by_side(local: Local) -> None:
    rings = two(local)
    client = Client(local)
    for ring in rings:
        begin_copy(ring, 10)
    wait_for(lambda: len(client.asked) == 2, "both requests")
    for number in (1, 0):
        client.answer(number)
    for ring in rings:
        local.wait(ring.ready)
        assert ring.take().status == 0


def test_a_copy_by_messages_remembers_every_answer(local: Local) -> None:
    ring, _ = two(local)
    client = Client(local)
    begin_copy(ring, 4 * CHUNK)
    done = (s.cursor_word(0) + s.C_POSITION64) // 2
    for n in range(3):
        client.answer(n)
        wait_for(lambda n=n: local.state.u64[done] == (n + 1) * CHUNK, "the position")
    client.answer(3)
    local.wait(ring.ready)
    assert ring.take().status == 0


def test_a_freeze_does_not_throw_away_what_the_client_was_asked(local: Local) -> None:
    ring, _ = two(local)
    client = Client(local)
    begin_copy(ring, 10)
    wait_for(lambda: client.asked, "the request")
    local.device.engine.freeze(s.FREEZE_CONTROL, 10)
    client.answer(0)
    local.device.engine.thaw(s.FREEZE_CONTROL)
    local.wait(ring.ready)
    assert ring.take().status == 0
    assert len(client.asked) == 1


def test_a_worker_that_has_no_client_yet_waits_for_it(local: Local) -> None:
    ring, other = two(local)
    local.map(REMOTE, MIB, None)
    begin_copy(ring, 10)
    wait_for(lambda: local.state.u32[s.cursor_word(0) + s.C_PHASE], "the command to begin")
    assert other.do(abi.nop).status == 0
    assert not ring.ready()
    local.device.dma_unmap(REMOTE, MIB, 0)
    Client(local).answer(0)
    local.wait(ring.ready)
    assert ring.take().status == 0


def test_a_client_that_leaves_answers_no_more(local: Local) -> None:
    ring, _ = two(local)
    client = Client(local)
    begin_copy(ring, 10)
    wait_for(lambda: client.asked, "the request")
    client.remote.attach(None)
    local.wait(ring.ready)
    assert ring.take().status == CommandStatus.BAD_ADDRESS


def test_a_queue_is_not_disabled_while_its_write_is_on_its_way(local: Local) -> None:
    ring, other = two(local)
    client = Client(local)
    tensor = ring.ok(abi.tensor_create, DType.UINT8, (10,))
    ring.post(abi.copy_out(ring.next_cookie(), tensor, 0, far(10)))
    ring.submit()
    wait_for(lambda: client.asked, "the request")
    local.write32(Reg.QUEUE + QueueReg.CONTROL, QueueControl.DISABLE)
    assert other.do(abi.nop).status == 0
    other.set(QueueControl.DISABLE, QueueStatus.DISABLED)
    assert ring.register(QueueReg.STATUS) == QueueStatus.ENABLED
    client.answer(0)
    wait_for(lambda: ring.register(QueueReg.STATUS) == QueueStatus.DISABLED, "the disable")


# --- lists ----------------------------------------------------------------------------------------


def test_a_list_of_tiny_segments_lets_another_queue_in_between(local: Local) -> None:
    slow, other = two(local)
    count = 60_000
    tensor = slow.ok(abi.tensor_create, DType.UINT8, (count,))
    data = local.buffer(bytes(PAGE))
    listed = local.buffer(abi.SEGMENT.pack(data.address, 1) * count)
    source = abi.Memory(abi.Space.GUEST, abi.Transfer.SCATTER, listed.address, count, count)
    slow.post(abi.copy_in(slow.next_cookie(), tensor, 0, source))
    slow.submit()
    wait_for(lambda: local.state.u32[s.cursor_word(0) + s.C_PHASE], "the copy to begin")
    assert other.do(abi.nop).status == 0
    assert not slow.ready()
    wait_for(
        lambda: local.state.u64[(s.cursor_word(0) + s.C_POSITION64) // 2] or slow.ready(),
        "a position",
    )
    local.wait(slow.ready)
    assert slow.take().status == 0


def test_a_span_over_many_maps_is_checked_in_portions_without_the_lock() -> None:
    bench = Bench()
    bench.file(0, PAGE)
    for n in range(3000):
        bench.maps.map(n * PAGE, PAGE, 3, 0, 0)
    pauses = 0
    for _ in bench.dma.check([(0, 3000 * PAGE)] * 2, True):
        assert not bench.dma._lock.locked()
        pauses += 1
    assert pauses == 6000 // 512


# --- memory ---------------------------------------------------------------------------------------


class Gate:
    """A scrub that does not end until it is let go: in pauses, or within one step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stuck: bool) -> None:
        self.inside, self.open = threading.Event(), threading.Event()
        scrub = Memory.scrub

        def gated(memory: Memory, address: int, extent: int) -> Pauses[None]:
            self.inside.set()
            while not self.open.is_set():
                if stuck:
                    self.open.wait(30)
                else:
                    yield None
            yield from scrub(memory, address, extent)

        monkeypatch.setattr(Memory, "scrub", gated)


def closing(ring: Ring) -> None:
    """Ask for a queue with a tensor to be disabled."""
    ring.ok(abi.tensor_create, F32, (1024,))
    local = ring.guest
    local.write32(Reg.QUEUE + 0x40 * ring.index + QueueReg.CONTROL, QueueControl.DISABLE)


def test_closing_a_large_context_keeps_nobody_waiting(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = two(local)
    gate = Gate(monkeypatch, stuck=False)
    closing(slow)
    assert gate.inside.wait(30)
    assert other.do(abi.nop).status == 0
    third = local.ring(2)
    third.open()
    assert third.do(abi.nop).status == 0
    local.device.engine.freeze(s.FREEZE_MIGRATION, 10)
    local.device.engine.thaw(s.FREEZE_MIGRATION)
    assert slow.register(QueueReg.STATUS) == QueueStatus.ENABLED
    gate.open.set()
    wait_for(lambda: slow.register(QueueReg.STATUS) == QueueStatus.DISABLED, "the disable")
    assert local.device.memory.used == 0


def test_a_reset_ends_a_queue_that_is_being_closed(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, _ = two(local)
    gate = Gate(monkeypatch, stuck=False)
    closing(slow)
    assert gate.inside.wait(30)
    monkeypatch.undo()
    local.write32(Reg.CONTROL, 1)
    assert slow.register(QueueReg.STATUS) == QueueStatus.DISABLED
    again = local.ring()
    again.open()
    assert again.do(abi.nop).status == 0


def test_a_reset_that_takes_long_does_not_kill_the_worker_of_a_new_client(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, _ = two(local)
    ring.ok(abi.tensor_create, F32, (1024,))
    gate = Gate(monkeypatch, stuck=True)
    request = local.device.engine.request_reset
    monkeypatch.setattr(local.device.engine, "request_reset", lambda _: request(0.05))
    local.device.connected()
    assert gate.inside.is_set()
    assert not local.read32(Reg.STATUS) & Status.READY
    gate.open.set()
    wait_for(lambda: local.read32(Reg.STATUS) & Status.READY, "the reset to end")
    assert local.device.memory.used == 0


@pytest.mark.parametrize("build", [abi.tensor_destroy, abi.context_close])
def test_destroying_much_memory_keeps_nobody_waiting(
    local: Local, monkeypatch: pytest.MonkeyPatch, build: Callable[..., bytes]
) -> None:
    slow, other = two(local)
    tensor = slow.ok(abi.tensor_create, F32, (1024,))
    gate = Gate(monkeypatch, stuck=False)
    arguments = (tensor,) if build is abi.tensor_destroy else ()
    slow.post(build(slow.next_cookie(), *arguments))
    slow.submit()
    assert gate.inside.wait(30)
    assert other.do(abi.nop).status == 0
    assert not slow.ready()
    gate.open.set()
    local.wait(slow.ready)
    assert slow.take().status == 0
    assert local.device.memory.used == 0


def test_a_freeze_after_a_thaw_waits_for_the_engine_anew(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = local.device.engine
    ring, _ = two(local)
    ring.ok(abi.tensor_create, F32, (1024,))
    gate = Gate(monkeypatch, stuck=True)
    engine.freeze(s.FREEZE_CONTROL, 10)
    local.write32(Reg.QUEUE + QueueReg.CONTROL, QueueControl.DISABLE)
    assert gate.inside.wait(30)  # parked as it was, and at work all the same
    engine.thaw(s.FREEZE_CONTROL)
    with pytest.raises(DeadlineError):
        engine.freeze(s.FREEZE_CONTROL, 0.05)
    gate.open.set()
    engine.freeze(s.FREEZE_CONTROL, 10)
    engine.thaw(s.FREEZE_CONTROL)


def test_a_scrub_gives_pages_back_a_few_at_a_time(local: Local) -> None:
    memory = local.device.memory
    memory.view[: 8 * MIB] = b"\1" * (8 * MIB)
    assert sum(1 for _ in memory.scrub(0, 8 * MIB)) == 4
    assert not any(memory.view[: 8 * MIB : PAGE])


# --- launches -------------------------------------------------------------------------------------


def test_a_snapshot_is_taken_in_steps() -> None:
    source = np.arange(5 * MIB, dtype=np.float32).reshape(5, MIB)
    target = np.zeros_like(source)
    assert sum(1 for _ in launching._snapshot(target, source, lambda: True)) == 5
    assert np.array_equal(target, source)


class Recorder(dict[int, int]):
    """Words that remember what was stored, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[int] = []

    def __missing__(self, key: int) -> int:
        return 0

    def __setitem__(self, key: int, value: int) -> None:
        super().__setitem__(key, value)
        self.stored.append(value)


def test_the_longest_program_stores_no_turn_twice() -> None:
    """4096 operations: one more than the position's field for operations can say."""
    words = Recorder()
    state: Any = SimpleNamespace(u64=words, count=lambda *_: None)
    nothing: Any = None
    idle: Any = Step(SimpleNamespace(tiles=0, link=None), [], ())  # type: ignore[arg-type]
    pool: Any = SimpleNamespace(cores=1)
    steps = [idle] * 4096
    memory: Any = SimpleNamespace(table=TABLE)
    launcher = Launcher(state, memory, nothing, nothing)
    launch = Launch(nothing, steps, 0, TABLE)
    for _ in launcher.run(launch, {}, Progress(0, 1), 4, lambda: False, pool):
        raise AssertionError("nothing asked for a pause")
    assert words.stored == sorted(words.stored)
    assert len(set(words.stored)) == len(words.stored) == 4 * 4096
    assert words.stored[-1] == 4 << 32


@pytest.mark.parametrize(("tile_s", "alone"), [(0.0, [0, 1, 2, 3]), (0.005, [])])
def test_an_operation_of_few_long_tiles_uses_every_core_from_the_first(
    tile_s: float, alone: list[int]
) -> None:
    """Trying one tile alone each time would cost four tiles on two cores half as much again."""
    ran: list[int] = []
    shared: list[int] = []

    def together(_: Any, arrays: Any, first: int, progress: Any, stop: Any) -> int:
        shared.append(first)
        progress(4)
        return 4

    state: Any = SimpleNamespace(u64=Recorder(), count=lambda *_: None)
    pool: Any = SimpleNamespace(cores=2, run=together)
    work: Any = SimpleNamespace(tiles=4, link=None, run_tile=lambda _, tile: ran.append(tile))
    nothing: Any = None
    memory: Any = SimpleNamespace(table=TABLE)
    step = Step(work, [], (), tile_s=tile_s)
    for _ in Launcher(state, memory, nothing, nothing).run(
        Launch(nothing, [step], 0, TABLE), {}, Progress(0, 1), 1, lambda: False, pool
    ):
        raise AssertionError("nothing asked for a pause")
    assert ran == alone
    assert shared == ([] if alone else [0])
    assert state.u64.stored[-1] == 1 << 32


@pytest.fixture
def held_build(local: Local) -> Iterator[threading.Event]:
    """Validating a program takes until this is set."""
    go = threading.Event()
    programs = local.device.commands._codes
    build = programs._build

    def slow(raw: bytes) -> codes.Code:
        go.wait(30)
        return build(raw)

    programs._build = slow
    yield go
    go.set()


def test_a_long_program_is_validated_beside_the_engine(
    local: Local, held_build: threading.Event
) -> None:
    slow, other = two(local)
    slots = (Slot(F32, (4,), Role.INPUT), Slot(F32, (4,), Role.OUTPUT))
    raw = encode(Program(slots, (operation("relu", 0, 1),) * 1000))
    assert len(raw) > codes._SHORT_BYTES
    source = local.buffer(raw)
    slow.post(abi.program_load(slow.next_cookie(), source.whole(len(raw))))
    slow.submit()
    wait_for(lambda: local.state.u32[s.cursor_word(0) + s.C_PHASE], "the load to begin")
    assert other.do(abi.nop).status == 0
    assert not slow.ready()
    held_build.set()
    local.wait(slow.ready)
    assert slow.take().status == 0


def test_a_cache_of_what_guests_upload_is_bounded_by_weight() -> None:
    cache: Cache[int, str] = Cache(10)
    for key in range(100):
        cache.put(key, "x", 3)
    assert (len(cache), cache.weight) == (3, 9)
    cache.get(97)
    cache.put(100, "y", 3)
    assert cache.get(97)
    assert not cache.get(98)
    cache.put(101, "large", 50)
    assert (len(cache), cache.weight) == (1, 50)
    cache.put(101, "small", 1)
    assert cache.weight == 1


# --- the doorbell ---------------------------------------------------------------------------------


def test_one_doorbell_is_enough_until_the_engine_has_a_core_again(local: Local) -> None:
    ring = local.ring()
    engine = local.device.engine
    engine.stop()  # as if its thread were waiting for a core
    word = (ring.control + NEED_WAKEUP) // 4
    ring.words[word] = 1
    engine._event.clear()
    local.write32(Reg.DOORBELL, 1)
    assert ring.words[word] == 0
    assert engine._event.is_set()
