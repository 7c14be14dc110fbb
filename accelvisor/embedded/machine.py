"""The part of a VM that is not its guest: what QEMU says and answers while it starts, saves, loads.

It connects to accelvisord's two sockets of a domain as QEMU does: the private monitor, where it is
asked (QMP), and the bus, where it asks (D-Bus). Only what accelvisord asks of a QEMU is answered.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from jeepney import DBusAddress, MessageType, new_method_call
from jeepney.io.blocking import DBusConnection, open_dbus_connection

from accelvisor.errors import AccelvisorError, ConflictError, DeadlineError, UnavailableError
from accelvisor.hypervisor.companions import Companions
from accelvisor.hypervisor.xml import device_id, port_id
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.protocol import PciRegion

_NAME = "org.qemu.VMState1"
_BUS = DBusAddress("/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.DBus")
_PORT_IO = re.compile(r"([io]) /([bhw]) (0x[0-9a-f]+)(?: (0x[0-9a-f]+))?")
_WIDTHS = {"b": 1, "h": 2, "w": 4}
_ADDRESS, _DATA = 0xCF8, 0xCFC
#: Longer than accelvisord may take, as QEMU's own.
_PATIENCE_S = 25.0


class Ports:
    """Configuration space through ports 0xcf8 and 0xcfc: each function behind a root port.

    Args:
        clients: function UUID -> connection to it; in this order they stand in slots.
    """

    def __init__(self, clients: Mapping[str, Client]) -> None:
        self._clients = dict(clients)
        self._slots = {uuid: slot for slot, uuid in enumerate(clients, 3)}
        self._numbers = dict.fromkeys(self._slots.values(), 0)
        self._latch = 0

    def out(self, port: int, width: int, value: int) -> None:
        """Write a port."""
        if port == _ADDRESS:
            self._latch = value
            return
        slot, client, register = self._where(port)
        if client is not None:
            client.region_write(PciRegion.CONFIG, register, value.to_bytes(width, "little"))
        elif slot in self._numbers and register == 0x18:
            self._numbers[slot] = value

    def into(self, port: int, width: int) -> int:
        """Read a port."""
        if port == _ADDRESS:
            return self._latch
        slot, client, register = self._where(port)
        if client is not None:
            raw = client.region_read(PciRegion.CONFIG, register, width)
            return int.from_bytes(raw, "little")
        return self._numbers.get(slot, 0) if register == 0x18 else 0xFFFF_FFFF

    def _where(self, port: int) -> tuple[int, Client | None, int]:
        """(slot on bus 0, the function's connection or None, register)."""
        bus, slot = self._latch >> 16 & 0xFF, self._latch >> 11 & 0x1F
        register = (self._latch & 0xFC) + (port - _DATA)
        if bus == 0:
            return slot, None, register
        for uuid, where in self._slots.items():
            if self._numbers[where] >> 8 & 0xFF == bus:
                return where, self._clients[uuid], register
        return -1, None, register

    def buses(self) -> list[dict[str, Any]]:
        """What ``query-pci`` answers."""
        devices = [
            {
                "bus": 0,
                "slot": slot,
                "function": 0,
                "qdev_id": port_id(uuid),
                "pci_bridge": {
                    "bus": {"number": 0, "secondary": 0, "subordinate": 0},
                    "devices": [
                        {"bus": 0, "slot": 0, "function": 0, "qdev_id": device_id(uuid),
                         "regions": []}
                    ],
                },
                "regions": [],
            }
            for uuid, slot in self._slots.items()
        ]  # fmt: skip
        return [{"bus": 0, "devices": devices}]


class Machine:
    """One QEMU. Threads of its own answer the monitor.

    Args:
        run: accelvisord's run directory.
        clients: function UUID -> connection to it.
        running: its guest runs; False: it waits for an incoming VM.
    """

    def __init__(self, run: str, domain: str, clients: Mapping[str, Client], running: bool) -> None:
        self._paths = Companions.of(run, domain)
        self._ports = Ports(clients)
        self.running = running
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._monitor: socket.socket | None = None
        self._bus: DBusConnection | None = None
        self._stale = False
        self._connect_bus()
        self._thread = threading.Thread(target=self._serve, name="monitor", daemon=True)
        self._thread.start()

    @property
    def attached(self) -> bool:
        """Whether accelvisord has both connections; after its restart it asks for the bus anew."""
        return self._monitor is not None and self._bus is not None and not self._stale

    # --- what a VM's life says --------------------------------------------------------------------

    def stop(self) -> None:
        """The guest stops."""
        self.running = False
        self._event("STOP")

    def resume(self) -> None:
        """The guest runs (again)."""
        self.running = True
        self._event("RESUME")

    def close(self) -> None:
        """QEMU ends."""
        self._ended.set()
        with self._lock:
            if self._monitor is not None:
                with suppress(OSError):
                    self._monitor.shutdown(socket.SHUT_RDWR)
            if self._bus is not None:
                self._bus.close()
        self._thread.join()

    # --- the bus: this side asks ------------------------------------------------------------------

    def save(self) -> bytes:
        """What QEMU's stream carries for accelvisord; the guest has stopped.

        Raises:
            ConflictError: ``vm-rolled-back``: accelvisord has said no.
        """
        return bytes(self._call(self._owner(), "Save")[0])

    def load(self, token: bytes) -> None:
        """Give what came in QEMU's stream. ConflictError ``vm-rolled-back``."""
        self._call(self._owner(), "Load", "ay", (token,))

    def _owner(self) -> str:
        owners = self._call(None, "ListQueuedOwners", "s", (_NAME,))[0]
        if not owners:
            raise ConflictError(
                "accelvisord says no to saving this VM now", code="vm-rolled-back", where="embedded"
            )
        return str(owners[0])

    def _call(self, owner: str | None, method: str, signature: str = "", body: Any = ()) -> Any:
        where = _BUS
        if owner is not None:
            where = DBusAddress("/org/qemu/VMState1", bus_name=owner, interface=_NAME)
        if self._bus is None:
            raise UnavailableError("there is no bus", code="vm-bus", where="embedded")
        try:
            reply = self._bus.send_and_get_reply(
                new_method_call(where, method, signature or None, body), timeout=_PATIENCE_S
            )
        except TimeoutError:
            raise DeadlineError(f"no answer to {method}", code="vm-bus", where="embedded") from None
        except (OSError, EOFError) as error:
            raise UnavailableError(
                f"the bus went: {error}", code="vm-bus", where="embedded"
            ) from error
        if reply.header.message_type is MessageType.error:
            raise ConflictError(
                f"{method}: {reply.body[0] if reply.body else 'an error'}",
                code="vm-rolled-back",
                where="embedded",
            )
        return reply.body

    def _connect_bus(self) -> None:
        with suppress(OSError):
            self._bus = open_dbus_connection(f"unix:path={self._paths.bus}")
            self._stale = False

    # --- the monitor: this side is asked ----------------------------------------------------------

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.connect(self._paths.monitor)
                    with self._lock:
                        self._monitor = sock
                    self._answer(sock)
            except OSError:
                pass
            with self._lock:
                self._monitor = None
                self._stale = True  # the same daemon served the bus
            self._ended.wait(0.1)

    def _answer(self, sock: socket.socket) -> None:
        version = {"qemu": {"major": 11, "minor": 1, "micro": 3}, "package": "embedded"}
        _send(sock, {"QMP": {"version": version, "capabilities": []}})
        for line in sock.makefile("rb"):
            request = json.loads(line)
            try:
                value = self._commands()[request["execute"]](request.get("arguments", {}))
                answer: dict[str, Any] = {"return": value}
            except KeyError:
                answer = {"error": {"class": "CommandNotFound", "desc": request["execute"]}}
            except AccelvisorError as error:
                answer = {"error": {"class": "GenericError", "desc": error.message}}
            _send(sock, {**answer, "id": request.get("id")})

    def _commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            "qmp_capabilities": lambda _: {},
            "query-status": lambda _: {
                "running": self.running, "status": "running" if self.running else "inmigrate",
            },
            "query-migrate-capabilities": lambda _: [],
            "query-pci": lambda _: self._ports.buses(),
            "qom-get": lambda a: f"/machine/peripheral/{_port_of(a['path'])}",
            "human-monitor-command": lambda a: self._human(a["command-line"]),
            "object-del": lambda _: {},
            "object-add": lambda _: self._reconnect(),
        }  # fmt: skip

    def _human(self, line: str) -> str:
        match = _PORT_IO.fullmatch(line)
        if match is None:
            return f"unknown command: {line}\r\n"
        way, width, port = match[1], _WIDTHS[match[2]], int(match[3], 16)
        if way == "o":
            self._ports.out(port, width, int(match[4], 16))
            return ""
        return f"portl[{match[3]}] = {self._ports.into(port, width):#x}\r\n"

    def _reconnect(self) -> dict[str, Any]:
        if self._bus is not None:
            self._bus.close()
            self._bus = None
        self._connect_bus()
        return {}

    def _event(self, name: str) -> None:
        stamp = {"seconds": 0, "microseconds": 0}
        with self._lock:
            if self._monitor is not None:
                with suppress(OSError):
                    _send(self._monitor, {"event": name, "data": {}, "timestamp": stamp})


def _port_of(path: str) -> str:
    return port_id(path.rpartition("/accel-")[2])


def _send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\r\n")
