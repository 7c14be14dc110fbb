"""Plain ``virsh migrate --live`` and the real daemons: a VM moves with its functions, or stays.

The tests share one VM that trains on its function, on whichever host the last one left it; so each
also shows that a VM can be moved after what the last one did. Each is a lap of the training, at
whose end every loss and weight must have the bits of the same training without a device: whatever
was moved, refused, killed or cut meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from xml.etree import ElementTree

import pytest

from accelvisor.errors import DeadlineError
from accelvisor.lab import LabHost, Laboratory
from tests.amount import by_night
from tests.lab.moving import MovingVm, OnChips, Training, answers, peers, trust_each_other
from tests.lab.user import accelctl

Hosts = tuple[LabHost, LabHost]
EXTRA = "/etc/accelvisor/conf.d/50-test.toml"
TIGHT = b'[cards.card0]\nchips = 1\ncores_per_chip = 1\nmemory = "16MiB"\n'
#: The same library in other bytes: nobody can know that it computes the same.
OTHER_BLAS = """
set -e
own=$(readlink -f /etc/alternatives/libblas.so.3-x86_64-linux-gnu)
cp "$own" /usr/local/lib/libblas.so.3
echo >> /usr/local/lib/libblas.so.3
ln -sfT "$own" /usr/local/lib/own-blas
ln -sfT /usr/local/lib/libblas.so.3 /etc/alternatives/libblas.so.3-x86_64-linux-gnu
"""
OWN_BLAS = """
ln -sfT "$(readlink /usr/local/lib/own-blas)" /etc/alternatives/libblas.so.3-x86_64-linux-gnu
rm -f /usr/local/lib/libblas.so.3 /usr/local/lib/own-blas
"""
#: Of QEMU, in MiB/s: so slow that a pre-copy lasts until something was done to it.
SLOW = ("--bandwidth", "2")
HOOK = "qemu.d/50-accelvisor"


@pytest.fixture(scope="module")
def hosts(lab: Laboratory) -> Hosts:
    """Two that trust each other."""
    lab.add_hosts(2)
    one, other = lab.hosts[:2]
    trust_each_other(one, other)
    return one, other


@contextmanager
def made(name: str, hosts: Hosts, *options: str) -> Iterator[MovingVm]:
    vm = MovingVm(name, hosts, *options)
    try:
        yield vm
    finally:
        vm.clear()


@pytest.fixture(scope="module", params=by_night(["plain", "iommu"], ["iommu"]))
def shared(
    hosts: Hosts, request: pytest.FixtureRequest
) -> Iterator[tuple[MovingVm, Training]]:
    """By day behind an IOMMU, whose state and whose interrupts must move as well; a guest without
    one moves in the test of two functions, and in test_operator.py.
    """
    walled = request.param == "iommu"
    with made("mover", hosts, *(["--iommu"] if walled else [])) as vm:
        vm.give("small", "--persistent")
        guest = vm.boot()
        found = guest.run(["ls", "/sys/class/iommu"]).stdout.split()
        assert found == (["dmar0"] if walled else [])
        yield vm, Training(vm, "one")


@pytest.fixture
def vm(shared: tuple[MovingVm, Training]) -> Iterator[MovingVm]:
    """The shared one; after the test it computes on, and what it computed is right."""
    vm, training = shared
    if training.idle:
        training.begin()
    yield vm
    training.lap()


# --- it moves ------------------------------------------------------------------------------------


def test_twenty_moves_with_vfio_pci_and_its_interrupts_in_the_middle_of_a_training(
    vm: MovingVm, shared: tuple[MovingVm, Training]
) -> None:
    for turn in range(by_night(20, 10)):  # twenty by night
        vm.move("--persistent", "--undefinesource")
        if turn % 5 == 0:
            shared[1].goes_on()


def test_a_persistent_move_brings_the_definition(vm: MovingVm) -> None:
    source, there = vm.here, vm.there
    vm.move("--persistent", "--undefinesource")
    assert source.virsh("dominfo", vm.name, check=False).returncode != 0
    live, stored = told(there, vm), told(there, vm, "--inactive")
    assert live == stored
    assert vm.uuids[0] in "".join(live)


def test_a_definition_that_stays_behind_cannot_be_started(vm: MovingVm) -> None:
    """What stays names a function that is elsewhere. The move before made it persistent."""
    source = vm.here
    vm.move("--persistent")
    said = source.virsh("start", vm.name, check=False)
    assert said.returncode != 0
    words = f"function {vm.uuids[0]} is not here any more: it moved to host {vm.here.name}"
    assert words in said.stderr
    vm.only_at(vm.here)
    source.virsh("undefine", vm.name)


def told(host: LabHost, vm: MovingVm, *options: str) -> list[str]:
    """What a definition tells of functions, and gives to QEMU for them."""
    domain = ElementTree.fromstring(host.virsh("dumpxml", vm.name, *options).stdout)
    names = ("{https://accelvisor.io/xmlns/1}function",
             "{http://libvirt.org/schemas/domain/qemu/1.0}arg")  # fmt: skip
    return [str(sorted(each.attrib.items())) for name in names for each in domain.iter(name)]


def test_after_a_restart_of_the_daemons_a_vm_moves(vm: MovingVm) -> None:
    for host in vm.hosts:
        host.run(["systemctl", "restart", "accelvisor"])
        host.wait(lambda host=host: answers(host), what="accelvisord")
    vm.move("--persistent", "--undefinesource")


def test_two_functions_move_together_one_of_them_plugged_in_while_it_ran(hosts: Hosts) -> None:
    """The first has two chips, and trains data-parallel on them as well: its gradients are summed
    over a link of the card, on whichever host.
    """
    with made("pair", hosts) as vm:
        vm.give("large", "--persistent")
        vm.boot()
        (first,) = vm.bdfs()
        chips = OnChips(vm, first, "large")
        one = Training(vm, "one", first)
        vm.give("small", "--live", "--persistent")
        vm.here.wait(lambda: len(vm.bdfs()) == 2, what="the second function in the guest")
        two = Training(vm, "two", next(bdf for bdf in vm.bdfs() if bdf != first))
        for _ in range(2):
            chips.goes_on()
            vm.move("--persistent", "--undefinesource")
        told = accelctl(vm.here, "topology", "card0")["cards"][0]
        mine = [item for item in told["links"] if item["function"] == vm.uuids[0]]
        assert [item["state"] for item in mine] == ["up"]
        chips.lap()
        for training in (one, two):
            training.lap()


# --- it is refused -------------------------------------------------------------------------------


def stays(vm: MovingVm, *options: str) -> str:
    """The move fails, the VM runs on where it was; what virsh says."""
    here = vm.here
    said = vm.migrate(*options)
    assert said
    vm.only_at(here)
    return said


def test_a_host_that_is_not_trusted_gets_nothing(vm: MovingVm) -> None:
    here, there = vm.here, vm.there
    (known,) = peers(here, there)
    accelctl(here, "trust", "remove", known)
    try:
        assert "accelvisor: " in stays(vm)
    finally:
        trust_each_other(here, there)


def test_a_host_without_room_says_so_in_virshs_words(vm: MovingVm) -> None:
    there = vm.there
    there.push(TIGHT, EXTRA)
    try:
        reload(there)
        said = stays(vm)
        assert "accelvisor: " in said
        assert "card0: " in said
    finally:
        there.run(["rm", "-f", EXTRA])
        reload(there)


def reload(host: LabHost) -> None:
    host.run(["systemctl", "reload", "accelvisor"])
    host.wait(lambda: answers(host), what="accelvisord")


def test_a_host_that_computes_other_bits_says_so_in_virshs_words(vm: MovingVm) -> None:
    there = vm.there
    try:
        there.run(["sh", "-c", OTHER_BLAS])
        said = stays(vm)
        assert "results would have other bits on this host: blas: " in said
    finally:
        there.run(["sh", "-c", OWN_BLAS])


# --- something dies ------------------------------------------------------------------------------


class Moving:
    """A move under way, slow enough for something to be done to it."""

    def __init__(self, vm: MovingVm, *options: str) -> None:
        self.vm = vm
        self.source, self.there = vm.here, vm.there
        self.said: list[str] = []
        self._options = options
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.source.wait(self._copies, deadline_s=60, what="QEMU to copy")

    def _run(self) -> None:
        words = ("migrate", "--live", *self._options, self.vm.name, self.vm.uri(self.there))
        self.said.append(self.source.virsh(*words, check=False, timeout=150).stderr.strip())

    def _copies(self) -> bool:
        told = self.source.virsh("domjobinfo", self.vm.name, check=False).stdout
        done = [line for line in told.splitlines() if line.startswith("Memory processed")]
        return bool(self.said) or bool(done and not done[0].split(":")[1].strip().startswith("0"))

    def fast(self) -> None:
        """No more waiting."""
        self.source.virsh("migrate-setspeed", self.vm.name, "1000", check=False)

    def end(self) -> str:
        """What virsh says: nothing when the VM has moved."""
        self._thread.join(160)
        (said,) = self.said
        return said


def kill(host: LabHost, *pids: str) -> None:
    host.run(["kill", "-KILL", *pids])


def daemon(host: LabHost) -> str:
    said = host.run(["systemctl", "show", "--property=MainPID", "--value", "accelvisor"])
    return said.stdout.strip()


def kill_daemon(host: LabHost) -> None:
    before = daemon(host)
    kill(host, before)
    host.wait(lambda: daemon(host) not in ("0", before) and answers(host), what="accelvisord")


def kill_worker(host: LabHost, uuid: str) -> None:
    unit = f"accelvisor-function@{uuid}"
    holder = host.run(["systemctl", "show", "--property=MainPID", "--value", unit]).stdout.strip()
    zygote = host.run(["pgrep", "--parent", holder]).stdout.split()[0]
    kill(host, *host.run(["pgrep", "--parent", zygote]).stdout.split())


def kill_qemu(host: LabHost, vm: MovingVm) -> None:
    kill(host, *host.run(["pgrep", "-f", f"guest={vm.name},"]).stdout.split())


def source_daemon(moving: Moving) -> None:
    kill_daemon(moving.source)


def destination_daemon(moving: Moving) -> None:
    kill_daemon(moving.there)


def destination_qemu(moving: Moving) -> None:
    kill_qemu(moving.there, moving.vm)


def operator(moving: Moving) -> None:
    moving.source.virsh("domjobabort", moving.vm.name)


DISTURBANCES = (source_daemon, destination_daemon, destination_qemu, operator)


@pytest.mark.parametrize("done", DISTURBANCES, ids=lambda done: done.__name__)
def test_a_precopy_that_is_disturbed_leaves_the_vm_where_it_was(
    vm: MovingVm, done: Callable[[Moving], None]
) -> None:
    moving = Moving(vm, *SLOW)
    done(moving)
    moving.fast()
    assert moving.end()
    vm.only_at(moving.source)


def test_parallel_connections_and_autoconverge_are_as_good(vm: MovingVm) -> None:
    vm.move("--parallel", "--parallel-connections", "2", "--auto-converge")


def test_a_hook_that_is_killed_refuses_the_move(vm: MovingVm) -> None:
    """It waits for a daemon that stands still, as one that asks a slow network does."""
    source, there = vm.here, vm.there
    stopped = daemon(there)
    there.run(["kill", "-STOP", stopped])
    said: list[str] = []
    moving = threading.Thread(target=lambda: said.append(vm.migrate()))
    moving.start()
    try:
        there.wait(lambda: hooks(there) or said, deadline_s=30, what="the hook to wait")
        while not said and moving.is_alive():
            there.run(["pkill", "-KILL", "-f", HOOK], check=False)
            moving.join(0.1)
    finally:
        there.run(["kill", "-CONT", stopped])
    moving.join(60)
    assert "signal 9" in said[0]
    vm.only_at(source)


def hooks(host: LabHost) -> list[str]:
    return host.run(["pgrep", "-f", HOOK], check=False).stdout.split()


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_worker_that_dies_while_its_function_moves_changes_no_bit(
    vm: MovingVm, side: str
) -> None:
    moving = Moving(vm, "--persistent", "--undefinesource", *SLOW)
    kill_worker(moving.source if side == "source" else moving.there, vm.uuids[0])
    moving.fast()
    vm.only_at(moving.source if moving.end() else moving.there)


# --- the network ---------------------------------------------------------------------------------


def test_a_stalled_network_delays_a_move(vm: MovingVm) -> None:
    moving = Moving(vm, "--persistent", "--undefinesource", *SLOW)
    moving.there.plug(False)
    try:
        moving.source.wait(lambda: stalled(moving), what="QEMU to send nothing")
    finally:
        moving.there.plug(True)
    moving.fast()
    assert moving.end() == ""
    vm.only_at(moving.there)


def stalled(moving: Moving) -> bool:
    def sent() -> str:
        told = moving.source.virsh("domjobinfo", moving.vm.name, check=False).stdout
        return next((row for row in told.splitlines() if row.startswith("Data processed")), "")

    before = sent()
    return before != "" and sent() == before


def test_a_cut_network_leaves_the_vm_where_it_was(vm: MovingVm) -> None:
    moving = Moving(vm, *SLOW)
    moving.there.plug(False)
    try:
        moving.source.wait(lambda: link_broke(moving), deadline_s=60, what="the link to break")
        moving.source.virsh("domjobabort", vm.name, check=False, timeout=90)
    finally:
        moving.there.plug(True)
    assert moving.end()
    vm.only_at(moving.source)


def link_broke(moving: Moving) -> bool:
    """Either side's view; the destination's daemon says it."""
    return "broke" in moving.there.journal("accelvisor", 12)


def test_a_network_that_is_cut_when_the_vm_stands_still_leaves_one_owner(vm: MovingVm) -> None:
    """Wherever in the switch-over the cut falls, the VM goes on at exactly one host."""
    source, there = vm.here, vm.there
    before = told_by(source)
    moving = Moving(vm, "--persistent", "--undefinesource", *SLOW)
    moving.fast()
    source.wait(lambda: bool(moving.said) or "-> freezing" in told_by(source)[len(before) :],
                deadline_s=60, what="the VM to stand still")  # fmt: skip
    there.plug(False)
    try:
        # Past the hand-over nothing is decided before the network is whole again.
        with suppress(DeadlineError):
            source.wait(lambda: decided(moving, told_by(source)[len(before) :]), deadline_s=20)
    finally:
        there.plug(True)
    vm.only_at(source if moving.end() else there)


def told_by(host: LabHost) -> str:
    return host.journal("accelvisor", 1000)


def decided(moving: Moving, said: str) -> bool:
    return bool(moving.said) or "-> aborted" in said or "-> committed" in said
