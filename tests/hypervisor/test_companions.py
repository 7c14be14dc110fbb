"""What a domain with functions has besides them, in its XML and while it runs; and its XML when it
comes to another host."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from accelvisor.errors import ConflictError, SystemFailure
from accelvisor.hypervisor import companions, xml
from accelvisor.hypervisor.companions import Companions
from accelvisor.hypervisor.live import LiveDomain
from accelvisor.hypervisor.rewrite import rewrite
from tests.hypervisor.fake_qemu import FakeQemu
from tests.hypervisor.samples import DOMAIN, OTHER, OTHER_SOCKET, READY, SOCKET, UUID, meaning
from tests.hypervisor.test_live import LOW, FakeHandle
from tests.hypervisor.test_xml import arguments, device

HERE = "b6f0a3a4-57a6-4a0c-9a3c-6d8b0f4d9f10"
WHOSE = xml.Ownership("0d9d2c5e-3a51-4b43-8f0e-2b52d63ab0aa", "tenant-a")
PREPARED = xml.prepare(READY, spare_ports=2)


def pairs(text: str) -> list[tuple[str, str]]:
    """Options of QEMU that are companions'."""
    words = arguments(text)
    return [pair for pair in pairwise(words) if companions.is_companion(*pair)]


# --- the XML -------------------------------------------------------------------------------------


def test_a_domain_with_functions_has_one_bus_and_one_monitor() -> None:
    text = xml.add(xml.add(READY, UUID, SOCKET), OTHER, OTHER_SOCKET)
    (_, chardev), (_, monitor), (_, vmstate) = pairs(text)
    stem = f"/run/accelvisor/domain/libvirt-{DOMAIN}"
    assert f"path={stem}.monitor" in chardev.split(",")
    assert {"server=off", "reconnect-ms=1000"} < set(chardev.split(","))
    assert json.loads(monitor)["chardev"] == "accel-monitor"
    assert json.loads(vmstate)["addr"] == f"unix:path={stem}.bus"
    assert [flag for flag, _ in pairs(text)] == ["-chardev", "-object", "-object"]


def test_they_go_with_the_last_function() -> None:
    text = xml.remove(xml.add(xml.add(READY, UUID, SOCKET), OTHER, OTHER_SOCKET), UUID)
    assert len(pairs(text)) == 3
    assert pairs(xml.remove(text, OTHER)) == []


def test_those_of_another_run_directory_are_replaced() -> None:
    moved = xml.add(READY, UUID, SOCKET).replace("/run/accelvisor/domain", "/run/old/domain")
    again = xml.add(moved, OTHER, OTHER_SOCKET)
    assert len(pairs(again)) == 3
    assert "/run/old" not in again


def test_prepare_brings_them_to_a_domain_that_has_functions_only() -> None:
    assert pairs(PREPARED) == []
    old = xml.add(READY, UUID, SOCKET)
    for _, value in pairs(old):
        old = old.replace(value.replace('"', "&quot;"), "x")
    assert pairs(old) == []
    assert len(pairs(xml.prepare(old))) == 3


def test_a_pasted_function_brings_them_along() -> None:
    assert pairs(xml.attachment_xml(UUID, SOCKET)) == pairs(xml.add(READY, UUID, SOCKET))


def test_a_path_is_escaped_as_each_option_wants_it() -> None:
    (_, chardev), _, (_, vmstate) = Companions.of("/run/a,b c", DOMAIN).arguments()
    assert f"path=/run/a,,b c/domain/libvirt-{DOMAIN}.monitor" in chardev
    assert "unix:path=/run/a%2cb%20c/domain/" in vmstate


@pytest.mark.parametrize(
    ("option", "value", "ours"),
    [
        ("-chardev", "socket,id=accel-monitor,path=/x", True),
        ("-chardev", "socket,id=accel-monitor2,path=/x", False),
        ("--object", '{"id":"accel-vmstate"}', True),
        ("-object", '{"id":"mine"}', False),
        ("-object", "{", False),
        ("-object", "[1]", False),
        ("-device", '{"id":"accel-monitor"}', False),
    ],
)
def test_only_ones_own_are_taken_for_companions(option: str, value: str, ours: bool) -> None:
    assert companions.is_companion(option, value) is ours


# --- whose ---------------------------------------------------------------------------------------


def test_the_metadata_says_whose_the_functions_are() -> None:
    text = xml.add(READY, UUID, SOCKET, WHOSE)
    assert xml.ownership(text) == WHOSE
    assert xml.ownership(xml.add(text, OTHER, OTHER_SOCKET)) == WHOSE
    assert xml.ownership(READY) == xml.Ownership()
    assert meaning(xml.remove(text, UUID)) == meaning(READY)


# --- a running domain ----------------------------------------------------------------------------


def running(machine: FakeQemu, whose: xml.Ownership | None = None) -> tuple[LiveDomain, FakeHandle]:
    handle = FakeHandle(PREPARED)
    return LiveDomain(handle, machine.monitor, lambda: 0.0, whose), handle


def qemu() -> FakeQemu:
    return FakeQemu({xml.spare_id(0): LOW, xml.spare_id(1): LOW})


def test_a_live_attach_brings_them_along_and_the_last_detach_takes_them_away() -> None:
    machine = qemu()
    live, handle = running(machine, WHOSE)
    live.plug(UUID, SOCKET)
    there = ["chardev:accel-monitor", "accel-monitor", "accel-vmstate"]
    assert machine.others == there
    live.plug(OTHER, OTHER_SOCKET)
    assert machine.others == there
    assert xml.ownership(handle.text) == WHOSE
    live.unplug(UUID, deadline_s=1)
    live.forget(UUID)
    assert machine.others == there
    live.unplug(OTHER, deadline_s=1)
    live.forget(OTHER)
    assert machine.others == []


def test_whose_the_functions_are_outlasts_a_detach() -> None:
    machine = qemu()
    live, handle = running(machine, WHOSE)
    live.plug(UUID, SOCKET)
    live.plug(OTHER, OTHER_SOCKET)
    later = LiveDomain(handle, machine.monitor, lambda: 0.0)
    later.unplug(UUID, deadline_s=1)
    later.forget(UUID)
    assert xml.ownership(handle.text) == WHOSE


def test_a_bus_that_nobody_serves_keeps_the_function_out() -> None:
    """Its VM would migrate without asking."""
    machine = qemu()
    machine.listening = False
    live, handle = running(machine)
    with pytest.raises(SystemFailure) as caught:
        live.plug(UUID, SOCKET)
    assert caught.value.code == "companion-failed"
    assert (machine.devices, xml.functions(handle.text), machine.others) == ({}, [], [])


# --- on another host -----------------------------------------------------------------------------


def functions(text: str) -> dict[str, str]:
    """Device id -> its port, of the command line."""
    return {str(each["id"]): str(each["bus"]) for each in device(text, xml.DRIVER)}


def with_metadata(text: str, *entries: xml.FunctionEntry) -> str:
    """A live XML, whose metadata says something else than its command line."""
    for entry in xml.functions(text):
        start = text.index(f'<accelvisor:function uuid="{entry.uuid}"')
        text = text[:start] + text[text.index("/>", start) + 2 :]
    added = "".join(
        f'<accelvisor:function uuid="{e.uuid}" socket="{e.socket}" bus="{e.bus}"/>' for e in entries
    )
    return text.replace("</accelvisor:functions>", f"{added}</accelvisor:functions>")


def test_an_unchanged_domain_only_changes_hosts() -> None:
    text = xml.add(PREPARED, UUID, SOCKET, WHOSE)
    there = rewrite(text, host=HERE)
    assert xml.ownership(there) == xml.Ownership(HERE, WHOSE.owner)
    assert meaning(there) == meaning(text.replace(WHOSE.host, HERE))
    assert rewrite(there, host=HERE) == there


def test_a_function_that_was_plugged_live_is_there_at_its_port() -> None:
    text = xml.add(PREPARED, UUID, SOCKET)
    plugged = xml.FunctionEntry(OTHER, OTHER_SOCKET, xml.spare_id(1))
    text = with_metadata(text, *xml.functions(text), plugged)
    there = rewrite(text, host=HERE)
    assert functions(there) == {
        xml.device_id(UUID): xml.port_id(UUID), xml.device_id(OTHER): xml.spare_id(1),
    }  # fmt: skip
    assert len(pairs(there)) == 3


def test_the_first_function_plugged_live_brings_the_companions() -> None:
    text = xml.add(PREPARED, UUID, SOCKET)
    plugged = xml.FunctionEntry(OTHER, OTHER_SOCKET, xml.spare_id(0))
    bare = with_metadata(text, plugged)
    for _, value in pairs(bare):
        bare = bare.replace(value.replace('"', "&quot;"), "x")
    there = rewrite(bare, host=HERE)
    assert functions(there) == {xml.device_id(OTHER): xml.spare_id(0)}
    assert len(pairs(there)) == 3


def test_a_function_that_was_taken_out_is_not_there_and_its_port_is() -> None:
    """Ports have addresses by their order."""
    text = xml.add(xml.add(PREPARED, UUID, SOCKET), OTHER, OTHER_SOCKET)
    left = xml.FunctionEntry(OTHER, OTHER_SOCKET, xml.port_id(OTHER))
    there = rewrite(with_metadata(text, left), host=HERE)
    assert functions(there) == {xml.device_id(OTHER): xml.port_id(OTHER)}
    assert device(there, xml.PORT_DRIVER) == device(text, xml.PORT_DRIVER)


def test_a_domain_whose_functions_were_all_taken_out_starts_without_us() -> None:
    text = with_metadata(xml.add(PREPARED, UUID, SOCKET))
    there = rewrite(text, host=HERE)
    assert (functions(there), pairs(there)) == ({}, [])
    assert device(there, xml.PORT_DRIVER) == device(text, xml.PORT_DRIVER)


def test_a_function_that_moved_to_another_port_is_there() -> None:
    text = xml.add(PREPARED, UUID, SOCKET)
    moved = xml.FunctionEntry(UUID, SOCKET, xml.spare_id(0))
    there = rewrite(with_metadata(text, moved), host=HERE)
    assert functions(there) == {xml.device_id(UUID): xml.spare_id(0)}


def test_properties_that_somebody_added_stay() -> None:
    text = xml.add(PREPARED, UUID, SOCKET)
    slow = text.replace("&quot;addr&quot;:", "&quot;x-msg-timeout&quot;:9000,&quot;addr&quot;:")
    assert device(rewrite(slow, host=HERE), xml.DRIVER)[0]["x-msg-timeout"] == 9000


def test_another_run_directory_is_this_hosts() -> None:
    there = rewrite(xml.add(PREPARED, UUID, SOCKET), host=HERE, run="/run/mine")
    assert "/run/accelvisor" not in there
    (entry,) = xml.functions(there)
    assert entry.socket == f"/run/mine/function/{UUID}/libvirt-{DOMAIN}"
    assert device(there, xml.DRIVER)[0]["socket"] == {"type": "unix", "path": entry.socket}


@pytest.mark.parametrize("socket", ["", OTHER_SOCKET])
def test_a_function_that_stands_nowhere_is_refused(socket: str) -> None:
    entry = xml.FunctionEntry(OTHER, socket)
    text = xml.add(PREPARED, UUID, SOCKET)
    with pytest.raises(ConflictError) as caught:
        rewrite(with_metadata(text, *xml.functions(text), entry), host=HERE)
    assert caught.value.code == "function-place"
