"""QEMU's arguments in a domain XML: ``<qemu:commandline>`` as options with a value each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

from accelvisor.hypervisor.xmltree import Document, append, discard, in_namespace, is_empty

QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"


@dataclass(frozen=True, slots=True)
class Option:
    """Two neighbouring ``<qemu:arg>``: ``-device`` and its value."""

    commandline: ET.Element
    flag: ET.Element
    argument: ET.Element

    @property
    def name(self) -> str:
        """Without dashes."""
        return self.flag.get("value", "").lstrip("-")

    @property
    def value(self) -> str:
        return self.argument.get("value", "")

    @property
    def device(self) -> dict[str, Any]:
        """The value as a device's properties, of the JSON or the ``a=b,c=d`` form."""
        return _device(self.value)

    def replace(self, value: str) -> None:
        """Give the option another value."""
        self.argument.set("value", value)

    def discard(self) -> None:
        """Take it out of the command line."""
        discard(self.commandline, self.flag)
        discard(self.commandline, self.argument)


def options(document: Document, *names: str) -> list[Option]:
    """The options of these names, in order."""
    wanted = {dashes + name for name in names for dashes in ("-", "--")}
    found = []
    for commandline in in_namespace((document.root,), QEMU_NAMESPACE, "commandline"):
        arguments = list(in_namespace((document.root, commandline), QEMU_NAMESPACE, "arg"))
        for flag, argument in pairwise(arguments):
            if flag.get("value") in wanted:
                found.append(Option(commandline, flag, argument))
    return found


def devices(document: Document) -> list[dict[str, Any]]:
    """The ``-device`` arguments, parsed."""
    return [option.device for option in options(document, "device")]


def add(document: Document, flag: str, value: str) -> None:
    """Append an option; ``flag`` has its dash."""
    commandline = next(in_namespace((document.root,), QEMU_NAMESPACE, "commandline"), None)
    if commandline is None:
        prefix = document.bind(QEMU_NAMESPACE, "qemu")
        commandline = ET.Element(f"{prefix}:commandline")
        append(document.root, commandline, depth=1)
    prefix, colon, _ = commandline.tag.rpartition(":")
    for text in (flag, value):
        append(commandline, ET.Element(f"{prefix}{colon}arg", {"value": text}), depth=2)


def add_device(document: Document, device: dict[str, Any]) -> None:
    """Append a ``-device`` in JSON."""
    add(document, "-device", json.dumps(device, separators=(",", ":")))


def tidy(document: Document) -> None:
    """Drop a command line without arguments."""
    for commandline in list(in_namespace((document.root,), QEMU_NAMESPACE, "commandline")):
        if is_empty(commandline):
            discard(document.root, commandline)


def _device(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}
    driver, *pairs = text.split(",")
    return {"driver": driver, **dict(pair.partition("=")[::2] for pair in pairs)}
