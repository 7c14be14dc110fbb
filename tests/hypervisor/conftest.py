"""libvirt's own test driver, which keeps everything in this process, with a fake QEMU behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelvisor.errors import AccelvisorError
from accelvisor.hypervisor.domains import Domains
from accelvisor.hypervisor.port import AttachRequest
from tests.hypervisor.fake_qemu import FakeQemu
from tests.hypervisor.hooked import Daemon
from tests.hypervisor.samples import SOCKET, UUID

URI = "test:///default"
GUEST = """<domain type='test'><name>{name}</name><memory unit='MiB'>64</memory>
<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<devices><controller type='pci' model='pcie-root'/>
<controller type='pci' index='1' model='pcie-root-port'/>
<controller type='pci' index='2' model='pcie-root-port'/></devices></domain>"""


@pytest.fixture
def machine() -> FakeQemu:
    window = (0x1_4000_0000, 0x1_7FFF_FFFF)
    return FakeQemu({"pci.1": window, "pci.2": window})


@pytest.fixture
def domains(machine: FakeQemu) -> Iterator[Domains]:
    made = Domains(URI, monitor=lambda _handle, command: machine.monitor(command))
    for left in made.list():  # a failed test's traceback keeps libvirt's state alive
        if left.name != "test":
            if left.state.active:
                made.destroy(left.name)
            if left.persistent:
                made.undefine(left.name)
    made.define(GUEST.format(name="guest"))
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "libvirt-events"]


def request(live: bool = False, persistent: bool = False, **changes: str) -> AttachRequest:
    fields = {"domain": "guest", "function": UUID, "socket": SOCKET} | changes
    return AttachRequest(live=live, persistent=persistent, **fields)


def code(call: Callable[[], object], kind: type[AccelvisorError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return caught.value.code


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[[object], Daemon]]:
    running: list[Daemon] = []

    def start(reply: object) -> Daemon:
        running.append(Daemon(tmp_path, reply))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for one in running:
        one.close()
