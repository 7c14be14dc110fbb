"""What a domain with functions has besides them: a private monitor, and a part in its migration.

Both are clients of sockets that accelvisord listens on, RUN/domain/libvirt-DOMAIN.monitor and
``.bus``. Three arguments for QEMU, with fixed ids, once a domain however many functions it has:

* a character device that connects to the monitor's socket, and again every second when it is gone
  (QEMU starts without anybody there, and writes one line into its log);
* the monitor on it;
* ``dbus-vmstate``, which QEMU makes only if the bus is there, and which it never connects again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelvisor.hypervisor.dbus import IDENTITY

MONITOR_ID = "accel-monitor"
VMSTATE_ID = "accel-vmstate"
#: How long QEMU waits before it connects its monitor again.
RECONNECT_MS = 1000
#: A domain's socket of a function: the run directory and the domain follow from it.
_OF_FUNCTION = re.compile(r"(/.*)/function/[0-9a-f-]{36}/libvirt-([0-9a-f-]{36})")


@dataclass(frozen=True, slots=True)
class Companions:
    """The paths of one domain's two sockets."""

    bus: str
    monitor: str

    @classmethod
    def of(cls, run: str | Path, domain_uuid: str) -> Companions:
        """``run`` is accelvisord's run directory."""
        stem = f"{run}/domain/libvirt-{domain_uuid}"
        return cls(f"{stem}.bus", f"{stem}.monitor")

    @classmethod
    def beside(cls, function_socket: str) -> Companions | None:
        """Of the domain whose socket of a function this is; None when it is none, and so nobody
        can tell whose domain it is."""
        found = _OF_FUNCTION.fullmatch(function_socket)
        return cls.of(found[1], found[2]) if found else None

    def arguments(self) -> list[tuple[str, str]]:
        """QEMU's arguments, (option, value), in the order in which they need each other."""
        chardev = f"socket,id={MONITOR_ID},path={_escaped(self.monitor)},server=off"
        return [
            ("-chardev", f"{chardev},reconnect-ms={RECONNECT_MS}"),
            ("-object", _json(monitor_object())),
            ("-object", _json(vmstate_object(self.bus))),
        ]

    def commands(self) -> list[tuple[str, dict[str, Any]]]:
        """The same for a QEMU that runs: (QMP command, its arguments), in this order. What it has
        already is refused, in words that :func:`is_there` knows.
        """
        address = {"type": "unix", "data": {"path": self.monitor}}
        backend = {
            "type": "socket",
            "data": {"addr": address, "server": False, "reconnect-ms": RECONNECT_MS},
        }
        return [
            ("chardev-add", {"id": MONITOR_ID, "backend": backend}),
            ("object-add", monitor_object()),
            ("object-add", vmstate_object(self.bus)),
        ]


def farewell() -> list[tuple[str, dict[str, Any]]]:
    """What takes them away again; what is not there is refused."""
    return [
        ("object-del", {"id": VMSTATE_ID}),
        ("object-del", {"id": MONITOR_ID}),
        ("chardev-remove", {"id": MONITOR_ID}),
    ]


def is_there(error_text: str) -> bool:
    """Whether QEMU refused one of :meth:`Companions.commands` because it has that already."""
    return "already exists" in error_text or "duplicate property" in error_text


def monitor_object() -> dict[str, Any]:
    """The private monitor, for ``-object`` and ``object-add``."""
    return {"qom-type": "monitor-qmp", "id": MONITOR_ID, "chardev": MONITOR_ID}


def vmstate_object(bus: str) -> dict[str, Any]:
    """The client of the bus at that path, for ``-object`` and ``object-add``."""
    return {
        "qom-type": "dbus-vmstate",
        "id": VMSTATE_ID,
        "addr": f"unix:path={_percent(bus)}",
        "id-list": IDENTITY,
    }


def is_companion(option: str, value: str) -> bool:
    """Whether an argument of QEMU is one of ours, whatever its path."""
    if option.lstrip("-") == "chardev":
        return f"id={MONITOR_ID}" in value.split(",")
    if option.lstrip("-") != "object":
        return False
    try:
        thing = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(thing, dict) and thing.get("id") in (MONITOR_ID, VMSTATE_ID)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _escaped(path: str) -> str:
    """A comma within an option's value is written twice."""
    return path.replace(",", ",,")


def _percent(path: str) -> str:
    """In a D-Bus address all but these characters are escaped (D-Bus specification)."""
    plain = re.compile(r"[-0-9A-Za-z_/.*]")
    return "".join(c if plain.match(c) else "".join(f"%{b:02x}" for b in c.encode()) for c in path)
