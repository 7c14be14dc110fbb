"""A VM's functions saved and restored with it: what QEMU, libvirt and the hook make of it is played
by the in-tree client.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.registers import Interrupt, Reg
from accelvisor.daemon.moving.saving import DomainSaves, FileToken, read_token
from accelvisor.daemon.store import Function
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DataError,
    FrameRefused,
    NotFoundError,
    StateError,
)
from accelvisor.function.pci import MSI_AT
from tests.daemon.moving.resting import (
    DOMAIN,
    Host,
    KilledError,
    N,
    Vm,
    computes,
    describe,
    function,
    host,
    moved_ring,
)
from tests.function.harness import Guest, Process, call


class Pair:
    """A VM with two functions."""

    def __init__(self, here: Host, processes: list[Process]) -> None:
        self.here, self.processes = here, processes
        self.saves = DomainSaves(here.points, here.domain_state)

    def run(self, verb: Any) -> Any:
        return asyncio.run(verb)

    def save(self) -> bytes:
        """What the daemon does when libvirt stops the VM and QEMU asks."""
        self.run(self.saves.watch(DOMAIN))
        return bytes(self.run(self.saves.save_for_domain(DOMAIN)))

    def uuids(self) -> list[str]:
        return sorted(process.spec.uuid for process in self.processes)


@contextmanager
def pair(root: Path, count: int = 2) -> Iterator[Pair]:
    with host(root) as here, ExitStack() as stack:
        processes = [stack.enter_context(function(here))[0] for _ in range(count)]
        yield Pair(here, processes)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Pair]:
    with pair(tmp_path / "here") as made:
        yield made


@pytest.fixture
def single(tmp_path: Path) -> Iterator[Pair]:
    with pair(tmp_path / "here", 1) as made:
        yield made


def again(process: Process, old: Vm, memory: dict[str, Any]) -> Vm:
    """The VM in a new QEMU, its memory restored."""
    vm = Vm.__new__(Vm)
    vm.guest = Guest(process)
    vm.ring = moved_ring(old.ring, vm.guest)
    vm.back(memory)
    return vm


def test_two_functions_in_the_middle_end_with_the_same_bits_after_save_and_restore(
    two: Pair,
) -> None:
    works = []
    with ExitStack() as stack:
        for process in two.processes:
            vm = Vm(stack.enter_context(Guest(process)))
            works.append((vm, *vm.busy(3000)))
        token = two.save()
        assert not any(vm.ring.ready() for vm, _, _ in works), "it was over before it was saved"
        memories = [vm.remember() for vm, _, _ in works]
        assert not any(map(computes, two.processes))
    # QEMU is gone; the daemon may have been restarted; a new QEMU comes.
    two.here.restart()
    two.saves = DomainSaves(two.here.points, two.here.domain_state)
    new = [again(p, w[0], m) for p, w, m in zip(two.processes, works, memories, strict=True)]
    contexts = two.run(two.saves.context_for_domain(DOMAIN))
    assert sorted(contexts) == two.uuids()
    two.run(two.saves.load_for_domain(DOMAIN, token))
    assert not any(vm.ring.ready() for vm in new)
    assert not any(map(computes, two.processes))
    two.run(two.saves.resumed(DOMAIN))
    for vm, (_, y, want) in zip(new, works, strict=True):
        assert vm.result(y) == want
        assert vm.guest.read32(Reg.INTERRUPT_CAUSE) & Interrupt.MOVED
        vm.guest.close()
    assert not any(describe(process).tracking for process in two.processes)
    assert two.here.audited() == []


def test_what_the_device_wrote_to_the_vms_memory_after_that_was_copied_is_not_lost(
    single: Pair,
) -> None:
    process = single.processes[0]
    with Guest(process) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.full(N, 5, np.float32))
        target = guest.buffer(bytes(4 * N))
        memory = vm.remember()  # QEMU copies the memory now
        single.run(single.saves.watch(DOMAIN))
        vm.ring.ok(abi.copy_out, y, 0, target.whole(4 * N))
        memory.update(tail=vm.ring.tail, head=vm.ring.head, cookie=vm.ring.cookie)
        at = target.address
        token = single.run(single.saves.save_for_domain(DOMAIN))
        vm.back(memory)
        assert not any(target.view[: 4 * N])
        single.run(single.saves.load_for_domain(DOMAIN, token))
        single.run(single.saves.resumed(DOMAIN))
        assert (np.frombuffer(bytes(target.view[: 4 * N]), np.float32) == 5).all(), at


def test_a_snapshot_goes_on_where_it_was(single: Pair) -> None:
    with Guest(single.processes[0]) as guest:
        vm = Vm(guest)
        y, want = vm.busy(2000)
        single.save()
        single.run(single.saves.resumed(DOMAIN))
        assert vm.result(y) == want
        assert not guest.read32(Reg.INTERRUPT_CAUSE) & Interrupt.MOVED


def test_a_vm_that_begins_anew_instead_of_being_restored_has_a_function_that_computes(
    single: Pair,
) -> None:
    with Guest(single.processes[0]) as guest:
        Vm(guest)
        single.save()
    with Guest(single.processes[0]) as guest:
        single.run(single.saves.resumed(DOMAIN))
        vm = Vm(guest)
        assert vm.result(vm.busy(2)[0])


def test_without_knowing_what_was_written_nothing_is_saved(single: Pair) -> None:
    with pytest.raises(ConflictError) as caught:
        single.run(single.saves.save_for_domain(DOMAIN))
    assert caught.value.code == "save-untracked"
    assert computes(single.processes[0])
    assert single.here.files() == []


def test_one_function_that_cannot_be_saved_leaves_both_as_they_were(two: Pair) -> None:
    def full(step: str) -> None:
        if step == "checkpoint:kept":
            two.here.shelf.require_room = refuse  # type: ignore[method-assign]

    def refuse(nbytes: int) -> None:
        raise ConflictError("full", code="checkpoint-space")

    two.here.on_step = full
    with pytest.raises(ConflictError) as caught:
        two.save()
    assert caught.value.code == "checkpoint-space"
    assert two.here.files() == []
    assert all(map(computes, two.processes))
    assert not any(describe(process).tracking for process in two.processes)


def test_a_killed_save_leaves_no_half_file_and_a_vm_that_goes_on(two: Pair) -> None:
    for step in ("save:frozen", "checkpoint:written", "checkpoint:kept"):
        two.here.kill_at = step
        with pytest.raises(KilledError):
            two.save()
        two.here.kill_at = ""
        two.here.restart()
        two.saves = DomainSaves(two.here.points, two.here.domain_state)
        two.here.domains[DOMAIN] = "running"
        two.run(two.here.points.recover())
        two.run(two.saves.recover())
        assert all(map(computes, two.processes)), step
        for report in [two.run(two.here.points.verify(e.name)) for e in two.here.shelf.list()]:
            assert report.verified
        assert not [name for name in two.here.files() if not name.endswith(".xckp")]


def test_an_older_image_is_its_operators_decision_and_is_recorded(single: Pair) -> None:
    process = single.processes[0]
    with Guest(process) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.full(N, 1, np.float32))
        token, memory = single.save(), vm.remember()
        single.run(single.saves.resumed(DOMAIN))
        vm.ring.write(y, np.full(N, 2, np.float32))
        single.save()
        for _ in range(2):
            vm.back(memory)
            single.run(single.saves.load_for_domain(DOMAIN, token))
            single.run(single.saves.resumed(DOMAIN))
            assert (vm.ring.read(y, "float32", (N,)) == 1).all()
    assert single.here.audited() == ["rollback", "rollback"]
    assert single.here.kinds().count("checkpoint-rollback") == 2


def test_tokens_that_do_not_fit_are_refused(two: Pair) -> None:
    token = two.save()
    parts = read_token(token)
    assert parts is not None
    assert read_token(token[:-1]) is None

    def refused(data: bytes) -> str:
        with pytest.raises(AccelvisorError) as caught:
            two.run(two.saves.load_for_domain(DOMAIN, data))
        assert not any(map(computes, two.processes))
        return caught.value.code

    first, second = two.uuids()
    assert refused(b"nonsense") == "token"
    assert refused(FileToken(2, "file", parts.parts).encode()) == "token"
    assert refused(FileToken(1, "file", {first: parts.parts[first]}).encode()) == "save-functions"
    swapped = {first: parts.parts[second], second: parts.parts[first]}
    assert refused(FileToken(1, "file", swapped).encode()) == "checkpoint-not-found"
    assert "restore:frozen" not in two.here.steps


def test_a_changed_file_is_refused_before_any_function_is_loaded(two: Pair) -> None:
    token = two.save()
    entry = sorted(two.here.shelf.list(), key=lambda e: e.function)[1]
    path = two.here.root / "checkpoints" / f"{entry.name}.xckp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FrameRefused):
        two.run(two.saves.context_for_domain(DOMAIN))
    with pytest.raises(FrameRefused):
        two.run(two.saves.load_for_domain(DOMAIN, token))
    assert "restore:frozen" not in two.here.steps
    with pytest.raises(DataError):
        two.run(two.saves.load_for_domain(DOMAIN, b""))
    path.unlink()
    with pytest.raises(NotFoundError):
        two.run(two.saves.load_for_domain(DOMAIN, token))


def test_a_lost_mark_refuses_the_load(single: Pair) -> None:
    with Guest(single.processes[0]) as guest:
        Vm(guest)
        token = single.save()
        single.here.watermarks.refusal = StateError("no mark", code="status-watermark")
        with pytest.raises(StateError):
            single.run(single.saves.load_for_domain(DOMAIN, token))
        assert not computes(single.processes[0])


def test_a_function_that_moves_is_left_alone(single: Pair) -> None:
    single.run(single.saves.watch(DOMAIN))
    single.here.functions.held.update(single.uuids())
    with pytest.raises(ConflictError) as caught:
        single.run(single.saves.save_for_domain(DOMAIN))
    assert caught.value.code == "function-moving"
    call(single.processes[0].spec.control_socket, "fence", {"on": True})
    single.run(single.saves.resumed(DOMAIN))
    assert describe(single.processes[0]).fenced


def test_a_move_that_begins_before_its_vms_resume_is_dealt_with_is_left_alone(single: Pair) -> None:
    """As while a checkpoint is written."""
    here, control = single.here, single.processes[0].spec.control_socket
    (uuid,) = single.uuids()

    async def body() -> None:
        lock = here.points.locks[uuid]
        async with lock, asyncio.timeout(10):
            resumed = asyncio.ensure_future(single.saves.resumed(DOMAIN))
            while not lock._waiters:
                await asyncio.sleep(0)
            here.functions.held.add(uuid)
            call(control, "fence", {"on": True})
            call(control, "track", {"on": True})
        await resumed

    single.run(body())
    said = describe(single.processes[0])
    assert (said.fenced, said.tracking) == (True, True)
    assert uuid in here.functions.held


def test_no_move_begins_while_a_function_goes_on(
    single: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[set[str]] = []
    go_on = single.saves._go_on

    def watched(function: Function) -> None:
        held.append(set(single.here.functions.held))
        go_on(function)

    monkeypatch.setattr(single.saves, "_go_on", watched)
    single.run(single.saves.resumed(DOMAIN))
    assert held == [set(single.uuids())]
    assert not single.here.functions.held


def test_after_a_load_the_context_is_that_of_the_loaded_functions_alone(two: Pair) -> None:
    with ExitStack() as stack:
        for process in two.processes:
            stack.enter_context(Guest(process))
        token = two.save()
        first, second = two.uuids()
        assert two.run(two.saves.loaded_contexts(DOMAIN)) == {}
        two.run(two.saves.load_for_domain(DOMAIN, token))
        found = two.run(two.saves.loaded_contexts(DOMAIN))
        assert sorted(found) == [first, second]
        two.run(two.saves.require_contexts(DOMAIN, found))
        two.run(two.saves.resumed(DOMAIN))
        assert two.run(two.saves.loaded_contexts(DOMAIN)) == {}


def test_a_qemu_that_did_not_take_over_the_interrupt_is_refused(single: Pair) -> None:
    process = single.processes[0]
    with Guest(process) as guest:
        token = single.save()
        single.run(single.saves.load_for_domain(DOMAIN, token))
        found = single.run(single.saves.loaded_contexts(DOMAIN))
        (config,) = found.values()
        changed = bytearray(config)
        changed[MSI_AT + 2] |= 1
        struct.pack_into("<I", changed, MSI_AT + 4, 0xFEE0_1000)
        with pytest.raises(StateError) as caught:
            single.run(single.saves.require_contexts(DOMAIN, {process.spec.uuid: bytes(changed)}))
        assert caught.value.code == "status-context"
        guest.close()


def test_a_save_that_nobody_waits_for_any_more_leaves_nothing_and_no_move_begins_before_its_end(
    single: Pair,
) -> None:
    saves = single.saves
    held: list[set[str]] = []

    async def body() -> None:
        await saves.watch(DOMAIN)
        asked = asyncio.ensure_future(saves.save_for_domain(DOMAIN))
        loop = asyncio.get_running_loop()
        frozen = asyncio.Event()

        def step(name: str) -> None:
            held.append(set(single.here.functions.held))
            loop.call_soon_threadsafe(frozen.set)

        single.here.on_step = step
        await frozen.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        # The VM goes on: that waits for the save's end.
        await saves.resumed(DOMAIN)

    single.run(body())
    assert single.here.files() == []
    assert computes(single.processes[0])
    assert len(held) > 1
    assert all(them == set(single.uuids()) for them in held)
    assert not single.here.functions.held


def test_a_token_that_qemu_did_not_take_is_deleted(two: Pair) -> None:
    token = two.save()
    assert len(two.here.files()) == 2
    two.run(two.saves.drop(token))
    assert two.here.files() == []
    two.run(two.saves.drop(token))
    assert two.here.kinds().count("checkpoint-deleted") == 2


def test_whoever_is_refused_is_told_why_in_an_event(single: Pair) -> None:
    with pytest.raises(ConflictError):
        single.run(single.saves.save_for_domain(DOMAIN))
    with pytest.raises(DataError):
        single.run(single.saves.load_for_domain(DOMAIN, b""))
    told = {kind: text for kind, _, text in single.here.events}
    assert "(save-untracked)" in told["save-refused"]
    assert "(token)" in told["restore-refused"]
