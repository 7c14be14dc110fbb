from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import ConfigError, ConflictError, NotFoundError, UsageError
from accelvisor.hypervisor import xml
from accelvisor.limits import LIMITS
from tests.hypervisor.samples import (
    BARE,
    INSTALLER,
    OTHER,
    OTHER_SOCKET,
    READY,
    SOCKET,
    UUID,
    meaning,
)

PREPARED = xml.prepare(INSTALLER)
DOMAINS = [READY, BARE, PREPARED]


def arguments(text: str) -> list[str]:
    """QEMU arguments as libvirt reads them, by another parser."""
    space = f"{{{xml.QEMU_NAMESPACE}}}"
    return [a.get("value", "") for a in ET.fromstring(text).iter(f"{space}arg")]


def device(text: str, driver: str) -> list[dict[str, object]]:
    values = [json.loads(value) for value in arguments(text) if value.startswith("{")]
    return [value for value in values if value.get("driver") == driver]


@pytest.mark.parametrize("domain", DOMAINS)
def test_an_added_function_is_a_device_behind_a_port_of_its_own(domain: str) -> None:
    added = xml.add(domain, UUID, SOCKET)
    (function,) = device(added, "vfio-user-pci")
    ports = {port["id"]: port for port in device(added, "pcie-root-port")}
    assert function["socket"] == {"type": "unix", "path": SOCKET}
    assert ports[function["bus"]]["bus"] == "pcie.0"
    values = arguments(added)
    order = [json.loads(v)["id"] for v in values if v.startswith("{") and UUID in v]
    assert order == [function["bus"], function["id"]], "QEMU wants the port before the device"
    flags = {values[i - 1] for i, v in enumerate(values) if v.startswith('{"driver"')}
    assert flags == {"-device"}
    assert xml.functions(added) == [xml.FunctionEntry(UUID, SOCKET, str(function["bus"]))]


@pytest.mark.parametrize("domain", DOMAINS)
def test_remove_is_the_exact_inverse_of_add(domain: str) -> None:
    assert meaning(xml.remove(xml.add(domain, UUID, SOCKET), UUID)) == meaning(domain)


@pytest.mark.parametrize("domain", DOMAINS)
def test_adding_twice_changes_nothing(domain: str) -> None:
    once = xml.add(domain, UUID, SOCKET)
    assert xml.add(once, UUID.upper(), SOCKET) == once


@given(st.lists(st.uuids().map(str), min_size=1, max_size=5, unique=True), st.randoms())
def test_functions_come_and_go_in_any_order(uuids: list[str], random: object) -> None:
    text = READY
    for uuid in uuids:
        text = xml.add(text, uuid, f"/run/{uuid}")
    assert [entry.uuid for entry in xml.functions(text)] == uuids
    ports = device(text, "pcie-root-port")
    assert len({(port["chassis"], port["slot"]) for port in ports}) == len(uuids)
    leaving = list(uuids)
    random.shuffle(leaving)  # type: ignore[attr-defined]
    for uuid in leaving:
        text = xml.remove(text, uuid)
    assert meaning(text) == meaning(READY)


def test_no_other_element_is_lost_or_changed() -> None:
    added = xml.add(PREPARED, UUID, SOCKET)
    for piece in (
        "<!-- keep this one -->",
        "libosinfo:libosinfo",
        "a &amp; b.qcow2",
        "s&lt;cret",
        "<features><acpi/><apic/></features>",
    ):
        assert piece in added


def test_a_function_of_another_tool_in_the_command_line_stays() -> None:
    text = xml.remove(xml.add(READY, UUID, SOCKET), UUID)
    assert arguments(text) == ["-device", "edu,id=mine"]
    assert "QEMU_TRACE" in text


def test_slots_of_two_functions_that_wish_the_same_differ() -> None:
    one = "00000000-0000-4000-8000-000000000000"
    two = f"00000000-0000-4000-8000-{31 * 192:012x}"  # the same modulo the range of wishes
    text = xml.add(xml.add(READY, one, "/a"), two, "/b")
    assert len({port["slot"] for port in device(text, "pcie-root-port")}) == 2


@given(st.lists(st.uuids().map(str), min_size=1, max_size=4, unique=True))
def test_qemu_takes_no_slot_for_another_ports(uuids: list[str]) -> None:
    """By chance a VM did not start: "Can't add chassis slot, error -16"."""
    text = xml.prepare(READY, spare_ports=16)
    for uuid in uuids:
        text = xml.add(text, uuid, f"/run/{uuid}")
    there: set[int] = set()
    for port in device(text, "pcie-root-port"):
        slot = int(str(port["slot"]))
        assert slot < 8192
        assert slot & 0xFF not in there, "as pcie_chassis_add_slot() of QEMU asks"
        there.add(slot)


def test_the_same_function_with_another_socket_is_refused() -> None:
    with pytest.raises(ConflictError) as caught:
        xml.add(xml.add(READY, UUID, SOCKET), UUID, OTHER_SOCKET)
    assert caught.value.code == "function-attached"


def test_a_half_pasted_function_is_completed() -> None:
    whole = xml.add(READY, UUID, SOCKET)
    without_entry = re.sub(r"<metadata>.*</metadata>", "", whole, flags=re.S)
    assert meaning(xml.add(without_entry, UUID, SOCKET)).count("vfio-user-pci") == 1
    assert [e.uuid for e in xml.functions(xml.add(without_entry, UUID, SOCKET))] == [UUID]
    without_device = re.sub(r"<q:arg value=\"\{[^/]*vfio-user-pci.*?/>", "<q:arg/>", whole)
    assert not device(without_device.replace("<q:arg/>", ""), "vfio-user-pci")
    (function,) = device(
        xml.add(without_device.replace("<q:arg/>", ""), UUID, SOCKET), "vfio-user-pci"
    )
    assert function["id"] == xml.device_id(UUID)


def test_removing_what_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFoundError) as caught:
        xml.remove(xml.add(READY, UUID, SOCKET), OTHER)
    assert caught.value.code == "function-not-attached"


@pytest.mark.parametrize("text", ["", "x", "0f6d3a52", "0" * 33, "../../etc"])
def test_what_is_no_uuid_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        xml.add(READY, text, SOCKET)


@pytest.mark.parametrize("path", ["", "run/x", "/a\nb", "/" + "x" * 107])
def test_what_is_no_socket_path_is_refused(path: str) -> None:
    with pytest.raises(UsageError):
        xml.add(READY, UUID, path)


@pytest.mark.parametrize(
    "backing",
    [
        "",
        "<memoryBacking/>",
        "<memoryBacking><source type='memfd'/></memoryBacking>",
        "<memoryBacking><source type='memfd'/><access mode='private'/></memoryBacking>",
        "<memoryBacking><source type='anonymous'/><access mode='shared'/></memoryBacking>",
        "<memoryBacking><access mode='shared'/></memoryBacking>",
        "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"
        "<cpu><numa><cell id='0' memAccess='private'/></numa></cpu>",
    ],
)
def test_memory_that_cannot_be_shared_is_refused_and_can_be_mended(backing: str) -> None:
    domain = re.sub(r"<memoryBacking>.*</memoryBacking>", backing, BARE)
    with pytest.raises(ConflictError) as caught:
        xml.add(domain, UUID, SOCKET)
    assert caught.value.code == "domain-memory"
    assert "accelctl vm prepare" in caught.value.hint
    assert device(xml.add(xml.prepare(domain), UUID, SOCKET), "vfio-user-pci")


@pytest.mark.parametrize(
    "backing",
    [
        "<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>",
        "<memoryBacking><hugepages/><access mode='shared'/></memoryBacking>",
        "<memoryBacking><source type='memfd'/></memoryBacking>"
        "<cpu><numa><cell id='0' memAccess='shared'/></numa></cpu>",
    ],
)
def test_other_kinds_of_shared_memory_are_fine(backing: str) -> None:
    domain = re.sub(r"<memoryBacking>.*</memoryBacking>", backing, BARE)
    assert xml.memory_problem(domain) is None
    assert meaning(xml.prepare(domain, spare_ports=0)) == meaning(domain)


@pytest.mark.parametrize("machine", ["pc", "pc-i440fx-9.0", "microvm", "isapc"])
def test_a_machine_without_pci_express_is_refused(machine: str) -> None:
    domain = BARE.replace("q35", machine)
    for verb in (lambda: xml.add(domain, UUID, SOCKET), lambda: xml.prepare(domain)):
        with pytest.raises(ConflictError) as caught:
            verb()
        assert caught.value.code == "domain-machine"


def test_prepare_adds_spare_ports_with_room_for_the_largest_window() -> None:
    ports = device(xml.prepare(BARE, spare_ports=3), "pcie-root-port")
    assert [port["id"] for port in ports] == [xml.spare_id(n) for n in range(3)]
    assert {port["pref64-reserve"] for port in ports} == {LIMITS.window_bytes}
    assert len({(port["chassis"], port["slot"]) for port in ports}) == 3


def test_preparing_again_changes_nothing_and_more_ports_only_adds() -> None:
    once = xml.prepare(INSTALLER, spare_ports=2)
    assert xml.prepare(once, spare_ports=2) == once
    assert len(device(xml.prepare(once, spare_ports=5), "pcie-root-port")) == 5


def test_a_foreign_prefix_named_qemu_is_not_taken_for_qemus() -> None:
    domain = BARE.replace("<domain ", "<domain xmlns:qemu='urn:not-qemu' ")
    added = xml.add(domain, UUID, SOCKET)
    assert len(device(added, "vfio-user-pci")) == 1
    assert meaning(xml.remove(added, UUID)) == meaning(domain)


def test_hot_plug_prefers_spare_ports_and_takes_libvirts_last_ones_last() -> None:
    text = xml.prepare(xml.add(PREPARED, UUID, SOCKET), spare_ports=2)
    assert xml.hotplug_ports(text) == [
        *(xml.spare_id(n) for n in range(4)),
        xml.port_id(UUID),
        "pci.2",
        "pci.1",
    ]


@pytest.mark.parametrize(
    "value", ["{", "{}", "[1]", "null", "{" * 200_000, "vfio-pci,host=1:0.0", "=,=,", "", "a,id"]
)
def test_arguments_of_any_shape_do_not_hinder(value: str) -> None:
    escaped = value.replace("&", "&amp;")
    domain = READY.replace("edu,id=mine", escaped)
    assert meaning(xml.remove(xml.add(domain, UUID, SOCKET), UUID)) == meaning(domain)


def test_entries_that_are_not_ours_are_passed_over() -> None:
    metadata = (
        f"<metadata><f:functions xmlns:f='{xml.NAMESPACE}'><f:function/><f:function uuid='no'/>"
        f"<f:function uuid='{UUID.upper()}'/></f:functions>"
        f"<functions xmlns='urn:else'><function uuid='{OTHER}'/></functions></metadata>"
    )
    text = BARE.replace("<memory>", metadata + "<memory>")
    assert xml.functions(text) == [xml.FunctionEntry(UUID)]


def test_metadata_round_trips_as_libvirt_wants_it() -> None:
    entries = [xml.FunctionEntry(UUID, SOCKET, "pci.1"), xml.FunctionEntry(OTHER)]
    text = xml.metadata_element(entries)
    assert "xmlns" not in text, "virDomainSetMetadata adds the namespace itself"
    assert xml.parse_metadata_element(text) == entries


def test_the_pasted_pieces_are_what_add_makes() -> None:
    pasted = xml.attachment_xml(UUID, SOCKET)
    assert xml.memory_problem(pasted) is None
    assert xml.functions(pasted) == xml.functions(xml.add(BARE, UUID, SOCKET))
    assert arguments(pasted) == arguments(xml.add(BARE, UUID, SOCKET))


def test_pasted_pieces_of_many_functions_rarely_wish_the_same_slot() -> None:
    slots = [
        device(xml.attachment_xml(str(uuid4()), "/s"), "pcie-root-port")[0]["slot"]
        for _ in range(40)
    ]
    assert len(set(slots)) >= 38
    assert all(64 <= slot < 8192 for slot in slots)  # type: ignore[operator]


def test_broken_xml_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        xml.add("<domain>", UUID, SOCKET)


def _with_device(text: str) -> str:
    value = text.replace("&", "&amp;").replace('"', "&quot;")
    arguments = f'<q:arg value="--device"/><q:arg value="{value}"/>'
    return READY.replace("</q:commandline>", f"{arguments}</q:commandline>")


@pytest.mark.parametrize(
    "device",
    [
        json.dumps({"driver": xml.DRIVER, "socket": {"type": "unix", "path": SOCKET}}),
        f"{xml.DRIVER},socket.type=unix,socket.path={SOCKET}",
        # The path is what QEMU connects to, whatever the id says.
        json.dumps({"driver": xml.DRIVER, "id": f"accel-{OTHER}", "socket": {"path": SOCKET}}),
        f"{xml.DRIVER},id=accel-{UUID},socket.path=/elsewhere",
    ],
)
def test_a_function_without_metadata_is_claimed_and_can_be_removed(device: str) -> None:
    text = _with_device(device)
    assert (xml.functions(text), xml.claimed(text)) == ([], [UUID])
    assert meaning(xml.remove(text, UUID)) == meaning(READY)


def test_what_stands_in_both_places_is_claimed_once() -> None:
    assert xml.claimed(xml.add(READY, UUID, SOCKET)) == [UUID]


@pytest.mark.parametrize(
    "device", ["", "{", '{"driver":"vfio-user-pci","socket":[]}', f"edu,id=accel-{UUID}",
               "vfio-user-pci,id=accel-------------------------------------,socket.path=/x"],
)  # fmt: skip
def test_other_devices_claim_no_function(device: str) -> None:
    assert xml.claimed(_with_device(device)) == []
