"""What the daemon asks of a function that is saved and loaded: tracking, fence, load, read-back."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.abi.registers import CQ_TAIL, SQ_TAIL, Interrupt, QueueReg, QueueStatus, Reg
from accelvisor.errors import UsageError
from accelvisor.function import digest, ram
from accelvisor.function import state as s
from accelvisor.function.channel import MEMORY, unpack
from accelvisor.function.endpoints import memfd
from accelvisor.function.moving import SECTION_BYTES, Moving, firmware, normal
from accelvisor.function.track import Track, data_ranges, runs_of
from accelvisor.limits import MIB
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import MigState
from tests.function.harness import Local, operation

F32 = DType.FLOAT32
PAGE = 4096


class Copy:
    """What a daemon does: copies a function's memory in rounds, following the marks."""

    def __init__(self, local: Local) -> None:
        self.local = local
        self.moving = Moving(local.device, local._tell)
        self.memory = bytearray(local.spec.memory_bytes)
        self.copied: list[int] = []

    def round(self) -> int:
        """Clear marks, then copy what was marked; returns how many pages."""
        pages = self.local.spec.memory_bytes // PAGE
        marks = mmap.mmap(self.local.fds[3], s.TRACK_BYTES)
        dirty = [page for page in range(pages) if marks[page]]
        for page in dirty:
            marks[page] = 0
        view = self.local.device.memory.view
        for page in dirty:
            self.memory[page * PAGE : (page + 1) * PAGE] = view[page * PAGE : (page + 1) * PAGE]
        self.copied.append(len(dirty))
        return len(dirty)

    def first(self) -> None:
        """Begin tracking, then copy everything."""
        self.moving.track(True)
        self.memory[:] = self.local.device.memory.view

    def stop(self) -> list[int]:
        """Freeze, last round; descriptors of the four sections."""
        self.moving.walk("STOP_COPY")
        self.moving.fence(True)
        self.round()
        _, (ram_fd,) = self.moving.extents()
        section = bytes(self.local.state.u8[s.PCI_AT : s.DIGEST_END])
        return [
            filled(section),
            filled(bytes(self.local.window)),
            filled(bytes(self.memory)),
            ram_fd,
        ]


def filled(content: bytes) -> int:
    fd = memfd("section", len(content))
    os.pwrite(fd, content, 0)
    return fd


def loaded(target: Local, fds: list[int]) -> tuple[Moving, dict[str, object]]:
    """Load on another function, as its destination does; fenced."""
    moving = Moving(target.device, target._tell)
    moving.fence(True)
    moving.walk("RESUMING")
    return moving, moving.load(fds)


@pytest.fixture
def pair() -> Iterator[tuple[Local, Local]]:
    with Local() as source, Local() as target:
        yield source, target


def accumulate(n: int) -> Program:
    """y += x, which needs a snapshot, so scratch is written as well."""
    slots = (Slot(F32, (n,), Role.INPUT), Slot(F32, (n,), Role.OUTPUT))
    return Program(slots, (operation("add", 1, 0, 1),))


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_function_moves_in_the_middle_of_a_program(
    pair: tuple[Local, Local], rounds: int
) -> None:
    source, target = pair
    n, repeat = 200_000, 600
    x = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    ring = source.ring()
    ring.open("train")
    a, y = ring.tensor(x), ring.tensor(np.zeros(n, np.float32))
    program = ring.load(accumulate(n))
    copy = Copy(source)
    copy.first()
    pairs = abi.BINDING.pack(a, 0) + abi.BINDING.pack(y, 0)
    buffer = source.buffer(pairs)
    ring.post(abi.launch(99, program, 2, buffer.whole(len(pairs)), repeat=repeat))
    ring.submit()
    source.wait(lambda: source.state.u64[s.K["snapshots"]] > 3)
    for _ in range(rounds):
        copy.round()
    fds = copy.stop()
    assert source.state.u32[s.cursor_word(0) + s.C_PHASE] == s.PHASE_RUNNING, "it was too fast"
    moving, facts = loaded(target, fds)
    expected = copy.moving.digests()
    assert {k: facts[k] for k in ("state", "window", "memory", "faults")} == {
        k: expected[k] for k in ("state", "window", "memory", "faults")
    }
    target.ram[:] = source.ram[:]  # what QEMU does
    moved = target.ring_of(ring)
    moving.walk("RUNNING")
    assert not moved.ready(), "fenced: nothing is computed before the move is decided"
    moving.fence(False)
    target.wait(moved.ready)
    done = moved.take()
    assert (done.cookie, done.status) == (99, 0)
    want = np.zeros(n, np.float32)
    for _ in range(repeat):
        want = want + x
    assert moved.read(y, "float32", (n,)).tobytes() == want.tobytes()
    assert not ring.ready(), "the source must not go on"


def test_a_source_that_goes_on_after_all_ends_with_the_same_bits(local: Local) -> None:
    ring = local.ring()
    ring.open("t")
    x = np.arange(100_000, dtype=np.float32)
    a, y = ring.tensor(x), ring.tensor(np.zeros_like(x))
    program = ring.load(accumulate(len(x)))
    copy = Copy(local)
    copy.first()
    copy.stop()
    copy.moving.walk("RUNNING")
    copy.moving.fence(False)
    copy.moving.track(False)
    assert ring.launch(program, a, y).status == 0
    assert ring.read(y, "float32", x.shape).tobytes() == x.tobytes()


@given(st.lists(st.sampled_from(["tensor", "write", "destroy", "launch", "round"]), max_size=12))
@settings(max_examples=25, deadline=None)
def test_marks_follow_every_write_to_device_memory(steps: list[str]) -> None:
    """Whatever a guest does: copying what is marked keeps an exact copy."""
    rng = np.random.default_rng(7)
    with Local() as local:
        ring = local.ring()
        ring.open("t")
        program = ring.load(accumulate(3000))
        handles = [ring.tensor(rng.standard_normal(3000).astype(np.float32)) for _ in range(2)]
        copy = Copy(local)
        copy.first()
        for step in steps:
            if step == "tensor" and len(handles) < 6:
                handles.append(ring.tensor(rng.standard_normal(3000).astype(np.float32)))
            elif step == "destroy" and len(handles) > 2:
                ring.ok(abi.tensor_destroy, handles.pop())
            elif step == "write":
                ring.write(handles[-1], rng.standard_normal(3000).astype(np.float32))
            elif step == "launch":
                ring.launch(program, handles[0], handles[-1])
            elif step == "round":
                copy.round()
        copy.moving.walk("STOP_COPY")
        copy.round()
        assert bytes(copy.memory) == bytes(local.device.memory.view)


def test_tracking_marks_what_is_written_and_nothing_else(local: Local) -> None:
    ring = local.ring()
    ring.open("t")
    x = ring.tensor(np.zeros(4 * MIB, np.uint8))
    y = ring.tensor(np.zeros(3 * PAGE, np.uint8))
    copy = Copy(local)
    copy.first()
    ring.write(y, np.ones(2 * PAGE, np.uint8))
    assert copy.round() == 2
    ring.write(x, np.ones(1, np.uint8))
    assert copy.round() == 1


def test_a_new_worker_doubts_all_of_device_memory(local: Local) -> None:
    Moving(local.device, local._tell).track(True)
    local.restart()
    copy = Copy(local)
    assert copy.round() == local.spec.memory_bytes // PAGE


def test_a_reset_marks_the_memory_that_it_scrubs(local: Local) -> None:
    ring = local.ring()
    ring.open("t")
    ring.tensor(np.ones(PAGE, np.uint8))
    copy = Copy(local)
    copy.first()
    local.device.function_reset()
    copy.round()
    assert bytes(copy.memory) == bytes(len(copy.memory))


def test_what_was_written_to_ram_arrives_at_the_destination(pair: tuple[Local, Local]) -> None:
    """QEMU does not see the device's writes: its copy of the RAM is stale."""
    source, target = pair
    ring = source.ring()
    ring.open("t")
    x = ring.tensor(np.arange(5000, dtype=np.float32))
    copy = Copy(source)
    copy.first()
    target.ram[:] = source.ram[:]
    out = ring.read(x, "float32", (5000,))
    assert out[4999] == 4999
    assert target.ram[:] != source.ram[:]
    _, facts = loaded(target, copy.stop())
    assert target.ram[:] == source.ram[:]
    assert facts["ram_bytes"] == 5 * PAGE


def test_ram_of_two_files_of_a_size_is_told_apart(pair: tuple[Local, Local]) -> None:
    source, target = pair
    files = {}
    for local, order in ((source, (0, 1)), (target, (1, 0))):
        for which in order:  # the same addresses, mapped in another order
            fd = memfd(f"cell{which}", MIB)
            local.map(0x4000_0000 + which * MIB, MIB, fd)
            files[local, which] = fd
    ring = source.ring()
    ring.open("t")
    x = ring.tensor(np.full(PAGE, 7, np.uint8))
    copy = Copy(source)
    copy.first()
    ring.ok(abi.copy_out, x, 0, abi.Memory(abi.Space.GUEST, 0, 0x4000_0000 + MIB, PAGE, 0))
    loaded(target, copy.stop())
    assert os.pread(files[target, 1], PAGE, 0) == b"\7" * PAGE
    assert os.pread(files[target, 0], PAGE, 0) == bytes(PAGE)


def test_a_file_that_was_unmapped_meanwhile_is_shipped_all_the_same(local: Local) -> None:
    fd = memfd("cell", MIB)
    local.map(0x4000_0000, MIB, fd)
    ring = local.ring()
    ring.open("t")
    x = ring.tensor(np.full(PAGE, 7, np.uint8))
    copy = Copy(local)
    copy.first()
    ring.ok(abi.copy_out, x, 0, abi.Memory(abi.Space.GUEST, 0, 0x4000_0000, PAGE, 0))
    local.device.dma_unmap(0x4000_0000, MIB, 0)
    ram_fd = copy.stop()[3]
    assert b"\7" * PAGE in os.pread(ram_fd, os.fstat(ram_fd).st_size, 0)


def test_another_vms_ram_is_refused(pair: tuple[Local, Local]) -> None:
    source, target = pair
    source.map(0x4000_0000, MIB, memfd("more", MIB))
    copy = Copy(source)
    copy.first()
    fds = copy.stop()
    with pytest.raises(Refusal, match="at the source"):
        loaded(target, fds)
    assert target.device.migration.machine.state is MigState.ERROR


def test_a_damaged_piece_of_ram_is_refused_whatever_the_damage(
    pair: tuple[Local, Local],
) -> None:
    source, target = pair
    ring = source.ring()
    ring.open("t")
    x = ring.tensor(np.ones(3 * PAGE, np.uint8))
    copy = Copy(source)
    copy.first()
    ring.read(x, "uint8", (3 * PAGE,))
    fd = copy.stop()[3]
    whole = os.pread(fd, os.fstat(fd).st_size, 0)
    head = len(whole) - 3 * PAGE
    before = target.ram[:]
    refused = 0
    for at in range(head):
        damaged = filled(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
        try:
            ram.load(target.device, damaged)
        except Refusal:
            refused += 1
            assert target.ram[:] == before
        finally:
            os.close(damaged)
        target.ram[:] = before
    assert refused >= head // 2  # the rest is samples that nobody needed, and lower bits of runs
    for size in (0, 1, 7, head - 1, len(whole) - 1):
        with pytest.raises(Refusal):
            ram.load(target.device, filled(whole[:size] or b"\0"))


@pytest.mark.parametrize("which", ["memory", "window", "state"])
def test_a_byte_that_changes_after_the_load_is_found_by_reading_back(
    pair: tuple[Local, Local], which: str
) -> None:
    source, target = pair
    source.ring().open("t")
    copy = Copy(source)
    copy.first()
    fds = copy.stop()
    expected = copy.moving.digests()
    moving, _ = loaded(target, fds)
    rng = np.random.default_rng(3)
    view = {
        "memory": target.device.memory.view,
        "window": target.window,
        "state": target.state.u8[s.REGS_AT + 64 : s.DIGEST_END],
    }[which]
    for at in rng.integers(0, len(view), 40):
        view[at] ^= 1 << int(at) % 8
        assert moving.digests()[which] != expected[which]
        view[at] ^= 1 << int(at) % 8
    assert moving.digests()[which] == expected[which]


def contradiction(source: Local, fds: list[int], word: int, value: int) -> None:
    """Change a word of the state section that is about to be loaded."""
    os.pwrite(fds[0], value.to_bytes(4, "little"), word * 4 - s.PCI_AT)


def test_a_queue_that_completed_more_than_it_published_is_refused(
    pair: tuple[Local, Local],
) -> None:
    source, target = pair
    source.ring().open("t")
    fds = Copy(source).stop()
    contradiction(source, fds, s.queue_word(0) + s.Q_DONE, 7)
    with pytest.raises(Refusal, match=r"its rings say|commands of"):
        loaded(target, fds)
    assert target.device.migration.machine.state is MigState.RESUMING, "nothing was touched"


def test_a_command_both_complete_and_in_flight_is_refused(pair: tuple[Local, Local]) -> None:
    source, target = pair
    source.ring().open("t")
    fds = Copy(source).stop()
    contradiction(source, fds, s.cursor_word(0) + s.C_PHASE, s.PHASE_RUNNING)
    contradiction(source, fds, s.cursor_word(0) + s.C_INDEX, 0)
    with pytest.raises(Refusal, match="works on number 0"):
        loaded(target, fds)


def test_a_tail_beyond_its_ring_stops_the_queue_at_the_source(pair: tuple[Local, Local]) -> None:
    """A guest cannot keep its function from moving by writing nonsense into its window."""
    source, target = pair
    ring = source.ring()
    ring.open("t")
    copy = Copy(source)
    copy.moving.fence(True)
    ring.words[(ring.control + SQ_TAIL) // 4] += 5000
    ring.words[(ring.control + CQ_TAIL) // 4] = 12345
    loaded(target, copy.stop())
    assert target.read32(Reg.QUEUE + QueueReg.STATUS) == QueueStatus.FAULTED


@pytest.mark.parametrize("index", range(3))
def test_a_section_of_another_size_is_refused(pair: tuple[Local, Local], index: int) -> None:
    source, target = pair
    fds = Copy(source).stop()
    fds[index] = memfd("short", PAGE)
    with pytest.raises(Refusal, match="another size"):
        loaded(target, fds)


def test_load_wants_a_device_that_is_resuming(pair: tuple[Local, Local]) -> None:
    source, target = pair
    fds = Copy(source).stop()
    with pytest.raises(Refusal, match="not RESUMING"):
        Moving(target.device, target._tell).load(fds)
    with pytest.raises(UsageError):
        Moving(target.device, target._tell).load(fds[:2])


def test_a_fenced_function_stays_still_through_a_reset(local: Local) -> None:
    moving = Moving(local.device, local._tell)
    moving.fence(True)
    local.device.reset()
    assert local.state.u32[s.R_FREEZE] & s.FREEZE_FENCED
    moving.fence(False)
    local.ring().open("t")


def test_an_interrupt_that_was_pending_is_raised_once_more(local: Local) -> None:
    sent: list[int] = []
    local.device.interrupts._send = sent.append
    local.device.interrupts._fd = 1
    local.device.interrupts.set_cause(Interrupt.COMPLETION)
    moving = Moving(local.device, local._tell)
    moving.fence(True)
    assert len(sent) == 1
    moving.fence(False)
    assert len(sent) == 2
    moving.moved()
    assert local.read32(Reg.INTERRUPT_CAUSE) & Interrupt.MOVED


def test_the_holder_is_given_the_new_memory_before_it_is_used(pair: tuple[Local, Local]) -> None:
    source, target = pair
    fds = Copy(source).stop()
    target.told.clear()
    loaded(target, fds)
    assert [unpack(data)[0] for data, count in target.told if count] == [MEMORY]


def test_a_worker_that_dies_in_the_middle_of_a_load_leaves_nothing_to_be_believed(
    pair: tuple[Local, Local],
) -> None:
    source, target = pair
    source.ring().open("t")
    fds = Copy(source).stop()

    def dies() -> None:
        raise KeyboardInterrupt

    moving = Moving(target.device, target._tell)
    moving.walk("RESUMING")
    target.device.reload = dies  # type: ignore[assignment, method-assign]
    with pytest.raises(KeyboardInterrupt):
        moving.load(fds)
    target.restart()
    assert target.device.migration.machine.state is MigState.ERROR
    assert not target.state.u32[s.queue_word(0)]


def test_section_digests_leave_out_what_belongs_to_the_process() -> None:
    section = bytearray(SECTION_BYTES)
    struct.pack_into("<I", section, s.R_FREEZE * 4 - s.PCI_AT, 8)
    struct.pack_into("<I", section, s.R_EPOCH * 4 - s.PCI_AT, 3)
    assert normal(section) == bytes(SECTION_BYTES)


def test_firmware_names_what_decides_about_bits() -> None:
    assert {"abi", "state", "version", "numpy", "blas", "core"} <= firmware().keys()


# --- sums and marks, against plain twins ----------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 3))
def test_page_sums_equal_plain_sums(seed: int, pages: int, threads: int) -> None:
    raw = np.random.default_rng(seed).bytes(pages * PAGE)
    sums = digest.all_sums(memoryview(raw), [(0, len(raw))], threads)
    for page in range(len(raw) // PAGE):
        words = struct.unpack_from("<512Q", raw, page * PAGE)
        assert sums[page] == sum(words) & (1 << 64) - 1


def test_sums_of_holes_are_those_of_zeros() -> None:
    fd = memfd("holes", 64 * MIB)
    os.pwrite(fd, b"x", 40 * MIB)
    with mmap.mmap(fd, 64 * MIB) as mapped, memoryview(mapped) as view:
        ranges = data_ranges(fd, 0, 64 * MIB)
        assert ranges == [(40 * MIB, 40 * MIB + PAGE)]
        with_holes = digest.all_sums(view, ranges)
        whole = digest.all_sums(view, [(0, 64 * MIB)])
        assert digest.memory_digest(with_holes) == digest.memory_digest(whole)


@given(st.lists(st.booleans(), max_size=200))
def test_runs_cover_exactly_the_marks(marks: list[bool]) -> None:
    array = np.array(marks, np.uint8)
    covered = [page for first, count in runs_of(array) for page in range(first, first + count)]
    assert covered == [page for page, mark in enumerate(marks) if mark]


def test_a_file_too_large_to_track_is_not_written() -> None:
    state = s.State(memfd("state", s.STATE_BYTES))
    track = Track(state, memfd("track", s.TRACK_BYTES), MIB)
    assert track.file(0, 1 << 50, 1), "only while tracking"
    track.start()
    assert not track.file(0, 1 << 50, 1)
    assert track.file(127, 0, 1)
    assert track.slots() == [127]
    assert track.runs(127) == [(0, 1)]
