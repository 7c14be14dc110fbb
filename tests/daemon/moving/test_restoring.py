"""What is left when the daemon is killed, or a load fails, at each step: old state or new."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.saving import DomainSaves
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, FrameRefused, StateError
from accelvisor.frames.manifest import Model
from accelvisor.limits import MIB
from tests.daemon.moving.resting import (
    DOMAIN,
    Host,
    N,
    Vm,
    computes,
    describe,
)
from tests.function.harness import Guest, Process, call

CREATE = ("begun", "copied", "frozen", "thawed", "written", "kept")
OLD = ("verified", "begun", "frozen", "kept")
NEW = ("loaded", "going")


def killed(here: Host, step: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Do ``work`` in a daemon of its own that is killed after ``step``."""
    here.stop()
    pid = os.fork()
    if pid == 0:
        try:
            here.start()
            here.on_step = lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == step else None
            asyncio.run(work())
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"{step} was not come to"
    here.functions.held.clear()
    here.start()


def memory(process: Process) -> str:
    return str(call(process.spec.control_socket, "digests")["memory"])


@pytest.mark.parametrize("step", CREATE)
def test_a_kill_while_one_is_taken_leaves_it_or_nothing_and_a_function_that_computes(
    here: Host, one: tuple[Process, Function], step: str
) -> None:
    process, found = one
    with Guest(process) as guest:
        vm = Vm(guest)
        y, want = vm.busy(3000)
        killed(here, f"checkpoint:{step}", lambda: here.points.create(found.uuid, label="a"))
        asyncio.run(here.points.recover())
        assert computes(process)
        assert here.files() == ([f"{found.uuid}/a.xckp"] if step == "kept" else [])
        assert vm.result(y) == want
        if step == "kept":
            assert asyncio.run(here.points.verify("a")).verified
        entry = asyncio.run(here.points.create(found.uuid, label="b"))
        assert here.shelf.head(entry.name).manifest.sequence == (2 if step == "kept" else 1)
        asyncio.run(here.points.restore("b"))


@pytest.mark.parametrize("step", OLD + NEW)
def test_a_kill_while_one_is_restored_leaves_the_old_state_or_the_new(
    here: Host, one: tuple[Process, Function], step: str
) -> None:
    process, found = one
    with Guest(process) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.full(N, 1, np.float32))
        entry = asyncio.run(here.points.create(found.uuid))
        new = memory(process)
        vm.ring.write(y, np.full(N, 2, np.float32))
        old = memory(process)
        killed(here, f"restore:{step}", lambda: here.points.restore(entry.name))
        asyncio.run(here.points.recover())
        assert computes(process)
        assert memory(process) == (new if step in NEW else old)
        if step in OLD:
            assert (vm.ring.read(y, "float32", (N,)) == 2).all(), "it does not go on"
        asyncio.run(here.points.restore(entry.name))
        assert memory(process) == new


def test_a_load_that_reads_back_differently_leaves_the_old_state(
    here: Host, one: tuple[Process, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Guest(one[0]) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.full(N, 1, np.float32))
        entry = asyncio.run(here.points.create(one[1].uuid))
        vm.ring.write(y, np.full(N, 2, np.float32))

        def differs(*_: object) -> None:
            raise StateError("it reads back differently", code="status-digest")

        monkeypatch.setattr(documents, "validate", differs)
        with pytest.raises(StateError):
            asyncio.run(here.points.restore(entry.name))
        assert computes(one[0])
        assert (vm.ring.read(y, "float32", (N,)) == 2).all()
        assert asyncio.run(here.points.create(one[1].uuid)).name.endswith("1.2")


def test_a_state_that_the_function_refuses_leaves_the_old_one(
    here: Host, one: tuple[Process, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed by this host, and still nonsense: rings that contradict the registers."""
    from accelvisor.daemon.moving.lent import Lent

    good = Lent.section
    with Guest(one[0]) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.full(N, 1, np.float32))
        monkeypatch.setattr(Lent, "section", lambda self: b"\xff" * len(good(self)))
        entry = asyncio.run(here.points.create(one[1].uuid))
        monkeypatch.setattr(Lent, "section", good)
        with pytest.raises(AccelvisorError):
            asyncio.run(here.points.restore(entry.name))
        assert computes(one[0])
        assert (vm.ring.read(y, "float32", (N,)) == 1).all()


def test_pages_of_another_vms_memory_leave_the_old_state(
    here: Host, one: tuple[Process, Function]
) -> None:
    """The load fails after device memory and registers were replaced."""
    process, found = one
    saves = DomainSaves(here.points, here.domain_state)
    with Guest(process, ram_bytes=16 * MIB) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.full(N, 1, np.float32))
        asyncio.run(saves.watch(DOMAIN))
        assert (vm.ring.read(y, "float32", (N,)) == 1).all()  # the device writes to the VM's memory
        asyncio.run(saves.save_for_domain(DOMAIN))
    with Guest(process) as guest:
        asyncio.run(saves.resumed(DOMAIN))
        vm = Vm(guest)
        y = vm.ring.tensor(np.full(N, 2, np.float32))
        with pytest.raises(AccelvisorError):
            asyncio.run(here.points.restore(f"{found.uuid}/save-1.1"))
        assert computes(process), describe(process)
        assert (vm.ring.read(y, "float32", (N,)) == 2).all()


def test_a_lost_mark_leaves_the_old_state(here: Host, one: tuple[Process, Function]) -> None:
    model = Model(model="m", key="0" * 32, digest=bytes(32))
    here.watermarks.models = [model]
    with Guest(one[0]) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.full(N, 1, np.float32))
        entry = asyncio.run(here.points.create(one[1].uuid))
        assert here.shelf.head(entry.name).manifest.models == (model,)
        vm.ring.write(y, np.full(N, 2, np.float32))
        here.watermarks.refusal = StateError("no mark", code="status-watermark")
        with pytest.raises(StateError):
            asyncio.run(here.points.restore(entry.name))
        assert (vm.ring.read(y, "float32", (N,)) == 2).all()


def test_a_worker_that_dies_while_it_is_frozen_is_let_go_on(
    here: Host, one: tuple[Process, Function]
) -> None:
    process, found = one
    with Guest(process) as guest:
        vm = Vm(guest)
        y, want = vm.busy(2000)
        here.on_step = lambda step: process.kill_worker() if step == "checkpoint:frozen" else None
        try:
            asyncio.run(here.points.create(found.uuid))
        except AccelvisorError:
            assert here.files() == []
        assert computes(process)
        assert vm.result(y) == want


def test_a_load_that_was_killed_by_half_stands_still_and_says_so(
    here: Host, one: tuple[Process, Function]
) -> None:
    process, found = one
    entry = asyncio.run(here.points.create(found.uuid))
    killed(here, "restore:loaded", lambda: here.points.restore(entry.name))
    # What was loaded is another state than the one that was wanted.
    begun = here.numbers.begun()[0]
    here.numbers.begin(begun.function, begun.what, begun.mark, bytes(32))
    asyncio.run(here.points.recover())
    assert describe(process).fenced
    assert here.kinds() == ["checkpoint-created", "checkpoint-half"]
    asyncio.run(here.points.restore(entry.name))
    assert computes(process)


def test_a_refused_one_is_in_the_audit_trail_before_the_caller_hears_of_it(
    here: Host, one: tuple[Process, Function]
) -> None:
    entry = asyncio.run(here.points.create(one[1].uuid))
    path = here.root / "checkpoints" / f"{entry.name}.xckp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(entry.name))
    assert here.audited() == [caught.value.code]


def test_restoring_again_and_again_keeps_no_old_memory(
    here: Host, one: tuple[Process, Function]
) -> None:
    process, found = one
    entry = asyncio.run(here.points.create(found.uuid))

    def held() -> tuple[int, int]:
        holder = call(process.spec.holder_socket, "status")["open_descriptors"]
        return holder, call(process.spec.control_socket, "status")["open_descriptors"]

    asyncio.run(here.points.restore(entry.name))
    before = held()
    for _ in range(3):
        asyncio.run(here.points.restore(entry.name))
    assert held() == before
