"""Hot-plug decisions from what QEMU says: which root port is free, does a function fit behind it.

Pure functions over the reply of the monitor's ``query-pci`` (QEMU: qapi/pci.json). libvirt does not
know the devices that this room plugs, so QEMU alone can tell which port is in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from accelvisor.errors import (
    CapacityError,
    ConflictError,
    NotFoundError,
    SystemFailure,
    UnavailableError,
)


def pci_devices(buses: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Every device of a ``query-pci`` reply, those behind bridges included."""
    for bus in buses:
        for device in bus.get("devices", ()):
            yield device
            bridge = device.get("pci_bridge")
            if bridge is not None:
                yield from pci_devices([bridge])


def find_device(buses: Sequence[Any], identifier: str) -> dict[str, Any] | None:
    """The device with that QEMU id."""
    return next((d for d in pci_devices(buses) if d.get("qdev_id") == identifier), None)


def address(device: dict[str, Any]) -> str:
    """``bb:ss.f`` as QEMU numbers buses; before the guest has numbered them, bus is 00."""
    return f"{device['bus']:02x}:{device['slot']:02x}.{device['function']:x}"


def free_port(buses: Sequence[Any], candidates: Sequence[str]) -> str:
    """The first of ``candidates`` (ids of root ports) with nothing behind it.

    CapacityError ``no-hotplug-port`` when there is none.
    """
    present = 0
    for candidate in candidates:
        port = find_device(buses, candidate)
        if port is None or "pci_bridge" not in port:
            continue
        present += 1
        if not port["pci_bridge"].get("devices"):
            return candidate
    raise CapacityError(
        f"no PCIe root port of the running domain is free ({present} are in use)"
        if present
        else "the running domain has no PCIe root port",
        code="no-hotplug-port",
        where="hot-plug",
        hint="attach with --persistent only and power the domain off and on,"
        " or give it more ports (accelctl vm prepare --hotplug-ports)",
    )


#: An AMD system keeps this range for HyperTransport; firmware does not always keep out of it.
_HYPERTRANSPORT = (0xFD_0000_0000, 0xFF_FFFF_FFFF)


@dataclass(frozen=True, slots=True)
class Cpu:
    """What a guest's address map depends on: CPUID's vendor, and bits of a physical address."""

    vendor: str
    address_bits: int


def window_problem(buses: Sequence[Any], port: str, identifier: str, cpu: Cpu) -> str | None:
    """Why the guest can give the plugged device's 64-bit prefetchable BARs no address behind this
    port; None when it fits, or when no firmware has set the port up yet.
    """
    device = find_device(buses, identifier)
    if device is None:
        return None
    need = sum(
        region["size"]
        for region in device.get("regions", ())
        if region.get("type") == "memory" and region.get("prefetch") and region.get("mem_type_64")
    )
    return port_problem(buses, port, need, cpu)


def port_problem(buses: Sequence[Any], port: str, need: int, cpu: Cpu) -> str | None:
    """Why ``need`` bytes of 64-bit prefetchable BARs get no address behind this port.

    A running guest keeps the windows that its firmware gave to a port, so a BAR that does not fit
    stays without an address and the driver finds no device; nothing would tell. None when it fits,
    or when no firmware has set the port up yet.
    """
    bridge = find_device(buses, port)
    if bridge is None or need == 0:
        return None
    window = bridge["pci_bridge"]["bus"]["prefetchable_range"]
    base, limit = window["base"], window["limit"]
    if base == 0:
        return None
    have = max(limit - base + 1, 0)
    if need > have:
        return f"its windows need {need >> 20} MiB, the port {port} forwards {have >> 20} MiB"
    # QEMU marks the range as reserved for such a CPU, SeaBIOS puts windows at the top of 40 bits
    # of address space all the same, and Linux then gives out no address there.
    reserved = cpu.vendor == "AuthenticAMD" and cpu.address_bits >= 40
    if reserved and base <= _HYPERTRANSPORT[1] and limit >= _HYPERTRANSPORT[0]:
        return (
            f"the firmware put the window of port {port} into the addresses that an AMD processor"
            " reserves (HyperTransport, from 0xfd00000000), where the guest gives out none"
        )
    return None


def device_add_failed(identifier: str, error: dict[str, Any]) -> NoReturn:
    """Raise what QEMU's refusal of ``device_add`` means."""
    text = str(error.get("desc", error))
    if "uplicate" in text and "ID" in text:
        raise ConflictError(
            f"the running domain has a device {identifier} already",
            code="function-attached",
            where="hot-plug",
        )
    if "is not a valid device model name" in text:
        raise UnavailableError(
            "this QEMU has no vfio-user-pci",
            code="no-vfio-user",
            where="hot-plug",
            hint="QEMU 10.1 or newer is needed (accelctl doctor)",
        )
    raise SystemFailure(
        f"QEMU did not take the device: {text}",
        code="device-add-failed",
        where="hot-plug",
        hint="accelctl function show tells whether the function is ready",
    )


def device_del_failed(identifier: str, error: dict[str, Any]) -> None:
    """Raise what QEMU's refusal of ``device_del`` means; return when an unplug is under way."""
    text = str(error.get("desc", error))
    if error.get("class") == "DeviceNotFound":
        raise NotFoundError(
            f"the running domain has no device {identifier}",
            code="function-not-attached",
            where="hot-plug",
        )
    if "in the process of unplug" in text:
        return
    raise SystemFailure(
        f"QEMU did not ask the guest to let go: {text}", code="device-del-failed", where="hot-plug"
    )
