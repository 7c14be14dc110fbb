"""A worker may die at any store: the next one ends in the same bytes.

A script of commands runs on a device without threads. At its n-th store to the state the worker
"dies": everything but the three memfds is dropped, a new device is made over them and goes on. For
every n, completions, device memory and guest RAM must be those of the run that nobody killed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.commands import COMPLETION, Memory, Query
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot, encode
from accelvisor.abi.registers import COMMAND_BYTES, CQ_TAIL, SQ_HEAD, SQ_TAIL
from accelvisor.abi.status import CommandStatus
from accelvisor.function import blame
from accelvisor.function import state as s
from accelvisor.function.descriptors import Descriptors
from accelvisor.function.device import Device
from accelvisor.function.launch import Launcher
from accelvisor.function.pauses import finish
from accelvisor.function.state import STATE_BYTES, TRACK_BYTES, State
from accelvisor.limits import LIMITS, MIB
from accelvisor.vfio_user.protocol import MigState
from tests.function.harness import Path, make_spec, memfd, operation

F32 = DType.FLOAT32
RAM = 0x10_0000
N = 300_000  # elements: two tiles


class Died(BaseException):
    """The worker was killed here."""


class _Words:
    """Words of which a store is the last thing that a worker does."""

    def __init__(self, words: memoryview, life: Life) -> None:
        self._words = words
        self._life = life

    def __getitem__(self, index: Any) -> Any:
        return self._words[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._words[index] = value
        self._life.spend()


class Life:
    """How many stores a worker has left."""

    def __init__(self, stores: int) -> None:
        self.left = stores

    def spend(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Died


class Machine:
    """The memory that outlives workers, and a guest that wrote its commands beforehand."""

    def __init__(self, script: list[bytes], ram: bytes, chips: int = 1) -> None:
        self.spec = make_spec(
            Path("/tmp"), memory_bytes=5 * MIB, queues=1, cores=chips, chips=chips
        )
        self.fds = [memfd("state", STATE_BYTES), memfd("window", self.spec.window_bytes),
                    memfd("memory", self.spec.memory_bytes),
                    memfd("track", TRACK_BYTES)]  # fmt: skip
        self.ram_fd = memfd("ram", 4 * MIB)
        os.pwrite(self.ram_fd, ram, 0)
        self.script = script
        device = self.worker(Life(-1))
        slot = device.descriptors.keep(os.dup(self.ram_fd))
        device.maps.map(RAM, 4 * MIB, 3, 0, slot)
        device.config.write(0x04, b"\x06\x00")
        device.frontend.enable(device.frontend.lanes[0])
        layout = self.spec.layout
        at = layout.submission(0)
        device.window[at : at + len(script) * COMMAND_BYTES] = b"".join(script)
        tail = layout.control(0) + SQ_TAIL
        device.window[tail : tail + 4] = len(script).to_bytes(4, "little")

    def worker(self, life: Life) -> Device:
        """A new worker's device; its stores cost ``life``."""
        state = State(self.fds[0])
        state.u32 = _Words(state.u32, life)  # type: ignore[assignment]
        state.u64 = _Words(state.u64, life)  # type: ignore[assignment]
        held = {0: os.dup(self.ram_fd)}
        descriptors = Descriptors(lambda data, fds: None, held if state.u32[s.N_DMA_TOP] else {})
        if not state.u32[s.N_DMA_TOP]:
            os.close(held[0])
        return Device(self.spec, state, *self.fds[1:], descriptors)

    def admin(self, life: Life, what: str) -> int:
        """One worker that carries out a reset or a disable, as its engine would at its start."""
        device = self.worker(life)
        try:
            state, lane = device.state, device.frontend.lanes[0]
            if not state.u32[s.R_RESETTING]:
                device.frontend.recover()
            if state.u32[s.R_RESETTING]:
                device._reset_on_engine()
            elif what == "disable" and state.u32[lane.record + s.Q_CLOSING] == 1:
                finish(device.frontend.disable(lane))
                device.frontend.disabled(lane)
            return life.left
        finally:
            self.forget(device)

    def live(self, life: Life, most: int = 100_000) -> int:
        """Run one worker until it is idle or dies. Returns its stores left."""
        device: Device | None = None
        try:
            device = self.worker(life)
            device.frontend.recover()
            lane = device.frontend.lanes[0]
            for _ in range(most):
                device.engine._attend = True  # pause at every boundary
                if not device.frontend.serve(lane):
                    return life.left
            raise AssertionError("the worker does not come to rest")
        finally:
            if device is not None:
                self.forget(device)

    @staticmethod
    def forget(device: Device) -> None:
        for fd in device.descriptors.fds.values():
            os.close(fd)

    def outcome(self) -> dict[str, Any]:
        """Everything that a guest or a host can see at the end."""
        layout = self.spec.layout
        window = mmap.mmap(self.fds[1], self.spec.window_bytes)
        state = State(self.fds[0])
        record = s.queue_word(0)
        control = layout.control(0)
        at = layout.completion(0)
        raw = window[at : at + len(self.script) * 32]
        return {
            "completions": [COMPLETION.unpack_from(raw, 32 * n) for n in range(len(self.script))],
            "tail": window[control + CQ_TAIL : control + CQ_TAIL + 4],
            "head": window[control + SQ_HEAD : control + SQ_HEAD + 4],
            "memory": os.pread(self.fds[2], self.spec.memory_bytes, 0),
            "ram": os.pread(self.ram_fd, 4 * MIB, 0),
            "queue": list(state.u32[record : record + 16]),
            "cursor": bytes(state.u8[s.CURSORS_AT : s.CURSORS_AT + s.CURSOR_BYTES]),
            "contexts": bytes(state.u8[s.CONTEXTS_AT : s.OBJECTS_AT]),
            "objects": bytes(state.u8[s.OBJECTS_AT : s.BINDINGS_AT]),
            "bindings": bytes(state.u8[s.BINDINGS_AT : s.DIGEST_END]),
        }

    def close(self) -> None:
        for fd in (*self.fds, self.ram_fd):
            os.close(fd)


@cache
def script() -> tuple[list[bytes], bytes]:
    """Every kind of command, with refusals, in-place updates and reuse of slots and memory."""
    sgd = encode(
        Program(
            (Slot(F32, (N,), Role.OUTPUT), Slot(F32, (N,), Role.INPUT)),
            (operation("sgd", 0, 1, 0, rate=0.5), operation("add", 0, 1, 0)),
        )
    )
    data = np.arange(N, dtype=np.float32)
    code_at, bind_at, out_at = N * 4, N * 4 + 4096, 2 * MIB
    ram = bytearray(4 * MIB)
    ram[: N * 4] = data.tobytes()
    ram[code_at : code_at + len(sgd)] = sgd

    def memory(at: int, length: int) -> Memory:
        return Memory(0, 0, RAM + at, length, 0)

    def handle(slot: int, generation: int = 0) -> int:
        return generation + 1 << 32 | slot

    ram[bind_at : bind_at + 32] = abi.BINDING.pack(handle(0), 0) + abi.BINDING.pack(handle(1), 0)
    commands = [
        abi.context_open(1, 4711, "crash"),
        abi.tensor_create(2, F32, (N,)),
        abi.tensor_create(3, F32, (N,)),
        abi.tensor_create(4, F32, (1 << 30,)),  # refused
        abi.copy_in(5, handle(0), 0, memory(0, N * 4)),
        abi.copy_in(6, handle(1), 0, memory(0, N * 4)),
        abi.program_load(7, memory(code_at, len(sgd))),
        abi.nop(8),
        abi.launch(9, handle(2), 2, memory(bind_at, 32), repeat=2),
        abi.copy_out(10, handle(0), 0, memory(out_at, N * 4)),
        abi.tensor_destroy(11, handle(1)),
        abi.tensor_destroy(12, handle(1)),  # refused: stale
        abi.tensor_create(13, DType.UINT8, (100,)),  # takes slot 1 again
        abi.program_unload(14, handle(2)),
        abi.fence(15),
        abi.query(16, Query.OBJECTS, memory(3 * MIB + N * 4 // 2, 4096)),
        abi.context_close(17),
        abi.context_open(18, 1, "again"),
        abi.tensor_create(19, F32, (4,)),
    ]
    return commands, bytes(ram)


@pytest.fixture(scope="module")
def unkilled() -> Iterator[tuple[dict[str, Any], int]]:
    machine = Machine(*script())
    stores = 1_000_000
    left = machine.live(Life(stores))
    yield machine.outcome(), stores - left
    machine.close()


def compare(machine: Machine, expected: dict[str, Any], what: str) -> None:
    got = machine.outcome()
    for name, value in expected.items():
        assert got[name] == value, f"{name} differs: {what}"


def test_the_script_does_what_it_says(unkilled: tuple[dict[str, Any], int]) -> None:
    outcome, stores = unkilled
    done = outcome["completions"]
    refused = {4: 0x005, 12: 0x007}
    assert [c[0] for c in done] == list(range(1, 20))
    assert {c[0]: c[1] for c in done if c[1]} == refused
    data = np.arange(N, dtype=np.float32)
    value = data.copy()
    for _ in range(2):
        value = (value - np.float32(0.5) * data).astype(np.float32)
        value = value + data
    got = np.frombuffer(outcome["ram"], np.float32, N, 2 * MIB)
    assert np.array_equal(got, value)
    assert stores > 150


def test_one_death_anywhere_changes_nothing(unkilled: tuple[dict[str, Any], int]) -> None:
    expected, stores = unkilled
    for at in range(1, stores + 1):
        machine = Machine(*script())
        with pytest.raises(Died):
            machine.live(Life(at))
        machine.live(Life(-1))
        compare(machine, expected, f"killed at store {at} of {stores}")
        machine.close()


@pytest.mark.parametrize("stride", [1, 2, 3, 7])
def test_death_after_death_ends_the_same(
    unkilled: tuple[dict[str, Any], int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker lives a little longer than what taking over costs."""
    monkeypatch.setattr(blame, "MOST", 1 << 30)
    expected, _ = unkilled
    machine = Machine(*script())
    life = 1
    deaths = 0
    while True:
        try:
            machine.live(Life(life))
            break
        except Died:
            deaths += 1
            life = life + stride if life < 60 else 5
    assert deaths > 5
    compare(machine, expected, f"{deaths} deaths")
    machine.close()


def test_a_command_that_kills_every_worker_ends_as_a_fault_of_its_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*_: Any) -> None:
        raise Died

    machine = Machine(*script())
    monkeypatch.setattr(Launcher, "run", die)
    for _ in range(LIMITS.worker_deaths):
        with pytest.raises(Died):
            machine.live(Life(-1))
    machine.live(Life(-1))
    done = machine.outcome()["completions"]
    at = next(n for n, entry in enumerate(done) if entry[0] == 9)
    assert done[at][1] == CommandStatus.DEVICE_ERROR
    assert not any(entry[1] for entry in done[:at] if entry[0] != 4)
    assert done[at + 1][1] == CommandStatus.CONTEXT_STOPPED
    machine.close()


def test_a_command_that_comes_further_with_each_worker_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = Launcher.run

    def one_tile(self: Any, launch: Any, cursor: int, *rest: Any) -> Iterator[Any]:
        for n, pause in enumerate(inner(self, launch, cursor, *rest)):
            if n == 1:
                raise Died
            yield pause

    machine = Machine(*script())
    monkeypatch.setattr(Launcher, "run", one_tile)
    deaths = 0
    while True:
        try:
            machine.live(Life(-1))
            break
        except Died:
            deaths += 1
    assert deaths > LIMITS.worker_deaths
    assert {entry[0] for entry in machine.outcome()["completions"] if entry[1]} == {4, 12}
    machine.close()


def halfway() -> Machine:
    """A machine in the middle of its launch, with objects, scratch and bindings in use."""
    machine = Machine(*script())
    with pytest.raises(Died):
        machine.live(Life(120))
    state = State(machine.fds[0])
    assert state.u64[(s.cursor_word(0) + s.C_SCRATCH_BYTES64) // 2]
    return machine


@pytest.mark.parametrize("what", ["reset", "disable"])
def test_death_in_a_reset_or_a_disable_leaves_nothing_behind(what: str) -> None:
    word = s.R_RESETTING if what == "reset" else s.queue_word(0) + s.Q_CLOSING
    at = 0
    while True:
        at += 1
        machine = halfway()
        state = State(machine.fds[0])
        state.u32[word] = 1
        try:
            machine.admin(Life(at), what)
            died = False
        except Died:
            died = True
            machine.admin(Life(-1), what)
        outcome = machine.outcome()
        place = f"{what} killed at store {at}"
        assert outcome["memory"] == bytes(machine.spec.memory_bytes), place
        assert not any(outcome["queue"]), place
        assert not any(outcome["cursor"]), place
        assert not any(outcome["contexts"]), place
        assert not any(outcome["bindings"]), place
        kinds = [outcome["objects"][n] for n in range(0, len(outcome["objects"]), s.OBJECT_BYTES)]
        assert not any(kinds), place
        machine.close()
        if not died:
            assert at > 10
            return


@pytest.mark.parametrize(
    "targets", [(MigState.STOP, MigState.RUNNING), (MigState.STOP_COPY, MigState.RUNNING_P2P)]
)
def test_death_in_a_migration_arc_leaves_state_and_freeze_together(
    targets: tuple[MigState, ...],
) -> None:
    machine = Machine(*script())
    deaths = 0

    def request(life: Life, target: MigState) -> None:
        device = machine.worker(life)
        words = device.state.u32

        def freeze(bit: int, _: float) -> None:  # as the engine's, whose thread is not there
            words[s.R_FREEZE] = words[s.R_FREEZE] | bit

        device.engine.freeze = freeze  # type: ignore[method-assign]
        try:
            device.migration.machine.request(target)
        finally:
            for fd in device.descriptors.fds.values():
                os.close(fd)

    for target in (*targets, MigState.RUNNING):
        at, died = 0, True
        while died:
            at += 1
            start = bytes(State(machine.fds[0]).u8[s.PCI_AT : s.DMA_AT])
            try:
                request(Life(at), target)
                died = False
            except Died:
                deaths += 1
            worker = machine.worker(Life(-1))
            state = worker.state.u32
            for fd in worker.descriptors.fds.values():
                os.close(fd)
            frozen = bool(state[s.R_FREEZE] & s.FREEZE_MIGRATION)
            assert frozen is (state[s.R_MIGRATION] != MigState.RUNNING), (target, at)
            request(Life(-1), target)
            assert state[s.R_MIGRATION] == target
            if died:  # once more from the beginning, one store later
                State(machine.fds[0]).u8[s.PCI_AT : s.DMA_AT] = start
    assert deaths > 6
    machine.close()
