"""Functions in a domain XML: add, remove, list, and what a domain needs before it can have one.

libvirt has no element for a vfio-user device, so a function stands in two places of the XML:

* in ``<metadata>``, as ``<accelvisor:function uuid= socket= bus=/>``: who it is. Tools that know
  nothing of accelvisor keep it, the hook and accelvisord read it;
* in ``<qemu:commandline>``, as two ``-device`` arguments: a PCIe root port of the function's own
  and ``vfio-user-pci`` behind it.

The root port is one that libvirt does not know. That is on purpose: behind a port of libvirt's own
the function would stand where ``virsh attach-device`` believes the slot free. It is on ``pcie.0``
without an address, which QEMU gives out after everything that libvirt placed, so the two can't
collide. Everything here takes and returns text, changes nothing else in it, and needs no libvirt.
"""

from __future__ import annotations

import re
import uuid as uuids
from typing import Any
from xml.etree import ElementTree as ET

from accelvisor.errors import ConflictError, NotFoundError, UsageError
from accelvisor.hypervisor import arguments, entries
from accelvisor.hypervisor.arguments import QEMU_NAMESPACE as QEMU_NAMESPACE
from accelvisor.hypervisor.arguments import add_device, devices
from accelvisor.hypervisor.companions import Companions, is_companion
from accelvisor.hypervisor.entries import NAMESPACE as NAMESPACE
from accelvisor.hypervisor.entries import FunctionEntry as FunctionEntry
from accelvisor.hypervisor.entries import Ownership as Ownership
from accelvisor.hypervisor.entries import function_uuid as function_uuid
from accelvisor.hypervisor.entries import functions as functions
from accelvisor.hypervisor.entries import metadata_element as metadata_element
from accelvisor.hypervisor.entries import ownership as ownership
from accelvisor.hypervisor.entries import parse_metadata_element as parse_metadata_element
from accelvisor.hypervisor.xmltree import Document, append, child, descend, parse
from accelvisor.limits import GIB, KIB, LIMITS, MIB

DRIVER = "vfio-user-pci"
PORT_DRIVER = "pcie-root-port"

#: A root port is told apart by (chassis, slot). libvirt numbers chassis from 1 by controller index,
#: so this one is ours as long as a domain has fewer root ports than that.
CHASSIS = 250
#: A path below a function's directory, whatever the run directory is.
_OF_FUNCTION = re.compile(r"/function/+([0-9A-Fa-f-]{36})/")
_DEVICE_ID = re.compile(r"accel-([0-9A-Fa-f-]{36})")
#: sizeof(sockaddr_un.sun_path) less its NUL.
SOCKET_PATH_BYTES = 107
#: libvirt itself writes KiB; people may write more ways than these.
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
#: Options of QEMU among which companions are.
_OPTIONS = ("chardev", "object")


def device_id(uuid: str) -> str:
    """The id of the function's device in QEMU."""
    return f"accel-{uuid}"


def port_id(uuid: str) -> str:
    """The id of the root port that a persistent attachment brings along."""
    return f"accel-port-{uuid}"


def spare_id(number: int) -> str:
    """The id of an empty root port that waits for hot-plug."""
    return f"accel-spare-{number}"


def port_device(identifier: str, slot: int) -> dict[str, Any]:
    """The ``-device`` object of one root port.

    Firmware and guest size a port's windows when they enumerate it, which is before anything is
    hot-plugged; ``pref64-reserve`` makes them leave room for the largest BAR2 there can be.
    """
    return {
        "driver": PORT_DRIVER,
        "id": identifier,
        "bus": "pcie.0",
        "chassis": CHASSIS,
        "slot": slot,
        "pref64-reserve": LIMITS.window_bytes,
    }


def function_device(uuid: str, socket: str, bus: str) -> dict[str, Any]:
    """The ``-device`` object (and ``device_add`` arguments) of a function behind a root port."""
    return {
        "driver": DRIVER,
        "id": device_id(uuid),
        "bus": bus,
        "addr": "0x0",
        "socket": {"type": "unix", "path": _socket_path(socket)},
    }


def _socket_path(path: str) -> str:
    if not path.startswith("/") or any(ord(c) < 32 for c in path):
        raise UsageError(f"{path!r} is not an absolute path", where="function socket")
    if len(path.encode()) > SOCKET_PATH_BYTES:
        raise UsageError(
            f"the socket's path is longer than {SOCKET_PATH_BYTES} bytes",
            where="function socket",
            hint="set ACCELVISOR_RUN_DIR to a shorter path",
        )
    return path


# --- reading -------------------------------------------------------------------------------------


def claimed(xml: str | Document) -> list[str]:
    """UUIDs of all functions that a domain started from this XML would have: those in its metadata,
    then those that only its ``<qemu:commandline>`` names, by a device's id or its socket's path.

    Not for a running domain's XML: its command line goes on naming what was unplugged.
    """
    document = _document(xml)
    found = [entry.uuid for entry in functions(document)]
    found += [uuid for device in devices(document) if (uuid := function_of(device)) is not None]
    return list(dict.fromkeys(found))


def function_of(device: dict[str, Any]) -> str | None:
    """Which function a ``-device`` connects to: its socket counts, then its id."""
    if device.get("driver") != DRIVER:
        return None
    socket = device.get("socket")
    path = socket.get("path") if isinstance(socket, dict) else device.get("socket.path")
    match = _OF_FUNCTION.search(path) if isinstance(path, str) else None
    if match is None:
        match = _DEVICE_ID.fullmatch(str(device.get("id", "")))
    try:
        return function_uuid(match[1]) if match else None
    except UsageError:
        return None


def hotplug_ports(xml: str | Document) -> list[str]:
    """Ids of every root port that can take a hot-plugged function, the best first: spare ports,
    ports of functions (empty after a live detach), then libvirt's own from the last one on.
    """
    document = _document(xml)
    own = [
        str(device.get("id", ""))
        for device in devices(document)
        if device.get("driver") == PORT_DRIVER and str(device.get("id", "")).startswith("accel-")
    ]
    own.sort(key=lambda identifier: not identifier.startswith("accel-spare-"))
    libvirts = [
        f"pci.{controller.get('index')}"
        for controller in descend(document.root, "devices/controller")
        if controller.get("type") == "pci" and controller.get("model") == PORT_DRIVER
    ]
    return own + libvirts[::-1]


def memory_problem(xml: str | Document) -> str | None:
    """Why QEMU could not share this guest's memory with a function; None when it can."""
    root = _document(xml).root
    backing = child(root, "memoryBacking")
    cells = list(descend(root, "cpu/numa/cell"))
    access = child(backing, "access") if backing is not None else None
    shared = access is not None and access.get("mode") == "shared"
    private = [cell for cell in cells if cell.get("memAccess", "") == "private"]
    if private or not (shared or (cells and all(c.get("memAccess") == "shared" for c in cells))):
        return "its memory is private (memoryBacking has no <access mode='shared'/>)"
    source = child(backing, "source") if backing is not None else None
    kind = source.get("type") if source is not None else None
    huge = backing is not None and child(backing, "hugepages") is not None
    if kind not in ("memfd", "file") and not huge:
        return "its memory has no file descriptor (memoryBacking has no <source type='memfd'/>)"
    return None


def memory_bytes(xml: str | Document) -> int | None:
    """How much RAM the guest can have, what is plugged in included; None when it is not said."""
    found = child(_document(xml).root, "memory")
    text = (found.text or "").strip() if found is not None else ""
    unit = _UNITS.get(found.get("unit", "KiB")) if found is not None else None
    return int(text) * unit if unit is not None and text.isdecimal() else None


def _document(xml: str | Document) -> Document:
    return xml if isinstance(xml, Document) else parse(xml)


# --- writing -------------------------------------------------------------------------------------


def add(xml: str, uuid: str, socket: str, whose: Ownership | None = None) -> str:
    """The XML with the function in it, and with the domain's companions. Adding the same twice
    changes nothing.

    ConflictError ``function-attached`` when it is there with another socket, ``domain-memory``
    when the guest's memory is not shared (:func:`prepare` mends that), ``domain-machine`` when the
    machine has no PCI Express.
    """
    document = parse(xml)
    uuid, socket = function_uuid(uuid), _socket_path(socket)
    listed = {entry.uuid: entry for entry in functions(document)}.get(uuid)
    if listed is not None and listed.socket not in ("", socket):
        raise ConflictError(
            f"function {uuid} is attached with another socket, {listed.socket}",
            code="function-attached",
            where="domain-xml",
            hint="detach it first",
        )
    require_shared_memory(document)
    require_pcie(document)
    before = str(document)
    bus = port_id(uuid)
    if listed is None:
        entries.put(document, FunctionEntry(uuid, socket, bus))
    present = {device.get("id") for device in devices(document)}
    if device_id(uuid) not in present:
        if bus not in present:
            add_device(document, port_device(bus, _free_slot(document, uuid)))
        add_device(document, function_device(uuid, socket, bus))
    if whose is not None:
        entries.own(document, whose)
    accompany(document, socket)
    after = str(document)
    return after if after != before else xml


def accompany(document: Document, socket: str) -> None:
    """Give the domain its companions, or the right ones, or, without a function, none.

    ``socket`` is the domain's of any function; from one that is not, nobody can tell where the
    companions are, so that none is added then.
    """
    there = [o for o in arguments.options(document, *_OPTIONS) if is_companion(o.name, o.value)]
    companions = Companions.beside(socket)
    wanted = companions.arguments() if companions is not None and claimed(document) else []
    if [(f"-{option.name}", option.value) for option in there] == wanted:
        return
    for option in there:
        option.discard()
    for flag, value in wanted:
        arguments.add(document, flag, value)


def remove(xml: str, uuid: str) -> str:
    """The XML without the function: the exact inverse of :func:`add`. NotFoundError
    (``function-not-attached``) when it is not there.
    """
    document = parse(xml)
    uuid = function_uuid(uuid)
    ours = {device_id(uuid), port_id(uuid)}
    removed = False
    for option in arguments.options(document, "device"):
        device = option.device
        if device.get("id") in ours or function_of(device) == uuid:
            option.discard()
            removed = True
    removed |= entries.remove(document, uuid)
    if not removed:
        raise NotFoundError(
            f"function {uuid} is not attached to this domain",
            code="function-not-attached",
            where="domain-xml",
        )
    if not claimed(document):
        accompany(document, "")
    arguments.tidy(document)
    return str(document)


def prepare(xml: str, *, spare_ports: int = 4) -> str:
    """The XML made ready for functions: shared memfd memory, so many spare root ports for hot-plug,
    and its companions if it has functions (their sockets are there only for such a domain; a live
    attach brings them along). Nothing else changes; what is ready already stays as it is.
    """
    document = parse(xml)
    require_pcie(document)
    if memory_problem(document) is not None:
        _share_memory(document)
    present = {device.get("id") for device in devices(document)}
    for number in range(spare_ports):
        if spare_id(number) not in present:
            identifier = spare_id(number)
            add_device(document, port_device(identifier, _free_slot(document, number)))
    for entry in functions(document):
        if entry.socket:
            accompany(document, entry.socket)
            break
    return str(document)


def require_shared_memory(xml: str | Document) -> None:
    """ConflictError ``domain-memory`` when the guest's memory can't be shared with a function."""
    problem = memory_problem(xml)
    if problem is not None:
        raise ConflictError(
            f"a function cannot reach this guest's memory: {problem}",
            code="domain-memory",
            where="domain-xml",
            hint="prepare the domain (accelctl vm prepare), then power it off and on",
        )


def require_pcie(xml: str | Document) -> None:
    """ConflictError ``domain-machine`` unless the machine has a PCI Express root bus."""
    root = _document(xml).root
    machine = next((t.get("machine", "") for t in descend(root, "os/type")), "")
    has_root = any(
        controller.get("model") == "pcie-root" for controller in descend(root, "devices/controller")
    )
    if not (has_root or "q35" in machine or machine.startswith("virt")):
        raise ConflictError(
            f"a function needs PCI Express, the machine {machine or 'of this domain'} has none",
            code="domain-machine",
            where="domain-xml",
            hint="use machine='q35'",
        )


def attachment_xml(uuid: str, socket: str) -> str:
    """What to paste into a domain XML that another tool manages: memory, metadata, devices."""
    uuid = function_uuid(uuid)
    root = ET.Element("domain", {"xmlns:qemu": QEMU_NAMESPACE})
    document = Document(root)
    _share_memory(document)
    entries.put(document, FunctionEntry(uuid, socket, port_id(uuid)))
    add_device(document, port_device(port_id(uuid), _free_slot(document, uuid)))
    add_device(document, function_device(uuid, socket, port_id(uuid)))
    accompany(document, socket)
    root.insert(0, ET.Comment(" merge into the domain's own elements, and keep xmlns:qemu "))
    root[0].tail = "\n  "
    return str(document)


def _share_memory(document: Document) -> None:
    backing = _ensure(document.root, "memoryBacking", depth=1)
    source = child(backing, "source")
    if source is None or source.get("type") not in ("memfd", "file"):
        _ensure(backing, "source", depth=2).set("type", "memfd")
    _ensure(backing, "access", depth=2).set("mode", "shared")
    for cell in descend(document.root, "cpu/numa/cell"):
        if cell.get("memAccess") == "private":
            cell.set("memAccess", "shared")


def _ensure(parent: ET.Element, name: str, *, depth: int) -> ET.Element:
    element = child(parent, name)
    if element is None:
        element = ET.Element(name)
        append(parent, element, depth=depth)
    return element


def _free_slot(document: Document, wanted: str | int) -> int:
    """A slot number for a new port; from the UUID, so that pasted pieces of two differ."""
    taken = {
        int(slot)
        for device in devices(document)
        if device.get("driver") == PORT_DRIVER and str(slot := device.get("slot", "")).isdecimal()
    }
    if isinstance(wanted, int):
        return next(free for free in range(wanted, 8192) if free not in taken)
    number = uuids.UUID(wanted).int
    while (wish := _slot_of_function(number)) in taken:
        number += 1
    return wish


def _slot_of_function(number: int) -> int:
    """One of 5952 slots, 13 bits each, beside the first 64, which are for spare ports.

    To see whether a new port's slot is taken, QEMU compares that one's last eight bits with the
    others' whole numbers (hw/pci/pcie_port.c): so those bits are never a spare port's number.
    """
    return 256 * (1 + number // 192 % 31) + 64 + number % 192
