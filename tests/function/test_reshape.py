"""A function that becomes larger, smaller, or nothing while its guest computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.registers import Interrupt, QueueReg, QueueStatus, Reg, Status
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import ConfigError, ConflictError, UsageError
from accelvisor.function import shape as shapes
from accelvisor.function import state as s
from accelvisor.function.launch import Progress
from accelvisor.function.moving import Moving
from accelvisor.function.reshape import Reshaping
from accelvisor.function.shape import Shape
from accelvisor.isolation.segments import Segment, Unmapped
from accelvisor.limits import LIMITS, MIB
from accelvisor.vfio_user.model import Refusal
from tests.function.harness import Local
from tests.function.test_moving import accumulate

PAGE = 4096


@pytest.fixture
def local() -> Iterator[Local]:
    with Local() as made:
        yield made


def sized(epoch: int, cores: int, memory: int) -> dict[str, Any]:
    """In two banks, as a card hands memory out."""
    half = memory // 2 // PAGE * PAGE
    pieces = (Segment(0, half, 1, MIB), Segment(half, memory - half, 0, 0)) if memory else ()
    return Shape(epoch, cores, pieces).to_dict()


def test_a_running_program_goes_on_with_other_cores_and_more_memory(local: Local) -> None:
    n, repeat = 200_000, 400
    x = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    ring = local.ring()
    ring.open()
    a, y = ring.tensor(x), ring.tensor(np.zeros(n, np.float32))
    program = ring.load(accumulate(n))
    buffer = local.buffer(abi.BINDING.pack(a, 0) + abi.BINDING.pack(y, 0))
    ring.post(abi.launch(99, program, 2, buffer.whole(32), repeat=repeat))
    ring.submit()
    local.wait(lambda: local.state.u64[s.K["snapshots"]] > 3)
    reshaping = Reshaping(local.device)
    told = reshaping.reshape(sized(2, 3, 32 * MIB))
    assert local.state.u32[s.cursor_word(0) + s.C_PHASE] == s.PHASE_RUNNING, "it was too fast"
    assert (told["cores"], told["pool_cores"], told["memory_bytes"]) == (3, 3, 32 * MIB)
    assert (told["table_epoch"], told["register_epoch"], told["scrubbed"]) == (2, 2, 0)
    told = reshaping.reshape(sized(3, 1, 12 * MIB))
    assert told["scrubbed"] == 20 * MIB
    local.wait(ring.ready)
    assert ring.take().status == 0
    want = np.zeros(n, np.float32)
    for _ in range(repeat):
        want = want + x
    assert ring.read(y, "float32", (n,)).tobytes() == want.tobytes()


def test_the_guest_is_told_by_interrupt_and_registers(local: Local) -> None:
    Reshaping(local.device).reshape(sized(7, 2, 8 * MIB))
    assert local.read32(Reg.INTERRUPT_CAUSE) & Interrupt.SHAPE
    assert local.read32(Reg.CORES) == 2
    assert local.read32(Reg.MEMORY_BYTES_64) == 8 * MIB
    assert local.read32(Reg.EPOCH) == 7


def test_new_memory_can_be_used_and_memory_that_went_cannot(local: Local) -> None:
    ring = local.ring()
    ring.open()
    large = (20 * MIB // 4,)
    assert ring.do(abi.tensor_create, 1, large).status == CommandStatus.OUT_OF_MEMORY
    reshaping = Reshaping(local.device)
    reshaping.reshape(sized(2, 1, 24 * MIB))
    handle = ring.ok(abi.tensor_create, 1, large)
    with pytest.raises(ConflictError) as caught:
        reshaping.reshape(sized(3, 1, 16 * MIB))
    assert caught.value.code == "memory-in-use"
    assert local.read32(Reg.EPOCH) == 2, "a refused change changes nothing"
    ring.ok(abi.tensor_destroy, handle)
    reshaping.reshape(sized(3, 1, 16 * MIB))
    assert ring.do(abi.tensor_create, 1, large).status == CommandStatus.OUT_OF_MEMORY


def test_memory_that_went_comes_back_as_zeros(local: Local) -> None:
    ring = local.ring()
    ring.open()
    keep = ring.ok(abi.tensor_create, 1, (MIB // 4,))
    secret = ring.tensor(np.full(2 * MIB, 0x5A, np.uint8))
    ring.ok(abi.tensor_destroy, secret)
    # As a hostile worker might: bytes where no object is.
    local.device.memory.view[10 * MIB : 10 * MIB + 6] = b"secret"
    reshaping = Reshaping(local.device)
    reshaping.reshape(sized(2, 1, 2 * MIB))
    reshaping.reshape(sized(3, 1, 16 * MIB))
    assert not bytes(local.device.memory.view).strip(b"\0")
    assert ring.ok(abi.tensor_destroy, keep) == 0


def test_the_same_shape_again_changes_nothing(local: Local) -> None:
    reshaping = Reshaping(local.device)
    first = reshaping.reshape(sized(2, 1, 8 * MIB))
    local.write32(Reg.INTERRUPT_CAUSE, int(Interrupt.SHAPE))
    assert reshaping.reshape(sized(2, 1, 8 * MIB)) == {**first, "scrubbed": 0}
    assert not local.read32(Reg.INTERRUPT_CAUSE) & Interrupt.SHAPE


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_old_epoch_is_refused(local: Local, epoch: int) -> None:
    reshaping = Reshaping(local.device)
    reshaping.reshape(sized(2, 1, 8 * MIB))
    with pytest.raises(ConflictError) as caught:
        reshaping.reshape(sized(epoch, 1, 4 * MIB))
    assert caught.value.code == "epoch-old"


def test_a_launch_of_an_old_epoch_touches_nothing(local: Local) -> None:
    """What was resolved before a change is not run after it, should anybody try."""
    ring = local.ring()
    ring.open()
    y = ring.tensor(np.zeros(1000, np.float32))
    program = ring.load(accumulate(1000))
    ring.launch(program, y, y)
    launcher = local.device.launcher
    ((launch, _),) = launcher._cache._held.values()
    Reshaping(local.device).reshape(sized(2, 1, 8 * MIB))
    with pytest.raises(Unmapped, match="epoch 1"):
        next(launcher.run(launch, {}, Progress(0, 1), 1, lambda: False, local.device.pool))


def test_a_revoked_function_completes_everything_with_its_name(local: Local) -> None:
    ring = local.ring()
    ring.open()
    y = ring.tensor(np.zeros(1_000_000, np.float32))
    program = ring.load(accumulate(1_000_000))
    buffer = local.buffer(abi.BINDING.pack(y, 0) * 2)
    ring.post(abi.launch(5, program, 2, buffer.whole(32), repeat=1_000_000))
    ring.submit()
    local.wait(lambda: local.state.u64[s.K["snapshots"]] > 1)
    told = Reshaping(local.device).reshape(sized(2, 0, 0))
    assert told["memory_bytes"] == told["cores"] == 0
    local.wait(ring.ready)
    assert ring.take().status == CommandStatus.REVOKED
    assert ring.register(QueueReg.STATUS) == QueueStatus.FAULTED
    assert local.read32(Reg.STATUS) & Status.REVOKED
    again = local.ring(1)
    assert again.do(abi.context_open, 1, "late").status == CommandStatus.REVOKED
    assert not bytes(local.device.memory.view).strip(b"\0")
    assert local.device.memory.used == 0


def test_a_revoked_function_can_be_given_resources_again(local: Local) -> None:
    reshaping = Reshaping(local.device)
    reshaping.reshape(sized(2, 0, 0))
    reshaping.reshape(sized(3, 2, 8 * MIB))
    ring = local.ring()
    ring.open()
    x = np.arange(100, dtype=np.float32)
    assert ring.read(ring.tensor(x), "float32", (100,)).tobytes() == x.tobytes()
    assert not local.read32(Reg.STATUS) & Status.REVOKED


def test_the_next_worker_has_the_shape_of_the_last(local: Local) -> None:
    Reshaping(local.device).reshape(sized(4, 3, 24 * MIB))
    local.restart()
    assert local.device.pool.cores == 3
    assert local.device.memory.nbytes == 24 * MIB
    assert local.read32(Reg.EPOCH) == 4
    assert [i.bank for i in local.device.memory.table.segments] == [1, 0]


def test_a_worker_that_died_while_it_changed_leaves_no_one_frozen(local: Local) -> None:
    local.state.u32[s.R_FREEZE] |= s.FREEZE_SHAPE
    local.restart()
    assert not local.read32(Reg.STATUS) & Status.FROZEN


def test_half_a_record_does_not_count(local: Local) -> None:
    """A worker that dies between the record and the generation leaves the shape before."""
    u8 = local.state.u8
    before = shapes.load(u8)
    at = s.SHAPE_AT + 64 + (int.from_bytes(u8[s.SHAPE_AT : s.SHAPE_AT + 8], "little") + 1) % 2 * (
        s.SHAPE_RECORD_BYTES
    )
    u8[at : at + 100] = b"\xff" * 100
    assert shapes.load(u8) == before


def test_a_function_that_moves_keeps_its_shape(local: Local) -> None:
    Moving(local.device, local._tell).walk("STOP_COPY")
    with pytest.raises(Refusal, match="STOP_COPY"):
        Reshaping(local.device).reshape(sized(2, 1, 8 * MIB))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"epoch": 2, "cores": 1},
        sized(2, 1, 8 * MIB) | {"epoch": 0},
        sized(2, 1, 8 * MIB) | {"epoch": 2**32},
        sized(2, 1, 8 * MIB) | {"epoch": True},
        sized(2, 1, 8 * MIB) | {"cores": -1},
        sized(2, 1, 8 * MIB) | {"cores": LIMITS.cores + 1},
        sized(2, 1, 8 * MIB) | {"cores": 0},
        sized(2, 1, 8 * MIB) | {"segments": []},
        sized(2, 1, 8 * MIB) | {"segments": [[0, PAGE, 0]]},
        sized(2, 1, 8 * MIB) | {"segments": [[0, PAGE, 0, "0"]]},
        sized(2, 1, 8 * MIB) | {"segments": {"0": 1}},
        sized(2, 1, 8 * MIB) | {"more": 1},
    ],
)
def test_a_shape_that_is_none_is_refused(local: Local, fields: dict[str, Any]) -> None:
    with pytest.raises((UsageError, ConfigError)):
        Reshaping(local.device).reshape(fields)
    assert local.read32(Reg.EPOCH) == 1
