"""Hot-plug against a fake QEMU: hotplug.py's decisions and live.py's steps."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress

import pytest

from accelvisor.errors import (
    AccelvisorError,
    CapacityError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    SystemFailure,
    UnavailableError,
)
from accelvisor.hypervisor import hotplug, xml
from accelvisor.hypervisor.live import LiveDomain
from tests.hypervisor.fake_qemu import GIB, MIB, FakeQemu
from tests.hypervisor.samples import BARE, INSTALLER, OTHER, OTHER_SOCKET, SOCKET, UUID

LOW = (0x1_4000_0000, 0x1_7FFF_FFFF)
HYPERTRANSPORT = (0xFE_4000_0000, 0xFE_7FFF_FFFF)
UNSET = (0, 0xF_FFFF)


class FakeHandle:
    """A libvirt domain: its live XML, and metadata as virDomainSetMetadata leaves it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.fail_metadata = False

    def XMLDesc(self, _flags: int) -> str:
        return self.text

    def setMetadata(self, kind: int, text: str | None, key: str, uri: str, flags: int) -> int:
        assert (kind, key, uri, flags) == (2, "accelvisor", xml.NAMESPACE, 1)
        if self.fail_metadata:
            raise OSError("no space left")
        bare = re.sub(r"\s*<metadata>.*</metadata>", "", self.text, flags=re.S)
        if text is not None:
            group = text.replace("<functions", f'<functions xmlns="{uri}"')
            bare = re.sub(r"(?=<memory\b)", f"<metadata>{group}</metadata>", bare, count=1)
        self.text = bare
        return 0


def domain(qemu: FakeQemu, text: str | None = None) -> tuple[LiveDomain, FakeHandle]:
    """A running domain whose clock moves by a tenth of a second a look."""
    handle = FakeHandle(text or xml.prepare(BARE, spare_ports=2))
    ticks = itertools.count()
    return LiveDomain(handle, qemu.monitor, lambda: next(ticks) / 10), handle


def qemu(window: tuple[int, int] = LOW, **changes: object) -> FakeQemu:
    return FakeQemu({xml.spare_id(0): window, xml.spare_id(1): window}, **changes)  # type: ignore[arg-type]


def functions(handle: FakeHandle) -> list[xml.FunctionEntry]:
    return xml.functions(handle.text)


def refusal(call: object, *arguments: object, **named: object) -> AccelvisorError:
    with pytest.raises(AccelvisorError) as caught:
        call(*arguments, **named)  # type: ignore[operator]
    return caught.value


def test_a_plugged_function_is_remembered_in_the_live_domain() -> None:
    machine = qemu()
    live, handle = domain(machine)
    assert live.plug(UUID, SOCKET) == (xml.spare_id(0), "01:00.0")
    assert functions(handle) == [xml.FunctionEntry(UUID, SOCKET, xml.spare_id(0))]
    assert machine.devices[xml.device_id(UUID)]["socket"]["path"] == SOCKET


def test_a_second_function_takes_the_next_port_and_a_third_finds_none() -> None:
    live, handle = domain(qemu())
    assert live.plug(UUID, SOCKET)[0] == xml.spare_id(0)
    assert live.plug(OTHER, OTHER_SOCKET)[0] == xml.spare_id(1)
    error = refusal(live.plug, "3" * 32, "/s")
    assert (type(error), error.code) == (CapacityError, "no-hotplug-port")
    assert len(functions(handle)) == 2


def test_a_domain_without_ports_says_how_to_get_some() -> None:
    error = refusal(domain(FakeQemu({}), BARE)[0].plug, UUID, SOCKET)
    assert error.code == "no-hotplug-port"
    assert "--persistent" in error.hint


def test_libvirts_own_free_port_serves_when_nothing_is_spare() -> None:
    machine = FakeQemu({"pci.1": LOW, "pci.2": LOW})
    machine.devices["net0"] = {"bus": "pci.2"}
    live, _ = domain(machine, xml.prepare(INSTALLER, spare_ports=0))
    assert live.plug(UUID, SOCKET)[0] == "pci.1"


def test_a_port_that_the_xml_names_and_qemu_lacks_is_passed_over() -> None:
    live, _ = domain(FakeQemu({xml.spare_id(1): LOW}))
    assert live.plug(UUID, SOCKET)[0] == xml.spare_id(1)


def test_memory_that_cannot_be_shared_is_refused_before_qemu_is_asked() -> None:
    machine = qemu()
    live, _ = domain(machine, INSTALLER)
    assert refusal(live.plug, UUID, SOCKET).code == "domain-memory"
    assert machine.sent == []


def test_plugging_twice_is_a_conflict_and_changes_nothing() -> None:
    live, handle = domain(qemu())
    live.plug(UUID, SOCKET)
    error = refusal(live.plug, UUID, SOCKET)
    assert (type(error), error.code) == (ConflictError, "function-attached")
    assert len(functions(handle)) == 1


def test_a_window_larger_than_the_ports_is_refused_and_taken_back() -> None:
    machine = qemu((LOW[0], LOW[0] + 2 * MIB - 1))
    live, handle = domain(machine)
    error = refusal(live.plug, UUID, SOCKET)
    assert (type(error), error.code) == (CapacityError, "port-window")
    assert "256 MiB" in error.message
    assert "2 MiB" in error.message
    assert (machine.devices, functions(handle)) == ({}, [])


def test_a_window_of_the_ports_very_size_fits() -> None:
    assert domain(qemu(window_bytes=GIB))[0].plug(UUID, SOCKET)


def test_a_disabled_port_window_is_too_small() -> None:
    assert refusal(domain(qemu((0x10_0000, 0xF_FFFF)))[0].plug, UUID, SOCKET).code == "port-window"


def test_before_firmware_ran_nothing_is_known_of_the_window() -> None:
    assert domain(qemu(UNSET))[0].plug(UUID, SOCKET)


def test_a_window_in_amds_reserved_addresses_is_refused() -> None:
    machine = qemu(HYPERTRANSPORT, vendor="AuthenticAMD")
    error = refusal(domain(machine)[0].plug, UUID, SOCKET)
    assert error.code == "port-window"
    assert "HyperTransport" in error.message
    assert machine.devices == {}


@pytest.mark.parametrize(
    ("window", "vendor", "bits"),
    [(HYPERTRANSPORT, "GenuineIntel", 40), (LOW, "AuthenticAMD", 40), (LOW, "AuthenticAMD", 39)],
)
def test_the_same_window_is_fine_elsewhere(window: tuple[int, int], vendor: str, bits: int) -> None:
    assert domain(qemu(window, vendor=vendor, phys_bits=bits))[0].plug(UUID, SOCKET)


def test_what_qemu_refuses_is_told_in_its_own_words() -> None:
    error = refusal(domain(qemu(refuse="Failed to connect to '/x'"))[0].plug, UUID, SOCKET)
    assert (type(error), error.code) == (SystemFailure, "device-add-failed")
    assert "Failed to connect to '/x'" in error.message


def test_a_qemu_without_vfio_user_says_so() -> None:
    error = refusal(domain(qemu(drivers=()))[0].plug, UUID, SOCKET)
    assert (type(error), error.code) == (UnavailableError, "no-vfio-user")
    assert "10.1" in error.hint


def test_without_metadata_nothing_is_plugged() -> None:
    machine = qemu()
    live, handle = domain(machine)
    handle.fail_metadata = True
    with pytest.raises(OSError, match="space"):
        live.plug(UUID, SOCKET)
    assert machine.devices == {}
    assert "device_add" not in [command["execute"] for command in machine.sent]


class Killed(BaseException):
    """The daemon ends here: nothing that it would still do is done."""


@pytest.mark.parametrize("answered", range(12))
def test_an_attach_killed_at_any_step_leaves_nothing_that_a_detach_does_not_end(
    answered: int,
) -> None:
    machine = qemu()
    commands = itertools.count()
    handle = FakeHandle(xml.prepare(BARE, spare_ports=2))

    def monitor(text: str) -> str:
        reply = machine.monitor(text)  # QEMU does it, and nobody is there to hear the answer
        if next(commands) >= answered:
            raise Killed
        return reply

    live = LiveDomain(handle, monitor, lambda: 0.0)
    live._take_back = lambda *_: None  # type: ignore[method-assign]
    with suppress(Killed):
        live.plug(UUID, SOCKET)
    listed = [entry.uuid for entry in functions(handle)]
    assert listed == [UUID] or machine.devices == {}, "QEMU has what nobody sees"
    later, _ = domain(machine)
    later._handle = handle
    if listed:
        later.unplug(UUID, deadline_s=1)
        later.forget(UUID)
    assert (machine.devices, functions(handle)) == ({}, [])
    assert later.plug(UUID, SOCKET)


def test_a_function_that_only_the_metadata_has_is_plugged_after_all() -> None:
    machine = qemu()
    live, handle = domain(machine)
    live._remember(xml.FunctionEntry(UUID, SOCKET, xml.spare_id(1)))
    assert live.plug(UUID, SOCKET)[0] == xml.spare_id(0)
    assert functions(handle) == [xml.FunctionEntry(UUID, SOCKET, xml.spare_id(0))]


def test_a_window_known_to_be_too_large_is_refused_before_anything_is_plugged() -> None:
    machine = qemu((LOW[0], LOW[0] + 2 * MIB - 1), lets_go_after=None)
    live, handle = domain(machine)
    assert refusal(live.plug, UUID, SOCKET, 256 * MIB).code == "port-window"
    assert (machine.devices, functions(handle)) == ({}, [])
    assert "device_add" not in [command["execute"] for command in machine.sent]


def test_what_a_guest_keeps_after_a_failed_attach_is_seen_and_can_be_detached() -> None:
    machine = qemu((LOW[0], LOW[0] + 2 * MIB - 1), lets_go_after=None)
    live, handle = domain(machine)
    error = refusal(live.plug, UUID, SOCKET)
    assert error.code == "port-window"
    assert "detach it" in error.hint
    assert [entry.uuid for entry in functions(handle)] == [UUID]
    machine.lets_go_after = 0
    unplug(live)
    assert (machine.devices, functions(handle)) == ({}, [])


def test_what_qemu_has_is_not_forgotten() -> None:
    live, handle = domain(qemu())
    live.plug(UUID, SOCKET)
    assert not live.forget(UUID)
    assert not live.forget(OTHER)
    assert [entry.uuid for entry in functions(handle)] == [UUID]


def unplug(live: LiveDomain, uuid: str = UUID, *, deadline_s: float = 10.0) -> None:
    live.unplug(uuid, deadline_s=deadline_s)
    live.forget(uuid)


def test_unplugging_waits_until_the_guest_let_go() -> None:
    machine = qemu(lets_go_after=3)
    live, handle = domain(machine)
    live.plug(UUID, SOCKET)
    unplug(live)
    assert (machine.devices, functions(handle)) == ({}, [])


def test_a_guest_that_does_not_let_go_meets_the_deadline_and_keeps_its_function() -> None:
    machine = qemu(lets_go_after=None)
    live, handle = domain(machine)
    live.plug(UUID, SOCKET)
    error = refusal(live.unplug, UUID, deadline_s=0.5)
    assert (type(error), error.code) == (DeadlineError, "detach-deadline")
    assert [entry.uuid for entry in functions(handle)] == [UUID]


def test_asking_again_while_the_guest_is_about_to_let_go_goes_on_waiting() -> None:
    machine = qemu(lets_go_after=8)
    live, handle = domain(machine)
    live.plug(UUID, SOCKET)
    assert refusal(live.unplug, UUID, deadline_s=0.2).code == "detach-deadline"
    unplug(live)
    assert (machine.devices, functions(handle)) == ({}, [])


def test_a_function_that_the_guest_ejected_is_only_forgotten() -> None:
    machine = qemu()
    live, handle = domain(machine)
    live.plug(UUID, SOCKET)
    machine.devices.clear()
    unplug(live)
    assert functions(handle) == []


def test_unplugging_what_was_never_plugged_is_not_found() -> None:
    error = refusal(domain(qemu())[0].unplug, UUID, deadline_s=1)
    assert (type(error), error.code) == (NotFoundError, "function-not-attached")


def test_other_functions_stay_when_one_goes() -> None:
    live, handle = domain(qemu())
    live.plug(UUID, SOCKET)
    live.plug(OTHER, OTHER_SOCKET)
    unplug(live)
    assert [entry.uuid for entry in functions(handle)] == [OTHER]
    assert live.plug(UUID, SOCKET)[0] == xml.spare_id(0), "its port is free again"


def test_a_monitor_that_makes_no_sense_is_a_failure() -> None:
    live = LiveDomain(FakeHandle(xml.prepare(BARE)), lambda _: "[]", lambda: 0.0)
    assert isinstance(refusal(live.plug, UUID, SOCKET), SystemFailure)


def test_devices_behind_two_bridges_are_found() -> None:
    inner = {"bus": 2, "slot": 3, "function": 1, "qdev_id": "deep"}
    switch = {"bus": 1, "slot": 0, "function": 0, "pci_bridge": {"devices": [inner]}}
    root = {"bus": 0, "slot": 1, "function": 0, "pci_bridge": {"devices": [switch]}}
    found = hotplug.find_device([{"bus": 0, "devices": [root]}], "deep")
    assert found is not None
    assert hotplug.address(found) == "02:03.1"
