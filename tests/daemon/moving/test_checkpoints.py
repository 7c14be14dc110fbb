"""Taking, keeping, looking at and restoring, with real function processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.daemon.moving import documents
from accelvisor.daemon.store import Function
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    FrameRefused,
    NotFoundError,
    StateError,
    UsageError,
)
from accelvisor.frames.chunks import RECORD
from accelvisor.frames.container import AREA_BYTES, HEAD
from accelvisor.limits import LIMITS, MIB
from tests.daemon.moving.resting import (
    DOMAIN,
    SECOND,
    Host,
    N,
    Vm,
    computes,
    create,
    describe,
    function,
)
from tests.descriptors import open_fds
from tests.function.harness import Guest, Process, call, running

#: In the payload of a file's first chunk.
PAYLOAD = HEAD.size + AREA_BYTES + RECORD.size + 5


def code(caught: pytest.ExceptionInfo[AccelvisorError]) -> str:
    return caught.value.code


# --- a whole one ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"zstd": True}, {"seal": True}])
def test_a_program_in_the_middle_ends_with_the_same_bits_after_a_restore(
    here: Host, one: tuple[Process, Function], options: dict[str, Any]
) -> None:
    process, found = one
    if options.pop("seal", False):
        options["seal_for"] = str(here.uuid)
    with Guest(process) as guest:
        vm = Vm(guest)
        y, want = vm.busy(4000)
        memory = vm.remember()
        ended = {}
        here.on_step = lambda step: ended.setdefault(step, bool(vm.ring.ready()))
        entry = create(here, found, **options)
        assert not ended["checkpoint:frozen"], "it was over before it was frozen"
        assert computes(process)
        assert vm.result(y) == want, "the checkpoint changed what went on"
        vm.ring.write(y, np.full(N, 7, np.float32))
        asyncio.run(here.points.restore(entry.name))
        vm.back(memory)
        assert vm.result(y) == want
        assert here.kinds() == ["checkpoint-created", "checkpoint-restored"]
        assert here.audited() == []


def test_the_guest_is_told_that_its_function_is_another_one(
    here: Host, one: tuple[Process, Function]
) -> None:
    from accelvisor.abi.registers import Interrupt, Reg

    with Guest(one[0]) as guest:
        vm = Vm(guest)
        entry = create(here, one[1])
        asyncio.run(here.points.restore(entry.name))
        assert guest.read32(Reg.INTERRUPT_CAUSE) & Interrupt.MOVED
        assert vm.ring.entries


def test_files_are_readable_by_the_daemon_alone(here: Host, one: tuple[Process, Function]) -> None:
    entry = create(here, one[1], label="first")
    path = here.root / "checkpoints" / f"{entry.name}.xckp"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700
    assert here.files() == [f"{one[1].uuid}/first.xckp"]
    assert entry.pinned
    assert entry.size == path.stat().st_size


def test_holes_of_device_memory_take_no_room(here: Host, one: tuple[Process, Function]) -> None:
    assert create(here, one[1]).size < 2 * MIB


def test_no_descriptor_and_no_mark_is_left(here: Host, one: tuple[Process, Function]) -> None:
    create(here, one[1])
    before = open_fds()
    create(here, one[1])
    entry = create(here, one[1], follow=True)
    create(here, one[1])
    asyncio.run(here.points.restore(create(here, one[1]).name))
    with pytest.raises(FrameRefused):
        asyncio.run(here.points.restore(entry.name))
    assert open_fds() == before
    assert not describe(one[0]).tracking


def test_function_frame_alone_is_taken_without_a_stop_and_restores_nothing(
    here: Host, one: tuple[Process, Function]
) -> None:
    entry = create(here, one[1], frames="function")
    assert "checkpoint:frozen" not in here.steps
    shown = asyncio.run(here.points.show(entry.name))
    assert shown.frame is not None
    assert shown.frame.function == one[1].uuid
    assert shown.status is None
    with pytest.raises(ConflictError) as caught:
        asyncio.run(here.points.restore(entry.name))
    assert code(caught) == "checkpoint-partial"
    assert computes(one[0])


def test_status_frame_alone_restores(here: Host, one: tuple[Process, Function]) -> None:
    with Guest(one[0]) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.ones(N, np.float32))
        memory = vm.remember()
        entry = create(here, one[1], frames="status")
        vm.ring.write(y, np.zeros(N, np.float32))
        asyncio.run(here.points.restore(entry.name))
        vm.back(memory)
        assert vm.ring.read(y, "float32", (N,)).tobytes() == np.ones(N, np.float32).tobytes()


def test_show_tells_the_frames_of_a_verified_one_and_nothing_of_a_changed_one(
    here: Host, one: tuple[Process, Function]
) -> None:
    entry = create(here, one[1])
    shown = asyncio.run(here.points.show(entry.name))
    assert shown.report.verified
    assert shown.frame is not None
    assert shown.status is not None
    assert shown.report.manifest is not None
    assert documents.status_digest(shown.status.digests) == shown.report.manifest.digest
    path = here.root / "checkpoints" / f"{entry.name}.xckp"
    data = bytearray(path.read_bytes())
    data[PAYLOAD] ^= 1
    path.write_bytes(data)
    shown = asyncio.run(here.points.show(entry.name))
    assert (shown.report.verified, shown.report.code) == (False, "frame-root")
    assert (shown.frame, shown.status) == (None, None)
    assert shown.report.manifest is not None
    assert [s.result for s in shown.report.steps] == [*["passed"] * 5, "frame-root", "not reached"]


# --- numbers, names, retention --------------------------------------------------------------------


def test_names_that_are_taken_or_impossible_are_refused_before_anything_stops(
    here: Host, one: tuple[Process, Function]
) -> None:
    create(here, one[1], label="a")
    here.steps.clear()
    with pytest.raises(ConflictError):
        create(here, one[1], label="a")
    for label in ("../a", "auto-x", "save-1", "x" * 65, ""):
        with pytest.raises(UsageError):
            create(here, one[1], label=label)
    assert here.steps == []
    with pytest.raises(NotFoundError):
        asyncio.run(here.points.restore("nothing"))


def test_the_last_automatic_ones_are_kept_and_all_that_somebody_asked_for(
    here: Host, one: tuple[Process, Function]
) -> None:
    create(here, one[1], label="mine")
    for _ in range(4):
        create(here, one[1], trigger="timer", keep=2, label="t")
    own = [entry.name.partition("/")[2] for entry in asyncio.run(here.points.list())]
    assert own == ["mine", "auto-1.4-t", "auto-1.5-t"]
    assert here.kinds().count("checkpoint-deleted") == 2


def test_an_older_one_is_a_step_back_that_somebody_must_want(
    here: Host, one: tuple[Process, Function]
) -> None:
    old, new = create(here, one[1]), create(here, one[1])
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(old.name))
    assert (code(caught), caught.value.step) == ("frame-epoch-old", 5)
    assert "restore:frozen" not in here.steps
    asyncio.run(here.points.restore(new.name, rollback=True))
    assert "rollback" not in here.audited(), "it was no step back"
    asyncio.run(here.points.restore(old.name, rollback=True))
    assert here.audited() == ["frame-epoch-old", "rollback"]
    assert here.kinds()[-2:] == ["checkpoint-rollback", "checkpoint-restored"]
    # What comes after it has a higher number than what was given up.
    assert create(here, one[1]).name.endswith("/1.3")
    asyncio.run(here.points.restore(new.name.replace("1.2", "1.3")))


def test_what_was_taken_before_the_function_was_elsewhere_is_old(
    here: Host, one: tuple[Process, Function]
) -> None:
    entry = create(here, one[1])
    here.owners.epochs[one[1].uuid] = 3
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(entry.name))
    assert code(caught) == "frame-epoch-old"
    assert create(here, one[1]).name.endswith("/3.1")


def test_delete_spares_what_another_continues(here: Host, one: tuple[Process, Function]) -> None:
    whole = create(here, one[1], follow=True)
    part = create(here, one[1], parent=whole.digest)
    assert part.parent == whole.digest
    with pytest.raises(ConflictError) as caught:
        asyncio.run(here.points.delete(whole.name))
    assert code(caught) == "checkpoint-needed"
    asyncio.run(here.points.delete(part.name))
    asyncio.run(here.points.delete(whole.name))
    assert here.files() == []


# --- those that continue others -------------------------------------------------------------------


def test_a_chain_holds_only_what_changed_and_restores_to_the_last(
    here: Host, one: tuple[Process, Function]
) -> None:
    with Guest(one[0]) as guest:
        vm = Vm(guest)
        big = vm.ring.tensor(np.random.default_rng(1).integers(1, 255, 8 * MIB).astype(np.uint8))
        small = vm.ring.tensor(np.zeros(N, np.float32))
        gone = vm.ring.tensor(np.full(MIB, 9, np.uint8))
        entry = create(here, one[1], follow=True)
        assert entry.size > 8 * MIB
        for turn in range(1, 4):
            vm.ring.write(small, np.full(N, turn, np.float32))
            if turn == 2:
                vm.ring.ok(abi.tensor_destroy, gone)
            before, entry = entry, create(here, one[1], parent=entry.digest)
            assert entry.parent == before.digest
            assert entry.size < 3 * MIB
        memory = vm.remember()
        want = vm.ring.read(big, "uint8", (8 * MIB,)).tobytes()
        memory = vm.remember()
        entry = create(here, one[1], parent=entry.digest)
        vm.ring.write(small, np.zeros(N, np.float32))
        vm.ring.write(big, np.zeros(8 * MIB, np.uint8))
        asyncio.run(here.points.restore(entry.name))
        vm.back(memory)
        assert vm.ring.read(big, "uint8", (8 * MIB,)).tobytes() == want
        assert (vm.ring.read(small, "float32", (N,)) == 3).all()


def test_a_chain_with_a_missing_or_swapped_link_is_refused(
    here: Host, one: tuple[Process, Function]
) -> None:
    whole = create(here, one[1], follow=True)
    part = create(here, one[1], parent=whole.digest)
    root = here.root / "checkpoints"
    kept = (root / f"{whole.name}.xckp").read_bytes()
    (root / f"{whole.name}.xckp").unlink()
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(part.name))
    assert code(caught) == "frame-parent"
    changed = bytearray(kept)
    changed[PAYLOAD] ^= 1
    (root / f"{whole.name}.xckp").write_bytes(changed)
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(part.name))
    assert code(caught) == "frame-root"
    assert "restore:frozen" not in here.steps


def test_whole_when_the_function_was_reset_moved_or_replaced_meanwhile(
    here: Host, one: tuple[Process, Function]
) -> None:
    process, found = one
    entry = create(here, found, follow=True)
    call(process.spec.control_socket, "reset")
    entry = create(here, found, parent=entry.digest)
    assert entry.parent == b"", "after a reset"
    call(process.spec.control_socket, "track", {"on": False})
    entry = create(here, found, parent=entry.digest)
    assert entry.parent == b"", "after nobody followed it for a while"
    here.owners.epochs[found.uuid] = 5
    entry = create(here, found, parent=entry.digest)
    assert entry.parent == b"", "at another epoch"
    asyncio.run(here.points.restore(entry.name))
    entry = create(here, found, parent=entry.digest)
    assert entry.parent == b"", "after a restore"
    whole = create(here, found)
    assert create(here, found, parent=whole.digest).parent == b"", "it was not followed"
    with Guest(process):
        pass  # a client came, and went
    here.restart()
    assert create(here, found, parent=entry.digest).parent == b"", "after a restart"


def test_a_chain_ends_and_another_begins(here: Host, one: tuple[Process, Function]) -> None:
    entry = create(here, one[1], follow=True)
    parents = []
    for _ in range(LIMITS.checkpoint_chain):
        entry = create(here, one[1], parent=entry.digest)
        parents.append(entry.parent != b"")
    assert parents == [*[True] * (LIMITS.checkpoint_chain - 1), False]


def test_a_worker_that_is_killed_while_it_is_followed_loses_no_change(
    here: Host, one: tuple[Process, Function]
) -> None:
    with Guest(one[0]) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.zeros(N, np.float32))
        entry = create(here, one[1], follow=True)
        vm.ring.write(y, np.ones(N, np.float32))
        one[0].kill_worker()
        vm.ring.write(y, np.full(N, 2, np.float32))
        memory = vm.remember()
        entry = create(here, one[1], parent=entry.digest)
        vm.ring.write(y, np.zeros(N, np.float32))
        asyncio.run(here.points.restore(entry.name))
        vm.back(memory)
        assert (vm.ring.read(y, "float32", (N,)) == 2).all()


# --- who may not ----------------------------------------------------------------------------------


def test_a_function_that_takes_part_in_a_move_is_left_alone(
    here: Host, one: tuple[Process, Function]
) -> None:
    entry = create(here, one[1])
    here.functions.held.add(one[1].uuid)
    for verb in (here.points.create(one[1].uuid), here.points.restore(entry.name)):
        with pytest.raises(ConflictError) as caught:
            asyncio.run(verb)
        assert code(caught) == "function-moving"
    assert here.functions.held == {one[1].uuid}


def test_no_move_begins_while_one_is_taken(here: Host, one: tuple[Process, Function]) -> None:
    seen = {}
    here.on_step = lambda step: seen.setdefault(step, one[1].uuid in here.functions.held)
    create(here, one[1])
    assert seen["checkpoint:copied"]
    assert not seen["checkpoint:written"]


def test_another_hosts_function_is_neither_taken_nor_restored(
    here: Host, one: tuple[Process, Function]
) -> None:
    entry = create(here, one[1])
    here.owners.foreign.add(one[1].uuid)
    for verb in (here.points.create(one[1].uuid), here.points.restore(entry.name)):
        with pytest.raises(ConflictError) as caught:
            asyncio.run(verb)
        assert code(caught) == "ledger-not-owner"
    assert computes(one[0])


def test_a_running_vms_function_is_not_restored(here: Host, one: tuple[Process, Function]) -> None:
    entry = create(here, one[1])
    here.domains[DOMAIN] = "running"
    with Guest(one[0]):
        with pytest.raises(ConflictError) as caught:
            asyncio.run(here.points.restore(entry.name))
        assert code(caught) == "function-in-use"
        assert computes(one[0])
    # The VM is there, and its QEMU is not connected: nobody finds anything under his hands.
    asyncio.run(here.points.restore(entry.name))


def test_a_standing_function_is_not_taken(here: Host, one: tuple[Process, Function]) -> None:
    call(one[0].spec.control_socket, "fence", {"on": True})
    with pytest.raises(ConflictError) as caught:
        create(here, one[1])
    assert code(caught) == "checkpoint-state"
    assert describe(one[0]).fenced, "whoever stopped it lets it go on"
    assert not describe(one[0]).tracking


def test_another_domain_owner_function_or_size_is_refused(
    here: Host, one: tuple[Process, Function]
) -> None:
    entry = create(here, one[1])
    registry = here.functions.registry.functions
    from dataclasses import replace

    registry[one[1].uuid] = replace(one[1], domain_uuid=one[1].uuid)
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(entry.name))
    assert code(caught) == "frame-owner"
    registry[one[1].uuid] = replace(one[1], ring_entries=128)
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(entry.name))
    assert code(caught) == "frame-profile"
    registry[one[1].uuid] = one[1]
    with function(here) as (_, other), pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(entry.name, other.uuid))
    assert code(caught) == "frame-function"
    assert computes(one[0])
    assert here.audited() == ["frame-owner", "frame-profile", "frame-function"]


def test_every_kind_of_damage_reaches_the_caller_and_no_device(
    here: Host, one: tuple[Process, Function], tmp_path: Path
) -> None:
    entry = create(here, one[1])
    path = here.root / "checkpoints" / f"{entry.name}.xckp"
    good = path.read_bytes()
    here.steps.clear()

    def refused(data: bytes) -> str:
        path.write_bytes(data)
        with pytest.raises(AccelvisorError) as caught:
            asyncio.run(here.points.restore(entry.name))
        return code(caught)

    def flipped(at: int) -> bytes:
        data = bytearray(good)
        data[at] ^= 1
        return bytes(data)

    envelope = good.index(b"signatures")
    assert refused(good[:-1]) == "frame-truncated"
    assert refused(good + b"x") == "frame-excess"
    assert refused(flipped(PAYLOAD)) == "frame-root"
    assert refused(flipped(4)) == "frame-version"
    assert refused(flipped(0)) == "frame-shape"
    assert refused(flipped(envelope + 70)) == "frame-signature"
    assert refused(b"") == "frame-truncated"
    path.write_bytes(good)
    here.now += 11 * 366 * 86_400 * SECOND
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(entry.name))
    assert code(caught) == "frame-stale"
    assert here.steps == [], "no order went to the function"
    assert here.kinds().count("checkpoint-refused") >= 4


def test_a_file_in_another_functions_directory_is_not_that_functions(
    here: Host, one: tuple[Process, Function]
) -> None:
    entry = create(here, one[1], label="a")
    root = here.root / "checkpoints"
    with function(here) as (_, other):
        (root / other.uuid).mkdir()
        os.link(root / f"{entry.name}.xckp", root / other.uuid / "b.xckp")
        assert [e.name for e in asyncio.run(here.points.list())] == [entry.name]
        with pytest.raises(StateError) as caught:
            asyncio.run(here.points.restore("b"))
        assert code(caught) == "checkpoint-misplaced"


def test_a_revoked_hosts_checkpoint_is_refused(here: Host, one: tuple[Process, Function]) -> None:
    entry = create(here, one[1])
    old = here.keys.identity.key_id
    here.keys.rotate()
    asyncio.run(here.points.restore(entry.name))
    here.keys.revoke(old)
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(entry.name))
    assert code(caught) == "frame-key-revoked"


def test_a_chain_and_a_step_back_are_restored_however_many_epochs_there_were(
    here: Host, one: tuple[Process, Function]
) -> None:
    """Neither its parents nor a step back have a known epoch that they could jump ahead of."""
    here.owners.epochs[one[1].uuid] = 3 * LIMITS.epoch_jump
    whole = create(here, one[1], follow=True)
    more = create(here, one[1], parent=whole.digest)
    assert more.parent
    asyncio.run(here.points.restore(more.name))
    asyncio.run(here.points.restore(whole.name, rollback=True))
    assert computes(one[0])


# --- a function that is not here ------------------------------------------------------------------


def test_a_function_that_is_gone_is_made_again_with_its_uuid_and_size(here: Host) -> None:
    with function(here, domain=None) as (process, found), Guest(process) as guest:
        assert Vm(guest).ring.tensor(np.full(N, 3, np.float32))
        entry = create(here, found)
        digests = call(process.spec.control_socket, "digests")
    del here.functions.registry.functions[found.uuid]
    with running(uuid=found.uuid) as again:
        here.functions.coming = lambda uuid, profile: again
        made = asyncio.run(here.points.restore(entry.name))
        assert made.uuid == found.uuid
        after = call(again.spec.control_socket, "digests")
        assert after["memory"] == digests["memory"]
        assert computes(again)


def test_one_that_moved_away_is_not_made_a_second_time(here: Host) -> None:
    """Its owner would compute elsewhere, and its VM could be started here with it."""
    with function(here, domain=None) as (_, found):
        entry = create(here, found)
    del here.functions.registry.functions[found.uuid]
    here.owners.foreign.add(found.uuid)
    with running(uuid=found.uuid) as again:
        made: list[str] = []

        def coming(uuid: str, _: object) -> Process:
            made.append(uuid)
            return again

        here.functions.coming = coming
        with pytest.raises(ConflictError) as caught:
            asyncio.run(here.points.restore(entry.name, rollback=True))
    assert code(caught) == "ledger-not-owner"
    assert (made, here.functions.registry.all()) == ([], [])


def test_one_whose_state_is_refused_leaves_no_function_and_no_owner(here: Host) -> None:
    with function(here, domain=None) as (_, found):
        entry = create(here, found)
    del here.functions.registry.functions[found.uuid]
    here.watermarks.refusal = StateError("no mark", code="status-watermark")
    with running(uuid=found.uuid) as again:
        here.functions.coming = lambda uuid, profile: again
        with pytest.raises(StateError):
            asyncio.run(here.points.restore(entry.name))
    assert here.functions.registry.all() == []
    assert found.uuid not in here.owners.epochs


def test_one_that_is_refused_makes_no_function(here: Host) -> None:
    with function(here) as (_, found):
        entry = create(here, found)
    del here.functions.registry.functions[found.uuid]
    path = here.root / "checkpoints" / f"{entry.name}.xckp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FrameRefused):
        asyncio.run(here.points.restore(entry.name))
    assert here.functions.registry.all() == []
