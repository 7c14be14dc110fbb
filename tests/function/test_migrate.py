"""Migration verbs: states freeze, the stream moves a function, damage is refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import Opcode
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.abi.registers import Interrupt, QueueReg, QueueStatus, Reg
from accelvisor.errors import StateError
from accelvisor.function import state as s
from accelvisor.function.validate import check_state
from accelvisor.kernels.interpreter import execute
from accelvisor.vfio_user.features import (
    DEVICE_STATE,
    Feature,
    FeatureFlag,
    MigState,
    pack_logging,
)
from accelvisor.vfio_user.model import Refusal
from tests.function.harness import Local, Ring, operation

F32 = DType.FLOAT32


def go(local: Local, state: MigState) -> None:
    data = DEVICE_STATE.pack(state, 0)
    local.device.device_feature(FeatureFlag.SET, Feature.MIG_DEVICE_STATE, data)


def at(local: Local) -> MigState:
    raw = local.device.device_feature(FeatureFlag.GET, Feature.MIG_DEVICE_STATE, b"")
    return MigState(DEVICE_STATE.unpack_from(raw)[0])


def saved(local: Local, piece: int = 1 << 16) -> bytes:
    parts = []
    while part := local.device.migration_read(piece):
        parts.append(part)
    return b"".join(parts)


def resume(local: Local, stream: bytes) -> None:
    local.device.migration_write(stream)
    go(local, MigState.RUNNING)


@pytest.fixture
def pair() -> Iterator[tuple[Local, Local]]:
    with Local() as source, Local() as target:
        yield source, target


def test_stop_freezes_and_running_thaws(local: Local) -> None:
    ring = local.ring()
    assert at(local) is MigState.RUNNING
    go(local, MigState.STOP)
    assert local.read32(Reg.STATUS) & 4
    assert local.read32(Reg.MIGRATION_STATE) == MigState.STOP
    ring.post(abi.nop(1))
    ring.submit()
    go(local, MigState.STOP_COPY)
    assert not ring.ready()
    go(local, MigState.RUNNING)
    local.wait(ring.ready)


def test_a_function_moves_in_the_middle_of_a_program(pair: tuple[Local, Local]) -> None:
    """Same bits as an unmoved run, handles and completions go on."""
    source, target = pair
    n, repeat = 300_000, 400
    rng = np.random.default_rng(2)
    w, g = (rng.standard_normal(n, dtype=np.float32) for _ in range(2))
    program = Program(
        (Slot(F32, (n,), Role.OUTPUT), Slot(F32, (n,), Role.INPUT)),
        (operation("sgd", 0, 1, 0, rate=0.01),),
    )
    ring = source.ring(1)
    ring.open("traveller")
    weights, gradient = ring.tensor(w), ring.tensor(g)
    handle = ring.load(program)
    buffer = source.buffer(abi.BINDING.pack(weights, 0) + abi.BINDING.pack(gradient, 0))
    cookie = ring.next_cookie()
    ring.post(abi.launch(cookie, handle, 2, buffer.whole(32), repeat=repeat))
    ring.submit()
    source.wait(lambda: source.state.u64[s.K["tiles"]] > 20)
    go(source, MigState.STOP_COPY)
    assert not ring.ready()
    stream = saved(source)
    go(target, MigState.RESUMING)
    for start in range(0, len(stream), 100_001):
        target.device.migration_write(stream[start : start + 100_001])
    go(target, MigState.RUNNING)
    assert target.read32(Reg.EPOCH) == source.read32(Reg.EPOCH) + 1
    assert target.read32(Reg.INTERRUPT_CAUSE) & Interrupt.MOVED
    moved = Ring.__new__(Ring)
    moved.__dict__.update(ring.__dict__)
    moved.guest, moved.words = target, target.window.cast("I")
    target.wait(moved.ready)
    done = moved.take()
    assert (done.cookie, done.status) == (cookie, 0)
    expected = w.copy()
    execute(program, [expected, g], repeat=repeat)
    assert np.array_equal(moved.read(weights, "float32", (n,)), expected)
    # ... and a migration that is called off goes on at the source, with the same bits.
    go(source, MigState.RUNNING)
    source.wait(ring.ready)
    assert ring.take().status == 0
    assert np.array_equal(ring.read(weights, "float32", (n,)), expected)


def test_the_stream_is_the_same_in_any_pieces_and_after_a_restart(local: Local) -> None:
    ring = local.ring()
    ring.open()
    ring.tensor(np.arange(50_000, dtype=np.float32))
    go(local, MigState.STOP_COPY)
    whole = saved(local, 1 << 20)
    go(local, MigState.STOP)
    go(local, MigState.STOP_COPY)
    half = local.device.migration_read(70_000)
    local.restart()
    assert at(local) is MigState.STOP_COPY
    assert half + saved(local, 4097) == whole
    go(local, MigState.RUNNING)


def test_a_function_of_another_size_refuses_the_stream(local: Local) -> None:
    go(local, MigState.STOP_COPY)
    stream = saved(local)
    with Local(queues=2) as other:
        go(other, MigState.RESUMING)
        with pytest.raises(Refusal):
            other.device.migration_write(stream)
        assert at(other) is MigState.ERROR
        other.device.reset()
        assert at(other) is MigState.RUNNING
        assert other.ring().do(abi.nop).status == 0


def test_a_stream_cut_short_is_refused(pair: tuple[Local, Local]) -> None:
    source, target = pair
    go(source, MigState.STOP_COPY)
    stream = saved(source)
    go(target, MigState.RESUMING)
    target.device.migration_write(stream[:-1])
    with pytest.raises(Refusal) as caught:
        go(target, MigState.RUNNING)
    assert caught.value.errno == errno.EINVAL
    assert at(target) is MigState.ERROR
    target.device.reset()
    assert target.ring().do(abi.nop).status == 0


@pytest.mark.parametrize("where", [0, 8, 45, 50, 60])
def test_a_damaged_head_is_refused(pair: tuple[Local, Local], where: int) -> None:
    source, target = pair
    go(source, MigState.STOP_COPY)
    stream = bytearray(saved(source))
    stream[where] ^= 0x80
    go(target, MigState.RESUMING)
    with pytest.raises(Refusal):
        resume(target, bytes(stream))


def test_a_worker_that_dies_while_loading_ends_in_error(pair: tuple[Local, Local]) -> None:
    source, target = pair
    go(source, MigState.STOP_COPY)
    go(target, MigState.RESUMING)
    target.device.migration_write(saved(source)[:100])
    target.restart()
    assert at(target) is MigState.ERROR
    target.device.reset()
    assert at(target) is MigState.RUNNING


def test_reset_leads_to_running_from_every_state(local: Local) -> None:
    """Case V2: a reset in the middle must not leave two opinions about the state."""
    for state in (MigState.STOP, MigState.STOP_COPY, MigState.RESUMING, MigState.RUNNING_P2P,
                  MigState.PRE_COPY):  # fmt: skip
        go(local, state)
        local.device.reset()
        assert at(local) is MigState.RUNNING
        assert not local.read32(Reg.STATUS) & 4
        assert local.ring().do(abi.nop).status == 0


def test_data_verbs_outside_their_states_are_refused(local: Local) -> None:
    with pytest.raises(Refusal):
        local.device.migration_read(100)
    with pytest.raises(Refusal):
        local.device.migration_write(b"x")


# --- workers that die in an arc -------------------------------------------------------------------


class Died(BaseException):
    """The worker was killed here."""


def test_a_worker_killed_between_a_state_and_its_freeze_leaves_both_or_none(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed frozen for ever, and said that it was RUNNING."""

    def die(*_: object) -> None:
        raise Died

    ring = local.ring()
    for target, verb in ((MigState.STOP, "_store"), (MigState.RUNNING, "thaw")):
        with monkeypatch.context() as patch:
            owner = local.device.migration if verb == "_store" else local.device.engine
            patch.setattr(owner, verb, die)
            with pytest.raises(Died):
                go(local, target)
        local.restart()
        frozen = bool(local.state.u32[s.R_FREEZE] & s.FREEZE_MIGRATION)
        assert frozen is (at(local) is not MigState.RUNNING)
        go(local, target)  # the message again
        assert at(local) is target
    ring.words.release()
    assert local.ring(1).do(abi.nop).status == 0


class _Half:
    """State bytes of which only a part of a large store happens before the worker dies."""

    def __init__(self, inner: memoryview, limit: int) -> None:
        self._inner = inner
        self._limit = limit

    def __getitem__(self, key: slice) -> memoryview:
        return self._inner[key]

    def __setitem__(self, key: slice, value: bytes) -> None:
        if len(value) < s.DIGEST_END - s.PCI_AT:
            self._inner[key] = value
            return
        self._inner[key.start : key.start + self._limit] = value[: self._limit]
        raise Died


@pytest.mark.parametrize(
    "limit", [s.REGS_AT + 24 - s.PCI_AT, s.object_at(10) - s.PCI_AT, s.object_at(3) + 60 - s.PCI_AT]
)
def test_a_state_loaded_by_half_is_not_taken_for_a_whole_one(
    pair: tuple[Local, Local], limit: int
) -> None:
    source, target = pair
    ring = source.ring()
    ring.open()
    for n in range(20):
        ring.tensor(np.full(1000, n, np.float32))
    go(source, MigState.STOP_COPY)
    go(target, MigState.RESUMING)
    target.device.migration_write(saved(source))
    state = target.device.state
    state.u8 = _Half(state.u8, limit)  # type: ignore[assignment]
    with pytest.raises(Died):
        go(target, MigState.STOP)
    target.restart()
    assert at(target) is MigState.ERROR
    assert not any(target.state.u8[s.QUEUES_AT : s.DIGEST_END])  # no record is believed
    with pytest.raises(Refusal):
        go(target, MigState.STOP)
    target.device.reset()
    assert at(target) is MigState.RUNNING
    assert target.ring().do(abi.nop).status == 0
    assert not any(target.device.memory.view[: 20 * 4096])


def test_what_a_stream_does_not_mention_is_zero(pair: tuple[Local, Local]) -> None:
    source, target = pair
    go(source, MigState.STOP_COPY)
    staging = target.spec.layout.staging
    target.window[staging + 5000] = 7
    go(target, MigState.RESUMING)
    target.device.migration_write(saved(source))
    go(target, MigState.STOP)
    assert target.window[staging + 5000] == 0


def test_resuming_without_data_changes_nothing(local: Local) -> None:
    ring = local.ring()
    ring.open()
    data = np.arange(1000, dtype=np.float32)
    handle = ring.tensor(data)
    go(local, MigState.RESUMING)
    go(local, MigState.RUNNING)
    assert np.array_equal(ring.read(handle, "float32", (1000,)), data)


# --- dirty pages ----------------------------------------------------------------------------------


def start(local: Local, *ranges: tuple[int, int]) -> None:
    data = pack_logging(4096, ranges)
    local.device.device_feature(FeatureFlag.SET, Feature.DMA_LOGGING_START, data)


def bits(raw: bytes) -> set[int]:
    return {i for i in range(len(raw) * 8) if raw[i // 8] >> i % 8 & 1}


def test_pages_that_the_device_wrote_are_reported_once(local: Local) -> None:
    ring = local.ring()
    ring.open()
    handle = ring.tensor(np.ones(3000, np.float32))
    start(local, (local.RAM, len(local.ram)))
    ring.ok(abi.copy_out, handle, 0, abi.Memory(0, 0, local.RAM + 4096 * 10 + 100, 12_000, 0))
    report = local.device.dirty_pages(local.RAM, len(local.ram), 4096)
    assert bits(report) == {10, 11, 12}
    assert not any(local.device.dirty_pages(local.RAM, len(local.ram), 4096))


def test_after_a_restart_no_dirty_page_is_missing(local: Local) -> None:
    ring = local.ring()
    ring.open()
    handle = ring.tensor(np.ones(3000, np.float32))
    start(local, (local.RAM, len(local.ram)))
    ring.ok(abi.copy_out, handle, 0, abi.Memory(0, 0, local.RAM, 12_000, 0))
    local.restart()
    report = local.device.dirty_pages(local.RAM, len(local.ram), 4096)
    assert {0, 1, 2} <= bits(report)
    local.device.device_feature(FeatureFlag.SET, Feature.DMA_LOGGING_STOP, b"")
    local.restart()
    with pytest.raises(Refusal):
        local.device.dirty_pages(local.RAM, 4096, 4096)


# --- hostile state --------------------------------------------------------------------------------


def section(local: Local) -> bytearray:
    return bytearray(local.state.u8[s.PCI_AT : s.DIGEST_END])


@pytest.fixture
def used() -> Iterator[Local]:
    with Local() as local:
        ring = local.ring()
        ring.open()
        ring.tensor(np.ones(100, np.float32))
        ring.tensor(np.ones(100, np.float32))
        yield local


def test_a_state_of_our_own_passes(used: Local) -> None:
    check_state(section(used), used.spec)


OBJECT = s.object_at(1) - s.PCI_AT
QUEUE = s.QUEUES_AT - s.PCI_AT
CURSOR = s.CURSORS_AT - s.PCI_AT
CONTEXT = s.CONTEXTS_AT - s.PCI_AT
COMMAND = s.COMMANDS_AT - s.PCI_AT
RUN = s.RUNS_AT - s.PCI_AT
LINK = s.LINKS_AT - s.PCI_AT


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (OBJECT, 3),  # kind: a graph with a shape
        (OBJECT, 9),  # kind
        (OBJECT + 8, 5),  # context
        (OBJECT + 12, 0x0163),  # dtype
        (OBJECT + 16, 101),  # shape
        (OBJECT + 48, 0),  # address of another
        (OBJECT + 48, 1 << 30),  # beyond memory
        (OBJECT + 48, 100),  # unaligned
        (OBJECT + 64, 0),  # extent
        (OBJECT + 68, 0xFFFF),  # extent, huge
        (QUEUE, 9),  # status
        (QUEUE + 12, 7),  # context
        (QUEUE + 20, 3),  # closing
        (CURSOR + 64, 9),  # phase
        (CURSOR + 76, 0xFFFF_FFFF),  # bindings
        (CURSOR + 80, 0xFFFF_FFFF),  # intent
        (CURSOR + 112, 4096),  # scratch over the first object
        (CONTEXT, 77),  # queue
        (CURSOR + 80, 1),  # an intent of a NOP
        (QUEUE + 24, 1),  # a command taken that has no record
        (COMMAND + 64, 9),  # phase of a command that is not ordered
        (COMMAND + 64, 1),  # a record that nobody took
        (COMMAND + 76, 1),  # an engine that works on nothing
        (RUN, 48),  # a cursor of nobody
        (LINK, 9),  # state of a link
    ],
)
def test_an_impossible_record_is_refused(used: Local, offset: int, value: int) -> None:
    raw = section(used)
    raw[offset : offset + 4] = value.to_bytes(4, "little")
    with pytest.raises(StateError):
        check_state(raw, used.spec)


@pytest.mark.parametrize("opcode", [Opcode.CONTEXT_OPEN, Opcode.CONTEXT_CLOSE])
def test_a_context_that_does_not_exist_is_no_intent(used: Local, opcode: Opcode) -> None:
    """Its record would lie among the DMA maps."""
    raw = section(used)
    raw[CURSOR : CURSOR + 2] = opcode.to_bytes(2, "little")
    for intent, good in ((s.CONTEXTS, True), (s.CONTEXTS + 1, False), (s.OBJECTS, False)):
        raw[CURSOR + 80 : CURSOR + 84] = intent.to_bytes(4, "little")
        with nullcontext() if good else pytest.raises(StateError):
            check_state(raw, used.spec)


def test_a_queue_that_does_not_exist_cannot_be_enabled_by_a_state(used: Local) -> None:
    raw = section(used)
    raw[QUEUE + s.QUEUE_BYTES * used.spec.queues] = QueueStatus.ENABLED
    with pytest.raises(StateError):
        check_state(raw, used.spec)
    assert used.read32(Reg.QUEUE + QueueReg.STATUS) == QueueStatus.ENABLED
