"""A QEMU behind its monitor, as far as hot-plug goes: ports, devices, a guest that lets go or not.

The shape of the replies is that of QEMU 11.1.3 (``query-pci``, ``device_add``, ``device_del``,
``qom-list``, ``qom-get``, ``query-cpus-fast``, and those for objects and character devices).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
GIB = 1 << 30


def _failure(text: str, kind: str = "GenericError") -> dict[str, Any]:
    return {"error": {"class": kind, "desc": text}}


@dataclass
class FakeQemu:
    """``ports``: id -> (base, limit) of the prefetchable window. ``lets_go_after``: how many looks
    at ``/machine/peripheral`` an unplug takes; None for never.
    """

    ports: dict[str, tuple[int, int]]
    window_bytes: int = 256 * MIB
    vendor: str = "GenuineIntel"
    phys_bits: int = 40
    lets_go_after: int | None = 0
    refuse: str = ""
    drivers: tuple[str, ...] = ("vfio-user-pci",)
    devices: dict[str, dict[str, Any]] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)
    #: Ids of character devices and objects.
    others: list[str] = field(default_factory=list)
    listening: bool = True
    sent: list[dict[str, Any]] = field(default_factory=list)

    def monitor(self, text: str) -> str:
        command = json.loads(text)
        self.sent.append(command)
        handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "query-pci": self._query_pci,
            "device_add": self._device_add,
            "device_del": self._device_del,
            "qom-list": self._qom_list,
            "qom-get": self._qom_get,
            "chardev-add": self._chardev_add,
            "chardev-remove": self._remove,
            "object-add": self._object_add,
            "object-del": self._remove,
            "query-cpus-fast": lambda _: {"return": [{"qom-path": "/machine/unattached/cpu"}]},
        }
        reply = handlers[command["execute"]](command.get("arguments", {}))
        return json.dumps({**reply, "id": f"libvirt-{len(self.sent)}"})

    def _query_pci(self, _: dict[str, Any]) -> dict[str, Any]:
        devices = []
        for number, (name, (base, limit)) in enumerate(self.ports.items(), 1):
            behind = [
                self._endpoint(identifier, number)
                for identifier, arguments in self.devices.items()
                if arguments["bus"] == name
            ]
            window = {"base": base, "limit": limit}
            bus = {"number": 0, "secondary": number, "prefetchable_range": window}
            bridge: dict[str, Any] = {"bus": bus}
            if behind:
                bridge["devices"] = behind
            devices.append(
                {"bus": 0, "slot": number, "function": 0, "qdev_id": name, "regions": []}
                | {"pci_bridge": bridge}
            )
        host = {"bus": 0, "slot": 0, "function": 0, "qdev_id": "", "regions": []}
        return {"return": [{"bus": 0, "devices": [host, *devices]}]}

    def _endpoint(self, identifier: str, bus: int) -> dict[str, Any]:
        registers = {"bar": 0, "type": "memory", "size": 65536, "prefetch": False}
        window = {"bar": 2, "type": "memory", "size": self.window_bytes, "prefetch": True}
        return {
            "bus": bus,
            "slot": 0,
            "function": 0,
            "qdev_id": identifier,
            "regions": [registers | {"mem_type_64": False}, window | {"mem_type_64": True}],
        }

    def _device_add(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["driver"] not in self.drivers:
            name = arguments["driver"]
            return _failure(f"'{name}' is not a valid device model name", "DeviceNotFound")
        if arguments["id"] in self.devices:
            return _failure(f"Duplicate device ID '{arguments['id']}'")
        if self.refuse:
            return _failure(self.refuse)
        self.devices[arguments["id"]] = arguments
        return {"return": {}}

    def _chardev_add(self, arguments: dict[str, Any]) -> dict[str, Any]:
        name = f"chardev:{arguments['id']}"
        if name in self.others:
            return _failure(f"Chardev with id '{arguments['id']}' already exists")
        self.others.append(name)
        return {"return": {}}

    def _object_add(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["id"] in self.others:
            return _failure(
                f"attempt to add duplicate property '{arguments['id']}' to object"
                " (type 'container')"
            )
        if arguments["qom-type"] == "dbus-vmstate" and not self.listening:
            return _failure("failed to connect to DBus: 'Could not connect: Connection refused'")
        self.others.append(arguments["id"])
        return {"return": {}}

    def _remove(self, arguments: dict[str, Any]) -> dict[str, Any]:
        name = arguments["id"]
        if self.sent[-1]["execute"] == "chardev-remove":
            name = f"chardev:{name}"
        if name not in self.others:
            return _failure(f"object '{name}' not found")
        self.others.remove(name)
        return {"return": {}}

    def _device_del(self, arguments: dict[str, Any]) -> dict[str, Any]:
        identifier = arguments["id"]
        if identifier not in self.devices:
            return _failure(f"Device '{identifier}' not found", "DeviceNotFound")
        if identifier in self.leaving:
            return _failure(f"Device {identifier} is already in the process of unplug")
        if self.lets_go_after is not None:
            self.leaving[identifier] = self.lets_go_after
        return {"return": {}}

    def _qom_list(self, _: dict[str, Any]) -> dict[str, Any]:
        for identifier, looks in list(self.leaving.items()):
            if looks == 0:
                del self.leaving[identifier], self.devices[identifier]
            else:
                self.leaving[identifier] = looks - 1
        names = [{"name": "type", "type": "string"}]
        names += [{"name": n, "type": "child<x>"} for n in (*self.ports, *self.devices)]
        return {"return": names}

    def _qom_get(self, arguments: dict[str, Any]) -> dict[str, Any]:
        values = {"vendor": self.vendor, "phys-bits": self.phys_bits}
        return {"return": values[arguments["property"]]}
