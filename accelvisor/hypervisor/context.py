"""The PCI context of a function in a QEMU that waits for an incoming VM.

QEMU does not migrate a vfio-user device: the destination would go on with BARs that have no address
and with MSI off. So the registers that QEMU keeps itself are written before the guest runs, through
the ports 0xcf8 and 0xcfc as firmware would (PCI Local Bus 3.0, 3.2.2.3.2), by the human monitor's
``o``. MSI-X could not be restored so: its table lies in a BAR.

The function stands behind a root port, and a port passes on what is for its secondary bus. That
number comes with the port's own state at the end of the migration; until then all ports have none,
so one is lent to the port for the time of the writes. The windows of the port are not needed: what
the guest reaches is decided when QEMU restores them. Nothing here depends on how often it is done.

:func:`plan` and :class:`Place` are pure; :func:`restore` carries them out.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from accelvisor.errors import (
    ConflictError,
    NotFoundError,
    StateError,
    SystemFailure,
)
from accelvisor.hypervisor import hotplug
from accelvisor.hypervisor.xml import device_id

CONFIG_BYTES = 4096

_ADDRESS, _DATA = 0xCF8, 0xCFC
_COMMAND, _BARS, _CAPABILITIES, _LINE = 0x04, 0x10, 0x34, 0x3C
_PM, _MSI = 0x01, 0x05
#: What the two ports reach of a configuration space.
_PORTS_BYTES = 256
_BUSES = 0x18  # of a bridge: primary, secondary, subordinate, latency timer
#: I/O, memory and bus master enable, parity, SERR, and INTx disable: what a guest may set.
_COMMAND_BITS = 0x0547
#: Formats of the human monitor's ``i`` and ``o``; a number after the slash would be a count.
_FORMATS = {1: "b", 2: "h", 4: "w"}


class Monitor(Protocol):
    """What of :class:`accelvisor.hypervisor.private.Private` is needed."""

    async def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any: ...

    async def human(self, line: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Write:
    """One register: ``width`` bytes, and which bits of it are compared when it is read back."""

    register: int
    width: int
    value: int
    compared: int


def plan(config: bytes) -> tuple[Write, ...]:
    """What to write so that QEMU's share of the configuration space becomes that of ``config``.

    The device is switched off first and on last, so that no BAR is ever decoded at half an address
    and MSI never goes where only half was written.

    Args:
        config: all of the function's configuration space (CONFIG_BYTES) at the source.

    StateError (``context-config``): that can't be one of a function.
    """
    if len(config) != CONFIG_BYTES:
        _refuse(f"{len(config)} bytes instead of {CONFIG_BYTES}")
    command = _u16(config, _COMMAND) & _COMMAND_BITS
    capabilities = dict(_capabilities(config))
    msi = capabilities.get(_MSI)
    if msi is None:
        _refuse("it has no MSI")
    control = _u16(config, msi + 2)
    steps = [
        Write(_COMMAND, 2, 0, 0),
        Write(msi + 2, 2, control & ~1, 0),
        *(Write(at, 4, _u32(config, at), 0xFFFF_FFF0) for at in range(_BARS, _BARS + 24, 4)),
        Write(_LINE, 1, config[_LINE], 0),
        *_message(config, msi, control),
        Write(msi + 2, 2, control, 0x0071),
        Write(_COMMAND, 2, command, _COMMAND_BITS),
    ]
    if _PM in capabilities:
        at = capabilities[_PM] + 4
        steps.append(Write(at, 2, _u16(config, at) & 3, 3))
    if any(step.register + step.width > _PORTS_BYTES for step in steps):
        _refuse("a capability does not end")
    return tuple(steps)


def with_bars(config: bytes, buses: Sequence[Any], function: str) -> bytes:
    """``config`` with the addresses that QEMU's BARs have, by a reply to ``query-pci`` at the
    source.

    A function-level reset clears the function's own; QEMU's stay, the guest reads QEMU's, and so
    Linux does not write them again. A BAR without an address (decoding is off) is left alone.
    """
    if len(config) != CONFIG_BYTES:
        _refuse(f"{len(config)} bytes instead of {CONFIG_BYTES}")
    device = hotplug.find_device(buses, device_id(function))
    found = bytearray(config)
    for region in device.get("regions", ()) if device is not None else ():
        address, at = region.get("address", -1), _BARS + 4 * region["bar"]
        if region.get("type") != "memory" or address <= 0 or not 0 <= region["bar"] < 6:
            continue
        wide = bool(region.get("mem_type_64"))
        struct.pack_into("<I", found, at, address & 0xFFFF_FFF0 | _u32(config, at) & 0xF)
        if wide:
            struct.pack_into("<I", found, at + 4, address >> 32)
    return bytes(found)


def _message(config: bytes, msi: int, control: int) -> Iterator[Write]:
    """Where an interrupt goes, and what it says."""
    wide, masks = bool(control & 1 << 7), bool(control & 1 << 8)
    yield Write(msi + 4, 4, _u32(config, msi + 4), 0xFFFF_FFFC)
    if wide:
        yield Write(msi + 8, 4, _u32(config, msi + 8), 0xFFFF_FFFF)
    data = msi + (12 if wide else 8)
    yield Write(data, 2, _u16(config, data), 0xFFFF)
    if masks:
        yield Write(data + 4, 4, _u32(config, data + 4), 0)


def _capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """(id, offset) of each capability; a list that runs in a circle is cut."""
    at = config[_CAPABILITIES] & ~3
    for _ in range(48):
        if at < 0x40:
            return
        yield config[at], at
        at = config[at + 1] & ~3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a function stands: behind this port (on bus 0), as device 0, function 0.

    Attributes:
        slot: of the port.
        function: of the port.
        free: a bus number that no bridge has, to lend to the port.
    """

    slot: int
    function: int
    free: int

    @classmethod
    def find(cls, buses: Sequence[Any], port: str) -> Place:
        """Within a reply to ``query-pci``; ``port`` is the root port's id.

        NotFoundError (``context-port``): it is not on the root bus.
        """
        found = next(
            (
                device
                for bus in buses
                for device in bus.get("devices", ())
                if device.get("qdev_id") == port and device.get("bus") == 0
            ),
            None,
        )
        if found is None:
            raise NotFoundError(
                f"QEMU has no root port {port!r} on its first bus",
                code="context-port",
                where="context",
            )
        used = {bus.get("bus", 0) for bus in buses}
        for device in hotplug.pci_devices(buses):
            numbers = device.get("pci_bridge", {}).get("bus", {})
            first, last = numbers.get("secondary", 0), numbers.get("subordinate", 0)
            used.update(range(first, max(first, last) + 1))
        free = next((number for number in range(255, 0, -1) if number not in used), None)
        if free is None:
            raise ConflictError("no bus number is free", code="context-port", where="context")
        return cls(found["slot"], found["function"], free)

    def of_port(self, register: int) -> int:
        """What selects a register of the port at port 0xcf8."""
        return _select(0, self.slot, self.function, register)


def _select(bus: int, slot: int, function: int, register: int) -> int:
    return 1 << 31 | bus << 16 | slot << 11 | function << 8 | register & 0xFC


async def observe(monitor: Monitor, function: str, config: bytes) -> bytes:
    """:func:`with_bars` by the source's monitor, which answers until QEMU saves its state."""
    return with_bars(config, await monitor.execute("query-pci"), function)


async def restore(monitor: Monitor, function: str, config: bytes) -> None:
    """Give the waiting QEMU's device of this function (a UUID) the context ``config``, and read it
    back. Only while that VM does not run. Repeating it, also with another context, is fine.

    StateError ``context-config``, NotFoundError and ConflictError ``context-port``; SystemFailure
    ``context-restore`` when the device does not keep what was written; and what the monitor raises.
    """
    steps = plan(config)
    path = f"/machine/peripheral/{device_id(function)}"
    parent = await monitor.execute("qom-get", {"path": path, "property": "parent_bus"})
    port = str(parent).rstrip("/").rpartition("/")[2]
    place = Place.find(await monitor.execute("query-pci"), port)
    latch = await _read(monitor, _ADDRESS, 4)
    try:
        await _behind(monitor, place, steps)
    finally:
        # The guest may stand between its write to one port and that to the other.
        await _write(monitor, _ADDRESS, 4, latch)


async def _behind(monitor: Monitor, place: Place, steps: Sequence[Write]) -> None:
    """Carry out the steps on the device behind the port."""
    await _write(monitor, _ADDRESS, 4, place.of_port(_BUSES))
    numbers = await _read(monitor, _DATA, 4)
    bus = numbers >> 8 & 0xFF
    lent = bus == 0
    if lent:
        bus = place.free
        await _write(monitor, _DATA, 4, numbers & 0xFF00_00FF | bus << 8 | bus << 16)
    try:
        for step in steps:
            await _write(monitor, _ADDRESS, 4, _select(bus, 0, 0, step.register))
            await _write(monitor, _DATA + step.register % 4, step.width, step.value)
        await _compare(monitor, bus, steps)
    finally:
        if lent:
            await _write(monitor, _ADDRESS, 4, place.of_port(_BUSES))
            await _write(monitor, _DATA, 4, numbers)


async def _compare(monitor: Monitor, bus: int, steps: Sequence[Write]) -> None:
    """Read back what the last write to each register left."""
    for step in {step.register: step for step in steps}.values():
        if not step.compared:
            continue
        await _write(monitor, _ADDRESS, 4, _select(bus, 0, 0, step.register))
        found = await _read(monitor, _DATA + step.register % 4, step.width)
        if (found ^ step.value) & step.compared:
            raise SystemFailure(
                f"register {step.register:#x} reads {found:#x} after {step.value:#x} was written",
                code="context-restore",
                where="context",
                hint="the function at the destination is not like the one at the source",
            )


async def _write(monitor: Monitor, port: int, width: int, value: int) -> None:
    said = await monitor.human(f"o /{_FORMATS[width]} {port:#x} {value:#x}")
    if said.strip():
        raise SystemFailure(f"QEMU's o: {said.strip()}", code="context-restore", where="context")


async def _read(monitor: Monitor, port: int, width: int) -> int:
    said = await monitor.human(f"i /{_FORMATS[width]} {port:#x}")
    found = re.search(r"= (0x[0-9a-fA-F]+)\s*$", said)
    if found is None:
        raise SystemFailure(f"QEMU's i: {said.strip()}", code="context-restore", where="context")
    return int(found[1], 16)


def _u16(config: bytes, at: int) -> int:
    return int(struct.unpack_from("<H", config, at)[0])


def _u32(config: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", config, at)[0])


def _refuse(text: str) -> NoReturn:
    raise StateError(
        f"this is no function's configuration space: {text}", code="context-config", where="context"
    )
