"""virsh save, restore, managedsave and snapshots: a VM's functions are saved and come back with it.

The VM trains on its function all the time, with the guest's vfio-pci behind an emulated IOMMU, so
that BARs and MSI must be right too. Each test is a lap of the training, at whose end every loss and
weight must have the bits of the same training without a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accelvisor.lab import LabHost, Laboratory
from tests.lab.moving import MovingVm, Training, answers, functions, wait_for
from tests.lab.user import accelctl

SHELF = "/var/lib/accelvisor/checkpoints"
IMAGE = "/var/lib/libvirt/images/saver.img"
OLDER = "/var/lib/libvirt/images/older.img"
DISK = "/var/lib/libvirt/images/saver.qcow2"


@pytest.fixture(scope="module")
def shared(lab_host: LabHost) -> Iterator[tuple[MovingVm, Training]]:
    lab_host.run(["qemu-img", "create", "-f", "qcow2", DISK, "64M"])
    with made("saver", lab_host, "--iommu", "--disk", DISK) as vm:
        vm.give("small", "--persistent")
        vm.boot()
        yield vm, Training(vm, "one")


@pytest.fixture(scope="module")
def shared_pair(lab_host: LabHost) -> Iterator[tuple[MovingVm, list[Training]]]:
    """A guest without a driver of its own that trains on two functions."""
    with made("pair", lab_host) as vm:
        for _ in range(2):
            vm.give("small", "--persistent")
        vm.boot()
        yield vm, [Training(vm, tag, bdf) for tag, bdf in zip("ab", vm.bdfs(), strict=True)]


@pytest.fixture(scope="module")
def lab_host(lab: Laboratory) -> LabHost:
    return lab.hosts[0]


@contextmanager
def made(name: str, host: LabHost, *options: str) -> Iterator[MovingVm]:
    vm = MovingVm(name, (host,), *options)
    try:
        yield vm
    finally:
        host.virsh("managedsave-remove", name, check=False)
        for line in host.virsh("snapshot-list", "--name", name, check=False).stdout.split():
            host.virsh("snapshot-delete", name, line, "--metadata", check=False)
        vm.clear()
        for uuid in vm.uuids:
            host.run(["rm", "-rf", f"{SHELF}/{uuid}"])
        host.run(["rm", "-f", IMAGE, OLDER])


@pytest.fixture
def vm(shared: tuple[MovingVm, Training]) -> Iterator[MovingVm]:
    """It computes, and does so after the test, and what it computed is right."""
    vm, training = shared
    if training.idle:
        training.begin()
    yield vm
    training.goes_on()
    training.lap()


@pytest.fixture
def pair(shared_pair: tuple[MovingVm, list[Training]]) -> Iterator[MovingVm]:
    """As ``vm``, for both of its functions."""
    vm, both = shared_pair
    for training in both:
        if training.idle:
            training.begin()
    yield vm
    for training in both:
        training.goes_on()
        training.lap()


def ended(vm: MovingVm) -> None:
    """The daemon has seen that the VM's QEMU is gone."""
    (host,), (uuid,) = vm.hosts, vm.uuids
    wait_for(host, lambda: functions(host)[uuid]["state"] != "running", "the VM's end to be seen")


def save(vm: MovingVm, image: str = IMAGE) -> None:
    vm.hosts[0].virsh("save", vm.name, image, timeout=120)


def restore(vm: MovingVm, *options: str, image: str = IMAGE) -> None:
    (host,) = vm.hosts
    done = host.virsh("restore", image, *options, check=False, timeout=120)
    assert done.returncode == 0, f"{done.stderr}\n{host.journal('accelvisor', 30)}"


def saved(vm: MovingVm) -> list[str]:
    """Files of the VM's function's checkpoints that were saved with it, the newest last."""
    (host,), (uuid,) = vm.hosts, vm.uuids
    words = ["sh", "-c", f"ls -tr {SHELF}/{uuid}/save-*.xckp"]
    return host.run(words, check=False).stdout.split()


def told(vm: MovingVm, after: int) -> list[str]:
    """Kinds of the events since then."""
    events = accelctl(vm.hosts[0], "events", "--after", str(after))["events"]
    return [event["kind"] for event in events]


def now(vm: MovingVm) -> int:
    return int(accelctl(vm.hosts[0], "events")["events"][-1]["id"])


# --- it comes back -------------------------------------------------------------------------------


def test_a_saved_vm_goes_on_where_it_was(vm: MovingVm) -> None:
    before = len(saved(vm))
    save(vm)
    restore(vm)
    assert len(saved(vm)) == before + 1, "what QEMU loads is not saved once more"


def test_a_managed_save_is_restored_by_the_next_start(vm: MovingVm) -> None:
    (host,) = vm.hosts
    host.virsh("managedsave", vm.name)
    host.virsh("start", vm.name)


def test_a_paused_vm_is_saved_and_what_was_restored_paused_is_saved_again(vm: MovingVm) -> None:
    (host,) = vm.hosts
    host.virsh("suspend", vm.name)
    save(vm)
    restore(vm, "--paused")
    save(vm)
    restore(vm, "--running")


def test_a_daemon_that_was_killed_meanwhile_restores_it(vm: MovingVm) -> None:
    (host,) = vm.hosts
    save(vm)
    host.run(["systemctl", "kill", "--signal=KILL", "--kill-whom=main", "accelvisor"])
    wait_for(host, lambda: answers(host), "accelvisord")
    restore(vm)


def test_the_same_file_again_is_the_operators_decision(vm: MovingVm) -> None:
    (host,) = vm.hosts
    save(vm)
    restore(vm)
    host.virsh("destroy", vm.name)
    ended(vm)
    restore(vm)


def test_an_older_file_is_restored_and_recorded(
    vm: MovingVm, shared: tuple[MovingVm, Training]
) -> None:
    save(vm, OLDER)
    restore(vm, image=OLDER)
    shared[1].goes_on()
    save(vm)
    before = now(vm)
    restore(vm, image=OLDER)
    assert "checkpoint-rollback" in told(vm, before)


def test_a_snapshot_has_the_functions_and_is_reverted_to(
    vm: MovingVm, shared: tuple[MovingVm, Training]
) -> None:
    """With its memory, in a qcow2 disk: libvirt starts another QEMU to revert."""
    (host,) = vm.hosts
    host.virsh("snapshot-create-as", vm.name, "snap")
    for _ in range(2):
        shared[1].goes_on()
        host.virsh("snapshot-revert", vm.name, "snap")


# --- it is refused -------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_refused_and_the_file_is_kept(vm: MovingVm) -> None:
    (host,) = vm.hosts
    save(vm)
    file = saved(vm)[-1]
    host.run(["cp", "--preserve=all", file, "/root/whole"])
    host.run(["sh", "-c", f"printf X | dd of={file} bs=1 seek=70000 conv=notrunc"])
    before = now(vm)
    said = host.virsh("restore", IMAGE, check=False, timeout=120)
    assert said.returncode != 0
    assert "dbus-vmstate" in said.stderr
    assert {"checkpoint-refused", "restore-refused"} <= set(told(vm, before))
    host.run(["cp", "--preserve=all", "/root/whole", file])
    restore(vm)


def test_a_save_without_room_fails_and_the_guest_goes_on(
    vm: MovingVm, shared: tuple[MovingVm, Training]
) -> None:
    (host,) = vm.hosts
    host.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", SHELF])
    try:
        _refused(vm, "checkpoint-space")
        shared[1].goes_on()
    finally:
        host.run(["umount", SHELF])


def test_a_save_of_a_function_that_does_not_answer_fails_and_the_guest_goes_on(
    vm: MovingVm, shared: tuple[MovingVm, Training]
) -> None:
    (host,) = vm.hosts
    control = f"/run/accelvisor/function/{vm.uuids[0]}/control.sock"
    mode = host.run(["stat", "-c", "%a", control]).stdout.strip()
    host.run(["chmod", "000", control])
    try:
        _refused(vm, "")
        shared[1].goes_on()
    finally:
        host.run(["chmod", mode, control])


def _refused(vm: MovingVm, code: str) -> None:
    (host,) = vm.hosts
    before, kept = now(vm), saved(vm)
    said = host.virsh("save", vm.name, IMAGE, check=False, timeout=120)
    assert said.returncode != 0
    assert "dbus-vmstate" in said.stderr
    assert host.virsh("domstate", vm.name).stdout.strip() == "running"
    events = accelctl(host, "events", "--after", str(before))["events"]
    assert [e["message"] for e in events if e["kind"] == "save-refused" and code in e["message"]]
    assert saved(vm) == kept, "nothing of it is left"


# --- two functions, and a domain that libvirt forgets ---------------------------------------------


def test_two_functions_of_a_guest_without_a_driver_of_its_own_are_saved_together(
    pair: MovingVm,
) -> None:
    save(pair)
    restore(pair)


def test_a_transient_vms_function_is_free_while_it_is_saved_and_is_had_again(
    pair: MovingVm,
) -> None:
    (host,) = pair.hosts
    uuid = pair.uuids[0]
    with made("other", host) as other:
        host.virsh("undefine", pair.name)
        save(pair)
        wait_for(host, lambda: functions(host)[uuid]["state"] == "ready", "it to be free")

        accelctl(host, "attach", uuid, other.name, "--persistent")
        said = host.virsh("restore", IMAGE, check=False, timeout=120)
        assert said.returncode != 0
        assert f"belongs to domain {other.name}" in said.stderr

        accelctl(host, "detach", uuid, other.name)
        restore(pair)
