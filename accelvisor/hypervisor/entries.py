"""Functions in a domain's ``<metadata>``: who they are, and whose.

``<accelvisor:functions host= owner=>`` with one ``<accelvisor:function uuid= socket= bus=/>`` each.
Tools that know nothing of accelvisor keep it, the hook and accelvisord read it, and it travels with
a domain. libvirt hands the whole group out and takes it back without its namespace, too.
"""

from __future__ import annotations

import uuid as uuids
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from accelvisor.errors import UsageError
from accelvisor.hypervisor.xmltree import (
    Document,
    append,
    child,
    discard,
    in_namespace,
    is_empty,
    parse,
)

NAMESPACE = "https://accelvisor.io/xmlns/1"


@dataclass(frozen=True, slots=True)
class FunctionEntry:
    """One ``<accelvisor:function>``; ``socket`` and ``bus`` are empty when it has none."""

    uuid: str
    socket: str = ""
    bus: str = ""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Attributes of the group; empty when it has none.

    Attributes:
        host: UUID of the host whose accelvisord owns the functions: the source, in the XML that a
            migration brings.
        owner: in whose name their states are signed; empty: the domain's UUID.
    """

    host: str = ""
    owner: str = ""


def function_uuid(text: str) -> str:
    """The canonical form of a function's UUID; UsageError when it is none."""
    try:
        return str(uuids.UUID(text))
    except ValueError:
        raise UsageError(
            f"{text!r} is not a UUID", where="function", hint="accelctl function list shows them"
        ) from None


def functions(xml: str | Document) -> list[FunctionEntry]:
    """The functions that the XML carries, in its order; entries without a UUID are passed over."""
    document = xml if isinstance(xml, Document) else parse(xml)
    elements = (
        element
        for above in _groups(document)
        for element in in_namespace(above, NAMESPACE, "function")
    )
    return _read(elements)


def ownership(xml: str | Document) -> Ownership:
    """Whose the functions of this XML are."""
    document = xml if isinstance(xml, Document) else parse(xml)
    group = next((above[-1] for above in _groups(document)), None)
    if group is None:
        return Ownership()
    return Ownership(group.get("host", ""), group.get("owner", ""))


def metadata_element(entries: list[FunctionEntry], whose: Ownership = Ownership()) -> str:
    """``<functions>`` without namespaces, as virDomainSetMetadata wants it (it adds them)."""
    group = ET.Element("functions")
    if whose is not None:
        _own(group, whose)
    for entry in entries:
        group.append(_entry("function", entry))
    return str(Document(group)).strip()


def parse_metadata_element(text: str) -> list[FunctionEntry]:
    """The entries in what virDomainGetMetadata returns."""
    group = parse(text, where="domain metadata").root
    return _read(
        element
        for element in group
        if isinstance(element.tag, str) and element.tag.rpartition(":")[2] == "function"
    )


def put(document: Document, entry: FunctionEntry) -> None:
    """Add an entry, or give the one of that function another socket and bus."""
    for above in _groups(document):
        for element in in_namespace(above, NAMESPACE, "function"):
            if _uuid_of(element) == entry.uuid:
                element.attrib.update(_entry("x", entry).attrib)
                return
    metadata = child(document.root, "metadata")
    if metadata is None:
        metadata = ET.Element("metadata")
        append(document.root, metadata, depth=1)
    group = next(in_namespace((document.root, metadata), NAMESPACE, "functions"), None)
    if group is None:
        group = ET.Element("accelvisor:functions", {"xmlns:accelvisor": NAMESPACE})
        append(metadata, group, depth=2)
    prefix, colon, _ = group.tag.rpartition(":")
    append(group, _entry(f"{prefix}{colon}function", entry), depth=3)


def own(document: Document, whose: Ownership) -> None:
    """Say whose the functions are; empty attributes of ``whose`` leave what stands there."""
    for above in _groups(document):
        _own(above[-1], whose)


def remove(document: Document, uuid: str) -> bool:
    """Take an entry out, and what is empty without it. False when there is none."""
    metadata = child(document.root, "metadata")
    removed = False
    for above in list(_groups(document)):
        group = above[-1]
        for element in list(in_namespace(above, NAMESPACE, "function")):
            if _uuid_of(element) == uuid:
                discard(group, element)
                removed = True
        if removed and metadata is not None and not len(group) and not (group.text or "").strip():
            # Its attributes say whose the functions were, of which there are none any more.
            discard(metadata, group)
    if removed and metadata is not None and is_empty(metadata):
        discard(document.root, metadata)
    return removed


def _groups(document: Document) -> Iterator[tuple[ET.Element, ...]]:
    """Each group, as the chain of elements from the root to it."""
    metadata = child(document.root, "metadata")
    if metadata is not None:
        above = (document.root, metadata)
        for group in in_namespace(above, NAMESPACE, "functions"):
            yield (*above, group)


def _read(elements: Iterator[ET.Element]) -> list[FunctionEntry]:
    return [
        FunctionEntry(uuid, element.get("socket", ""), element.get("bus", ""))
        for element in elements
        if (uuid := _uuid_of(element)) is not None
    ]


def _uuid_of(element: ET.Element) -> str | None:
    try:
        return function_uuid(element.get("uuid", ""))
    except UsageError:
        return None


def _entry(tag: str, entry: FunctionEntry) -> ET.Element:
    attributes = {"uuid": entry.uuid, "socket": entry.socket, "bus": entry.bus}
    return ET.Element(tag, {name: value for name, value in attributes.items() if value})


def _own(group: ET.Element, whose: Ownership) -> None:
    for name, value in (("host", whose.host), ("owner", whose.owner)):
        if value:
            group.set(name, value)
