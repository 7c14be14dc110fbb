"""The XML that a migrated or restored domain has on its new host; pure.

A source's live XML is not what its QEMU has become: libvirt knows neither the functions that were
plugged into the running domain (they stand in the metadata, with their port) nor those that were
taken out (they go on standing in the command line). The destination's QEMU is started from it, and
has to have each device where the source has it now. So the metadata decides. Ports are left as they
are, in their order, from which QEMU derives their addresses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from accelvisor.errors import ConflictError
from accelvisor.hypervisor import arguments, entries
from accelvisor.hypervisor.entries import FunctionEntry, Ownership
from accelvisor.hypervisor.xml import accompany, function_device, function_of
from accelvisor.hypervisor.xmltree import Document, parse


def rewrite(xml: str, *, host: str, run: str | Path | None = None) -> str:
    """The XML for this host.

    Args:
        xml: the source's, as libvirt gives it to the hook at ``migrate`` and ``restore``.
        host: UUID of this host, which owns the functions from now on.
        run: this host's run directory; None: the same as at the source.

    ConflictError (``function-place``) when nothing tells where a function stands.
    """
    document = parse(xml)
    functions = [_moved(entry, run) for entry in entries.functions(document)]
    for entry in functions:
        entries.put(document, entry)
    _place(document, functions)
    entries.own(document, Ownership(host=host))
    accompany(document, next((entry.socket for entry in functions if entry.socket), ""))
    arguments.tidy(document)
    return str(document)


def _moved(entry: FunctionEntry, run: str | Path | None) -> FunctionEntry:
    if run is None or not entry.socket:
        return entry
    name = entry.socket.rpartition("/")[2]
    return FunctionEntry(entry.uuid, f"{run}/function/{entry.uuid}/{name}", entry.bus)


def _place(document: Document, functions: Iterable[FunctionEntry]) -> None:
    """Make the devices those of the metadata, once each, where it says."""
    missing = {entry.uuid: entry for entry in functions}
    for option in arguments.options(document, "device"):
        device = option.device
        uuid = function_of(device)
        if uuid is None:
            continue
        entry = missing.pop(uuid, None)
        if entry is None:
            option.discard()
        elif entry.bus and entry.socket:
            wanted = function_device(uuid, entry.socket, entry.bus)
            # Properties that somebody added, such as x-msg-timeout, stay.
            option.replace(json.dumps(device | wanted, separators=(",", ":")))
    for entry in missing.values():
        if not (entry.bus and entry.socket):
            raise ConflictError(
                f"nothing says behind which port function {entry.uuid} stands",
                code="function-place",
                where="domain-xml",
                hint="detach it and attach it again",
            )
        arguments.add_device(document, function_device(entry.uuid, entry.socket, entry.bus))
