"""Who may connect to a function: its VM's QEMU through a socket of that VM's, and one at a time."""

from __future__ import annotations

import grp
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelvisor.abi.registers import MAGIC, Reg
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.transport import ClientTransport
from tests.function.harness import DEADLINE_S, Guest, Process, call, running, wait_for

VM = "libvirt-0b36e1ad-94f1-4e5c-8a5e-0e5a6a7f1a01"
OTHER = "libvirt-5d1f2c7e-3a08-47cf-9c47-6f4f2f9a7b02"


def admit(process: Process, peer: str | None) -> Any:
    return call(process.spec.holder_socket, "admit", {"peer": peer})


def door(process: Process, peer: str) -> Path:
    return Path(process.spec.vfio_socket).with_name(peer)


def magic(path: Path | str) -> int:
    transport = ClientTransport(Client(str(path), timeout_s=DEADLINE_S), ram_bytes=1 << 20)
    try:
        return transport.client.read32(0, Reg.MAGIC)
    finally:
        transport.close()


def test_a_vm_that_is_admitted_has_a_socket_of_its_own(fresh: Process) -> None:
    assert fresh.holder("status")["peer"] == ""
    assert admit(fresh, VM) == {"peer": VM}
    assert fresh.holder("status")["peer"] == VM
    assert magic(door(fresh, VM)) == MAGIC
    assert magic(fresh.spec.vfio_socket) == MAGIC, "and who runs the host has one as before"


def test_admitting_another_vm_or_none_ends_the_former_ones_socket(fresh: Process) -> None:
    before = fresh.holder("status")["open_descriptors"]
    admit(fresh, VM)
    with Guest(fresh), socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(DEADLINE_S)
        waiting.connect(str(door(fresh, VM)))
        admit(fresh, OTHER)
        with pytest.raises(ConnectionResetError):
            waiting.recv(1)
    assert not door(fresh, VM).exists()
    assert magic(door(fresh, OTHER)) == MAGIC
    assert admit(fresh, None) == {"peer": ""}
    assert not door(fresh, OTHER).exists()
    wait_for(lambda: fresh.holder("status")["open_descriptors"] == before, "no leak")


@pytest.mark.parametrize("peer", [VM, None])
def test_a_client_that_is_connected_is_not_disturbed(fresh: Process, peer: str | None) -> None:
    admit(fresh, VM)
    client = Client(str(door(fresh, VM)), timeout_s=DEADLINE_S)
    transport = ClientTransport(client, ram_bytes=1 << 20)
    try:
        before = os.stat(door(fresh, VM)).st_ino
        client.write32(0, Reg.SCRATCH, 77)
        for _ in range(3):
            admit(fresh, peer)
        assert client.read32(0, Reg.SCRATCH) == 77
        assert peer is None or os.stat(door(fresh, VM)).st_ino == before
    finally:
        transport.close()
    assert magic(fresh.spec.vfio_socket) == MAGIC


def test_there_is_one_client_through_whichever_socket_it_came(fresh: Process) -> None:
    admit(fresh, VM)
    with Guest(fresh) as first, socket.socket(socket.AF_UNIX) as second:
        second.connect(str(door(fresh, VM)))
        admit(fresh, VM)
        assert first.read32(Reg.MAGIC) == MAGIC
        assert fresh.holder("status")["connection"] == 1
    wait_for(lambda: fresh.holder("status")["connection"] == 2, "the one that waited")


@pytest.mark.parametrize(
    "peer",
    [
        "", ".", "..", "vfio.sock", "holder.sock", "../" + VM, "/" + VM, VM + "/x", VM + "\n",
        VM.upper(), VM.replace("libvirt-", ""), VM + "0", VM + "//qemu_bridge_helper", "x" * 5000,
        7, [VM], {"name": VM}, True,
    ],
)  # fmt: skip
def test_what_is_no_vms_profile_is_not_admitted(process: Process, peer: Any) -> None:
    before = sorted(os.listdir(os.path.dirname(process.spec.vfio_socket)))
    with pytest.raises(AssertionError, match="peer-invalid"):
        admit(process, peer)
    assert process.holder("status")["peer"] == ""
    assert sorted(os.listdir(os.path.dirname(process.spec.vfio_socket))) == before


def test_a_request_without_a_peer_admits_nobody_and_revokes_nothing(fresh: Process) -> None:
    admit(fresh, VM)
    with pytest.raises(AssertionError, match="peer-invalid"):
        call(fresh.spec.holder_socket, "admit")
    with pytest.raises(AssertionError, match="not a request"):
        call(fresh.spec.holder_socket, "admit", [VM])  # type: ignore[arg-type]
    assert fresh.holder("status")["peer"] == VM


def test_a_socket_that_cannot_be_made_admits_nobody(fresh: Process) -> None:
    admit(fresh, VM)
    door(fresh, OTHER).mkdir()
    with pytest.raises(AssertionError, match="function-socket"):
        admit(fresh, OTHER)
    assert fresh.holder("status")["peer"] == ""
    assert not door(fresh, VM).exists()
    assert admit(fresh, VM) == {"peer": VM}


def test_a_process_that_is_started_again_admits_its_vm_from_the_beginning() -> None:
    with running(peer=VM) as process:
        assert process.holder("status")["peer"] == VM
        assert magic(door(process, VM)) == MAGIC


def test_it_takes_its_sockets_with_it(fresh: Process) -> None:
    admit(fresh, VM)
    fresh.stop()
    left = os.listdir(os.path.dirname(fresh.spec.vfio_socket))
    assert [name for name in left if stat.S_ISSOCK(os.stat(door(fresh, name)).st_mode)] == []


def test_what_a_killed_holder_admitted_is_gone_with_the_next() -> None:
    with running(peer=VM) as process:
        process.process.send_signal(signal.SIGKILL)
        process.process.wait(DEADLINE_S)
        assert door(process, VM).is_socket()
        folder = Path(process.spec.vfio_socket).parent
        (folder / "spec.json").write_text(process.spec.to_json().replace(VM, OTHER))
        again = subprocess.Popen(
            [sys.executable, "-m", "accelvisor.function", str(folder / "spec.json")],
            cwd=Path(__file__).parents[2],
        )
        try:
            wait_for(lambda: door(process, OTHER).is_socket(), "its VM's socket")
            assert not door(process, VM).exists()
        finally:
            again.terminate()
            again.wait(DEADLINE_S)


def test_qemus_group_has_the_vms_socket_and_no_other() -> None:
    """As root, a group that is not the process's own: nobody else may give a file to that."""
    ours = grp.getgrgid(os.getgid()).gr_name
    theirs = next((g.gr_name for g in grp.getgrall() if g.gr_gid != os.getgid()), ours)
    group = theirs if os.geteuid() == 0 else ours
    with running(peer=VM, socket_group=group) as process:
        folder = Path(process.spec.vfio_socket).parent
        found = {
            path.name: (path.group(), stat.S_IMODE(path.stat().st_mode))
            for path in folder.iterdir()
            if path.is_socket()
        }
        assert found == {
            VM: (group, 0o660),
            **dict.fromkeys(("vfio.sock", "holder.sock", "control.sock"), (ours, 0o660)),
        }
